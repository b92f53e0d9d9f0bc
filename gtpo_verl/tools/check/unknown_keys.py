"""Keys of a command that its config does not have, and keys that it adds and nothing reads."""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from gtpo_verl.tools.check.finding import Finding

_OLD = [line.split("\t") for line in (files(__package__) / "old_keys.tsv").read_text().splitlines()[1:]]
_FREE = re.compile(r"kwargs|override|engine_config|env_vars|ray_init|workers|machine")
"""Sections whose keys are handed on to others."""
_OWN_FILES = 2000


def unknown(words: Iterable[str], config: Any) -> Iterator[Finding]:
    """A finding for each override of a key that the config does not have."""
    known = list(_keys(OmegaConf.to_container(config)))
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        yield Finding(key, "verl has no such key", moved(key, value, config) or _meant(key, value, known))


def moved(key: str, value: str, config: Any) -> str:
    """What to write for a key of an earlier verl; empty if it is none."""
    for old, last, *new in _OLD:
        if key == old or key.startswith(f"{old}."):
            if not new:
                return f"verl {last} was the last to read it: remove it"
            now = new[0] + key.removeprefix(old)
            prefix = "" if OmegaConf.select(config, now, default=config) is not config else "++"
            return f"it moved after verl {last}: write {prefix}{now}={value}"
    return ""


def _meant(key: str, value: str, known: Sequence[str]) -> str:
    """A key that the command may mean: it ends like this one, or differs by a letter or two in one of its parts."""
    section, _, name = key.rpartition(".")
    ends = [x for x in known if section and x.endswith(f".{key}")]
    beside = {x.rpartition(".")[2]: x for x in known if x.rpartition(".")[0] == section}
    near = ends or [beside[x] for x in get_close_matches(name, beside, n=1, cutoff=0.85)]
    near = near or get_close_matches(key, [x for x in known if x.endswith(f".{name}")], n=1, cutoff=0.9)
    if near:
        return f"did you mean {near[0]}?" + f" (or {', '.join(near[1:3])})" * (len(near) > 1)
    return f"if your own code reads it, write ++{key}={value}; if not, remove it"


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    for name, value in node.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{name}.")


def unread(overrides: Iterable[str], base: Any, config: Any) -> Iterator[Finding]:
    """A warning for each key that a `+` adds and that neither verl, nor GTPO, nor the program or the files that the
    config names read."""
    added: dict[str, tuple[str, str]] = {}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        parts = key.split(".")
        new = [part for i, part in enumerate(parts, 1) if OmegaConf.select(base, ".".join(parts[:i])) is None]
        handed_on = any(_FREE.search(part) for part in parts[:-1])
        # An addition that chose a file of a config group adds other keys.
        is_group = "@" in key or ("." not in key and OmegaConf.select(config, key) is None)
        if word.startswith("+") and new and not handed_on and not is_group:
            added[new[0]] = key, value
    read = re.compile("|".join(rf"\b({re.escape(name)})\b" for name in added))
    for path in _sources(config) if added else ():
        for line in path.read_text(errors="ignore").splitlines():
            for found in read.finditer(line):
                before, after = line[: found.start()], line[found.end() :]
                if before.endswith((".", '"', "'")) and not after.startswith(".") or re.fullmatch(r"\s+", before):
                    added.pop(found[0], None)
    for key, value in added.values():
        advice = moved(key, value, config) or "Hydra takes whatever a + adds: is it spelt right?"
        yield Finding(key, "nothing in verl or in this program reads it", advice=advice)


def _sources(config: Any) -> Iterator[Path]:
    import verl

    import gtpo_verl

    named = ("reward.custom_reward_function.path", "custom_reward_function.path", "data.custom_cls.path")
    named_files = [str(path) for key in named if (path := OmegaConf.select(config, key))]
    loaded = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())]
    libraries = re.compile(r"site-packages|dist-packages|/lib/python3")
    programs = [file for file in loaded if file.endswith(".py") and not libraries.search(file)]
    own = [path for path in map(Path, named_files + programs) if path.is_file()]
    for package in (verl, gtpo_verl):
        yield from Path(package.__path__[0]).rglob("*.py")
    folders = {path.parent for path in own}
    yield from dict.fromkeys([*own, *(file for folder in folders for file in folder.glob("*.py"))][:_OWN_FILES])
