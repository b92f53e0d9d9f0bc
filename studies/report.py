"""Tables, figures and the page of the study, from the logs in results/: docs/results/study and docs/study.md.

docs/study.md is studies/page.md with its {{names}} replaced by numbers of this module, so no number in it is typed.
"""

import csv
import functools
import gzip
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from scipy.stats import bootstrap, mannwhitneyu, trim_mean

from gtpo_verl.config import LN2
from gtpo_verl.paper.estimators import pass_at_k
from gtpo_verl.paper.plots import COLOURS, GREY, STYLE, read_run, save
from studies import confirm
from studies.plan import (
    ADDITION,
    COUNTING,
    HERE,
    HOT_ADDITION,
    HOT_COUNTING,
    MIDDLE,
    RATES,
    ROOT,
    SEEDS,
    SPELLING,
    TABLES,
    USUAL,
    WORDED,
    Cell,
    Start,
    plan,
)

OUT = ROOT / "docs/results/study"
PAGE = ROOT / "docs/study.md"
SAMPLES, K = 64, (1, 2, 4, 8, 16, 32, 64)
STRETCH = 50
"""Steps over which the worst and the peak are averaged."""
SETTLED = 100
"""The worst stretch begins after this step."""
LAST = 100
"""Steps at the end over which final values are averaged."""

TITLES = {
    "grpo": "GRPO",
    "grpo_token_mean": "GRPO, token-mean",
    "grpo_kl": "GRPO, KL 0.04",
    "gtpo": "GTPO",
    "entropy": "filter and γ",
    "forward": "forward mask",
    "backward": "backward mask",
    "skip": "both masks, skipped only",
    "double": "both masks, doubled only",
    "masks": "both masks",
    "positive_only": "GRPO, positive updates only",
    "random_skip": "GRPO, random tokens skipped",
    "grpo_strict": "GRPO, reward that sees the end",
    "filter": "GRPO with the filter",
    "gtpo_no_filter": "GTPO without the filter",
    "grpo_betas": "GRPO, betas 0.999999",
    "gtpo_betas": "GTPO, betas 0.999999",
    "span_all": "GTPO, all conflict tokens",
    "threshold_0.2": "GTPO, threshold 0.2",
}
TASKS = {
    COUNTING: "counting letters",
    SPELLING: "spelling backward",
    ADDITION: "addition",
    WORDED: "counting in sentences",
    HOT_COUNTING: "counting, hot",
    HOT_ADDITION: "addition, hot",
}
METRICS = {
    "worst": "worst strict",
    "accuracy": "accuracy",
    "pass8": "pass@8",
    "peak": "peak entropy",
    "strict": "strict",
    "entropy": "entropy",
    "length": "length",
    "answers": "answers of 64",
    "above": "above ln 2",
}
"""Of a run; the first four are the endpoints of docs/study-design.md."""


class Run(NamedTuple):
    """A complete run: its curves by metric, an array of a number per step, and its summary by `METRICS`."""

    cell: Cell
    seed: int
    curves: Mapping[str, np.ndarray]
    summary: Mapping[str, float]
    pass_at: Mapping[int, float]
    seconds: float


def stretches(values: np.ndarray) -> np.ndarray:
    """Means over `STRETCH` consecutive steps."""
    return np.convolve(values, np.ones(STRETCH) / STRETCH, "valid")


@functools.cache
def load(cell: Cell, seed: int) -> Run:
    """A run from its log."""
    with gzip.open(cell.log(seed), "rt") as file:
        record = json.load(file)
    curves = {name: np.array(values) for name, values in record["steps"].items()}
    held_out = record["held_out"]
    pass_at = {k: float(np.mean([pass_at_k(SAMPLES, right, k) for right in held_out["right"]])) for k in K}
    summary = {
        "worst": float(stretches(curves["strict"][SETTLED:]).min()),
        "accuracy": pass_at[1],
        "pass8": pass_at[8],
        "peak": float(stretches(curves["entropy"]).max()),
        **{name: float(curves[name][-LAST:].mean()) for name in ("strict", "entropy", "length")},
        "answers": float(np.mean(held_out["answers"])),
        "above": float(stretches(curves["above_ln2"]).max()),
        "push": float((curves["net_weight"] * curves["shared_last"])[:SETTLED].sum()),
    }
    return Run(cell, seed, curves, summary, pass_at, record["seconds"])


def runs_of(cells: Iterable[Cell]) -> list[Run]:
    """The complete runs of cells, in the order of the plan."""
    return [
        load(cell, seed) for cell in dict.fromkeys(cells) for seed in range(1, SEEDS + 1) if cell.log(seed).exists()
    ]


def lost(run: Run) -> bool:
    """Whether the run lost its end."""
    return run.summary["worst"] < 0.5


# --- statistics ------------------------------------------------------------------------------------------------------


def iqm(values: np.ndarray) -> float:
    """Interquartile mean."""
    return float(trim_mean(values, 0.25))


def interval(statistic: Callable[[np.ndarray], float], values: Sequence[float]) -> tuple[float, float]:
    """95% interval of a statistic of independent values, by the percentile bootstrap."""
    if len(set(values)) == 1:
        return values[0], values[0]
    settings: Any = {"vectorized": False, "method": "percentile", "n_resamples": 2000}
    result = bootstrap((np.array(values),), statistic, rng=np.random.default_rng(0), **settings).confidence_interval
    return float(result.low), float(result.high)


class Comparison(NamedTuple):
    """One method against another in pairs of runs of one start, rate and seed."""

    differences: list[float]

    @property
    def mean(self) -> float:
        """Of the first method minus the second."""
        return float(np.mean(self.differences))

    @property
    def higher(self) -> int:
        """Pairs in which the first method is higher."""
        return sum(difference > 0 for difference in self.differences)

    def __str__(self) -> str:
        low, high = interval(lambda values: float(np.mean(values)), self.differences)
        return f"{signed(self.mean)} [{signed(low)}, {signed(high)}]"


def rate(lr: float) -> str:
    """As one writes it: 5e-5."""
    return f"{lr:.0e}".replace("e-0", "e-")


def signed(value: float) -> str:
    """With its sign and to two digits."""
    return f"{value:+.2f}".replace("-", "−")


def compare(runs: Sequence[Run], first: str, second: str, metric: str) -> Comparison:
    """The pairs among `runs`."""
    values = {(run.cell, run.seed): run.summary[metric] for run in runs}
    pairs = [
        (value, values.get((replace(cell, method=second), seed)))
        for (cell, seed), value in values.items()
        if cell.method == first
    ]
    return Comparison([value - other for value, other in pairs if other is not None])


def prediction(runs: Sequence[Run]) -> float:
    """Area under the ROC curve: the probability that a run that lost its end had a lower push on its last tokens in its
    first steps than a run that kept it."""
    pushes = {which: [run.summary["push"] for run in runs if lost(run) == which] for which in (True, False)}
    if not all(pushes.values()):
        return float("nan")
    pairs = len(pushes[True]) * len(pushes[False])
    return float(1 - mannwhitneyu(pushes[True], pushes[False]).statistic / pairs)


# --- tables ----------------------------------------------------------------------------------------------------------


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean, smallest and largest."""
    if not values:
        return "–"
    return f"{np.mean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def cell_table(cells: Sequence[Cell]) -> str:
    """A row per cell: mean, smallest and largest of its seeds."""
    rows = []
    for cell in cells:
        runs = runs_of([cell])
        values = [
            spread([run.summary[name] for run in runs], digits=1 if name in ("length", "answers") else 2)
            for name in METRICS
        ]
        count = [str(len(runs)), str(sum(map(lost, runs)))]
        rows.append([TASKS[cell.start], TITLES[cell.method], rate(cell.lr), *count, *values])
    return markdown(["task", "method", "rate", "runs", "end lost", *METRICS.values()], rows)


def method_table(cells: Sequence[Cell], metrics: Sequence[str], against: str = "grpo") -> str:
    """A row per method over all tasks: how many lost their end, interquartile means, and paired differences."""
    runs = runs_of(cells)
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        own = [run for run in runs if run.cell.method == method]
        if not own:
            continue
        row = [TITLES[method], f"{sum(map(lost, own))} of {len(own)}"]
        for metric in metrics:
            row.append(f"{iqm(np.array([run.summary[metric] for run in own])):.2f}")
            row.append("" if method == against else str(compare(runs, method, against, metric)))
        rows.append(row)
    columns = [name for metric in metrics for name in (METRICS[metric], f"minus {TITLES[against]}")]
    return markdown(["", "end lost", *columns], rows)


def grid_table(cells: Sequence[Cell], methods: Sequence[str], metrics: Sequence[str]) -> str:
    """A row per task and rate, and for each metric a column per method."""
    rows = []
    for start, lr in dict.fromkeys((cell.start, cell.lr) for cell in cells):
        row = [TASKS[start], rate(lr)]
        for metric in metrics:
            for method in methods:
                values = [run.summary[metric] for run in runs_of([Cell(start, method, lr)])]
                row.append(f"{np.mean(values):.2f}" if values else "–")
        rows.append(row)
    columns = [f"{METRICS[metric]}: {TITLES[method]}" for metric in metrics for method in methods]
    return markdown(["task", "rate", *columns], rows)


class Confirmed(NamedTuple):
    """A run under verl. Its `strict` does not ask for EOS, which is why the worst takes the lower of both."""

    cell: Cell
    seed: int
    summary: Mapping[str, float]


@functools.cache
def confirmations(steps: int) -> list[Confirmed]:
    """The runs under verl, as if they had ended after so many steps."""
    found = []
    for cell, seed in confirm.runs():
        values = {name: column[:steps] for name, column in read_run(confirm.log_of(cell, seed)).values.items()}
        strict = np.minimum(values["reward/strict/mean"], values["completion/eos_rate"])
        summary = {
            "worst": float(stretches(strict[SETTLED:]).min()),
            "strict": float(strict[-LAST:].mean()),
            "accuracy": float(values["reward/acc/mean"][-LAST:].mean()),
            "pass8": float((values["reward/acc/mean"][-3 * LAST :] > 0).mean()),
            "entropy": float(values["actor/entropy"][-LAST:].mean()),
            "peak": float(stretches(values["actor/entropy"]).max()),
        }
        found.append(Confirmed(cell, seed, summary))
    return found


def agreement_table() -> str:
    """Cells that were run both under verl and in the fast loop, over the fast loop's number of steps."""
    rows = []
    steps = max(len(run.curves["acc"]) for run in runs_of(TABLES["main"]))
    for cell in dict.fromkeys(run.cell for run in confirmations(steps) if run.cell in TABLES["main"]):
        fast = runs_of([cell])
        under_verl = [run for run in confirmations(steps) if run.cell == cell]
        row = [TASKS[cell.start], TITLES[cell.method], rate(cell.lr), f"{len(under_verl)}, {len(fast)}"]
        for name in ("worst", "accuracy", "entropy"):
            ours = [
                run.summary[name] if name != "accuracy" else float(run.curves["acc"][-LAST:].mean()) for run in fast
            ]
            row += [spread([run.summary[name] for run in under_verl]), spread(ours)]
        rows.append(row)
    columns = [f"{METRICS[name]}: {where}" for name in ("worst", "accuracy", "entropy") for where in ("verl", "fast")]
    return markdown(["task", "method", "rate", "runs: verl, fast", *columns], rows)


# --- numbers of the page ---------------------------------------------------------------------------------------------


def facts() -> dict[str, str]:
    """Every number and table that studies/page.md names."""
    found: dict[str, str] = {"ln2": f"{LN2:.3f}"}
    all_cells = list(dict.fromkeys(cell for cells in TABLES.values() for cell in cells))
    everything = runs_of(all_cells)
    planned = plan()
    found["runs"] = f"{len(everything)} of {len(planned)}"
    found["hours"] = f"{sum(run.seconds for run in everything) / 3600:.1f}"
    found["seconds"] = f"{np.median([run.seconds for run in everything]):.0f}"
    for name, cells in TABLES.items():
        runs = runs_of(cells)
        where: dict[str, list[Run]] = {name: runs, f"{name} middle": [run for run in runs if run.cell.lr == MIDDLE]}
        for start in dict.fromkeys(cell.start for cell in cells):
            where[f"{name} {TASKS[start]}"] = [run for run in runs if run.cell.start == start]
        for lr in dict.fromkeys(cell.lr for cell in cells):
            where[f"{name} {rate(lr)}"] = [run for run in runs if run.cell.lr == lr]
        for place, here in where.items():
            found |= _numbers(place, here)
    for name, metrics in {"parts": ("worst", "accuracy", "pass8"), "controls": ("worst", "accuracy", "pass8")}.items():
        found[f"table {name}"] = method_table(TABLES[name], metrics)
    found["table collapse"] = cell_table(TABLES["collapse"])
    found["table long"] = cell_table(TABLES["long"])
    found["table paper"] = cell_table(TABLES["paper"])
    found["table main"] = grid_table(
        [cell for cell in TABLES["main"] if cell.method == "grpo"],
        ("grpo", "grpo_token_mean", "gtpo"),
        ("worst", "accuracy", "pass8"),
    )
    found["table methods"] = method_table(TABLES["main"], ("worst", "accuracy", "pass8", "peak"))
    found["table agreement"] = agreement_table()
    plain = [run for run in everything if run.cell.method == "grpo"]
    found["prediction"] = f"{prediction(plain):.2f}"
    found["prediction runs"] = f"{sum(map(lost, plain))} of {len(plain)}"
    for start in USUAL:
        found[f"prediction {TASKS[start]}"] = f"{prediction([run for run in plain if run.cell.start == start]):.2f}"
    return found | _confirmed()


def _numbers(place: str, runs: Sequence[Run]) -> dict[str, str]:
    found = {}
    methods = list(dict.fromkeys(run.cell.method for run in runs))
    for method in methods:
        own = [run for run in runs if run.cell.method == method]
        found[f"{place}: {method} lost"] = f"{sum(map(lost, own))} of {len(own)}"
        for metric in METRICS:
            values = [run.summary[metric] for run in own]
            found[f"{place}: {method} {metric}"] = f"{np.mean(values):.2f}"
            found[f"{place}: {method} lowest {metric}"] = f"{min(values):.2f}"
            found[f"{place}: {method} highest {metric}"] = f"{max(values):.2f}"
        for other in methods:
            for metric in METRICS if other != method else ():
                comparison = compare(runs, method, other, metric)
                if comparison.differences:
                    key = f"{place}: {method} - {other} {metric}"
                    found[key] = str(comparison)
                    found[f"{key} higher"] = f"{comparison.higher} of {len(comparison.differences)}"
    return found


def _confirmed() -> dict[str, str]:
    """Numbers of the runs under verl: pairs of the rates that were chosen, and of equal rates."""
    found = {"verl runs": str(len(confirm.runs()))}
    runs = {(run.cell.start, run.cell.method, run.cell.lr, run.seed): run.summary for run in confirmations(600)}
    chosen = [
        (summary, runs[start, "gtpo", MIDDLE, seed])
        for (start, method, lr, seed), summary in runs.items()
        if (method, lr) == ("grpo", RATES[0]) and start in USUAL and (start, "gtpo", MIDDLE, seed) in runs
    ]
    equal = [
        (summary, runs[start, "gtpo", lr, seed])
        for (start, method, lr, seed), summary in runs.items()
        if method == "grpo" and (start, "gtpo", lr, seed) in runs and start.warm_steps == Start("").warm_steps
    ]
    for name, pairs in {"verl chosen": chosen, "verl equal": equal}.items():
        for metric in ("worst", "accuracy", "pass8", "entropy", "strict"):
            comparison = Comparison([gtpo[metric] - grpo[metric] for grpo, gtpo in pairs])
            found[f"{name} {metric}"] = str(comparison)
            found[f"{name} {metric} higher"] = f"{comparison.higher} of {len(pairs)}"
    for run in confirmations(600):
        key = f"verl {run.cell.start.name} {run.cell.method} {rate(run.cell.lr)} seed {run.seed}"
        found |= {f"{key} {metric}": f"{value:.2f}" for metric, value in run.summary.items()}
    return found


def render(template: str, numbers: Mapping[str, str]) -> str:
    """The page: the template with every {{name}} replaced.

    Raises:
        KeyError: a name that stands for nothing.
    """
    return re.sub(r"\{\{(.+?)\}\}", lambda match: numbers[match[1]], template)


# --- figures ---------------------------------------------------------------------------------------------------------

_COLOUR = {
    "gtpo": COLOURS[0],
    "grpo": COLOURS[1],
    "grpo_token_mean": COLOURS[3],
    "filter": COLOURS[2],
    "gtpo_no_filter": COLOURS[5],
}
_MARKER = {COUNTING: "o", SPELLING: "s", ADDITION: "^"}
_MAIN = ("grpo", "grpo_token_mean", "gtpo")


def overview() -> Any:
    """The answer in four panels: format, accuracy, parts and controls, pass@k."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(9, 6.6), layout="constrained")
        _worst_by_rate(axes[0, 0])
        _accuracy_gain(axes[0, 1])
        _arms(axes[1, 0])
        _pass_at_k(axes[1, 1])
        handles = [
            *(plt.Line2D([], [], color=_COLOUR[method], lw=3, label=TITLES[method]) for method in _MAIN),
            *(plt.Line2D([], [], color=GREY, marker=m, ls="", label=TASKS[start]) for start, m in _MARKER.items()),
        ]
        figure.legend(handles=handles, loc="outside upper center", ncols=6, frameon=False)
        return figure


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
    ax.set(ylim=(-0.03, 1.03), ylabel="worst strict format over 50 steps", title="Format: who keeps the end")


def _accuracy_gain(ax: Axes) -> None:
    runs = runs_of(TABLES["main"])
    values = {(run.cell, run.seed): run.summary["accuracy"] for run in runs}
    for column, lr in enumerate(RATES):
        for offset, rival in zip((-0.17, 0.17), ("grpo", "grpo_token_mean"), strict=True):
            gains = []
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
        *("grpo", "random_skip", "entropy", "forward", "double"),
        *("positive_only", "grpo_strict", "skip", "backward", "masks", "gtpo"),
    )
    for row, method in enumerate(reversed(order)):
        runs = runs_of(cell for cell in TABLES["parts"] + TABLES["controls"] if cell.method == method)
        colour = _COLOUR.get(method, GREY)
        _dots(ax, runs, row, "worst", colour, across=True)
        if runs:
            ax.vlines(np.mean([run.summary["worst"] for run in runs]), row - 0.3, row + 0.3, color=colour, lw=2)
    ax.set_yticks(range(len(order)), [TITLES[method] for method in reversed(order)])
    ax.set(xlim=(-0.03, 1.03), xlabel="worst strict format over 50 steps", title=f"Parts and controls, rate {rate(MIDDLE)}")


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
        handles = [plt.Line2D([], [], color=_COLOUR[method], lw=3, label=TITLES[method]) for method in methods]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
        return figure


def main() -> int:
    """Write everything."""
    if not any(cell.log(seed).exists() for cell, seed in plan()):
        print("no run is complete: bash studies/run.sh", file=sys.stderr)
        return 1
    numbers = facts()
    OUT.mkdir(parents=True, exist_ok=True)
    sections = [f"## {name}\n\n{cell_table(cells)}" for name, cells in TABLES.items()]
    sections.append(f"## Under verl and in the fast loop\n\n{numbers['table agreement']}")
    head = f"# Tables of the study\n\n{numbers['runs']} runs. Mean of a cell's runs (smallest–largest)."
    head += " Made by `python -m studies.report`."
    (OUT / "tables.md").write_text("\n\n".join([head, *sections]) + "\n")
    with (OUT / "runs.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["start", "method", "rate", "seed", *METRICS, "push", *(f"pass@{k}" for k in K)])
        for run in runs_of(cell for cells in TABLES.values() for cell in cells):
            row = [run.cell.start.name, run.cell.method, rate(run.cell.lr), run.seed]
            writer.writerow([*row, *(f"{v:.4f}" for v in (*run.summary.values(), *run.pass_at.values()))])
    PAGE.write_text(render((HERE / "page.md").read_text(), numbers))
    written: list[Path] = [OUT / "tables.md", OUT / "runs.csv", PAGE]
    written += [*save(overview(), OUT / "overview"), *save(collapse(), OUT / "collapse")]
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
