"""`gtpo-verl openrlhf`: OpenRLHF's `train_ppo_ray` with the advantage estimator `gtpo` (arXiv:2508.03772)."""

import argparse
import os
import runpy
import sys
from importlib.util import find_spec

import wrapt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything behind `openrlhf` is OpenRLHF's, but `--help` alone."""
    parser.usage = "gtpo-verl openrlhf OPTIONS"
    parser.description = (
        "OpenRLHF's own train_ppo_ray, with --algo.advantage.estimator gtpo and its settings as JSON in --algo.gtpo\n"
        "(docs/keys.md). All options: python -m gtpo_verl.openrlhf --help. See docs/openrlhf.md."
    )
    parser.epilog = "example: gtpo-verl openrlhf --algo.advantage.estimator gtpo --algo.kl.init_coef 0 OPTIONS"
    parser.prefix_chars = ""  # no word is an option of this parser
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of OpenRLHF's train_ppo_ray")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    """Become `python -m gtpo_verl.openrlhf`, so that an error in training keeps its traceback."""
    if args.options in (["-h"], ["--help"]):
        args.parser.print_help()
        args.parser.exit()
    os.execv(sys.executable, [sys.executable, "-m", "gtpo_verl.openrlhf", *args.options])


def main() -> None:
    """Run `openrlhf.cli.train_ppo_ray`, which has no function to call, with the arguments of this process."""
    if find_spec("openrlhf") is None:
        sys.exit("gtpo-verl openrlhf: there is no OpenRLHF in this environment; see docs/openrlhf.md")
    from gtpo_verl.openrlhf import options

    wrapt.wrap_function_wrapper(argparse, "ArgumentParser.parse_args", options.parse_args)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
