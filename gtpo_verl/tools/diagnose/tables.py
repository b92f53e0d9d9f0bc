"""A log that is a table: W&B's history or a chart of it as CSV, or what a notebook shows."""

import math
import re
from collections.abc import Iterable, Iterator

from gtpo_verl.monitor.frameworks import METRICS, is_metric
from gtpo_verl.tools.diagnose.entries import STEP_COLUMNS, Entry, numbers, step_number

_VALIDATION = ("val", "eval")
_UNDERSCORED = {name.replace("/", "_"): name for name in sorted(METRICS)}


def columns(name: str, header: Iterable[str]) -> list[str]:
    """Return the metric of each column, "" of one that is not read; nothing if no column has the steps.

    W&B's chart has `run - metric` as names, a notebook's table blanks around the slash, and some loggers underscores.

    Raises:
        ValueError: the columns are of several runs.
    """
    found = []
    runs = set()
    for column in header:
        run, of_chart, metric = column.strip().rpartition(" - ")
        if of_chart:
            runs.add(run)
        found.append(_metric(metric))
    if not {*found} & {*STEP_COLUMNS}:
        return []
    if len(runs) > 1:
        raise ValueError(f"{name} has the runs {', '.join(sorted(runs))}: export the chart of one")
    return found


def _metric(column: str) -> str:
    metric = re.sub(r"\s*/\s*", "/", column).removeprefix("train/").replace("Training Loss", "loss")
    metric = re.sub(r"^(val-core|val-aux)_(.+)_(\w+)_(mean@\d+)$", r"\1/\2/\3/\4", metric)
    if metric.lower() in STEP_COLUMNS:
        return metric.lower()
    if metric.endswith(("__MIN", "__MAX")):
        return ""
    return _UNDERSCORED.get(metric, metric)


def entries(names: list[str], rows: Iterable[list[str]]) -> Iterator[Entry]:
    """Yield the entry of each row."""
    for cells in rows:
        row = dict(zip(names, cells, strict=False))
        if "nan" in map(str.lower, cells):
            row = _without_missing(row)
        steps = [step_number(row.get(column)) for column in STEP_COLUMNS]
        yield Entry(next((step for step in steps if step is not None), None), numbers(row.items()))


def _without_missing(row: dict[str, str]) -> dict[str, str]:
    """Return a row without the nan that stands for a missing number.

    Some write it into a validation's cells beside training, and into those of training beside a validation.
    """
    finite = [name for name, value in numbers(row.items()).items() if is_metric(name) and math.isfinite(value)]
    kinds = {name.startswith(_VALIDATION) for name in finite}
    has_validation = True in kinds
    has_training = False in kinds
    kept = {}
    for name, value in row.items():
        is_validation = name.startswith(_VALIDATION)
        is_missing = has_training if is_validation else has_validation and not has_training
        if value.lower() != "nan" or not is_missing:
            kept[name] = value
    return kept
