#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-14B-Instruct, all weights | Megatron training | vLLM rollout | NVIDIA GPUs
#
#   bash recipes/run_gtpo_qwen_megatron.sh [override…]
#
# recipes/run_gtpo_qwen.sh with another model and engine; its variables hold, but for FINETUNE and STRATEGY. Needs Megatron,
# which docs/gpu.md says how to install. Not the paper's scale: an update takes 64 prompts.
set -euo pipefail

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}
export STRATEGY=megatron FINETUNE=full
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
export NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
export ROLLOUT_TP=${ROLLOUT_TP:-2} ACTOR_TP=${ACTOR_TP:-4}
export ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.6}    # all else is on the CPU during rollouts
export SAVE_FREQ=${SAVE_FREQ:-20}      # an epoch of GSM8K has 116 steps

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_gtpo_qwen.sh" "$@"
