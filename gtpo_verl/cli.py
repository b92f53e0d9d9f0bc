"""The command `gtpo-verl`, also `python -m gtpo_verl`: one subcommand per task, `check` if none is named.

A module with a subcommand has `add_arguments(parser)`, which also sets the parser's description and epilog, and
`run(args)`, which returns the exit status: 0, or 1 if the task itself failed. Wrong input raises, and becomes one line
and exit status 2, or the module's `BAD_INPUT`. Only the module of the chosen subcommand is imported.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "check": ("gtpo_verl.runs.check", "say whether GTPO can run here, and if not, what to do"),
    "data": ("gtpo_verl.paper.data", "write one of the paper's datasets as verl's parquet files"),
    "initial-entropy": (
        "gtpo_verl.paper.measure_initial_entropy",
        "measure a model's entropy before training",
    ),
    "diagnose": ("gtpo_verl.diagnose", "say what is wrong with a run, and whether GTPO would change it"),
    "run": ("gtpo_verl.runs.launch", "start one of verl's trainers in a folder of its own, and watch it"),
    "export": ("gtpo_verl.runs.export", "write a checkpoint as a model or adapter for transformers and vLLM"),
    "smoke": ("gtpo_verl.runs.smoke", "try a recipe on this machine: a few steps with a small model"),
    "evaluate": ("gtpo_verl.paper.evaluation", "compute pass@k and maj@k from verl's validation dumps"),
    "make-task": ("gtpo_verl.cpu.task", "make the data and the model for a run without an accelerator"),
    "view": ("gtpo_verl.view", "write one HTML file that shows what GTPO does to each token of a run"),
    "plot": ("gtpo_verl.paper.plots", "draw figures of runs and of their tokens"),
    "openrlhf": ("gtpo_verl.openrlhf.command", "run OpenRLHF's train_ppo_ray with the advantage estimator gtpo"),
}
"""Subcommand: its module and one line of help."""

_MAP = """\
options and an example of each command: gtpo-verl COMMAND --help

where to start:
  try it       bash recipes/run_gtpo_cpu.sh, which needs no accelerator
  train        bash recipes/run_gtpo_qwen.sh, or algorithm.adv_estimator=gtpo in any verl config
  settings     docs/keys.md, every key of algorithm.gtpo
  experiments  docs/reproduce.md, the command of each table and figure of the paper
  code         gtpo_verl is the algorithm, gtpo_verl.verl_plugin hooks it into verl, gtpo_verl.runs launches runs
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["check"]
    parser = argparse.ArgumentParser(
        prog="gtpo-verl",
        description="GTPO (Group-relative Trajectory-based Policy Optimization, arXiv:2508.03772) for verl.",
        epilog=_MAP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen, bad_input = arguments[0], 2
    try:
        try:
            for name, (module, summary) in COMMANDS.items():
                command = subparsers.add_parser(
                    name, help=summary, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
                )
                if name == chosen:
                    loaded = import_module(module)
                    loaded.add_arguments(command)
                    bad_input = getattr(loaded, "BAD_INPUT", bad_input)
                    command.set_defaults(run=loaded.run)
            args = parser.parse_args(arguments)
            return args.run(args)
        finally:
            sys.stdout.flush()  # a reader that has left, such as head, is noticed here and not while Python exits
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        # What a file holds must not steer the terminal.
        said = "".join(x if x.isprintable() else ascii(x)[1:-1] for x in said)
        print(f"gtpo-verl {chosen}: {said}", file=sys.stderr)
        return bad_input
    except KeyboardInterrupt:
        return 130
