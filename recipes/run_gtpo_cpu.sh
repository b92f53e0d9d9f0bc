#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) in verl's real trainer, on a machine without an accelerator.
#
#   bash recipes/run_gtpo_cpu.sh [override…]
#   ALGO=grpo bash recipes/run_gtpo_cpu.sh      the GRPO twin, everything else equal
#   ROLLOUT=vllm bash recipes/run_gtpo_cpu.sh   with vLLM's CPU build as the rollout
#
# A run that was interrupted goes on from its last checkpoint in OUT; remove that folder to begin anew.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_PLATFORM=cpu
source recipes/common.sh                            # ALGO (gtpo | grpo)

# ---- user-adjustable ----
rollout=${ROLLOUT:-hf}                              # hf | vllm
seed=${SEED:-1}
steps=${STEPS:-80}
OUT=$(realpath -m "${OUT:-outputs/${ALGO}_cpu_${rollout}_seed${seed}}")
task=$(realpath -m "${TASK:-.cache/arithmetic-seed${seed}}")    # data and warm-started model, made once
stall=${STALL_SECONDS:-120}                         # a run without a step for this long is ended
# ---- end user-adjustable ----

case $rollout in
    hf | vllm) bash scripts/setup_cpu.sh "$rollout" ;;
    *) fail "ROLLOUT=$rollout: must be hf or vllm" ;;
esac
source .venv/bin/activate

export OMP_NUM_THREADS=1 PYTHONHASHSEED=$seed RAY_worker_niceness=0
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

python3 -m gtpo_verl task arithmetic --out "$task" --seed "$seed"

python3 -m gtpo_verl run --out "$OUT" --stall "$stall" -- \
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo_cpu \
    task_dir="$task" \
    seed="$seed" \
    "${ALGORITHM[@]}" \
    actor_rollout_ref.rollout.name="$rollout" \
    trainer.total_training_steps="$steps" \
    trainer.save_freq="$steps" \
    trainer.default_local_dir="$OUT/checkpoints" \
    "$@"
