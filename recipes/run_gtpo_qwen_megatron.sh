#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-14B-Instruct, full fine-tuning | Megatron training | vLLM rollout
#
#   bash recipes/run_gtpo_qwen_megatron.sh [override…]
#
# Needs verl's Megatron requirements (megatron-core, mbridge, TransformerEngine). Not the paper's scale: an update takes
# 64 prompts. All variables stand at the top of recipes/common.sh, all other settings in recipes/config/gtpo.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CUDA_DEVICE_MAX_CONNECTIONS=1    # Megatron asks for it

model_path=${MODEL_PATH:-Qwen/Qwen2.5-14B-Instruct}
FINETUNE=${FINETUNE:-full}
lora_rank=${LORA_RANK:-64}
N_GPUS=${N_GPUS:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
ROLLOUT_TP=${ROLLOUT_TP:-2}
actor_tp=${ACTOR_TP:-4}                 # tensor-parallel GPUs of the trained model
actor_pp=${ACTOR_PP:-1}                 # pipeline stages of the trained model
source recipes/common.sh

use_megatron "$actor_tp" "$actor_pp"
make_data
train "$@"
