#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-32B-Instruct, all weights | FSDP2 training on several nodes | vLLM rollout | NVIDIA GPUs
#
# With gtpo_verl installed on every node, and this folder and the data on a file system that all nodes see:
#
#   hf download Qwen/Qwen2.5-32B-Instruct              on every node: a download inside the run can exceed NCCL's time limit
#   ray start --head --port=6379                       on the first node
#   ray start --address=FIRST_NODE:6379                on every other one
#   bash recipes/run_gtpo_qwen_fsdp2_multinode.sh      on the first node
#
# SLURM, `ray job submit` and network interfaces: docs/clusters.md. Not the paper's scale: one prompt per update would
# leave 16 GPUs idle, so an update takes 64 here. All other settings stand in recipes/config/gtpo.yaml.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/common.sh    # ALGO (gtpo | grpo), KL_LOSS_COEF (GRPO's β), BETAS (default | paper)

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-32B-Instruct}
INFER_BACKEND=${INFER_BACKEND:-vllm}                    # vllm | sglang
actor_lr=${ACTOR_LR:-1e-6}
seed=${SEED:-3407}

dataset=${DATASET:-gsm8k}                               # gsm8k | math
data_dir=${DATA_DIR:-data/$dataset}
train_batch_size=${TRAIN_BATCH_SIZE:-64}                # prompts per rollout, each with its ROLLOUT_N completions
ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE:-$train_batch_size}     # prompts per update
rollout_n=${ROLLOUT_N:-8}                               # completions per prompt: 8 | 12 in the paper
max_prompt_length=${MAX_PROMPT_LENGTH:-4000}
max_response_length=${MAX_RESPONSE_LENGTH:-1500}

NNODES=${NNODES:-2}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
ppo_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU:-11000}     # in one forward pass; at least prompt + response
offload=${OFFLOAD:-True}                                # weights and optimizer to the CPU at rest
rollout_tp=${ROLLOUT_TP:-4}                             # GPUs that share one copy of the model in vLLM
rollout_gpu_mem_util=${ROLLOUT_GPU_MEM_UTIL:-0.4}

total_epochs=${TOTAL_EPOCHS:-1}
save_freq=${SAVE_FREQ:-20}
keep=${KEEP:-2}                                         # checkpoints; null keeps all
test_freq=${TEST_FREQ:--1}
rollout_dump=${ROLLOUT_DUMP:-null}                      # a folder for every step's completions
project_name=${PROJECT_NAME:-gtpo}
experiment_name=${EXPERIMENT_NAME:-${ALGO}_$(basename "$MODEL_PATH")_${dataset}_full_G${rollout_n}_beta${kl_loss_coef}_${betas}_seed${seed}}
logger=${LOGGER:-console}                               # console,tensorboard,swanlab,wandb; to file in any case
OUT=$(realpath -m "${OUT:-outputs/$experiment_name}")
# ---- end user-adjustable ----

if [ -d "$MODEL_PATH" ]; then MODEL_PATH=$(realpath "$MODEL_PATH"); fi
train_file=$(realpath -m "${TRAIN_FILE:-$data_dir/train.parquet}")
val_file=$(realpath -m "${VAL_FILE:-$data_dir/test.parquet}")

########################### parameter arrays ###########################

DATA=(
    data.train_files="$train_file"
    data.val_files="$val_file"
    data.train_batch_size="$train_batch_size"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
)

MODEL=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    ++actor_rollout_ref.model.override_config.attn_implementation="$attn_implementation"
)

ACTOR=(
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.fsdp_config.seed="$seed"
    actor_rollout_ref.actor.fsdp_config.param_offload="$offload"
    actor_rollout_ref.actor.fsdp_config.optimizer_offload="$offload"
    actor_rollout_ref.actor.ppo_mini_batch_size="$ppo_mini_batch_size"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$ppo_max_token_len_per_gpu"
    actor_rollout_ref.actor.use_kl_loss="$use_kl_loss"
    actor_rollout_ref.actor.kl_loss_coef="$kl_loss_coef"
    actor_rollout_ref.actor.optim.lr="$actor_lr"
    actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
    actor_rollout_ref.actor.optim.betas="[$adam_beta1,$adam_beta2]"
    # verl 0.7.1 reads the norm here, unless trainer.use_legacy_worker_impl=disable; later ones do not.
    'actor_rollout_ref.actor.grad_clip=${actor_rollout_ref.actor.optim.clip_grad}'
)

ROLLOUT=(
    actor_rollout_ref.rollout.name="$INFER_BACKEND"
    actor_rollout_ref.rollout.n="$rollout_n"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$rollout_tp"
    actor_rollout_ref.rollout.gpu_memory_utilization="$rollout_gpu_mem_util"
)

TRAINER=(
    seed="$seed"
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.project_name="$project_name"
    trainer.experiment_name="$experiment_name"
    trainer.logger="[file,$logger]"
    trainer.total_epochs="$total_epochs"
    trainer.save_freq="$save_freq"
    trainer.test_freq="$test_freq"
    trainer.max_actor_ckpt_to_keep="$keep"
    trainer.default_local_dir="$OUT/checkpoints"
    trainer.rollout_data_dir="$rollout_dump"
)

########################### launch ###########################

COMMAND=(
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo
    "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
)
python3 -m gtpo_verl check -- "${COMMAND[@]}"
make_data
measure_initial_entropy
python3 -m gtpo_verl run --out "$OUT" -- "${COMMAND[@]}" "${INITIAL_ENTROPY[@]}"
