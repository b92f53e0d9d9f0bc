#!/usr/bin/env bash
# Check the patch series (GTPO, arXiv:2508.03772) on verl 0.9.1 as PyPI has it; see README.md beside this file.
#
#   bash patches/check.sh      about four minutes on two cores; nothing is left behind but .venv and .cache
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_cpu.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export repo=$PWD work python=$PWD/.venv/bin/python source=$work/verl-0.9.1 task=$PWD/.cache/arithmetic-seed1
# On sys.path before the environment's own: the patched verl, and a gtpo-verl that only declares the cpu platform.
export patched=$source without_plugin=$work/without_plugin
unset VERL_USE_EXTERNAL_MODULES
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore

unpack() {
    cd "$work"
    "$python" -m pip download --quiet --no-deps --no-binary verl --no-build-isolation verl==0.9.1
    echo "3e03d8816b2546b2c5580705671b8d0bb3f79b8364e7b5c56dbfc1245536ba22  verl-0.9.1.tar.gz" | sha256sum --check
    tar --no-same-owner -xzf verl-0.9.1.tar.gz
    mkdir -p "$without_plugin/gtpo_verl-0.dist-info"
    printf 'Metadata-Version: 2.1\nName: gtpo-verl\nVersion: 0\n' >"$without_plugin/gtpo_verl-0.dist-info/METADATA"
    printf '[verl.plugins]\ncpu = gtpo_verl.cpu.plugin\n' >"$without_plugin/gtpo_verl-0.dist-info/entry_points.txt"
}

apply() {
    cd "$source"
    export GIT_CONFIG_GLOBAL=/dev/null GIT_COMMITTER_NAME=check GIT_COMMITTER_EMAIL=check@localhost
    export GIT_AUTHOR_NAME=check GIT_AUTHOR_EMAIL=check@localhost
    git init --quiet
    git add --all --force
    git commit --quiet --message "verl 0.9.1"
    git tag pristine
    git am --keep-non-patch "$repo"/patches/verl-0.9.1/*.patch
}

# The set for upstream's main makes the same changes, and enters GTPO into two indices that PyPI does not have.
same_for_main() {
    cd "$repo/patches"
    changes() {
        awk '/^diff --git/ { skip = / b\/(docs\/index\.rst|examples\/README\.md)$/ } !skip && /^[-+]/' "$1"
    }
    for patch in verl-0.9.1/*.patch; do
        diff <(changes "$patch") <(changes "verl-main/${patch##*/}")
    done
}

# With the versions of upstream's pre-commit configuration.
lint() {
    cd "$source"
    "$python" -m venv "$work/tools"
    "$work/tools/bin/pip" install --quiet ruff==0.12.2 mypy==1.17.0
    mapfile -t changed < <(git diff --name-only pristine -- '*.py')
    "$work/tools/bin/ruff" check "${changed[@]}"
    "$work/tools/bin/ruff" format --check "${changed[@]}"
    "$work/tools/bin/mypy" --ignore-missing-imports --scripts-are-modules "${changed[@]}"
    # upstream's check_docstrings.py: the same files, and public functions and classes only
    "$work/tools/bin/ruff" check --isolated --select D101,D102,D103 verl/trainer/{main_ppo,ppo/ray_trainer}.py \
        verl/trainer/ppo/{reward,core_algos}.py verl/utils/reward_score/__init__.py \
        verl/experimental/agent_loop/agent_loop.py
}

# What upstream's tests/special_sanity and pre-commit hooks ask for, which PyPI does not have either.
conventions() {
    cd "$source"
    git diff --check pristine
    for file in $(git diff --name-only --diff-filter=A pristine); do
        case $file in
            *.py) head -1 "$file" | grep -x "# Copyright 2026 Bytedance Ltd. and/or its affiliates" ;;
            docs/*) grep -xE "Last updated: [0-9]{2}/[0-9]{2}/[0-9]{4}\." "$file" ;;
            examples/*.sh)
                [[ ${file##*/} =~ ^run_[a-z0-9_.]+_(fsdp|fsdp2|megatron|veomni)\.sh$ && ! $file =~ vllm|sglang|npu ]]
                grep -F 'if [ "${VERL_USE_UV:-1}" != 0 ] && [ "${DEVICE:-gpu}" = gpu ]; then' "$file"
                ;;
        esac
    done
    # test_config_docs.py: a comment above each key, an empty line below it, none inline
    awk '/^ *[A-Za-z0-9_]+:/ { if (last !~ /^ *#/ || /#/) exit 1; key = 1; last = $0; next }
         key && NF { exit 1 } { key = 0; last = $0 }' verl/trainer/config/ppo_trainer.yaml
    git log --reverse --format=%s pristine.. | tee /dev/stderr |
        awk '!/^\[[0-9]\/[0-9]\] \[[a-z, ]+\] (feat|fix|refactor|chore|test): / { exit 1 }'
    [ -z "$(git log --patch pristine.. | grep '^+.*ve''RL' || true)" ]
}

generated_yaml() {
    cd "$source"
    for engine in "" megatron veomni torchtitan; do
        PYTHONPATH=$patched:$without_plugin "$python" scripts/print_cfg.py --cfg job ${engine:+model_engine=$engine} |
            sed -n '/^actor_rollout_ref/,$p' |
            diff <(tail -n +6 "verl/trainer/config/_generated_ppo_${engine:+${engine}_}trainer.yaml") -
    done
}

# Every override of the run script is a key of the config.
example() {
    cd "$source"
    python3() { PYTHONPATH=$patched:$without_plugin "$python" scripts/print_cfg.py --cfg job "${@:3}"; }
    export -f python3
    for algo in gtpo grpo; do
        ALGO=$algo VERL_USE_UV=0 bash examples/gtpo_trainer/run_qwen2_5_3b_fsdp.sh | grep "adv_estimator: $algo"
    done
}

upstream_tests() {
    cd "$source"
    PYTHONPATH=$patched:$without_plugin "$python" -m pytest -q -p no:cacheprovider tests/trainer tests/test_base_config_on_cpu.py
}

# From the work folder: the repository's would put the plugin's entry points on sys.path.
same_numbers() {
    cd "$work"
    PYTHONPATH='' "$python" "$repo/scripts/same_numbers.py" compute stock_and_plugin.pt v1
    PYTHONPATH=$patched:$without_plugin "$python" "$repo/scripts/same_numbers.py" compute patched.pt v1
    "$python" "$repo/scripts/same_numbers.py" compare stock_and_plugin.pt patched.pt | tee "$work/compared"
}

# With both installed, verl's own GTPO serves, and the plugin says so.
both_present() {
    cd "$work"
    PYTHONPATH=$patched "$python" -m gtpo_verl | tee /dev/stderr >both
    grep "the plugin steps back" both
    grep "estimator gtpo: verl.trainer.ppo.core_algos.compute_gtpo_outcome_advantage" both
    grep "policy loss gtpo: verl.trainer.ppo.core_algos.compute_policy_loss_gtpo" both
    PYTHONPATH=$patched "$python" "$repo/scripts/same_numbers.py" compute patched_and_plugin.pt v1
    "$python" "$repo/scripts/same_numbers.py" compare stock_and_plugin.pt patched_and_plugin.pt
}

train() {
    cd "$work"
    export VERL_PLATFORM=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
    PYTHONPATH=$patched:$without_plugin "$python" -m gtpo_verl.paper.launch --out "$1" -- \
        --config-path "$repo/recipes/config" --config-name gtpo_cpu task_dir="$task" \
        trainer.default_local_dir="$work/$1/checkpoints" "${@:2}"
}

# Step 3 is a run of its own, resumed from the checkpoint of step 2.
train_v1() {
    "$python" -m gtpo_verl task arithmetic --out "$task" --seed 1
    train v1 trainer.total_training_steps=2 trainer.save_freq=2
    train v1 trainer.total_training_steps=3
    steps_are v1 3
}

train_legacy() {
    train legacy trainer.use_v1=False trainer.total_training_steps=1
    steps_are legacy 1
}

steps_are() {
    "$python" - "$work/$1/metrics.jsonl" "$2" <<'PYTHON'
import json, sys
records = [json.loads(line) for line in open(sys.argv[1])]
assert [record["step"] for record in records] == list(range(1, int(sys.argv[2]) + 1)), records
assert len({record["gtpo/entropy/initial"] for record in records}) == 1, records
assert all(record["gtpo/conflict/token_frac"] > 0 for record in records), records
PYTHON
    # which the plugin would have written
    [ ! -e "$work/$1/checkpoints/gtpo_initial_entropy.json" ]
}

rows=()
failed=0
echo "no numbers compared" >"$work/compared"
check() { # check LIMIT FUNCTION DESCRIPTION
    local start=$SECONDS result=ok
    timeout --kill-after=30 "$1" bash -euo pipefail -c "$2" >"$work/log" 2>&1 || result=FAILED
    if [ $result = FAILED ]; then
        failed=1
        echo "--- $3" && tail -n 60 "$work/log"
    fi
    rows+=("$(printf '| %-72s | %-6s | %4d |' "$3" $result $((SECONDS - start)))")
    echo "${rows[-1]}"
}
export -f unpack apply same_for_main lint conventions generated_yaml example upstream_tests same_numbers both_present
export -f train train_v1 train_legacy steps_are

check 120 unpack "verl 0.9.1 from PyPI, its hash"
check 60 apply "git am"
if [ $failed = 0 ]; then
    check 30 same_for_main "the set for upstream's main makes the same changes"
    check 180 lint "ruff, mypy and docstrings as upstream configures them"
    check 30 conventions "licence header, dates, names, YAML comments, titles"
    check 120 generated_yaml "generated YAML is up to date"
    check 60 example "the example's overrides are keys of the config"
    check 300 upstream_tests "upstream's tests and ours"
    check 300 same_numbers "same advantages and loss as stock verl with the plugin, bit for bit"
    check 120 both_present "with the plugin installed too, verl's own serves gtpo: same numbers"
    check 900 train_v1 "trains on CPU without the plugin: V1 trainer, 2 steps, 1 resumed"
    check 600 train_legacy "the same with the legacy trainer, 1 step"
fi
printf '\n| %-72s | %-6s | %4s |\n|%s|%s|%s|\n' check result s "$(printf -- '-%.0s' {1..74})" -------- ------
printf '%s\n' "${rows[@]}"
tail -n 1 "$work/compared"
exit $failed
