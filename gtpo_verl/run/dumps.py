"""Files of completions: the token dump's names, and the lines that verl writes of rollouts and validation."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# Of a token dump, which `verl_plugin.token_dump` writes and `tools.rollouts` reads without verl.
SCHEMA_VERSION = 2
HEADER_NAME = "gtpo_dump.json"
STEP_FILES = "step_*.jsonl"

_MAX_LINE_BYTES = 1 << 26  # a completion of 128k tokens takes a fifth of it
_MAX_BRACKETS = 1 << 20  # in a line; an empty list takes 2 bytes there and 64 in memory


def read_lines(
    path: Path, check: Callable[[Any], dict[str, Any]], file_kind: str, max_bytes: int | None = None
) -> list[dict[str, Any]]:
    """Return what `check` makes of each line of a JSONL file.

    Args:
        path: the file.
        check: returns what to keep of a line.
        file_kind: what the file should be, for messages.
        max_bytes: after this many no further line is read; None for the whole file.

    Raises:
        ValueError: `check` rejects a line, or there is none; the message names the line and the kind of file.
    """
    rows = []
    size = 0
    with path.open("rb") as file:
        number = 0
        while line := file.readline(_MAX_LINE_BYTES):
            number += 1
            try:
                if len(line) == _MAX_LINE_BYTES:
                    raise ValueError(f"it is longer than {_MAX_LINE_BYTES >> 20} MB")
                if line.count(b"[") + line.count(b"{") > _MAX_BRACKETS:
                    raise ValueError(f"it has more than {_MAX_BRACKETS:,} brackets")
                rows.append(check(json.loads(line)))
            except (KeyError, RecursionError, TypeError, ValueError) as error:
                reason = str(error) if type(error) is ValueError else repr(error)
                raise ValueError(f"{path}:{number} is not a line of a {file_kind} ({reason})") from error
            size += len(line)
            if max_bytes is not None and size > max_bytes:
                break
    if not rows:
        raise ValueError(f"{path} holds no line")
    return rows


def last_outputs(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the last output of each session of verl's agent loop, by its group, in the order of the sessions.

    Args:
        rows: of verl's rollouts or validation. The `uid` of the V1 trainer is `{group}_{session}_{output}`; the legacy
            trainer writes none, and there each row is a session and rows with one `input` are a group.
    """
    # Of each group and session the number of its last output so far, and that output.
    groups: dict[str, dict[int, tuple[int, dict[str, Any]]]] = {}
    for number, row in enumerate(rows):
        key = re.fullmatch(r"(.+)_(\d+)_(\d+)", row.get("uid", ""))
        if key:
            group = key[1]
            session = int(key[2])
            output = int(key[3])
        else:
            group = row.get("uid", row["input"])
            session = number
            output = 0
        sessions = groups.setdefault(group, {})
        if session not in sessions or output >= sessions[session][0]:
            sessions[session] = output, row

    last: dict[str, list[dict[str, Any]]] = {}
    for group, sessions in groups.items():
        last[group] = [sessions[session][1] for session in sorted(sessions)]
    return last
