"""Four curves of a run in one figure, those that decide first; a line marks the step since which something is wrong."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from gtpo_verl.monitor.explain import label
from gtpo_verl.monitor.verdict import OUTCOMES
from gtpo_verl.run.records import atomic_write
from gtpo_verl.tools.diagnose.report import Run, window_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_OTHERS = ("entropy", "length")


def plot(run: Run, report: Mapping[str, Any], path: Path) -> None:
    """Draw the figure, in the format of its path's suffix.

    Raises:
        ValueError: matplotlib is missing, or lacks that format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install '.[diagnose]' in a clone of gtpo-verl") from error

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(f"{report['verdict'].upper()}: {report['why']}", fontsize=10, wrap=True)
    panels = figure.subplots(2, 2, sharex=True).flat
    for axes, name in zip(panels, chosen(report), strict=True):
        _draw(axes, run, report, name)
    below = f"step; {window_text(report)}"
    if report["since"] is not None:
        below += f"; the line is step {report['since']}"
    figure.supxlabel(below, fontsize=9)
    image = BytesIO()  # matplotlib does not report a full disk
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=150)
    atomic_write(path, image.getvalue())


def chosen(report: Mapping[str, Any]) -> list[str]:
    """Return the four numbers that are drawn: the outcome, what is wrong or moved most, entropy and length."""
    outcome = _first_logged([report["outcome"]] + list(OUTCOMES), report)

    # What is wrong or moved, unless it is drawn anyway.
    moved = [report["number"]]
    for move in report["moved"]:
        moved.append(move["number"])
    others = [name for name in moved if name is not None and name not in OUTCOMES + _OTHERS]
    other = _first_logged(others + ["terminated", "zero_std_groups"], report)
    return [outcome, other] + list(_OTHERS)


def _first_logged(names: list[Any], report: Mapping[str, Any]) -> str:
    """Return the first of these names that the run logged, the last one if it logged none."""
    for name in names:
        if name in report["numbers"]:
            return name
    return names[-1]


def _draw(axes: "Axes", run: Run, report: Mapping[str, Any], name: str) -> None:
    """Draw a number by step, its means over the report's window, and the step since which something is wrong."""
    steps = []
    values = []
    for step in sorted(run.log.steps):
        numbers = run.log.steps[step]
        if name in numbers:
            steps.append(step)
            values.append(numbers[name])
    title = label(name) if steps else f"{label(name)}: not logged"
    axes.set_title(title, fontsize=10)
    axes.plot(steps, values, color="#bbbbbb", linewidth=0.7)

    size = min(report["means_over"], len(values) // 2)
    if size > 1:
        means = [fmean(values[end - size : end]) for end in range(size, len(values) + 1)]
        axes.plot(steps[size - 1 :], means, color="#222222", linewidth=1.4)

    if report["since"] is not None:
        axes.axvline(report["since"], color="#AA3377", linestyle="--", linewidth=1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e4e4e4")
