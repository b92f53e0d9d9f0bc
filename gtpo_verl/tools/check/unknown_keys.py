"""Keys of a command, or of a YAML file, that verl's config does not have, and values that are no numbers."""

import re
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from gtpo_verl.tools.check import Finding, module_spec
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig, nested
from gtpo_verl.verl_plugin.training_monitor import KEY

_OLD = [line.split("\t") for line in (files(__package__) / "old_keys.tsv").read_text().splitlines()[1:]]
_HANDED_ON = re.compile(r"kwargs\.|override_\w*\.")
_OURS = [KEY, *(f"algorithm.gtpo.{name}" for name in VerlGTPOConfig.__dataclass_fields__)]


def unknown(words: Iterable[str], config: Any) -> Iterator[Finding]:
    """Yield a finding for each override of a key that the config lacks; one for all that are another trainer's."""
    known, others = [key for key, _ in nested(OmegaConf.to_container(config))], list[str]()
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        if remedy := moved(key, value, config) or _to_add(key, value) or _meant(key, known):
            yield Finding(key, "verl has no such key", remedy)
        else:
            others.append(key)
    if others:
        says = f"verl has no such key{'s' if len(others) > 1 else ''}, of another trainer or misspelt"
        yield Finding(", ".join(others), says, "leave out what verl is not to read; with ++ Hydra takes it in vain")


def moved(key: str, value: Any, config: Any) -> str:
    """Return what to write for a key of an earlier verl; empty if it is none."""
    last, now = place_now(key)
    if not last:
        return ""
    if not now or now.startswith("("):
        return f"verl {last} was the last to read it: remove it {now}".rstrip()
    prefix = "" if OmegaConf.select(config, now, default=config) is not config else "++"
    return f"it moved after verl {last}: write {prefix}{now}={value}"


def place_now(key: str) -> tuple[str, str]:
    """Return the last verl that read a key, and its name or a remark now; both empty if none did."""
    for old, last, *new in _OLD:
        if found := re.fullmatch(rf"{old}(?P<rest>\..+)?", key):
            now = found.expand("".join(new))
            return last, now + (found["rest"] or "" if now and not now.startswith("(") else "")
    return "", ""


def _to_add(key: str, value: str) -> str:
    if ours := get_close_matches(key, _OURS, n=1, cutoff=0.9):
        return f"this plugin adds one: write +{ours[0]}={value}"
    if _HANDED_ON.search(key):
        return f"it is handed on: write ++{key}={value}"
    if key.endswith(".model_engine"):
        return f"write model_engine={value}, at the top level"
    return "it is there with model_engine=megatron, at the top level" if ".megatron." in f"{key}." else ""


def _meant(key: str, known: Iterable[str]) -> str:
    """Return the keys that the command may mean, the most similar first: alike in each of as many last parts."""
    parts = key.split(".")
    endings = {x: x.split(".")[-len(parts) :] for x in known if x.count(".") >= len(parts) - 1}
    near = [x for x, ending in endings.items() if all(map(_is_alike, parts, ending))]
    near.sort(key=lambda x: SequenceMatcher(None, key, ".".join(endings[x])).ratio(), reverse=True)
    also = f" (or {', '.join(near[1:3])})" if len(near) > 1 else ""
    return f"did you mean {near[0]}?{also}" if near else ""


def _is_alike(part: str, known: str) -> bool:
    return (len(known) > 5 and part.startswith(known)) or SequenceMatcher(None, part, known).ratio() >= 0.85


def unknown_in_yaml(config: Any) -> Iterator[Finding]:
    """Yield a finding for each key of a config that is much like one of verl's, and for each text for a number. Other
    keys that verl's own YAML files lack may be a recipe's, or read where they are given."""
    known = _verls_defaults()
    sections = {key for key in known if "." not in key}
    for key, value in nested(OmegaConf.to_container(config)):
        if key in known:
            yield from not_a_number(key, value, known[key])
        elif key.partition(".")[0] in sections and not (isinstance(value, dict) or _HANDED_ON.search(key)):
            if remedy := _meant(key, known):
                yield Finding(key, "verl has no such key", remedy)


@cache
def _verls_defaults() -> dict[str, Any]:
    """Return the keys of verl's own configs, one for each engine, with their defaults. Hydra composes twice."""
    folder = Path(getattr(module_spec("verl"), "origin", "")).parent / "trainer/config"
    loader, known = getattr(yaml, "CSafeLoader", yaml.SafeLoader), dict[str, Any]()
    for path in folder.glob("_generated_*.yaml"):
        known |= nested(yaml.load(path.read_text("utf-8"), loader))
    return known


def not_a_number(key: str, value: Any, default: Any) -> Iterator[Finding]:
    """Yield a finding on text, such as an empty variable, for what is a number or a truth value by default."""
    takes_a_range = key.endswith("_threshold") and value != ""
    if isinstance(default, int | float) and isinstance(value, str) and not (takes_a_range or "${" in value):
        yield Finding(key, f"is {value!r}", "give True or False" if isinstance(default, bool) else "give a number")
