"""Block 11: which arms fail where a tiny model can guess, by the rule of studies/DESIGN.md."""

from typing import NamedTuple

import pandas as pd

from studies.comparisons import whole_seeds
from studies.plan import GUESSING_ARMS, complete, planned, read_log
from studies.runs import results
from studies.statistics import Comparison, interval, short
from studies.titles import METHODS, rate

ENDED = 10
"""Steps at the end in which more than half of the completions without reasoning are a run that gave it up."""
MATTERS = 0.15
"""A share of failed runs within which two arms do not differ."""
SHOWN = 4
"""Least runs of GTPO that gave up reasoning for the start to show the failure."""
PAIRS = (
    ("grpo_clamped", "grpo"),
    ("gtpo_clamped", "gtpo"),
    ("gtpo_clamped", "grpo_clamped"),
    ("gtpo", "grpo"),
    ("gtpo", "masks"),
)
"""First and second of each comparison."""
COMPARED = {
    "failed": "share of failed runs, first − second",
    "gave up": "gave up reasoning",
    "lost": "lost the exact format",
    "accuracy": "accuracy",
}
"""What of two methods; the rule is about the first."""


class Pair(NamedTuple):
    """Two methods: what the rule says, and the differences by seed, first minus second, by `COMPARED`."""

    verdict: str
    differences: dict[str, list[float]]


def runs() -> pd.DataFrame:
    """Return the complete runs, a row each, and how they failed."""
    done = complete(planned("11"))
    found = results(done)
    without_reasoning = [pd.Series(read_log(cell.log(seed))["steps"]["short"])[-ENDED:].mean() for cell, seed in done]
    found["gave up"] = pd.Series(without_reasoning, dtype=float) > 0.5
    found["failed"] = found["gave up"] | found["lost"]
    return found.astype({"gave up": int, "lost": int, "failed": int})


def judge(found: pd.DataFrame, first: str, second: str) -> Pair:
    """Judge a pair by the rule, on the seeds on which both methods have all their runs."""
    both = found[found["method"].isin([first, second])]
    whole = whole_seeds(both, 2 * found["lr"].nunique())
    by_seed = whole.groupby(["seed", "method"])[list(COMPARED)].mean().unstack()
    differences = {name: (by_seed[name][first] - by_seed[name][second]).tolist() for name in COMPARED}
    failed = Comparison(differences["failed"])
    low, high = interval(failed.differences)
    verdict = "undecided"
    if found[found["method"] == "gtpo"]["gave up"].sum() < SHOWN:
        verdict = "nothing: the start does not show the failure"
    elif failed.p < 0.05:
        verdict = "the first fails more often" if failed.mean > 0 else "the first fails less often"
    elif -MATTERS <= low and high <= MATTERS:
        verdict = "no difference that matters"
    return Pair(verdict, differences)


def arm_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Make a row per method: how its runs failed at each learning rate, its accuracy, and two measures of the form."""
    rates = sorted(found["lr"].unique())
    rows = []
    for method in GUESSING_ARMS:
        by_rate = [found[(found["method"] == method) & (found["lr"] == lr)] for lr in rates]
        row = [METHODS[method]]
        for name in ("gave up", "lost"):
            row += [f"{here[name].sum()} of {len(here)}" for here in by_rate]
        for name in ("accuracy", "well_formed", "eos"):
            row += [f"{here[name].mean():.2f}" for here in by_rate]
        rows.append(row)
    columns = (
        "gave up reasoning",
        "lost the exact format",
        "accuracy",
        "well formed up to `</answer>`",
        "ends with EOS",
    )
    return ["", *(f"{column}, {rate(lr)}" for column in columns for lr in rates)], rows


def pair_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Make a row per comparison."""
    rows = []
    for first, second in PAIRS:
        pair = judge(found, first, second)
        row = [METHODS[first], METHODS[second]]
        for values in pair.differences.values():
            comparison = Comparison(values)
            row += [str(comparison), short(comparison.p)]
        rows.append([*row[:4], pair.verdict, *row[4:]])
    columns = [column for what in COMPARED.values() for column in (what, "p")]
    return ["first", "second", *columns[:2], "by the rule", *columns[2:]], rows
