"""What trainers logged, from the files that people have: console logs, JSON lines, printed dicts, CSV, TensorBoard."""

import ast
import csv
import gzip
import io
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from gtpo_verl.monitor.frameworks import METRICS, framework_of, is_metric

FORMS = (
    "verl's console log or trainer.logger=file; what TRL or ms-swift prints, trainer_state.json or logging.jsonl; "
    "a CSV of W&B; a TensorBoard folder"
)
Steps = dict[int, dict[str, float]]
Pairs = Iterable[tuple[Any, Any]]
Keep = Callable[[str], bool]
"""Whether a metric of this name is kept."""

_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_VERL = re.compile(r"\bstep:(\d+) - (.*)")
_WRAPPED = re.compile(r"(?:np\.\w+|tensor)\(([^()]*)\)")
_BARE = re.compile(r"(?<=[:\s])(-?(?:nan|inf))\b")
_BAR = re.compile(r"\s*\d+%\|[^|]*\| *(\d+)/\d+ \[")
_PROGRESS = ("num_tokens", "epoch")
_OF_TOTAL = "global_step/max_steps"
_CONFIG = {  # as verl prints it at its start, or in the command above it
    "limit": r"max_response_length'?\s*[:=]\s*(\d+)",
    "prompts": r"train_batch_size'?\s*[:=]\s*(\d+)",
    "n": r"(?:'rollout':.*?'n':|rollout\.n=)\s*(\d+)",
}
_CONFIG_CHARACTERS = 1 << 18
_QUOTED = re.compile(rf"""["'](?:rewards?/|(?:{"|".join(map(re.escape, METRICS))})["'])""")  # a metric as a key
_UNDERSCORED = {name.replace("/", "_"): name for name in sorted(METRICS)}
_LARGE = 20 << 20


class Log(NamedTuple):
    """What a trainer logged.

    Args:
        name (str): of its file.
        framework (str): one of `frameworks.FRAMEWORKS`.
        steps (dict): its metrics at each step, by the framework's names; NaN where the framework wrote one.
        config (dict): what verl's console says of the run: `limit`, `prompts` of a step, and `n` completions of each.
        notes (list): what a reader of the report should know of the file.
    """

    name: str
    framework: str
    steps: Steps
    config: dict[str, int]
    notes: list[str]


def read_log(path: Path, keep: Keep = is_metric) -> Log:
    """The log at a path, in a folder, or on the standard input, `-`.

    Raises:
        ValueError: there is no log, or more than one; the message names the forms that are read.
    """
    if str(path) != "-" and not path.exists():
        raise ValueError(f"{path} does not exist: name a log, {FORMS}")
    if str(path) != "-" and path.is_dir():
        path = _find_log(path)
    if "tfevents" in path.name:
        return _log(path.name, _by_step(_read_events(path), keep))
    try:
        with open_text(path) as lines:
            first = next((line for line in lines if line.strip()), "")
            if first.strip() == "{" or path.suffix == ".json":
                return _log(str(path), _by_step(_read_history(str(path), first + lines.read()), keep))
            if re.match(r'"?(_step|step|global_step)"?,', first, re.IGNORECASE):
                return _log(str(path), _by_step(_read_csv(str(path), first, lines), keep))
            return _read_lines(str(path), first, lines, keep)
    except (csv.Error, EOFError, gzip.BadGzipFile, RecursionError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): give {FORMS}") from error


def read_metrics(path: Path) -> Steps:
    """All metrics of each step of a log."""
    return read_log(path, lambda name: name != "step").steps


def _find_log(folder: Path) -> Path:
    patterns = ("metrics.jsonl", "trainer_state.json", "checkpoint-*/trainer_state.json", "logging.jsonl", "output.log")
    for pattern in (*patterns, "*.jsonl", "*.jsonl.gz", "*.log", "*.csv", "*tfevents*"):
        found = sorted(folder.glob(pattern), key=lambda x: (int(re.sub(r"\D", "", x.parent.name) or 0), x.name))
        if len(found) == 1 or (found and pattern.startswith("checkpoint")):
            return found[-1]  # the newest checkpoint has the whole history
        if found:
            names = ", ".join([*(file.name for file in found[:3]), *["…"] * (len(found) > 3)])
            raise ValueError(f"{folder} has {len(found)} logs ({names}): name the file of one run")
    raise ValueError(f"{folder} has no log: name one, {FORMS}")


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file that may be compressed or, as PowerShell writes them, in UTF-16; `-` is the standard input."""
    opened: Any = sys.stdin.buffer if str(path) == "-" else path.open("rb")
    with opened as raw:
        start = raw.peek(2)[:2]
        if start == b"\x1f\x8b":
            raw = io.BufferedReader(gzip.open(raw))
            start = raw.peek(2)[:2]
        encoding = "utf-16" if start in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
        yield io.TextIOWrapper(raw, encoding=encoding, errors="replace")


def _log(name: str, steps: Steps, config: Mapping[str, int] | None = None, notes: Iterable[str] = ()) -> Log:
    if not steps:
        raise ValueError(f"{name} has no metrics of a run: give {FORMS}")
    swift = any([metrics.pop(_OF_TOTAL, None) is not None for metrics in steps.values()])
    names = set[str]().union(*steps.values())
    return Log(name, "ms-swift" if swift else framework_of(names), steps, dict(config or {}), list(notes))


def _read_lines(name: str, first: str, lines: TextIO, keep: Keep) -> Log:
    """Of several runs in one file the last: a step that comes again begins what follows it anew."""
    steps: Steps = {}
    before, last, starts, unfinished, bar = "", -1, 1, False, 0
    printed: list[tuple[int, dict[str, float]]] = []
    for line in _with_progress(first, lines):
        unfinished = not line.endswith("\n")
        if "%|" in line and (found := _BAR.match(_COLOUR.sub("", line))):
            bar = int(found[1])
        entry = _entry(line, keep)
        if entry is None:
            if not steps and len(before) < _CONFIG_CHARACTERS:
                before += _COLOUR.sub("", line)
            continue
        step, metrics = entry
        unfinished = False
        if step is None:
            progress = [name for name in _PROGRESS if name in metrics and printed and name in printed[-1][1]]
            if progress and metrics[progress[0]] < printed[-1][1][progress[0]]:
                printed, starts = [], starts + 1
            printed.append((bar, metrics))
            continue
        if step < last:
            steps, starts = {known: values for known, values in steps.items() if known < step}, starts + 1
        steps.setdefault(step, {}).update(metrics)
        last = step
    steps = steps or _numbered(printed)
    config = {key: int(said[-1]) for key, x in _CONFIG.items() if (said := re.findall(x, before, re.DOTALL))}
    notes = [f"the last of {starts} starts in this file"] * (starts > 1)
    notes += ["its last line is not finished: is the run still going?"] * (unfinished and bool(steps))
    return _log(name, steps, config, notes)


def _numbered(printed: list[tuple[int, dict[str, float]]]) -> Steps:
    """Entries that do not say their step have that of the progress bar before them, or are spread over its last one."""
    bars, count = [bar for bar, _ in printed], len(printed)
    if any(after <= before for before, after in zip(bars, bars[1:], strict=False)):  # written after all bars
        bars = [round(number * max(bars[-1] / count, 1)) for number in range(1, count + 1)]
    elif count and not bars[0]:
        bars = list(range(1, count + 1))
    return {bar: metrics for bar, (_, metrics) in zip(bars, printed, strict=True)}


def _with_progress(first: str, lines: TextIO) -> Iterator[str]:
    """The lines; a terminal shows how many MB of a large file are read."""
    yield first
    read = 0
    for number, line in enumerate(lines):
        yield line
        read += len(line)
        if number % 10_000 == 0 and read > _LARGE and sys.stderr.isatty():
            print(f"\rread {read >> 20} MB", end="", file=sys.stderr, flush=True)
    if read > _LARGE and sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)


def _entry(line: str, keep: Keep) -> tuple[int | None, dict[str, float]] | None:
    """The step, if the line says it, and its metrics; None of a line that has none."""
    if "step:" in line and (found := _VERL.search(_COLOUR.sub("", line))):
        metrics = _numbers((item.rpartition(":")[::2] for item in found[2].split(" - ")), keep)
        return (int(found[1]), metrics) if any(map(is_metric, metrics)) else None
    start, end = line.find("{"), line.rfind("}")
    if start < 0 or end < start or not _QUOTED.search(line):
        return None
    try:
        logged = json.loads(line[start : end + 1])
    except (RecursionError, ValueError):
        logged = _printed(line[start : end + 1])
    if not isinstance(logged, dict):
        return None
    step = logged.get("step")
    data, null = (logged["data"], math.nan) if isinstance(logged.get("data"), dict) else (logged, None)
    metrics = _numbers(data.items(), lambda name: keep(name) or name in _PROGRESS, null)
    if isinstance(of_total := logged.get(_OF_TOTAL), str):
        step, metrics[_OF_TOTAL] = int(of_total.partition("/")[0]), 0.0
    if step is None:
        step = _number(data.get("training/global_step"))
    if not any(map(is_metric, metrics)):
        return None
    return (None if step is None else int(step)), metrics


def _printed(text: str) -> Any:
    """A dict as Python prints it, or None."""
    try:
        return ast.literal_eval(_BARE.sub(r"'\1'", _WRAPPED.sub(r"\1", text)))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None


def _number(value: Any, null: float | None = None) -> float | None:
    if isinstance(value, str):
        found = _WRAPPED.fullmatch(value.strip())
        try:
            return float(found[1] if found else value)
        except ValueError:
            return None
    if value is None:
        return null  # verl's file logger writes NaN so
    return float(value) if isinstance(value, int | float) else None


def _numbers(pairs: Pairs, keep: Keep, null: float | None = None) -> dict[str, float]:
    numbers = ((str(name), _number(value, null)) for name, value in pairs if keep(str(name)))
    return {name: number for name, number in numbers if number is not None}


def _by_step(entries: Iterable[tuple[int, Pairs]], keep: Keep) -> Steps:
    """All metrics of the steps that have one of a run."""
    steps: Steps = defaultdict(dict)
    for step, pairs in entries:
        steps[step] |= _numbers(pairs, keep)
    return {step: metrics for step, metrics in steps.items() if any(map(is_metric, metrics))}


def _read_history(name: str, text: str) -> list[tuple[int, Pairs]]:
    """Of TRL's `trainer_state.json`."""
    try:
        return [(int(entry["step"]), entry.items()) for entry in json.loads(text)["log_history"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} has no log_history of steps ({error!r}): give {FORMS}") from error


def _read_csv(name: str, header: str, lines: TextIO) -> Iterator[tuple[int, Pairs]]:
    """W&B's history, a column for each metric, or the export of a chart, whose columns are `run - metric`."""
    (names,) = csv.reader([header])
    columns, runs = {}, set()
    for place, column in enumerate(names):
        run, of_chart, metric = column.rpartition(" - ")
        if not metric.endswith(("__MIN", "__MAX")):
            columns[place] = _UNDERSCORED.get(metric, metric.removeprefix("train/"))
            runs |= {run} if of_chart else set()
    if len(runs) > 1:
        raise ValueError(f"{name} has the runs {', '.join(sorted(runs))}: export the chart of one")
    for cells in filter(None, csv.reader(lines)):
        row = {columns[place]: cell for place, cell in enumerate(cells) if place in columns}
        known = (_number(x) for x in (row.get("training/global_step"), row.get("global_step"), cells[0]))
        step = next((number for number in known if number is not None), math.nan)
        if math.isfinite(step):
            yield int(step), row.items()


def _read_events(path: Path) -> Iterator[tuple[int, Pairs]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"{path} needs tensorboard: pip install 'gtpo-verl[diagnose]'") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield event.step, [(tag.removeprefix("train/"), event.value)]
