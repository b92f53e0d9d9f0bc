#!/usr/bin/env bash
# The SFT baseline of GTPO (arXiv:2508.03772, Sec. 6) | Qwen2.5-3B-Instruct | verl's SFT trainer, FSDP2 | NVIDIA GPUs
#
#   bash recipes/run_sft.sh [override…]
#   DATASET=math MODEL_PATH=meta-llama/Llama-3.1-8B-Instruct LORA_RANK=128 bash recipes/run_sft.sh
#
# Trains on the dataset's own solutions, put into the paper's format by `python3 -m recipes data --sft`. All other settings stand in
# recipes/config/sft.yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/common.sh
check_steps TEST_FREQ       # verl's SFT trainer divides by it

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
finetune=${FINETUNE:-lora}                              # lora | full
lora_rank=${LORA_RANK:-64}                              # Listing 1; 128 for Llama
lr=${ACTOR_LR:-1e-6}
seed=${SEED:-3407}

dataset=${DATASET:-gsm8k}                               # gsm8k | math
data_dir=${DATA_DIR:-data/$dataset}
train_batch_size=${TRAIN_BATCH_SIZE:-1}                 # examples per update
max_length=${MAX_LENGTH:-5500}                          # prompt and solution, in tokens

NGPUS_PER_NODE=${NGPUS_PER_NODE:-$(gpus_for "$train_batch_size" "$train_batch_size")}
max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU:-11000}         # in one forward pass
offload=${OFFLOAD:-$([ "$finetune" = full ] && echo True || echo False)}    # weights and optimizer to the CPU at rest

total_epochs=${TOTAL_EPOCHS:-1}                         # Listing 1
save_freq=${SAVE_FREQ:-500}                             # Listing 1
keep=${KEEP:-2}                                         # checkpoints; null keeps all
test_freq=${TEST_FREQ:--1}
project_name=${PROJECT_NAME:-gtpo}
experiment_name=${EXPERIMENT_NAME:-sft_$(basename "$MODEL_PATH")_${dataset}_${finetune}_seed${seed}}
logger=${LOGGER:-console}                               # console,tensorboard,swanlab,wandb; to file in any case
OUT=$(realpath -m "${OUT:-outputs/$experiment_name}")
# ---- end user-adjustable ----

if [ -d "$MODEL_PATH" ]; then set_plain_folder MODEL_PATH "$MODEL_PATH"; fi
set_plain_file train_file "${TRAIN_FILE:-$data_dir/sft_train.parquet}"
set_plain_file val_file "${VAL_FILE:-$data_dir/sft_test.parquet}"
[ $((train_batch_size % NGPUS_PER_NODE)) = 0 ] ||
    fail "TRAIN_BATCH_SIZE=$train_batch_size cannot be split over NGPUS_PER_NODE=$NGPUS_PER_NODE"

########################### parameter arrays ###########################

DATA=(
    data.train_files="$(hydra "$train_file")"
    data.val_files="$(hydra "$val_file")"
    data.train_batch_size="$train_batch_size"
    data.max_length="$max_length"
    data.max_token_len_per_gpu="$max_token_len_per_gpu"
)

MODEL=(
    model.path="$(hydra "$MODEL_PATH")"
    ++model.override_config.attn_implementation="$attn_implementation"
)
add_finetune_to_model model

ENGINE=(
    engine.param_offload="$offload"
    engine.optimizer_offload="$offload"
    optim.lr="$lr"
)
[ "${VERL_PLATFORM:-}" != cpu ] || ENGINE+=(
    trainer.device=cpu
    engine.use_torch_compile=False
    ++engine.mixed_precision='{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}'
)

set_trainer
TRAINER+=(trainer.max_ckpt_to_keep="$keep")

########################### launch ###########################

COMMAND=(
    python3 -m torch.distributed.run --standalone --nproc_per_node="$NGPUS_PER_NODE"
    -m verl.trainer.sft_trainer --config-path "$PWD/recipes/config" --config-name sft
    "${DATA[@]}" "${MODEL[@]}" "${ENGINE[@]}" "${TRAINER[@]}" "$@"
)
make_data --sft
exec python3 -m recipes run --out "$OUT" "${extend[@]}" -- "${COMMAND[@]}"
