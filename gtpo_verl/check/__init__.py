"""`gtpo-verl check`: is GTPO hooked into this verl, and can this machine run a given command?

The command's config is composed as verl would, before Ray starts.
"""

import argparse
import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from gtpo_verl.check import machine
from gtpo_verl.check.machine import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `gtpo-verl check`."""
    parser.description = "Say whether GTPO is hooked into this verl and, given a command, whether it can run here."
    parser.epilog = (
        "example: gtpo-verl check\n"
        "         gtpo-verl check -- python3 -m verl.trainer.main_ppo --config-path DIR --config-name NAME …\n\n"
        "The exit status is 1 if there is a problem; each names its remedy. The recipes check their command first."
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="also print what is well, such as each hook")
    parser.add_argument("command", nargs="*", help="after --: a command of verl's trainer, or its overrides alone")


def run(args: argparse.Namespace) -> int:
    """Print warnings, problems and the verdict; exit status 1 if there is a problem."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what libraries print is no finding
        warnings.simplefilter("ignore")
        found = list(check(args.command))
    problems = [x for x in found if x.remedy]
    for x in found:
        if x.advice:
            print(f"warning: {x.subject}: {x.says}: {x.advice}".replace(": \n", ":\n"))
        elif args.verbose and not x.remedy:
            print(f"{x.subject}: {x.says}")
    for x in problems:
        print(": ".join(filter(None, ("problem", x.subject, x.says, x.remedy))))
    if problems:
        what = "this command would fail here" if args.command else "GTPO cannot run here"
        print(f"{len(problems)} problem{'s' * (len(problems) > 1)}: {what}.")
        return 1
    print(_verdict(args.command, warned=any(x.advice for x in found)))
    return 0


def _verdict(command: Sequence[str], warned: bool) -> str:
    import verl

    installed = f"GTPO is installed and hooked into verl {verl.__version__}."
    if command:
        return f"{installed} This command can run here{', with the warnings above' * warned}."
    return f"{installed} To check a command: gtpo-verl check -- python3 -m verl.trainer.main_ppo …"


def check(command: Sequence[str] = ()) -> Iterator[Finding]:
    """The findings about this environment, and about a command of verl and this machine if one is given.

    Raises:
        ValueError: Hydra cannot compose the command's config.
    """
    if missing := [name for name in ("torch", "verl") if find_spec(name) is None]:
        remedy = "install verl as its documentation says, then run this again"
        yield Finding("installed", f"no {' and no '.join(missing)}", remedy)
        return
    yield from _plugin()
    if command:
        config, unknown = compose(command)
        yield from unknown
        yield from _settings(config)
        yield from machine.findings(config)


# ---------------------------------------------------------------- the plugin


def _plugin() -> Iterator[Finding]:
    import verl

    loaded = "gtpo_verl.verl_plugin" in sys.modules
    from verl.trainer.ppo import core_algos

    from gtpo_verl import verl_plugin
    from gtpo_verl.verl_plugin import hooks, names_and_versions

    yield Finding("gtpo_verl", f"{version('gtpo-verl')} at {verl_plugin.__file__}")
    tested = ", ".join(names_and_versions.SUPPORTED_VERL)
    yield Finding("verl", f"{verl.__version__} at {verl.__file__} (tested: {tested})")
    plugins = "VERL_USE_EXTERNAL_PLUGINS"
    how_to_load = f"{plugins}={os.environ.get(plugins)} leaves gtpo out: unset it, or add gtpo to the list"
    yield Finding("loaded by verl", "yes" if loaded else "no", "" if loaded else how_to_load)
    with suppress(ValueError):  # the plugin is not loaded
        serves = core_algos.get_adv_estimator_fn("gtpo")
        yield Finding("advantage estimator gtpo", f"{serves.__module__}.{serves.__qualname__}")
    for subject, module, path, _ in hooks.HOOKS:
        hooked = _hooked(module, path)
        yield Finding(f"hook on {subject}", hooked, f"{module}.{path} is not hooked" if hooked == "no" else "")
    if "GTPO" in core_algos.AdvantageEstimator.__members__:
        yield Finding("gtpo", "this verl has GTPO of its own", advice="it serves gtpo, the plugin gtpo_trajectory")
    for problem in names_and_versions.load_errors():
        yield Finding("registration", "failed", problem)


def _hooked(module: str, path: str) -> str:
    package = module.rpartition(".")[0]
    if not (find_spec(package) and find_spec(module)):
        return "not in this verl"
    return "yes" if hasattr(resolve_name(f"{module}:{path}"), "__wrapped__") else "no"


# ---------------------------------------------------------------- the command


def compose(command: Sequence[str]) -> tuple[Any, list[Finding]]:
    """The config that verl's trainer would get from a command, and a finding for each key that it does not have.

    Raises:
        ValueError: Hydra cannot compose the config for another reason.
    """
    import verl.trainer
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-path", "-cp", default="config")
    options.add_argument("--config-name", "-cn", default="ppo_trainer")
    options.add_argument("--config-dir", "-cd")
    given, words = options.parse_known_args(command)
    if given.config_dir:
        raise ValueError(f"--config-dir {given.config_dir} is not read here: use --config-path and --config-name")
    folder = Path(verl.trainer.__path__[0], given.config_path)  # as for Hydra, which starts from verl's module
    overrides = [word for word in words if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    unknown: list[str] = []
    with initialize_config_dir(str(folder), version_base=None):
        while True:
            try:
                config = hydra_compose(given.config_name, overrides=overrides)
                return config, [Finding(key, "verl has no such key", _meant(key, config)) for key in unknown]
            except HydraException as error:
                named = re.match(r"Could not override '([^']+)'", str(error))
                if not named:
                    raise ValueError(f"verl does not accept this command: {error}") from error
                unknown.append(named[1])
                overrides = [word for word in overrides if word.partition("=")[0] != named[1]]


def _meant(key: str, config: Any) -> str:
    """A key of the config that ends like this one."""
    from omegaconf import OmegaConf

    def keys(node: Any, prefix: str = "") -> Iterator[str]:
        for name, value in node.items():
            yield f"{prefix}{name}"
            if isinstance(value, dict):
                yield from keys(value, f"{prefix}{name}.")

    parts = key.count(".") + 1
    ends: dict[str, list[str]] = {}
    for known in keys(OmegaConf.to_container(config)):
        if len(names := known.split(".")) >= parts:
            ends.setdefault(".".join(names[-parts:]), []).append(known)
    if not (close := get_close_matches(key, ends, n=1, cutoff=0.8)):
        return f"write +{key}=… if your own code reads it"
    first, *others = ends[close[0]]
    return f"did you mean {first}?" + f" (or {', '.join(others[:2])})" * bool(others)


def _settings(config: Any) -> Iterator[Finding]:
    """Settings with which GTPO or verl cannot run, or which are not the paper's GTPO."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    from gtpo_verl.verl_plugin import names_and_versions, preflight
    from gtpo_verl.verl_plugin.config import RunConfig

    if OmegaConf.select(config, "actor_rollout_ref") is None:  # verl's SFT trainer
        return
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        yield Finding("actor_rollout_ref.rollout.name", "not given", "set it to vllm or sglang")
    verls = config.copy()
    verls.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl would import vLLM
    try:
        inspect.unwrap(validate_config)(verls, need_reference_policy(config), use_critic=False)
    except Exception as error:  # assertions and errors of many classes
        yield Finding("verl", "refuses these settings", " ".join(str(error).split()))
    for problem in preflight.problems(config):
        yield Finding("", "", problem)
    with suppress(ValueError):  # of algorithm.gtpo, which is among the problems
        run = RunConfig.read(config)
        if run.mode.applies_gtpo and (departures := preflight.departures(config, run.gtpo)):
            yield Finding("GTPO", "differs from the paper's in", advice=f"\n{preflight.as_table(departures)}")
    if unclipped := preflight.unclipped_updates(config):
        paper = {"trainer.v1.trainer_mode": "sync", "actor_rollout_ref.actor.ppo_epochs": 1}
        one = " ".join(f"{x.setting}={paper.get(x.setting, config.data.train_batch_size)}" for x in unclipped)
        says = "several per rollout with the gtpo loss, which does not clip"
        yield Finding("updates", says, advice=f"make one ({one}), or clip ({names_and_versions.LOSS_MODE}=vanilla)")
