"""Four curves of a run in one figure; a line marks the step since which it is unsound."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.signs import OUTCOMES, label
from gtpo_verl.run_files.records import atomic_write
from gtpo_verl.tools.diagnose.verdict import Run

_PANELS = (OUTCOMES, ("terminated", "zero_std_groups"), ("entropy",), ("length",))


def plot(run: Run, report: Mapping[str, Any], path: Path) -> None:
    """Draw the figure; the suffix of its `path` is the format.

    Raises:
        ValueError: matplotlib is not installed, or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install '.[diagnose]' in a clone of gtpo-verl") from error

    steps = sorted(run.log.steps)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    figure.suptitle(f"{report['verdict'].upper()}: {report['why']}", fontsize=10, wrap=True)
    for axes, names in zip(figure.subplots(2, 2, sharex=True).flat, _PANELS, strict=True):
        decides = [report["outcome"]] if names is OUTCOMES else []
        name = next((name for name in (*decides, *names) if name in report["numbers"]), names[-1])
        known = [(step, run.log.steps[step][name]) for step in steps if name in run.log.steps[step]]
        axes.set_title(label(name) + ("" if known else ": not logged"), fontsize=10)
        axes.plot(*zip(*known, strict=True) if known else ([], []), color="#0072B2", linewidth=1)
        if report["since"] is not None:
            axes.axvline(report["since"], color="#D55E00", linestyle="--", linewidth=1)
            place = {"xycoords": ("data", "axes fraction"), "xytext": (3, -10), "textcoords": "offset points"}
            axes.annotate(f"step {report['since']}", (report["since"], 1), color="#D55E00", fontsize=8, **place)
        axes.grid(color="#e4e4e4")
    figure.supxlabel("step", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    image = BytesIO()  # matplotlib does not report a full disk
    figure.savefig(image, format=path.suffix.lstrip(".") or "png", dpi=150)
    atomic_write(path, image.getvalue())
