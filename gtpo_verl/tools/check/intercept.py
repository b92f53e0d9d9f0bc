"""Stop a run of verl before it starts, and print what its config says: `GTPO_CHECK=1`, and `gtpo-verl check --`.

Keys that do not exist are gathered where Hydra composes. The config is checked where verl's trainers take it, in
`validate_config` or `run_ppo`: a launcher may have changed it until there. A process that gets to Ray, to a trainer, an
engine or the end of Hydra's main without having been checked ends there.
"""

import atexit
import copy
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import wrapt

from gtpo_verl.terminal import printable
from gtpo_verl.tools.check.finding import VARIABLE, Finding, module_spec, print_all

_JUDGED_IN = ("verl.utils.config:validate_config", "verl.utils:validate_config", "verl.trainer.main_ppo:run_ppo")
_ENDS_IN = (
    "ray:init",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
    "verl.workers.engine.base:EngineRegistry.new",
)
_INTERRUPTED = 130
_found_in_command: dict[Finding, None] = {}
"""Found where Hydra composes, in order and once each: it composes twice."""
status_if_sound = 1
"""With the variable a process ends with 1 in any case, so that a script under `set -e` goes no further."""


def install() -> None:
    """Hook in where a run is checked, or ends unchecked; a ValueError if the variable is neither 1 nor settings."""
    value = os.environ[VARIABLE]
    if value not in ("1", "settings"):
        raise ValueError(f"{VARIABLE}={value}: must be 1 or settings; to train, unset it")
    words = sys.orig_argv[1:]
    end_if_never_checked(words[words.index("-m") + 1] if "-m" in words[:-1] else "")
    for place in _JUDGED_IN:
        _hook(place, _check)
    for place in _ENDS_IN:
        _hook(place, _ends_at(place))
    _hook("hydra._internal.hydra:Hydra.compose_config", _compose)
    _hook("hydra._internal.config_loader_impl:ConfigLoaderImpl._apply_overrides_to_config", _apply_overrides)
    _hook("hydra._internal.hydra:Hydra.run", _run_main)
    _hook("hydra._internal.hydra:Hydra.multirun", _run_sweep)


def _hook(place: str, wrapper: Callable) -> None:
    module, path = place.split(":")
    wrapt.register_post_import_hook(lambda imported: wrapt.wrap_function_wrapper(imported, path, wrapper), module)


def end_if_never_checked(module: str) -> None:
    """End before a module of verl starts that never gets to a check: SFT, generation, merger, evaluation."""
    spec = module_spec(module) if module.startswith("verl.") else None
    if spec and spec.submodule_search_locations:
        spec = module_spec(f"{module}.__main__")
    if spec and spec.origin and not re.search("run_ppo|validate_config", Path(spec.origin).read_text("utf-8")):
        end(f"not checked: {module}: only verl's PPO trainers are checked, such as verl.trainer.main_ppo", 1)


def _check(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> NoReturn:
    from gtpo_verl.tools.check import settings

    try:
        config = copy.deepcopy(kwargs["config"] if "config" in kwargs else args[0])
        in_settings, on_machine = settings.check(config, with_machine=os.environ[VARIABLE] != "settings")
    except KeyboardInterrupt:
        end("not checked: interrupted", _INTERRUPTED)
    except Exception:
        traceback.print_exc()
        end_unchecked("the check itself failed, see above")
    counts = {
        "in its settings": print_all(dict.fromkeys([*_found_in_command, *in_settings])),
        "on this machine": print_all(on_machine),
    }
    said = [f"{number} problem{'s' if number > 1 else ''} {place}" for place, number in counts.items() if number]
    end(f"checked: {_program()}: {', '.join(said) or 'no problem'}", 1 if said else status_if_sound)


def end_unchecked(reason: str) -> NoReturn:
    """Say what was found so far, and why the run is not checked."""
    print_all(_found_in_command)
    end(f"not checked: {_program()}: {reason}", 1)


def end(last_line: str, status: int) -> NoReturn:
    """End this process, as `sys.exit` would, but past whoever catches that."""
    print(f"{printable(last_line)}; it was not started", flush=True)
    atexit._run_exitfuncs()  # Ray's, if the program has started Ray
    sys.stderr.flush()
    os._exit(status)


def _ends_at(place: str) -> Callable:
    def ends(*arguments: Any) -> NoReturn:
        end_unchecked(f"it got to {place.replace(':', '.')}")

    return ends


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name or "this program"


def _run_main(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> NoReturn:
    """`hydra.main`: its program ends in `_check`, or here."""
    try:
        function(*args, **kwargs)
    except KeyboardInterrupt:
        end("not checked: interrupted", _INTERRUPTED)
    except BaseException:
        traceback.print_exc()
    end_unchecked("it ended before verl's trainer took its config")


def _run_sweep(*arguments: Any) -> NoReturn:
    end_unchecked("it is a sweep of several runs: check one of them, without -m and --multirun")


def _compose(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> Any:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        return function(*args, **kwargs)
    except KeyboardInterrupt:
        end("not checked: interrupted", _INTERRUPTED)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        unreadable = _unreadable(kwargs.get("overrides") or ())
        reason = unreadable or " ".join(str(error).split())
        end_unchecked(f"Hydra refuses this command: {reason}")


def _unreadable(words: Iterable[str]) -> str:
    """Return the first override that Hydra cannot read, and how to write it; empty if it reads all."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for word in words:
        key, equals, value = word.partition("=")
        try:
            OverridesParser.create().parse_override(word)
        except HydraException:
            if not word.strip():
                return "an argument is empty, as of a variable that is not set: leave it out"
            if not equals:
                return f"{word} is no KEY=VALUE; for a file give --config-path and --config-name"
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            return f"it cannot read {word}: quote the value, '{key}=\"{quoted}\"'"
    return ""


def _apply_overrides(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> None:
    """Compose as Hydra does, in a folder that goes with this process, and gather what is wrong."""
    overrides, config = args
    gather(function, overrides, config)
    folder = tempfile.mkdtemp(prefix="gtpo-check-")
    config.hydra.run.dir = folder
    config.hydra.sweep.dir = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def gather(function: Callable, overrides: Sequence[Any], config: Any) -> None:
    """Apply the overrides one by one, gather the keys that the config lacks, and give wrong values verl's defaults."""
    from omegaconf import OmegaConf

    from gtpo_verl.tools.check import settings, unknown_keys
    from gtpo_verl.verl_plugin.values import known_keys

    known = known_keys(config)
    _found(unknown_keys.added_in_yaml(config))
    given = {override.key_or_group for override in overrides}
    unknown = []
    for override in overrides:
        if override.is_add() or override.is_force_add():
            key = override.key_or_group
            wrong = unknown_keys.added(key, override.value(), config, known, given - {key})
            if wrong:
                _found([wrong])
                continue
        word = _apply(function, override, config)
        if word:
            unknown.append(word)
    _found(unknown_keys.unknown(unknown, config, given))
    # The program may compute with them before verl's trainer takes the config.
    run = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    for wrong_value in settings.certainly_wrong(run):
        _found([settings.as_finding(wrong_value)])
        settings.put_right(config, wrong_value)


def _found(findings: Iterable[Finding]) -> None:
    _found_in_command.update(dict.fromkeys(findings))


def _apply(function: Callable, override: Any, config: Any) -> str:
    """Apply one override; returns it if its key is none that the config has."""
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf

    key = override.key_or_group
    try:
        function([override], config)
    except ConfigCompositionException as error:
        if "already at" in str(error):
            _found([Finding(key, "verl has this key, and Hydra adds none twice", "leave its + out")])
            OmegaConf.update(config, key, override.value(), merge=True)
        elif re.match("Could not override|.*does not exist", str(error)):
            return str(override.input_line)
        else:
            raise
    return ""
