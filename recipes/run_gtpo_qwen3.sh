#!/usr/bin/env bash
# The first benchmark for GPUs: GTPO (arXiv:2508.03772) where GRPO drifts | Qwen3-0.6B, all weights, GSM8K, no KL term
#
#   ALGO=grpo SEED=1 bash recipes/run_gtpo_qwen3.sh [override…]
#   ALGO=gtpo SEED=1 bash recipes/run_gtpo_qwen3.sh [override…]    differs in the advantages alone
#
# The settings under which TRL #6407 reports an entropy above 2 nats, as far as it names them: 512 questions, 512 tokens,
# four clipped updates per rollout, a constant learning rate of 2e-6 after ten updates, 2,000 updates; the optimizer's others
# are TRL's defaults. recipes/run_gtpo_qwen.sh with another model; its variables hold, but for FINETUNE and BETAS.
#
# Not run yet. Run both methods with three seeds. Stop a run once `actor/entropy` has been above 2 nats for 20 steps and count
# it as failed; otherwise it ends after 500 steps (2,000 updates). Plot them with
#   python3 -m recipes plot 'GRPO=outputs/qwen3_grpo_seed?/metrics.jsonl' 'GTPO=outputs/qwen3_gtpo_seed?/metrics.jsonl' --out figures
# `actor/entropy` is a mean over tokens, `gtpo/entropy/mean` one over completions. GTPO helps if it fails with fewer seeds than
# GRPO and its accuracy at the end is not below GRPO's best; if GRPO does not fail either, the benchmark says nothing.
# Then the same with actor_rollout_ref.actor.ppo_epochs=1, and GTPO with its own loss and aggregation:
#   actor_rollout_ref.actor.policy_loss.loss_mode=gtpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
set -euo pipefail

export MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-0.6B}
export FINETUNE=full BETAS=default OFFLOAD=${OFFLOAD:-False}
export TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}
export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-512} MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-512}
export ACTOR_LR=${ACTOR_LR:-2e-6}
export TOTAL_EPOCHS=${TOTAL_EPOCHS:-16} SAVE_FREQ=${SAVE_FREQ:-100}
export OUT=${OUT:-outputs/qwen3_${ALGO:-gtpo}_seed${SEED:-3407}}

exec bash "$(dirname "${BASH_SOURCE[0]}")/run_gtpo_qwen.sh" \
    data.train_max_samples=512 \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.ppo_epochs=4 \
    actor_rollout_ref.actor.optim.lr_scheduler_type=constant \
    actor_rollout_ref.actor.optim.lr_warmup_steps=3 \
    "actor_rollout_ref.actor.optim.betas=[0.9,0.999]" \
    actor_rollout_ref.actor.optim.weight_decay=0 \
    actor_rollout_ref.actor.optim.clip_grad=1.0 \
    trainer.total_training_steps=500 \
    +trainer.collapse_watch=warn \
    "$@"
