#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Llama-3.1-8B-Instruct | FSDP2 training | vLLM rollout | NVIDIA GPUs
#
#   bash recipes/run_gtpo_llama.sh [override…]
#   ALGO=grpo KL_LOSS_COEF=1e-6 bash recipes/run_gtpo_llama.sh    the GRPO twin, everything else equal
#
# recipes/run_gtpo_qwen.sh with another model; its variables hold. The model is gated: accept its licence on the Hugging
# Face Hub and set HF_TOKEN, or give a folder as MODEL_PATH.
set -euo pipefail

export MODEL_PATH=${MODEL_PATH:-meta-llama/Llama-3.1-8B-Instruct}
export LORA_RANK=${LORA_RANK:-128}     # Listing 1
# One prompt would decide whether completions are filtered: the authors' logs have ⟨H⟩ of 0.90, then 0.48 nats, around ln 2.
export STRICT_INITIAL_ENTROPY=${STRICT_INITIAL_ENTROPY:-1}
# Its float32 weights, vLLM's share of the memory and the training of 11,000 tokens fit in two GPUs of 80 GB, not in one.
export FREE_CACHE_ENGINE=${FREE_CACHE_ENGINE:-on_one_gpu}

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_gtpo_qwen.sh" "$@"
