"""Figures of training (as in GTPO, arXiv:2508.03772, Fig. 1 to 5) from verl's file logger.

    gtpo-verl plot 'GRPO=runs/grpo_seed*.jsonl' 'GTPO=runs/gtpo_seed*.jsonl' --out figures
    gtpo-verl plot --tokens dump --out figures

A run is the JSONL of ``trainer.logger=[..., file]``, one line per step: ``{"step": n, "data": {key: value}}``, or the
same flattened, ``{"step": n, key: value}``. Runs with one label are seeds of one method: their mean is drawn, over the
steps that all of them reached, in a band from the smallest to the largest seed. Curves are centred moving averages;
the raw mean is drawn faintly behind them. Every figure is written as PNG and SVG.

Needs matplotlib.
"""

from __future__ import annotations

import argparse
import glob
import math
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gtpo_verl.config import LN2
from gtpo_verl.records import read_metrics

if TYPE_CHECKING:
    from gtpo_verl.view.token_counts import TokenCounts

# Okabe and Ito's palette without its yellow, which is lost on white, and its black, which marks ln 2.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#555555"
_TOKENS_SHOWN, _TOKEN_FONT = 15, "DejaVu Sans Mono"
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


@dataclass(frozen=True)
class Run:
    """One training run: ``values[key]`` holds one number per entry of ``steps``, NaN where a step did not log it."""

    name: str
    steps: np.ndarray
    values: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Curve:
    """One metric: the first of ``keys`` that all runs of a label logged, times ``factor``, in ``unit``."""

    name: str
    unit: str
    keys: tuple[str, ...]
    factor: float = 1.0
    mark_ln2: bool = False


# A panel has one or two curves. The second is dashed; if its unit differs, its axis is on the right.
PANELS: tuple[tuple[Curve, ...], ...] = (
    (Curve("accuracy reward", "% of its maximum", ("reward/acc/mean",), 100),),
    (
        Curve("format reward", "% of its maximum", ("reward/format/mean",), 10),
        Curve("strict format", "% of its maximum", ("reward/strict/mean",), 100),
    ),
    (Curve("entropy ⟨H⟩", "nats per token", ("gtpo/entropy/mean", "actor/entropy"), mark_ln2=True),),
    (Curve("conflict tokens", "% of tokens", ("gtpo/conflict/token_frac",), 100),),
    (
        Curve("length", "tokens", ("response_length/mean", "completion/length/mean")),
        Curve("ends with EOS", "% of completions", ("completion/eos_rate",), 100),
    ),
    (Curve("filtered out, δ = 0", "% of completions", ("gtpo/filter/dropped_frac",), 100),),
)


# --- runs ------------------------------------------------------------------------------------------------------------


def read_run(path: str | Path) -> Run:
    """Read one run, as `read_metrics` does."""
    steps = read_metrics(Path(path))
    ordered = sorted(steps)
    keys = sorted({key for values in steps.values() for key in values})
    return Run(
        name=str(path),
        steps=np.array(ordered),
        values={key: np.array([steps[step].get(key, math.nan) for step in ordered]) for key in keys},
    )


def read_runs(arguments: Iterable[str]) -> dict[str, list[Run]]:
    """Runs by label, from ``label=path``, ``label=glob`` or a path, whose label is its name without the suffix.

    Raises:
        ValueError: If nothing matches, or two paths without a label have one name.
    """
    runs: dict[str, list[Run]] = {}
    for argument in arguments:
        label, equals, pattern = argument.partition("=")
        if not equals or Path(argument).exists():
            label, pattern = Path(argument).stem, argument
            if label in runs:
                raise ValueError(f"two runs are named {label!r}: write LABEL=PATH")
        paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise ValueError(f"no run matches {pattern!r}")
        runs.setdefault(label, []).extend(read_run(path) for path in paths)
    for label, group in runs.items():
        if len({int(run.steps[-1]) for run in group}) > 1:
            ends = ", ".join(f"{run.name} at {run.steps[-1]}" for run in group)
            _say(f"{label}: seeds end at different steps ({ends}), drawn up to the first")
    return runs


def moving_average(steps: np.ndarray, values: np.ndarray, window: float) -> np.ndarray:
    """Mean of the values logged from step − window/2 (exclusive) to step + window/2 (inclusive), for each step.

    NaN counts nowhere, and stays where all of them are NaN.
    """
    present = ~np.isnan(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(present, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(present)])
    first = np.searchsorted(steps, steps - window / 2, side="right")
    last = np.searchsorted(steps, steps + window / 2, side="right")
    n = count[last] - count[first]
    return np.where(n > 0, (total[last] - total[first]) / np.maximum(n, 1), np.nan)


def _series(runs: Sequence[Run], curve: Curve) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and (seed, step) values of a curve, over the steps at which all runs logged it; None if there are none."""
    for key in curve.keys:
        if not all(key in run.values for run in runs):
            continue
        logged = [dict(zip(run.steps.tolist(), run.values[key].tolist(), strict=True)) for run in runs]
        steps = sorted(step for step in logged[0] if all(math.isfinite(seed.get(step, math.nan)) for seed in logged))
        if steps:
            return np.array(steps), curve.factor * np.array([[seed[step] for step in steps] for seed in logged])
    return None


# --- figures over training -------------------------------------------------------------------------------------------


def training_figure(runs: Mapping[str, Sequence[Run]], title: str | None = None, window: int | None = None) -> Figure:
    """Six panels over training steps: accuracy, format and strict format, entropy with ln 2, conflict tokens, length
    and EOS, filtered completions; one colour per label.

    A metric that no run logged is named in its panel; a label that did not log it is missing there.

    Args:
        runs: Label to the runs (seeds) under it.
        title: Above the figure.
        window: Width of the moving average in steps, 1 for none; by default the square root of the longest run.

    Raises:
        ValueError: If there are no runs, a label has none, or there are more labels than colours.
    """
    if not runs or not all(runs.values()):
        raise ValueError(f"every label needs a run, got { {label: len(group) for label, group in runs.items()} }")
    if len(runs) > len(COLOURS):
        raise ValueError(f"{len(runs)} labels: at most {len(COLOURS)} can be told apart by colour")
    if window is None:
        window = max(1, round(math.sqrt(max(np.ptp(run.steps) for group in runs.values() for run in group))))
    seeds = max(len(group) for group in runs.values())
    colours = dict(zip(runs, COLOURS, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.5), layout="constrained")  # 900 pixels of a README
        axes = figure.subplots(2, 3)
        for ax, panel in zip(axes.flat, PANELS, strict=True):
            _draw_panel(ax, panel, runs, colours, window)
        for ax in axes[-1]:
            ax.set_xlabel("training step")
        handles = [
            Line2D([], [], color=colours[label], lw=2, label=label if seeds == 1 else f"{label} (n = {len(group)})")
            for label, group in runs.items()
        ]
        notes = ["mean of the seeds"] if seeds > 1 else []
        notes += [f"moving average over {window} steps (faint: unsmoothed)"] if window > 1 else []
        caption = f"Line: {', '.join(notes) or 'as logged'}."
        if seeds > 1:
            caption += " Band: smallest to largest seed."
        # The title belongs to the legend: constrained layout puts a suptitle and a legend above the axes on one spot.
        figure.legend(
            handles=handles,
            loc="outside upper center",
            ncols=min(len(handles), 4),
            frameon=False,
            title=title,
            title_fontsize=11,
        )
        figure.supxlabel(caption, fontsize=7.5, color=GREY)
    return figure


def _draw_panel(
    ax: Axes, panel: tuple[Curve, ...], runs: Mapping[str, Sequence[Run]], colours: Mapping[str, str], window: int
) -> None:
    drawn: list[Curve] = []
    missing: list[str] = []
    target = ax
    for curve in panel:
        series = {label: found for label, group in runs.items() if (found := _series(group, curve))}
        if not series:
            missing.append(curve.keys[0])
            continue
        if drawn and curve.unit != drawn[0].unit:
            target = ax.twinx()
            target.grid(False)
            target.spines["right"].set_visible(True)
        target.set_ylabel(curve.unit)
        for label, (steps, values) in series.items():
            _draw_curve(target, steps, values, window, colours[label], dashed=bool(drawn))
        drawn.append(curve)
        if curve.mark_ln2:
            target.axhline(LN2, color="black", lw=1, ls=":")
            target.annotate("ln 2", (1, LN2), (-2, 2), ("axes fraction", "data"), "offset points", ha="right")
        # From zero up, for an axis cut off at the data shouts.
        high = max(1.1 * target.dataLim.y1, 1.0 if curve.unit.startswith("%") else 1e-3)
        target.set_ylim(-0.03 * high, high)

    names = [curve.name for curve in drawn or panel]
    title = f"{names[0]} (solid), {names[1]} (dashed)" if len(drawn) == 2 else " and ".join(names)
    ax.set_title(title[0].upper() + title[1:])
    if not drawn:
        ax.set(xticks=[], yticks=[])
        note = "not logged:\n" + "\n".join(missing)
        ax.text(0.5, 0.5, note, transform=ax.transAxes, ha="center", va="center", color=GREY)
        return
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if missing:
        ax.text(0.98, 0.03, f"not logged: {missing[0]}", transform=ax.transAxes, ha="right", color=GREY, fontsize=7.5)


def _draw_curve(ax: Axes, steps: np.ndarray, values: np.ndarray, window: int, colour: str, dashed: bool) -> None:
    smooth = np.array([moving_average(steps, seed, window) for seed in values])
    if window > 1:
        ax.plot(steps, values.mean(axis=0), color=colour, lw=0.6, alpha=0.25, zorder=1.5)
    if len(values) > 1:
        ax.fill_between(steps, smooth.min(axis=0), smooth.max(axis=0), color=colour, alpha=0.18, lw=0, zorder=1.7)
    ax.plot(
        steps,
        smooth.mean(axis=0),
        color=colour,
        lw=1.7,
        ls=(0, (3, 1.2)) if dashed else "-",
        marker="o" if len(steps) == 1 else "",
        ms=4,
        zorder=2.5,
    )


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write a figure as PNG and SVG beside ``path``, and return both."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.stem if path.suffix in (".png", ".svg") else path.name
    written = [path.with_name(name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(STYLE):
        figure.savefig(written[0], dpi=200)
        figure.savefig(written[1], metadata={"Date": None})
    return written


# --- tokens ----------------------------------------------------------------------------------------------------------


def token_figure(counts: TokenCounts, title: str | None = None) -> Figure:
    """Bars for the tokens that were protected, and for those that were doubled, most often.

    A bar is the token's share of all protected (doubled) tokens; the label beside it is the share of the token's own
    occurrences that were protected (doubled).
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_tokens(left, "protected", counts.protected, counts, COLOURS[0])
        _draw_tokens(right, "doubled", counts.doubled, counts, COLOURS[1])
        method = "GTPO" if counts.applied else "GTPO would have"
        figure.suptitle(title or f"Tokens that {method} protected and doubled most often")
        note = "Right of a bar: the share of the token's occurrences to which this happened."
        caption = f"{counts.steps} steps, {counts.trained.total():,} tokens. {note}"
        figure.supxlabel(caption, fontsize=7.5, color=GREY)
    return figure


def _draw_tokens(ax: Axes, what: str, found: Counter[int], counts: TokenCounts, colour: str) -> None:
    top = found.most_common(_TOKENS_SHOWN)
    bars = ax.barh(range(len(top)), [100 * n / found.total() for _, n in top], color=colour, height=0.7)
    ax.bar_label(bars, [f"{100 * n / counts.trained[id]:.0f}%" for id, n in top], padding=3, fontsize=7.5, color=GREY)
    labels = [textwrap.shorten(spell(counts.pieces[id]), 18, placeholder="…") for id, _ in top]
    ax.set_yticks(range(len(top)), labels, family=_TOKEN_FONT, parse_math=False)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.margins(x=0.12)
    ax.set_xlabel(f"% of all {what} tokens")
    ax.set_title(f"{what.capitalize()}: {found.total():,} tokens")


def spell(piece: str | list[int]) -> str:
    """A token as a label: what cannot be seen, or is not in the font, is spelled out."""
    if isinstance(piece, list):
        return "".join(f"⟨{byte:02X}⟩" for byte in piece)
    has_glyph = get_font(findfont(_TOKEN_FONT)).get_char_index
    shown = {" ": "␣", "\n": "↵", "\t": "⇥"}
    return "".join(shown.get(x) or (x if x.isprintable() and has_glyph(ord(x)) else f"⟨U+{ord(x):04X}⟩") for x in piece)


def _say(message: str) -> None:
    print(message, file=sys.stderr)


# --- command line ----------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gtpo-verl plot``."""
    parser.description = "Draw figures of training from verl's file logger, and of a run's tokens from its token dump."
    parser.epilog = (
        "example: gtpo-verl plot 'GRPO=runs/grpo_seed*.jsonl' 'GTPO=runs/gtpo_seed*.jsonl' --out figures\n"
        "         gtpo-verl plot --tokens dump --out figures"
    )
    parser.add_argument(
        "runs", nargs="*", metavar="RUN", help="a JSONL of trainer.logger=file, LABEL=PATH or LABEL=GLOB"
    )
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="DUMP",
        help="draw the tokens that were protected and doubled most often; DUMP as for `view`",
    )
    parser.add_argument("--tokenizer", help="with --tokens, as for `view`")
    parser.add_argument("--out", type=Path, required=True, help="folder for the PNG and SVG files")
    parser.add_argument("--title", help="title of every figure")
    parser.add_argument("--window", type=int, help="width of the moving average in steps, 1 for none")


def run(args: argparse.Namespace) -> int:
    """Draw the figures, and print where they are."""
    if not args.runs and not args.tokens:
        raise ValueError("name a RUN, or a token dump with --tokens")
    if args.window is not None and args.window < 1:
        raise ValueError(f"--window must be at least 1, got {args.window}")
    written: list[Path] = []
    if args.runs:
        written += save(training_figure(read_runs(args.runs), args.title, args.window), args.out / "training")
    if args.tokens:
        from gtpo_verl.view.token_counts import count_tokens  # it needs verl, which curves do not

        written += save(token_figure(count_tokens(args.tokens, args.tokenizer), args.title), args.out / "tokens")
    print(*written, sep="\n")
    return 0
