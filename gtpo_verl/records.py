"""Files that a run writes: metrics, completions, and records for a later start, which a user may have edited."""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

SCHEMA_VERSION, HEADER_NAME, STEP_FILES = 1, "gtpo_dump.json", "step_*.jsonl"
"""Of a token dump, which `gtpo_verl.verl_plugin.token_dump` writes, and `gtpo_verl.view.sources` reads without verl."""


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


def read_lines(path: Path, check: Callable[[Any], dict[str, Any]], of: str) -> list[dict[str, Any]]:
    """What `check` makes of each line of a JSONL file.

    Raises:
        ValueError: `check` does not take a line, or there is none; the message names the line and what it is to be of.
    """
    lines = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                lines.append(check(json.loads(line)))
            except (KeyError, RecursionError, TypeError, ValueError) as error:
                said = error if type(error) is ValueError else repr(error)
                raise ValueError(f"{path}:{number} is not a line of a {of} ({said})") from error
    if not lines:
        raise ValueError(f"{path} holds no completion")
    return lines


def last_outputs(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The last output of each session of verl's agent loop, by its group, in the order of the sessions.

    Args:
        rows: of verl's rollouts or validation. The `uid` of the V1 trainer is `{group}_{session}_{output}`; the legacy
            trainer writes none, and there each row is a session and rows with one `input` are a group.
    """
    groups: dict[str, dict[int, tuple[int, dict[str, Any]]]] = {}
    for number, row in enumerate(rows):
        group, session, output = row.get("uid", row["input"]), number, 0
        if key := re.fullmatch(r"(.+)_(\d+)_(\d+)", row.get("uid", "")):
            group, session, output = key[1], int(key[2]), int(key[3])
        sessions = groups.setdefault(group, {})
        if session not in sessions or output >= sessions[session][0]:
            sessions[session] = output, row
    return {group: [row for _, (_, row) in sorted(sessions.items())] for group, sessions in groups.items()}
