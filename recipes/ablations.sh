#!/usr/bin/env bash
# The paper's ablations (GTPO, arXiv:2508.03772, Fig. 1 and 3 to 6, Sec. 6.2 and 9), each as settings of the same recipe.
#
#   bash recipes/ablations.sh NAME [override…]      without a NAME: what there is
#   MODEL=qwen DATASET=math bash recipes/ablations.sh kl_0.04
#   MODEL=cpu bash recipes/ablations.sh conflict_only     without a GPU: a model of 0.4 M parameters, on additions
#
# NAME brings the model and the dataset of its figure; MODEL (qwen | llama | cpu) and DATASET replace them. The other
# variables of recipes/run_gtpo_qwen.sh hold, with MODEL=cpu those of recipes/run_gtpo_cpu.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Settings are variables of the recipe (in upper case) and overrides; gtpo. stands for algorithm.gtpo.
ablations='
name                 | figure | model | data  | settings | what
gtpo                 | 3      | llama | gsm8k | | GTPO as it is
conflict_only        | 3      | llama | gsm8k | gtpo.entropy_coeff=0 gtpo.completion_filter=never | "No H, no delta": the conflict masks alone (Eq. 8)
kl_0                 | 3 4c 4d 5a | llama | gsm8k | ALGO=grpo KL_LOSS_COEF=0 | GRPO without KL; Fig. 5a: MODEL=qwen DATASET=math
kl_1e-6              | 1 3 5a | llama | gsm8k | ALGO=grpo KL_LOSS_COEF=1e-6 | GRPO
kl_0.04              | 1 3 5a | llama | gsm8k | ALGO=grpo KL_LOSS_COEF=0.04 | GRPO
gamma_0.1            | 4a     | llama | math  | gtpo.completion_filter=always gtpo.entropy_coeff=0.1 |
gamma_0.01           | 4a     | llama | math  | gtpo.completion_filter=always gtpo.entropy_coeff=0.01 |
gamma_0.001          | 4a     | llama | math  | gtpo.completion_filter=always gtpo.entropy_coeff=0.001 |
gamma_1e-6           | 4a     | llama | math  | gtpo.completion_filter=always gtpo.entropy_coeff=1e-6 |
no_filter            | 4a     | llama | math  | gtpo.completion_filter=never | "No delta": gamma = 0.1 without the completion filter
threshold_0.7        | 4b     | llama | gsm8k | gtpo.completion_filter=always gtpo.entropy_threshold=0.7 |
threshold_1.05       | 4b     | llama | gsm8k | gtpo.completion_filter=always gtpo.entropy_threshold=1.05 |
threshold_2.0        | 4b     | llama | gsm8k | gtpo.completion_filter=always gtpo.entropy_threshold=2.0 |
only_negative_0.7    | 4c     | qwen  | gsm8k | gtpo.completion_filter=always gtpo.filter_scope=negative gtpo.entropy_threshold=0.7 | "OnlyNeg": only negative completions are filtered
only_negative_1.05   | 4c     | qwen  | gsm8k | gtpo.completion_filter=always gtpo.filter_scope=negative gtpo.entropy_threshold=1.05 | "OnlyNeg"
only_negative_2.0    | 4c     | qwen  | gsm8k | gtpo.completion_filter=always gtpo.filter_scope=negative gtpo.entropy_threshold=2.0 | "OnlyNeg"
grpo_entropy_control | 4d     | llama | gsm8k | gtpo.conflict_span=none gtpo.completion_filter=always gtpo.entropy_threshold=1.05 | GRPO with entropy control; beside kl_0, threshold_1.05
group_8              | 5b     | qwen  | gsm8k | ROLLOUT_N=8 gtpo.completion_filter=never | also DATASET=math; MODEL=llama with ++algorithm.gtpo.completion_filter=auto
group_12             | 5b     | qwen  | gsm8k | ROLLOUT_N=12 gtpo.completion_filter=never |
betas_default        | 6      | qwen  | gsm8k | ALGO=grpo | GRPO with Adam betas 0.9, 0.95; also MODEL=llama
betas_paper          | 6      | qwen  | gsm8k | ALGO=grpo actor_rollout_ref.actor.optim.betas=[0.999999,0.999999] | GRPO with those of GTPO in Listing 1
span_first           | -      | llama | gsm8k | gtpo.conflict_span=first | the other reading of Sec. 5.1: the first run, wherever it starts
span_all             | -      | llama | gsm8k | gtpo.conflict_span=all | every conflict token, which Sec. 5.1 advises against
'
name=${1:-}
[ -n "$name" ] || { sed '/^$/d' <<<"$ablations"; exit; }
shift

line=$(awk -v name="$name" 'NR > 2 && $1 == name' <<<"$ablations")
[ -n "$line" ] || { echo "$name: there is no such ablation; bash recipes/ablations.sh lists them" >&2; exit 2; }
IFS='|' read -r _ _ model dataset settings _ <<<"$line"
read -r model dataset <<<"${MODEL:-$model} ${DATASET:-$dataset}"     # without the spaces of the table
case $model in qwen | llama | cpu) ;; *) echo "MODEL=$model: must be qwen, llama or cpu" >&2; exit 2 ;; esac

export ALGO=gtpo KL_LOSS_COEF=0
overrides=()
for setting in $settings; do
    case $setting in
        [A-Z]*) export "${setting?}" ;;
        *) overrides+=("${setting/#gtpo./++algorithm.gtpo.}") ;;
    esac
done

if [ "$model" = cpu ]; then
    export MODEL=tiny OUT=${OUT:-outputs/ablation_${name}_cpu_seed${SEED:-1}}
    exec bash recipes/run_gtpo_cpu.sh "${overrides[@]}" "$@"
fi
export DATASET=$dataset
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-ablation_${name}_${model}_${dataset}_${FINETUNE:-lora}_G${ROLLOUT_N:-8}_seed${SEED:-3407}}
exec bash "recipes/run_gtpo_$model.sh" "${overrides[@]}" "$@"
