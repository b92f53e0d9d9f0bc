"""The runs of the study from their logs: what each was, its curves, and what came out."""

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from recipes.paper.evaluation import pass_at_k
from studies.plan import SEEDS, Cell, Start, complete, read_log
from studies.rewards import is_strict, is_well_formed
from studies.titles import METRICS, TASKS

EOS = "<|im_end|>"
"""The text of EOS, for both models."""
_SPECIAL = re.compile(r"<\|\w+\|>")
"""Special tokens, which stored texts have and rewards do not see: few completions have another one than EOS."""
LOST = 0.5
"""A run with a smaller share of completions in the exact format has lost it."""
EARLY = 20
"""Steps at the start over which shares of conflict tokens are averaged."""
SAMPLES, K = 64, (1, 2, 4, 8, 16, 32, 64)
"""Completions of a held-out question in the runs with one prompt a step, and the k of their pass@k."""


class Run(NamedTuple):
    """A complete run: its curves by metric, an array of a number per step, and its summary by `titles.METRICS`."""

    cell: Cell
    seed: int
    curves: Mapping[str, np.ndarray]
    summary: Mapping[str, float]
    pass_at: Mapping[int, float]
    seconds: float


class Windows(NamedTuple):
    """The steps over which a run's curves are averaged.

    Args:
        settled: the first steps, which the worst stretch leaves out.
        stretch: consecutive steps of the worst stretch, and of the peak of the entropy.
        last: steps at the end.
    """

    settled: int
    stretch: int
    last: int


def windows(start: Start, steps: int) -> Windows:
    """Return the windows that studies/DESIGN.md gives for a start."""
    if start.prompts == 1:
        return Windows(settled=100, stretch=50, last=100)
    quarter = steps // 4
    return Windows(settled=quarter, stretch=quarter, last=20)


def stretches(values: Sequence[float] | np.ndarray, steps: int = 50) -> np.ndarray:
    """Return the means over consecutive steps."""
    return np.convolve(values, np.ones(steps) / steps, "valid")


def load(cell: Cell, seed: int) -> Run:
    """Read a run from its log."""
    return _load(cell, seed, cell.log(seed))


@functools.cache
def _load(cell: Cell, seed: int, log: Path) -> Run:
    record = read_log(log)
    curves = {name: np.array(values) for name, values in record["steps"].items()}
    held_out = record["held_out"]
    samples = held_out.get("samples", SAMPLES)
    pass_at = {}
    for k in K:
        if k <= samples:
            pass_at[k] = round(float(np.mean([pass_at_k(samples, right, k) for right in held_out["right"]])), 9)
    # One completion in `samples` is right: that is pass@1, and the share of completions that are right.
    summary = {"accuracy": pass_at[1], "pass8": pass_at.get(8, np.nan), "pass64": pass_at.get(64, np.nan)}
    summary |= form(held_out, samples)
    summary |= _of_curves(curves, windows(cell.start, len(curves["strict"])))
    if "answers" in held_out:
        summary["answers"] = float(np.mean(held_out["answers"]))
    # Processors sum in different orders: the last digits of a double would decide between 0.95 and 0.96.
    rounded = {name: round(float(value), 9) for name, value in summary.items()}
    return Run(cell, seed, curves, rounded, pass_at, record.get("seconds", np.nan))


def form(held_out: Mapping[str, Any], samples: int) -> dict[str, float]:
    """Return the shares of held-out completions that have the form, by three measures.

    `exact_format` is of all completions. So are `well_formed` and `eos` in logs that count them; other logs keep the
    text of one completion a question, of which they are then the shares, and `exact_format_of_texts` stands beside
    them. What a log does not tell is missing.
    """
    questions = len(held_out["strict"])
    found = {"exact_format": sum(held_out["strict"]) / (samples * questions)}
    if "eos" in held_out:
        found["eos"] = sum(held_out["eos"]) / (samples * questions)
        found["well_formed"] = sum(held_out["well_formed"]) / (samples * questions)
        found["exact_format_of_texts"] = found["exact_format"]
    elif "text" in held_out:
        texts = held_out["text"]
        found["eos"] = float(np.mean([text.endswith(EOS) for text in texts]))
        found["well_formed"] = float(np.mean([is_well_formed(_SPECIAL.sub("", text)) for text in texts]))
        found["exact_format_of_texts"] = float(np.mean([is_exact(text) for text in texts]))
    return found


def is_exact(text: str) -> bool:
    """Return whether a completion, special tokens included, is in the exact format: the two blocks, then EOS."""
    return text.endswith(EOS) and is_strict(_SPECIAL.sub("", text))


def _of_curves(curves: Mapping[str, np.ndarray], of: Windows) -> dict[str, float]:
    found = {
        "worst": stretches(curves["strict"][of.settled :], of.stretch).min(),
        "last_exact_format": curves["strict"][-of.last :].mean(),
        "entropy": curves["entropy"][-of.last :].mean(),
        "length": curves["length"][-of.last :].mean(),
        "peak": stretches(curves["entropy"], of.stretch).max(),
    }
    if "eos" in curves:
        found["last_eos"] = curves["eos"][-of.last :].mean()
    if "above_ln2" in curves:
        found["above"] = stretches(curves["above_ln2"], of.stretch).max()
    if "conflict" in curves:
        found["conflict"] = curves["conflict"][:EARLY].mean()
    if "conflict_first" in curves:
        found["first"] = curves["conflict_first"][:EARLY].mean()
        found["last"] = curves["conflict_last"][:EARLY].mean()
    if "template" in curves:
        found["template"] = curves["template"].mean()
        found["change"] = np.mean(np.log10(curves["change"][curves["change"] > 0]))
    if "net_weight" in curves:
        found["push"] = (curves["net_weight"] * curves["shared_last"])[: of.settled].sum()
    return found


COLUMNS = ("task", "method", "lr", "seed", *METRICS, "exact_format_of_texts", "push", "lost")


def results(runs: Iterable[tuple[Cell, int]]) -> pd.DataFrame:
    """Return a row for each run that is complete, with NaN for what its log does not tell.

    `lost` is whether the run lost the exact format: with one prompt a step by its worst stretch, and otherwise by its
    held-out completions, as studies/DESIGN.md has it.
    """
    rows = []
    for cell, seed in complete(runs):
        summary = load(cell, seed).summary
        decides = summary["worst" if cell.start.prompts == 1 else "exact_format"]
        row = {"task": TASKS[cell.start], "method": cell.method, "lr": cell.lr, "seed": seed}
        rows.append({**row, **summary, "lost": decides < LOST})
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"lost": bool})


def one_prompt_runs(cells: Iterable[Cell]) -> list[tuple[Cell, int]]:
    """Return the complete runs of cells with one prompt a step, in the order of the plan."""
    return complete((cell, seed) for cell in dict.fromkeys(cells) for seed in range(1, SEEDS + 1))
