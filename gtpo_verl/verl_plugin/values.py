"""Values of a verl config that verl cannot use: not given, of another kind than verl takes, or out of range.

The kind is what verl annotates in the dataclass of a section or, where a section has none, that of the default in
verl's own YAML. verl looks at neither until a worker uses the value.
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
    """A value that verl cannot use; `is_certain` if the place in verl that breaks is known."""

    key: str
    says: str
    takes: str
    is_certain: bool


@cache
def verls_defaults() -> dict[str, Any]:
    """Return the keys of verl's own configs, of all its engines, with their defaults."""
    defaults: dict[str, Any] = {}
    for config in _verls_configs().values():
        defaults |= config
    # Where engines differ, its default is that of the one with which verl itself starts.
    return defaults | _verls_configs().get("_generated_ppo_trainer.yaml", {})


def verls_engines() -> set[str]:
    """Return verl's engines that have a config of their own beside FSDP's."""
    names = (name.removeprefix("_generated_ppo_").removesuffix("trainer.yaml") for name in _verls_configs())
    return {name.rstrip("_") for name in names if name}


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
    """Yield the values of a config, or of some of its keys, that verl cannot use."""
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
    ranges = {row.key: row for row in RANGES}
    if select(config, "async_training") is not None:  # verl's fully_async, which asserts 0
        del ranges["data.train_batch_size"]
    if select(config, "trainer.val_only") and select(config, "trainer.val_before_train"):  # which trains on no GPU
        del ranges["trainer.nnodes"], ranges["trainer.n_gpus_per_node"]
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
    """Give a key the default of verl, so that what else is wrong with a config shows."""
    default = verls_defaults().get(wrong.key, 1)
    with suppress(*NOT_SELECTED):  # such as a key in a section that is none, which is put right itself
        OmegaConf.update(config, wrong.key, default, merge=False, force_add=True)


def _not_given(values: Mapping[str, Any], ranges: Mapping[str, Range]) -> Iterator[str]:
    """Yield what verl needs with any engine and `~KEY`, or a config of one's own, has left out."""
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
        is_verls = key in verls_defaults() or key in ranges
        return WrongValue(key, "is not given", takes, is_certain=is_verls)
    try:
        value = _resolved(config, key, written)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        return WrongValue(key, f"is {written}, which cannot be resolved ({reason})", takes, is_certain=True)

    says = f"is {'null' if value is None else repr(value)}"
    if key in SECTIONS:
        is_usable = isinstance(value, dict)
    elif key in FILES:
        is_usable = value not in (None, "") and not isinstance(value, dict | int | float)
    elif key in ranges:
        is_usable = ranges[key].has(value)
    else:
        return _of_another_kind(key, value, annotation, says, takes)
    return None if is_usable else WrongValue(key, says, takes, is_certain=True)


def _is_default(key: str, written: Any) -> bool:
    """Whether a value is that of verl's own YAML, which is no finding."""
    defaults = verls_defaults()
    return key in defaults and written == defaults[key] and type(written) is type(defaults[key])


def _resolved(config: DictConfig, key: str, written: Any) -> Any:
    """Return what a value with `${…}` stands for; an OmegaConfBaseException if it stands for nothing."""
    if not isinstance(written, str) or "${" not in written:
        return written
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _of_another_kind(key: str, value: Any, annotation: Any, says: str, takes: str) -> WrongValue | None:
    """Return that a value is of another kind than verl annotates or, without an annotation, than its default is."""
    default = verls_defaults().get(key)
    kinds = _kinds(annotation)
    is_annotated = kinds is not None
    if annotation is not None and not is_annotated:  # verl says that it takes any value
        return None
    if kinds is None and default is not None:
        kinds = {type(default)}
    if kinds is None or _fits(value, kinds, default):
        return None
    is_text = isinstance(value, str)
    if is_text and value and key.endswith("_threshold"):  # which takes a pair of numbers, such as 0.5_2.0
        return None
    # Text where verl's default is a number is no number; of other kinds verl may make something.
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
    words = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: "a list",
        dict: "a section of keys",
    }
    return " or ".join(text for kind, text in words.items() if kind in kinds) or "a value"


def _fits(value: Any, kinds: set[type], default: Any) -> bool:
    """Whether a value is of one of the kinds, or does as well for verl."""
    if value is None:
        return types.NoneType in kinds or default is None or kinds == {bool}
    if isinstance(value, int):  # or a truth value
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
    """Return the annotations of the dataclass into which verl turns a section; none if there is no such dataclass."""
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
    """Return the dataclass into which verl turns a section: the one that it names or, without one, the annotated."""
    target = section.get("_target_")
    if isinstance(target, str) and target.startswith("verl."):
        with suppress(ImportError, AttributeError, ValueError):
            named = resolve_name(target)
            return named if isinstance(named, type) and is_dataclass(named) else None
    for one in (hint, *get_args(hint)):
        if isinstance(one, type) and is_dataclass(one):
            return one
    return None


def _kinds(annotation: Any) -> set[type] | None:
    """Return the kinds of value that an annotation names; None if it takes any."""
    if annotation is None or annotation is Any:
        return None
    if get_origin(annotation) in (Union, types.UnionType):
        kinds: set[type] = set()
        for one in get_args(annotation):
            further = {types.NoneType} if one is types.NoneType else _kinds(one)
            if further is None:
                return None
            kinds |= further
        return kinds
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    if is_dataclass(kind) or issubclass(kind, Mapping):
        return {dict}
    return {kind} if kind in (bool, int, float, str, list, tuple) else None
