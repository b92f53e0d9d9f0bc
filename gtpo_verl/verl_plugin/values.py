"""Find the values of a verl config that verl cannot use: not given, of another kind than verl takes, or out of range.

The kind of a key is its annotation in the dataclass of its section or, if that has none, the type of the default in
verl's own YAML. verl checks neither before a worker uses the value.
"""

import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import verl
import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.verl_plugin.ranges import RANGES, Range
from gtpo_verl.verl_plugin.run_config import NOT_SELECTED, nested, select

_MISSING = "???"
_HAS_CRITIC = "critic.enable"
SECTIONS = {
    "actor_rollout_ref": "trainer/main_ppo.py:config.actor_rollout_ref",
    "actor_rollout_ref.actor": "utils/config.py:config.actor_rollout_ref.actor",
    "actor_rollout_ref.model": "utils/config.py:config.actor_rollout_ref.model",
    "actor_rollout_ref.rollout": "trainer/main_ppo.py:config.actor_rollout_ref.rollout",
    "algorithm": "utils/config.py:config.algorithm",
    "critic": "trainer/ppo/utils.py:config.critic",
    "data": "utils/config.py:config.data",
    "reward": "trainer/main_ppo.py:config.reward",
    "trainer": "utils/config.py:config.trainer",
}
"""Sections without which verl starts nothing, and where it reads them first."""
FILES = {
    "actor_rollout_ref.model.path": "trainer/ppo/v1/trainer_base.py:config.actor_rollout_ref.model",
    "data.train_files": "trainer/ppo/v1/trainer_base.py:config.data.train_files",
    "data.val_files": "trainer/ppo/v1/trainer_base.py:config.data.val_files",
    "trainer.default_local_dir": "trainer/ppo/v1/trainer_base.py:config.trainer.default_local_dir",
}
"""Names of files and folders that verl needs, and where it reads them."""


class WrongValue(NamedTuple):
    """A value that verl cannot use."""

    key: str
    says: str  # what it is, such as `is null`, to be read after the key
    takes: str  # what the key takes
    is_certain: bool  # whether verl is known to break on it


@cache
def verls_defaults() -> dict[str, Any]:
    """Return the keys of verl's own configs, of all its engines, with their defaults.

    Where engines differ, the default is that of FSDP, with which verl itself starts.
    """
    defaults: dict[str, Any] = {}
    for config in _verls_configs().values():
        defaults |= config
    return defaults | _verls_configs().get("_generated_ppo_trainer.yaml", {})


def verls_engines() -> set[str]:
    """Return verl's engines that have a config of their own beside FSDP's."""
    engines = set()
    for file_name in _verls_configs():  # such as _generated_ppo_megatron_trainer.yaml; FSDP's has no name there
        engine = file_name.removeprefix("_generated_ppo_").removesuffix("trainer.yaml").rstrip("_")
        if engine:
            engines.add(engine)
    return engines


@cache
def _verls_configs() -> dict[str, dict[str, Any]]:
    """Return the keys and defaults of each engine's config, by the name of verl's file."""
    folder = Path(verl.__file__).parent / "trainer/config"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    configs = {}
    for path in folder.glob("_generated_ppo_*.yaml"):
        configs[path.name] = dict(nested(yaml.load(path.read_text("utf-8"), loader)))
    return configs


def wrong_values(config: DictConfig, keys: Collection[str] | None = None) -> Iterator[WrongValue]:
    """Yield the values of a config that verl cannot use; with `keys`, those of these keys alone."""
    container: Any = OmegaConf.to_container(config)
    annotations = dict(_annotations(container))
    ranges = ranges_of(config)
    values = dict(nested(container))
    for key in _not_given(values, ranges):
        if keys is None or key in keys:
            yield WrongValue(key, "is not there", _takes(key, ranges, None), is_certain=True)
    for key, written in values.items():
        if keys is None or key in keys:
            wrong = _wrong_value(config, key, written, ranges, annotations.get(key))
            if wrong:
                yield wrong


def ranges_of(config: DictConfig) -> dict[str, Range]:
    """Return the ranges of the keys that a run reads."""
    ranges = {key_range.key: key_range for key_range in RANGES}
    if select(config, "async_training") is not None:  # verl's fully_async, which asserts a batch size of 0
        del ranges["data.train_batch_size"]
    if select(config, "trainer.val_only") and select(config, "trainer.val_before_train"):  # nothing is trained
        del ranges["trainer.nnodes"]
        del ranges["trainer.n_gpus_per_node"]
    return ranges


def known_keys(config: Any) -> set[str]:
    """Return the keys that verl has, in its own YAML or in the dataclasses of a config's sections."""
    container: Any = OmegaConf.to_container(config)
    return set(verls_defaults()) | set(fields_of(container))


def complete(config: DictConfig) -> None:
    """Give a config verl's defaults where it lacks keys that verl has with any engine."""
    given = dict(nested(OmegaConf.to_container(config)))
    for key in _in_every_config():
        section = key.rpartition(".")[0]
        has_section = not section or isinstance(given.get(section), dict)
        if key not in given and has_section:
            OmegaConf.update(config, key, verls_defaults()[key], merge=False, force_add=True)


@cache
def _in_every_config() -> list[str]:
    """Return the keys that verl has with each engine, sections before their keys."""
    configs = _verls_configs().values()
    return [key for key in verls_defaults() if all(key in config for config in configs)]


def put_right(config: DictConfig, wrong: WrongValue) -> None:
    """Give a key verl's default, or else 1, so that one can see what else is wrong with a config."""
    default = verls_defaults().get(wrong.key, 1)
    with suppress(*NOT_SELECTED):  # the key's section is a number or a text, and is put right itself
        OmegaConf.update(config, wrong.key, default, merge=False, force_add=True)


def _not_given(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    """Yield the keys that verl needs with any engine and that are missing, such as after `~KEY`."""
    needed = [key for key in _in_every_config() if verls_defaults()[key] is not None or key == _HAS_CRITIC]
    for key in (*SECTIONS, _HAS_CRITIC, *FILES, *ranges):
        section = key.rpartition(".")[0]
        has_section = not section or isinstance(values.get(section), dict)
        if key not in values and has_section and key in needed:
            yield key


def _wrong_value(
    config: DictConfig, key: str, written: Any, ranges: Mapping[str, Range], annotation: Any
) -> WrongValue | None:
    """Return what is wrong with the value that is written for a key; None if verl can use it."""
    if key not in SECTIONS and _is_default(key, written):
        return None
    takes = _takes(key, ranges, annotation)
    if written == _MISSING:
        is_a_key_of_verl = key in verls_defaults() or key in ranges
        return WrongValue(key, "is not given", takes, is_certain=is_a_key_of_verl)
    try:
        value = _resolved(config, key, written)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return WrongValue(key, f"is {written}, which cannot be resolved ({reason})", takes, is_certain=True)

    shown = "null" if value is None else repr(value)
    says = f"is {shown}"
    if key in SECTIONS:
        is_usable = isinstance(value, dict)
    elif key in FILES:
        is_usable = value not in (None, "") and not isinstance(value, dict | int | float)
    elif key in ranges:
        is_usable = ranges[key].has(value)
    else:
        return _wrong_kind(key, value, annotation, says, takes)
    if is_usable:
        return None
    return WrongValue(key, says, takes, is_certain=True)


def _is_default(key: str, written: Any) -> bool:
    """Whether a value is that of verl's own YAML, which is never reported."""
    defaults = verls_defaults()
    return key in defaults and written == defaults[key] and type(written) is type(defaults[key])


def _resolved(config: DictConfig, key: str, written: Any) -> Any:
    """Return the value to which one with `${…}` refers. Raises an OmegaConfBaseException if it refers to nothing."""
    if not isinstance(written, str) or "${" not in written:
        return written
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _wrong_kind(key: str, value: Any, annotation: Any, says: str, takes: str) -> WrongValue | None:
    """Return a finding if a value is of another kind than verl annotates or, without an annotation, than its default.

    `says` and `takes` are those of the finding.
    """
    default = verls_defaults().get(key)
    kinds = _kinds(annotation)
    is_annotated = kinds is not None
    if annotation is not None and not is_annotated:  # the annotation allows any value
        return None
    if kinds is None and default is not None:
        kinds = {type(default)}
    if kinds is None or _fits(value, kinds, default):
        return None
    is_text = isinstance(value, str)
    if is_text and value and key.endswith("_threshold"):  # such keys also take a pair of numbers, as 0.5_2.0
        return None
    # verl cannot use text in place of a number. Other values it may convert, where it annotates no kind.
    is_certain = (is_annotated and value is not None) or (is_text and isinstance(default, int | float))
    return WrongValue(key, says, takes, is_certain)


def _takes(key: str, ranges: Mapping[str, Range], annotation: Any) -> str:
    """Return in words what a key takes."""
    if key in SECTIONS:
        return "a section of keys"
    if key in FILES:
        return "the name of a file or folder"
    if key in ranges:
        return ranges[key].takes
    kinds = _kinds(annotation) or {type(verls_defaults().get(key))}
    words_for_kinds = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a section of keys",
    }
    words = [word for kind, word in words_for_kinds.items() if kind in kinds]
    return " or ".join(words) or "a value"


def _fits(value: Any, kinds: set[type], default: Any) -> bool:
    """Whether a value is of one of the kinds, or verl can use it like one that is."""
    if value is None:
        is_used_as_false = kinds == {bool}
        return types.NoneType in kinds or default is None or is_used_as_false
    if isinstance(value, int):  # True and False too
        return bool(kinds & {bool, int, float, str})
    if isinstance(value, float):
        return bool(kinds & {bool, float, str})
    if isinstance(value, str):
        return bool(kinds & {str, list, tuple})
    if isinstance(value, list):
        return bool(kinds & {list, tuple})
    return dict in kinds


def fields_of(section: Mapping[str, Any], hint: Any = None, prefix: str = "") -> Iterator[str]:
    """Yield the keys that the dataclasses of a config's sections have, given or not."""
    for name in _hints_of(section, hint):
        yield f"{prefix}{name}"
    for name, value in section.items():
        if isinstance(value, dict):
            yield from fields_of(value, _hints_of(section, hint).get(name), f"{prefix}{name}.")


def _annotations(section: Mapping[str, Any], hint: Any = None, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a config that has a place in a dataclass of verl, with its annotation there."""
    hints = _hints_of(section, hint)
    for name, value in section.items():
        if name in hints:
            yield f"{prefix}{name}", hints[name]
        if isinstance(value, dict):
            yield from _annotations(value, hints.get(name), f"{prefix}{name}.")


def _hints_of(section: Mapping[str, Any], hint: Any) -> Mapping[str, Any]:
    """Return the annotations of the dataclass into which verl turns a section; empty if there is no such dataclass."""
    dataclass = _dataclass_of(section, hint)
    if dataclass is None:
        return {}
    try:
        return _type_hints(dataclass)
    except (NameError, TypeError):  # annotations that Python cannot evaluate
        return {}


@cache
def _type_hints(dataclass: type) -> dict[str, Any]:
    return get_type_hints(dataclass)


def _dataclass_of(section: Mapping[str, Any], hint: Any) -> type | None:
    """Return the dataclass into which verl turns a section: its `_target_`, or the one that its annotation has."""
    target = section.get("_target_")
    if isinstance(target, str) and target.startswith("verl."):
        with suppress(ImportError, AttributeError, ValueError):
            named = resolve_name(target)
            return named if isinstance(named, type) and is_dataclass(named) else None
    for annotated in (hint, *get_args(hint)):  # the annotation itself, or a part of it, as in X | None
        if isinstance(annotated, type) and is_dataclass(annotated):
            return annotated
    return None


def _kinds(annotation: Any) -> set[type] | None:
    """Return the kinds of value that an annotation names; None if it takes any, or kinds that are not looked at."""
    if annotation is None or annotation is Any:
        return None
    if annotation is types.NoneType:
        return {types.NoneType}
    if get_origin(annotation) in (Union, types.UnionType):
        kinds: set[type] = set()
        for part in get_args(annotation):
            kinds_of_part = _kinds(part)
            if kinds_of_part is None:
                return None
            kinds |= kinds_of_part
        return kinds
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    if is_dataclass(kind) or issubclass(kind, Mapping):
        return {dict}
    return {kind} if kind in (bool, int, float, str, list, tuple) else None
