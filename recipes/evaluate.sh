#!/usr/bin/env bash
# pass@k and maj@k (GTPO, arXiv:2508.03772, Sec. 6.1, Fig. 2 and Table 1) of a checkpoint | verl's validation, vLLM
#
#   bash recipes/evaluate.sh CHECKPOINT [override…]
#   LABEL=Qwen/GSM8K/GTPO bash recipes/evaluate.sh outputs/NAME/checkpoints/global_step_7473
#
# CHECKPOINT is a folder global_step_N of run_*.sh, or a model in Hugging Face format: a folder or its name on the Hub. Of
# one that you cannot write to, first make such a model: bash recipes/export.sh CHECKPOINT OUT. With a model give the
# overrides of its run for the chat template again (data.apply_chat_template_kwargs…); of a global_step_N they are known.
# An interrupted evaluation samples only the missing batches.
set -euo pipefail
[ $# -gt 0 ] || { echo "usage: bash recipes/evaluate.sh CHECKPOINT [override…]" >&2; exit 2; }
checkpoint=$1
shift
if [ -d "$checkpoint" ]; then checkpoint=$(realpath "$checkpoint"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/common.sh
check_names checkpoint LABEL

# ---- user-adjustable ----
datasets=${DATASETS:-gsm8k math aime2024 aime2025 amc2023}
data_root=${DATA_ROOT:-data}
samples=${SAMPLES:-64}                                  # completions of every question
batch=${BATCH:-256}                                     # questions sampled at once; lost if it is interrupted
name=$(basename "$checkpoint")
case $name in global_step_*) name=$(basename "$(dirname "$(dirname "$checkpoint")")")_$name ;; esac
label=${LABEL:-$name}                                   # MODEL/TRAINING SET/METHOD, as in the paper's Table 1
[[ $label =~ ^[^/=]+(/[^/=]+/[^/=]+(/[^/=]+)?)?$ ]] ||
    fail "LABEL=$label: write METHOD, MODEL/TRAINING SET/METHOD or MODEL/TRAINING SET/METHOD/DATA SET, without ="
OUT=$(realpath -m "${OUT:-outputs/evaluation/${label//\//_}${DATASETS:+_${DATASETS// /_}}}")
seed=${SEED:-3407}
max_prompt_length=${MAX_PROMPT_LENGTH:-4000}
max_response_length=${MAX_RESPONSE_LENGTH:-1500}
INFER_BACKEND=${INFER_BACKEND:-vllm}                    # vllm | sglang
NGPUS_PER_NODE=${NGPUS_PER_NODE:-$gpus}
# ---- end user-adjustable ----

test_files=() test_file=
for dataset in $datasets; do
    if [ ! -e "$data_root/$dataset/test.parquet" ]; then
        # Both splits are made, since a training recipe refuses one without the other; one that is there is kept.
        split=()
        [ ! -e "$data_root/$dataset/train.parquet" ] || split=(--split test)
        python3 -m recipes data --dataset "$dataset" "${split[@]}" --out "$data_root/$dataset"
    fi
    set_plain_file test_file "$data_root/$dataset/test.parquet"
    test_files+=("$(hydra "$test_file")")
done
val_files=$(IFS=, && echo "${test_files[*]}")

# A checkpoint of verl becomes a model, or an adapter and the base that it belongs to.
model_path=$checkpoint adapter=()
if [ -d "$checkpoint/actor" ] || [ -e "$checkpoint/fsdp_config.json" ]; then
    model_path=$checkpoint/exported
    bash recipes/export.sh "$checkpoint" "$model_path"
fi
# The prompts are written as in the checkpoint's run.
template=() settings=$checkpoint/../../settings.json
if [ -e "$settings" ]; then
    words=$(python3 -c 'import json, shlex, sys
keys = "data.apply_chat_template_kwargs", "actor_rollout_ref.model.custom_chat_template"
given = json.load(open(sys.argv[1])).items()
print(*(shlex.quote(f"++{key}={value}") for key, value in given if key.startswith(keys)))' "$settings")
    eval "template=($words)"
fi
if [ -e "$model_path/adapter_config.json" ]; then
    adapter_setting() {
        python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$model_path/adapter_config.json" "$1"
    }
    adapter_path=
    set_plain_folder adapter_path "$model_path"
    adapter=(
        actor_rollout_ref.model.lora_adapter_path="$(hydra "$adapter_path")"
        actor_rollout_ref.model.lora_rank="$(adapter_setting r)"
        actor_rollout_ref.rollout.load_format=safetensors
        actor_rollout_ref.rollout.layered_summon=True
    )
    model_path=$(adapter_setting base_model_name_or_path)
elif [ -d "$model_path" ]; then
    set_plain_folder model_path "$model_path"
fi

DATA=(
    data.train_files="${test_files[0]}"       # verl reads it; nothing is trained
    data.val_files="[$val_files]"
    data.val_batch_size="$batch"
    data.max_prompt_length="$max_prompt_length"
    data.max_response_length="$max_response_length"
)

MODEL=(
    actor_rollout_ref.model.path="$(hydra "$model_path")"
    "${adapter[@]}"
    ++actor_rollout_ref.model.override_config.attn_implementation="$attn_implementation"
    actor_rollout_ref.actor.strategy=fsdp2
    actor_rollout_ref.actor.fsdp_config.param_offload=True
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length))
)

ROLLOUT=(
    actor_rollout_ref.rollout.name="$INFER_BACKEND"
    actor_rollout_ref.rollout.n=1
    actor_rollout_ref.rollout.val_kwargs.n="$samples"
    actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}"
    # The GPUs have nothing else to hold.
    actor_rollout_ref.rollout.gpu_memory_utilization="${ROLLOUT_GPU_MEM_UTIL:-0.8}"
    actor_rollout_ref.rollout.max_num_seqs=1024
    actor_rollout_ref.rollout.calculate_log_probs=False
    transfer_queue.backend.SimpleStorage.total_storage_size=$((2 * batch * samples))
)

# recipes.paper.batched_validation samples in batches. Ray gets the variable too, for a cluster that runs already.
export VERL_USE_EXTERNAL_MODULES=${VERL_USE_EXTERNAL_MODULES:+$VERL_USE_EXTERNAL_MODULES,}recipes.paper.batched_validation
TRAINER=(
    seed="$seed"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.v1.trainer_mode=batched_validation
    trainer.v1.sampler.custom_sampler.path=null         # its metrics are of training
    trainer.val_only=True
    trainer.val_before_train=True
    trainer.resume_mode=disable
    trainer.validation_data_dir="$(hydra "$OUT")"
    trainer.logger='[console]'
    +ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="'$VERL_USE_EXTERNAL_MODULES'"
)

COMMAND=(
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo
    algorithm.adv_estimator=grpo "${DATA[@]}" "${MODEL[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "${template[@]}" "$@"
)
python3 -m gtpo_verl check -- "${COMMAND[@]}"
"${COMMAND[@]}"

dumps=()
for dump in "$OUT"/*.jsonl; do dumps+=("$label=$dump"); done
python3 -m recipes evaluate "${dumps[@]}" --samples "$samples" --out "$OUT"
