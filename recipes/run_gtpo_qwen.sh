#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | Qwen2.5-3B-Instruct | FSDP2 training | vLLM rollout | NVIDIA GPUs
#
#   bash recipes/run_gtpo_qwen.sh [override…]
#   DATASET=math ROLLOUT_N=12 bash recipes/run_gtpo_qwen.sh
#   ALGO=grpo KL_LOSS_COEF=1e-6 bash recipes/run_gtpo_qwen.sh     the GRPO twin, everything else equal
#   bash recipes/run_gtpo_qwen.sh algorithm.gtpo.min_correct_reward=11     not the paper's: docs/keys.md
#   SMOKE=1 bash recipes/run_gtpo_qwen.sh                         minutes: does it all work on this machine?
#
# A run that is started again goes on from its last checkpoint; EXTEND=1 lets it take more steps than it was started for.
# All other settings stand in recipes/config/gtpo.yaml. The recipes for other models, Megatron and several nodes are this
# one with other variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# ALGO (gtpo | grpo), KL_LOSS_COEF (GRPO's β), BETAS (default | paper), ENTROPY_FROM (old_log_prob | update)
source recipes/common.sh

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
INFER_BACKEND=${INFER_BACKEND:-vllm}                    # vllm | sglang
strategy=${STRATEGY:-fsdp2}                             # fsdp2 | megatron
finetune=${FINETUNE:-lora}                              # lora | full
is_full=$([ "$finetune" = full ] && echo True || echo False)
lora_rank=${LORA_RANK:-64}                              # Listing 1
actor_lr=${ACTOR_LR:-1e-6}
seed=${SEED:-3407}

dataset=${DATASET:-gsm8k}                               # gsm8k | math
data_dir=${DATA_DIR:-data/$dataset}
train_batch_size=${TRAIN_BATCH_SIZE:-1}                 # prompts per rollout, each with its ROLLOUT_N completions
ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE:-$train_batch_size}     # prompts per update
rollout_n=${ROLLOUT_N:-8}                               # completions per prompt: 8 | 12 in the paper
max_prompt_length=${MAX_PROMPT_LENGTH:-4000}
max_response_length=${MAX_RESPONSE_LENGTH:-1500}

NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-$(gpus_for "$train_batch_size" "$((ppo_mini_batch_size * rollout_n))")}
ppo_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU:-11000}     # in one forward pass; at least prompt + response
offload=${OFFLOAD:-$is_full}                            # weights and optimizer to the CPU at rest
actor_tp=${ACTOR_TP:-1}                                 # megatron: tensor-parallel GPUs of the trained model
actor_pp=${ACTOR_PP:-1}                                 # megatron: pipeline stages of the trained model
rollout_tp=${ROLLOUT_TP:-1}                             # GPUs that share one copy of the model in vLLM
rollout_gpu_mem_util=${ROLLOUT_GPU_MEM_UTIL:-0.4}       # Listing 1
# False keeps vLLM's weights and cache where they are during training: faster steps where the memory is enough.
free_cache_engine=${FREE_CACHE_ENGINE:-$is_full}        # or on_one_gpu
if [ "$free_cache_engine" = on_one_gpu ]; then
    free_cache_engine=$([ "$((NNODES * NGPUS_PER_NODE))" = 1 ] && echo True || echo False)
fi

total_epochs=${TOTAL_EPOCHS:-1}                         # Listing 1
save_freq=${SAVE_FREQ:-500}                             # Listing 1
keep=${KEEP:-2}                                         # checkpoints; null keeps all
save_lora_only=${SAVE_LORA_ONLY:-False}                 # a checkpoint without the base
test_freq=${TEST_FREQ:--1}
stall=${STALL_SECONDS:-}                                # a run without a step for this long is ended
rollout_dump=${ROLLOUT_DUMP:-null}                      # a folder for every step's completions
project_name=${PROJECT_NAME:-gtpo}
model_name=$(basename "$MODEL_PATH")
experiment_name=${EXPERIMENT_NAME:-${ALGO}_${model_name}_${dataset}_${finetune}_G${rollout_n}_beta${kl_loss_coef}_${betas}_seed${seed}}
logger=${LOGGER:-console}                               # console,tensorboard,swanlab,wandb; to file in any case
OUT=$(realpath -m "${OUT:-outputs/$experiment_name}")
[ "$rollout_dump" = null ] || rollout_dump=$(realpath -m "$rollout_dump")   # Ray's workers run elsewhere
# ---- end user-adjustable ----

if [ -d "$MODEL_PATH" ]; then set_plain_folder MODEL_PATH "$MODEL_PATH"; fi
set_plain_file train_file "${TRAIN_FILE:-$data_dir/train.parquet}"
set_plain_file val_file "${VAL_FILE:-$data_dir/test.parquet}"

########################### parameter arrays ###########################

DATA=(
    data.train_files="$(hydra "$train_file")"
    data.val_files="$(hydra "$val_file")"
    data.train_batch_size="$train_batch_size"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
)

MODEL=(actor_rollout_ref.model.path="$(hydra "$MODEL_PATH")")
add_finetune_to_model actor_rollout_ref.model

ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size="$ppo_mini_batch_size"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$ppo_max_token_len_per_gpu"
    actor_rollout_ref.actor.use_kl_loss="$use_kl_loss"
    actor_rollout_ref.actor.kl_loss_coef="$kl_loss_coef"
    actor_rollout_ref.actor.optim.lr="$actor_lr"
    actor_rollout_ref.actor.optim.betas="[$adam_beta1,$adam_beta2]"
)
case $strategy-$finetune in
    fsdp2-*)
        ACTOR+=(
            actor_rollout_ref.actor.strategy=fsdp2
            actor_rollout_ref.actor.fsdp_config.seed="$seed"
            actor_rollout_ref.actor.fsdp_config.param_offload="$offload"
            actor_rollout_ref.actor.fsdp_config.optimizer_offload="$offload"
            # A reference model of its own, which GRPO's KL term needs without LoRA, has work once a step.
            actor_rollout_ref.ref.fsdp_config.param_offload="$is_full"
            actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
            ++actor_rollout_ref.actor.checkpoint.save_lora_only="$save_lora_only"
            ++actor_rollout_ref.model.override_config.attn_implementation="$attn_implementation"
        )
        ;;
    megatron-full)
        megatron=actor_rollout_ref.actor.megatron
        ACTOR+=(
            model_engine=megatron
            "$megatron.seed=$seed"
            "$megatron.tensor_model_parallel_size=$actor_tp"
            "$megatron.pipeline_model_parallel_size=$actor_pp"
            "$megatron.param_offload=$offload"
            "$megatron.optimizer_offload=$offload"
            # Activations of 11,000 tokens do not fit beside the weights; micro-batches can exceed their budget of tokens.
            "$megatron.override_transformer_config.recompute_granularity=full"
            "$megatron.override_transformer_config.recompute_method=uniform"
            "$megatron.override_transformer_config.recompute_num_layers=1"
            actor_rollout_ref.ref.megatron.tensor_model_parallel_size="$actor_tp"
            actor_rollout_ref.ref.megatron.pipeline_model_parallel_size="$actor_pp"
            actor_rollout_ref.ref.megatron.param_offload=True
            actor_rollout_ref.actor.optim.lr_decay_style=cosine
            # Or a resumed run begins its schedule anew (verl #7953).
            actor_rollout_ref.actor.optim.use_checkpoint_opt_param_scheduler=True
            # verl 0.9.1 does not hand optim.betas to Megatron's optimizer.
            +actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta1="$adam_beta1"
            +actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta2="$adam_beta2"
            # Megatron asks for it; workers on a cluster that runs already do not see this shell's variables.
            +ray_kwargs.ray_init.runtime_env.env_vars.CUDA_DEVICE_MAX_CONNECTIONS="'1'"
        )
        ;;
    *) fail "STRATEGY=$strategy FINETUNE=$finetune: must be fsdp2, or megatron with FINETUNE=full" ;;
esac

ROLLOUT=(
    actor_rollout_ref.rollout.name="$INFER_BACKEND"
    actor_rollout_ref.rollout.n="$rollout_n"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$rollout_tp"
    actor_rollout_ref.rollout.gpu_memory_utilization="$rollout_gpu_mem_util"
    # vLLM keeps room for one sequence of this length: the model's whole context by default, which is 16 GB for Llama.
    actor_rollout_ref.rollout.max_model_len=$((max_prompt_length + max_response_length))
    actor_rollout_ref.rollout.free_cache_engine="$free_cache_engine"
)
((train_batch_size > 8)) || ROLLOUT+=(+workers=few)
# vLLM loads the base itself and is then sent the adapter alone, layer by layer, as verl's own tests do. (verl sends
# weights merged with model.lora.merge=True in bfloat16, which rounds small updates away.)
[ "$finetune" = full ] || ROLLOUT+=(
    actor_rollout_ref.rollout.load_format=safetensors
    actor_rollout_ref.rollout.layered_summon=True
)

set_trainer
TRAINER+=(
    trainer.nnodes="$NNODES"
    trainer.max_actor_ckpt_to_keep="$keep"
    trainer.rollout_data_dir="$(hydra "$rollout_dump")"
)

########################### launch ###########################

COMMAND=(
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo
    "${ALGORITHM[@]}" "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
)
make_data
check_command
measure_initial_entropy
exec python3 -m recipes run --out "$OUT" ${stall:+--stall "$stall"} "${extend[@]}" -- "${COMMAND[@]}" "${INITIAL_ENTROPY[@]}"
