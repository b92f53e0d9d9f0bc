"""A figure of training (as in GTPO, arXiv:2508.03772, Fig. 1 to 5) from the logs of runs.

    python3 -m recipes plot 'GRPO=runs/grpo_seed*.jsonl' 'GTPO=runs/gtpo_seed*.jsonl' --out figures

A run is a log that ``gtpo_verl.tools.diagnose.logs`` reads, such as the JSONL of ``trainer.logger=[..., file]``. Runs
with one label are seeds of one method: their mean is drawn, over the steps that all of them logged, with a band from
the lowest to the highest of them. Curves are centred moving averages; the raw mean is drawn faintly behind them. The
figure is written as PNG and SVG.

Needs matplotlib and pandas.
"""

import argparse
import glob
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gtpo_verl.algorithm.config import LN2
from gtpo_verl.tools.diagnose.logs import read_log

# Okabe and Ito's palette without its yellow, which is lost on white, and its black, which marks ln 2.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#555555"
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 8.5,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 9,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.edgecolor": "#999999",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "gtpo",
}


class Curve(NamedTuple):
    """One metric: the first of ``keys`` that all runs of a label logged, times ``factor``; a share has no ``unit``.

    ``good`` is an arrow that points to where it should go, empty if neither way is good. ``if_all_zero`` is what to
    write in place of a curve that is 0 throughout.
    """

    name: str
    unit: str
    keys: tuple[str, ...]
    factor: float = 1.0
    mark_ln2: bool = False
    good: str = ""
    if_all_zero: str = ""


# A panel has one or two curves. If both were logged, the second is dashed, and on an axis on the right if its unit is
# another. Curves without a unit lie between 0 and 1.
PANELS: tuple[tuple[Curve, ...], ...] = (
    (Curve("right answers", "", ("reward/acc/mean",), good="↑"),),
    (
        Curve("format reward / 10", "", ("reward/format/mean",), 0.1, good="↑"),
        Curve("exact format", "", ("reward/strict/mean",), good="↑"),
    ),
    (Curve("entropy", "nats per token", ("actor/entropy", "actor/entropy_loss", "gtpo/entropy/mean"), mark_ln2=True),),
    (Curve("conflict tokens", "", ("gtpo/conflict/token_frac",)),),
    (
        Curve("length", "tokens", ("response_length/mean", "completion/length/mean")),
        Curve("ends with EOS", "", ("completion/eos_rate",), good="↑"),
    ),
    (Curve("filtered completions", "", ("gtpo/filter/dropped_frac",), if_all_zero="no completion was filtered"),),
)


def read_run(path: str | Path) -> pd.DataFrame:
    """Return one run, a row per step and a column per metric; NaN where a step did not log a metric."""
    return pd.DataFrame.from_dict(read_log(Path(path)).steps, orient="index").sort_index()


def read_runs(arguments: Iterable[str]) -> dict[str, list[pd.DataFrame]]:
    """Return runs by label, from ``label=path``, ``label=glob`` or a path, whose label is its name without the suffix.

    Raises:
        ValueError: nothing matches; a glob has no label; a path without a label has the name of other runs.
    """
    runs: dict[str, dict[Path, pd.DataFrame]] = {}  # by label, then by resolved path: a file counts once
    labels_of_paths = set()
    for argument in arguments:
        label, equals, pattern = argument.partition("=")
        is_path = Path(argument).exists()
        if is_path:
            label = Path(argument).stem if Path(argument).is_file() else Path(argument).name
            pattern = argument
        elif not equals:
            raise ValueError(f"no run matches {argument!r}: name a log, or write LABEL=GLOB for several")
        if label in labels_of_paths or (is_path and label in runs):
            raise ValueError(f"two runs are named {label!r}: write LABEL=PATH")
        if is_path:
            labels_of_paths.add(label)
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise ValueError(f"no run matches {pattern!r}")
        seeds = runs.setdefault(label, {})
        for path in paths:
            seeds[Path(path).resolve()] = read_run(path)
    for label, seeds in runs.items():
        last_steps = {int(run.index[-1]) for run in seeds.values()}
        if len(last_steps) > 1:
            end = min(last_steps)
            print(f"{label}: its seeds end at steps {sorted(last_steps)}; drawn up to step {end}", file=sys.stderr)
    return {label: list(seeds.values()) for label, seeds in runs.items()}


def values_of(curve: Curve, runs: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """Return a curve's values at the steps that all runs logged, a column per run; None if there are none."""
    for key in curve.keys:
        if all(key in run for run in runs):
            values = pd.concat([run[key] for run in runs], axis="columns", join="inner").dropna()
            if len(values):
                return curve.factor * values
    return None


def moving_average(values: pd.DataFrame, window: int) -> pd.DataFrame:
    """Return the centred mean over `window` steps, without the steps that were not logged."""
    every_step = values.reindex(range(values.index[0], values.index[-1] + 1))
    return every_step.rolling(window, center=True, min_periods=1).mean().loc[values.index]


def training_figure(runs: Mapping[str, Sequence[pd.DataFrame]], window: int | None = None) -> Figure:
    """Draw six panels over training steps, one colour per label.

    They show accuracy, the format reward and the exact format, entropy with ln 2, conflict tokens, length and EOS, and
    filtered completions, or that there were none.

    A metric is drawn for a label if all of its runs logged it. One that is drawn for no label is named in its panel.

    Args:
        runs: Label to the runs (seeds) under it, at least one.
        window: Width of the moving average in steps, 1 for none; by default the root of the longest run's steps.

    Raises:
        ValueError: If there are more labels than colours.
    """
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(runs)} labels: at most {len(COLOURS)} can be told apart by colour")
    all_runs = [run for group in runs.values() for run in group]
    if window is None:
        longest = max(run.index[-1] - run.index[0] for run in all_runs)
        window = max(1, round(math.sqrt(longest)))
    most_seeds = max(len(group) for group in runs.values())
    colours = dict(zip(runs, COLOURS, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.4, 4.6), layout="constrained")  # legible when a README shows it 450 pixels wide
        axes = figure.subplots(2, 3)
        for ax, panel in zip(axes.flat, PANELS, strict=True):
            _draw_panel(ax, panel, runs, colours, window)
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        handles = []
        for label, group in runs.items():
            name = label if most_seeds == 1 else f"{label} (n = {len(group)})"
            handles.append(Line2D([], [], color=colours[label], lw=2, label=name))
        caption = _caption(most_seeds, window)
        figure.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 4), frameon=False)
        figure.supxlabel(caption, fontsize=7.5, color=GREY)
    return figure


def _caption(most_seeds: int, window: int) -> str:
    notes = []
    band = ""
    if most_seeds > 1:
        notes.append("mean of the seeds")
        band = " Band: range over the seeds."
    if window > 1:
        notes.append(f"moving average over {window} steps (faint: unsmoothed)")
    return f"Line: {', '.join(notes) or 'as logged'}.{band}\nPanels without a unit: shares. ↑: higher is better."


def _draw_panel(
    ax: Axes, panel: Sequence[Curve], runs: Mapping[str, Sequence[pd.DataFrame]], colours: dict[str, str], window: int
) -> None:
    drawn: list[Curve] = []
    missing: list[str] = []
    curve_ax = ax
    for curve in panel:
        values_of_label = {}
        for label, group in runs.items():
            values = values_of(curve, group)
            if values is not None:
                values_of_label[label] = values
        if not values_of_label:
            missing.append(curve.keys[0])
            continue
        if curve.if_all_zero and not any(values.to_numpy().any() for values in values_of_label.values()):
            ax.set_axis_off()
            ax.text(0.5, 0.5, curve.if_all_zero, transform=ax.transAxes, ha="center", color=GREY)
            return
        if drawn and curve.unit != drawn[0].unit:
            curve_ax = ax.twinx()
            curve_ax.grid(False)
            curve_ax.spines["right"].set_visible(True)
        for label, values in values_of_label.items():
            _draw_curve(curve_ax, values, window, colours[label], dashed=bool(drawn))
        drawn.append(curve)
        if curve.mark_ln2:
            curve_ax.axhline(LN2, color="black", lw=1, ls=":")
            curve_ax.annotate(
                "ln 2",
                xy=(1, LN2),
                xycoords=("axes fraction", "data"),
                xytext=(-2, 2),
                textcoords="offset points",
                ha="right",
            )
        # Every axis shows zero: one that starts at the data exaggerates differences.
        high = max(1.1 * curve_ax.dataLim.y1, 1e-3) if curve.unit else 1.03
        curve_ax.set_ylim(-0.03 * high, high)

    # If no curve was drawn, the title names those that are missing.
    names = []
    for curve in drawn or panel:
        name = f"{curve.name}, {curve.unit}" if curve.unit else curve.name
        names.append(f"{name} {curve.good}".rstrip())
    title = " and ".join(names)
    if len(drawn) == 2:
        right = ", right" if curve_ax is not ax else ""
        title = f"{names[0]} (solid)\n{names[1]} (dashed{right})"
    ax.set_title(title[0].upper() + title[1:])
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if missing:
        note = "not logged:\n" + "\n".join(missing)
        ax.text(0.5, 0.05, note, transform=ax.transAxes, ha="center", color=GREY)


def _draw_curve(ax: Axes, values: pd.DataFrame, window: int, colour: str, dashed: bool) -> None:
    """Draw a curve of a label: the smoothed mean of its seeds, the unsmoothed mean faintly behind it, and a band from
    the lowest to the highest seed's smoothed value."""
    smooth = moving_average(values, window)
    if window > 1:
        ax.plot(values.mean(axis=1), color=colour, lw=0.6, alpha=0.25, zorder=1.5)
    if smooth.shape[1] > 1:
        lowest = smooth.min(axis=1)
        highest = smooth.max(axis=1)
        ax.fill_between(smooth.index, lowest, highest, color=colour, alpha=0.18, lw=0)
    ax.plot(
        smooth.mean(axis=1),
        color=colour,
        lw=1.7,
        ls=(0, (3, 1.2)) if dashed else "-",
        marker="o" if len(smooth) == 1 else "",  # a line through one point is invisible
        ms=4,
        zorder=2.5,
    )


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure to ``path`` with the suffixes .png and .svg, and return both paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(written[0], dpi=200)
        figure.savefig(written[1], metadata={"Date": None})
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python3 -m recipes plot``."""
    parser.description = "Draw a figure of training from the logs of runs."
    parser.epilog = "example: python3 -m recipes plot 'GRPO=grpo_seed*.jsonl' 'GTPO=gtpo_seed*.jsonl' --out figures"
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a log, such as the JSONL of trainer.logger=file: PATH, LABEL=PATH or LABEL=GLOB",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG and SVG files")
    parser.add_argument(
        "--window",
        type=int,
        help="width of the moving average in steps, 1 for none (default: the square root of the longest run)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw the figure, and print where it is."""
    if args.window is not None and args.window < 1:
        raise ValueError(f"--window must be at least 1, got {args.window}")
    print(*save(training_figure(read_runs(args.runs), args.window), args.out / "training"), sep="\n")
    return 0
