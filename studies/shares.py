"""What the study found where many or few tokens were in conflict, for `gtpo-verl diagnose`.

    python -m studies.shares

GTPO − GRPO in pairs of one start, rate and seed, in thirds by the share of conflict tokens in GTPO's first steps; and
on how many runs the signs of `gtpo_verl.diagnose` were calibrated.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gtpo_verl.records import atomic_write
from studies.calibration import MODEL, stored_runs
from studies.logs import TASKS, Run, interval, lost, runs_of
from studies.part_two import LOST, load
from studies.plan import ROOT, TABLES, Cell, complete, planned

EVIDENCE = ROOT / "gtpo_verl/diagnose/evidence.json"
EARLY, RANGES = 20, 3
EFFECTS = {"clean endings": "worst", "accuracy": "accuracy"}


def shares() -> list[dict[str, Any]]:
    """A range of shares each, with the mean difference of its pairs and its 95% interval."""
    runs = {(run.cell, run.seed): run for run in runs_of(dict.fromkeys(c for cells in TABLES.values() for c in cells))}
    pairs = []
    for (cell, seed), gtpo in runs.items():
        grpo = runs.get((replace(cell, method="grpo"), seed))
        if cell.method == "gtpo" and grpo:
            pairs.append((float(gtpo.curves["conflict"][:EARLY].mean()), gtpo, grpo))
    pairs.sort(key=lambda pair: pair[0])
    edges = [float(np.quantile([share for share, *_ in pairs], i / RANGES)) for i in range(RANGES + 1)]
    thirds = [[pair for pair in pairs if low <= pair[0] <= high] for low, high in zip(edges, edges[1:], strict=False)]
    return [_range(low, high, third) for low, high, third in zip(edges, edges[1:], thirds, strict=False)]


def _range(low: float, high: float, pairs: Sequence[tuple[float, Run, Run]]) -> dict[str, Any]:
    effects = {}
    for name, metric in EFFECTS.items():
        differences = [gtpo.summary[metric] - grpo.summary[metric] for _, gtpo, grpo in pairs]
        effects[name] = [round(float(x), 3) for x in (np.mean(differences), *interval(differences))]
    tasks = sorted({TASKS[gtpo.cell.start] for _, gtpo, _ in pairs})
    return {
        "from": round(low, 3),
        "to": round(high, 3),
        "effects": effects,
        "pairs": len(pairs),
        "tasks": tasks,
        "model": MODEL,
    }


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
    real_runs = complete(run for run in planned() if run[0].start.is_real)
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
