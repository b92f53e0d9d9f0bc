"""Block 10: what its runs answer by the rules of studies/DESIGN.md, with t intervals and exact tests side by side.

The runs of a comparison have one device and one dtype. On CPUs the other halves of the pairs are block 9's arms.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import pandas as pd
from scipy.stats import binomtest

from studies.comparisons import LOST, TITLES, Comparison, interval
from studies.learning_rates import least_accuracy, results
from studies.plan import CANDIDATES, LAST_SEEDS, Cell, complete, planned, read_log
from studies.statistics import sign_flips

CLAMPED = CANDIDATES[0]
"""GTPO with the clamp, as block 9 ran it; the key `min_correct_reward` is the same."""
PLACES = {"cpu": ("9", "10"), "cuda": ("10-gpu",)}
"""The blocks that are compared on a device."""
FEW, MANY = 1, 4
"""Runs lost, of six, by which a question is decided."""


class Question(NamedTuple):
    """What an arm is to tell, against an arm of block 9.

    Args:
        arm, against: the methods.
        lost: what counts: `accuracy` collapsed, or `either` that or the end of the completions.
        few, many: what to say if the arm lost at most `FEW` runs, and if it lost at least `MANY`.
        as_accurate: `few` needs an interval of the difference in accuracy that contains 0; if it is false, both answers
            need an `against` that lost at least `MANY`.
    """

    arm: str
    against: str
    lost: str
    few: str
    many: str
    as_accurate: bool = False


_REWARD = (
    "consistent with the reward for the form of wrong answers being what makes accuracy collapse",
    "consistent with GTPO's accuracy collapsing under that reward too",
)
QUESTIONS = {
    "Q1": Question(
        *("grpo_clamped", CLAMPED, "either"),
        "consistent with the clamp doing it; GTPO adds nothing that these runs can see",
        "consistent with the masks being needed",
        as_accurate=True,
    ),
    "Q2": Question(
        *("masks", "gtpo", "accuracy"),
        "consistent with γ being what shrinks the completions",
        "consistent with the masks shrinking them without γ",
    ),
    "Q3, answer alone": Question("gtpo_answer", "gtpo", "accuracy", *_REWARD),
    "Q3, authors' reward": Question("gtpo_authors", "gtpo", "accuracy", *_REWARD),
}
NAMES = TITLES | {"gtpo_clamped": f"{TITLES['gtpo_clamped']}, 5e-6"}
"""Of the methods: here this one stands beside the same at another learning rate."""
COMPARED = (
    (CLAMPED, "gtpo"),
    (CLAMPED, "grpo"),
    *((question.arm, question.against) for question in QUESTIONS.values()),
    ("grpo_clamped", "grpo"),
    ("gtpo_answer", "grpo_answer"),
    ("gtpo_clamped", CLAMPED),
)
"""First minus second, in the order of the table."""


def made_on(device: str) -> list[tuple[Cell, int]]:
    """The runs of block 10 on a device and those of block 9 on its seeds."""
    return complete(run for block in PLACES[device] for run in planned(block) if run[1] in LAST_SEEDS)


def runs_on(device: str) -> pd.DataFrame:
    """The runs of block 10 on a device and those of block 9 on its seeds, a row each, and what of them is lost.

    `accuracy lost` is False where GRPO, whose mean decides, has not run on all seeds.

    Raises:
        ValueError: the runs have several dtypes.
    """
    found = made_on(device)
    dtypes = {read_log(cell.log(seed)).get("dtype") for cell, seed in found}
    if len(dtypes) > 1:
        raise ValueError(f"runs of block 10 on {device} have several dtypes, {sorted(map(str, dtypes))}: keep one")
    runs = results(found)
    has_limit = (runs["method"] == "grpo").sum() == len(LAST_SEEDS)
    runs["accuracy lost"] = runs["accuracy"] < (least_accuracy(runs) if has_limit else 0)
    runs["endings lost"] = runs["clean"] < LOST
    runs["either lost"] = runs["accuracy lost"] | runs["endings lost"]
    return runs


def answer(question: Question, runs: pd.DataFrame) -> str:
    """By the rule, or how many runs there are yet."""
    arm, against, grpo = (_whole(runs, method) for method in (question.arm, question.against, "grpo"))
    if arm is None or against is None or grpo is None:
        made = [(runs["method"] == method).sum() for method in (question.arm, question.against)]
        which = question.arm if made[0] < len(LAST_SEEDS) else question.against
        return f"not answered yet ({min(made)} of {len(LAST_SEEDS)} runs of {NAMES[which]})"
    lost, before = (own[f"{question.lost} lost"].sum() for own in (arm, against))
    low, high = interval(_differences(arm, against, "accuracy"))
    if question.as_accurate or before >= MANY:
        if lost <= FEW and (low <= 0 <= high or not question.as_accurate):
            return question.few
        if lost >= MANY:
            return question.many
    return "undecided"


def repeated() -> str:
    """Whether block 9's outcome on seed 8 came back in two runs that were made as arm 1 is."""
    made = results(planned("9-again"))
    if len(made) < 2:
        return "is not there yet"
    lost = (made["accuracy"] < least_accuracy(runs_on("cpu"))) | (made["clean"] < LOST)
    as_before = dict(zip(made["method"], lost, strict=True)) == {CLAMPED: False, "gtpo": True}
    return "came back" if as_before else "did not come back"


def arm_table(runs: pd.DataFrame, methods: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Header and a row per arm that has runs: those that failed, accuracy and clean endings."""
    rows = []
    for method in methods:
        if len(own := runs[runs["method"] == method]):
            counts = [f"{own[f'{what} lost'].sum()} of {len(own)}" for what in ("accuracy", "endings", "either")]
            rows.append([NAMES[method], *counts, *(f"{own[name].mean():.2f}" for name in ("accuracy", "clean"))])
    return ["", "accuracy collapsed", "stopped terminating cleanly", "either", "accuracy", "clean endings"], rows


def comparison_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per comparison of two whole arms: t intervals of the differences, sign flips, McNemar's test."""
    rows = []
    for first, second in COMPARED:
        one, other = (_whole(runs, method) for method in (first, second))
        row = [NAMES[first], NAMES[second]]
        if one is None or other is None:
            continue
        for metric in ("accuracy", "clean"):
            differences = _differences(one, other, metric)
            row += [str(Comparison(differences)), short(sign_flips(differences))]
        rows.append([*row, short(mcnemar(one["either lost"].tolist(), other["either lost"].tolist()))])
    return ["first", "second", "accuracy, first − second", "p", "clean endings", "p", "either failed, p"], rows


def difference(runs: pd.DataFrame, first: str, second: str, metric: str) -> str:
    """First minus second with its interval and the p of sign flips, or that it is not there yet."""
    one, other = (_whole(runs, method) for method in (first, second))
    if one is None or other is None:
        return "not run yet"
    return described(Comparison(_differences(one, other, metric)))


def described(comparison: Comparison) -> str:
    """Its mean with the interval, and the p of sign flips."""
    return f"{comparison} (p {short(sign_flips(comparison.differences))})"


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> float:
    """Exact two-sided p of pairs of which one is lost, if either is as likely to be that one."""
    pairs = list(zip(first, second, strict=True))
    only_first, only_second = pairs.count((True, False)), pairs.count((False, True))
    return float(binomtest(only_first, discordant).pvalue) if (discordant := only_first + only_second) else 1.0


def short(p: float) -> str:
    """As one writes it: .031."""
    return "<.001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def _whole(runs: pd.DataFrame, method: str) -> pd.DataFrame | None:
    """The runs of an arm by seed, if it has all."""
    own = runs[runs["method"] == method].set_index("seed").sort_index()
    return own if list(own.index) == list(LAST_SEEDS) else None


def _differences(first: pd.DataFrame, second: pd.DataFrame, metric: str) -> list[float]:
    return (first[metric] - second[metric]).tolist()
