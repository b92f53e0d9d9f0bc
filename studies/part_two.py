"""Part two of the study from its logs: a run's endpoints, each method at its own best rate, and the rates it bears."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from gtpo_verl.paper.evaluation import pass_at_k
from studies.logs import TITLES, Comparison, rate
from studies.plan import Cell, blocks, read_log

EARLY = 20
"""Steps at the start in which shares of conflict tokens are taken, and at the end for entropy and length."""
BORNE_ACCURACY, BORNE_CLEAN = 0.05, 0.9
METRICS = {
    "accuracy": "accuracy",
    "clean": "clean endings",
    "pass8": "pass@8",
    "worst": "worst quarter",
    "entropy": "entropy",
    "length": "length",
    "first": "conflict, first",
    "last": "conflict, last",
    "template": "on the format",
    "change": "log10 ‖Δθ‖",
}
"""Of a run; the first three are the endpoints of docs/study-design.md, the fourth is second to them."""


def load(cell: Cell, seed: int) -> dict[str, Any]:
    """A run from its log: what it was, and its `METRICS`."""
    record = read_log(cell.log(seed))
    held_out, curves = record["held_out"], {name: np.array(values) for name, values in record["steps"].items()}
    samples = held_out["samples"]
    quarter = len(curves["strict"]) // 4
    stretches = np.convolve(curves["strict"][quarter:], np.ones(quarter) / quarter, "valid")
    summary = {
        "accuracy": np.mean(held_out["right"]) / samples,
        "clean": np.mean(held_out["strict"]) / samples,
        "pass8": np.mean([pass_at_k(samples, right, 8) for right in held_out["right"]]),
        "worst": stretches.min(),
        **{name: curves[name][-EARLY:].mean() for name in ("entropy", "length")},
        **{side: curves[f"conflict_{side}"][:EARLY].mean() for side in ("first", "last")},
        "template": curves["template"].mean(),
        "change": np.mean(np.log10(curves["change"])),
    }
    # Processors sum in different orders: the last digits of a double would decide between 0.95 and 0.96.
    rounded = {name: round(float(value), 9) for name, value in summary.items()}
    return {"start": cell.start.name, "method": cell.method, "lr": cell.lr, "seed": seed, **rounded}


def results(runs: Sequence[tuple[Cell, int]]) -> pd.DataFrame:
    """A row for each that is complete."""
    return pd.DataFrame([load(cell, seed) for cell, seed in runs if cell.log(seed).exists()])


def at_own_best_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each start, method and seed the run at the rate that has the highest accuracy on the *other* seeds.

    Seeds without a run at every rate neither choose nor are judged.
    """
    chosen = []
    for _, own in runs.groupby(["start", "method"]):
        accuracy = own.pivot(index="seed", columns="lr", values="accuracy").dropna()
        if len(accuracy) > 1:
            best = (accuracy.sum() - accuracy).idxmax(axis="columns")
            chosen.append(own.merge(best.rename("lr").reset_index(), on=["seed", "lr"]))
    return pd.concat(chosen) if chosen else runs.iloc[:0]


def compare(runs: pd.DataFrame, first: str, second: str, metric: str) -> Comparison:
    """First minus second in each cluster of start and seed that has one run of both."""
    by_cluster = runs.pivot(index=["start", "seed"], columns="method", values=metric).dropna(subset=[first, second])
    return Comparison((by_cluster[first] - by_cluster[second]).tolist())


def rates_borne(runs: pd.DataFrame, start: str, method: str) -> list[float]:
    """The rates with an accuracy within 0.05 of the method's best and clean endings of at least 0.9, seeds averaged."""
    own = runs[(runs["start"] == start) & (runs["method"] == method)]
    means = own.groupby("lr")[["accuracy", "clean"]].mean()
    enough = means["accuracy"] >= means["accuracy"].max() - BORNE_ACCURACY
    return means.index[enough & (means["clean"] >= BORNE_CLEAN)].tolist()


def block_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per cell: the means of its seeds."""
    groups = runs.groupby(["start", "method", "lr"], sort=False)
    rows = []
    for (start, method, lr), means in groups[list(METRICS)].mean().iterrows():
        shown = [f"{mean:.1f}" if name == "length" else f"{mean:.2f}" for name, mean in means.items()]
        rows.append([start, TITLES[method], rate(lr), str(len(groups.get_group((start, method, lr)))), *shown])
    return ["start", "method", "rate", "runs", *METRICS.values()], rows


def progress() -> list[list[str]]:
    """A row per block: its name, and how many of its runs are complete."""
    return [[name, f"{len(results(runs))} of {len(runs) or '?'}"] for name, runs in blocks().items()]
