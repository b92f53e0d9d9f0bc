"""`gtpo-verl check`: is GTPO hooked into this verl, and would a command of it start here?

It starts a module of verl or of verl-recipe, in this process, which ends where verl's trainer takes its config
(`intercept`). Whatever else is to be checked its user starts, with GTPO_CHECK=1 (`stop_before_start`).
"""

import argparse
import os
import re
import runpy
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

from gtpo_verl.run_files.links import DOCS

VARIABLE = "GTPO_CHECK"
_OVERRIDE = re.compile(r"--config-(name|path|dir)(=.*)?|[+~]*[a-z][\w/@]*(\.[\w.]+)?=.*|~.+", re.DOTALL)
_MODULE = "-m verl.trainer.main_ppo"


class Finding(NamedTuple):
    """A problem, which has a remedy, or a warning, which has advice."""

    subject: str
    says: str
    remedy: str = ""
    advice: str = ""


def module_spec(name: str) -> ModuleSpec | None:
    """Return where a module is, None also if the package that it would be in is missing; imports that package."""
    with suppress(ModuleNotFoundError):
        return find_spec(name)
    return None


def print_all(found: Collection[Finding]) -> int:
    """Print warnings and problems; returns the number of problems."""
    for x in found:
        kind = "problem" if x.remedy else "warning"
        print(": ".join(filter(None, (kind, x.subject, x.says, x.remedy or x.advice))).replace(": \n", ":\n"))
    return sum(bool(x.remedy) for x in found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `gtpo-verl check`."""
    parser.description = "Say whether GTPO is hooked into this verl and, given a command of verl, whether it can run."
    parser.epilog = (
        f"example: gtpo-verl check -- python3 {_MODULE} --config-path DIR --config-name NAME …\n\n"
        "The module ends before it starts anything, with status 1 if there is a problem. Start a script, or a command\n"
        "with a launcher, yourself: GTPO_CHECK=1 bash my_script.sh. verl then ends it, with status 1."
    )
    parser.add_argument("--settings", action="store_true", help="leave this machine out: the run is elsewhere")
    parser.add_argument("command", nargs="*", help="after --: python3 -m MODULE …, or overrides of main_ppo alone")


def run(args: argparse.Namespace) -> int:
    """Check the installation or, in a process that ends there, a command; returns 1 if not all is well, else 0."""
    if not args.command:
        return _check_installation()
    module, arguments = _module_of(args.command)
    if not module:
        says = "not judged: only python3 -m MODULE of verl or verl-recipe is started here; start it yourself as"
        print(f"{says} GTPO_CHECK=1 bash my_script.sh; for Docker, Slurm, ssh and Ray {DOCS}/check.md has the form")
        return 1
    within = bool(os.environ.get(VARIABLE))
    os.environ[VARIABLE] = "settings" if args.settings else os.environ.get(VARIABLE) or "1"
    sys.path.insert(0, os.getcwd())
    import verl  # noqa: F401

    if "gtpo_verl.tools.check.intercept" not in sys.modules:
        _check_installation()
        print("not judged: verl does not load gtpo_check; it was not started")
        return 1
    from gtpo_verl.tools.check import intercept

    intercept.status_if_sound = int(within)
    intercept.end_if_never_judged(module)
    sys.argv = [module, *arguments]
    why = f"{module} ended before verl's trainer took its config"
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ImportError as error:
        why = f"{error}, from {os.getcwd()}"
    except SystemExit:
        pass
    intercept.end_unjudged(why)


def _module_of(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module of verl or verl-recipe that a command starts, and its arguments; empty if there is none."""
    if _OVERRIDE.fullmatch(words[0]):
        return "verl.trainer.main_ppo", words
    python, module = Path(words[0]), words.index("-m") + 1 if "-m" in words[:-1] else 0
    is_this = python.name == words[0] or python.parent == Path(sys.executable).parent
    if not module or not is_this or not re.fullmatch(r"python[\d.]*", python.name):
        return "", ()
    options, root = words[1 : module - 1], words[module].partition(".")[0]
    is_verls = root in ("verl", "recipe") and all(x.startswith("-") for x in options)
    return (words[module], words[module + 1 :]) if is_verls else ("", ())


def installation() -> Iterator[Finding]:
    """Yield what of GTPO is not loaded or hooked in the verl of this process."""
    if missing := [name for name in ("torch", "verl") if not module_spec(name)]:
        remedy = "install verl as its documentation says, then run this again"
        yield Finding("installed", f"no {' and no '.join(missing)}", remedy)
        return
    from verl.trainer.ppo import core_algos

    loaded = {"gtpo": "gtpo_verl.verl_plugin", "gtpo_check": "gtpo_verl.tools.check.stop_before_start"}
    absent = [name for name, module in loaded.items() if module not in sys.modules]
    from gtpo_verl.verl_plugin import compat, hooks

    if only := os.environ.get(variable := "VERL_USE_EXTERNAL_PLUGINS"):
        how_to_load = f"{variable}={only} leaves it out: unset it, or set it to {','.join(loaded)}"
    else:
        how_to_load = "install gtpo_verl again: this installation does not have that entry point"
    for name in absent:
        yield Finding(f"plugin {name}", "not loaded by verl", how_to_load)
    for subject, module, path, _ in hooks.HOOKS:
        if module_spec(module) and not hasattr(resolve_name(f"{module}:{path}"), "hooked_by_gtpo"):
            yield Finding(f"hook on {subject}", "no", f"{module}.{path} is not hooked")
    if "GTPO" in core_algos.AdvantageEstimator.__members__:
        yield Finding("gtpo", "this verl has GTPO of its own", advice="it serves gtpo, the plugin gtpo_trajectory")
    for problem in compat.load_errors:
        yield Finding("registration", "failed", problem)


def _check_installation() -> int:
    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what libraries print is no finding
        warnings.simplefilter("ignore")
        found = list(installation())
    if print_all(found):
        print("GTPO cannot run here, and GTPO_CHECK=1 may stop nothing here: a run with it may START.")
        return 1
    import verl

    print(f"GTPO is installed and hooked into verl {verl.__version__}. To check a run before it starts:")
    print("  GTPO_CHECK=1 bash my_script.sh      (its own lines run for real; where GTPO is not installed, all does)")
    print(f"  gtpo-verl check -- python3 {_MODULE} …")
    return 0
