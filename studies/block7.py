"""Block 7: what became of each arm's completions, and the push on the token that decides whether they reason.

With `<reasoning>` written, a completion goes on with reasoning, or is short: it closes the block or answers at once.
With w = A_{i,t} λ_{i,t} / |o_i| at that token and p the share of short completions, Σ_short w (1 − p) − Σ_other w p is
the step's gradient on logit(short) − logit(other): above 0 it makes short completions more likely.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from studies.plan import SCREENED, SHRUNK, complete, planned, read_log
from studies.statistics import signed
from studies.titles import METHODS

REASONING = [44, 23759, 274, 46]
"""The tokens of `<reasoning>` in SmolLM2's vocabulary, in which `SPACES` are blank and `SHORT` begin with `<`."""
SPACES, SHORT = {198, 216, 256, 472, 1116, 3805}, {44, 2067, 9617}
END = 5
"""Steps at the end over which length, right answers and exact format are averaged."""


def decision(ids: Sequence[int]) -> int | None:
    """Where a completion goes on behind `<reasoning>`; None if it does not begin with it, or ends there."""
    start = next((t for t, token in enumerate(ids) if token not in SPACES), 0)
    after = start + len(REASONING)
    if list(ids[start:after]) != REASONING:
        return None
    return next((t for t in range(after, len(ids)) if ids[t] not in SPACES), None)


def push(completions: Sequence[Mapping[str, Any]]) -> float:
    """The gradient of a step's update on logit(short) − logit(other)."""
    weights: dict[bool, list[float]] = {True: [], False: []}
    for completion in completions:
        if (t := decision(completion["ids"])) is not None:
            is_short = completion["ids"][t] in SHORT
            weights[is_short].append(completion["advantages"][t] / len(completion["ids"]))
    share = len(weights[True]) / max(1, len(weights[True]) + len(weights[False]))
    return sum(weights[True]) * (1 - share) - sum(weights[False]) * share


def touched(steps: Sequence[Sequence[Mapping[str, Any]]]) -> float:
    """Share of own tokens whose advantage the masks change, λ ≠ 1, in arms without γ."""
    weighed = [a != of["a"] for step in steps for of in step for a in of["advantages"]]
    return float(np.mean(weighed))


def table() -> tuple[list[str], list[list[str]]]:
    """Make a row per arm that has both seeds whose completions are kept.

    For each of these seeds it has the push in steps 1 to 5, 6 to 10 and 11 to 15, and length, right answers and exact
    format in the last steps.
    """
    by_arm: dict[str, dict[int, list[str]]] = {method: {} for method in SCREENED}
    for cell, seed in complete(planned("7")):
        record = read_log(cell.log(seed))
        if "rollouts" in record:
            pushes = np.array([push(step) for step in record["rollouts"]]).reshape(-1, 5).sum(-1)
            last = {name: np.mean(record["steps"][name][-END:]) for name in ("length", "acc", "strict")}
            end = f"{last['length']:.0f} tokens, {last['acc']:.2f}, {last['strict']:.2f}"
            by_arm[cell.method][seed] = [", ".join(map(signed, pushes)), end]
    header = [""]
    for seed in SHRUNK:
        header += [f"push, seed {seed}", f"length, right, exact format, seed {seed}"]
    rows = []
    for method, seeds in by_arm.items():
        if seeds.keys() >= set(SHRUNK):
            rows.append([METHODS[method], *(text for seed in SHRUNK for text in seeds[seed])])
    return header, rows
