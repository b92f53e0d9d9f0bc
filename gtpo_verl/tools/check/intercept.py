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

# Where verl's trainers take their config. A program may have imported `validate_config` from either of its modules.
_CHECKED_IN = ("verl.utils.config:validate_config", "verl.utils:validate_config", "verl.trainer.main_ppo:run_ppo")
# Where a run that none of these has checked has to end, before it starts anything.
_ENDS_IN = (
    "ray:init",
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer.__init__",
    "verl.trainer.ppo.v1.trainer_base:PPOTrainer.__init__",
    "verl.workers.engine.base:EngineRegistry.new",
)
_INTERRUPTED = 130
_command_findings: dict[Finding, None] = {}
"""What is wrong with the command line, in order and once each: Hydra composes twice."""
status_if_sound = 1
"""The status of a process without a problem: 1, so that a script under `set -e` goes no further.

`gtpo-verl check` makes it 0, unless its user has set the variable.
"""


def install() -> None:
    """Hook into the places where a run is checked, or ends unchecked.

    Raises:
        ValueError: the variable is neither 1 nor settings.
    """
    value = os.environ[VARIABLE]
    if value not in ("1", "settings"):
        raise ValueError(f"{VARIABLE}={value}: must be 1 or settings; to train, unset it")
    words = sys.orig_argv[1:]
    if "-m" in words[:-1]:
        end_if_never_checked(words[words.index("-m") + 1])
    for place in _CHECKED_IN:
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
    """Check the config that one of `_CHECKED_IN` is called with, print what is wrong with it, and end the process."""
    from gtpo_verl.tools.check import settings

    try:
        config = copy.deepcopy(kwargs["config"] if "config" in kwargs else args[0])
        in_settings, on_machine = settings.check(config, with_machine=os.environ[VARIABLE] != "settings")
    except KeyboardInterrupt:
        end("not checked: interrupted", _INTERRUPTED)
    except Exception:
        traceback.print_exc()
        end_unchecked("the check itself failed, see above")
    settings_problems = print_all(dict.fromkeys([*_command_findings, *in_settings]))
    machine_problems = print_all(on_machine)
    counts = []
    for number, place in ((settings_problems, "in its settings"), (machine_problems, "on this machine")):
        if number:
            plural = "s" if number > 1 else ""
            counts.append(f"{number} problem{plural} {place}")
    if counts:
        end(f"checked: {_program()}: {', '.join(counts)}", 1)
    end(f"checked: {_program()}: no problem", status_if_sound)


def end_unchecked(reason: str) -> NoReturn:
    """Print what is wrong with the command line and why the run is not checked, and end the process."""
    print_all(_command_findings)
    end(f"not checked: {_program()}: {reason}", 1)


def end(last_line: str, status: int) -> NoReturn:
    """End this process, as `sys.exit` would, but past whoever catches that."""
    print(f"{printable(last_line)}; it was not started", flush=True)
    atexit._run_exitfuncs()  # Ray stops, if the program has started it, and Hydra's temporary folder goes
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
    """Run the program of `hydra.main`, which ends in `_check`, or else here."""
    try:
        function(*args, **kwargs)
    except KeyboardInterrupt:
        end("not checked: interrupted", _INTERRUPTED)
    except BaseException:
        traceback.print_exc()
    end_unchecked("it ended before verl's trainer took its config")


def _run_sweep(*arguments: Any) -> NoReturn:
    """End the process in the place of Hydra's sweep."""
    end_unchecked("it is a sweep of several runs: check one of them, without -m and --multirun")


def _compose(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> Any:
    """Compose as Hydra does; end the process with a line if Hydra refuses the command."""
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
                return "an argument is empty, perhaps a variable that is not set: leave it out"
            if not equals:
                return f"{word} is no KEY=VALUE; for a file give --config-path and --config-name"
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            return f"it cannot read {word}: quote the value, '{key}=\"{quoted}\"'"
    return ""


def _apply_overrides(function: Callable, instance: Any, args: Sequence, kwargs: dict) -> None:
    """Gather what is wrong with the overrides, and give Hydra a folder that is removed with this process."""
    overrides, config = args
    gather(function, overrides, config)
    folder = tempfile.mkdtemp(prefix="gtpo-check-")
    config.hydra.run.dir = folder
    config.hydra.sweep.dir = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)


def gather(function: Callable, overrides: Sequence[Any], config: Any) -> None:
    """Apply the overrides to a config one by one, and gather what is wrong with them and with the config.

    Keys that the config lacks are left out. Wrong values become verl's defaults.
    """
    from omegaconf import OmegaConf

    from gtpo_verl.tools.check import settings, unknown_keys
    from gtpo_verl.verl_plugin.values import known_keys

    known = known_keys(config)
    _keep(unknown_keys.added_in_yaml(config))
    given = {override.key_or_group for override in overrides}
    unknown = []
    for override in overrides:
        if override.is_add() or override.is_force_add():
            key = override.key_or_group
            finding = unknown_keys.added(key, override.value(), config, known, given - {key})
            if finding:
                _keep([finding])
                continue
        refused = _apply(function, override, config)
        if refused:
            unknown.append(refused)
    _keep(unknown_keys.unknown(unknown, config, given))

    # Put right here, since the program may compute with the values before verl's trainer takes the config.
    run_config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    for wrong_value in settings.certainly_wrong(run_config):
        _keep([settings.as_finding(wrong_value)])
        settings.put_right(config, wrong_value)


def _keep(findings: Iterable[Finding]) -> None:
    """Keep findings until the check, or the end, prints them."""
    _command_findings.update(dict.fromkeys(findings))


def _apply(function: Callable, override: Any, config: Any) -> str:
    """Apply one override; return it as it was written if the config lacks its key, else an empty text."""
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf

    key = override.key_or_group
    try:
        function([override], config)
    except ConfigCompositionException as error:
        if "already at" in str(error):
            _keep([Finding(key, "verl has this key, and Hydra adds none twice", "leave its + out")])
            OmegaConf.update(config, key, override.value(), merge=True)
        elif re.match("Could not override|.*does not exist", str(error)):
            return str(override.input_line)
        else:
            raise
    return ""
