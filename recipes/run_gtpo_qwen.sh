#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-3B-Instruct | FSDP2 training | vLLM rollout | NVIDIA GPUs
#
#   bash recipes/run_gtpo_qwen.sh [override…]
#   DATASET=math G=12 bash recipes/run_gtpo_qwen.sh
#   ALGO=grpo KL_BETA=1e-6 bash recipes/run_gtpo_qwen.sh      the GRPO twin, everything else equal
#
# All variables stand at the top of recipes/common.sh, all other settings in recipes/config/gtpo.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
lora_rank=${LORA_RANK:-64}      # Listing 1
source recipes/common.sh

use_fsdp2
make_data
train "$@"
