#!/usr/bin/env bash
# Check the patches (GTPO, arXiv:2508.03772); see README.md beside this file.
#
#   bash patches/check.sh                           on verl 0.9.1 as PyPI has it, and on 0.9.1 with #7237's move
#   bash patches/check.sh --quick                   the same without runs of verl's trainer
#   VERL_MAIN=/path/to/verl bash patches/check.sh   and on what that clone has checked out, with upstream's own checks,
#                                                   and 0.9.1 with OTB and two more trainers
#   VERL_RECIPE=/path/to/verl-recipe bash patches/check.sh [--quick]    and the recipe within a copy of that clone
#
# Nothing is left behind but .venv and .cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=
case ${1:-} in
    --quick) quick=1 ;;
    ?*) echo "$1: give --quick or nothing" >&2; exit 1 ;;
esac
bash scripts/setup_cpu.sh
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export quick repo=$PWD work task=$PWD/.cache/arithmetic-seed1
export PATH=$PWD/.venv/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
export VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
export GIT_CONFIG_GLOBAL=/dev/null GIT_COMMITTER_NAME=check GIT_COMMITTER_EMAIL=check@localhost
export GIT_AUTHOR_NAME=check GIT_AUTHOR_EMAIL=check@localhost

prepare() {
    cd "$work"
    [ -n "$quick" ] || python -m recipes make-task arithmetic --out "$task" --seed 1 &
    # the versions of upstream's pre-commit configuration
    python -m venv tools
    tools/bin/pip install --quiet ruff==0.12.2 mypy==1.17.0
    python -m venv recipe-tools # and of verl-recipe's
    recipe-tools/bin/pip install --quiet ruff==0.14.10
    for version in 0.9.0 0.9.1; do
        python -m pip download --quiet --no-deps --no-binary verl --no-build-isolation "verl==$version"
    done
    sha256sum --check <<'SUMS'
41a7ebff5482a94fe1b0311ec48825fcb10123f9420801ca1b8e7e1d122f3f12  verl-0.9.0.tar.gz
3e03d8816b2546b2c5580705671b8d0bb3f79b8364e7b5c56dbfc1245536ba22  verl-0.9.1.tar.gz
SUMS
    mkdir 0.9.0 # which the recipe for verl-recipe names
    tar --no-same-owner --strip-components 1 -C 0.9.0 -xzf verl-0.9.0.tar.gz
    wait $!
}

# The verl and its three commits: in $work/$tree as it is, in $work/$tree-patched with the series.
apply() {
    cd "$work"
    if [ "$tree" = main ]; then
        git clone --quiet --shared "$VERL_MAIN" "$tree"
    else
        mkdir "$tree"
        tar --no-same-owner --strip-components 1 -C "$tree" -xzf verl-0.9.1.tar.gz
        if [ "$tree" = moved ]; then
            python "$repo/patches/apply_7237.py" "$tree"
            tools/bin/ruff check --quiet --config "$tree/pyproject.toml" --select F401,I --fix "$tree"/verl/{trainer/ppo,experimental}
        fi
        git -C "$tree" init --quiet
        git -C "$tree" add --all --force
        git -C "$tree" commit --quiet --message "verl 0.9.1"
    fi
    git -C "$tree" tag pristine
    git -C "$tree" worktree add --quiet --detach "../$tree-patched"
    cd "$tree-patched"
    absent=()
    for file in docs/index.rst docs/examples/config.rst examples/README.md; do
        [ -e "$file" ] || absent+=(--exclude="$file")
    done
    first=("$repo"/patches/0001-*.patch)
    [ ! -e verl/trainer/ppo/trainer_utils.py ] || first=("$repo"/patches/after-7237/0001-*.patch)
    git am --keep-non-patch "${absent[@]}" "$repo"/patches/0000-*.patch "${first[@]}" "$repo"/patches/0002-*.patch
}

lint() {
    cd "$work/$tree-patched"
    git diff --check pristine
    mapfile -t changed < <(git diff --name-only pristine -- '*.py')
    "$work/tools/bin/ruff" check "${changed[@]}"
    "$work/tools/bin/ruff" format --check "${changed[@]}"
    "$work/tools/bin/mypy" --ignore-missing-imports --scripts-are-modules "${changed[@]}"
}

# The local hooks of upstream's pre-commit configuration, generated YAML among them, and its checks of config and titles.
upstream_checks() {
    cd "$work/$tree-patched"
    local_hooks='import yaml
for repo in yaml.safe_load(open(".pre-commit-config.yaml"))["repos"]:
    if repo["repo"] == "local":
        print(*(hook["entry"] for hook in repo["hooks"] if hook["id"] != "compileall"), sep="\n")'
    python -c "$local_hooks" | while read -r hook; do
        echo "$hook"
        VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$PWD bash -c "$hook" </dev/null
    done
    python -m pytest -q -p no:cacheprovider tests/special_sanity/test_config_docs.py
    git log --format=%s pristine.. | while read -r title; do
        PR_TITLE=$title python tests/special_sanity/check_pr_title.py
    done
}

# Every override of the run scripts is a key of the config.
example() {
    cd "$work/$tree-patched"
    python3() { VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$PWD python scripts/print_cfg.py --cfg job "${@:3}"; }
    export -f python3
    for script in examples/gtpo_trainer/*.sh; do
        for adv_estimator in gtpo grpo; do
            ADV_ESTIMATOR=$adv_estimator VERL_USE_UV=0 bash "$script" | grep "adv_estimator: $adv_estimator"
        done
    done
}

# The recipe for verl-recipe, by its rules.
recipe() {
    cd "$work/$tree"
    "$work/recipe-tools/bin/ruff" check "$repo/patches/verl-recipe"
    "$work/recipe-tools/bin/ruff" format --check "$repo/patches/verl-recipe"
    bash -n "$repo/patches/verl-recipe/gtpo/run_qwen2.5_3b.sh"
    python3() { PYTHONPATH=$PWD python scripts/print_cfg.py --cfg job "${@:3}"; }
    export -f python3
    for adv_estimator in gtpo grpo; do
        ADV_ESTIMATOR=$adv_estimator bash "$repo/patches/verl-recipe/gtpo/run_qwen2.5_3b.sh" |
            grep "adv_estimator: $adv_estimator"
    done
    PYTHONPATH=$PWD python -m pytest -q -p no:cacheprovider "$repo/patches/verl-recipe/gtpo"
}

# The recipe in its place: its row in the README, the whole repository's lint, the verl that it installs.
recipe_repository() {
    cd "$work"
    git clone --quiet --shared "$VERL_RECIPE" verl-recipe
    cd verl-recipe
    cp -r "$repo/patches/verl-recipe/gtpo" .
    git apply "$repo/patches/verl-recipe/README.patch"
    "$work/recipe-tools/bin/ruff" check .
    "$work/recipe-tools/bin/ruff" format --check .
    for method in pip git; do
        bash install_verl.sh --recipe gtpo --method "$method" --show
    done 2>&1 | tee "$work/install-plan"
    grep "pip install verl==0.9.0" "$work/install-plan"
    grep "git checkout '483b8a009ba3a97563edee3a19887e4862b8094a'" "$work/install-plan"
}

tests() {
    cd "$work/$tree-patched"
    VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$PWD python -m pytest -q -p no:cacheprovider tests/test_base_config_on_cpu.py \
        tests/trainer/test_multi_trajectories_advantage_on_cpu.py tests/trainer/ppo/test_*_on_cpu.py
}

# From the work folder: the repository's would put the plugin's entry points on sys.path.
numbers() {
    cd "$work"
    same_numbers=$repo/scripts/same_numbers.py
    PYTHONPATH=$work/$tree python "$same_numbers" compute "plugin-$tree.pt" v1
    VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$work/$tree-patched \
        python "$same_numbers" compute "patched-$tree-v1.pt" v1 "patched-$tree-legacy.pt" legacy
    python "$same_numbers" compare "plugin-$tree.pt" "patched-$tree"-*.pt | tee /dev/stderr | tail -n 1 >"numbers-$tree"
    grep -q "^3 sources" "numbers-$tree"  # or one verl was compared with itself
}

# With the plugin installed too, verl's own serves gtpo, and the plugin says so.
plugin_defers() {
    cd "$work"
    export PYTHONPATH=$work/$tree-patched
    python -m gtpo_verl check | tee "both-$tree"
    grep "this verl has GTPO of its own" "both-$tree"
    python -c "from verl.trainer.ppo import core_algos
assert core_algos.get_adv_estimator_fn('gtpo') is core_algos.compute_gtpo_outcome_advantage"
}

train() { # train NAME MODULE [override…]
    cd "$work"
    # In place of the plugin's, which the recipes have.
    verls_keys=('~algorithm.gtpo' +algorithm.gtpo.{_target_=verl.trainer.config.GTPOConfig,completion_filter=always}
        +algorithm.gtpo.{entropy_coeff=0.1,entropy_threshold=0.6931,conflict_weight_positive=2,conflict_weight_negative=0})
    out=$work/train-$tree-$1
    VERL_USE_EXTERNAL_PLUGINS=none PYTHONPATH=$work/$tree-patched python -m recipes run --out "$out" --stall 100 -- \
        python -m "verl.$2" --config-path "$repo/recipes/config" --config-name gtpo_cpu \
        task_dir="$task" trainer.default_local_dir="$out/checkpoints" \
        trainer.total_training_steps=1 actor_rollout_ref.actor.policy_loss.loss_mode=vanilla \
        "${verls_keys[@]}" "${@:3}"
    # The V1 trainer logs the three metrics of verl's own GTPO, and none of the plugin's.
    python - "$1" "$out/metrics.jsonl" <<'PYTHON'
import json
import sys

estimator_and_trainer, log = sys.argv[1:]
(record,) = map(json.loads, open(log))
assert record["critic/advantages/max"] > 0 > record["critic/advantages/min"], record
metrics = {key: value for key, value in record.items() if key.startswith("gtpo/")}
if estimator_and_trainer == "v1":
    assert set(metrics) == {"gtpo/conflict/token_frac", "gtpo/entropy/mean", "gtpo/filter/dropped_frac"}, metrics
    assert metrics["gtpo/conflict/token_frac"] > 0, metrics
else:
    assert not metrics, metrics
if estimator_and_trainer != "otb":
    # They differ by the weights of conflict tokens, which no other estimator has.
    assert record["critic/advantages/mean"] != record["critic/returns/mean"], record
PYTHON
}
train_v1() { train v1 trainer.main_ppo trainer.use_v1=True; }
train_otb() {   # an estimator of verl's that needs a declared field
    train otb trainer.main_ppo trainer.use_v1=True algorithm.adv_estimator=optimal_token_baseline \
        actor_rollout_ref.actor.calculate_sum_pi_squared=True
}
train_legacy() { train legacy trainer.main_ppo trainer.use_v1=False; }
train_one_step_off() {
    train one_step_off experimental.one_step_off_policy.main_ppo trainer.use_v1=False \
        actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.checkpoint_engine.backend=gloo \
        actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipes.verl_cpu.gloo_checkpoint_engine \
        +rollout.nnodes=1 +rollout.n_gpus_per_node=1 ray_kwargs.ray_init.num_gpus=2
}

check() { # check TREE FUNCTION DESCRIPTION
    local start=$SECONDS result=ok log=$work/log-$1-$2
    export tree=$1
    timeout --kill-after=30 1800 bash -euo pipefail -c "$2" >"$log" 2>&1 || result=FAILED
    printf '| %-8s | %-62s | %-6s | %4d |\n' "$1" "$3" $result $((SECONDS - start)) | tee -a "$work/rows"
    [ $result = ok ] || { echo "--- $3" && tail -n 60 "$log"; }
    [ $result = ok ]
}
export -f prepare apply lint upstream_checks example recipe recipe_repository tests numbers plugin_defers train
export -f train_v1 train_otb train_legacy train_one_step_off

check_tree() {
    check "$1" apply "git am" || return
    check "$1" lint "ruff and mypy, as upstream configures them"
    [ "$1" != main ] || check "$1" upstream_checks "upstream's own hooks, generated YAML, config and title checks"
    check "$1" example "the example's overrides are keys of the config"
    check "$1" recipe "so are those of the recipe for verl-recipe, and its test"
    check "$1" tests "upstream's tests and ours"
    check "$1" numbers "same bits as the plugin, both trainers"
    check "$1" plugin_defers "with the plugin installed too, verl's own serves gtpo"
    [ -n "$quick" ] || check "$1" train_v1 "trains on CPU without the plugin: V1 trainer"
}
check_moved() {
    check moved apply "git am of the variant after #7237" || return
    check moved lint "ruff and mypy, as upstream configures them"
    check moved tests "upstream's tests and ours"
    check moved numbers "same bits as the plugin, both trainers"
}
check_others() { # `numbers` calls the trainers' functions; on main the legacy one is deprecated
    check 0.9.1 train_otb "OTB trains in the V1 trainer"
    check 0.9.1 train_legacy "the same with the legacy trainer"
    check 0.9.1 train_one_step_off "the same with one_step_off, an experimental trainer"
}

check "-" prepare "tools, task" || exit 1
set +e
check 0.9.0 recipe "the overrides and the test of the recipe, on the verl that it names"
[ -z "${VERL_RECIPE:-}" ] || check recipe recipe_repository "the recipe in a clone of verl-recipe"
if [ -z "${VERL_MAIN:-}" ]; then
    check_tree 0.9.1 &
else
    (check_tree 0.9.1 && { [ -n "$quick" ] || check_others; }) &
    check_tree main &
fi
check_moved &
wait
printf '\n| %-8s | %-62s | %-6s | %4s |\n|----------|%s|--------|------|\n' tree check result s "$(printf -- '-%.0s' {1..64})"
sort "$work/rows"
tail -qn 1 "$work"/numbers-*
[ -n "${VERL_MAIN:-}" ] || echo "main was not checked: give a clone as VERL_MAIN"
! grep -q FAILED "$work/rows"
