"""Block 12: whether GTPO keeps the exact format where GRPO does not, both clamped, by the rule of studies/DESIGN.md."""

from collections.abc import Sequence

from pandas import DataFrame

from studies.comparisons import compare, whole_seeds
from studies.plan import BOTH_CLAMPED, planned
from studies.runs import results
from studies.statistics import described, interval, mcnemar, short, sign_flips

LEAST = 8
"""Pairs of runs without which nothing is judged."""
MATTERS = 0.10
"""A difference in the exact format."""


def answer(block: str) -> str:
    """Say what the rule does of the seeds on which both methods have run, or how many there are yet."""
    runs = pairs(block)
    made = runs["seed"].nunique()
    if made < LEAST:
        return f"not judged yet ({made} of {LEAST} pairs)"
    grpo, gtpo = BOTH_CLAMPED
    exact_format = compare(runs, gtpo, grpo, "exact_format")
    accuracy = compare(runs, gtpo, grpo, "accuracy")
    lost = {method: of_method["lost"].tolist() for method, of_method in runs.groupby("method")}
    return (
        f"*{verdict(exact_format.differences)}*; GTPO − GRPO is {described(exact_format)} in the exact format and "
        f"{described(accuracy)} in accuracy, and {sum(lost[gtpo])} of {made} runs of GTPO lost the exact format, "
        f"{sum(lost[grpo])} of {made} of GRPO (p {short(mcnemar(lost[gtpo], lost[grpo]))})"
    )


def without(block: str, seed: int) -> str:
    """Say what the rule would without one seed."""
    grpo, gtpo = BOTH_CLAMPED
    exact_format = compare(pairs(block).query("seed != @seed"), gtpo, grpo, "exact_format")
    return f"*{verdict(exact_format.differences)}*, {described(exact_format)}"


def pairs(block: str) -> DataFrame:
    """Return the runs of the seeds on which both methods have run."""
    return whole_seeds(results(planned(block)).sort_values("seed"), len(BOTH_CLAMPED))


def verdict(differences: Sequence[float]) -> str:
    """Judge the differences in the exact format, GTPO minus GRPO, of the pairs."""
    if sign_flips(differences) < 0.05:
        keeps, does_not = ("GTPO", "GRPO") if sum(differences) > 0 else ("GRPO", "GTPO")
        return f"with the clamp, {keeps} keeps the exact format where {does_not} does not"
    if interval(differences)[1] < MATTERS:
        return "with the clamp, GTPO adds nothing to the exact format that matters"
    return "undecided"
