"""A log that is a table: W&B's history or a chart of it as CSV, or what a notebook shows."""

import math
import re
from collections.abc import Iterable, Iterator

from gtpo_verl.monitor.frameworks import METRICS, is_metric
from gtpo_verl.tools.diagnose.entries import STEP_COLUMNS, Entry, numbers, step_number

_VALIDATION_PREFIXES = ("val", "eval")
_UNDERSCORED = {name.replace("/", "_"): name for name in sorted(METRICS)}


def columns(log_name: str, header: Iterable[str]) -> list[str]:
    """Return the metric of each column; nothing if no column has the steps.

    The metric of a column that is not read, such as W&B's `__MIN` and `__MAX`, is "". In the header of a W&B chart a
    metric stands behind the name of its run, `run - metric`.

    Raises:
        ValueError: the columns are of several runs.
    """
    metrics = []
    runs = set()
    for column in header:
        run, separator, metric = column.strip().rpartition(" - ")
        if separator:
            runs.add(run)
        metrics.append(_metric(metric))
    if not any(metric in STEP_COLUMNS for metric in metrics):
        return []
    if len(runs) > 1:
        raise ValueError(f"{log_name} has the runs {', '.join(sorted(runs))}: export the chart of one")
    return metrics


def _metric(column: str) -> str:
    """Return the metric of a column: notebooks write blanks around its slashes, and some loggers underscores."""
    metric = re.sub(r"\s*/\s*", "/", column).removeprefix("train/").replace("Training Loss", "loss")
    metric = re.sub(r"^(val-core|val-aux)_(.+)_(\w+)_(mean@\d+)$", r"\1/\2/\3/\4", metric)
    if metric.lower() in STEP_COLUMNS:
        return metric.lower()
    if metric.endswith(("__MIN", "__MAX")):
        return ""
    return _UNDERSCORED.get(metric, metric)


def entries(metrics: list[str], rows: Iterable[list[str]]) -> Iterator[Entry]:
    """Yield the entry of each row, whose columns have these metrics."""
    for cells in rows:
        row = dict(zip(metrics, cells, strict=False))
        if "nan" in map(str.lower, cells):
            row = _without_missing(row)
        yield Entry(_step_of(row), numbers(row.items()))


def _step_of(row: dict[str, str]) -> int | None:
    """Return the step of a row, of the first column with one; None if it has none."""
    for column in STEP_COLUMNS:
        step = step_number(row.get(column))
        if step is not None:
            return step
    return None


def _without_missing(row: dict[str, str]) -> dict[str, str]:
    """Return a row without the nan that stands for a missing number.

    Some write it into a validation's cells beside training, and into those of training where a row has a validation
    alone. A training metric that is really nan in such a row is lost.
    """
    finite = [name for name, value in numbers(row.items()).items() if is_metric(name) and math.isfinite(value)]
    kinds = {name.startswith(_VALIDATION_PREFIXES) for name in finite}
    has_validation = True in kinds
    has_training = False in kinds
    kept = {}
    for name, value in row.items():
        is_validation = name.startswith(_VALIDATION_PREFIXES)
        if is_validation:
            is_missing = has_training
        else:
            is_missing = has_validation and not has_training
        if value.lower() != "nan" or not is_missing:
            kept[name] = value
    return kept
