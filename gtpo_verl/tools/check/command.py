"""`gtpo-verl check`: is GTPO hooked into this verl, and would a command of it start here?

It starts a module of verl or of verl-recipe, in this process, which ends where verl's trainer takes its config
(`intercept`). Whatever else is to be checked its user starts, with GTPO_CHECK=1 (`stop_before_start`).
"""

import argparse
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from gtpo_verl.links import DOCS
from gtpo_verl.tools.check.finding import VARIABLE
from gtpo_verl.tools.check.installation import report_installation

_MAIN_PPO = "verl.trainer.main_ppo"
_CONFIG_OPTION = r"--config-(name|path|dir)(=.*)?"
_SETTING = r"[+~]*[a-z][\w/@]*(\.[\w.]+)?=.*"
_OVERRIDE = re.compile(rf"{_CONFIG_OPTION}|{_SETTING}|~.+", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `gtpo-verl check`."""
    parser.description = "Say whether GTPO is hooked into this verl and, given a command of verl, whether it can run."
    parser.epilog = (
        f"example: gtpo-verl check -- python3 -m {_MAIN_PPO} --config-path DIR --config-name NAME …\n\n"
        "The module ends before it starts anything, with status 1 if there is a problem. Start a script, or a command\n"
        "with a launcher, yourself: GTPO_CHECK=1 bash my_script.sh. verl then ends it, with status 1."
    )
    parser.add_argument("--settings", action="store_true", help="leave this machine out: the run is elsewhere")
    parser.add_argument("command", nargs="*", help="after --: python3 -m MODULE …, or overrides of main_ppo alone")


def run(args: argparse.Namespace) -> int:
    """Check the installation or, in a process that ends there, a command; returns 1 if not all is well, else 0."""
    if not args.command:
        return report_installation(_MAIN_PPO)
    module, arguments = module_of(args.command)
    if not module:
        says = "not checked: only python3 -m MODULE of verl or verl-recipe is started here; start it yourself as"
        print(f"{says} GTPO_CHECK=1 bash my_script.sh; for Docker, Slurm, ssh and Ray {DOCS}/check.md has the form")
        return 1
    was_set = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "settings" if args.settings else was_set or "1"
    sys.path.insert(0, os.getcwd())
    import verl  # noqa: F401

    if "gtpo_verl.tools.check.intercept" not in sys.modules:
        report_installation(_MAIN_PPO)
        print("not checked: verl does not load gtpo_check; it was not started")
        return 1
    from gtpo_verl.tools.check import intercept

    intercept.status_if_sound = 1 if was_set else 0
    intercept.end_if_never_checked(module)
    sys.argv = [module, *arguments]
    reason = f"{module} ended before verl's trainer took its config"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        reason = f"{error}, from {os.getcwd()}"
    except SystemExit:
        pass
    intercept.end_unchecked(reason)


def module_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module of verl or verl-recipe that a command starts, and its arguments; empty if there is none."""
    if _OVERRIDE.fullmatch(words[0]):
        return _MAIN_PPO, words
    python = Path(words[0])
    is_this = python.name == words[0] or python.parent == Path(sys.executable).parent
    if "-m" not in words[:-1] or not is_this or not re.fullmatch(r"python[\d.]*", python.name):
        return "", ()
    place = words.index("-m")
    options = words[1:place]
    module = words[place + 1]
    is_verls = module.partition(".")[0] in ("verl", "recipe")
    if not is_verls or not all(option.startswith("-") for option in options):
        return "", ()
    return module, words[place + 2 :]
