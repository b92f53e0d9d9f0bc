"""Block 12: whether GTPO keeps endings that GRPO does not, both with the clamp, by the rule of studies/DESIGN.md."""

from collections.abc import Sequence

from pandas import DataFrame

from studies.block10 import described, mcnemar, short, sign_flips
from studies.comparisons import LOST, interval
from studies.learning_rates import compare, results
from studies.plan import ENDINGS_ARMS, planned

LEAST = 8
"""Pairs of runs without which nothing is judged."""
MATTERS = 0.10
"""A difference in clean endings."""


def answer(block: str) -> str:
    """What the rule says of the seeds on which both arms have run, with the numbers; or how many there are yet."""
    pairs = _pairs(block)
    if (made := pairs["seed"].nunique()) < LEAST:
        return f"not judged yet ({made} of {LEAST} pairs)"
    grpo, gtpo = ENDINGS_ARMS
    accuracy, clean = (compare(pairs, gtpo, grpo, metric) for metric in ("accuracy", "clean"))
    lost = {arm: (own["clean"] < LOST).tolist() for arm, own in pairs.groupby("method")}
    return (
        f"*{verdict(clean.differences)}*; GTPO − GRPO is {described(clean)} in clean endings and {described(accuracy)} "
        f"in accuracy, and {sum(lost[gtpo])} of {made} runs of GTPO lost their endings, {sum(lost[grpo])} of {made} of "
        f"GRPO (p {short(mcnemar(lost[gtpo], lost[grpo]))})"
    )


def without(block: str, seed: int) -> str:
    """What the rule would say without one seed."""
    grpo, gtpo = ENDINGS_ARMS
    clean = compare(_pairs(block).query("seed != @seed"), gtpo, grpo, "clean")
    return f"*{verdict(clean.differences)}*, {described(clean)}"


def _pairs(block: str) -> DataFrame:
    """The runs of the seeds on which both arms have run."""
    runs = results(planned(block)).sort_values("seed")
    return runs.groupby("seed").filter(lambda own: len(own) == len(ENDINGS_ARMS))


def verdict(differences: Sequence[float]) -> str:
    """Of the differences in clean endings, GTPO minus GRPO, of the pairs."""
    if sign_flips(differences) < 0.05:
        keeps, does_not = ("GTPO", "GRPO") if sum(differences) > 0 else ("GRPO", "GTPO")
        return f"with the clamp, {keeps} keeps endings that {does_not} does not"
    return "with the clamp, GTPO adds no endings that matter" if interval(differences)[1] < MATTERS else "undecided"
