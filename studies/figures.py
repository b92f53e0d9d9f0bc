"""The study's figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gtpo_verl.algorithm.config import LN2
from recipes.paper.plots import COLOURS, GREY, STYLE
from studies import block10
from studies.comparisons import LOST, STRETCH, TASKS, TITLES, Run, rate, runs_of, stretches
from studies.learning_rates import results
from studies.plan import (
    ADDITION,
    COUNTING,
    MANY_RATES,
    MIDDLE,
    RATES,
    REAL_RATES,
    SCREEN,
    SHRUNK,
    SPELLING,
    TABLES,
    Cell,
    complete,
    planned,
    read_log,
)

_COLOUR = {
    "gtpo": COLOURS[0],
    "grpo": COLOURS[1],
    "grpo_token_mean": COLOURS[3],
    "filter": COLOURS[2],
    "gtpo_no_filter": COLOURS[5],
    "only_negative": COLOURS[4],
    "corpo_gtpo": COLOURS[2],
}
_CLAMPED: dict[str, Any] = {"facecolor": "white", "hatch": "///", "linewidth": 1.2}
_LOOK: dict[str, dict[str, Any]] = {
    "grpo": {"color": _COLOUR["grpo"], "label": "GRPO"},
    "grpo_clamped": _CLAMPED | {"edgecolor": _COLOUR["grpo"], "label": "GRPO, clamped"},
    "gtpo": {"color": _COLOUR["gtpo"], "label": "GTPO"},
    block10.CLAMPED: _CLAMPED | {"edgecolor": _COLOUR["gtpo"], "label": "GTPO, clamped (min_correct_reward)"},
}
_MARKER = {COUNTING: "o", SPELLING: "s", ADDITION: "^"}
_MAIN = ("grpo", "grpo_token_mean", "gtpo")


def answer() -> Any:
    """Runs that failed, by method: the real model's on either device, and the tiny one's at the planned rates."""
    many = results(planned("2"))
    many = many[many["lr"].isin(MANY_RATES)]  # which every task has
    of_grpo = many[many["method"] == "grpo"].groupby(["task", "lr"])["accuracy"].mean()
    limits = [of_grpo[task, lr] / 2 for task, lr in zip(many["task"], many["lr"], strict=True)]
    many = many.assign(**{"accuracy lost": many["accuracy"] < limits, "endings lost": many["clean"] < LOST})
    failed = {
        "SmolLM2-135M, 1e-5, on CPUs": block10.runs_on("cpu"),
        "the same seeds on a GPU": block10.runs_on("cuda"),
        "0.4 M parameters, five learning rates": many,
    }
    with plt.rc_context(STYLE | {"axes.grid": False, "font.size": 11}):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained", sharey=True)
        for ax, (title, runs) in zip(axes, failed.items(), strict=True):
            methods = [method for method in _LOOK if method in set(runs["method"])]
            width = 0.9 / max(len(methods), 3)
            for i, method in enumerate(methods):
                own = runs[runs["method"] == method]
                counts = [own[f"{what} lost"].sum() for what in ("accuracy", "endings")]
                places = np.arange(2) + (i - (len(methods) - 1) / 2) * width
                bars = ax.bar(places, np.array(counts) / len(own), 0.92 * width, **_LOOK[method])
                ax.bar_label(bars, [f"{count} of {len(own)}" for count in counts], padding=2, fontsize=9)
            ax.set_xticks([0, 1], ["accuracy collapsed", "stopped terminating\ncleanly"], fontsize=11)
            ax.set_title(title, fontsize=11.5)
            ax.set_xlim(-0.5, 1.5)
            ax.tick_params(axis="x", length=0)
        axes[0].set(ylim=(0, 0.85), ylabel="share of runs")
        axes[0].yaxis.set_major_formatter("{x:.0%}")
        handles = [Patch(**look) for look in _LOOK.values()]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=11)
        return figure


def overview() -> Any:
    """One prompt a step: who keeps terminating cleanly by learning rate, and which part or control does."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
        _worst_by_rate(axes[0])
        _arms(axes[1])
        handles = [
            *_handles(_MAIN),
            *(plt.Line2D([], [], color=GREY, marker=m, ls="", label=TASKS[start]) for start, m in _MARKER.items()),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        return figure


def _handles(methods: Sequence[str]) -> list[Any]:
    return [plt.Line2D([], [], color=_COLOUR[method], lw=3, label=TITLES[method]) for method in methods]


def _legend(figure: Any, methods: Sequence[str]) -> None:
    figure.legend(handles=_handles(methods), loc="outside upper center", ncols=3, frameon=False)


def _dots(ax: Axes, runs: Sequence[Run], position: float, metric: str, colour: str, across: bool = False) -> None:
    for i, run in enumerate(runs):
        place = position + 0.11 * ((i % 5) - 2) / 2
        point = (run.summary[metric], place) if across else (place, run.summary[metric])
        ax.plot(*point, _MARKER[run.cell.start], color=colour, ms=4.5, alpha=0.75, mew=0)


def _worst_by_rate(ax: Axes) -> None:
    runs = runs_of(cell for cell in TABLES["main"] if cell.method in _MAIN)
    for column, lr in enumerate(RATES):
        for offset, method in zip((-0.27, 0, 0.27), _MAIN, strict=True):
            here = [run for run in runs if (run.cell.lr, run.cell.method) == (lr, method)]
            _dots(ax, here, column + offset, "worst", _COLOUR[method])
            if here:
                mean = np.mean([run.summary["worst"] for run in here])
                ax.hlines(mean, column + offset - 0.12, column + offset + 0.12, color=_COLOUR[method], lw=2)
    ax.set_xticks(range(len(RATES)), map(rate, RATES))
    ax.set(ylim=(-0.03, 1.03), ylabel="clean endings, worst 50 steps", xlabel="learning rate")
    ax.set_title("Who keeps terminating cleanly")


def _arms(ax: Axes) -> None:
    order = (
        *("grpo", "random_skip", "gamma", "entropy", "forward", "double"),
        *("positive_only", "grpo_strict", "skip", "backward", "masks", "gtpo"),
    )
    for row, method in enumerate(reversed(order)):
        runs = runs_of(cell for cell in TABLES["parts"] + TABLES["controls"] if cell.method == method)
        colour = _COLOUR.get(method, GREY)
        _dots(ax, runs, row, "worst", colour, across=True)
        if runs:
            ax.vlines(np.mean([run.summary["worst"] for run in runs]), row - 0.3, row + 0.3, color=colour, lw=2)
    ax.set_yticks(range(len(order)), [TITLES[method] for method in reversed(order)])
    ax.set(xlim=(-0.03, 1.03), xlabel="clean endings, worst 50 steps")
    ax.set_title(f"Parts and controls, learning rate {rate(MIDDLE)}")


def shrinking() -> Any:
    """The length of SmolLM2's completions by step on the two seeds that shrank, of four arms of block 7."""
    shown: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("GRPO", {"color": _COLOUR["grpo"], "lw": 2.4}),
        "masks": ("both masks", {"color": _COLOUR["gtpo"], "lw": 2.4}),
        "corpo_masks": ("no A > 0 if wrong", {"color": _COLOUR["gtpo"], "lw": 2, "ls": "--"}),
        "gated_masks": ("equal outcomes gated", {"color": _COLOUR["gtpo"], "lw": 2, "ls": ":"}),
    }
    with plt.rc_context(STYLE | {"font.size": 11}):
        figure, axes = plt.subplots(1, len(SHRUNK), figsize=(9, 3.8), layout="constrained", sharey=True)
        for ax, seed in zip(axes, SHRUNK, strict=True):
            ends: dict[str, float] = {}
            for method, (_, style) in shown.items():
                cell = Cell(SCREEN, method, REAL_RATES[1])
                if complete([(cell, seed)]):
                    length = stretches(read_log(cell.log(seed))["steps"]["length"], 3)
                    ax.plot(np.arange(len(length)) + 2, length, **style)
                    ends[method] = float(length[-1])
            below = -np.inf
            for method in sorted(ends, key=ends.__getitem__):  # labels of lines that end together stand apart
                below = max(ends[method], below + 6.5)
                label, style = shown[method]
                ax.text(30, below, label, color=style["color"], va="center", fontsize=10)
            ax.set(xlim=(1, 44), ylim=(0, 100), xlabel="step", title=f"seed {seed}")
            ax.set_xticks([1, 10, 20, 30])
        axes[0].set_ylabel("tokens of a completion")
        return figure


def collapse() -> Any:
    """Entropy and strict format from starts near ln 2, mean over seeds."""
    starts = list(dict.fromkeys(cell.start for cell in TABLES["collapse"]))
    methods = list(dict.fromkeys(cell.method for cell in TABLES["collapse"]))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(starts), figsize=(9, 5.4), layout="constrained", sharex=True)
        for column, start in enumerate(starts):
            for method in methods:
                runs = runs_of([Cell(start, method, MIDDLE)])
                for row, metric in enumerate(("entropy", "strict")):
                    if runs:
                        mean = stretches(np.mean([run.curves[metric] for run in runs], axis=0))
                        axes[row, column].plot(np.arange(len(mean)) + STRETCH // 2, mean, color=_COLOUR[method], lw=1.6)
            axes[0, column].axhline(LN2, color="black", lw=0.8, ls=":")
            axes[0, column].set_title(TASKS[start])
            axes[1, column].set(ylim=(-0.03, 1.03), xlabel="step")
        axes[0, 0].set_ylabel("entropy, nats per token")
        axes[1, 0].set_ylabel("strict format")
        _legend(figure, methods)
        return figure
