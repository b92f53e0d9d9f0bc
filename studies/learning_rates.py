"""Part two of the study from its logs: a run's endpoints, each method at its own best rate, and the rates it bears."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from recipes.paper.evaluation import pass_at_k
from studies import block7
from studies.comparisons import LOST, TASKS, TITLES, Comparison, rate, signed, stretches
from studies.plan import CLEAN, MANY_RATES, WORDY, Cell, blocks, complete, planned, preference, read_log

ENDPOINTS = ("accuracy", "clean", "pass8")
EARLY = 20
"""Steps at the start in which shares of conflict tokens are taken, and at the end for entropy and length."""
BORNE_ACCURACY = 0.05
WRONG = 0.25
"""Accuracy below which that of a run of the real model has collapsed: half of what it reaches otherwise."""
METRICS = {
    "accuracy": "accuracy",
    "clean": "clean endings",
    "pass8": "pass@8",
    "worst": "worst quarter",
    "entropy": "entropy",
    "length": "length",
    "conflict": "conflict",
    "first": "conflict, first",
    "last": "conflict, last",
    "template": "on the format",
    "change": "log10 ‖Δθ‖",
}
"""Of a run; the first three are the `ENDPOINTS` of studies/DESIGN.md, the fourth is second to them."""


def load(cell: Cell, seed: int) -> dict[str, Any]:
    """A run from its log: what it was, and its `METRICS`."""
    record = read_log(cell.log(seed))
    held_out, curves = record["held_out"], {name: np.array(values) for name, values in record["steps"].items()}
    samples = held_out["samples"]
    quarter = len(curves["strict"]) // 4
    summary = {
        "accuracy": np.mean(held_out["right"]) / samples,
        "clean": np.mean(held_out["strict"]) / samples,
        "pass8": np.mean([pass_at_k(samples, right, 8) for right in held_out["right"]]),
        "worst": stretches(curves["strict"][quarter:], quarter).min(),
        **{name: curves[name][-EARLY:].mean() for name in ("entropy", "length")},
        "conflict": curves["conflict"][:EARLY].mean(),
        **{side: curves[f"conflict_{side}"][:EARLY].mean() for side in ("first", "last")},
        "template": curves["template"].mean(),
        "change": np.mean(np.log10(curves["change"][curves["change"] > 0])),
    }
    # Processors sum in different orders: the last digits of a double would decide between 0.95 and 0.96.
    rounded = {name: round(float(value), 9) for name, value in summary.items()}
    return {"task": TASKS[cell.start], "method": cell.method, "lr": cell.lr, "seed": seed, **rounded}


def results(runs: Sequence[tuple[Cell, int]]) -> pd.DataFrame:
    """A row for each that is complete."""
    return pd.DataFrame([load(*run) for run in complete(runs)], columns=["task", "method", "lr", "seed", *METRICS])


def at_own_best_rate(runs: pd.DataFrame, least_clean: float = 0.0) -> pd.DataFrame:
    """Of each task, method and seed the run at the rate that `plan.preference` puts first on the *other* seeds.

    Seeds without a run at every rate neither choose nor are judged.
    """
    chosen = []
    for _, own in runs.groupby(["task", "method"], sort=False):
        by_rate = own.pivot(index="seed", columns="lr", values=["accuracy", "clean"]).dropna()
        accuracy, clean = by_rate["accuracy"], by_rate["clean"]
        if len(accuracy) > 1:
            right, ends = ((values.sum() - values) / (len(values) - 1) for values in (accuracy, clean))
            best = {
                seed: max(accuracy, key=lambda lr: preference(lr, right.loc[seed, lr], ends.loc[seed, lr], least_clean))
                for seed in by_rate.index
            }
            chosen.append(own[own["lr"] == own["seed"].map(best)])
    return pd.concat(chosen) if chosen else runs.iloc[:0]


def compare(runs: pd.DataFrame, first: str, second: str, metric: str) -> Comparison:
    """First minus second in each cluster of task and seed that has both, of runs at several rates their means."""
    by_cluster = runs.groupby(["task", "seed", "method"])[metric].mean().unstack()
    return Comparison((by_cluster[first] - by_cluster[second]).dropna().tolist())


def rates_borne(runs: pd.DataFrame, task: str, method: str) -> list[float]:
    """The rates with an accuracy within 0.05 of the method's best and clean endings of at least 0.9, seeds averaged."""
    own = runs[(runs["task"] == task) & (runs["method"] == method)]
    means = own.groupby("lr")[["accuracy", "clean"]].mean()
    enough = means["accuracy"] >= means["accuracy"].max() - BORNE_ACCURACY
    return means.index[enough & (means["clean"] >= CLEAN)].tolist()


def block_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per cell: the means of its seeds."""
    rows = []
    for (task, method, lr), own in runs.groupby(["task", "method", "lr"], sort=False):
        shown = [f"{own[name].mean():.{1 if name == 'length' else 2}f}".replace("-", "−") for name in METRICS]
        rows.append([task, TITLES[method], rate(lr), str(len(own)), *shown])
    return ["task", "method", "learning rate", "runs", *METRICS.values()], rows


def method_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per method, of runs at one rate per task and seed: means, and GTPO minus the method."""
    rows, has_gtpo = [], "gtpo" in set(runs["method"])
    for method, own in runs.groupby("method", sort=False):
        rates = ", ".join(rate(lr) for lr in sorted(own["lr"].unique()))
        row = [TITLES[method], rates, str(len(own)), *(f"{own[name].mean():.2f}" for name in ENDPOINTS)]
        for name in ENDPOINTS:
            comparison = compare(runs, "gtpo", method, name) if has_gtpo and method != "gtpo" else Comparison([])
            row.append(str(comparison) if comparison.differences else "")
        rows.append(row)
    titles = [METRICS[name] for name in ENDPOINTS]
    return ["", "learning rates", "runs", *titles, *(f"GTPO minus it: {title}" for title in titles)], rows


def seed_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per method, of runs of one task: each seed's accuracy and clean endings."""
    seeds = runs["seed"].unique()
    rows = []
    for method, own in runs.groupby("method", sort=False):
        of_seed = own.set_index("seed")[["accuracy", "clean"]]
        rows.append([TITLES[method], *("{:.2f}, {:.2f}".format(*of_seed.loc[seed]) for seed in seeds)])
    return ["accuracy, clean endings", *(f"seed {seed}" for seed in seeds)], rows


def share_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per task: conflict tokens in GRPO's first steps, and GTPO minus GRPO."""
    rows = []
    for task, own in runs.groupby("task", sort=False):
        grpo = own[own["method"] == "grpo"]
        differences = [compare(own, "gtpo", "grpo", name) for name in ENDPOINTS]
        if differences[0].differences:
            shares = [f"{grpo[side].mean():.0%}" for side in ("first", "last")]
            rows.append([task, *shares, str(len(differences[0].differences)), *map(str, differences)])
    return ["task", "first", "last", "pairs", *(METRICS[name] for name in ENDPOINTS)], rows


def equal_rate_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per rate that every task has: runs of GRPO and of GTPO that lost their clean endings, and GTPO
    minus GRPO."""
    rows = []
    for lr, own in runs[runs["lr"].isin(MANY_RATES)].groupby("lr"):
        lost = [(own[own["method"] == method]["clean"] < LOST).sum() for method in ("grpo", "gtpo")]
        number = (own["method"] == "gtpo").sum()
        differences = [str(compare(own, "gtpo", "grpo", name)) for name in ENDPOINTS]
        rows.append([rate(lr), *(f"{n} of {number}" for n in lost), *differences])
    titles = [f"{METRICS[name]}, GTPO − GRPO" for name in ENDPOINTS]
    return ["learning rate", "GRPO stopped terminating", "GTPO stopped terminating", *titles], rows


def least_accuracy(runs: pd.DataFrame) -> float:
    """Half of GRPO's mean: below it that of a run of block 8 or 9 has collapsed (studies/DESIGN.md, the rule)."""
    return float(runs[runs["method"] == "grpo"]["accuracy"].mean()) / 2


def candidate_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per method of block 8 or 9: runs that lost answers, endings or either, its accuracy and clean
    endings, and its accuracy minus GTPO's."""
    rows = []
    for method, own in runs.groupby("method", sort=False):
        wrong = own["accuracy"] < least_accuracy(runs)
        unclean = own["clean"] < LOST
        counts = [f"{lost.sum()} of {len(own)}" for lost in (wrong, unclean, wrong | unclean)]
        means = [f"{own[name].mean():.2f}" for name in ("accuracy", "clean")]
        difference = "" if method == "gtpo" else str(compare(runs, method, "gtpo", "accuracy"))
        rows.append([TITLES[method], *counts, *means, difference])
    lost = ["accuracy collapsed", "stopped terminating", "either"]
    return ["", *lost, "accuracy", "clean endings", "accuracy minus GTPO's"], rows


def rate_table(runs: pd.DataFrame) -> tuple[list[str], list[list[str]]]:
    """Header and a row per task: the rates that each method bears."""
    methods = runs["method"].unique()
    return ["task", *(TITLES[method] for method in methods)], [
        [task, *(", ".join(map(rate, rates_borne(runs, task, method))) or "none" for method in methods)]
        for task in runs["task"].unique()
    ]


def better_than_gtpo(blocks_of_runs: Mapping[str, pd.DataFrame]) -> tuple[list[str], list[list[str]]]:
    """Header and a row per block, task and method whose mean exceeds GTPO's in an endpoint, of runs at chosen rates."""
    by_block = pd.concat(blocks_of_runs, names=["block"])
    means = by_block.groupby(["block", "task", "method"], sort=False)[list(ENDPOINTS)].mean()
    rows = []
    for (block, task, method), own in means.iterrows():
        if (block, task, "gtpo") in means.index:
            above = own - means.loc[(block, task, "gtpo")]
            if (above.round(2) > 0).any():
                rows.append([block, task, TITLES[method], *(signed(above[name]) for name in ENDPOINTS)])
    return ["block", "task", "method", *(METRICS[name] for name in ENDPOINTS)], rows


def at_best(least_clean: float = 0.0) -> dict[str, pd.DataFrame]:
    """Runs of blocks 2, 3 and 5 at each method's own best rate; `least_clean` is that of 2 and 3, 5 has its own."""
    many, fresh = (results(planned(block)) for block in "25")
    return {
        "2": at_own_best_rate(many, least_clean),
        "3": at_own_best_rate(rivals(), least_clean),
        "5": at_own_best_rate(fresh, CLEAN),
    }


def rivals() -> pd.DataFrame:
    """Block 3's runs, and block 2's of the same tasks, rates and seeds."""
    many, own = (results(planned(block)) for block in "23")
    return pd.concat([many.merge(own[["task", "lr", "seed"]].drop_duplicates()), own])


def of_real_model(block: str) -> pd.DataFrame:
    """Runs of the block, of the seeds on which every method has one."""
    runs = results(planned(block))
    return runs.groupby("seed").filter(lambda own: len(own) == runs["method"].nunique())


def evidence() -> dict[str, tuple[list[str], list[list[str]]]]:
    """The tables of the page, of the runs that are complete."""
    many, shares, candidates = (results(planned(block)) for block in "248")
    fresh, longer, parts, confirmed = map(of_real_model, ("1b", "1c", "6", "9"))
    best, best_clean = at_best(), at_best(CLEAN)
    return {
        "real": method_table(fresh),
        "real by seed": seed_table(fresh),
        "real parts": seed_table(parts),
        "screened": block7.table(),
        "longer": method_table(longer),
        "longer by seed": seed_table(longer),
        "equal rates": equal_rate_table(many),
        "candidates": candidate_table(candidates),
        "confirmed": candidate_table(confirmed),
        "confirmed by seed": seed_table(confirmed),
        "many": method_table(best["2"]),
        "many, clean": method_table(best_clean["2"]),
        "borne": rate_table(many),
        "rivals": method_table(best["3"]),
        "rivals, clean": method_table(best_clean["3"]),
        "fresh": method_table(best["5"]),
        "by share": share_table(shares),
        "longest by seed": seed_table(shares[shares["task"] == TASKS[WORDY[-1]]]),
        "better": better_than_gtpo({"1b": fresh, "1c": longer, **best}),
    }


def progress() -> list[list[str]]:
    """A row per block: its name, and how many of its runs are complete."""
    return [[name, f"{len(complete(runs))} of {len(runs) or '?'}"] for name, runs in blocks().items()]
