#!/usr/bin/env bash
# pass@k and maj@k (GTPO, arXiv:2508.03772, Sec. 6.1, Fig. 2 and Table 1) of a checkpoint | verl's validation, vLLM
#
#   bash recipes/evaluate.sh CHECKPOINT [override…]
#   LABEL=Qwen/GSM8K/GTPO bash recipes/evaluate.sh outputs/NAME/checkpoints/global_step_7473
#
# CHECKPOINT is a folder global_step_N of run_gtpo_*.sh (FSDP) or run_sft.sh, or a model in Hugging Face format: a folder
# or its name on the Hub. Of the variables in recipes/common.sh it reads N_GPUS, ROLLOUT_TP, SEED and the lengths.
set -xeuo pipefail
checkpoint=${1:?usage: bash recipes/evaluate.sh CHECKPOINT [override…]}
shift
if [ -d "$checkpoint" ]; then checkpoint=$(realpath "$checkpoint"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# ---- user-adjustable ----
datasets=${DATASETS:-gsm8k math aime2024 aime2025 amc2023}
samples=${SAMPLES:-64}                  # completions of every question
name=$(basename "$checkpoint")
case $name in global_step_*) name=$(basename "$(dirname "$(dirname "$checkpoint")")")_$name ;; esac
label=${LABEL:-model/data/$name}        # MODEL/TRAINING SET/METHOD, as in the paper's Table 1
data_root=${DATA_ROOT:-data}
OUT=${OUT:-outputs/evaluation/${label//\//_}${DATASETS:+_${DATASETS// /_}}}
# ---- end user-adjustable ----

# verl's shards become a model in Hugging Face format once, with the LoRA adapter beside it.
model_path=$checkpoint FINETUNE=full lora_rank=0 adapter=()
shards=$checkpoint
if [ -d "$checkpoint/actor" ]; then shards=$checkpoint/actor; fi
if [ -e "$shards/fsdp_config.json" ]; then
    model_path=$checkpoint/merged
    if [ ! -d "$model_path" ]; then
        python3 -m verl.model_merger merge --backend fsdp --local_dir "$shards" --target_dir "$model_path.partial"
        mv "$model_path.partial" "$model_path"
    fi
    if [ -d "$model_path/lora_adapter" ]; then
        FINETUNE=lora
        lora_rank=$(sed -n 's/^ *"r": *\([0-9]*\),*$/\1/p' "$model_path/lora_adapter/adapter_config.json")
        adapter=(actor_rollout_ref.model.lora_adapter_path="$model_path/lora_adapter")
    fi
fi
ALGO=grpo KL_BETA=0     # nothing is trained
source recipes/common.sh
use_fsdp2

dumps=()
for dataset in $datasets; do
    data_dir=$data_root/$dataset
    train_file=$(realpath -m "$data_dir/test.parquet") val_file=$(realpath -m "$data_dir/test.parquet")
    make_data
    main_ppo "${adapter[@]}" \
        data.train_files="$train_file" \
        data.val_files="$val_file" \
        actor_rollout_ref.rollout.val_kwargs.n="$samples" \
        trainer.val_only=True \
        trainer.val_before_train=True \
        trainer.resume_mode=disable \
        trainer.validation_data_dir="$out/$dataset" \
        trainer.logger='[console]' \
        "$@"
    dumps+=("$label/${dataset^^}=$out/$dataset/0.jsonl")
done
python3 -m gtpo_verl evaluate "${dumps[@]}" --out "$out"
