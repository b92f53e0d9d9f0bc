#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-32B-Instruct, all weights | FSDP2 training on several nodes | vLLM rollout | NVIDIA GPUs
#
# With gtpo_verl installed on every node, and this folder and the data on a file system that all nodes see:
#
#   export RAY_AUTH_MODE=disabled                      on every node, and in the shell of the last line
#   hf download Qwen/Qwen2.5-32B-Instruct              on every node: a download inside the run can exceed NCCL's time limit
#   ray start --head --port=6379                       on the first node
#   ray start --address=FIRST_NODE:6379                on every other one
#   bash recipes/run_gtpo_qwen_fsdp2_multinode.sh      on the first node
#
# recipes/run_gtpo_qwen.sh with another model; its variables hold. Not the paper's scale: one prompt per update would leave
# 16 GPUs idle, so an update takes 64. Tokens, SLURM, `ray job submit` and network interfaces: docs/gpu.md.
set -euo pipefail

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
export FINETUNE=${FINETUNE:-full}
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
export NNODES=${NNODES:-2} NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
export OFFLOAD=${OFFLOAD:-False}       # 16 GPUs of 80 GB hold weights, optimizer and vLLM's share, as in verl's example
export ROLLOUT_TP=${ROLLOUT_TP:-4}
export SAVE_FREQ=${SAVE_FREQ:-20}      # an epoch of GSM8K has 116 steps

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_gtpo_qwen.sh" "$@"
