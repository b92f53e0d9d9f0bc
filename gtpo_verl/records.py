"""Files that a run leaves for a later start, and that a user may have edited."""

import json
from pathlib import Path
from typing import Any


def read_record(path: Path, *keys: str) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: there is no object, or it lacks one of `keys`; the message names the file.
    """
    try:
        record = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is no JSON ({error}): restore or remove it") from error
    if not isinstance(record, dict) or not record.keys() >= set(keys):
        wanted = " with ".join(["an object", *[", ".join(keys)] * bool(keys)])
        raise ValueError(f"{path} is not as it was written, {wanted}: restore or remove it")
    return record


def atomic_write(path: Path, text: str) -> None:
    """Write a file that is there in full or as it was before, whenever the process ends and however full the disk."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
