"""Block 12: whether GTPO keeps endings that GRPO does not, both with the clamp, by the rule of studies/DESIGN.md."""

from collections.abc import Sequence

import pandas as pd

from studies.block10 import mcnemar, short, sign_flips
from studies.comparisons import LOST, Comparison, interval
from studies.learning_rates import results
from studies.plan import ENDINGS_ARMS, planned

LEAST = 8
"""Pairs of runs without which nothing is judged."""
MATTERS = 0.10
"""A difference in clean endings."""


def answer(block: str) -> str:
    """What the rule says of the seeds on which both arms have run, with the numbers; or how many there are yet."""
    metrics = ["accuracy", "clean"]
    runs = results(planned(block)).pivot(index="seed", columns="method", values=metrics)
    runs = runs.reindex(columns=pd.MultiIndex.from_product([metrics, ENDINGS_ARMS])).dropna()
    if len(runs) < LEAST:
        return f"not judged yet ({len(runs)} of {LEAST} pairs)"
    (grpo, gtpo), clean, told = ENDINGS_ARMS, runs["clean"], {}
    for metric in metrics:
        differences = (runs[metric][gtpo] - runs[metric][grpo]).tolist()
        told[metric] = f"{Comparison(differences)} (p {short(sign_flips(differences))})"
    lost = clean < LOST
    failed = [f"{lost[arm].sum()} of {len(lost)}" for arm in (gtpo, grpo)]
    return (
        f"*{verdict((clean[gtpo] - clean[grpo]).tolist())}*; GTPO − GRPO is {told['clean']} in clean endings and "
        f"{told['accuracy']} in accuracy, and {failed[0]} runs of GTPO lost their endings, {failed[1]} of GRPO "
        f"(p {short(mcnemar(lost[gtpo].tolist(), lost[grpo].tolist()))})"
    )


def verdict(differences: Sequence[float]) -> str:
    """Of the differences in clean endings, GTPO minus GRPO, of at least `LEAST` pairs."""
    if sign_flips(differences) < 0.05:
        keeps, does_not = ("GTPO", "GRPO") if sum(differences) > 0 else ("GRPO", "GTPO")
        return f"with the clamp, {keeps} keeps endings that {does_not} does not"
    return "with the clamp, GTPO adds no endings that matter" if interval(differences)[1] < MATTERS else "undecided"
