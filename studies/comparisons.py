"""How runs are compared: in pairs, each method at its own best learning rate, and by when a run has failed."""

from collections.abc import Sequence

import pandas as pd
from scipy.stats import mannwhitneyu

from studies.plan import LEAST_EXACT_FORMAT, planned, preference
from studies.runs import results
from studies.statistics import Comparison

ENDPOINTS = ("accuracy", "exact_format", "pass8")
"""The endpoints of part two of studies/DESIGN.md."""
BORNE_ACCURACY = 0.05
WRONG = 0.25
"""Accuracy below which that of a run of SmolLM2 has collapsed in block 1: half of what it reaches otherwise."""
PER_SEED, PER_RATE = ("task", "seed"), ("task", "lr", "seed")
"""What the two runs of a pair have in common."""


def compare(runs: pd.DataFrame, first: str, second: str, metric: str, pairs: Sequence[str] = PER_SEED) -> Comparison:
    """Compare two methods in each pair that has both, clustered by task and seed.

    Several runs of a method in one pair, which are at several learning rates, count as their mean.
    """
    values = runs.groupby([*pairs, "method"])[metric].mean().unstack().reindex(columns=[first, second])
    differences = (values[first] - values[second]).dropna()
    pair = differences.index.to_frame(index=False)
    clusters = list(zip(pair["task"], pair["seed"], strict=True))
    return Comparison(differences.tolist(), clusters)


def at_own_best_rate(runs: pd.DataFrame, least_exact_format: float = 0.0) -> pd.DataFrame:
    """Return each task's, method's and seed's run at the rate that `plan.preference` puts first on the *other* seeds.

    Seeds without a run at every rate neither choose nor are judged.
    """
    chosen = []
    for _, of_method in runs.groupby(["task", "method"], sort=False):
        by_rate = of_method.pivot(index="seed", columns="lr", values=["accuracy", "exact_format"]).dropna()
        if len(by_rate) < 2:
            continue
        others = (by_rate.sum() - by_rate) / (len(by_rate) - 1)
        best = {}
        for seed in by_rate.index:
            accuracy = others["accuracy"].loc[seed]
            exact_format = others["exact_format"].loc[seed]
            ranks = {lr: preference(lr, accuracy[lr], exact_format[lr], least_exact_format) for lr in accuracy.index}
            best[seed] = max(ranks, key=lambda lr: ranks[lr])
        chosen.append(of_method[of_method["lr"] == of_method["seed"].map(best)])
    return pd.concat(chosen) if chosen else runs.iloc[:0]


def at_best(least_exact_format: float = 0.0) -> dict[str, pd.DataFrame]:
    """Return the runs of blocks 2, 3 and 5 at each method's own best rate.

    `least_exact_format` is that of blocks 2 and 3; block 5 has its own.
    """
    return {
        "2": at_own_best_rate(results(planned("2")), least_exact_format),
        "3": at_own_best_rate(rivals(), least_exact_format),
        "5": at_own_best_rate(results(planned("5")), LEAST_EXACT_FORMAT),
    }


def rivals() -> pd.DataFrame:
    """Return block 3's runs, and block 2's of the same tasks, rates and seeds."""
    many = results(planned("2"))
    of_rivals = results(planned("3"))
    return pd.concat([many.merge(of_rivals[["task", "lr", "seed"]].drop_duplicates()), of_rivals])


def rates_borne(runs: pd.DataFrame, task: str, method: str) -> list[float]:
    """Return the rates at which a method is within 0.05 of its best accuracy and keeps 0.9 of the exact format."""
    of_method = runs[(runs["task"] == task) & (runs["method"] == method)]
    means = of_method.groupby("lr")[["accuracy", "exact_format"]].mean()
    accurate = means["accuracy"] >= means["accuracy"].max() - BORNE_ACCURACY
    return means.index[accurate & (means["exact_format"] >= LEAST_EXACT_FORMAT)].tolist()


def whole_seeds(runs: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return the runs of the seeds that have all their runs, so many each."""
    return runs.groupby("seed").filter(lambda of_seed: len(of_seed) == number)


def least_accuracy(runs: pd.DataFrame) -> float:
    """Return half of GRPO's mean: a run of lower accuracy has collapsed (studies/DESIGN.md, blocks 8 to 10)."""
    return float(runs[runs["method"] == "grpo"]["accuracy"].mean()) / 2


def with_failures(runs: pd.DataFrame, least: float | pd.Series) -> pd.DataFrame:
    """Add how each run failed: `collapsed`, its accuracy is below `least`; `failed`, that or the format is lost."""
    collapsed = runs["accuracy"] < least
    return runs.assign(collapsed=collapsed, failed=collapsed | runs["lost"])


def prediction(runs: pd.DataFrame) -> float:
    """Return the area under the ROC curve of the push on the last tokens in a run's first steps.

    It is the probability that a run that lost the exact format had a lower push than a run that kept it; NaN where all
    runs did the same.
    """
    lost = runs[runs["lost"]]["push"]
    kept = runs[~runs["lost"]]["push"]
    if lost.empty or kept.empty:
        return float("nan")
    return float(1 - mannwhitneyu(lost, kept).statistic / (len(lost) * len(kept)))
