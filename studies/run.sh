#!/usr/bin/env bash
# The study of GTPO (arXiv:2508.03772) against GRPO, on one core; see docs/study.md and studies/DESIGN.md.
#
#   bash studies/run.sh               what is missing of the plan; start it once for each core, the processes share it
#   bash studies/run.sh --list        the blocks, and how many runs are done; with --block its runs
#   bash studies/run.sh --archive     the logs of each block that is done into its archive, studies/results/*.zip
#   GLIBC_TUNABLES=glibc.malloc.hugetlb=1 bash studies/run.sh    a process of the real model in 8 to 12 GB, not 14 to 16
#   .venv/bin/python -m studies.report    tables and figures from the logs in studies/results
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_cpu.sh smollm2
source .venv/bin/activate

export VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin OMP_NUM_THREADS=1
# Freed memory stays with the process: fetching its pages anew takes time in every step.
export GLIBC_TUNABLES=${GLIBC_TUNABLES:-glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:glibc.malloc.hugetlb=1}
exec python3 -m studies.run "$@"
