"""Keys of a command, or of a YAML file, that verl's config does not have."""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig, nested, select
from gtpo_verl.verl_plugin.training_monitor import KEY
from gtpo_verl.verl_plugin.values import fields_of, known_keys, verls_defaults

_HANDED_ON = re.compile(r"kwargs\.|override_\w*\.")
_OURS = [KEY, *(f"algorithm.gtpo.{name}" for name in VerlGTPOConfig.__dataclass_fields__)]
_NO_SUCH_KEY = "verl has no such key"
# Sections that verl turns into dataclasses, which refuse what they do not have.
_DATACLASSES = ("actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "critic.")


def unknown(words: Iterable[str], config: Any, given: Collection[str] = ()) -> Iterator[Finding]:
    """Yield a finding for each override whose key the config lacks, and one for all of those without a remedy.

    Args:
        words: the overrides, as they are written.
        config: the config.
        given: the keys that the command sets beside them.
    """
    known = [key for key, _ in nested(OmegaConf.to_container(config))]
    without_remedy = []
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        remedy = moved(key, value, config, given) or _to_add(key, value) or _meant(key, known)
        if remedy:
            yield Finding(key, _NO_SUCH_KEY, remedy)
        else:
            without_remedy.append(key)
    if without_remedy:
        plural = "s" if len(without_remedy) > 1 else ""
        yield Finding(
            subject=", ".join(without_remedy),
            message=f"{_NO_SUCH_KEY}{plural}, of another trainer or misspelt",
            remedy="leave out what verl is not to read; with ++ Hydra accepts it, and nothing reads it",
        )


def added(key: str, value: Any, config: Any, known: Collection[str], given: Collection[str] = ()) -> Finding | None:
    """Return what is wrong with a key that a config, or `+` and `++` on the command line, adds to verl's `known` ones.

    None if nothing is known to be wrong: the key may be a recipe's, or the user's own.
    """
    if key in known or key in _OURS:
        return None
    section = key.partition(".")[0]
    if section not in known or _HANDED_ON.search(key):
        return None
    remedy = moved(key, value, config, given) or _meant(key, known)
    return Finding(key, _NO_SUCH_KEY, remedy) if remedy else None


def added_in_yaml(config: Any) -> Iterator[Finding]:
    """Yield a finding for each key of a config that verl does not have, and that resembles one that it has or had."""
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
    """Return what to do about a key of an earlier verl; an empty text if it is none."""
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
    except OmegaConfBaseException:  # it is there, and its value cannot be resolved
        return True


def place_now(key: str) -> tuple[str, str]:
    """Return the last verl that read a key, and the name of the key now or a remark in parentheses.

    The second is empty if nothing reads it any more. Both are empty for a key that no verl had.
    """
    for old, last, new in _old_keys():
        match = re.fullmatch(rf"{old}(?P<rest>\..+)?", key)
        if match is None:
            continue
        now = match.expand(new)
        is_name = now and not now.startswith("(")
        if is_name:
            now += match["rest"] or ""
        return last, now
    return "", ""


@cache
def _old_keys() -> list[tuple[str, str, str]]:
    """Return the rows of old_keys.tsv: the key as a pattern, the last verl that had it, what to write now."""
    _header, *lines = (files(__package__) / "old_keys.tsv").read_text().splitlines()
    rows = []
    for line in lines:
        old, _, rest = line.partition("\t")
        last, _, new = rest.partition("\t")
        rows.append((old, last, new))
    return rows


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
    """Return a question with the keys that may be meant, the most similar first; an empty text if there are none.

    A key of n parts may mean one whose last n parts each resemble its own.
    """
    parts = key.split(".")
    similarities = {}
    for candidate in known:
        ending = candidate.split(".")[-len(parts) :]
        if len(ending) == len(parts) and _are_alike(parts, ending):
            similarities[candidate] = SequenceMatcher(None, key, ".".join(ending)).ratio()
    if not similarities:
        return ""
    best = sorted(similarities, key=lambda candidate: (-similarities[candidate], candidate))
    others = best[1:3]
    also = f" (or {', '.join(others)})" if others else ""
    return f"did you mean {best[0]}?{also}"


def _are_alike(parts: Sequence[str], ending: Sequence[str]) -> bool:
    return all(_is_alike(part, known) for part, known in zip(parts, ending, strict=True))


def _is_alike(part: str, known: str) -> bool:
    # A longer word for a known one, such as save_frequency for save_freq; a short known one begins too many words.
    is_longer_word = len(known) > 5 and part.startswith(known)
    return is_longer_word or SequenceMatcher(None, part, known).ratio() >= 0.85
