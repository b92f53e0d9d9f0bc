#!/usr/bin/env bash
# Linters and tests, on a machine without an accelerator. Makes the environment .venv if there is none.
#
#   bash scripts/test.sh core     linters, and the tests of the algorithm that start no other Python: a minute
#   bash scripts/test.sh          linters, and all tests but those marked nightly
#   bash scripts/test.sh --all    everything: all tests, GTPO in TRL and in OpenRLHF, and the patches for verl
#
# Further arguments go to pytest: bash scripts/test.sh -m "" runs all tests, bash scripts/test.sh -m "not e2e" none that
# starts verl's trainer.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

selected=(-m "not nightly") extras=(vllm)
case ${1:-} in
    core)
        shift
        selected=(
            -m "not process" tests/algorithm tests/run
            tests/verl_plugin/test_{batch_fields,estimator,loss,state,training_monitor}_on_cpu.py
        )
        extras=()
        ;;
    --all)
        shift
        all=1 selected=()
        export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-nightly}
        ;;
esac
bash scripts/setup_cpu.sh "${extras[@]}"
source .venv/bin/activate

ruff check .
ruff format --check .
# Its long report is printed only where a contract is broken.
lint-imports --no-logo >/dev/null || lint-imports --no-logo
git ls-files -z '*.sh' .ci/run | xargs -0 shellcheck
mypy &
# One worker takes the end-to-end tests, the other the rest: see tests/conftest.py.
OMP_NUM_THREADS=1 pytest -q -n 2 --durations=10 "${selected[@]}" "$@" || status=$?
wait $! || status=1
[ -n "${all:-}" ] || exit "${status:-0}"

bash scripts/check_trl.sh || status=1
bash scripts/check_openrlhf.sh || status=1
bash patches/check.sh || status=1
exit "${status:-0}"
