"""`python3 -m recipes make-task NAME`: make the data and the model for a run without an accelerator, once.

Each task is a module of this folder with a function `prepare`. What it makes lies in one folder: `model` in Hugging
Face format, `train.parquet` and `test.parquet` in verl's, and a record of the settings.
"""

import argparse
import signal
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `python3 -m recipes make-task`."""
    parser.description = "Make the data and the model for a run without an accelerator, once."
    parser.epilog = "example: python3 -m recipes make-task arithmetic --out .cache/arithmetic-seed1 --seed 1"
    parser.add_argument("task", choices=["arithmetic", "smollm2"], help="a model of 0.4 M parameters, or of 135 M")
    parser.add_argument("--out", required=True, help="folder to write; kept if it is up to date")
    parser.add_argument("--seed", type=int, default=0, help="of the questions and the weights (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make the task."""
    import torch

    # Raised where it is at work, so that what it has written beside the folder is removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))

    torch.set_num_threads(1)  # more of them gain nothing at this size and cost a lot on a machine that is busy
    if args.task == "smollm2":
        from recipes.tasks import smollm2

        smollm2.prepare(args.out, smollm2.Config(seed=args.seed))
    else:
        from recipes.tasks import tiny

        tiny.prepare(args.out, tiny.WarmStartConfig(seed=args.seed))
    print(f"{args.out}: model, train.parquet, test.parquet")
    return 0
