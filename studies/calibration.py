"""How early each sign of `gtpo_verl.tools.diagnose` speaks, and how often it is wrong, on the runs stored here.

    python -m studies.calibration        writes the table in docs/results/diagnose/calibration.md

A run has failed if its outcome, its clean endings or its format are lost at its end, since
the step from which on they are. Each task is held out in turn: a sign gets a limit from the runs of the other tasks,
which 19 of 20 of those that did not fail stay below, and is tried on the runs of this task; the columns add up all
turns. The last columns are with the limit of the package, chosen on the runs of the tiny model. Runs that do not fill
two windows are left out. A second table has the runs of SmolLM2 that came after the limits, judged by their held-out
questions.
"""

import functools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.signs import CLEAN, FAILED, NUMBERS, SIGNS, Sign, Watch, window
from gtpo_verl.tools.diagnose import logs
from studies import block10, verl_runs
from studies.plan import ROOT, Cell, complete, one_prompt, planned, read_log

MODEL, REAL_MODEL = "0.4 M parameters", "SmolLM2-135M"
MANY_PROMPTS = f"{MODEL}, 8 prompts a step"
PAGE, TABLE_OF_PAGE = (
    ROOT / "docs/results/diagnose/calibration.md",
    re.compile(r"^\| sign \| limit (?:.+\n)+", re.MULTILINE),
)
LATER_TABLE_OF_PAGE = re.compile(r"^\| SmolLM2 \| (?:.+\n)+", re.MULTILINE)
LATER = ("8", "9", "9-again", "10", "10-gpu", "11", "12", "12-cpu", "12-beside", "13-cpu", "13", "14", "15")
"""Blocks whose runs came after the limits."""
_SOUND = 0.95
_LIMIT = 64  # tokens of a completion under verl
_FAST = {"terminated": "eos", "accuracy": "acc", "zero_std_groups": "no_spread", "exact_format": "strict"} | {
    name: name for name in ("format", "entropy", "length", "grad_norm", "dropped")
}
_UNDER_VERL = {"grad_norm": "actor/grad_norm", "dropped": "gtpo/filter/dropped_frac"}

Steps = dict[int, dict[str, float]]


ALL_SIGNS = (
    *SIGNS,
    Sign("grad_norm", "gradient norm rises", lambda norm, _: norm.now / norm.first, math.inf),
    Sign("grad_norm", "gradient norm falls", lambda norm, _: norm.first / max(norm.now, 1e-3), math.inf),
    Sign("dropped", "GTPO filters completions out", lambda dropped, _: dropped.now, math.inf),
)


class Run(NamedTuple):
    """A stored run: when it failed if it did, and each sign's measure at each step."""

    name: str
    task: str
    model: str
    failed: int | None
    steps: list[int]
    values: dict[Sign, np.ndarray]

    def first_above(self, sign: Sign, limit: float) -> int | None:
        """The step at which a sign first exceeds a limit; None also for a run that does not log it."""
        above = np.flatnonzero(self.values.get(sign, np.empty(0)) > limit)
        return self.steps[above[0]] if len(above) else None


def observe(path: Path, task: str, model: str, completions: int, limit: int, steps: Steps) -> Run | None:
    """A run from our numbers at each step, unless it is too short."""
    size = window(completions)
    if len(steps) < 2 * size:
        return None
    logged = set[str]().union(*steps.values())
    signs = tuple(sign for sign in ALL_SIGNS if sign.number in logged)
    watch = Watch(dict.fromkeys(logged & {*NUMBERS, *_UNDER_VERL}, size), "verl", limit, signs)
    values: dict[Sign, list[float]] = {sign: [] for sign in signs}
    failed = None
    for step, numbers in steps.items():
        watch.observe(step, numbers)
        lost = any(sign in CLEAN or watch.level(sign) == FAILED for sign in watch.showing)
        failed = (failed or step) if lost else None
        for sign in signs:
            values[sign].append(watch.value(sign))
    name = str(path.relative_to(ROOT)).partition(".json")[0]
    return Run(name, task, model, failed, list(steps), {sign: np.array(x) for sign, x in values.items()})


@functools.cache
def stored_runs() -> list[Run]:
    """All of blocks 1 to 7 and part one that are long enough: the signs are older than the others."""
    found, later = [], {run for block in LATER for run in planned(block)}
    for run in complete([*one_prompt(), *(run for run in planned() if run not in later)]):
        found.append(of_fast_loop(*run))
    for cell, seed in verl_runs.runs():
        steps = _under_verl(verl_runs.read_steps(cell, seed))
        found.append(observe(verl_runs.log_of(cell, seed), cell.start.task, MODEL, 8, _LIMIT, steps))
    for path in sorted((ROOT / "docs/results/cpu").glob("*.jsonl")):
        found.append(observe(path, "arithmetic", MODEL, 64, _LIMIT, _under_verl(logs.read_log(path).steps)))
    return [run for run in found if run]


def of_fast_loop(cell: Cell, seed: int) -> Run | None:
    """A run of the study's own loop."""
    curves = {name: np.array(values) for name, values in read_log(cell.log(seed))["steps"].items()}
    curves = {ours: curves[theirs] for ours, theirs in _FAST.items() if theirs in curves}
    curves["reward"] = curves["format"] + 10 * curves["accuracy"]
    curves["highest"] = np.full_like(curves["reward"], 20)
    steps = {i + 1: {name: float(x[i]) for name, x in curves.items()} for i in range(len(curves["reward"]))}
    completions = 12 if cell.method.endswith("G12") else 8 * cell.start.prompts
    model = REAL_MODEL if cell.start.is_real else MODEL if cell.start.prompts == 1 else MANY_PROMPTS
    task = cell.start.task.split("_after_")[0]  # the same questions
    return observe(cell.log(seed), task, model, completions, cell.start.limit, steps)


def _under_verl(logged: Steps) -> Steps:
    return {
        step: translate(metrics, "verl", _LIMIT)
        | {ours: metrics[name] for ours, name in _UNDER_VERL.items() if name in metrics}
        for step, metrics in logged.items()
    }


def held_out(runs: Sequence[Run]) -> Iterator[tuple[list[Run], list[Run]]]:
    """The runs of each task, and all others."""
    for task in sorted({run.task for run in runs}):
        own = [run for run in runs if run.task == task]
        yield own, [run for run in runs if run not in own]


def row(sign: Sign, runs: Sequence[Run]) -> list[str]:
    """Cells of a sign's line."""
    runs = [run for run in runs if sign in run.values]
    name = sign.meaning + ("" if sign.calibrated else " (uncalibrated)")
    if not any(run.failed for run in runs):
        return [name, "no failed run logs it", *[""] * 8]
    firsts: dict[str, int | None] = {}
    limits = []
    for own, others in held_out(runs):
        sound = [run.values[sign].max() for run in others if not run.failed]
        if sound:
            limits.append(float(np.quantile(sound, _SOUND)))
            firsts |= {run.name: run.first_above(sign, limits[-1]) for run in own}
    spread = f"{min(limits):.2f} to {max(limits):.2f}"
    cells = [name, spread, *counts([run for run in runs if run.name in firsts], firsts)]
    if math.isinf(sign.limit):
        return [*cells, "not in it", *[""] * 4]
    named = counts(runs, {run.name: run.first_above(sign, sign.limit) for run in runs})
    return [*cells, f"{sign.limit:g}", *named, shown_at_the_end(runs, [sign])]


def shown_at_the_end(runs: Sequence[Run], signs: Sequence[Sign]) -> str:
    """In how many of those that did not fail a sign shows at the end, which makes their verdict "degraded"."""
    sound = [run for run in runs if not run.failed]
    return f"{sum(shows(run, signs) for run in sound)} of {len(sound)}"


def shows(run: Run, signs: Sequence[Sign]) -> bool:
    """Whether one of the signs shows at the end."""
    return any(run.values[sign][-1] > sign.limit for sign in signs if sign in run.values)


def counts(runs: Sequence[Run], firsts: Mapping[str, int | None]) -> list[str]:
    """How many failed runs are named, how many of the others, and how many steps before the failure."""
    failed = [(run.failed, firsts[run.name]) for run in runs if run.failed]
    warnings = [at - step for at, step in failed if step]
    wrong = sum(bool(firsts[run.name]) for run in runs if not run.failed)
    steps = f"{statistics.median(warnings):.0f} ({min(warnings)} to {max(warnings)})" if warnings else ""
    return [f"{len(warnings)} of {len(failed)}", f"{wrong} of {len(runs) - len(failed)}", steps]


def table(runs: Sequence[Run]) -> str:
    """A row per sign, and for each model one for all signs of the package that are calibrated."""
    head = ["failed runs seen", "false alarms", "steps of warning"]
    head = ["sign", "limit from other tasks", *head, "the package's limit", *head, "at the end"]
    lines = [head, ["---"] * len(head), *(row(sign, runs) for sign in ALL_SIGNS)]
    calibrated = [sign for sign in SIGNS if sign.calibrated]
    steps = {run.name: [run.first_above(sign, sign.limit) for sign in calibrated] for run in runs}
    firsts = {name: min(filter(None, found), default=None) for name, found in steps.items()}
    for model in (MODEL, MANY_PROMPTS, REAL_MODEL):
        own = [run for run in runs if run.model == model]
        lines.append([f"any calibrated sign, {model}", *[""] * 5, *counts(own, firsts), shown_at_the_end(own, SIGNS)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def later_table() -> str:
    """A row per device: of SmolLM2's runs of blocks 9 and 10, in how many a sign shows at the end, by whether they
    failed by `studies.block10`'s rule, which knows only their held-out questions."""
    without = [sign for sign in SIGNS if sign.number != "exact_format"]
    kinds = {"failed": True, "other": False}
    columns = [f"{kind} runs named at the end{but}" for but in ("", ", without the exact format") for kind in kinds]
    lines = [["SmolLM2", *columns], ["---"] * 5]
    for where, device in (("on CPUs", "cpu"), ("on a GPU", "cuda")):
        lost = block10.runs_on(device).set_index(["method", "lr", "seed"])["failed"]
        runs: dict[bool, list[Run]] = {failed: [] for failed in kinds.values()}
        for cell, seed in block10.made_on(device):
            run = of_fast_loop(cell, seed)
            assert run  # none of them is too short
            runs[bool(lost[cell.method, cell.lr, seed])].append(run)
        shown = [(sum(shows(run, signs) for run in own), own) for signs in (SIGNS, without) for own in runs.values()]
        lines.append([where, *(f"{named} of {len(own)}" for named, own in shown)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write the tables into the page, and print them and the runs with a false alarm."""
    runs = stored_runs()
    print(f"{len(runs)} runs, {sum(run.failed is not None for run in runs)} failed")
    of_signs, of_later = table(runs), later_table()
    page = TABLE_OF_PAGE.sub(lambda _: of_signs, PAGE.read_text())
    PAGE.write_text(LATER_TABLE_OF_PAGE.sub(lambda _: of_later, page))
    print(f"{PAGE}: {of_signs}\n{of_later}")
    print("named, though they did not fail:")
    for run in runs:
        named = [sign.meaning for sign in SIGNS if sign.calibrated and run.first_above(sign, sign.limit)]
        if named and not run.failed:
            print(f"  {run.name}: {'; '.join(named)}")


if __name__ == "__main__":
    main()
