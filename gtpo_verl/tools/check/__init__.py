"""`gtpo-verl check`: is GTPO hooked into this verl, would a command of it start, and can this machine run it?

The user's own program composes its config, in a process that ends there (`guard`), and the config is judged in it
(`judge`): only the program knows its config and what it registers.
"""

import argparse
import sys
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

from gtpo_verl.tools.check import guard
from gtpo_verl.tools.check.command import Command, read
from gtpo_verl.tools.check.finding import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `gtpo-verl check`."""
    parser.description = "Say whether GTPO is hooked into this verl and, given a command, whether it can run here."
    parser.epilog = (
        "example: gtpo-verl check\n"
        "         gtpo-verl check -- python3 -m verl.trainer.main_ppo --config-path DIR --config-name NAME …\n"
        "         gtpo-verl check --settings -- ray job submit --no-wait -- python3 -m verl.trainer.main_ppo …\n"
        "         gtpo-verl check --run-script -- bash my_script.sh …\n\n"
        "The command is started, and ended where Hydra has composed its config: before it makes a folder, starts Ray\n"
        "or loads anything. The exit status is 1 if there is a problem; each names its remedy."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also print what is well, such as each hook")
    parser.add_argument(
        "--settings", action="store_true", help="leave out what this machine lacks: the run is elsewhere"
    )
    parser.add_argument(
        "--run-script", action="store_true", help="run the lines of a script that come before verl, without asking"
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds for the command to get there (120)")
    parser.add_argument("command", nargs="*", help="after --: a command, or the overrides of verl's main_ppo alone")


def run(args: argparse.Namespace) -> int:
    """Print warnings, problems and the verdict; exit status 1 if there is a problem."""
    if not args.command:
        return _check_plugin(args.verbose)
    command = read(args.command)
    for launcher in command.passed_over:
        print(f"not started: {launcher}: what it starts is judged here, in {Path.cwd()}")
    if command.is_script and not args.run_script and not _agreed(command):
        return 1
    seen = guard.run(command.words, command.environment, command.is_script, args.timeout)
    if command.is_script:
        left_out = "; ".join(dict.fromkeys(seen.left_out)) or "none"
        print(f"the lines of {command} up to the program below were run, but for {left_out}")
    if seen.said.keys() >= {"settings", "machine"}:
        return _report(seen.said, args)
    print(f"problem: {_unjudged(command, seen, args.timeout)}")
    print("1 problem: nothing was judged.")
    return 1


def _agreed(command: Command) -> bool:
    """Whether the user says yes to what runs before the program of verl."""
    print(
        f"{command}: the lines of a script before it starts verl really run. They cannot remove or stop anything by "
        f"{', '.join(guard.STAND_INS)}, which do nothing meanwhile, nor join a Ray cluster, but they may make files."
    )
    if sys.stdin.isatty() and input("Run them? [y/N] ").strip().lower() in ("y", "yes"):
        return True
    print("Nothing was run or judged. To run them: gtpo-verl check --run-script -- …")
    return False


def _unjudged(command: Command, seen: guard.Verdict, timeout: float) -> str:
    """Why there are no findings on a command."""
    if error := seen.said.get("error"):
        return f"{_program(seen.said)}: verl does not accept this command: {error}"
    if other := seen.said.get("other"):
        return f"{_program(seen.said)} is not judged: {other}"
    if seen.without:
        return f"{seen.without} does not have gtpo_verl: install it there, or give the Python that has it"
    ended = f"ended with status {seen.status}" if seen.status is not None else f"did not get there in {timeout:g} s"
    said = "; it printed last:\n  " + "\n  ".join(seen.last_lines) if seen.last_lines else ""
    return f"{command}, in {Path.cwd()}, composed no config of Hydra: it {ended}{said}"


def _program(said: dict) -> str:
    words = said["program"]
    end = next((i for i, word in enumerate(words) if "=" in word or word.startswith(("-c", "--"))), len(words))
    return f"{' '.join(words[:end]).removeprefix('-m ')}, config {said['config']}"


def _check_plugin(verbose: bool) -> int:
    from gtpo_verl.tools.check import installation

    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what libraries print is no finding
        warnings.simplefilter("ignore")
        found = list(installation.findings())
    if problems := _print(found, verbose):
        print(f"{problems}: GTPO cannot run here.")
        return 1
    import verl

    print(f"GTPO is installed and hooked into verl {verl.__version__}. ", end="")
    print("To check a command: gtpo-verl check -- python3 -m verl.trainer.main_ppo …")
    return 0


def _report(said: dict, args: argparse.Namespace) -> int:
    print(f"judged: {_program(said)}")
    warned = any(x["advice"] for x in said["settings"])
    if problems := _print((Finding(**x) for x in said["settings"]), args.verbose):
        print(f"{problems} with these settings: verl would stop, or GTPO would not act.")
    lacking = "" if args.settings else _print((Finding(**x) for x in said["machine"]), args.verbose)
    if lacking:
        print(f"{lacking} with this machine: the command would fail here. With --settings it is left out.")
    if problems or lacking:
        return 1
    here = "Its settings are right" if args.settings else "This command can run here"
    installed = f"GTPO is installed and hooked into verl {said['verl']}."
    print(f"{installed} {here}{', with the warnings above' * warned}.")
    return 0


def _print(findings: Iterable[Finding], verbose: bool) -> str:
    """Print them, problems last, and say how many of these there are."""
    found = list(findings)
    for x in found:
        if x.advice:
            print(f"warning: {x.subject}: {x.says}: {x.advice}".replace(": \n", ":\n"))
        elif verbose and not x.remedy:
            print(f"{x.subject}: {x.says}")
    problems = [x for x in found if x.remedy]
    for x in problems:
        print(": ".join(filter(None, ("problem", x.subject, x.says, x.remedy))))
    return f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else ""
