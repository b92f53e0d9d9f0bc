"""`python3 -m recipes`, in a clone: the programs that the recipes are made of."""

import sys
from collections.abc import Sequence

from gtpo_verl import cli

COMMANDS: cli.Commands = {
    "data": ("recipes.paper.data", "write one of the paper's datasets as verl's parquet files"),
    "make-task": ("recipes.tasks.make_task", "make the data and the model for a run without an accelerator"),
    "run": ("recipes.runs.launch", "start one of verl's trainers in a folder of its own, and watch it"),
    "smoke": ("recipes.runs.smoke", "try a recipe on this machine: a few steps with a small model"),
    "export": ("recipes.runs.export", "write a checkpoint as a model or adapter for transformers and vLLM"),
    "evaluate": ("recipes.paper.evaluation", "compute pass@k and maj@k from verl's validation dumps"),
    "plot": ("recipes.paper.plots", "draw figures of runs"),
}
_MAP = """\
options and an example of each command: python3 -m recipes COMMAND --help

where to start:
  try it       bash recipes/run_gtpo_cpu.sh, which needs no accelerator
  train        bash recipes/run_gtpo_qwen.sh
  experiments  docs/reproduce.md, the command of each table and figure of the paper
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the programs; returns its exit status."""
    return cli.main(argv, "python3 -m recipes", COMMANDS, "The programs of this clone's recipes.", _MAP)


if __name__ == "__main__":
    sys.exit(main())
