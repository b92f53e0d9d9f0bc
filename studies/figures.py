"""The study's figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from gtpo_verl.algorithm.config import LN2
from recipes.paper.plots import COLOURS, GREY, STYLE
from studies.comparisons import STRETCH, TASKS, TITLES, K, Run, rate, runs_of, stretches
from studies.learning_rates import at_own_best_rate, compare, of_real_model, results
from studies.plan import (
    ADDITION,
    CANDIDATES,
    COUNTING,
    MANY_RATES,
    MIDDLE,
    RATES,
    REAL_RATES,
    SCREEN,
    SCREENED,
    SHRUNK,
    SPELLING,
    TABLES,
    USUAL,
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
_MARKER = {COUNTING: "o", SPELLING: "s", ADDITION: "^"}
_MAIN = ("grpo", "grpo_token_mean", "gtpo")


def answer() -> Any:
    """In two panels how many completions are right and end cleanly: the real model by seed, the tiny one by rate."""
    # Of one run the smaller point lies on the larger one where both are equal.
    shown: dict[str, tuple[str, dict[str, Any]]] = {
        "accuracy": ("right", {"ls": "-", "marker": "o", "ms": 8}),
        "clean": ("ends cleanly", {"ls": ":", "marker": "o", "ms": 5, "mfc": "white"}),
    }
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(9, 3.6), layout="constrained", sharey=True, width_ratios=(5, 4)
        )
        real, many = of_real_model("9"), results(planned("2"))
        by_seed = real.pivot(index="seed", columns="method", values=list(shown))
        all_tasks = many[many["lr"].isin(MANY_RATES)]  # which every task has
        by_rate = all_tasks.pivot_table(index="lr", columns="method", values=list(shown))
        methods = ("grpo", "gtpo", CANDIDATES[0])
        places = np.arange(len(by_seed)) + np.array([[-0.25], [0], [0.25]])
        for place, method in zip(places, methods, strict=True):
            for metric, (_, style) in shown.items():
                at = {**style, "color": _COLOUR[method]}
                left.plot(place, by_seed[metric, method], clip_on=False, **{**at, "ls": ""})
                if method in by_rate[metric]:
                    right.plot(by_rate[metric, method], clip_on=False, **at)
        left.plot(places, by_seed["accuracy"][list(methods)].T, color=GREY, lw=1, zorder=1)
        left.set_xticks(places[1], [f"seed {seed}" for seed in by_seed.index])
        left.set(ylim=(-0.03, 1.03), ylabel="share of held-out completions")
        difference = compare(real, "gtpo", "grpo", "accuracy")
        left.set_title(f"SmolLM2-135M at 1e-5\nright, GTPO − GRPO: {difference}")
        right.set(xscale="log", xlabel="learning rate")
        right.set_xticks(MANY_RATES, map(rate, MANY_RATES))
        right.minorticks_off()
        difference = compare(at_own_best_rate(many), "gtpo", "grpo", "accuracy")
        right.set_title(f"0.4 M parameters, eight prompts a step\nright, GTPO − GRPO at best rates: {difference}")
        styles = [plt.Line2D([], [], color=GREY, label=label, **style) for label, style in shown.values()]
        figure.legend(handles=_handles(methods) + styles, loc="outside upper center", ncols=5, frameon=False)
        return figure


def overview() -> Any:
    """The answer in four panels: format, accuracy, parts and controls, pass@k."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.6), layout="constrained")
        _worst_by_rate(axes[0, 0])
        _accuracy_gain(axes[0, 1])
        _arms(axes[1, 0])
        _pass_at_k(axes[1, 1])
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
    ax.set_xticks(range(len(RATES)), [f"rate {rate(lr)}" for lr in RATES])
    ax.set(ylim=(-0.03, 1.03), ylabel="clean endings, worst 50 steps", title="Format: who keeps clean endings")


def _accuracy_gain(ax: Axes) -> None:
    runs = runs_of(TABLES["main"])
    values = {(run.cell, run.seed): run.summary["accuracy"] for run in runs}
    for column, lr in enumerate(RATES):
        for offset, rival in zip((-0.17, 0.17), ("grpo", "grpo_token_mean"), strict=True):
            gains: list[float] = []
            for (cell, seed), accuracy in values.items():
                other = values.get((Cell(cell.start, rival, lr), seed))
                if (cell.method, cell.lr) == ("gtpo", lr) and other is not None:
                    place = column + offset + 0.1 * ((len(gains) % 5) - 2) / 2
                    gains.append(accuracy - other)
                    ax.plot(place, gains[-1], _MARKER[cell.start], color=_COLOUR[rival], ms=4.5, alpha=0.75, mew=0)
            if gains:
                ax.hlines(np.mean(gains), column + offset - 0.13, column + offset + 0.13, color=_COLOUR[rival], lw=2)
    ax.axhline(0, color=GREY, lw=0.8)
    ax.set_xticks(range(len(RATES)), [f"rate {rate(lr)}" for lr in RATES])
    ax.set(ylabel="GTPO minus the method of the colour", title="Accuracy on held-out questions, in pairs")


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
    ax.set_title(f"Parts and controls, rate {rate(MIDDLE)}")


def _pass_at_k(ax: Axes) -> None:
    for start, style in zip(USUAL, ("-", "--", ":"), strict=True):
        for method in _MAIN:
            runs = runs_of([Cell(start, method, MIDDLE)])
            if runs:
                ax.plot(K, [np.mean([run.pass_at[k] for run in runs]) for k in K], style, color=_COLOUR[method], lw=1.4)
        ax.plot([], [], style, color=GREY, label=TASKS[start])
    ax.set_xscale("log", base=2)
    ax.set_xticks(K, [str(k) for k in K])
    ax.legend(frameon=False, fontsize=7.5)
    ax.set(ylim=(None, 1.01), xlabel="k", ylabel="pass@k", title=f"What it costs: pass@k, rate {rate(MIDDLE)}")


def shrinking() -> Any:
    """The length of SmolLM2's completions by step, under each arm of block 7 on the two seeds that shrank."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(SHRUNK), figsize=(9, 3.8), layout="constrained", sharey=True)
        for ax, seed in zip(axes, SHRUNK, strict=True):
            for i, method in enumerate(SCREENED):
                cell = Cell(SCREEN, method, REAL_RATES[1])
                if complete([(cell, seed)]):
                    length = stretches(read_log(cell.log(seed))["steps"]["length"], 3)
                    dashes = "-" if method in ("grpo", "gated_masks", "corpo_masks") else ":"
                    ax.plot(np.arange(len(length)) + 2, length, dashes, color=f"C{i}", lw=1.8, label=TITLES[method])
            ax.set(ylim=(0, 100), xlabel="step", title=f"seed {seed}")
        axes[0].set_ylabel("tokens of a completion, mean of 3 steps")
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=7.5, frameon=False
        )
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
