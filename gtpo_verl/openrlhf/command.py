"""`gtpo-verl openrlhf`: OpenRLHF's `train_ppo_ray` with the advantage estimator `gtpo` (arXiv:2508.03772)."""

import argparse
import os
import runpy
import sys
from importlib.metadata import version
from importlib.util import find_spec

import wrapt

from gtpo_verl.links import DOCS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `gtpo-verl openrlhf`: all words after it are OpenRLHF's, except a lone `--help`."""
    parser.usage = "gtpo-verl openrlhf OPTIONS"
    parser.description = (
        "OpenRLHF's own train_ppo_ray, with --algo.advantage.estimator gtpo and its settings as JSON in --algo.gtpo\n"
        f"({DOCS}/other-trainers.md). All other options: python -m openrlhf.cli.train_ppo_ray --help"
    )
    parser.epilog = (
        "example: gtpo-verl openrlhf YOUR_OPTIONS --algo.advantage.estimator gtpo --algo.kl.init_coef 0 \\\n"
        "         --actor.loss_agg_mode seq-mean-token-mean --train.batch_size ROLLOUT_BATCH_SIZE_TIMES_SAMPLES"
    )
    parser.prefix_chars = ""  # no word is an option of this parser
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of OpenRLHF's train_ppo_ray")
    parser.set_defaults(parser=parser)


def run(args: argparse.Namespace) -> int:
    """Become a process of OpenRLHF's alone, in which an error in training keeps its traceback."""
    if args.options in (["-h"], ["--help"]):
        args.parser.print_help()
        args.parser.exit()
    os.execv(sys.executable, [sys.executable, "-m", "gtpo_verl.openrlhf", *args.options])


def main() -> None:
    """Run `openrlhf.cli.train_ppo_ray`, which has no function to call, with the arguments of this process."""
    if find_spec("openrlhf") is None:
        sys.exit(f"gtpo-verl openrlhf: no OpenRLHF in this environment; how to install it: {DOCS}/other-trainers.md")
    from packaging.version import Version

    from gtpo_verl.openrlhf import options

    first = options.SUPPORTED_OPENRLHF[0]
    installed = version("openrlhf")
    if Version(installed) < Version(first):
        sys.exit(f"gtpo-verl openrlhf: it needs OpenRLHF {first} or later; this is {installed}: upgrade openrlhf")
    wrapt.wrap_function_wrapper(argparse, "ArgumentParser.parse_args", options.parse_args)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
