# shellcheck shell=bash
# What the variables of the recipes may be, and what a recipe needs. run_gtpo_openrlhf.sh sources this file itself, the
# others by common.sh. A variable that is unset or empty keeps the recipe's default.

fail() { echo "$1" >&2; exit 2; }

# Each of the variables named: 1, 2 and so on, of as many digits as bash can multiply.
check_counts() {
    local name
    for name; do
        [[ ${!name:-1} =~ ^[1-9][0-9]{0,8}$ ]] ||
            fail "$name=${!name}: must be a whole number above 0, of at most nine digits"
    done
}

# The variable $1: a number of steps, or -1 for none.
check_steps() {
    [[ ${!1:-1} =~ ^(-1|[1-9][0-9]{0,8})$ ]] || fail "$1=${!1}: must be a number of steps, or -1 for none"
}

# SEED, as numpy and Python take it.
check_seed() {
    if ! [[ ${SEED:-0} =~ ^(0|[1-9][0-9]{0,9})$ ]] || ((${SEED:-0} >= 2 ** 32)); then
        fail "SEED=$SEED: must be a whole number, 0 or above and below 2^32"
    fi
}

# The variable $1: 0, or a number above it.
check_number() {
    [[ ${!1:-1} =~ ^([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$ ]] || fail "$1=${!1}: must be a number, 0 or above"
}

# The variable $1: a share, above 0 and at most 1.
check_share() {
    check_number "$1"
    awk -v share="${!1:-1}" 'BEGIN { exit !(0 < share && share <= 1) }' ||
        fail "$1=${!1}: must be a share, above 0 and at most 1"
}

# The variable $1: one of the words that follow.
check_choice() {
    local name=$1 word
    shift
    [ -n "${!name:-}" ] || return 0
    for word; do
        [ "${!name}" != "$word" ] || return 0
    done
    local last=${*: -1} others=${*:1:$#-1}
    fail "$name=${!name}: must be ${others// /, } or $last"
}

# The package $1, which is not imported; $2 says more about the remedy.
need_package() {
    python3 -c "import importlib.util, sys; sys.exit(not importlib.util.find_spec('$1'))" >/dev/null ||
        fail "$(command -v python3) has no $1: activate the environment that has it${2:+ ($2)}"
}
