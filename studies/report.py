"""Tables and figures of the study, from the logs in results/; they are written to docs/results/study.

The statistics are those of rliable (arXiv:2108.13264): the interquartile mean over all runs of a method, its 95%
interval by a bootstrap that draws seeds anew within each task, and the probability that a run of one method ends higher
than a run of another on the same task.
"""

import csv
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu, trim_mean

from gtpo_verl.paper.plots import ACCURACY, ENTROPY, FORMAT, LENGTH, read_run, save, training_figure
from studies.plan import HERE, SELECTION_RATES, Run, plan, selection
from studies.run import chosen_rate, final, values

OUT = HERE.parent / "docs/results/study"
METRICS = {
    "reward": "reward/score/mean",
    "accuracy": "reward/acc/mean",
    "format": "reward/format/mean",
    "strict": "reward/strict/mean",
    "eos": "completion/eos_rate",
    "length": "completion/length/mean",
    "entropy": "actor/entropy",
}
_RESAMPLES = 2000
_STRETCH = 50
"""Steps over which a run's beginning and its worst stretch are averaged."""

Samples = Sequence[np.ndarray]
"""Final values, an array of seeds per task."""


def iqm(*tasks: np.ndarray) -> float:
    """Interquartile mean over the runs of all tasks."""
    return float(trim_mean(np.concatenate(tasks), 0.25))


def probability_of_improvement(*tasks: np.ndarray) -> float:
    """P(a run of the first method ends above one of the second), mean over tasks; the first half of `tasks` is the
    first method's."""
    half = len(tasks) // 2
    pairs = zip(tasks[:half], tasks[half:], strict=True)
    return float(np.mean([mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in pairs]))


def interval(statistic: Callable[..., float], samples: Samples) -> str:
    """The statistic and its 95% interval; without one where a task has a single seed."""
    value = statistic(*samples)
    if min(map(len, samples)) < 2:
        return f"{value:.2f}"
    rng = np.random.default_rng(0)
    settings = {"vectorized": False, "paired": False, "method": "percentile", "n_resamples": _RESAMPLES}
    low, high = bootstrap(list(samples), statistic, rng=rng, **settings).confidence_interval
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def lost_end(run: Run) -> bool:
    """Whether fewer than half of the completions end strictly as they should, over the last steps."""
    return final(run, METRICS["strict"]) < 0.5


def lost_accuracy(run: Run) -> bool:
    """Whether the run ends less accurate than it began."""
    return final(run, METRICS["accuracy"]) < values(run.log)[METRICS["accuracy"]][:_STRETCH].mean()


def worst_strict(run: Run) -> float:
    """Strict format over the worst stretch of the run, which its final value may hide."""
    return float(np.convolve(values(run.log)[METRICS["strict"]], np.ones(_STRETCH) / _STRETCH, "valid").min())


def table(runs: Sequence[Run], by: Callable[[Run], tuple[str, ...]], columns: Sequence[str]) -> list[str]:
    """One line per value of `by`, in the order of the plan: runs that are done of those planned, failures, finals."""
    names = ["accuracy", "strict", "entropy", "length"]
    lines = [
        f"| {' | '.join(columns)} | runs | end lost | accuracy lost | {' | '.join(names)} | worst strict |",
        f"|{'---|' * (len(columns) + 4 + len(names))}",
    ]
    keys = list(dict.fromkeys(map(by, runs)))
    for key in keys:
        planned = [run for run in runs if by(run) == key]
        done = [run for run in planned if run.log.exists()]
        if not done:
            continue
        tasks = [list(group) for _, group in groupby(sorted(done, key=lambda run: run.task), lambda run: run.task)]
        cells = []
        for name in names:
            samples = [np.array([final(run, METRICS[name]) for run in task]) for task in tasks]
            cells.append(interval(iqm, samples))
        cells.append(f"{min(map(worst_strict, done)):.2f}")
        counts = [f"{sum(map(lost, done))}/{len(done)}" for lost in (lost_end, lost_accuracy)]
        lines.append(f"| {' | '.join([*key, f'{len(done)} of {len(planned)}', *counts, *cells])} |")
    return lines


def comparison(runs: Sequence[Run]) -> list[str]:
    """GTPO against GRPO where both are there, by metric."""
    done = {(run.task, run.method, run.seed): run for run in runs if run.log.exists()}
    pairs = sum(method == "gtpo" and (task, "grpo", seed) in done for task, method, seed in done)
    tasks = sorted({task for task, _, _ in done})
    lines = ["| ends higher under GTPO than under GRPO | probability |", "|---|---|"]
    for name in ("accuracy", "strict", "reward", "entropy"):
        samples = [
            np.array([final(run, METRICS[name]) for (t, m, _), run in done.items() if (t, m) == (task, method)])
            for method in ("gtpo", "grpo")
            for task in tasks
        ]
        if all(map(len, samples)):
            lines.append(f"| {name} | {interval(probability_of_improvement, samples)} |")
    return [*lines, "", f"{pairs} pairs of runs with one seed and one warm start."]


def write_finals(runs: Sequence[Run]) -> None:
    """Every run's final values."""
    with (OUT / "finals.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["group", "task", "method", "lr", "seed", *METRICS])
        for run in runs:
            finals = [f"{final(run, key):.4f}" for key in METRICS.values()]
            lr = chosen_rate(run.family) if run.lr is None else run.lr
            writer.writerow([run.group, run.task, run.method, f"{lr:g}", run.seed, *finals])


def draw(runs: Sequence[Run], labels: dict[str, str], name: str, title: str) -> list[Path]:
    """Curves of some methods over the seeds that all of them have: accuracy, format, entropy, length and EOS."""
    done = [run for run in runs if run.log.exists() and run.method in labels]
    methods = {run.method for run in done}
    seeds = set.intersection(*({run.seed for run in done if run.method == method} for method in methods))
    curves = {
        labels[method]: [read_run(run.log) for run in done if run.method == method and run.seed in seeds]
        for method in labels
        if method in methods
    }
    return save(training_figure(curves, ((ACCURACY, FORMAT), (ENTROPY, LENGTH)), title), OUT / name)


def main() -> int:
    """Write everything that the logs allow."""
    runs = plan()
    done = [run for run in runs if run.log.exists()]
    if not done:
        print("no run is complete: bash studies/run.sh", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)

    def of(*groups: str) -> list[Run]:
        return [run for run in runs if run.group in groups]

    def by_method(run: Run) -> tuple[str, ...]:
        return (run.method,)

    def on(task: str) -> list[Run]:
        return [run for run in of("main", "parts") if run.task == task]

    main_runs = of("main")
    rates = ", ".join(f"{family} {chosen_rate(family):g}" for family in ("grpo", "gtpo"))
    sections = {
        f"The learning rate, on `subtraction`: chosen {rates} of {', '.join(f'{r:g}' for r in SELECTION_RATES)}": table(
            list(selection()), lambda run: (run.method, f"{run.lr:g}"), ["method", "rate"]
        ),
        "GTPO and GRPO, all tasks": [*table(main_runs, by_method, ["method"]), "", *comparison(main_runs)],
        "GTPO and GRPO, by task": table(main_runs, lambda run: (run.task, run.method), ["task", "method"]),
        "Parts and controls, on `letter_counting`": table(on("letter_counting"), by_method, ["method"]),
        "Parts and controls, on `arithmetic`": table(on("arithmetic"), by_method, ["method"]),
        "Adam betas of 0.999999, on `arithmetic`": table(of("betas"), by_method, ["method"]),
        "A noisy start at 2e-4, on `arithmetic`": table(of("noisy"), by_method, ["method"]),
        "Other learning rates, on `arithmetic`": table(
            of("rates"), lambda run: (run.method, f"{run.lr:g}"), ["method", "rate"]
        ),
        "What the paper leaves open, on `arithmetic`": table(of("open"), by_method, ["method"]),
    }
    lines = [
        f"{len(done)} of {len(runs)} runs are done. Made by `python -m studies.report`. Worst strict: the lowest mean "
        f"over {_STRETCH} steps of one of the runs."
    ]
    for title, rows in sections.items():
        lines += ["", f"## {title}", "", *(rows if len(rows) > 2 else ["Not run."])]
    (OUT / "tables.md").write_text("# Tables of the study\n\n" + "\n".join(lines) + "\n")
    write_finals(done)
    written = [OUT / "tables.md", OUT / "finals.csv"]
    pair = {"gtpo": "GTPO", "grpo": "GRPO"}
    parts = {
        **pair,
        "backward": "backward mask",
        "forward": "forward mask",
        "entropy": "filter and γ",
        "grpo_strict": "GRPO, strict reward",
    }
    pairs = {run.task: [other for other in main_runs if other.task == run.task] for run in main_runs}
    for name, here in (pairs | {"noisy_start": of("noisy")}).items():
        if {run.method for run in here if run.log.exists()} == set(pair):
            written += draw(here, pair, name, f"{name}, G = 8")
    compared = on("letter_counting")
    if {run.method for run in compared if run.log.exists()} > set(pair):
        written += draw(compared, parts, "parts", "letter_counting: which part of GTPO keeps the end")
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
