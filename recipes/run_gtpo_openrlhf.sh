#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) | OpenRLHF | Qwen2.5-3B-Instruct, all weights | DeepSpeed ZeRO-3 and vLLM on the same GPUs
#
#   bash recipes/run_gtpo_openrlhf.sh [option…]
#   DATASET=math N_SAMPLES_PER_PROMPT=12 bash recipes/run_gtpo_openrlhf.sh
#   ALGO=grpo bash recipes/run_gtpo_openrlhf.sh           the GRPO twin: same settings, another order of prompts
#
# Tried on a CPU (docs/other-trainers.md). Needs OpenRLHF 0.11.2 with vLLM, and `pip install '.[data]'`. A run
# that is started again goes on from its last checkpoint; the model in OUT/model is written at the end. OpenRLHF shuffles
# the prompts anew at each start, whatever SEED is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source recipes/checks.sh
check_counts BATCH_SIZE N_SAMPLES_PER_PROMPT MAX_LEN MAX_NEW_TOKENS NGPUS_PER_NODE KEEP
check_steps SAVE_STEPS
check_seed
check_number ACTOR_LR
check_share GPU_MEMORY_UTILIZATION

# ---- user-adjustable ----
ALGO=${ALGO:-gtpo}                                      # gtpo | grpo
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
actor_lr=${ACTOR_LR:-1e-6}
seed=${SEED:-3407}

dataset=${DATASET:-gsm8k}                               # gsm8k | math
data_dir=${DATA_DIR:-data/$dataset}
batch_size=${BATCH_SIZE:-1}                             # prompts per rollout and per update
n_samples_per_prompt=${N_SAMPLES_PER_PROMPT:-8}         # completions per prompt: 8 | 12 in the paper
max_len=${MAX_LEN:-5500}                                # prompt and completion
max_new_tokens=${MAX_NEW_TOKENS:-1500}

NGPUS_PER_NODE=${NGPUS_PER_NODE:-}                      # 1 or 2 of this machine; divides batch_size * n_samples_per_prompt
gpu_memory_utilization=${GPU_MEMORY_UTILIZATION:-0.4}   # of vLLM
attn_implementation=${ATTN_IMPLEMENTATION:-flash_attention_2}
save_steps=${SAVE_STEPS:-500}
keep=${KEEP:-2}                                         # checkpoints, of 14 bytes per parameter each
OUT=$(realpath -m "${OUT:-outputs/openrlhf_${ALGO}_$(basename "$MODEL_PATH")_${dataset}_G${n_samples_per_prompt}_batch${batch_size}_lr${actor_lr}_seed$seed}")
# ---- end user-adjustable ----

case $ALGO in
    gtpo) estimator=gtpo ;;
    grpo) estimator=group_norm ;;
    *) fail "ALGO=$ALGO: must be gtpo or grpo" ;;
esac
why='only the recipes in verl read it; the variables of this one are at its top, and a KL term is --algo.kl.init_coef'
# Unset, empty and 0 (or 0.0) are taken for the same.
for name in SMOKE KL_LOSS_COEF STRICT_INITIAL_ENTROPY EXTEND ENTROPY_FROM FINETUNE TRAIN_BATCH_SIZE ROLLOUT_N \
    MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH SAVE_FREQ; do
    [[ ${!name:-0} != *[!0.]* ]] || fail "$name: unset it: $why"
done
need_package torch
need_package openrlhf "docs/other-trainers.md says how to make one"
if [ -n "${RAY_ADDRESS:-}" ]; then
    [ -n "$NGPUS_PER_NODE" ] ||
        fail "RAY_ADDRESS=$RAY_ADDRESS: set NGPUS_PER_NODE; how many GPUs a node of that cluster has is not seen from here"
else
    read -r gpus _ < <(python3 -c 'import torch; print(torch.cuda.device_count())')
    NGPUS_PER_NODE=${NGPUS_PER_NODE:-$((gpus > 1 ? 2 : 1))}
    ((NGPUS_PER_NODE <= gpus)) ||
        fail "NGPUS_PER_NODE=$NGPUS_PER_NODE: this machine has $gpus GPUs, and OpenRLHF would wait for more without end"
fi
completions=$((batch_size * n_samples_per_prompt))      # of a rollout, and of an update
((completions % NGPUS_PER_NODE == 0)) ||
    fail "NGPUS_PER_NODE=$NGPUS_PER_NODE must divide BATCH_SIZE * N_SAMPLES_PER_PROMPT=$completions"
train_file=$(realpath -m "$data_dir/train.parquet")
case $train_file in *,*) fail "$train_file: OpenRLHF splits it at the comma: set DATA_DIR to a folder without one" ;; esac
if [ -e "$train_file" ]; then
    python3 -m recipes data --dataset "$dataset" --holds "$train_file"
else
    python3 -m recipes data --dataset "$dataset" --out "$data_dir"
fi

ALGORITHM=(
    --algo.advantage.estimator "$estimator"
    --algo.kl.init_coef 0                               # no KL term, no reference model
    --actor.loss_agg_mode seq-mean-token-mean           # Eq. 11
    --train.max_epochs 1
    --train.batch_size "$completions"
    --train.seed "$seed"
)

DATA=(
    --data.prompt_dataset "$train_file"
    --data.input_key prompt
    --data.label_key reward_model
    --data.apply_chat_template
    --data.max_len "$max_len"
    --reward.remote_url "$PWD/gtpo_verl/openrlhf/reward.py"
)

ACTOR=(
    --actor.model_name_or_path "$MODEL_PATH"
    --actor.num_nodes 1
    --actor.num_gpus_per_node "$NGPUS_PER_NODE"
    --actor.adam.lr "$actor_lr"                         # this and the next four: Listing 1
    --actor.adam.weight_decay 0.1
    --actor.max_norm 0.1
    --actor.lr_warmup_ratio 0.005
    --actor.lr_scheduler cosine
    --actor.gradient_checkpointing_enable
    --ds.zero_stage 3
    --ds.attn_implementation "$attn_implementation"
    --train.micro_batch_size 1
)

ROLLOUT=(
    --rollout.batch_size "$batch_size"
    --rollout.n_samples_per_prompt "$n_samples_per_prompt"
    --rollout.micro_batch_size 1
    --rollout.max_new_tokens "$max_new_tokens"
    --vllm.num_engines "$NGPUS_PER_NODE"
    --vllm.gpu_memory_utilization "$gpu_memory_utilization"
    --train.colocate_all
    --vllm.enable_sleep
    --ds.enable_sleep
)

TRAINER=(
    --train.num_episodes 1
    --ckpt.output_dir "$OUT/model"
    --ckpt.path "$OUT/checkpoints"
    --ckpt.save_steps "$save_steps"
    --ckpt.max_num "$keep"
    --logger.tensorboard_dir "$OUT/tensorboard"
)
# DeepSpeed writes this file last: where it is missing, the first checkpoint was cut off, and OpenRLHF would fail at it.
[ ! -e "$OUT/checkpoints/_actor/latest" ] || TRAINER+=(--ckpt.load_enable)

python3 -m gtpo_verl openrlhf "${ALGORITHM[@]}" "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
