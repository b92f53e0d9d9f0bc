#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-32B-Instruct, full fine-tuning | FSDP2 training on several nodes | vLLM rollout
#
# With gtpo_verl installed on every node and this folder, the data and the model on a file system that all nodes see:
#
#   ray start --head --port=6379                       on the first node
#   ray start --address=FIRST_NODE:6379                on every other one
#   bash recipes/run_gtpo_qwen_fsdp2_multinode.sh      on the first node
#
# Not the paper's scale: one prompt per update would leave 16 GPUs idle, so an update takes 64 here. All variables stand
# at the top of recipes/common.sh, all other settings in recipes/config/gtpo.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
FINETUNE=${FINETUNE:-full}
lora_rank=${LORA_RANK:-64}
NNODES=${NNODES:-2}
N_GPUS=${N_GPUS:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
ROLLOUT_TP=${ROLLOUT_TP:-4}
source recipes/common.sh

use_fsdp2
make_data
train "$@"
