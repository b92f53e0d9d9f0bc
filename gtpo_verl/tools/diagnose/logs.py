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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO

from gtpo_verl.monitor.frameworks import framework_of
from gtpo_verl.tools.diagnose import documents, tables
from gtpo_verl.tools.diagnose.console import Console
from gtpo_verl.tools.diagnose.entries import FORMS, LINE, OF_TOTAL, PRINTED, Log, Steps, collect, is_of_rl
from gtpo_verl.tools.diagnose.events import read_events

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
_ERRORS = (csv.Error, EOFError, MemoryError, OSError, RecursionError, UnicodeError, zlib.error)


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
    lines = _lines(file)
    first = next(filter(str.strip, islice(lines, PRINTED)), "")
    second = next(lines, "")
    if documents.is_document(first, second):
        document = documents.read_document(name, first + second + file.read(documents.DOCUMENT))
        if isinstance(document, dict) and "cells" in document:
            return _read_lines(name, documents.printed_lines(name, document))
        return _log(name, collect(name, documents.history(name, document)))

    delimiter = "\t" if "\t" in first else ","
    names = list[str]()
    if "{" not in first:
        with suppress(csv.Error):  # the first line of another file may be longer than a cell
            header = next(csv.reader([first], delimiter=delimiter), [])
            names = tables.columns(name, header)
    lines = chain([second], lines)
    if names:
        rows = csv.reader(lines, delimiter=delimiter)
        return _log(name, collect(name, tables.entries(names, rows)))
    return _read_lines(name, chain([first], lines))


def _read_lines(name: str, lines: Iterable[str]) -> Log:
    console = Console(name)
    console.read(lines)
    return _log(name, console.steps(), console.config(), console.notes())


def _log(name: str, steps: Steps, config: Mapping[str, float] = {}, notes: Iterable[str] = ()) -> Log:
    if not steps:
        of_the_run = Path(name).parent / "metrics.jsonl"  # beside a recipe's train.log
        has_steps = of_the_run != Path(name) and of_the_run.is_file() and of_the_run.stat().st_size
        raise ValueError(f"{name} contains no training metrics: give {of_the_run if has_steps else FORMS}")
    steps = _without_warm_up(steps)
    names = set[str]().union(*steps.values())
    framework = "ms-swift" if OF_TOTAL in names else framework_of(names)
    return Log(name=name, framework=framework, steps=steps, config=dict(config), notes=list(notes))


def _without_warm_up(steps: Steps) -> Steps:
    """Return a log without the steps before the first one of reinforcement learning, if there is one."""
    for first, metrics in steps.items():
        if is_of_rl(metrics):
            return {step: values for step, values in steps.items() if step >= first}
    return steps


def shown(path: Path) -> str:
    """Return a path, whose name need not be UTF-8, for a message."""
    return os.fsencode(path).decode(errors="replace")


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines; a compressed log of a run that goes on, or was killed, lacks its end."""
    with suppress(EOFError):
        yield from iter(lambda: file.readline(LINE), "")


def _find_log(folder: Path) -> Path:
    """Return the one log of a folder: of checkpoints the newest, which has the whole history."""
    for pattern in _PATTERNS:
        found = sorted(folder.glob(pattern), key=_number_and_name)
        if not found:
            continue
        if len(found) == 1 or pattern.startswith("checkpoint"):
            return found[-1]
        if pattern.endswith("tfevents*") and len({file.parent for file in found}) == 1:
            return found[0].parent  # of one run that was resumed
        names = ", ".join(shown(file.relative_to(folder)) for file in found[:3])
        raise ValueError(f"{shown(folder)} has {len(found)} logs ({names}): name the file of one run")
    raise ValueError(f"{shown(folder)} has no log: name one, {FORMS}")


def _number_and_name(path: Path) -> tuple[int, str]:
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
