"""Stop a run of verl before it starts, and print what its config says: `GTPO_CHECK=1`, and `gtpo-verl check --`.

Keys that do not exist are gathered where Hydra composes. The config is judged where verl's trainers take it, in
`validate_config` or `run_ppo`: a launcher may have changed it until there. A process that gets to Ray, to a trainer, an
engine or the end of Hydra's main without having been judged ends there.
"""

import atexit
import copy
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import wrapt

from gtpo_verl.tools.check import VARIABLE, Finding, module_spec, print_all

_JUDGED_IN = ("verl.utils.config:validate_config", "verl.utils:validate_config", "verl.trainer.main_ppo:run_ppo")
_ENDS_IN = (
    "ray:init",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
    "verl.workers.engine.base:EngineRegistry.new",
)
_found_in_command: dict[Finding, None] = {}
"""Found where Hydra composes, in order and once each: it composes twice."""
status_if_sound = 1
"""With the variable a process ends with 1 in any case, so that a script under `set -e` goes no further."""


def install() -> None:
    """Hook in where a run is judged, or ends unjudged; a ValueError if the variable is neither 1 nor settings."""
    if (value := os.environ[VARIABLE]) not in ("1", "settings"):
        raise ValueError(f"{VARIABLE}={value}: must be 1 or settings; to train, unset it")
    words = sys.orig_argv[1:]
    end_if_never_judged(words[words.index("-m") + 1] if "-m" in words[:-1] else "")
    for place in _JUDGED_IN:
        _hook(place, _judge)
    for place in _ENDS_IN:
        _hook(place, lambda *_, place=place: end_unjudged(f"it got to {place.replace(':', '.')}"))
    _hook("hydra._internal.hydra:Hydra.compose_config", _compose)
    _hook("hydra._internal.config_loader_impl:ConfigLoaderImpl._apply_overrides_to_config", _apply_overrides)
    _hook("hydra._internal.hydra:Hydra.run", _run_main)
    sweep = "it is a sweep of several runs: check one of them, without -m and --multirun"
    _hook("hydra._internal.hydra:Hydra.multirun", lambda *_: end_unjudged(sweep))


def _hook(place: str, wrapper: Callable) -> None:
    module, path = place.split(":")
    wrapt.register_post_import_hook(lambda imported: wrapt.wrap_function_wrapper(imported, path, wrapper), module)


def end_if_never_judged(module: str) -> None:
    """End before a module of verl starts that does not get to a judgement: SFT, generation, merger, evaluation."""
    spec = module_spec(module) if module.startswith("verl.") else None
    spec = module_spec(f"{module}.__main__") if spec and spec.submodule_search_locations else spec
    if spec and spec.origin and not re.search("run_ppo|validate_config", Path(spec.origin).read_text("utf-8")):
        end(f"not judged: {module}: only verl's PPO trainers are judged, such as verl.trainer.main_ppo", 1)


def _judge(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> NoReturn:
    from gtpo_verl.tools.check import settings

    try:
        config = copy.deepcopy(kwargs["config"] if "config" in kwargs else args[0])
        found = settings.judge(config, with_machine=os.environ[VARIABLE] != "settings")
    except Exception:
        traceback.print_exc()
        end_unjudged("the check itself failed, see above")
    counts = {"in its settings": print_all([*_found_in_command, *found[0]]), "on this machine": print_all(found[1])}
    said = [f"{n} problem{'s' if n > 1 else ''} {place}" for place, n in counts.items() if n]
    end(f"judged: {_program()}: {', '.join(said) or 'no problem'}", 1 if said else status_if_sound)


def end_unjudged(why: str) -> NoReturn:
    """Say what was found so far, and why there is no judgement."""
    print_all(_found_in_command)
    end(f"not judged: {_program()}: {why}", 1)


def end(last_line: str, status: int) -> NoReturn:
    """End this process, as `sys.exit` would, but past whoever catches that."""
    print(f"{last_line}; it was not started", flush=True)
    atexit._run_exitfuncs()  # Ray's, if the program has started Ray
    sys.stderr.flush()
    os._exit(status)


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name or "this program"


def _run_main(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> NoReturn:
    """`hydra.main`: its program ends in `_judge`, or here."""
    try:
        function(*args, **kwargs)
    except BaseException:
        traceback.print_exc()
    end_unjudged("it ended before verl's trainer took its config")


def _compose(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> Any:
    from hydra.errors import HydraException

    try:
        return function(*args, **kwargs)
    except HydraException as error:
        end_unjudged(f"Hydra refuses this command: {' '.join(str(error).split())}")


def _apply_overrides(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> None:
    """Apply the overrides to the config without them, except what it does not have, has already, or has as a number."""
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from gtpo_verl.tools.check import unknown_keys

    overrides, config = args
    unknown = []
    _found_in_command.update(dict.fromkeys(unknown_keys.unknown_in_yaml(config)))
    for override in overrides:
        default = None
        with suppress(OmegaConfBaseException):  # a key that the config does not have
            default = OmegaConf.select(config, override.key_or_group)
        if found := [*unknown_keys.not_a_number(override.key_or_group, override.value(), default)]:
            _found_in_command.update(dict.fromkeys(found))
            continue
        try:
            function([override], config)
        except ConfigCompositionException as error:
            if "already at" in str(error):
                key = override.key_or_group
                twice = Finding(key, "verl has this key, and Hydra adds none twice", "leave its + out")
                _found_in_command[twice] = None
                OmegaConf.update(config, key, override.value(), merge=True)
            elif re.match("Could not override|.*does not exist", str(error)):
                unknown.append(override.input_line)
            else:
                raise
    _found_in_command.update(dict.fromkeys(unknown_keys.unknown(unknown, config)))
    config.hydra.run.dir = config.hydra.sweep.dir = folder = tempfile.mkdtemp(prefix="gtpo-check-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
