"""Move compute_advantage and its neighbours within a checkout of verl, as verl's open pull request #7237 does.

python patches/apply_7237.py FOLDER; unused imports are left for ruff to remove.
"""

import ast
import re
import sys
from pathlib import Path

NAMES = ("apply_kl_penalty", "compute_advantage", "compute_response_mask", "compute_spec_decode_metrics")
OLD_MODULE = "verl.trainer.ppo.ray_trainer"
NEW_MODULE = "verl.trainer.ppo.trainer_utils"


def path_of(checkout: Path, module: str) -> Path:
    """Return the file of a module in a checkout."""
    return checkout / f"{module.replace('.', '/')}.py"


def move_functions(old: Path, new: Path) -> None:
    """Write the four functions into the new file, with the old one's imports, and leave an import of them behind."""
    lines = old.read_text().splitlines(keepends=True)
    body = ast.parse("".join(lines)).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
    if len(functions) != len(NAMES) or new.exists():
        sys.exit(f"{old} is not as before #7237")

    # What stands before the first function is the licence and the imports.
    first = functions[0].lineno - 1
    sources = ["".join(lines[function.lineno - 1 : function.end_lineno]) for function in functions]
    new.write_text("".join(lines[:first]) + "\n\n".join(sources))

    # From the last function to the first, so that the numbers of the lines before it still hold.
    for function in reversed(functions):
        del lines[function.lineno - 1 : function.end_lineno]
    lines.insert(first, f"from {NEW_MODULE} import {', '.join(NAMES)}\n")
    old.write_text("".join(lines))


def import_from_new_module(line: re.Match) -> str:
    """Return an import of names from the old module as one import of each module that now has some of them."""
    names = line[1].split(", ")
    stayed = [name for name in names if name not in NAMES]
    moved = [name for name in names if name in NAMES]
    imports = []
    if stayed:
        imports.append(f"from {OLD_MODULE} import {', '.join(stayed)}")
    if moved:
        imports.append(f"from {NEW_MODULE} import {', '.join(moved)}")
    return "\n".join(imports)


def update_imports(checkout: Path, new: Path) -> None:
    """Let every other module of verl import the four functions from where they are now."""
    import_line = re.compile(rf"^from {re.escape(OLD_MODULE)} import (\w.*)$", re.MULTILINE)
    for path in checkout.glob("verl/**/*.py"):
        text = path.read_text()
        if path != new and OLD_MODULE in text:
            path.write_text(import_line.sub(import_from_new_module, text))


if __name__ == "__main__":
    checkout = Path(sys.argv[1])
    new = path_of(checkout, NEW_MODULE)
    move_functions(path_of(checkout, OLD_MODULE), new)
    update_imports(checkout, new)
