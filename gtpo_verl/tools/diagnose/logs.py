"""What trainers logged, from the files that people have: console logs, JSON lines, printed dicts, CSV, TensorBoard."""

import ast
import csv
import gzip
import io
import json
import math
import os
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from gtpo_verl.monitor.frameworks import METRICS, PREFIXES, framework_of, is_metric

FORMS = (
    "verl's console log or trainer.logger=file; what TRL or ms-swift prints, trainer_state.json or logging.jsonl; "
    "a CSV of W&B, over Step; a TensorBoard folder"
)
Steps = dict[int, dict[str, float]]
Pairs = Iterable[tuple[Any, Any]]

_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_VERL = re.compile(r"\bstep:(\d{1,15}) - (.*)")
_GLOBAL_STEP = re.compile(r"\bGlobal step (\d{1,15})")
_WRAPPED = re.compile(r"(?:np\.\w+|tensor)\(([^()]*)\)")
_BARE = re.compile(r"(?<=[:\s])(-?(?:nan|inf))\b")
_BAR = re.compile(r"\s*\d+%\|[^|]*\| *(\d{1,15})/\d+ \[")
_PROGRESS = ("num_tokens", "epoch")
_OF_TOTAL = "global_step/max_steps"
_VALIDATION = ("val", "eval")
_STEP_COLUMNS = ("training/global_step", "global_step", "step", "_step")
_CONFIG = {  # as verl prints it at its start, or in the command above it
    "limit": r"max_response_length'?\s*[:=]\s*(\d{1,9})",
    "prompts": r"train_batch_size'?\s*[:=]\s*(\d{1,9})",
    "n": r"(?:'rollout':.{,4000}?'n':|rollout\.n=)\s*(\d{1,9})",
}
_QUOTED = re.compile(rf"""["'](?:{"|".join(PREFIXES)}|(?:{"|".join(map(re.escape, METRICS))})["'])""")
_UNDERSCORED = {name.replace("/", "_"): name for name in sorted(METRICS)}
_CONFIG_TEXT, _LINE, _PRINTED, _FILE, _NO_METRIC = 1 << 18, 1 << 22, 1 << 16, 1 << 26, 1 << 28
"""Characters, at most: of a config, of a line, of a printed dict, of a JSON file, before any metric."""
_STEPS = 200_000


class Log(NamedTuple):
    """What a trainer logged: its metrics at each step, by the framework's names, NaN where that wrote one; what verl's
    console says of the run (`limit`, `prompts` of a step, `n` completions of each); what a reader should know of it."""

    name: str
    framework: str
    steps: Steps
    config: dict[str, int]
    notes: list[str]


def read_log(path: Path) -> Log:
    """Return the log at a path, in a folder, or on the standard input, `-`, in bounded time and memory; a ValueError
    names the forms that are read if there is none, or more than one."""
    if str(path) != "-":
        if not path.exists():
            raise ValueError(f"{shown(path)} does not exist: name a log, {FORMS}")
        path = _find_log(path) if path.is_dir() else path
        if not path.is_file() and not path.is_dir():
            raise ValueError(f"{shown(path)} is no file; to read from a pipe, give - and the standard input")
    name = shown(path)
    try:
        if path.is_dir() or "tfevents" in path.name:
            return _log(name, _by_step(name, _read_events(path)))
        with open_text(path) as file:
            lines = _lines(file)
            first = next(filter(str.strip, islice(lines, _PRINTED)), "")
            if first.strip() == "{" or path.suffix in (".json", ".ipynb"):
                return _log(name, _by_step(name, _read_history(name, first + file.read(_FILE))))
            header, rows = (csv.reader(x, delimiter="\t" if "\t" in first else ",") for x in ([first], lines))
            columns = list[str]()
            with suppress(csv.Error):  # the first line of another file may be longer than a cell
                columns = [] if "{" in first else _columns(name, next(header, []))
            if columns:
                return _log(name, _by_step(name, _read_rows(columns, rows)))
            return _read_lines(name, chain([first], lines))
    except (csv.Error, EOFError, MemoryError, OSError, RecursionError, UnicodeError, zlib.error) as error:
        raise ValueError(f"{name} cannot be read ({str(error) or type(error).__name__}): give {FORMS}") from error


def shown(path: Path) -> str:
    """Return a path, whose name need not be UTF-8, for a message."""
    return os.fsencode(path).decode(errors="replace")


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines; a compressed log of a run that goes on, or was killed, lacks its end."""
    with suppress(EOFError):
        yield from iter(lambda: file.readline(_LINE), "")


def _find_log(folder: Path) -> Path:
    """Return the one log of a folder: of checkpoints the newest, which has the whole history."""
    patterns = ("metrics.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "logging.jsonl", "output.log")
    for pattern in (*patterns, "*.jsonl", "*.jsonl.gz", "*.log", "*.log.gz", "*.csv", "**/*tfevents*"):
        found = sorted(folder.glob(pattern), key=lambda x: (int(re.sub(r"\D", "", x.parent.name)[:9] or 0), x.name))
        if len(found) == 1 or (found and pattern.startswith("checkpoint")):
            return found[-1]
        if pattern.endswith("tfevents*") and len({file.parent for file in found}) == 1:
            return found[0].parent  # of one run that was resumed
        if found:
            names = ", ".join(shown(file.relative_to(folder)) for file in found[:3])
            raise ValueError(f"{shown(folder)} has {len(found)} logs ({names}): name the file of one run")
    raise ValueError(f"{shown(folder)} has no log: name one, {FORMS}")


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


def _log(name: str, steps: Steps, config: Mapping[str, int] = {}, notes: Iterable[str] = ()) -> Log:
    if not steps:
        of_the_run = Path(name).parent / "metrics.jsonl"  # beside a recipe's train.log
        has_steps = of_the_run != Path(name) and of_the_run.is_file() and of_the_run.stat().st_size
        raise ValueError(f"{name} contains no training metrics: give {of_the_run if has_steps else FORMS}")
    names = set[str]().union(*steps.values())
    return Log(name, "ms-swift" if _OF_TOTAL in names else framework_of(names), steps, dict(config), list(notes))


def _read_lines(name: str, lines: Iterable[str]) -> Log:
    """Return, of several runs in one file, the last: a step that comes again begins what follows it anew."""
    steps: Steps = {}
    before, last, starts, unfinished, bar, read, verls = "", -1, 1, False, 0, 0, False
    printed: list[tuple[int, dict[str, float]]] = []
    for line in lines:
        if "%|" in line and (found := _BAR.match(_COLOUR.sub("", line))):
            bar = int(found[1])
        if (of_verl := _verls_entry(line)) and not verls:  # dicts that others print beside verl are none of its steps
            steps, printed, last, starts, verls = {}, [], -1, 1, True
        entry = of_verl if verls else _entry(line)
        unfinished = entry is None and not line.endswith("\n")
        if entry is None:
            read += len(line)
            if not steps and len(before) < _CONFIG_TEXT:
                before += _COLOUR.sub("", line)[:_CONFIG_TEXT]
            elif not steps and not printed and read > _NO_METRIC:
                break
            continue
        step, metrics = entry
        if step is None and (printed or last in steps) and any(name.startswith("eval") for name in metrics):
            (printed[-1][1] if printed else steps[last]).update(metrics)  # of the step before
        elif step is None:
            progress = next((x for x in _PROGRESS if x in metrics and printed and x in printed[-1][1]), None)
            if progress and metrics[progress] < printed[-1][1][progress]:
                printed, starts = [x for x in printed if x[1].get(progress, 0) < metrics[progress]], starts + 1
            printed.append((bar, metrics))
        else:
            if step < last:
                steps, starts = {known: values for known, values in steps.items() if known < step}, starts + 1
            steps.setdefault(step, {}).update(metrics)
            last = step
        _check_size(name, max(len(steps), len(printed), 100 * starts))
    steps = steps or _numbered(printed)
    config = {key: int(said[-1]) for key, x in _CONFIG.items() if (said := re.findall(x, before, re.DOTALL))}
    notes = [f"the last of {starts} starts in this file"] if starts > 1 else []
    notes += ["its last line is not finished: is the run still going?"] if unfinished and steps else []
    return _log(name, steps, config, notes)


def _check_size(name: str, steps: int) -> None:
    if steps > _STEPS:
        raise ValueError(f"{name} has more than {_STEPS} steps, or starts of a run by the thousand: give a part of it")


def _numbered(printed: list[tuple[int, dict[str, float]]]) -> Steps:
    """Give entries without a step that of the progress bar before them, or spread them over its last one."""
    bars = [bar for bar, _ in printed]
    if bars != sorted({*bars} - {0}):  # there is no bar, or they were written after all bars
        bars = [round(number * max(bars[-1] / len(bars), 1)) for number in range(1, len(bars) + 1)]
    return {bar: metrics for bar, (_, metrics) in zip(bars, printed, strict=True)}


def _verls_entry(line: str) -> tuple[int, dict[str, float]] | None:
    """Return the step and the metrics of a line of verl's console; None of any other."""
    if "step:" not in line or not (found := _VERL.search(_COLOUR.sub("", line))):
        return None
    metrics = _numbers(item.rpartition(":")[::2] for item in found[2].split(" - "))
    return (int(found[1]), metrics) if any(map(is_metric, metrics)) else None


def _entry(line: str) -> tuple[int | None, dict[str, float]] | None:
    """Return the step, if the line says it, and its metrics; None of a line that has none."""
    start, end = line.find("{"), line.rfind("}")
    if start < 0 or end < start or not _QUOTED.search(line):
        return None
    try:
        logged = json.loads(line[start : end + 1])
    except (RecursionError, ValueError):
        logged = _printed(line[start : end + 1])
    if not isinstance(logged, dict) or "train_runtime" in logged:  # what TRL prints at the end is of no step
        return None
    step: Any = logged.get("step")
    data, null = (logged["data"], math.nan) if isinstance(logged.get("data"), dict) else (logged, None)
    metrics = _numbers(data.items(), null)
    if isinstance(of_total := logged.get(_OF_TOTAL), str):
        step, metrics[_OF_TOTAL] = of_total.partition("/")[0], 0.0
    if step is None:
        before = _GLOBAL_STEP.search(line[:start])  # as OpenRLHF writes it
        step = data.get("training/global_step", before and before[1])
    if not any(map(is_metric, metrics)) or (step is not None and _step(step) is None):
        return None
    return _step(step), metrics


def _printed(text: str) -> Any:
    """Return a dict as Python prints it, or None."""
    try:
        return ast.literal_eval(_BARE.sub(r"'\1'", _WRAPPED.sub(r"\1", text[:_PRINTED])))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None


def _number(value: Any, null: float | None = None) -> float | None:
    """Return a value as a number, infinite beyond 1e100, `null` of None; None if it is no number."""
    if value is None:
        return null  # verl's file logger writes NaN so
    try:
        number = float(_WRAPPED.sub(r"\1", value) if isinstance(value, str) else value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
    return math.copysign(math.inf, number) if abs(number) >= 1e100 else number


def _step(value: Any) -> int | None:
    number = _number(value)
    return None if number is None or not 0 <= number < 1e15 else int(number)


def _numbers(pairs: Pairs, null: float | None = None) -> dict[str, float]:
    numbers = ((str(name), _number(value, null)) for name, value in pairs if name not in ("", *_STEP_COLUMNS))
    return {name: number for name, number in numbers if number is not None}


def _by_step(name: str, entries: Iterable[tuple[Any, Pairs]]) -> Steps:
    """Return all metrics of the steps that have one of a run."""
    steps: Steps = defaultdict(dict)
    for said, pairs in entries:
        if (step := _step(said)) is not None:
            steps[step] |= _numbers(pairs)
            _check_size(name, len(steps))
    return {step: metrics for step, metrics in steps.items() if any(map(is_metric, metrics))}


def _read_history(name: str, text: str) -> list[tuple[Any, Pairs]]:
    """Return the entries of TRL's `trainer_state.json`."""
    if "_runtime" in text[:_PRINTED] and "log_history" not in text:
        raise ValueError(f"{name} is W&B's summary, the last step alone: give output.log, or the history as CSV")
    if name.endswith(".ipynb"):
        raise ValueError(f"{name} is a notebook: copy its table into a .csv file")
    if len(text) >= _FILE:
        raise ValueError(f"{name} is longer than {_FILE >> 20} MB: give the log of the run, {FORMS}")
    try:
        history = json.loads(text)["log_history"]
        return [(entry["step"], entry.items()) for entry in history if "train_runtime" not in entry]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} has no log_history of steps ({error!r}): give {FORMS}") from error


def _columns(name: str, header: Iterable[str]) -> list[str]:
    """Return the metrics in the columns of W&B's history, or of the export of a chart, which are `run - metric`; or of
    a table that was copied; "" of one that is not read; none if this is no header of one with a column of steps."""
    columns, runs = list[str](), set()
    for column in header:
        run, of_chart, metric = column.strip().rpartition(" - ")
        metric = re.sub(r"\s*/\s*", "/", metric).removeprefix("train/").replace("Training Loss", "loss")
        metric = re.sub(r"^(val-core|val-aux)_(.+)_(\w+)_(mean@\d+)$", r"\1/\2/\3/\4", metric)
        metric = metric.lower() if metric.lower() in _STEP_COLUMNS else _UNDERSCORED.get(metric, metric)
        columns.append("" if metric.endswith(("__MIN", "__MAX")) else metric)
        runs |= {run} if of_chart else set()
    if not {*columns} & {*_STEP_COLUMNS}:
        return []
    if len(runs) > 1:
        raise ValueError(f"{name} has the runs {', '.join(sorted(runs))}: export the chart of one")
    return columns


def _read_rows(columns: Iterable[str], rows: Iterable[list[str]]) -> Iterator[tuple[Any, Pairs]]:
    for cells in rows:
        row = dict(zip(columns, cells, strict=False))
        if "nan" in map(str.lower, cells):
            finite = (name for name, x in _numbers(row.items()).items() if is_metric(name) and math.isfinite(x))
            kinds = {name.startswith(_VALIDATION) for name in finite}
            # Some write it into a validation's cells beside training, and into those of training beside a validation.
            empty = {True: False in kinds, False: kinds == {True}}
            row = {name: x for name, x in row.items() if x.lower() != "nan" or not empty[name.startswith(_VALIDATION)]}
        yield next((row[x] for x in _STEP_COLUMNS if _step(row.get(x)) is not None), None), row.items()


def _read_events(path: Path) -> Iterator[tuple[int, Pairs]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"{path} needs tensorboard: pip install '.[diagnose]' in a clone of gtpo-verl") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if is_metric(tag.removeprefix("train/"))]
    found = sorted((x.wall_time, x.step, tag, x.value) for tag in tags for x in events.Scalars(tag))
    later = accumulate((step for _, step, *_ in reversed(found)), min)
    for (_, step, tag, value), first in zip(found, reversed([*later]), strict=True):
        if step <= first:  # else a later start has it, or will
            yield step, [(tag.removeprefix("train/"), value)]
