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


class Pair(NamedTuple):
    """Two arms: what the rule says, and the differences by seed, first minus second."""

    verdict: str
    failed: Comparison
    p: float
    accuracy: Comparison


def runs() -> pd.DataFrame:
    """The complete runs, a row each, and how they failed."""
    done = complete(planned("11"))
    found = results(done)
    short_share = [pd.Series(read_log(cell.log(seed))["steps"]["short"])[-ENDED:].mean() for cell, seed in done]
    found["gave up"] = pd.Series(short_share, dtype=float) > 0.5
    found["stopped"] = found["clean"] < LOST
    found["failed"] = (found["gave up"] | found["stopped"]).astype(float)
    return found


def judge(found: pd.DataFrame, first: str, second: str) -> Pair:
    """By the rule, on the seeds on which both arms have all their runs."""
    both = found[found["method"].isin([first, second])]
    whole = both.groupby("seed").filter(lambda own: len(own) == 2 * found["lr"].nunique())
    by_seed = whole.groupby(["seed", "method"])[["failed", "accuracy"]].mean().unstack()
    failed, accuracy = ((by_seed[name][first] - by_seed[name][second]).tolist() for name in ("failed", "accuracy"))
    p, (low, high) = sign_flips(failed), interval(failed)
    verdict = "undecided"
    if found[found["method"] == "gtpo"]["gave up"].sum() < SHOWN:
        verdict = "nothing: the start does not show the failure"
    elif p < 0.05:
        verdict = "the first fails more often" if sum(failed) > 0 else "the first fails less often"
    elif -MATTERS <= low and high <= MATTERS:
        verdict = "no difference that matters"
    return Pair(verdict, Comparison(failed), p, Comparison(accuracy))


def arm_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per arm: runs that gave up reasoning and that stopped, at each learning rate, and accuracy."""
    rates = sorted(found["lr"].unique())
    rows = []
    for method in GUESSING_ARMS:
        row = [title(method)]
        for name in ("gave up", "stopped"):
            for lr in rates:
                own = found[(found["method"] == method) & (found["lr"] == lr)]
                row.append(f"{own[name].sum()} of {len(own)}")
        rows.append([*row, *(f"{own_rate(found, method, lr, 'accuracy'):.2f}" for lr in rates)])
    titles = ("gave up reasoning", "stopped terminating cleanly", "accuracy")
    return ["", *(f"{what}, {rate(lr)}" for what in titles for lr in rates)], rows


def own_rate(found: pd.DataFrame, method: str, lr: float, name: str) -> float:
    """The mean of an arm's runs at a learning rate."""
    return float(found[(found["method"] == method) & (found["lr"] == lr)][name].mean())


def pair_table(found: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per comparison."""
    rows = []
    for first, second in PAIRS:
        pair = judge(found, first, second)
        rows.append([title(first), title(second), str(pair.failed), short(pair.p), pair.verdict, str(pair.accuracy)])
    return ["first", "second", "share of failed runs, first − second", "p", "by the rule", "accuracy"], rows


def title(method: str) -> str:
    """Of an arm."""
    return CLAMPED.get(method, TITLES[method])
