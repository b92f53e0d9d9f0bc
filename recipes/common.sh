# shellcheck shell=bash disable=SC2034,SC2154
# What run_gtpo_qwen.sh, run_gtpo_cpu.sh, run_sft.sh and evaluate.sh share: each sources it first, and has its own variables
# and verl's settings in sight.

source recipes/checks.sh

# Before 3.13 Python reads the path of an editable install in the locale's encoding.
[ "$(locale charmap 2>/dev/null)" = UTF-8 ] || export LC_ALL=C.UTF-8

# Each of the variables named: a path or a name that Hydra can be given.
check_names() {
    local name
    for name; do
        case ${!name:-} in
            *'${'* | *$'\n'*)
                fail "$name=${!name}: the name has \${ or a line break, which Hydra does not take for a part of it: rename it"
                ;;
        esac
    done
}
check_names PWD OUT MODEL_PATH DATA_DIR DATA_ROOT TRAIN_FILE VAL_FILE ROLLOUT_DUMP PROJECT_NAME EXPERIMENT_NAME

# Print $1 as a value in an override: in quotes if it has a character that means something to Hydra. Within the quotes a
# backslash is one, but before a quote and at the end it has to be doubled. In other locales than C, A-Z has more letters.
hydra() {
    local LC_ALL=C
    case $1 in
        *[!A-Za-z0-9/._:%@+$\ -]*) sed -E "s/(\\\\*)'/\\1\\1\\\\'/g; s/(\\\\+)$/\\1\\1/; s/.*/'&'/" <<<"$1" ;;
        *) printf '%s\n' "$1" ;;
    esac
}

# Set the variable $1 to the absolute path of the folder $2, or to a link to it if the path has a character that matches $3.
# Everybody writes to /tmp, and what a link leads to is run and loaded: unless the link is this user's, the recipe ends.
set_linked() {
    local LC_ALL=C linked_folder linked_path
    linked_folder=$(realpath -m "$2") || fail "$2: has no absolute path"
    # shellcheck disable=SC2254
    case $linked_folder in
        *$3*)
            linked_path=/tmp/gtpo-$UID-$(sha256sum <<<"$linked_folder" | head -c 16)
            ln -sfnT "$linked_folder" "$linked_path" ||
                fail "$linked_path: no link to $linked_folder can be made there: remove it, or rename that folder"
            [ "$(stat -c %u "$linked_path") $(readlink "$linked_path")" = "$EUID $linked_folder" ] ||
                fail "$linked_path: is not this user's link to $linked_folder: remove it, or rename that folder"
            linked_folder=$linked_path
            ;;
    esac
    printf -v "$1" '%s' "$linked_folder"
}

# Set $1 to the path of a folder of data or of a model, or of a file, in which datasets and vLLM see no pattern: they would
# take [1], * and ? for one. The folder of a file can be linked, the file cannot: its name says what it holds.
set_plain_folder() { set_linked "$1" "$2" '[][*?]'; }
set_plain_file() {
    case $(basename "$2") in
        *[][*?]*) fail "$2: datasets takes [ ] * and ? in a file's name for a pattern: rename the file" ;;
    esac
    set_plain_folder "$1" "$(dirname "$2")"
    printf -v "$1" '%s' "${!1}/$(basename "$2")"
}

# Ray starts its workers by the path of Python, which it does not quote.
use_plain_python() {
    local LC_ALL=C bin environment
    bin=$(dirname "$(command -v python3)")
    case $bin in
        *[!A-Za-z0-9/._+-]*)
            set_linked environment "$(dirname "$bin")" '[!A-Za-z0-9/._+-]'
            PATH=$environment/$(basename "$bin"):$PATH
            ;;
    esac
}
use_plain_python

need_verl() { need_package verl "scripts/setup_cpu.sh makes one without a GPU"; }

for name in SMOKE EXTEND STRICT_INITIAL_ENTROPY; do
    check_choice $name 0 1
done
for name in OFFLOAD SAVE_LORA_ONLY; do
    check_choice $name True False true false
done
check_choice FREE_CACHE_ENGINE True False true false on_one_gpu
check_counts TRAIN_BATCH_SIZE PPO_MINI_BATCH_SIZE ROLLOUT_N MAX_PROMPT_LENGTH MAX_RESPONSE_LENGTH MAX_LENGTH \
    PPO_MAX_TOKEN_LEN_PER_GPU STEPS TOTAL_EPOCHS NNODES NGPUS_PER_NODE ROLLOUT_TP ACTOR_TP ACTOR_PP LORA_RANK SAMPLES BATCH \
    STALL_SECONDS
[ "${KEEP:-null}" = null ] || check_counts KEEP
[ "${TEST_FREQ:-}" = 0 ] || check_steps TEST_FREQ       # verl's PPO trainer takes 0 for none, too
check_steps SAVE_FREQ
check_seed
check_number ACTOR_LR
check_number KL_LOSS_COEF
check_share ROLLOUT_GPU_MEM_UTIL

# SMOKE=1 runs a few steps of the recipe with a small model in a folder of its own, and prints what works here.
[ "${SMOKE:-0}" = 0 ] || { need_verl; exec python3 -m recipes smoke "recipes/$(basename "$0")" -- "$@"; }

# EXTEND=1 lets a run take more steps than it was started for.
extend=()
[ "${EXTEND:-0}" = 0 ] || extend=(--extend)

# GTPO and its twin differ in these two keys.
ALGO=${ALGO:-gtpo}
case $ALGO in
    gtpo) loss_mode=gtpo ;;
    grpo) loss_mode=vanilla ;;
    *) fail "ALGO=$ALGO: must be gtpo or grpo" ;;
esac
ALGORITHM=(
    algorithm.adv_estimator="$ALGO"
    actor_rollout_ref.actor.policy_loss.loss_mode="$loss_mode"
)

# ENTROPY_FROM=update: GTPO's entropy comes from the update, and verl makes no old-log-prob pass, under GRPO neither.
ENTROPY_FROM=${ENTROPY_FROM:-old_log_prob}
case $ENTROPY_FROM in
    old_log_prob) ;;
    update) ALGORITHM+=(algorithm.gtpo.entropy_from=update algorithm.rollout_correction.bypass_mode=True) ;;
    *) fail "ENTROPY_FROM=$ENTROPY_FROM: must be old_log_prob or update" ;;
esac

# Without a KL term verl loads no reference model. With LoRA the reference is the base under the adapter.
kl_loss_coef=${KL_LOSS_COEF:-0}
case $ALGO-${kl_loss_coef//[0.]/} in    # a zero has nothing else
    *-) use_kl_loss=False ;;
    grpo-*) use_kl_loss=True ;;
    *) fail "KL_LOSS_COEF=$kl_loss_coef: GTPO has no KL term; unset it, or set ALGO=grpo" ;;
esac

# Listing 1 gives GTPO betas of 0.999999 and the other two methods 0.9 and 0.95. Fig. 6 shows that the betas alone move
# GRPO, so a comparison at different betas would not be one of the methods.
betas=${BETAS:-default}
case $betas-$ALGO in
    paper-gtpo) adam_beta1=0.999999 adam_beta2=0.999999 ;;
    paper-* | default-*) adam_beta1=0.9 adam_beta2=0.95 ;;
    *) fail "BETAS=$betas: must be default or paper" ;;
esac

# This machine: its GPUs, the attention kernel that is installed, and settings that come last.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}       # for the packages of this clone, in Ray's workers too
if [ "${VERL_PLATFORM:-}" = cpu ]; then
    export VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin
    gpus=1 attn_implementation=sdpa
    EXTRA=(+machine=cpu)
    # vLLM's CPU build cannot release anything, and takes its share of the machine's memory.
    FREE_CACHE_ENGINE=False ROLLOUT_GPU_MEM_UTIL=${ROLLOUT_GPU_MEM_UTIL:-0.1}
else
    EXTRA=()
    [ -z "${RAY_ADDRESS:-}" ] || [ -n "${NGPUS_PER_NODE:-}" ] ||
        fail "RAY_ADDRESS=$RAY_ADDRESS: set NGPUS_PER_NODE; how many GPUs a node of that cluster has is not seen from here"
    need_verl
    read -r gpus attn_implementation < <(python3 -c '
import importlib.util, torch
print(max(1, torch.cuda.device_count()), "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa")')
fi

# Print the most GPUs over which the $2 completions of an update can be split evenly: at most two for each of the batch's
# $1 prompts, since more are hardly faster, and no more than the machine has.
gpus_for() {
    local n=$((gpus < 2 * $1 ? gpus : 2 * $1))
    while (($2 % n)); do n=$((n - 1)); done
    echo "$n"
}

# Add to MODEL what FINETUNE asks for in the section $1 of the config. Neither the paper nor Listing 1 gives LoRA's alpha;
# the authors' code takes the rank.
add_finetune_to_model() {
    case $finetune in
        lora)
            MODEL+=(
                "$1.lora_rank=$lora_rank"
                "$1.lora_alpha=$lora_rank"
                "$1.target_modules=[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj]"
            )
            ;;
        full) ;;
        *) fail "FINETUNE=$finetune: must be lora or full" ;;
    esac
}

# Set TRAINER to the settings that verl's PPO and SFT trainers call by one name.
set_trainer() {
    TRAINER=(
        seed="$seed"
        trainer.n_gpus_per_node="$NGPUS_PER_NODE"
        trainer.project_name="$(hydra "$project_name")"
        trainer.experiment_name="$(hydra "$experiment_name")"
        trainer.logger="[file,$logger]"
        trainer.total_epochs="$total_epochs"
        trainer.save_freq="$save_freq"
        trainer.test_freq="$test_freq"
        trainer.default_local_dir="$(hydra "$OUT/checkpoints")"
    )
}

# Make the data of the run, unless it is there already; "$@" are options of `python3 -m recipes data`.
make_data() {
    local remedy="no such file beside the other: set TRAIN_FILE and VAL_FILE (one may be both), or remove the other to have both made"
    if [ -e "$train_file" ] || [ -e "$val_file" ]; then
        [ -e "$train_file" ] || fail "$train_file: $remedy"
        [ -e "$val_file" ] || fail "$val_file: $remedy"
        python3 -m recipes data --dataset "$dataset" --holds "$train_file" "$val_file"
    else
        python3 -m recipes data --dataset "$dataset" --out "$data_dir" "$@"
    fi
}

# Print the value of the key $1 in COMMAND, where the last one counts, as Hydra reads it: without quotes, and without the
# backslashes that `hydra` has put before a quote and at the end.
setting() {
    local word value=
    for word in "${COMMAND[@]}"; do
        case $word in "$1="* | "+$1="* | "++$1="*) value=${word#*=} ;; esac
    done
    case $value in
        \'*\') sed -E "s/^'(.*)'$/\\1/; s/(\\\\+)\\1$/\\1/; s/(\\\\*)\\1\\\\'/\\1'/g" <<<"$value" ;;
        *) printf '%s\n' "$value" ;;
    esac
}

# Succeed if ⟨H⟩_ini is to be measured before the run, as the paper does it, on 100 training prompts:
# STRICT_INITIAL_ENTROPY=1 asks for it and ENTROPY_FROM=update needs it, and in either case only where the filter rests
# on it.
measures_initial_entropy() {
    [ "$ALGO-$(setting algorithm.gtpo.initial_entropy)" = gtpo- ] || return 1
    case $(setting algorithm.gtpo.completion_filter) in '' | auto) ;; *) return 1 ;; esac
    [ "${STRICT_INITIAL_ENTROPY:-0}" != 0 ] || [ "$ENTROPY_FROM" = update ]
}

# Check the command and the machine, before anything is measured; 0 stands for the ⟨H⟩_ini that is measured later.
check_command() {
    local later=()
    ! measures_initial_entropy || later=(algorithm.gtpo.initial_entropy=0)
    python3 -m gtpo_verl check -- "${COMMAND[@]}" "${later[@]}"
}

# Set INITIAL_ENTROPY to the override with the measured ⟨H⟩_ini; it stays empty where none is to be measured.
INITIAL_ENTROPY=()
measure_initial_entropy() {
    measures_initial_entropy || return 0
    local word record=$OUT/initial_entropy.txt options=(
        --model "$(setting actor_rollout_ref.model.path)" --data "$(setting data.train_files)" --samples 100
        --seed "$(setting seed)" --max-response-length "$(setting data.max_response_length)" --
    )
    for word in "${COMMAND[@]}"; do
        case $word in *data.apply_chat_template_kwargs*) options+=("$word") ;; esac
    done
    # A run that is started again takes what its first start measured.
    if [ "$(head -n 1 "$record" 2>/dev/null)" != "${options[*]}" ]; then
        mkdir -p "$OUT"
        # Not tee /dev/stderr, which empties a file that a job's stderr goes to.
        { echo "${options[*]}" && python3 -m gtpo_verl initial-entropy "${options[@]}"; } |
            tee >(cat >&2) >"$record.partial"
        mv "$record.partial" "$record"
    fi
    INITIAL_ENTROPY=(algorithm.gtpo.initial_entropy="$(sed -n 's/^initial_entropy=//p' "$record")")
}
