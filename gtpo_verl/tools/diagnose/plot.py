"""Four curves of a run in one figure, those that decide first; a line marks the step since which it is unsound."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo_verl.monitor.signs import OUTCOMES, label
from gtpo_verl.run_files.records import atomic_write
from gtpo_verl.tools.diagnose.verdict import Run

_OTHERS = ("entropy", "length")


def plot(run: Run, report: Mapping[str, Any], path: Path) -> None:
    """Draw the figure, in the format of its path's suffix; a ValueError if matplotlib is missing or lacks it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install '.[diagnose]' in a clone of gtpo-verl") from error

    steps = sorted(run.log.steps)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(f"{report['verdict'].upper()}: {report['why']}", fontsize=10, wrap=True)
    faults = [x["number"] for x in report["signs"] if x["number"] not in (*OUTCOMES, *_OTHERS)]
    choices = ((report["outcome"], *OUTCOMES), (*faults, "terminated", "zero_std_groups"), *((x,) for x in _OTHERS))
    for axes, names in zip(figure.subplots(2, 2, sharex=True).flat, choices, strict=True):
        name = next((name for name in names if name in report["numbers"]), names[-1])
        known = [(step, run.log.steps[step][name]) for step in steps if name in run.log.steps[step]]
        axes.set_title(label(name) + ("" if known else ": not logged"), fontsize=10)
        at, values = zip(*known, strict=True) if known else ((), ())
        axes.plot(at, values, color="#bbbbbb", linewidth=0.7)
        size = min(report["means_over"], len(values) // 2)
        if size > 1:
            means = [fmean(values[i : i + size]) for i in range(len(values) - size + 1)]
            axes.plot(at[size - 1 :], means, color="#222222", linewidth=1.4)
        if report["since"] is not None:
            axes.axvline(report["since"], color="#AA3377", linestyle="--", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e4e4e4")
    since = "" if report["since"] is None else f"; the line is step {report['since']}"
    figure.supxlabel(f"step; means over {report['means_over']} steps{since}", fontsize=9)
    image = BytesIO()  # matplotlib does not report a full disk
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=150)
    atomic_write(path, image.getvalue())
