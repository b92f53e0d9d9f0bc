"""Move compute_advantage and its neighbours within a checkout of verl, as verl's open pull request #7237 does.

python patches/apply_7237.py FOLDER; unused imports are left for ruff to remove.
"""

import ast
import re
import sys
from pathlib import Path

NAMES = ("apply_kl_penalty", "compute_advantage", "compute_response_mask", "compute_spec_decode_metrics")
OLD, NEW = "verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.trainer_utils"

root = Path(sys.argv[1])
old, new = (root / f"{module.replace('.', '/')}.py" for module in (OLD, NEW))
lines = old.read_text().splitlines(keepends=True)
body = ast.parse("".join(lines)).body
functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in NAMES]
assert len(functions) == len(NAMES) and not new.exists(), f"{old} is not as before #7237"
first = functions[0].lineno - 1
moved = "\n\n".join("".join(lines[f.lineno - 1 : f.end_lineno]) for f in functions)
new.write_text("".join(lines[:first]) + moved)
for function in reversed(functions):
    del lines[function.lineno - 1 : function.end_lineno]
old.write_text("".join([*lines[:first], f"from {NEW} import {', '.join(NAMES)}\n", *lines[first:]]))


def move(found: re.Match) -> str:
    names = found[1].split(", ")
    groups = {OLD: [n for n in names if n not in NAMES], NEW: [n for n in names if n in NAMES]}
    return "\n".join(f"from {module} import {', '.join(group)}" for module, group in groups.items() if group)


for path in root.glob("verl/**/*.py"):
    if path != new and OLD in (text := path.read_text()):
        path.write_text(re.sub(rf"^from {re.escape(OLD)} import (\w.*)$", move, text, flags=re.M))
