"""How early each sign of `trainer.collapse_watch` speaks, and how often it is wrong, on the runs stored here.

    python scripts/calibrate_watch.py

A run has failed once reward, strict format or accuracy, as a mean over 50 prompts, is below half of the best that it
had. Accuracy counts if it was above a quarter. Failed and sound runs are sorted by name, and each second one is held
out. On the others each sign gets a limit, twice the highest value that it has in a sound run; with this limit
it is tried on those held out. The last columns are with the limit of the watch. Runs of fewer than 160 prompts, which
fill no two windows of the watch, are left out.
"""

import argparse
import gzip
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gtpo_verl.verl_plugin.collapse import PROMPTS, SIGNS, CollapseWatch, Sign, Trend

ROOT = Path(__file__).resolve().parents[1]
MAX_RESPONSE_LENGTH = 64
FAILURE = {"reward/score/mean": 0.0, "reward/strict/mean": 0.0, "reward/acc/mean": 0.25}
"""Metrics whose loss is a failure, and above what their best must have been."""
MARGIN = 2


def candidate(metric: str, measure: Callable[[Trend], float], meaning: str) -> Sign:
    """A sign that the watch does not have."""
    return Sign((metric,), measure, math.inf, meaning, "")


CANDIDATES = (
    candidate("actor/grad_norm", lambda norm: norm.now / norm.first, "gradient norm rises"),
    candidate("actor/grad_norm", lambda norm: norm.first / max(norm.now, 1e-3), "gradient norm falls"),
    candidate(
        "training/rollout_probs_diff_mean", lambda diff: diff.now / max(diff.first, 1e-3), "rollout and actor part"
    ),
    candidate("gtpo/log_prob/positive", lambda x: x.best - x.now, "good completions less likely"),
    candidate("gtpo/log_prob/negative", lambda x: x.best - x.now, "bad completions less likely"),
)


@dataclass
class Run:
    """A stored run: its records, when it failed if it did, and each sign's measure at each step."""

    name: str
    records: list[dict[str, Any]]
    prompts: int
    failed: int | None
    values: dict[Sign, np.ndarray]

    def first_above(self, sign: Sign, limit: float) -> int | None:
        """The step at which a sign first exceeds a limit."""
        above = np.flatnonzero(self.values[sign] > limit)
        return self.records[above[0]]["step"] if len(above) else None

    def logs(self, sign: Sign) -> bool:
        """Whether the run has the sign's metrics."""
        return all(name in self.records[0] or name == "response_length/limit" for name in sign.metrics)


def read_run(path: Path, prompts: int) -> Run:
    """A run of `prompts` prompts a step."""
    records = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for record in map(json.loads, lines):
            record.setdefault("critic/score/mean", record["reward/score/mean"])
            record.setdefault("response_length/mean", record["completion/length/mean"])
            records.append(record)
    signs = (*SIGNS, *CANDIDATES)
    watch = CollapseWatch(MAX_RESPONSE_LENGTH, prompts, signs)
    values: dict[Sign, list[float]] = {sign: [] for sign in signs}
    for record in records:
        watch.observe(record)
        for sign, value in watch.values().items():
            values[sign].append(value)
    name = str(path.relative_to(ROOT)).partition(".jsonl")[0]
    return Run(name, records, prompts, failure(records, prompts), {sign: np.array(x) for sign, x in values.items()})


def failure(records: Sequence[dict[str, Any]], prompts: int) -> int | None:
    """The step at which a run has failed, None if it has not."""
    window = math.ceil(50 / prompts)
    steps = []
    for metric, least in FAILURE.items():
        values = np.array([record[metric] for record in records])
        means = np.convolve(values, np.ones(window) / window, "valid")
        best = np.maximum.accumulate(means)
        below = np.flatnonzero((best > least) & (means < best / 2))
        steps += [records[below[0] + window - 1]["step"]] if len(below) else []
    return min(steps, default=None)


def stored_runs() -> list[Run]:
    """All of the repository that are long enough, by name."""
    runs = [read_run(path, 1) for path in sorted((ROOT / "studies/results").rglob("*.jsonl.gz"))]
    runs += [read_run(path, 8) for path in sorted((ROOT / "docs/results/cpu").glob("*.jsonl"))]
    return [run for run in runs if len(run.records) * run.prompts >= 2 * PROMPTS]


def row(sign: Sign, calibration: Sequence[Run], held_out: Sequence[Run]) -> list[str]:
    """Cells of a sign's line."""
    calibration, held_out = ([run for run in runs if run.logs(sign)] for runs in (calibration, held_out))
    name = f"{sign.meaning} (`{'`, `'.join(sign.metrics)}`)"
    if not any(run.failed for run in calibration) or not any(run.failed for run in held_out):
        return [name, "no failed run logs it", *[""] * 6]
    limit = MARGIN * max(run.values[sign].max() for run in calibration if not run.failed)
    return [name, f"{limit:.3f}", *result(sign, limit, held_out), *(result(sign, sign.limit, held_out, True))]


def result(sign: Sign, limit: float, runs: Sequence[Run], with_limit: bool = False) -> list[str]:
    """How a sign with this limit fares: failed runs that it names, sound ones that it names, steps of warning."""
    if math.isinf(limit):
        return ["not in it", "", "", ""]
    failed, sound = [run for run in runs if run.failed], [run for run in runs if not run.failed]
    named = [(run.failed, step) for run in failed if (step := run.first_above(sign, limit)) is not None]
    wrong = sum(run.first_above(sign, limit) is not None for run in sound)
    cells = [f"{len(named)} of {len(failed)}", f"{wrong} of {len(sound)}", warning([at - step for at, step in named])]
    return ([f"{limit:g}"] if with_limit else []) + cells


def warning(steps: Sequence[int]) -> str:
    """Median and range of the steps from a sign to the failure."""
    return f"{statistics.median(steps):.0f} ({min(steps)} to {max(steps)})" if steps else ""


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    runs = stored_runs()
    failed, sound = [run for run in runs if run.failed], [run for run in runs if not run.failed]
    calibration, held_out = failed[::2] + sound[::2], failed[1::2] + sound[1::2]
    print(f"{len(runs)} runs: {len(failed)} failed, {len(sound)} sound")
    for name, half in (("limits from", failed[::2]), ("held out", failed[1::2])):
        print(f"failed runs, {name}: {', '.join(f'{run.name} at step {run.failed}' for run in half)}")
    head = ["sign", "limit", "failed runs seen", "false alarms", "steps of warning"]
    head += ["the watch's limit", "failed runs seen", "false alarms", "steps of warning"]
    lines = [head, ["---"] * len(head)]
    lines += [row(sign, calibration, held_out) for sign in (*SIGNS, *CANDIDATES)]
    firsts = {
        run.name: min((x for sign in SIGNS if (x := run.first_above(sign, sign.limit))), default=None) for run in runs
    }
    for name, half in (("any sign of the watch, held out", held_out), ("any sign of the watch, all runs", runs)):
        steps = [run.failed - at for run in half if run.failed and (at := firsts[run.name])]
        wrong = sum(1 for run in half if not run.failed and firsts[run.name])
        count = sum(1 for run in half if run.failed)
        cells = [f"{len(steps)} of {count}", f"{wrong} of {len(half) - count}", warning(steps)]
        lines.append([name, *[""] * 5, *cells])
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


if __name__ == "__main__":
    main()
