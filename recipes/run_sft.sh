#!/usr/bin/env bash
# The SFT baseline of GTPO (arXiv:2508.03772, Sec. 6) | Qwen2.5-3B-Instruct | verl's SFT trainer, FSDP2 | NVIDIA GPUs
#
#   bash recipes/run_sft.sh [override…]
#   DATASET=math MODEL_PATH=meta-llama/Llama-3.1-8B-Instruct LORA_RANK=128 bash recipes/run_sft.sh
#
# Trains on the dataset's own solutions, put into the paper's format by gtpo-verl data. All other settings stand in
# recipes/config/sft.yaml. Of the variables in recipes/common.sh it reads those that are not about rollouts.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

model_path=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
lora_rank=${LORA_RANK:-64}      # Listing 1; 128 for Llama
N_GPUS=${N_GPUS:-1}             # one example per update cannot be split
DATA_DIR=${DATA_DIR:-data/${DATASET:-gsm8k}}
TRAIN_FILE=${TRAIN_FILE:-$DATA_DIR/sft_train.parquet}
VAL_FILE=${VAL_FILE:-$DATA_DIR/sft_test.parquet}
max_length=${MAX_LENGTH:-5500}  # prompt and solution, in tokens
NAME=${NAME:-sft_$(basename "$model_path")_${DATASET:-gsm8k}_${FINETUNE:-lora}_seed${SEED:-3407}}
source recipes/common.sh

[ "$nnodes" = 1 ] || fail "NNODES=$nnodes: this recipe runs on one node"
[ $((train_batch_size % n_gpus)) = 0 ] || fail "TRAIN_BATCH_SIZE=$train_batch_size cannot be split over N_GPUS=$n_gpus"

data=(
    data.train_files="$train_file"
    data.val_files="$val_file"
    data.train_batch_size="$train_batch_size"
    data.max_length="$max_length"
    data.max_token_len_per_gpu="$max_tokens_per_gpu"
)
engine=(
    seed="$seed"
    engine.param_offload="$offload"
    engine.optimizer_offload="$offload"
)
trainer=(
    trainer.experiment_name="$name"
    trainer.default_local_dir="$out/checkpoints"
    trainer.logger="[$logger]"
    trainer.n_gpus_per_node="$n_gpus"
)

make_data --sft
keep_metrics
VERL_FILE_LOGGER_PATH=$out/metrics.jsonl python3 -m torch.distributed.run --standalone --nproc_per_node="$n_gpus" \
    -m verl.trainer.sft_trainer --config-path "$PWD/recipes/config" --config-name sft \
    "${data[@]}" "${model[@]/#/model.}" "${engine[@]}" "${trainer[@]}" "$@"
