#!/usr/bin/env bash
# The study of GTPO (arXiv:2508.03772) against GRPO at equal settings, in verl's trainer on CPU; see docs/study.md.
#
#   bash studies/run.sh [NAME…]       all runs, or those whose names begin so; what is done is not done again
#   bash studies/run.sh --list        the runs, and which are done
#   bash studies/run.sh --quick       one figure in ten minutes: GTPO and GRPO, one seed
#   .venv/bin/python -m studies.report    tables and figures from the logs in studies/results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_cpu.sh smollm2
source .venv/bin/activate

export VERL_PLATFORM=cpu OMP_NUM_THREADS=1 RAY_worker_niceness=0
export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0
exec python3 -m studies.run "$@"
