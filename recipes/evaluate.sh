#!/usr/bin/env bash
# pass@k and maj@k (GTPO, arXiv:2508.03772, Sec. 6.1, Fig. 2 and Table 1) of a checkpoint | verl's validation, vLLM
#
#   bash recipes/evaluate.sh CHECKPOINT [override…]
#   LABEL=Qwen/GSM8K/GTPO bash recipes/evaluate.sh outputs/NAME/checkpoints/global_step_7473
#
# CHECKPOINT is a folder global_step_N of run_gtpo_*.sh (FSDP) or run_sft.sh, or a model in Hugging Face format: a folder
# or its name on the Hub.
set -xeuo pipefail
checkpoint=${1:?usage: bash recipes/evaluate.sh CHECKPOINT [override…]}
shift
if [ -d "$checkpoint" ]; then checkpoint=$(realpath "$checkpoint"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source recipes/common.sh

# ---- user-adjustable ----
datasets=${DATASETS:-gsm8k math aime2024 aime2025 amc2023}
samples=${SAMPLES:-64}                  # completions of every question
name=$(basename "$checkpoint")
case $name in global_step_*) name=$(basename "$(dirname "$(dirname "$checkpoint")")")_$name ;; esac
label=${LABEL:-model/data/$name}        # MODEL/TRAINING SET/METHOD, as in the paper's Table 1
data_root=${DATA_ROOT:-data}
INFER_BACKEND=${INFER_BACKEND:-vllm}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-$gpus}
out=$(realpath -m "${OUT:-outputs/evaluation/${label//\//_}${DATASETS:+_${DATASETS// /_}}}")
# ---- end user-adjustable ----

# verl's shards become a model in Hugging Face format once, with the LoRA adapter beside it.
MODEL=(actor_rollout_ref.model.path="$checkpoint")
shards=$checkpoint
if [ -d "$checkpoint/actor" ]; then shards=$checkpoint/actor; fi
if [ -e "$shards/fsdp_config.json" ]; then
    merged=$checkpoint/merged
    if [ ! -d "$merged" ]; then
        python3 -m verl.model_merger merge --backend fsdp --local_dir "$shards" --target_dir "$merged.partial"
        mv "$merged.partial" "$merged"
    fi
    MODEL=(actor_rollout_ref.model.path="$merged")
    if [ -d "$merged/lora_adapter" ]; then
        MODEL+=(
            actor_rollout_ref.model.lora_rank="$(sed -n 's/^ *"r": *\([0-9]*\),*$/\1/p' "$merged/lora_adapter/adapter_config.json")"
            actor_rollout_ref.model.lora_adapter_path="$merged/lora_adapter"
            actor_rollout_ref.rollout.load_format=safetensors
        )
    fi
fi
MODEL+=(++actor_rollout_ref.model.override_config.attn_implementation="$attn_implementation")

dumps=()
for dataset in $datasets; do
    data_dir=$data_root/$dataset
    train_file=$(realpath -m "$data_dir/test.parquet") val_file=$(realpath -m "$data_dir/test.parquet")
    make_data
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo \
        seed="${SEED:-3407}" \
        algorithm.adv_estimator=grpo \
        data.train_files="$train_file" \
        data.val_files="$val_file" \
        data.max_prompt_length="${MAX_PROMPT_LENGTH:-4000}" \
        data.max_response_length="${MAX_RESPONSE_LENGTH:-1500}" \
        "${MODEL[@]}" \
        actor_rollout_ref.actor.strategy=fsdp2 \
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu="${PPO_MAX_TOKEN_LEN_PER_GPU:-11000}" \
        actor_rollout_ref.actor.use_kl_loss=False \
        actor_rollout_ref.rollout.name="$INFER_BACKEND" \
        actor_rollout_ref.rollout.n=1 \
        actor_rollout_ref.rollout.tensor_model_parallel_size="${ROLLOUT_TP:-1}" \
        actor_rollout_ref.rollout.val_kwargs.n="$samples" \
        trainer.n_gpus_per_node="$NGPUS_PER_NODE" \
        trainer.val_only=True \
        trainer.val_before_train=True \
        trainer.resume_mode=disable \
        trainer.validation_data_dir="$out/$dataset" \
        trainer.logger='[console]' \
        "${EXTRA[@]}" \
        "$@"
    dumps+=("$label/${dataset^^}=$out/$dataset/0.jsonl")
done
python3 -m gtpo_verl evaluate "${dumps[@]}" --out "$out"
