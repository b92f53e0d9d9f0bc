"""What the study found where many or few tokens were in conflict, for `gtpo-verl diagnose`.

    python -m studies.shares

GTPO − GRPO in pairs of one seed, each at its best rate, by the share of conflict tokens in GRPO's first steps; and on
how many runs the signs of `gtpo_verl.tools.diagnose` were calibrated.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from gtpo_verl.run_files.records import atomic_write
from studies.calibration import MANY_PROMPTS, REAL_MODEL, stored_runs
from studies.comparisons import LOST, interval, lost, runs_of
from studies.learning_rates import EARLY, METRICS, at_own_best_rate, compare, load, of_real_model, results
from studies.plan import ROOT, TABLES, Cell, complete, planned

EVIDENCE = ROOT / "gtpo_verl/tools/diagnose/evidence.json"
EFFECTS = ("clean", "accuracy")


def shares() -> list[dict[str, Any]]:
    """For each task of blocks 4, 2, 1b and 1c the share of conflict tokens in GRPO's first steps, its mean, lowest and
    highest run, and the mean difference of the pairs with its 95% interval; the smallest share first."""
    by_share, best = results(planned("4")), at_own_best_rate(results(planned("2")))
    tiny = pd.concat([by_share, best[~best["task"].isin(by_share["task"])]])
    real = pd.concat(map(of_real_model, ("1b", "1c")))
    by_model = pd.concat({MANY_PROMPTS: tiny, REAL_MODEL: real}, names=["model"])
    found = []
    for (model, task), own in by_model.groupby(["model", "task"]):
        differences = {METRICS[name]: compare(own, "gtpo", "grpo", name).differences for name in EFFECTS}
        share = own[own["method"] == "grpo"]["conflict"]
        effects = {name: [round(float(x), 3) for x in (np.mean(d), *interval(d))] for name, d in differences.items()}
        spread = {"share": share.mean(), "from": share.min(), "to": share.max()}
        row = {name: round(float(value), 3) for name, value in spread.items()}
        source = {"pairs": len(differences["accuracy"]), "task": task, "model": model}
        found.append(row | {"effects": effects} | source)
    return sorted(found, key=lambda row: row["share"])


def at_half(kept: Mapping[tuple[Cell, int], bool]) -> list[bool]:
    """Whether each run at half the rate of one that lost its clean endings kept them; `kept` says it of every run."""
    halves = [
        (replace(cell, lr=cell.lr / 2), seed) for (cell, seed), ended_cleanly in kept.items() if not ended_cleanly
    ]
    return [kept[run] for run in halves if run in kept]


def kept() -> dict[str, int]:
    """How many runs kept their clean endings at half of a rate at which their twins lost them, of the tiny model and of
    the real one, and how many with a reward that sees them."""
    tiny = at_half({(run.cell, run.seed): not lost(run) for run in runs_of(TABLES["main"])})
    real_runs = complete(run for run in planned() if run[0].start.is_real and run[0].start.evaluated)
    real = at_half({(cell, seed): load(cell, seed)["clean"] >= LOST for cell, seed in real_runs})
    strict = [run for run in runs_of(TABLES["controls"]) if run.cell.method == "grpo_strict"]
    return {
        "lost": len(tiny),
        "kept": sum(tiny),
        "real_lost": len(real),
        "real_kept": sum(real),
        "strict": len(strict),
        "strict_kept": sum(not lost(run) for run in strict),
    }


def calibration() -> dict[str, Any]:
    """On how many runs, of which tasks and models, the signs were tried."""
    runs = list(stored_runs())
    failed = sum(run.failed is not None for run in runs)
    tasks, models = (sorted({getattr(run, name) for run in runs}) for name in ("task", "model"))
    return {"runs": len(runs), "failed": failed, "tasks": tasks, "models": models}


def write() -> None:
    """Write `EVIDENCE`."""
    evidence = {"early": EARLY, "shares": shares(), "kept": kept(), "calibration": calibration()}
    atomic_write(EVIDENCE, json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    write()
