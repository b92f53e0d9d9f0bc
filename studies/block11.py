"""Block 11: which arms fail where a tiny model can guess, by the rule of studies/DESIGN.md."""

from typing import NamedTuple

import pandas as pd

from studies.block10 import short, sign_flips
from studies.comparisons import LOST, TITLES, Comparison, interval, rate
from studies.learning_rates import results
from studies.plan import GUESSING_ARMS, complete, planned, read_log

ENDED = 10
"""Steps at the end in which more than half of the completions without reasoning are a run that gave it up."""
MATTERS = 0.15
"""A share of failed runs within which two arms do not differ."""
SHOWN = 4
"""Least runs of GTPO that gave up reasoning for the start to show the failure."""
CLAMPED = {"grpo_clamped": "GRPO, clamped", "gtpo_clamped": "GTPO, clamped"}
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
    "stopped": "stopped terminating cleanly",
    "accuracy": "accuracy",
}
"""What of two arms; the rule is about the first."""


class Pair(NamedTuple):
    """Two arms: what the rule says, and the differences by seed, first minus second, by `COMPARED`."""

    verdict: str
    differences: dict[str, list[float]]


def runs() -> pd.DataFrame:
    """The complete runs, a row each, and how they failed."""
    done = complete(planned("11"))
    found = results(done)
    short_share = [pd.Series(read_log(cell.log(seed))["steps"]["short"])[-ENDED:].mean() for cell, seed in done]
    found["gave up"] = pd.Series(short_share, dtype=float) > 0.5
    found["stopped"] = found["clean"] < LOST
    found["failed"] = found["gave up"] | found["stopped"]
    return found.astype(dict.fromkeys(("gave up", "stopped", "failed"), int))


def judge(found: pd.DataFrame, first: str, second: str) -> Pair:
    """By the rule, on the seeds on which both arms have all their runs."""
    both = found[found["method"].isin([first, second])]
    whole = both.groupby("seed").filter(lambda own: len(own) == 2 * found["lr"].nunique())
    by_seed = whole.groupby(["seed", "method"])[list(COMPARED)].mean().unstack()
    differences = {name: (by_seed[name][first] - by_seed[name][second]).tolist() for name in COMPARED}
    failed = differences["failed"]
    low, high = interval(failed)
    verdict = "undecided"
    if found[found["method"] == "gtpo"]["gave up"].sum() < SHOWN:
        verdict = "nothing: the start does not show the failure"
    elif sign_flips(failed) < 0.05:
        verdict = "the first fails more often" if sum(failed) > 0 else "the first fails less often"
    elif -MATTERS <= low and high <= MATTERS:
        verdict = "no difference that matters"
    return Pair(verdict, differences)


def arm_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per arm: runs that gave up reasoning and that stopped, at each learning rate, and accuracy."""
    rates = sorted(found["lr"].unique())
    rows = []
    for method in GUESSING_ARMS:
        by_rate = [found[(found["method"] == method) & (found["lr"] == lr)] for lr in rates]
        counts = [f"{own[name].sum()} of {len(own)}" for name in ("gave up", "stopped") for own in by_rate]
        rows.append([title(method), *counts, *(f"{own['accuracy'].mean():.2f}" for own in by_rate)])
    titles = ("gave up reasoning", "stopped terminating cleanly", "accuracy")
    return ["", *(f"{what}, {rate(lr)}" for what in titles for lr in rates)], rows


def pair_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per comparison."""
    rows = []
    for first, second in PAIRS:
        pair = judge(found, first, second)
        row = [title(first), title(second)]
        for values in pair.differences.values():
            row += [str(Comparison(values)), short(sign_flips(values))]
        rows.append([*row[:4], pair.verdict, *row[4:]])
    columns = [column for what in COMPARED.values() for column in (what, "p")]
    return ["first", "second", *columns[:2], "by the rule", *columns[2:]], rows


def title(method: str) -> str:
    """Of an arm."""
    return CLAMPED.get(method, TITLES[method])
