"""`gtpo-verl check`: is GTPO hooked into this verl, and would a command of it start here?

It starts a module of verl or of verl-recipe in this process, which ends where verl's trainer takes its config
(`intercept`). Users start anything else themselves, with GTPO_CHECK=1 (`stop_before_start`).
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
# KEY=VALUE as Hydra takes it, in lower case: WANDB_API_KEY=secret is a variable of the shell.
_SETTING = r"[+~]*[a-z][\w/@]*(\.[\w.]+)?=.*"
# What a command may begin with that is overrides alone. ~KEY takes a key away.
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
    """Check the installation, or a command, which ends this process; returns 1 if not all is well, else 0."""
    if not args.command:
        return report_installation(_MAIN_PPO)
    module, arguments = module_of(args.command)
    if not module:
        print(
            "not checked: only python3 -m MODULE of verl or verl-recipe is started here; start it yourself as "
            f"GTPO_CHECK=1 bash my_script.sh; for Docker, Slurm, ssh and Ray {DOCS}/check.md has the form"
        )
        return 1
    value_given = os.environ.get(VARIABLE)
    if args.settings:
        os.environ[VARIABLE] = "settings"
    elif not value_given:
        os.environ[VARIABLE] = "1"
    sys.path.insert(0, os.getcwd())  # as python3 -m does
    # verl loads its plugins, among them gtpo_check, which imports `intercept` as the variable is set.
    import verl  # noqa: F401

    if "gtpo_verl.tools.check.intercept" not in sys.modules:
        report_installation(_MAIN_PPO)
        print("not checked: verl does not load gtpo_check; it was not started")
        return 1
    from gtpo_verl.tools.check import intercept

    intercept.status_if_sound = 1 if value_given else 0
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
    program = Path(words[0])
    is_python = re.fullmatch(r"python[\d.]*", program.name)
    # This process runs the module, so the Python has to be the one of this process.
    is_on_path = program.name == words[0]
    is_this_environments = is_on_path or program.parent == Path(sys.executable).parent
    if not is_python or not is_this_environments or "-m" not in words[:-1]:
        return "", ()

    position = words.index("-m")
    python_options = words[1:position]
    if not all(option.startswith("-") for option in python_options):  # a script, which may take an -m of its own
        return "", ()
    module = words[position + 1]
    if module.partition(".")[0] not in ("verl", "recipe"):
        return "", ()
    return module, words[position + 2 :]
