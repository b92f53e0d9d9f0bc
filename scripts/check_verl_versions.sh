#!/usr/bin/env bash
# Check GTPO (arXiv:2508.03772) in every verl that it supports, each in an environment of its own, without an accelerator.
#
#   bash scripts/check_verl_versions.sh                  all of them
#   bash scripts/check_verl_versions.sh 0.9.0            this one only; newest is the newest on PyPI
#   VERL_MAIN=FOLDER bash scripts/check_verl_versions.sh main      a checkout of verl
#
# In each verl and each of its trainers: what `gtpo-verl check` says; the tests that go through verl's functions; the
# advantages of 100 random batches, compared bit for bit with those of every other trainer; and a run of verl's trainer,
# saved after its first step and resumed for a second. Leaves .cache/verl-versions/ with all logs, and prints a table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- 0.9.0 0.9.1
out=$PWD/.cache/verl-versions
mkdir -p "$out"
rm -f "$out"/*.pt
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_worker_niceness=0

# run VERSION TRAINER STEPS: train up to this step, from the last checkpoint if there is one.
run() {
    local use_v1=True
    [ "$2" = v1 ] || use_v1=False
    "$python" -m recipes run --out "$out/$1-$2" --stall 120 --extend -- \
        "$python" -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo_cpu task_dir="$out/task-$1" \
        data.train_batch_size=2 trainer.default_local_dir="$out/$1-$2/checkpoints" trainer.save_freq=1 \
        trainer.total_training_steps="$3" trainer.use_v1="$use_v1"
}

# train VERSION TRAINER: the second step is a run of its own, resumed from the checkpoint of the first.
train() {
    rm -rf "${out:?}/$1-$2"
    run "$1" "$2" 1
    run "$1" "$2" 2
    "$python" - "$out/$1-$2/metrics.jsonl" <<'PYTHON'
import json, math, sys
first, second = (json.loads(line) for line in open(sys.argv[1]))
assert (first["step"], second["step"]) == (1, 2)
assert second["gtpo/entropy/initial"] == first["gtpo/entropy/initial"], "the resumed run kept no initial entropy"
assert math.isclose(first["gtpo/entropy/initial"], first["gtpo/entropy/mean"], rel_tol=1e-5)
assert all(step["gtpo/conflict/token_frac"] > 0 and step["actor/grad_norm"] > 0 for step in (first, second))
PYTHON
}

# check NAME COMMAND…: run the command with its output in NAME.log, and set `result`; COMMAND may be `train`.
failed=0
check() {
    local log=$out/$1.log
    result=ok
    if ! timeout --kill-after=30 900 bash -euo pipefail -c '"$@"' check "${@:2}" >"$log" 2>&1; then
        result=FAILED
        failed=1
        echo "--- $log" && tail -n 40 "$log"
    fi
}
export -f run train
export out

rows=()
for version in "$@"; do
    VERL=$version bash scripts/setup_cpu.sh
    export python=$PWD/.venv-$version/bin/python
    [ "$version" != 0.9.1 ] || python=$PWD/.venv/bin/python
    check "$version-registration" "$python" -m gtpo_verl check
    registered=$result
    check "$version-tests" "$python" -m pytest -q -p no:cacheprovider \
        tests/verl_plugin/test_{batch_fields,compose,estimator,hooks,loss,compat,preflight,state}_on_cpu.py
    tested="$result, $(tail -n 1 "$out/$version-tests.log" | sed 's/ in .*//')"
    check "$version-task" "$python" -m recipes make-task arithmetic --out "$out/task-$version" --seed 1
    for trainer in legacy v1; do
        check "$version-$trainer-numbers" "$python" scripts/same_numbers.py compute "$out/$version-$trainer.pt" "$trainer"
        computed=$result
        check "$version-$trainer-train" train "$version" "$trainer"
        rows+=("| $version | $trainer | $registered | $tested | $computed | $result |")
        echo "${rows[-1]}"
    done
done

printf '\n| verl | trainer | registered | tests | advantages | trained, resumed |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
echo
files=()
for version in "$@"; do files+=("$out/$version"-*.pt); done
if [ ${#files[@]} -gt 1 ]; then
    "$python" scripts/same_numbers.py compare "${files[@]}" | tee "$out/same" || failed=1
    grep -q "^${#files[@]} sources" "$out/same" || failed=1    # or one verl was compared with itself
fi
exit $failed
