#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Llama-3.1-8B-Instruct | FSDP2 training | vLLM rollout | NVIDIA GPUs
#
#   bash recipes/run_gtpo_llama.sh [override…]
#   DATASET=math G=12 bash recipes/run_gtpo_llama.sh
#   ALGO=grpo KL_BETA=1e-6 bash recipes/run_gtpo_llama.sh     the GRPO twin, everything else equal
#
# The model is gated: accept its licence on the Hugging Face Hub and set HF_TOKEN, or give a folder as MODEL_PATH.
# All variables stand at the top of recipes/common.sh, all other settings in recipes/config/gtpo.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-meta-llama/Llama-3.1-8B-Instruct}
lora_rank=${LORA_RANK:-128}     # Listing 1
source recipes/common.sh

use_fsdp2
make_data
train "$@"
