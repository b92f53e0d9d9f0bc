#!/usr/bin/env bash
# The paper's ablations (GTPO, arXiv:2508.03772, Fig. 1 and 3 to 6, Sec. 6.2 and 9), each as overrides on the same base.
#
#   bash recipes/ablations.sh NAME [override…]      without a NAME: what there is
#   MODEL=qwen DATASET=math bash recipes/ablations.sh kl_0.04
#
# NAME brings the model and the dataset of its figure; MODEL (qwen | llama) and DATASET replace them. All variables of
# recipes/common.sh but ALGO and KL_BETA hold.
set -xeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

list() {
    cat <<'LIST'
name                   figure   model, data    what
gtpo                   3        llama gsm8k    GTPO as it is
conflict_only          3        llama gsm8k    "No H, no delta": the conflict masks alone (Eq. 8)
kl_0                   1 3 5a   llama gsm8k    GRPO without KL; Fig. 5a: MODEL=qwen DATASET=math
kl_1e-6                1 3 5a   llama gsm8k    GRPO with beta = 1e-6
kl_0.04                1 3 5a   llama gsm8k    GRPO with beta = 0.04
gamma_0.1              4a       llama math     entropy_coeff
gamma_0.01             4a       llama math     entropy_coeff
gamma_0.001            4a       llama math     entropy_coeff
gamma_1e-6             4a       llama math     entropy_coeff
no_filter              4a       llama math     "No delta": gamma = 0.1 without the completion filter
threshold_0.7          4b       llama gsm8k    entropy_threshold, filter on
threshold_1.05         4b       llama gsm8k    entropy_threshold, filter on
threshold_2.0          4b       llama gsm8k    entropy_threshold, filter on
only_negative_0.7      4c       qwen gsm8k     "OnlyNeg": only negative completions are filtered
only_negative_1.05     4c       qwen gsm8k     "OnlyNeg"
only_negative_2.0      4c       qwen gsm8k     "OnlyNeg"
grpo_entropy_control   4d       llama gsm8k    GRPO with the filter at 1.05 and gamma = 0.1; beside kl_0, threshold_1.05
group_8                5b       qwen gsm8k     GTPO with G = 8; also MODEL=llama, DATASET=math
group_12               5b       qwen gsm8k     GTPO with G = 12
betas_default          6        qwen gsm8k     GRPO with Adam betas 0.9, 0.95; also MODEL=llama
betas_paper            6        qwen gsm8k     GRPO with Adam betas 0.999999, 0.999999, those of GTPO in Listing 1
span_first             -        llama gsm8k    the other reading of Sec. 5.1: the first run, wherever it starts
span_all               -        llama gsm8k    every conflict token, which Sec. 5.1 advises against
LIST
}

name=${1:-}
shift || true
model=llama dataset=gsm8k algo=gtpo kl_beta=0 group_size=${G:-8} settings=()
case $name in
    gtpo) ;;
    conflict_only) settings=(algorithm.gtpo.entropy_coeff=0 algorithm.gtpo.completion_filter=never) ;;
    kl_0 | kl_1e-6 | kl_0.04) algo=grpo kl_beta=${name#kl_} ;;
    gamma_0.1 | gamma_0.01 | gamma_0.001 | gamma_1e-6)
        dataset=math settings=(algorithm.gtpo.entropy_coeff="${name#gamma_}")
        ;;
    no_filter) dataset=math settings=(algorithm.gtpo.completion_filter=never) ;;
    threshold_0.7 | threshold_1.05 | threshold_2.0)
        settings=(algorithm.gtpo.completion_filter=always algorithm.gtpo.entropy_threshold="${name#threshold_}")
        ;;
    only_negative_0.7 | only_negative_1.05 | only_negative_2.0)
        model=qwen
        settings=(
            algorithm.gtpo.completion_filter=always
            algorithm.gtpo.filter_scope=negative
            algorithm.gtpo.entropy_threshold="${name#only_negative_}"
        )
        ;;
    grpo_entropy_control)
        settings=(
            algorithm.gtpo.conflict_span=none
            algorithm.gtpo.completion_filter=always
            algorithm.gtpo.entropy_threshold=1.05
        )
        ;;
    group_8 | group_12) model=qwen group_size=${name#group_} ;;
    betas_default) model=qwen algo=grpo ;;
    betas_paper) model=qwen algo=grpo settings=(actor_rollout_ref.actor.optim.betas='[0.999999,0.999999]') ;;
    span_first | span_all) settings=(algorithm.gtpo.conflict_span="${name#span_}") ;;
    "") list; exit ;;
    *) list >&2; echo "$name: there is no such ablation" >&2; exit 2 ;;
esac
model=${MODEL:-$model}
dataset=${DATASET:-$dataset}

NAME=${NAME:-ablation_${name}_${model}_${dataset}_${FINETUNE:-lora}_G${group_size}_seed${SEED:-3407}} \
    ALGO=$algo DATASET=$dataset KL_BETA=$kl_beta G=$group_size \
    bash "recipes/run_gtpo_$model.sh" "${settings[@]}" "$@"
