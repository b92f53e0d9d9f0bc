"""The tables of the study: a header, and rows of text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from studies import titles
from studies.comparisons import (
    ENDPOINTS,
    PER_SEED,
    at_best,
    compare,
    least_accuracy,
    rates_borne,
    whole_seeds,
    with_failures,
)
from studies.plan import LEAST_EXACT_FORMAT, MANY_RATES, WORDY, blocks, complete, planned
from studies.runs import results
from studies.statistics import Comparison, described, signed
from studies.titles import METRICS, rate

Table = tuple[list[str], list[list[str]]]
"""A header and rows."""
FORM = ("exact_format", "well_formed", "eos")
"""The three measures of a completion's form."""
MEASURED = ("accuracy", *FORM)
ONE_PROMPT = (
    "worst",
    "accuracy",
    "pass8",
    "peak",
    "pass64",
    "last_exact_format",
    "last_eos",
    "entropy",
    "length",
    "answers",
    "above",
)
"""Metrics of the runs with one prompt a step."""
MANY_PROMPTS = (
    "accuracy",
    "exact_format",
    "well_formed",
    "eos",
    "pass8",
    "worst",
    "entropy",
    "length",
    "conflict",
    "first",
    "last",
    "template",
    "change",
)
"""Metrics of the runs with several prompts a step."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table, or that there is no row."""
    rows = list(rows)
    if not rows:
        return "None of these runs is complete."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def digits(metric: str) -> int:
    """Return with how many digits a metric is written."""
    return 1 if metric in ("length", "answers") else 2


def mean(values: Sequence[float], metric: str) -> str:
    """Write the mean of a metric; a dash if no log tells it."""
    if len(values) == 0 or np.isnan(values).all():
        return "–"
    return f"{np.mean(values):.{digits(metric)}f}".replace("-", "−")


def spread(values: Sequence[float], metric: str = "") -> str:
    """Write the mean, smallest and largest value of a metric."""
    if len(values) < 2:
        return mean(values, metric)
    return f"{mean(values, metric)} ({min(values):.{digits(metric)}f}–{max(values):.{digits(metric)}f})"


def count(flags: pd.Series) -> str:
    """Write in how many runs something is true."""
    return f"{int(flags.sum())} of {len(flags)}"


def cell_table(
    runs: pd.DataFrame, metrics: Sequence[str], write: Callable[[Sequence[float], str], str] = spread
) -> Table:
    """Make a row per task, method and learning rate, over its seeds."""
    rows = []
    for (task, method, lr), of_cell in runs.groupby(["task", "method", "lr"], sort=False):
        values = [write(of_cell[name].tolist(), name) for name in metrics]
        rows.append([task, titles.METHODS[method], rate(lr), count(of_cell["lost"]), *values])
    header = ["task", "method", "learning rate", "lost the exact format", *(METRICS[name] for name in metrics)]
    return header, rows


def grid_table(runs: pd.DataFrame, methods: Sequence[str], metrics: Sequence[str]) -> Table:
    """Make a row per task and learning rate, and for each metric a column per method."""
    rows = []
    for (task, lr), here in runs.groupby(["task", "lr"], sort=False):
        row = [task, rate(lr)]
        for metric in metrics:
            row += [mean(here[here["method"] == method][metric].tolist(), metric) for method in methods]
        rows.append(row)
    columns = [f"{METRICS[metric]}: {titles.METHODS[method]}" for metric in metrics for method in methods]
    return ["task", "learning rate", *columns], rows


def method_table(
    runs: pd.DataFrame,
    metrics: Sequence[str],
    rival: str,
    centre: Callable[[Sequence[float]], Any] = np.mean,
    pairs: Sequence[str] = PER_SEED,
) -> Table:
    """Make a row per method: runs that lost the exact format, its metrics, and what it has more than a rival."""
    rows = []
    for method, of_method in runs.groupby("method", sort=False):
        rates = ", ".join(rate(lr) for lr in sorted(of_method["lr"].unique()))
        row = [titles.METHODS[method], rates, count(of_method["lost"])]
        for name in metrics:
            row.append(f"{centre(of_method[name].tolist()):.2f}")
        for name in metrics:
            comparison = compare(runs, method, rival, name, pairs) if method != rival else Comparison([])
            row.append(str(comparison) if comparison.differences else "")
        rows.append(row)
    columns = [METRICS[name] for name in metrics]
    minus = [f"minus {titles.METHODS[rival]}: {column}" for column in columns]
    return ["", "learning rates", "lost the exact format", *columns, *minus], rows


def seed_table(runs: pd.DataFrame) -> Table:
    """Make a row per method, of runs of one task: each seed's accuracy and exact format."""
    seeds = runs["seed"].unique()
    rows = []
    for method, of_method in runs.groupby("method", sort=False):
        of_seed = of_method.set_index("seed")[["accuracy", "exact_format"]]
        rows.append([titles.METHODS[method], *("{:.2f}, {:.2f}".format(*of_seed.loc[seed]) for seed in seeds)])
    return ["accuracy, exact format", *(f"seed {seed}" for seed in seeds)], rows


def share_table(runs: pd.DataFrame) -> Table:
    """Make a row per task: conflict tokens in GRPO's first steps, and GTPO minus GRPO."""
    rows = []
    for task, of_task in runs.groupby("task", sort=False):
        grpo = of_task[of_task["method"] == "grpo"]
        comparisons = [compare(of_task, "gtpo", "grpo", name) for name in ENDPOINTS]
        if comparisons[0].differences:
            shares = [f"{grpo[side].mean():.0%}" for side in ("first", "last")]
            rows.append([task, *shares, str(len(comparisons[0].differences)), *map(str, comparisons)])
    return ["task", "first", "last", "pairs", *(METRICS[name] for name in ENDPOINTS)], rows


def equal_rate_table(runs: pd.DataFrame) -> Table:
    """Make a row per learning rate that every task has: runs that lost the exact format, and GTPO minus GRPO."""
    rows = []
    for lr, here in runs[runs["lr"].isin(MANY_RATES)].groupby("lr"):
        lost = [count(here[here["method"] == method]["lost"]) for method in ("grpo", "gtpo")]
        rows.append([rate(lr), *lost, *(str(compare(here, "gtpo", "grpo", name)) for name in MEASURED)])
    differences = [f"{METRICS[name]}, GTPO − GRPO" for name in MEASURED]
    return ["learning rate", "GRPO lost the exact format", "GTPO lost it", *differences], rows


def failure_table(runs: pd.DataFrame, methods: Iterable[str], rival: str = "") -> Table:
    """Make a row per method and learning rate that has runs `with_failures`: how many failed and how, and its measures.

    A run that failed counts once: as collapsed, whatever its format, or else as one that lost the exact format alone.
    With a rival a last column has the difference in accuracy from it.
    """
    rows = []
    for method in methods:
        of_method = runs[runs["method"] == method]
        for lr, here in of_method.groupby("lr"):
            alone = here["lost"] & ~here["collapsed"]
            counts = [count(here["failed"]), str(int(here["collapsed"].sum())), str(int(alone.sum()))]
            measures = [mean(here[name].tolist(), name) for name in MEASURED]
            row = [titles.METHODS[method], rate(lr), *counts, *measures]
            if rival:
                row.append("" if method == rival else str(compare(runs, method, rival, "accuracy")))
            rows.append(row)
    header = ["", "learning rate", "failed runs", "accuracy collapsed", "exact format alone lost"]
    header += [METRICS[name] for name in MEASURED]
    return header + ([f"accuracy minus {titles.METHODS[rival]}'s"] if rival else []), rows


def experiment_table(experiments: Mapping[str, tuple[pd.DataFrame, Iterable[str]]]) -> Table:
    """Make a row per experiment, method and learning rate (more than two in one row), as `failure_table` does."""
    rows = []
    header: list[str] = []
    for experiment, (runs, methods) in experiments.items():
        for method in methods:
            here = runs[runs["method"] == method]
            rates = sorted(here["lr"].unique())
            if len(rates) > 2:
                header, (row,) = failure_table(here.assign(lr=rates[0]), [method])
                row[1] = f"{rate(rates[0])} to {rate(rates[-1])}"
                rows.append([experiment, *row])
            else:
                header, of_method = failure_table(here, [method])
                rows += [[experiment, *row] for row in of_method]
    return ["experiment", *header], rows


def comparison_table(runs: pd.DataFrame, compared: Iterable[tuple[str, str]], seeds: int) -> Table:
    """Make a row per pair of methods that have all seeds: differences, first minus second, with p of sign flips."""
    rows = []
    for first, second in compared:
        comparisons = [compare(runs, first, second, name) for name in MEASURED]
        if len(comparisons[0].differences) == seeds:
            rows.append([titles.METHODS[first], titles.METHODS[second], *map(described, comparisons)])
    return ["first", "second", *(f"{METRICS[name]}, first − second" for name in MEASURED)], rows


def form_table(runs_of_blocks: Mapping[str, pd.DataFrame]) -> Table:
    """Make a row per run: accuracy and exact format over all samples, and the three measures of the stored texts."""
    rows = []
    for block, runs in runs_of_blocks.items():
        for run in runs.sort_values(["method", "lr", "seed"]).to_dict("records"):
            measures = ("accuracy", "exact_format", "exact_format_of_texts", "well_formed", "eos")
            what = [block, titles.METHODS[run["method"]], rate(run["lr"]), str(run["seed"])]
            rows.append(what + [f"{run[name]:.2f}" for name in measures])
    columns = ["accuracy", "exact format", "exact format, of the texts", METRICS["well_formed"], METRICS["eos"]]
    return ["block", "method", "learning rate", "seed", *columns], rows


def form_summary(runs_of_blocks: Mapping[str, pd.DataFrame]) -> Table:
    """Make a row per block, method and learning rate: runs below one half in each of the three measures."""
    rows = []
    for block, runs in runs_of_blocks.items():
        for (method, lr), here in runs.groupby(["method", "lr"], sort=False):
            below = [count(here[name] < 0.5) for name in FORM]
            means = [mean(here[name].tolist(), name) for name in FORM]
            rows.append([block, titles.METHODS[method], rate(lr), *below, *means])
    below = [f"runs below one half: {METRICS[name]}" for name in FORM]
    return ["block", "method", "learning rate", *below, *(f"mean: {METRICS[name]}" for name in FORM)], rows


def rate_table(runs: pd.DataFrame) -> Table:
    """Make a row per task: the learning rates that each method bears."""
    methods = runs["method"].unique()
    rows = []
    for task in runs["task"].unique():
        borne = [", ".join(map(rate, rates_borne(runs, task, method))) or "none" for method in methods]
        rows.append([task, *borne])
    return ["task", *(titles.METHODS[method] for method in methods)], rows


def better_than_gtpo(runs_of_blocks: Mapping[str, pd.DataFrame]) -> Table:
    """Make a row per block, task and method whose mean exceeds GTPO's in an endpoint, of runs at chosen rates."""
    by_block = pd.concat(runs_of_blocks, names=["block"])
    means = by_block.groupby(["block", "task", "method"], sort=False)[list(ENDPOINTS)].mean()
    rows = []
    for (block, task, method), of_method in means.iterrows():
        if (block, task, "gtpo") in means.index:
            above = of_method - means.loc[(block, task, "gtpo")]
            if (above.round(2) > 0).any():
                rows.append([block, task, titles.METHODS[method], *(signed(above[name]) for name in ENDPOINTS)])
    return ["block", "task", "method", *(METRICS[name] for name in ENDPOINTS)], rows


def of_block(block: str) -> pd.DataFrame:
    """Return the runs of a block of one task, of the seeds on which every method has one."""
    runs = results(planned(block))
    return whole_seeds(runs, runs["method"].nunique())


def of_many_prompts() -> dict[str, Table]:
    """Return the tables of part two by name, of the runs that are complete."""
    many = results(planned("2"))
    shares = results(planned("4"))
    candidates = results(planned("8"))
    fresh = of_block("1b")
    longer = of_block("1c")
    parts = of_block("6")
    confirmed = of_block("9")
    by_accuracy = at_best()
    by_both = at_best(LEAST_EXACT_FORMAT)
    with_limit = with_failures(candidates, least_accuracy(candidates))
    return {
        "real": method_table(fresh, ENDPOINTS, "gtpo"),
        "real by seed": seed_table(fresh),
        "real parts": seed_table(parts),
        "longer": method_table(longer, ENDPOINTS, "gtpo"),
        "longer by seed": seed_table(longer),
        "equal rates": equal_rate_table(many),
        "candidates": failure_table(with_limit, candidates["method"].unique(), "gtpo"),
        "confirmed by seed": seed_table(confirmed),
        "many": method_table(by_accuracy["2"], ENDPOINTS, "gtpo"),
        "many, exact format": method_table(by_both["2"], ENDPOINTS, "gtpo"),
        "borne": rate_table(many),
        "rivals": method_table(by_accuracy["3"], ENDPOINTS, "gtpo"),
        "rivals, exact format": method_table(by_both["3"], ENDPOINTS, "gtpo"),
        "fresh": method_table(by_accuracy["5"], ENDPOINTS, "gtpo"),
        "by share": share_table(shares),
        "longest by seed": seed_table(shares[shares["task"] == titles.TASKS[WORDY[-1]]]),
        "better": better_than_gtpo({"1b": fresh, "1c": longer, **by_accuracy}),
    }


def progress() -> list[list[str]]:
    """Return a row per block: its name, and how many of its runs are complete."""
    return [[name, f"{len(complete(runs))} of {len(runs) or '?'}"] for name, runs in blocks().items()]
