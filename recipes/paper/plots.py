"""Figures of training (as in GTPO, arXiv:2508.03772, Fig. 1 to 5) from verl's file logger.

    python3 -m recipes plot 'GRPO=runs/grpo_seed*.jsonl' 'GTPO=runs/gtpo_seed*.jsonl' --out figures

A run is the JSONL of ``trainer.logger=[..., file]``, see ``gtpo_verl.tools.diagnose.logs``. Runs with one label are
seeds of one method: their mean is drawn, over the steps that all of them logged, in a band from the smallest to the
largest seed. Curves are centred moving averages; the raw mean is drawn faintly behind them. Every figure is written as
PNG and SVG.

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


# A panel has one or two curves. The second is dashed; if its unit differs, its axis is on the right. Shares go to 1.
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
        ValueError: If nothing matches, or two paths without a label have one name.
    """
    runs: dict[str, dict[Path, pd.DataFrame]] = {}
    for argument in arguments:
        label, equals, pattern = argument.partition("=")
        has_no_label = not equals or Path(argument).exists()
        if has_no_label:
            label = Path(argument).stem
            pattern = argument
            if label in runs:
                raise ValueError(f"two runs are named {label!r}: write LABEL=PATH")
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise ValueError(f"no run matches {pattern!r}")
        seeds = runs.setdefault(label, {})
        for path in paths:
            seeds[Path(path).resolve()] = read_run(path)
    for label, seeds in runs.items():
        ends = {int(run.index[-1]) for run in seeds.values()}
        if len(ends) > 1:
            print(f"{label}: its seeds end at steps {sorted(ends)}, drawn up to the first of them", file=sys.stderr)
    return {label: list(seeds.values()) for label, seeds in runs.items()}


def seeds_of(runs: Sequence[pd.DataFrame], curve: Curve) -> pd.DataFrame | None:
    """Return a curve over the steps that all runs logged, (steps, runs); None if there are none."""
    for key in curve.keys:
        if all(key in run for run in runs):
            seeds = pd.concat([run[key] for run in runs], axis="columns", join="inner").dropna()
            if len(seeds):
                return curve.factor * seeds
    return None


def moving_average(seeds: pd.DataFrame, window: int) -> pd.DataFrame:
    """Return the centred mean over `window` steps, without the steps that were not logged."""
    every_step = seeds.reindex(range(seeds.index[0], seeds.index[-1] + 1))
    return every_step.rolling(window, center=True, min_periods=1).mean().loc[seeds.index]


def training_figure(runs: Mapping[str, Sequence[pd.DataFrame]], window: int | None = None) -> Figure:
    """Draw six panels over training steps, one colour per label.

    They show accuracy, the format's reward and the exact format, entropy with ln 2, conflict tokens, length and EOS,
    and filtered completions, or that there were none.

    A metric that no run logged is named in its panel; a label that did not log it is missing there.

    Args:
        runs: Label to the runs (seeds) under it, at least one.
        window: Width of the moving average in steps, 1 for none; by default the square root of the longest run.

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
        figure = Figure(figsize=(7.4, 4.6), layout="constrained")  # 900 pixels of a README, legible at 450
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
        band = " Band: smallest to largest seed."
    if window > 1:
        notes.append(f"moving average over {window} steps (faint: unsmoothed)")
    return f"Line: {', '.join(notes) or 'as logged'}.{band} Panels without a unit: shares. ↑: higher is better."


def _draw_panel(
    ax: Axes, panel: Sequence[Curve], runs: Mapping[str, Sequence[pd.DataFrame]], colours: dict[str, str], window: int
) -> None:
    drawn: list[Curve] = []
    missing: list[str] = []
    target = ax
    for curve in panel:
        seeds_of_label = {}
        for label, group in runs.items():
            seeds = seeds_of(group, curve)
            if seeds is not None:
                seeds_of_label[label] = seeds
        if not seeds_of_label:
            missing.append(curve.keys[0])
            continue
        if curve.if_all_zero and not any(seeds.to_numpy().any() for seeds in seeds_of_label.values()):
            ax.set_axis_off()
            ax.text(0.5, 0.5, curve.if_all_zero, transform=ax.transAxes, ha="center", color=GREY)
            return
        if drawn and curve.unit != drawn[0].unit:
            target = ax.twinx()
            target.grid(False)
            target.spines["right"].set_visible(True)
        for label, seeds in seeds_of_label.items():
            _draw_curve(target, seeds, window, colours[label], dashed=bool(drawn))
        drawn.append(curve)
        if curve.mark_ln2:
            target.axhline(LN2, color="black", lw=1, ls=":")
            target.annotate("ln 2", (1, LN2), (-2, 2), ("axes fraction", "data"), "offset points", ha="right")
        # Every axis starts at zero: one cut off at the data exaggerates.
        high = max(1.1 * target.dataLim.y1, 1e-3) if curve.unit else 1.03
        target.set_ylim(-0.03 * high, high)

    names = []
    for curve in drawn or panel:
        name = f"{curve.name}, {curve.unit}" if curve.unit else curve.name
        names.append(f"{name} {curve.good}".rstrip())
    title = f"{names[0]} (solid)\n{names[1]} (dashed)" if len(drawn) == 2 else " and ".join(names)
    ax.set_title(title[0].upper() + title[1:])
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if missing:
        note = "not logged:\n" + "\n".join(missing)
        ax.text(0.5, 0.05, note, transform=ax.transAxes, ha="center", color=GREY)


def _draw_curve(ax: Axes, seeds: pd.DataFrame, window: int, colour: str, dashed: bool) -> None:
    """Draw a curve of a label: the mean of its seeds, faintly unsmoothed, and a band over them."""
    smooth = moving_average(seeds, window)
    if window > 1:
        ax.plot(seeds.mean(axis=1), color=colour, lw=0.6, alpha=0.25, zorder=1.5)
    if smooth.shape[1] > 1:
        lowest = smooth.min(axis=1)
        highest = smooth.max(axis=1)
        ax.fill_between(smooth.index, lowest, highest, color=colour, alpha=0.18, lw=0)
    ax.plot(
        smooth.mean(axis=1),
        color=colour,
        lw=1.7,
        ls=(0, (3, 1.2)) if dashed else "-",
        marker="o" if len(smooth) == 1 else "",  # a line of one step is not seen
        ms=4,
        zorder=2.5,
    )


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as PNG and SVG beside ``path``, and return both."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(written[0], dpi=200)
        figure.savefig(written[1], metadata={"Date": None})
    return written


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python3 -m recipes plot``."""
    parser.description = "Draw figures of training from verl's file logger."
    parser.epilog = "example: python3 -m recipes plot 'GRPO=grpo_seed*.jsonl' 'GTPO=gtpo_seed*.jsonl' --out figures"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="JSONL of trainer.logger=file, LABEL=PATH or LABEL=GLOB")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG and SVG files")
    parser.add_argument("--window", type=int, help="width of the moving average in steps, 1 for none")


def run(args: argparse.Namespace) -> int:
    """Draw the figure, and print where it is."""
    if args.window is not None and args.window < 1:
        raise ValueError(f"--window must be at least 1, got {args.window}")
    print(*save(training_figure(read_runs(args.runs), args.window), args.out / "training"), sep="\n")
    return 0
