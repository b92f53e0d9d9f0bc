"""The study's figures."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from gtpo_verl.algorithm.config import LN2
from recipes.paper.plots import COLOURS, GREY, STYLE
from studies import block10, block12, block13
from studies.comparisons import WRONG, with_failures
from studies.plan import (
    ADDITION,
    CLAMPED,
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
from studies.runs import Run, load, one_prompt_runs, results, stretches
from studies.titles import METHODS, TASKS, rate

_COLOUR = {
    "gtpo": COLOURS[0],
    "grpo": COLOURS[1],
    "grpo_token_mean": COLOURS[3],
    "filter": COLOURS[2],
    "gtpo_no_filter": COLOURS[5],
    "only_negative": COLOURS[4],
    "corpo_gtpo": COLOURS[2],
}
_SHOWN = {"grpo": "GRPO", "grpo_clamped": "GRPO,\nclamped", "gtpo": "GTPO", CLAMPED: "GTPO,\nclamped"}
"""The methods of `answer`, from left to right."""
_MARKER = {COUNTING: "o", SPELLING: "s", ADDITION: "^"}
_MAIN = ("grpo", "grpo_token_mean", "gtpo")
_STRETCH = 50
"""Steps over which curves of the runs with one prompt a step are averaged."""


def planned_rates() -> pd.DataFrame:
    """Return block 2's runs at the learning rates that every task has, and how they failed.

    An accuracy has collapsed that is below half of GRPO's mean at the same task and learning rate.
    """
    many = results(planned("2"))
    many = many[many["lr"].isin(MANY_RATES)]
    of_grpo = many[many["method"] == "grpo"].groupby(["task", "lr"])["accuracy"].mean()
    limits = [of_grpo[task, lr] / 2 for task, lr in zip(many["task"], many["lr"], strict=True)]
    return with_failures(many, pd.Series(limits, many.index))


def _answer_panels() -> dict[str, pd.DataFrame]:
    """Return the runs of each panel of `answer`, with how they failed."""
    panels = {
        "SmolLM2-135M, six seeds,\nCPUs, learning rate 1e-5": block10.runs_on("cpu"),
        "the same six seeds,\nGPU, learning rate 1e-5": block10.runs_on("cuda"),
        "eight fresh seeds,\nCPUs, learning rate 1e-5": with_failures(block12.pairs("12-cpu"), WRONG),
    }
    if block13.is_whole("13-cpu"):
        users, _ = block13.made("13-cpu")
        users = users[users["lr"] == REAL_RATES[1]]
        panels["eight more seeds,\nCPUs, learning rate 1e-5"] = with_failures(users, WRONG)
    panels["0.4 M parameters, learning\nrates 2.5e-5 to 4e-4"] = planned_rates()
    return panels


def answer() -> Any:
    """Draw the runs that failed, by method, and what the decided experiment measured in each run."""
    panels = _answer_panels()
    with plt.rc_context(STYLE | {"axes.grid": False, "font.size": 10.5}):
        figure = plt.figure(figsize=(12, 6.6), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=[1, 0.95])
        above, below = halves
        axes = above.subplots(1, len(panels), sharey=True)
        above.suptitle(
            "Failed runs, of those made (each counted once; lower is better)", fontsize=12, x=0.01, ha="left"
        )
        for ax, (title, runs) in zip(axes, panels.items(), strict=True):
            _failed_runs(ax, runs)
            ax.set_title(title, fontsize=10)
        axes[0].set(ylim=(0, 0.95), ylabel="share of runs that failed")
        axes[0].yaxis.set_major_formatter("{x:.0%}")
        handles = [
            Patch(facecolor=GREY, label="accuracy collapsed"),
            Patch(facecolor="white", edgecolor=GREY, hatch="///", label="accuracy kept, exact format lost"),
        ]
        axes[0].legend(handles=handles, loc="upper left", frameon=False, fontsize=9.5)
        below.suptitle(
            "What the clamped runs on the eight fresh seeds lost (each point a run, each line a mean)",
            fontsize=12,
            x=0.01,
            ha="left",
        )
        _measures(below.subplots(1, 1))
        return figure


def _failed_runs(ax: Axes, runs: Any) -> None:
    for place, method in enumerate(_SHOWN):
        of_method = runs[runs["method"] == method]
        if of_method.empty:
            ax.text(place, 0.01, "not\nrun", ha="center", va="bottom", fontsize=9, color=GREY)
            continue
        colour = _COLOUR["gtpo" if method in ("gtpo", CLAMPED) else "grpo"]
        collapsed = of_method["collapsed"].mean()
        failed = of_method["failed"].mean()
        ax.bar(place, collapsed, 0.75, color=colour)
        ax.bar(
            *(place, failed - collapsed, 0.75, collapsed),
            facecolor="white",
            edgecolor=colour,
            hatch="///",
            linewidth=1.2,
        )
        count = f"{of_method['failed'].sum()} of {len(of_method)}"
        ax.text(place, failed + 0.015, count, ha="center", va="bottom", fontsize=9)
    ax.set_xticks(range(len(_SHOWN)), _SHOWN.values(), fontsize=9)
    ax.set_xlim(-0.6, len(_SHOWN) - 0.4)
    ax.tick_params(axis="x", length=0)


def _measures(ax: Axes) -> None:
    """Draw each run of block 12 by the three measures of the form, and by accuracy."""
    runs = block12.pairs("12-cpu")
    metrics = ("exact_format", "well_formed", "eos", "accuracy")
    methods = {"grpo_clamped": "GRPO, clamped", CLAMPED: "GTPO, clamped"}
    for column, metric in enumerate(metrics):
        for offset, method in zip((-0.18, 0.18), methods, strict=True):
            values = runs[runs["method"] == method].sort_values("seed")[metric].to_numpy()
            colour = _COLOUR["gtpo" if method == CLAMPED else "grpo"]
            places = column + offset + np.linspace(-0.09, 0.09, len(values))
            ax.plot(places, values, "o", color=colour, ms=5.5, alpha=0.8, mew=0)
            ax.hlines(values.mean(), column + offset - 0.13, column + offset + 0.13, color=colour, lw=2)
    names = {
        "exact_format": "exact format\n(the two blocks, then EOS)",
        "well_formed": "well formed up to the first </answer>\n(what a stop string leaves)",
        "eos": "ends with EOS",
        "accuracy": "accuracy",
    }
    ax.set_xticks(range(len(metrics)), [names[metric] for metric in metrics], fontsize=10)
    ax.set(ylim=(-0.03, 1.05), xlim=(-0.5, len(metrics) - 0.5), ylabel="share of held-out completions")
    ax.tick_params(axis="x", length=0)
    handles = [
        plt.Line2D([], [], color=_COLOUR["gtpo" if method == CLAMPED else "grpo"], marker="o", lw=2, label=label)
        for method, label in methods.items()
    ]
    ax.legend(handles=handles, loc="lower right", frameon=False, ncols=1)


def overview() -> Any:
    """Draw one prompt a step: who keeps the exact format by learning rate, and which part or control does."""
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


def _load(cells: Iterable[Cell]) -> list[Run]:
    return [load(*run) for run in one_prompt_runs(cells)]


def _handles(methods: Sequence[str]) -> list[Any]:
    return [plt.Line2D([], [], color=_COLOUR[method], lw=3, label=METHODS[method]) for method in methods]


def _legend(figure: Any, methods: Sequence[str]) -> None:
    figure.legend(handles=_handles(methods), loc="outside upper center", ncols=3, frameon=False)


def _dots(ax: Axes, runs: Sequence[Run], position: float, metric: str, colour: str, across: bool = False) -> None:
    for i, run in enumerate(runs):
        place = position + 0.11 * ((i % 5) - 2) / 2
        point = (run.summary[metric], place) if across else (place, run.summary[metric])
        ax.plot(*point, _MARKER[run.cell.start], color=colour, ms=4.5, alpha=0.75, mew=0)


def _worst_by_rate(ax: Axes) -> None:
    runs = _load(cell for cell in TABLES["main"] if cell.method in _MAIN)
    for column, lr in enumerate(RATES):
        for offset, method in zip((-0.27, 0, 0.27), _MAIN, strict=True):
            here = [run for run in runs if (run.cell.lr, run.cell.method) == (lr, method)]
            _dots(ax, here, column + offset, "worst", _COLOUR[method])
            if here:
                mean = np.mean([run.summary["worst"] for run in here])
                ax.hlines(mean, column + offset - 0.12, column + offset + 0.12, color=_COLOUR[method], lw=2)
    ax.set_xticks(range(len(RATES)), map(rate, RATES))
    ax.set(ylim=(-0.03, 1.03), ylabel="exact format, worst 50 steps", xlabel="learning rate")
    ax.set_title("Who keeps the exact format (a point is a run, a bar a mean)")


def _arms(ax: Axes) -> None:
    order = (
        *("grpo", "random_skip", "gamma", "entropy", "forward", "double"),
        *("positive_only", "grpo_strict", "skip", "backward", "masks", "gtpo"),
    )
    for row, method in enumerate(reversed(order)):
        runs = _load(cell for cell in TABLES["parts"] + TABLES["controls"] if cell.method == method)
        colour = _COLOUR.get(method, GREY)
        _dots(ax, runs, row, "worst", colour, across=True)
        if runs:
            ax.vlines(np.mean([run.summary["worst"] for run in runs]), row - 0.3, row + 0.3, color=colour, lw=2)
    ax.set_yticks(range(len(order)), [METHODS[method] for method in reversed(order)])
    ax.set(xlim=(-0.03, 1.03), xlabel="exact format, worst 50 steps")
    ax.set_title(f"Parts and controls, learning rate {rate(MIDDLE)}")


def shrinking() -> Any:
    """Draw the length of SmolLM2's completions by step on the two seeds that shrank, of four methods of block 7."""
    shown: dict[str, tuple[str, dict[str, Any]]] = {
        "grpo": ("GRPO", {"color": _COLOUR["grpo"], "lw": 2.4}),
        "masks": ("both masks", {"color": _COLOUR["gtpo"], "lw": 2.4}),
        "corpo_masks": ("both masks, clamped", {"color": _COLOUR["gtpo"], "lw": 2, "ls": "--"}),
        "gated_masks": (
            "both masks, no update where all\nanswers are right or all are wrong",
            {"color": GREY, "lw": 2, "ls": ":"},
        ),
    }
    with plt.rc_context(STYLE | {"font.size": 11}):
        figure, axes = plt.subplots(1, len(SHRUNK), figsize=(9, 4.1), layout="constrained", sharey=True)
        for ax, seed in zip(axes, SHRUNK, strict=True):
            for method, (_, style) in shown.items():
                cell = Cell(SCREEN, method, REAL_RATES[1])
                if complete([(cell, seed)]):
                    length = stretches(read_log(cell.log(seed))["steps"]["length"], 3)
                    ax.plot(np.arange(len(length)) + 2, length, **style)
            ax.set(xlim=(1, 30), ylim=(0, 100), xlabel="step", title=f"seed {seed}")
            ax.set_xticks([1, 10, 20, 30])
        axes[0].set_ylabel("tokens of a completion, mean of three steps")
        handles = [plt.Line2D([], [], label=label, **style) for label, style in shown.values()]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
        return figure


def collapse() -> Any:
    """Draw entropy and exact format from starts near ln 2: mean, smallest and largest of the seeds."""
    starts = list(dict.fromkeys(cell.start for cell in TABLES["collapse"]))
    methods = list(dict.fromkeys(cell.method for cell in TABLES["collapse"]))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, len(starts), figsize=(9, 5.6), layout="constrained", sharex=True, sharey="row")
        for column, start in enumerate(starts):
            for method in methods:
                runs = _load([Cell(start, method, MIDDLE)])
                for row, metric in enumerate(("entropy", "strict")):
                    if runs:
                        of_seeds = np.array([stretches(run.curves[metric], _STRETCH) for run in runs])
                        steps = np.arange(of_seeds.shape[1]) + _STRETCH // 2
                        axes[row, column].plot(steps, of_seeds.mean(0), color=_COLOUR[method], lw=1.6)
                        axes[row, column].fill_between(
                            steps, of_seeds.min(0), of_seeds.max(0), color=_COLOUR[method], alpha=0.12, lw=0
                        )
            axes[0, column].axhline(LN2, color="black", lw=0.8, ls=":")
            axes[0, column].text(395, LN2, "ln 2", ha="right", va="bottom", fontsize=9)
            axes[0, column].set_title(TASKS[start])
            axes[1, column].set(ylim=(-0.03, 1.03), xlabel="step (means of 50 steps; bands: three seeds)")
        axes[0, 0].set_ylabel("entropy, nats per token")
        axes[1, 0].set_ylabel("exact format")
        _legend(figure, methods)
        return figure
