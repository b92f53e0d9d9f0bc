#!/usr/bin/env bash
# A checkpoint of a run as a model, or a LoRA adapter, that transformers and vLLM load | FSDP and Megatron
#
#   bash recipes/export.sh CHECKPOINT [OUT] [option…]         OUT is CHECKPOINT/exported if it is not given
#   bash recipes/export.sh outputs/NAME/checkpoints/global_step_500 my-model
#
# python3 -m recipes export --help has the options.
set -euo pipefail
PYTHONPATH=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
exec python3 -m recipes export "$@"
