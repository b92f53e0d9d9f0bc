#!/usr/bin/env bash
# Train with GTPO (arXiv:2508.03772) in OpenRLHF's own trainer, on CPU and in an environment of its own, .venv-openrlhf.
#
#   bash scripts/check_openrlhf.sh                   OpenRLHF 0.11.2
#   bash scripts/check_openrlhf.sh 0.10.4 0.11.2     these, of those that setup_openrlhf_cpu.sh knows
#
# tests/openrlhf_on_cpu/README.md says what is compared, and what stands in for a GPU. Needs Python 3.11; PYTHON names it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- 0.11.2
export PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
for version in "$@"; do
    OPENRLHF=$version bash scripts/setup_openrlhf_cpu.sh
    echo "OpenRLHF $version"
    # Not the conftest.py of tests/, which needs verl. -s shows the largest differences.
    PYTHONPATH=$PWD:$PWD/tests/openrlhf_on_cpu .venv-openrlhf/bin/python -m pytest -q -s -p no:cacheprovider \
        --confcutdir=tests/openrlhf_on_cpu tests/openrlhf_on_cpu
done
