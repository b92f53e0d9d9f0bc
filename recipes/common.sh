# shellcheck shell=bash disable=SC2154  # a recipe sets model_path and lora_rank before it sources this
# What run_*.sh and evaluate.sh share; they source it after setting model_path and lora_rank.
#
# First the variables a user may set, in the environment and in upper case; then the arrays of verl's overrides that
# follow from them, one per section; all other settings stand in recipes/config/gtpo.yaml.

# ---- user-adjustable ----
algo=${ALGO:-gtpo}                          # gtpo | grpo
dataset=${DATASET:-gsm8k}                   # gsm8k | math (evaluate.sh: also aime2024, aime2025, amc2023)
group_size=${G:-8}                          # completions per prompt: 8 | 12 in the paper
kl_beta=${KL_BETA:-0}                       # β of GRPO's KL term: 0 | 1e-6 | 0.04 in the paper
betas=${BETAS:-default}                     # default: Adam's betas are 0.9, 0.95 for both | paper: 0.999999 twice for GTPO
finetune=${FINETUNE:-lora}                  # lora | full
strict_initial_entropy=${STRICT_INITIAL_ENTROPY:-0}   # 1: measure ⟨H⟩_ini on 100 training prompts before the run
seed=${SEED:-3407}

nnodes=${NNODES:-1}
n_gpus=${N_GPUS:-2}                         # per node
train_batch_size=${TRAIN_BATCH_SIZE:-1}     # prompts per update, each with its G completions
max_prompt_length=${MAX_PROMPT_LENGTH:-4000}
max_response_length=${MAX_RESPONSE_LENGTH:-1500}
max_tokens_per_gpu=${MAX_TOKENS_PER_GPU:-11000}       # in one forward pass; at least prompt + response
rollout_tp=${ROLLOUT_TP:-1}                 # GPUs that share one copy of the model in vLLM
offload=${OFFLOAD:-$([ "$finetune" = full ] && echo True || echo False)}   # weights and optimizer to the CPU at rest

data_dir=${DATA_DIR:-data/$dataset}         # made by gtpo-verl data where a file is missing
if [ -d "$model_path" ]; then model_path=$(realpath "$model_path"); fi
train_file=$(realpath -m "${TRAIN_FILE:-$data_dir/train.parquet}")
val_file=$(realpath -m "${VAL_FILE:-$data_dir/test.parquet}")

name=${NAME:-${algo}_$(basename "$model_path")_${dataset}_${finetune}_G${group_size}_beta${kl_beta}_${betas}_seed${seed}}
out=$(realpath -m "${OUT:-outputs/$name}")  # checkpoints and metrics; a run that finds a checkpoint there goes on from it
wandb=${WANDB:-0}                           # 1: log there too
# ---- end user-adjustable ----

fail() { echo "$1" >&2; exit 2; }

# Without a KL term verl loads no reference model. With LoRA the reference is the base under the adapter.
case $kl_beta in 0 | 0.0) use_kl_loss=False ;; *) use_kl_loss=True ;; esac
algorithm=(
    algorithm.adv_estimator="$algo"
    actor_rollout_ref.actor.use_kl_loss="$use_kl_loss"
    actor_rollout_ref.actor.kl_loss_coef="$kl_beta"
)
case $algo in
    gtpo)
        [ "$use_kl_loss" = False ] || fail "KL_BETA=$kl_beta: GTPO has no KL term; unset it, or set ALGO=grpo"
        algorithm+=(actor_rollout_ref.actor.policy_loss.loss_mode=gtpo)
        ;;
    grpo) algorithm+=(actor_rollout_ref.actor.policy_loss.loss_mode=vanilla) ;;
    *) fail "ALGO=$algo: must be gtpo or grpo" ;;
esac

# Listing 1 gives GTPO betas of 0.999999 and the other two methods 0.9 and 0.95. Fig. 6 shows that the betas alone move
# GRPO, so a comparison at different betas would not be one of the methods.
case $betas-$algo in
    paper-gtpo) adam_beta1=0.999999 adam_beta2=0.999999 ;;
    paper-* | default-*) adam_beta1=0.9 adam_beta2=0.95 ;;
    *) fail "BETAS=$betas: must be default or paper" ;;
esac

data=(
    data.train_files="$train_file"
    data.val_files="$val_file"
    data.train_batch_size="$train_batch_size"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
)

model=(path="$model_path")                   # keys of the model section; train and run_sft.sh prefix it
case $finetune in
    # Neither the paper nor Listing 1 gives LoRA's alpha; the authors' code takes the rank.
    lora)
        model+=(
            lora_rank="$lora_rank"
            lora_alpha="$lora_rank"
            target_modules='[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]'
        )
        ;;
    full) ;;
    *) fail "FINETUNE=$finetune: must be lora or full" ;;
esac

actor=(actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$max_tokens_per_gpu")

rollout=(
    actor_rollout_ref.rollout.n="$group_size"
    actor_rollout_ref.rollout.tensor_model_parallel_size="$rollout_tp"
)
# vLLM loads the base itself and is then sent the adapter alone. (verl sends weights merged with model.lora.merge=True in
# bfloat16, which rounds small updates away.)
[ "$finetune" = full ] || rollout+=(actor_rollout_ref.rollout.load_format=safetensors)

logger=console,file
[ "$wandb" = 0 ] || logger+=,wandb
trainer=(
    seed="$seed"
    trainer.nnodes="$nnodes"
    trainer.n_gpus_per_node="$n_gpus"
    trainer.experiment_name="$name"
    trainer.default_local_dir="$out/checkpoints"
    trainer.logger="[$logger]"
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH="$out/metrics.jsonl"
)

# The training engine: fsdp2 "$@" or megatron TP PP.
use_fsdp2() {
    check_batch $((nnodes * n_gpus))
    engine=(
        actor_rollout_ref.actor.strategy=fsdp2
        actor_rollout_ref.actor.fsdp_config.seed="$seed"
        actor_rollout_ref.actor.fsdp_config.param_offload="$offload"
        actor_rollout_ref.actor.fsdp_config.optimizer_offload="$offload"
        actor_rollout_ref.actor.optim.lr_scheduler_type=cosine
        # verl 0.7.1 reads the norm here, unless trainer.use_legacy_worker_impl=disable; later ones do not.
        'actor_rollout_ref.actor.grad_clip=${actor_rollout_ref.actor.optim.clip_grad}'
        actor_rollout_ref.actor.optim.betas="[$adam_beta1,$adam_beta2]"
    )
}

use_megatron() {
    local tp=$1 pp=$2
    [ "$finetune" = full ] || fail "FINETUNE=$finetune: the Megatron recipe has full fine-tuning only"
    check_batch $((nnodes * n_gpus / (tp * pp)))
    engine=(
        model_engine=megatron
        actor_rollout_ref.actor.megatron.seed="$seed"
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$tp"
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$pp"
        actor_rollout_ref.actor.megatron.param_offload="$offload"
        actor_rollout_ref.actor.megatron.optimizer_offload="$offload"
        actor_rollout_ref.ref.megatron.tensor_model_parallel_size="$tp"
        actor_rollout_ref.ref.megatron.pipeline_model_parallel_size="$pp"
        actor_rollout_ref.actor.optim.lr_decay_style=cosine
        # verl 0.9.1 does not hand optim.betas to Megatron's optimizer.
        actor_rollout_ref.actor.optim.betas="[$adam_beta1,$adam_beta2]"
        +actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta1="$adam_beta1"
        +actor_rollout_ref.actor.optim.override_optimizer_config.adam_beta2="$adam_beta2"
    )
}

check_batch() {
    [ $((train_batch_size * group_size % $1)) = 0 ] || fail "TRAIN_BATCH_SIZE x G = $train_batch_size x $group_size \
completions cannot be split evenly over $1 data-parallel workers: change one of the three"
}

# The data of the run, unless it is there already; "$@": options of gtpo-verl data.
make_data() {
    if [ ! -e "$train_file" ] || [ ! -e "$val_file" ]; then
        python3 -m gtpo_verl data --dataset "$dataset" --out "$data_dir" "$@"
    fi
}

# verl's file logger begins its file anew, so a resumed run would lose the steps before it.
keep_metrics() {
    mkdir -p "$out"
    if [ -e "$out/metrics.jsonl" ]; then mv "$out/metrics.jsonl" "$out/metrics_until_$(date +%Y%m%d_%H%M%S).jsonl"; fi
}

# A folder holds one run, which goes on with the same settings; those of the trainer section may change.
keep_settings() {
    mkdir -p "$out"
    printf '%s\n' "${engine[@]}" "${algorithm[@]}" "${data[@]}" "${model[@]}" "${actor[@]}" "${rollout[@]}" "$@" |
        grep -vE '^(trainer\.|algorithm\.gtpo\.initial_entropy=)' >"$out/settings.new"
    if [ -e "$out/settings" ] && ! diff "$out/settings" "$out/settings.new" >&2; then
        fail "OUT=$out holds a run with other settings, see above: set NAME or OUT, or remove $out/settings"
    fi
    mv "$out/settings.new" "$out/settings"
}

# main_ppo OVERRIDE…: verl's trainer with the settings above and these.
main_ppo() {
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo \
        "${engine[@]}" "${algorithm[@]}" "${data[@]}" "${model[@]/#/actor_rollout_ref.model.}" "${actor[@]}" \
        "${rollout[@]}" "${trainer[@]}" "$@"
}

# train OVERRIDE…: the same, ⟨H⟩_ini first where it is asked for.
train() {
    if [ "$algo-$strict_initial_entropy" = gtpo-1 ]; then
        local initial_entropy
        initial_entropy=$(python3 -m gtpo_verl initial-entropy --model "$model_path" --data "$train_file" --samples 100 \
            --max-response-length "$max_response_length" --seed "$seed" | tee /dev/stderr |
            sed -n 's/^initial_entropy=//p')
        algorithm+=(algorithm.gtpo.initial_entropy="$initial_entropy")
    fi
    keep_settings "$@"
    keep_metrics
    main_ppo "$@"
}
