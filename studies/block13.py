"""Blocks 13 and 14: GTPO against the controls that users have, by the rules of studies/DESIGN.md."""

from collections.abc import Mapping, Sequence

from pandas import DataFrame

from studies.block10 import described
from studies.comparisons import Comparison, interval
from studies.learning_rates import results
from studies.plan import ANSWER_ARMS, USED_ARMS, planned
from studies.statistics import holm, sign_flips

MATTERS = 0.10
"""A difference in the exact format."""
NO_DIFFERENCE = 0.08
"""Limit of the interval of a difference in accuracy that is none, in block 14."""
SIGNIFICANT = 0.05
CONTROLS = {"C − A": "grpo", "C − B": "grpo_half"}
"""The comparisons of block 13, each with GTPO with the clamp as its first."""


def differences(runs: DataFrame, first: tuple[str, float], second: tuple[str, float], metric: str) -> list[float]:
    """First arm minus second of each seed on which both have run; an arm is its method and learning rate."""
    values = runs.set_index(["method", "lr", "seed"])[metric].sort_index()
    return (values[first] - values[second]).dropna().tolist()


def verdict(of_pairs: Sequence[float], p: float) -> str:
    """What the rule says of the paired differences in the exact format, with their corrected p."""
    mean = sum(of_pairs) / len(of_pairs)
    if p < SIGNIFICANT and mean > MATTERS:
        return "keeps"
    if p < SIGNIFICANT and mean < -MATTERS:
        return "loses"
    low, high = interval(of_pairs)
    return "nothing that matters" if -MATTERS < low and high < MATTERS else "undecided"


def verdicts(of_comparison: Mapping[str, Sequence[float]]) -> dict[str, str]:
    """The verdict on each comparison, with Holm's correction over all of them."""
    corrected = holm({name: sign_flips(of_pairs) for name, of_pairs in of_comparison.items()})
    return {name: verdict(of_pairs, corrected[name]) for name, of_pairs in of_comparison.items()}


def whole_seeds(runs: DataFrame, arms: int) -> DataFrame:
    """The runs of the seeds on which all arms have run."""
    return runs.groupby("seed").filter(lambda of_seed: len(of_seed) == arms)


def answers(block: str, without: int | None = None) -> dict[str, str]:
    """The answer to each comparison of block 13 with its numbers, or how many seeds there are yet.

    Args:
        block: `13-cpu` or `13`.
        without: a seed to leave out.
    """
    planned_runs = [run for run in planned(block) if run[1] != without]
    needed = len({seed for _, seed in planned_runs})
    runs = whole_seeds(results(planned_runs), len(USED_ARMS))
    made = runs["seed"].nunique()
    if made < needed:
        return dict.fromkeys(CONTROLS, f"not judged yet ({made} of {needed} seeds)")
    exact_format = {
        name: differences(runs, USED_ARMS["gtpo_clamped"], USED_ARMS[control], "clean")
        for name, control in CONTROLS.items()
    }
    by_rule = verdicts(exact_format)
    return {name: f"*{by_rule[name]}*, {described(Comparison(exact_format[name]))}" for name in CONTROLS}


def answer_alone() -> str:
    """What block 14's rule says, with its numbers, or how many seeds there are yet."""
    runs = whole_seeds(results(planned("14")), len(ANSWER_ARMS))
    needed = len({seed for _, seed in planned("14")})
    made = runs["seed"].nunique()
    if made < needed:
        return f"not judged yet ({made} of {needed} seeds)"
    grpo, gtpo = ((method, 1e-5) for method in ANSWER_ARMS)
    of_pairs = differences(runs, gtpo, grpo, "accuracy")
    return f"*{answer_alone_verdict(of_pairs)}*, {described(Comparison(of_pairs))}"


def answer_alone_verdict(of_pairs: Sequence[float]) -> str:
    """What block 14's rule says of the paired differences in accuracy, GTPO minus GRPO."""
    low, high = interval(of_pairs)
    if sign_flips(of_pairs) < SIGNIFICANT:
        return "GTPO is more accurate" if sum(of_pairs) > 0 else "GTPO is less accurate"
    return "no difference" if -NO_DIFFERENCE < low and high < NO_DIFFERENCE else "undecided"
