"""Files that a run writes: its metrics, and records for a later start, which a user may have edited."""

import gzip
import json
import sys
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


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step in verl's file log, which may be compressed: `{"step": n, "data": {key: value}}` a line,
    or the same flattened.

    Lines of one step are merged, the later value winning, so a resumed run may be appended. A last line that the writer
    has not finished is left out.

    Raises:
        ValueError: another line is not JSON or has no `step`, or there is no step with a number in it.
    """
    steps: dict[int, dict[str, float]] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    print(f"{path}:{number} is unfinished and left out: is the run still going?", file=sys.stderr)
                    break
                raise ValueError(f"{path}:{number} is not JSON ({error}): is this verl's file logger?") from error
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                raise ValueError(f'{path}:{number} has no integer "step": is this verl\'s file logger?')
            data = entry.get("data", entry)
            if not isinstance(data, dict):
                raise ValueError(f'{path}:{number}: "data" holds no metrics: is this verl\'s file logger?')
            found = {k: float(v) for k, v in data.items() if k != "step" and isinstance(v, int | float)}
            if found:
                steps.setdefault(entry["step"], {}).update(found)
    if not steps:
        raise ValueError(f"{path} holds no steps: did the run log any metrics?")
    return steps
