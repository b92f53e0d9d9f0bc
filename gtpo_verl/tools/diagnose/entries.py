"""What all forms of log have in common: an entry is a step, if it says one, and its metrics."""

import ast
import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gtpo_verl.monitor.frameworks import METRICS, PREFIXES, is_metric
from gtpo_verl.monitor.series import BEYOND_REASON

FORMS = (
    "verl's console log or trainer.logger=file; what TRL or ms-swift prints, trainer_state.json or logging.jsonl; "
    "a CSV of W&B, over Step; a TensorBoard folder"
)
STEP_COLUMNS = ("training/global_step", "global_step", "step", "_step")
"""What a table calls its column of steps, of several the first with a number; elsewhere they are no metrics either."""
OF_TOTAL = "global_step/max_steps"
"""What ms-swift calls the step, with the last one behind a slash."""
MAX_STEPS = 200_000
"""Steps of a log, at most."""
MAX_METRICS = 10_000
"""Metrics of a step, at most."""
LINE = 1 << 22
"""Characters of a line, at most."""
PRINTED = 1 << 16
"""Characters of a printed dict, at most."""

_NO_METRICS = {"", *STEP_COLUMNS}
_WRAPPED = re.compile(r"(?:np\.\w+|tensor)\(([^()]*)\)")
"""A number as numpy or torch prints it: np.float64(0.5), tensor(0.5)."""
_BARE = re.compile(r"(?<=[:\s])(-?(?:nan|inf))\b")
"""What Python prints for a number that is not finite, and does not read."""
_GLOBAL_STEP = re.compile(r"\bGlobal step (\d{1,15})")
_QUOTED = re.compile(rf"""["'](?:{"|".join(PREFIXES)}|(?:{"|".join(map(re.escape, sorted(METRICS)))})["'])""")
"""The name of a metric as a key of a dict."""
_OF_RL = re.compile(r"reward|score|val|eval|completion|response|rollout", re.IGNORECASE)

Steps = dict[int, dict[str, float]]


class Entry(NamedTuple):
    """One entry of a log; its step is None if it does not say one."""

    step: int | None
    metrics: dict[str, float]


class Log(NamedTuple):
    """What a trainer logged.

    Args:
        name: of the file.
        framework: one of `frameworks.FRAMEWORKS`.
        steps: the metrics of each step, NaN where the trainer wrote one: by the framework's names as they are read,
            and by our own (`explain.LABELS`) in a `report.Run`.
        config: what verl's console says of the run: the `limit` of a completion, `prompts` of a step, `n` completions
            of each, `lr`.
        notes: what a reader should know of it.
    """

    name: str
    framework: str
    steps: Steps
    config: Mapping[str, float]
    notes: list[str]


def number(value: Any, null: float | None = None) -> float | None:
    """Return a value as a number; None if it is none, and `null` if it is None.

    A number beyond reason becomes infinite.
    """
    if value is None:
        return null
    if isinstance(value, str):
        value = _WRAPPED.sub(r"\1", value)
    try:
        converted = float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None
    if abs(converted) >= BEYOND_REASON:
        return math.copysign(math.inf, converted)
    return converted


def step_number(value: Any) -> int | None:
    """Return a value as a step; None if it is none."""
    converted = number(value)
    if converted is None or not 0 <= converted < 1e15:
        return None
    return int(converted)


def numbers(pairs: Iterable[tuple[Any, Any]], null: float | None = None) -> dict[str, float]:
    """Return the metrics among these names and values; `null` stands for a value that is None."""
    metrics = {}
    for name, value in pairs:
        converted = number(value, null)
        if converted is not None and name not in _NO_METRICS:
            metrics[sys.intern(str(name))] = converted  # one string for all steps, of which there may be many
    return metrics


def parse_dict(line: str) -> Entry | None:
    """Return the entry in a line with a dict, of JSON or as Python prints it; None if it has none."""
    start = line.find("{")
    end = line.rfind("}")
    if start < 0 or end < start or not _QUOTED.search(line):
        return None
    text = line[start : end + 1]
    try:
        logged = json.loads(text)
    except (RecursionError, ValueError):
        logged = _parse_printed(text)
    if not isinstance(logged, dict):
        return None
    step_before = _GLOBAL_STEP.search(line[:start])  # as OpenRLHF writes it
    return entry_of(logged, step_before[1] if step_before else None)


def entry_of(logged: Mapping[str, Any], step_before: Any = None) -> Entry | None:
    """Return the entry that a dict is; None if it has no metric of a run.

    Its step is that which it says, else `step_before`, which stands before it in its line.
    """
    if "train_runtime" in logged:  # what TRL prints at the end is of no step
        return None
    step = logged.get("step")
    if isinstance(logged.get("data"), dict):  # verl's file logger, which writes NaN as null
        data = logged["data"]
        metrics = numbers(data.items(), null=math.nan)
    else:
        data = logged
        metrics = numbers(data.items())
    of_total = logged.get(OF_TOTAL)
    if isinstance(of_total, str):
        step = of_total.partition("/")[0]
        metrics[OF_TOTAL] = 0.0  # which tells that the log is ms-swift's
    if step is None:
        step = data.get("training/global_step", step_before)
    if not any(map(is_metric, metrics)):
        return None
    if step is not None and step_number(step) is None:
        return None
    return Entry(step_number(step), metrics)


def _parse_printed(text: str) -> Any:
    """Return the value that Python printed so; None if it cannot be read."""
    unwrapped = _WRAPPED.sub(r"\1", text[:PRINTED])
    try:
        return ast.literal_eval(_BARE.sub(r"'\1'", unwrapped))
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return None


def is_of_rl(metrics: Iterable[str]) -> bool:
    """Return whether an entry can be of reinforcement learning: it has a reward, a validation or facts of completions.

    Entries before the first such one are of another run, such as a supervised warm-up.
    """
    return any(_OF_RL.search(name) for name in metrics)


def collect(name: str, entries: Iterable[Entry]) -> Steps:
    """Return the metrics of each step that has one of a run; entries that say no step are left out."""
    steps: Steps = {}
    for entry in entries:
        if entry.step is not None:
            metrics = steps.setdefault(entry.step, {})
            metrics.update(entry.metrics)
            check_size(name, len(steps), len(metrics))
    return {step: metrics for step, metrics in steps.items() if any(map(is_metric, metrics))}


def check_size(name: str, steps: int, metrics: int) -> None:
    """Raise a ValueError if a log has more steps than a run, or a step more metrics than a trainer logs."""
    if steps > MAX_STEPS:
        raise ValueError(
            f"{name} has more than {MAX_STEPS} steps, or starts of a run by the thousand: give a part of it"
        )
    if metrics > MAX_METRICS:
        raise ValueError(f"{name} has a step with more than {MAX_METRICS} metrics: give a log with those of training")
