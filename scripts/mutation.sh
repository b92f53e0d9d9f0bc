#!/usr/bin/env bash
# Mutation tests of the files that compute GTPO or watch a run: for each small change to one of them, does a test fail?
#
#   bash scripts/mutation.sh                      all files: 25 minutes of one core
#   bash scripts/mutation.sh conflict loss        these only
#
# Run after scripts/setup_cpu.sh. Leaves .cache/mutation/survivors.diff, and prints a table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- advantage completions conflict token_weights loss config metrics initial_entropy training_monitor series verdict explain watch
cache=$PWD/.cache/mutation
mkdir -p "$cache"
if [ ! -x "$cache/venv/bin/mutmut" ]; then
    .venv/bin/python -m venv "$cache/venv"
    "$cache/venv/bin/pip" install -qq mutmut==3.8.1
fi
.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$cache/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/gtpo.pth"

# A copy, since mutmut passes over decorated functions and runs each test many times over.
rm -rf "$cache/work"
mkdir "$cache/work"
cp -r gtpo_verl tests docs examples recipes studies pyproject.toml README.md "$cache/work"
cd "$cache/work"
"$cache/venv/bin/python" - "$@" <<'PYTHON'
import json, re, sys
from pathlib import Path

modules = {name: str(next(Path("gtpo_verl").rglob(f"{name}.py"), "")) for name in sys.argv[1:]}
if unknown := [name for name, path in modules.items() if not path]:
    sys.exit(f"gtpo_verl has no {', '.join(f'{name}.py' for name in unknown)}")
decorated = re.compile(r"^@(torch.no_grad\(\)|cache)(?: .*)?\ndef (\w+)", re.MULTILINE)
for path in map(Path, modules.values()):
    text = path.read_text()
    applied = (f"\n{function} = {decorator}({function})\n" for decorator, function in decorated.findall(text))
    path.write_text(decorated.sub(r"def \2", text) + "".join(applied))

paths = []
for name in sys.argv[1:]:
    paths += [str(path) for path in Path("tests").rglob(f"test_{name}_on_cpu.py") if path.parts[1] != "e2e"]
settings = {
    "source_paths": ["gtpo_verl"],
    "only_mutate": list(modules.values()),
    "also_copy": ["docs", "examples", "recipes", "studies", "README.md"],
    "pytest_add_cli_args_test_selection": paths,
    "use_git_change_detection": False,
    "timeout_constant": 5,  # of a loop without end
    "timeout_multiplier": 2,
}
with open("pyproject.toml", "a") as file:
    file.write("\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
PYTHON

ulimit -v 16000000  # a loop without end that takes memory
export HYPOTHESIS_PROFILE=mutation OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
"$cache/venv/bin/mutmut" run --max-children 1 >"$cache/log" || { tail -c 2000 "$cache/log"; exit 1; }
"$cache/venv/bin/mutmut" results --all true >"$cache/results"
sed -nE 's/^ *(.*): (survived|no tests)$/\1/p' "$cache/results" |
    xargs -rn 1 "$cache/venv/bin/mutmut" show >"$cache/survivors.diff" 2>/dev/null
awk -F'[.:] *' 'BEGIN { print "| file | changes | noticed |\n|---|---|---|" }
    { changes[$2]++; if (/: (killed|timeout)$/) noticed[$2]++ }
    END { for (name in changes) printf "| %s | %d | %.1f%% |\n", name, changes[name], 100 * noticed[name] / changes[name] }' \
    <(sed -E 's/\.(algorithm|verl_plugin|monitor|run)\././' "$cache/results")
