"""Records that a run writes beside its results for a later start, and that a user may have edited."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

_MAX_BYTES = 1 << 26


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: the file holds no object, or the object lacks one of `keys`; the message names the file.
    """
    try:
        with path.open("rb") as file:
            record = json.loads(file.read(_MAX_BYTES))  # a longer file is cut off here, and is no JSON then
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): restore or remove it") from error
    if not isinstance(record, dict) or not record.keys() >= set(keys):
        expected = "an object"
        if keys:
            expected += f" with {', '.join(keys)}"
        raise ValueError(f"{path} is corrupt, expected {expected}: restore or remove it")
    return record


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write a file as a whole, with its folder: a kill or a full disk leaves the old one. A device, pipe or link is
    written through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode() if isinstance(content, str) else content
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:  # which names the partial file
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)


def nearest_existing(path: Path) -> Path:
    """Return the path, or the first folder above it that is there."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def differences(before: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that had another value, one line each."""
    changed = []
    for key in dict.fromkeys([*settings, *before]):  # each once, the present ones first
        now = settings.get(key, "unset")
        then = before.get(key, "unset")
        if now != then:
            changed.append(f"{key}={now}, was {then}")
    return changed
