"""A log of lines: verl's console, what TRL and OpenRLHF print, JSON lines."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from gtpo_verl.monitor.frameworks import is_metric
from gtpo_verl.tools.diagnose.entries import PRINTED, Entry, Steps, check_size, is_of_rl, numbers, parse_dict

CONFIG_TEXT = 1 << 18
"""Characters before the first metric in which a config is looked for, at most."""
NO_METRIC = 1 << 28
"""Characters without any metric after which a log has none."""

_COLOUR = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
_VERL = re.compile(r"\bstep:(\d{1,15}) - (.*)")
_BAR = re.compile(r"\s*\d+%\|[^|]*\| *(\d{1,15})/\d+ \[")
"""A progress bar of tqdm, with its step."""
_OPENED = re.compile(r"""\{\s*(["'][^{}]*)?$""")
"""A line whose last brace opens a dict that it does not close."""
_PROGRESS = ("num_tokens", "epoch")
"""What TRL prints of its progress, which never falls within a run."""
_RESTART = 100
"""A start costs the time of so many steps, since what it repeats is dropped from all steps before it."""
_CONFIG = {  # as verl prints it at its start, or in the command above it
    "limit": r"max_response_length'?\s*[:=]\s*(\d{1,9})",
    "prompts": r"train_batch_size'?\s*[:=]\s*(\d{1,9})",
    "n": r"(?:'rollout':.{,4000}?'n':|rollout\.n=)\s*(\d{1,9})",
    "lr": r"(?:'optim':.{,2000}?'lr':|actor\.optim\.lr=)\s*([\d.]{1,20}(?:e-?\d{1,3})?)",
}


class Printed(NamedTuple):
    """An entry that says no step: its metrics, and the step of the progress bar before it, 0 if there was none."""

    bar: int
    metrics: dict[str, float]


class Console:
    """Reads lines one by one, and keeps the last of several runs in one file.

    Where a step is lower than the one before, the run was started again from it: the steps from there on that an
    earlier start made are dropped. Entries that say no step are kept by themselves; of them a new start is seen where
    their progress falls.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts = 1
        self.is_unfinished = False  # whether the last line has no end
        self._steps: Steps = {}
        self._printed: list[Printed] = []  # entries that say no step
        self._last_step = -1
        self._bar = 0  # the step of the last progress bar
        self._is_of_verl = False  # whether verl's own lines were seen, beside which other dicts do not count
        self._before = ""  # the text before the first metric, which may have the config
        self._skipped = 0  # characters of lines without metrics

    def read(self, lines: Iterable[str]) -> None:
        """Read lines until they end, or have no metric for too long."""
        for line in _unwrapped(lines):
            if "%|" in line:
                bar = _BAR.match(_COLOUR.sub("", line))
                if bar:
                    self._bar = int(bar[1])
            entry = self._entry(line)
            self.is_unfinished = entry is None and not line.endswith("\n")
            if entry is not None:
                self._take(entry)
            elif not self._skip(line):
                break

    def steps(self) -> Steps:
        """Return the metrics of each step."""
        return self._steps or _numbered(self._printed)

    def config(self) -> dict[str, float]:
        """Return what the text before the first metric says of the run."""
        config = {}
        for key, pattern in _CONFIG.items():
            values = re.findall(pattern, self._before, re.DOTALL)
            if values:
                config[key] = float(values[-1])
        return config

    def notes(self) -> list[str]:
        """Return what a reader should know of the log."""
        notes = []
        if self.starts > 1:
            notes.append(f"the last of {self.starts} starts in this file")
        if self.is_unfinished and self.steps():
            notes.append("its last line is not finished: is the run still going?")
        return notes

    def _entry(self, line: str) -> Entry | None:
        """Return the entry in a line, if it has one; dicts that others print beside verl are no steps of the run."""
        entry = _entry_of_verl(line)
        if entry is not None and not self._is_of_verl:
            self._is_of_verl = True
            self._steps = {}
            self._printed = []
            self._last_step = -1
            self.starts = 1
        return entry if self._is_of_verl else parse_dict(line)

    def _skip(self, line: str) -> bool:
        """Pass over a line without metrics, and return whether to go on reading."""
        self._skipped += len(line)
        if self._steps or self._printed:
            return True
        if len(self._before) < CONFIG_TEXT:
            self._before += _COLOUR.sub("", line)[:CONFIG_TEXT]
            return True
        return self._skipped <= NO_METRIC

    def _take(self, entry: Entry) -> None:
        if entry.step is None:
            self._take_printed(entry.metrics)
        else:
            if entry.step < self._last_step:
                self._steps = {step: metrics for step, metrics in self._steps.items() if step < entry.step}
                self.starts += 1
            self._steps.setdefault(entry.step, {}).update(entry.metrics)
            self._last_step = entry.step
        steps = max(len(self._steps), len(self._printed), _RESTART * self.starts)
        check_size(self.name, steps, len(entry.metrics))

    def _take_printed(self, metrics: dict[str, float]) -> None:
        """Take an entry that says no step; that of an evaluation belongs to the step before it."""
        is_evaluation = any(name.startswith("eval") for name in metrics)
        if is_evaluation and self._printed:
            self._printed[-1].metrics.update(metrics)
            return
        if is_evaluation and self._last_step in self._steps:
            self._steps[self._last_step].update(metrics)
            return

        if self._printed:
            before = self._printed[-1].metrics
            if is_of_rl(metrics) and not is_of_rl(before):
                self._printed = []  # of a supervised run in the same file
            else:
                self._drop_what_is_repeated(before, metrics)
        self._printed.append(Printed(self._bar, metrics))

    def _drop_what_is_repeated(self, before: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Drop the entries from the progress of these metrics on, if that is less than in the entry before."""
        for progress in _PROGRESS:
            if progress in metrics and progress in before:
                now = metrics[progress]
                if now < before[progress]:
                    self._printed = [entry for entry in self._printed if entry.metrics.get(progress, 0) < now]
                    self.starts += 1
                return


def _unwrapped(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines; a dict of metrics that a terminal wrapped at its width becomes one line again."""
    held: list[str] = []
    size = 0
    depth = 0
    for line in lines:
        if held and ("{'" in line or '{"' in line):  # the dict before it was never finished
            yield from held
            held = []
        if not held:
            size = 0
            depth = 0
            if "{" not in line or not _OPENED.search(line):
                yield line
                continue
        held.append(line)
        size += len(line)
        depth += line.count("{") - line.count("}")
        if depth <= 0 or size >= PRINTED:
            yield from _as_one(held)
            held = []
    yield from held


def _as_one(lines: list[str]) -> list[str]:
    """Return lines as one, if that one has metrics; else return them as they are."""
    text = "".join(line.rstrip("\r\n") for line in lines)
    return lines if parse_dict(text) is None else [f"{text}\n"]


def _entry_of_verl(line: str) -> Entry | None:
    """Return the entry of a line of verl's console, `step:1 - name:value - …`; None of any other line."""
    if "step:" not in line:
        return None
    logged = _VERL.search(_COLOUR.sub("", line))
    if not logged:
        return None
    pairs = []
    for item in logged[2].split(" - "):
        metric, _, value = item.rpartition(":")
        pairs.append((metric, value))
    metrics = numbers(pairs)
    return Entry(int(logged[1]), metrics) if any(map(is_metric, metrics)) else None


def _numbered(printed: list[Printed]) -> Steps:
    """Return entries that say no step by that of the progress bar before them.

    If there is no bar, or they were written after all bars, they are spread over the steps of the last one.
    """
    bars = [entry.bar for entry in printed]
    has_bar_each = 0 not in bars and all(bar < later for bar, later in pairwise(bars))
    if not has_bar_each:
        between = max(bars[-1] / len(bars), 1)
        bars = [round(place * between) for place in range(1, len(bars) + 1)]
    return {bar: entry.metrics for bar, entry in zip(bars, printed, strict=True)}
