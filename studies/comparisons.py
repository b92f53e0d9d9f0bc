"""The runs of the study from their logs: curves, endpoints, and how methods are compared."""

import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.stats import mannwhitneyu, t, trim_mean

from recipes.paper.evaluation import pass_at_k
from studies.plan import (
    ADDITION,
    AGAIN,
    COUNTING,
    GUESSED,
    HALFWAY,
    HALFWAY_ON_GPU,
    HOT_ADDITION,
    HOT_COUNTING,
    LEGS,
    LONG_LEGS,
    MANY,
    ON_GPU,
    SEEDS,
    SPELLING,
    SUBTRACTION,
    WORDED,
    WORDY,
    Cell,
    complete,
    read_log,
)

SAMPLES, K = 64, (1, 2, 4, 8, 16, 32, 64)
STRETCH = 50
"""Steps over which the worst and the peak are averaged."""
SETTLED = 100
"""The worst stretch begins after this step."""
LAST = 100
"""Steps at the end over which final values are averaged."""
LOST = 0.5
"""A run with a smaller share of clean endings has stopped terminating cleanly."""

TITLES = {
    "grpo": "GRPO",
    "grpo_token_mean": "GRPO, token-mean",
    "grpo_kl": "GRPO, KL 0.04",
    "gtpo": "GTPO",
    "gamma": "γ only",
    "entropy": "filter and γ",
    "forward": "forward mask",
    "backward": "backward mask",
    "skip": "both masks, skipped only",
    "double": "both masks, doubled only",
    "masks": "both masks",
    "positive_only": "GRPO, positive updates only",
    "random_skip": "GRPO, random tokens skipped",
    "grpo_strict": "GRPO, reward that sees the ending",
    "filter": "GRPO with the filter",
    "gtpo_no_filter": "GTPO without the filter",
    "only_negative": "GTPO, filter of negative ones only",
    "confident_skip": "GRPO, most probable tokens skipped",
    "gtpo_strict": "GTPO, reward that sees the ending",
    "dr_grpo": "Dr. GRPO",
    "gtpo_no_std": "GTPO without σ",
    "grpo_4_updates": "GRPO, four updates, clipped",
    "gtpo_4_updates": "GTPO, four updates, clipped",
    "grpo_G12": "GRPO, G = 12",
    "gtpo_G12": "GTPO, G = 12",
    "grpo_betas": "GRPO, betas 0.999999",
    "gtpo_betas": "GTPO, betas 0.999999",
    "common": "common beginning, and backward",
    "agreed": "forward without forks, and backward",
    "common_skip": "common beginning, and backward, skipped only",
    "gated": "GRPO, equal outcomes gated",
    "gated_masks": "both masks, equal outcomes gated",
    "corpo_masks": "both masks, no A > 0 for a wrong answer",
    "divided_masks": "both masks, divided by conflict tokens",
    "corpo_gtpo": "GTPO, no A > 0 for a wrong answer",
    "gated_gtpo": "GTPO, equal outcomes gated",
    "grpo_clamped": "GRPO, no A > 0 for a wrong answer",
    "gtpo_clamped": "GTPO, no A > 0 for a wrong answer",
    "gtpo_answer": "GTPO, reward for the answer alone",
    "grpo_answer": "GRPO, reward for the answer alone",
    "gtpo_authors": "GTPO, reward of the authors' code",
    "span_all": "GTPO, all conflict tokens",
    "threshold_0.2": "GTPO, threshold 0.2",
}
TASKS = {
    COUNTING: "counting letters",
    SPELLING: "spelling backward",
    ADDITION: "addition",
    WORDED: "counting in sentences",
    HOT_COUNTING: "counting, hot",
    HOT_ADDITION: "addition, hot",
    LEGS: "legs of one animal",
    ON_GPU: "legs of one animal, on a GPU",
    HALFWAY: "legs of one animal",
    HALFWAY_ON_GPU: "legs of one animal, on a GPU",
    AGAIN: "legs of one animal, again",
    LONG_LEGS: "legs of two animals",
    **dict(zip(MANY, ("counting letters", "spelling backward", "addition"), strict=True)),
    SUBTRACTION: "subtraction",
    GUESSED: "addition or a guess",
    **{start: f"counting after {start.task.rsplit('_', 1)[-1]} characters" for start in WORDY},
}
METRICS = {
    "worst": "worst strict",
    "accuracy": "accuracy",
    "pass8": "pass@8",
    "peak": "peak entropy",
    "pass64": "pass@64",
    "strict": "strict",
    "entropy": "entropy",
    "length": "length",
    "answers": "answers of 64",
    "above": "above ln 2",
}
"""Of a run; the first four are the endpoints of studies/DESIGN.md."""


class Run(NamedTuple):
    """A complete run: its curves by metric, an array of a number per step, and its summary by `METRICS`."""

    cell: Cell
    seed: int
    curves: Mapping[str, np.ndarray]
    summary: Mapping[str, float]
    pass_at: Mapping[int, float]
    seconds: float


def stretches(values: Sequence[float] | np.ndarray, steps: int = STRETCH) -> np.ndarray:
    """Means over consecutive steps."""
    return np.convolve(values, np.ones(steps) / steps, "valid")


@functools.cache
def load(cell: Cell, seed: int) -> Run:
    """A run from its log."""
    record = read_log(cell.log(seed))
    curves = {name: np.array(values) for name, values in record["steps"].items()}
    held_out = record["held_out"]
    pass_at = {k: round(float(np.mean([pass_at_k(SAMPLES, right, k) for right in held_out["right"]])), 9) for k in K}
    summary = {
        "worst": float(stretches(curves["strict"][SETTLED:]).min()),
        "accuracy": pass_at[1],
        "pass8": pass_at[8],
        "peak": float(stretches(curves["entropy"]).max()),
        "pass64": pass_at[64],
        **{name: float(curves[name][-LAST:].mean()) for name in ("strict", "entropy", "length")},
        "answers": float(np.mean(held_out["answers"])),
        "above": float(stretches(curves["above_ln2"]).max()),
        "push": float((curves["net_weight"] * curves["shared_last"])[:SETTLED].sum()),
    }
    # Processors sum in different orders: the last digits of a double would decide between 0.95 and 0.96.
    summary = {name: round(value, 9) for name, value in summary.items()}
    return Run(cell, seed, curves, summary, pass_at, record["seconds"])


def runs_of(cells: Iterable[Cell]) -> list[Run]:
    """The complete runs of cells, in the order of the plan."""
    return [load(*run) for run in complete(product(dict.fromkeys(cells), range(1, SEEDS + 1)))]


def lost(run: Run) -> bool:
    """Return whether the run stopped terminating cleanly."""
    return run.summary["worst"] < LOST


def iqm(values: np.ndarray) -> float:
    """Interquartile mean."""
    return float(trim_mean(values, 0.25))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% t interval of the mean of independent values.

    With few values the percentile bootstrap is too narrow: of five it covers the mean in 85% of the cases, of three in
    75%.
    """
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return float(np.mean(values) - half), float(np.mean(values) + half)


class Comparison(NamedTuple):
    """One method against another in pairs of runs of one start, rate and seed.

    Args:
        differences: of the pairs.
        clusters: what a pair depends on beside its rate: pairs of one cluster are one value of the interval. Each pair
            is its own if there are none.
    """

    differences: list[float]
    clusters: Sequence[Hashable] = ()

    @property
    def mean(self) -> float:
        """Of the first method minus the second."""
        return float(np.mean(self.differences))

    @property
    def higher(self) -> int:
        """Pairs in which the first method is higher."""
        return sum(difference > 0 for difference in self.differences)

    def __str__(self) -> str:
        of_cluster: dict[Hashable, list[float]] = {}
        for cluster, difference in zip(self.clusters or range(len(self.differences)), self.differences, strict=True):
            of_cluster.setdefault(cluster, []).append(difference)
        if len(of_cluster) == 1:
            return signed(self.mean)
        low, high = interval([float(np.mean(own)) for own in of_cluster.values()])
        return f"{signed(self.mean)} [{signed(low)}, {signed(high)}]"


def rate(lr: float) -> str:
    """As one writes it: 5e-5."""
    return np.format_float_scientific(lr, trim="-", exp_digits=1)


def signed(value: float) -> str:
    """With its sign and to two digits."""
    return f"{value:+.2f}".replace("-", "−")


def compare(runs: Sequence[Run], first: str, second: str, metric: str) -> Comparison:
    """The pairs among `runs`, clustered by task and seed."""
    values = {(run.cell, run.seed): run.summary[metric] for run in runs}
    pairs = {
        (cell, seed): value - values[twin]
        for (cell, seed), value in values.items()
        if cell.method == first and (twin := (replace(cell, method=second), seed)) in values
    }
    return Comparison([*pairs.values()], [(cell.start, seed) for cell, seed in pairs])


def prediction(runs: Sequence[Run]) -> float:
    """Area under the ROC curve: the probability that a run that lost its clean endings had a lower push on its last
    tokens in its first steps than a run that kept them."""
    pushes = {which: [run.summary["push"] for run in runs if lost(run) == which] for which in (True, False)}
    if not all(pushes.values()):
        return float("nan")
    pairs = len(pushes[True]) * len(pushes[False])
    return float(1 - mannwhitneyu(pushes[True], pushes[False]).statistic / pairs)
