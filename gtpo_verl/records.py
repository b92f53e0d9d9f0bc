"""Files that a run writes for a later start, and that a user may have edited."""

import json
from pathlib import Path
from typing import Any


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        ValueError: the file holds no object, or the object lacks one of `keys`; the message names the file.
    """
    try:
        record = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): restore or remove it") from error
    if not isinstance(record, dict) or not record.keys() >= set(keys):
        wanted = " with ".join(["an object", *[", ".join(keys)] * bool(keys)])
        raise ValueError(f"{path} is not as it was written, {wanted}: restore or remove it")
    return record


def atomic_write(path: Path, content: str | bytes) -> None:
    """Write atomically: a kill or a full disk leaves the old file."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
