#!/usr/bin/env bash
# All tests and linters, on a machine without an accelerator. Makes the environment .venv if there is none.
#
#   bash scripts/test.sh                        everything, the end-to-end runs included
#   bash scripts/test.sh -m "not e2e"           arguments go to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_cpu.sh vllm
source .venv/bin/activate

ruff check .
ruff format --check .
mypy
git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck
OMP_NUM_THREADS=1 pytest -q -n 2 --durations=10 "$@"
