"""Keys of a command, or of a YAML file, that verl's config does not have."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig, nested, select
from gtpo_verl.verl_plugin.training_monitor import KEY
from gtpo_verl.verl_plugin.values import fields_of, known_keys, verls_defaults

_header, *_rows = (files(__package__) / "old_keys.tsv").read_text().splitlines()
_OLD = [row.split("\t") for row in _rows]
_HANDED_ON = re.compile(r"kwargs\.|override_\w*\.")
_OURS = [KEY, *(f"algorithm.gtpo.{name}" for name in VerlGTPOConfig.__dataclass_fields__)]
_NO_SUCH_KEY = "verl has no such key"
# Sections that verl turns into dataclasses, which refuse what they do not have.
_DATACLASSES = ("actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic.")


def unknown(words: Iterable[str], config: Any, given: Collection[str] = ()) -> Iterator[Finding]:
    """Yield a finding for each override of a key that the config lacks; one for all that are another trainer's.

    `given` are the keys that the command sets beside them.
    """
    known = [key for key, _ in nested(OmegaConf.to_container(config))]
    others = []
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        remedy = moved(key, value, config, given) or _to_add(key, value) or _meant(key, known)
        if remedy:
            yield Finding(key, _NO_SUCH_KEY, remedy)
        else:
            others.append(key)
    if others:
        plural = "s" if len(others) > 1 else ""
        yield Finding(
            ", ".join(others),
            f"{_NO_SUCH_KEY}{plural}, of another trainer or misspelt",
            "leave out what verl is not to read; with ++ Hydra takes it in vain",
        )


def added(key: str, value: Any, config: Any, known: Collection[str], given: Collection[str] = ()) -> Finding | None:
    """Return what is wrong with a key that a config, or `+` and `++` on the command line, adds to verl's `known` ones.

    None if nothing is: it may be a recipe's, or read where it is given.
    """
    if key in known or key in _OURS:
        return None
    section = key.partition(".")[0]
    if section not in known or _HANDED_ON.search(key):
        return None
    remedy = moved(key, value, config, given) or _meant(key, known)
    return Finding(key, _NO_SUCH_KEY, remedy) if remedy else None


def added_in_yaml(config: Any) -> Iterator[Finding]:
    """Yield a finding for each key of a config that is much like one of verl's, or was one."""
    known = known_keys(config)
    for key, value in nested(OmegaConf.to_container(config)):
        if not isinstance(value, dict):
            finding = added(key, value, config, known)
            if finding:
                yield finding


def refused_by_dataclasses(config: Any) -> Iterator[Finding]:
    """Yield a finding for each key that a dataclass of verl refuses, and take it out of the config."""
    container: Any = OmegaConf.to_container(config)
    fields = set(fields_of(container))
    sections = {field.rpartition(".")[0] for field in fields}
    for key, value in nested(container):
        section, _, name = key.rpartition(".")
        if not key.startswith(_DATACLASSES) or section not in sections or key in fields:
            continue
        if key in verls_defaults() or name.startswith("_"):
            continue
        meant = moved(key, value, config) or _meant(key, known_keys(config))
        yield Finding(key, _NO_SUCH_KEY, meant or "leave it out")
        del OmegaConf.select(config, section)[name]


def moved(key: str, value: Any, config: Any, given: Collection[str] = ()) -> str:
    """Return what to write for a key of an earlier verl; empty if it is none."""
    last, now = place_now(key)
    if not last:
        return ""
    if not now or now.startswith("("):
        return f"verl {last} was the last to read it: remove it {now}".rstrip()
    current = select(config, now)
    is_given = now in given or (current is not None and current != verls_defaults().get(now))
    if is_given:
        return f"it moved after verl {last}, and {now}={current} is given: remove it"
    prefix = "" if _has(config, now) else "++"
    return f"it moved after verl {last}: write {prefix}{now}={value}"


def _has(config: Any, key: str) -> bool:
    """Whether a config has a key, whatever its value."""
    absent = object()
    try:
        return OmegaConf.select(config, key, default=absent) is not absent
    except OmegaConfBaseException:
        return True


def place_now(key: str) -> tuple[str, str]:
    """Return the last verl that read a key, and its name or a remark now; both empty if none did."""
    for old, last, *new in _OLD:
        match = re.fullmatch(rf"{old}(?P<rest>\..+)?", key)
        if match:
            now = match.expand("".join(new))
            is_name = now and not now.startswith("(")
            return last, now + (match["rest"] or "") if is_name else now
    return "", ""


def _to_add(key: str, value: str) -> str:
    ours = get_close_matches(key, _OURS, n=1, cutoff=0.9)
    if ours:
        return f"this plugin adds one: write +{ours[0]}={value}"
    if _HANDED_ON.search(key):
        return f"it is handed on: write ++{key}={value}"
    if key.endswith(".model_engine"):
        return f"write model_engine={value}, at the top level"
    if ".megatron." in f"{key}.":
        return "it is there with model_engine=megatron, at the top level"
    return ""


def _meant(key: str, known: Iterable[str]) -> str:
    """Return the keys that the command may mean, the most similar first: alike in each of as many last parts."""
    parts = key.split(".")
    near = {}
    for one in known:
        ending = one.split(".")[-len(parts) :]
        if len(ending) == len(parts) and _are_alike(parts, ending):
            near[one] = SequenceMatcher(None, key, ".".join(ending)).ratio()
    best = sorted(near, key=lambda one: (-near[one], one))
    if not best:
        return ""
    first, *rest = best
    also = f" (or {', '.join(rest[:2])})" if rest else ""
    return f"did you mean {first}?{also}"


def _are_alike(parts: Sequence[str], ending: Sequence[str]) -> bool:
    return all(_is_alike(part, known) for part, known in zip(parts, ending, strict=True))


def _is_alike(part: str, known: str) -> bool:
    goes_on = len(known) > 5 and part.startswith(known)
    return goes_on or SequenceMatcher(None, part, known).ratio() >= 0.85
