#!/usr/bin/env bash
# Test GTPO (arXiv:2508.03772) in TRL, examples/trl_gtpo.py, on CPU and in an environment of its own, .venv-trl: about a
# minute on two cores, installation included. Needs Python 3.11 or later; PYTHON names one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ -x .venv-trl/bin/python ] || "${PYTHON:-python3}" -m venv .venv-trl
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
# torch first: TRL asks for it without a version, and would take the newest CUDA build.
.venv-trl/bin/pip install -qq torch==2.13.0
.venv-trl/bin/pip install -qq trl==1.16.0 transformers==5.23.0 peft==0.21.2 pytest
PYTHONPATH=$PWD:$PWD/examples:$PWD/tests/helpers .venv-trl/bin/python -m pytest -q -p no:cacheprovider examples
