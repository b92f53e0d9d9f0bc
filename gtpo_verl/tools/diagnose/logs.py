"""What trainers logged, from the files that people have: console logs, JSON lines, printed dicts, CSV, TensorBoard.

The form of a file is that of its text, whatever its name is.
"""

import csv
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from gtpo_verl.monitor.frameworks import framework_of
from gtpo_verl.tools.diagnose import documents, tables
from gtpo_verl.tools.diagnose.console import Console
from gtpo_verl.tools.diagnose.entries import FORMS, LINE, OF_TOTAL, Log, Steps, collect, is_of_rl
from gtpo_verl.tools.diagnose.events import read_events

# The logs that a folder may have, those that say most first.
_PATTERNS = (
    "metrics.jsonl",
    "trainer_state.json",
    "checkpoint-*/trainer_state.json",
    "logging.jsonl",
    "output.log",
    "files/output.log",
    "*.jsonl",
    "*.jsonl.gz",
    "*.log",
    "*.log.gz",
    "*.csv",
    "**/*tfevents*",
)
# What readers raise of a file that is damaged, or is something else.
_ERRORS = (csv.Error, EOFError, MemoryError, OSError, RecursionError, UnicodeError, zlib.error)
_BLANK_LINES = 1 << 16
"""Blank lines before the first other one, at most."""


def read_log(path: Path) -> Log:
    """Return the log at a path, in a folder, or on the standard input, `-`, in bounded time and memory.

    Raises:
        ValueError: there is none, or more than one; it names the forms that are read.
    """
    if str(path) != "-":
        if not path.exists():
            raise ValueError(f"{shown(path)} does not exist: name a log, {FORMS}")
        if path.is_dir():
            path = _find_log(path)
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{shown(path)} is no file; to read from a pipe, give - and the standard input")
    name = shown(path)
    try:
        if path.is_dir() or "tfevents" in path.name:
            return _log(name, collect(name, read_events(path)))
        with open_text(path) as file:
            return _read_text(name, file)
    except _ERRORS as error:
        raise ValueError(f"{name} cannot be read ({str(error) or type(error).__name__}): give {FORMS}") from error


def _read_text(name: str, file: TextIO) -> Log:
    """Read a text, whose first two lines show its form."""
    lines = _lines(file)
    first = ""
    for line in islice(lines, _BLANK_LINES):
        if line.strip():
            first = line
            break
    second = next(lines, "")

    if documents.is_document(first, second):
        return _read_document(name, first + second + file.read(documents.DOCUMENT))
    delimiter = "\t" if "\t" in first else ","
    columns = _columns(name, first, delimiter)
    if columns:
        rows = csv.reader(chain([second], lines), delimiter=delimiter)
        return _log(name, collect(name, tables.entries(columns, rows)))
    return _read_lines(name, chain([first, second], lines))


def _read_document(name: str, text: str) -> Log:
    document = documents.read_document(name, text)
    if isinstance(document, dict) and "cells" in document:
        return _read_lines(name, documents.printed_lines(name, document))
    return _log(name, collect(name, documents.history(name, document)))


def _columns(name: str, first: str, delimiter: str) -> list[str]:
    """Return the metric of each column of a table with this first line; nothing if it is no table."""
    if "{" in first:
        return []
    try:
        header = next(csv.reader([first], delimiter=delimiter), [])
    except csv.Error:  # a line longer than a cell may be
        return []
    return tables.columns(name, header)


def _read_lines(name: str, lines: Iterable[str]) -> Log:
    console = Console(name)
    console.read(lines)
    return _log(name, console.steps(), console.config(), console.notes())


def _log(name: str, steps: Steps, config: Mapping[str, float] | None = None, notes: Sequence[str] = ()) -> Log:
    if not steps:
        recipe_log = Path(name).parent / "metrics.jsonl"  # beside the train.log of a recipe
        is_remedy = recipe_log != Path(name) and recipe_log.is_file() and recipe_log.stat().st_size > 0
        remedy = str(recipe_log) if is_remedy else FORMS
        raise ValueError(f"{name} contains no training metrics: give {remedy}")
    steps = _without_warm_up(steps)
    names = set[str]().union(*steps.values())
    framework = "ms-swift" if OF_TOTAL in names else framework_of(names)
    return Log(name=name, framework=framework, steps=steps, config=config or {}, notes=list(notes))


def _without_warm_up(steps: Steps) -> Steps:
    """Return a log without the steps before the first one of reinforcement learning, if there is one."""
    for first, metrics in steps.items():
        if is_of_rl(metrics):
            return {step: values for step, values in steps.items() if step >= first}
    return steps


def shown(path: Path) -> str:
    """Return a path as text for a message; its name need not be UTF-8."""
    return os.fsencode(path).decode(errors="replace")


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines; a compressed log of a run that goes on, or was killed, lacks its end."""
    with suppress(EOFError):
        yield from iter(lambda: file.readline(LINE), "")


def _find_log(folder: Path) -> Path:
    """Return the one log of a folder: of checkpoints the newest, which has the whole history."""
    for pattern in _PATTERNS:
        files = sorted(folder.glob(pattern), key=_number_and_name)
        if not files:
            continue
        if len(files) == 1 or pattern.startswith("checkpoint"):
            return files[-1]
        if pattern.endswith("tfevents*") and len({file.parent for file in files}) == 1:
            return files[0].parent  # of one run that was resumed
        names = ", ".join(shown(file.relative_to(folder)) for file in files[:3])
        raise ValueError(f"{shown(folder)} has {len(files)} logs ({names}): name the file of one run")
    raise ValueError(f"{shown(folder)} has no log: name one, {FORMS}")


def _number_and_name(path: Path) -> tuple[int, str]:
    """Return what orders files: the number of their folder, such as checkpoint-120, and their name."""
    digits = re.sub(r"\D", "", path.parent.name)[:9]
    return int(digits or 0), path.name


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file that may be compressed or, as PowerShell writes them, in UTF-16; `-` is the standard input."""
    if str(path) == "-" and sys.stdin is None:
        raise ValueError("the standard input is closed")
    opened: Any = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    with opened as raw:
        start = raw.peek(2)[:2]
        if start == b"\x1f\x8b":
            raw = io.BufferedReader(gzip.open(raw))
            start = raw.peek(2)[:2]
        encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        yield io.TextIOWrapper(raw, encoding=encoding, errors="replace")
