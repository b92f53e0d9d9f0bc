"""Block 10: what its runs answer by the rules of studies/DESIGN.md.

The runs of a comparison have one device and one dtype. On CPUs the other halves of the pairs are block 9's runs.
"""

from typing import NamedTuple

import pandas as pd

from studies.comparisons import compare, least_accuracy, with_failures
from studies.plan import CLAMPED, CONTROL_SEEDS, Cell, complete, planned, read_log
from studies.runs import LOST, results
from studies.statistics import described, interval
from studies.titles import METHODS

PLACES = {"cpu": ("9", "10"), "cuda": ("10-gpu",)}
"""The blocks that are compared on a device."""
FEW, MANY = 1, 4
"""Runs that failed, of six, by which a question is decided."""


class Question(NamedTuple):
    """What a method is to tell, against one of block 9.

    Args:
        method, against: the two methods.
        counted: which failures count: `collapsed`, of the accuracy, or `failed`, that or the loss of the exact format.
        few, many: what to say if at most `FEW` runs failed, and if at least `MANY` did.
        as_accurate: `few` needs an interval of the difference in accuracy that contains 0. If it is false, both answers
            need an `against` of which at least `MANY` runs failed.
    """

    method: str
    against: str
    counted: str
    few: str
    many: str
    as_accurate: bool = False


_REWARD = (
    "consistent with the reward for the form of wrong answers being what makes accuracy collapse",
    "consistent with GTPO's accuracy collapsing under that reward too",
)
QUESTIONS = {
    "Q1": Question(
        method="grpo_clamped",
        against=CLAMPED,
        counted="failed",
        few="consistent with the clamp doing it; GTPO adds nothing that these runs can see",
        many="consistent with the masks being needed",
        as_accurate=True,
    ),
    "Q2": Question(
        method="masks",
        against="gtpo",
        counted="collapsed",
        few="consistent with γ being what shrinks the completions",
        many="consistent with the masks shrinking them without γ",
    ),
    "Q3, answer alone": Question("gtpo_answer", "gtpo", "collapsed", *_REWARD),
    "Q3, authors' reward": Question("gtpo_authors", "gtpo", "collapsed", *_REWARD),
}
COMPARED = (
    (CLAMPED, "gtpo"),
    (CLAMPED, "grpo"),
    *((question.method, question.against) for question in QUESTIONS.values()),
    ("grpo_clamped", "grpo"),
    ("gtpo_answer", "grpo_answer"),
    ("gtpo_clamped", CLAMPED),
)
"""First and second method of each comparison, in the order of the table."""


def made_on(device: str) -> list[tuple[Cell, int]]:
    """Return the runs of block 10 on a device, and those of block 9 on its seeds."""
    return complete(run for block in PLACES[device] for run in planned(block) if run[1] in CONTROL_SEEDS)


def runs_on(device: str) -> pd.DataFrame:
    """Return the runs of block 10 on a device, and those of block 9 on its seeds, `with_failures`.

    None has collapsed where GRPO, whose mean decides, has not run on all seeds.

    Raises:
        ValueError: the runs have several dtypes.
    """
    made = made_on(device)
    dtypes = {read_log(cell.log(seed)).get("dtype") for cell, seed in made}
    if len(dtypes) > 1:
        raise ValueError(f"runs of block 10 on {device} have several dtypes, {sorted(map(str, dtypes))}: keep one")
    runs = results(made)
    has_limit = (runs["method"] == "grpo").sum() == len(CONTROL_SEEDS)
    return with_failures(runs, least_accuracy(runs) if has_limit else 0)


def answer(question: Question, runs: pd.DataFrame) -> str:
    """Say what the rule does, or how many runs there are yet."""
    made = {method: (runs["method"] == method).sum() for method in (question.method, question.against, "grpo")}
    if min(made.values()) < len(CONTROL_SEEDS):
        which = question.method if made[question.method] < len(CONTROL_SEEDS) else question.against
        least = min(made[question.method], made[question.against])
        return f"not answered yet ({least} of {len(CONTROL_SEEDS)} runs of {METHODS[which]})"
    counts = runs.groupby("method")[question.counted].sum()
    failed = counts[question.method]
    low, high = interval(compare(runs, question.method, question.against, "accuracy").differences)
    if question.as_accurate or counts[question.against] >= MANY:
        if failed <= FEW and (low <= 0 <= high or not question.as_accurate):
            return question.few
        if failed >= MANY:
            return question.many
    return "undecided"


def repeated() -> str:
    """Say whether block 9's outcome on seed 8 came back in two runs that were made as arm 1 is."""
    made = results(planned("9-again"))
    if len(made) < 2:
        return "is not there yet"
    failed = (made["accuracy"] < least_accuracy(runs_on("cpu"))) | (made["exact_format"] < LOST)
    as_before = dict(zip(made["method"], failed, strict=True)) == {CLAMPED: False, "gtpo": True}
    return "came back" if as_before else "did not come back"


def difference(runs: pd.DataFrame, first: str, second: str, metric: str) -> str:
    """Write first minus second with its interval and the p of sign flips, or that it is not there yet."""
    comparison = compare(runs, first, second, metric)
    if len(comparison.differences) < len(CONTROL_SEEDS):
        return "not run yet"
    return described(comparison)
