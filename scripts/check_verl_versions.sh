#!/usr/bin/env bash
# Check GTPO (arXiv:2508.03772) in every verl that it supports, each in an environment of its own, without an accelerator.
#
#   bash scripts/check_verl_versions.sh                  all four: 17 minutes on two cores, installation included
#   bash scripts/check_verl_versions.sh 0.9.0 0.9.1      these only
#   VERL_MAIN=FOLDER bash scripts/check_verl_versions.sh main      a checkout of verl
#
# In each verl and each of its trainers: what `gtpo-verl check` says; the tests that go through verl's functions; the
# advantages of 100 random batches, compared bit for bit with those of every other trainer; and a run of verl's trainer,
# saved after its first step and resumed for a second. Leaves .cache/verl-versions/ with all logs, and prints a table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- 0.7.1 0.8.0 0.9.0 0.9.1
out=$PWD/.cache/verl-versions
mkdir -p "$out"
rm -f "$out"/*.pt
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONWARNINGS=ignore
export VERL_PLATFORM=cpu RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 RAY_worker_niceness=0

# The trainers of a verl, and the overrides that make the CPU recipe use each. 0.7.1 has two kinds of workers.
trainers() {
    case $1 in
        0.7.1) echo legacy legacy_with_engine_workers ;;
        0.8.0) echo legacy ;;
        *) echo legacy v1 ;;
    esac
}
overrides() {
    case $1-$2 in
        0.7.1-legacy | 0.8.0-legacy) echo trainer.device=cuda ~actor_rollout_ref.rollout.seed ;;
        0.7.1-legacy_with_engine_workers)
            echo trainer.device=cuda ~actor_rollout_ref.rollout.seed trainer.use_legacy_worker_impl=disable \
                actor_rollout_ref.actor.fsdp_config.strategy=fsdp2
            ;;
        *-legacy) echo trainer.use_v1=False ;;
        *-v1) echo trainer.use_v1=True ;;
    esac
}

run() { # run VERSION TRAINER STEPS
    local changes
    read -ra changes < <(overrides "$1" "$2")
    "$python" -m gtpo_verl run --out "$out/$1-$2" --stall 120 --extend -- \
        "$python" -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo_cpu task_dir="$out/task-$1" \
        data.train_batch_size=2 trainer.default_local_dir="$out/$1-$2/checkpoints" trainer.save_freq=1 \
        trainer.total_training_steps="$3" "${changes[@]}"
}

# The second step is a run of its own, resumed from the checkpoint of the first.
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

failed=0
check() { # check NAME COMMAND…: sets result
    local log=$out/$1.log
    result=ok
    if ! timeout --kill-after=30 900 bash -euo pipefail -c '"$@"' check "${@:2}" >"$log" 2>&1; then
        result=FAILED
        failed=1
        echo "--- $log" && tail -n 40 "$log"
    fi
}
export -f overrides run train
export out

rows=()
for version in "$@"; do
    VERL=$version bash scripts/setup_cpu.sh
    export python=$PWD/.venv-$version/bin/python
    [ "$version" != 0.9.1 ] || python=$PWD/.venv/bin/python
    case $version in
        # which read no entry points
        0.7.1 | 0.8.0) export VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_plugin,gtpo_verl.cpu.plugin ;;
        *) unset VERL_USE_EXTERNAL_MODULES ;;
    esac
    check "$version-registration" "$python" -m gtpo_verl
    registered=$result
    check "$version-tests" "$python" -m pytest -q -p no:cacheprovider \
        tests/test_loss_on_cpu.py \
        tests/verl_plugin/test_{verl_plugin,v1_trainer,legacy_trainer,preflight,compose}_on_cpu.py
    tested="$result, $(tail -n 1 "$out/$version-tests.log" | sed 's/ in .*//')"
    check "$version-task" "$python" -m gtpo_verl make-task arithmetic --out "$out/task-$version" --seed 1
    for trainer in $(trainers "$version"); do
        check "$version-$trainer-numbers" "$python" scripts/same_numbers.py compute "$out/$version-$trainer.pt" "$trainer"
        computed=$result
        check "$version-$trainer-train" train "$version" "$trainer"
        rows+=("| $version | ${trainer//_/ } | $registered | $tested | $computed | $result |")
        echo "${rows[-1]}"
    done
done

printf '\n| verl | trainer | registered | tests | advantages | trained, resumed |\n|---|---|---|---|---|---|\n'
printf '%s\n' "${rows[@]}"
echo
files=()
for version in "$@"; do files+=("$out/$version"-*.pt); done
[ ${#files[@]} = 1 ] || "$python" scripts/same_numbers.py compare "${files[@]}" || failed=1
exit $failed
