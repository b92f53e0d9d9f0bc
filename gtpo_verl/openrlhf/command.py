"""`gtpo-verl openrlhf`: OpenRLHF's `train_ppo_ray` with the advantage estimator `gtpo` (arXiv:2508.03772)."""

import argparse
import os
import runpy
import sys
from importlib.util import find_spec

import wrapt

from gtpo_verl.openrlhf import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything behind `openrlhf` is OpenRLHF's, `--help` included."""
    parser.prefix_chars = ""
    parser.add_argument("options", nargs=argparse.REMAINDER)


def run(args: argparse.Namespace) -> int:
    """Become `python -m gtpo_verl.openrlhf`, so that an error in training keeps its traceback."""
    os.execv(sys.executable, [sys.executable, "-m", "gtpo_verl.openrlhf", *args.options])


def main() -> None:
    """Run `openrlhf.cli.train_ppo_ray`, which has no function to call, with the arguments of this process."""
    if find_spec("openrlhf") is None:
        sys.exit("gtpo-verl openrlhf: there is no OpenRLHF in this environment; see docs/openrlhf.md")
    wrapt.wrap_function_wrapper(argparse, "ArgumentParser.parse_args", options.parse_args)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
