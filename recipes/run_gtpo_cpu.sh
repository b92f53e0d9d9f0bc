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

# user-adjustable
algo=${ALGO:-gtpo}                                  # gtpo | grpo
rollout=${ROLLOUT:-hf}                              # hf | vllm
seed=${SEED:-1}
steps=${STEPS:-80}
out=${OUT:-outputs/${algo}_cpu_${rollout}_seed${seed}}
task=${TASK:-.cache/arithmetic-seed${seed}}         # data and warm-started model, made once
stall=${STALL_SECONDS:-120}                         # a run without a step for this long is ended

case $algo in
    gtpo) algorithm=(algorithm.adv_estimator=gtpo actor_rollout_ref.actor.policy_loss.loss_mode=gtpo) ;;
    grpo) algorithm=(algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=vanilla) ;;
    *) echo "ALGO=$algo: must be gtpo or grpo" >&2; exit 2 ;;
esac
case $rollout in
    hf | vllm) bash scripts/setup_cpu.sh "$rollout" ;;
    *) echo "ROLLOUT=$rollout: must be hf or vllm" >&2; exit 2 ;;
esac
source .venv/bin/activate

export VERL_PLATFORM=cpu OMP_NUM_THREADS=1 PYTHONHASHSEED=$seed RAY_worker_niceness=0
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

python -m gtpo_verl.cpu.arithmetic --out "$task" --seed "$seed"

trainer=(
    trainer.total_training_steps="$steps"
    trainer.default_local_dir="$PWD/$out/checkpoints"
    trainer.save_freq="$steps"
)

python -m gtpo_verl.paper.launch --out "$out" --stall "$stall" -- \
    --config-path "$PWD/recipes/config" --config-name gtpo_cpu \
    task_dir="$PWD/$task" seed="$seed" actor_rollout_ref.rollout.name="$rollout" \
    "${algorithm[@]}" "${trainer[@]}" "$@"
