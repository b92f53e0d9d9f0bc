"""What `gtpo-verl diagnose` says of the runs stored here, and how often it takes a verdict back.

    python -m studies.calibration                 writes the tables in docs/results/diagnose/calibration.md
    python -m studies.calibration withdrawals     replays each run, and prints each verdict that was taken back: minutes

A run *lost half* if the mean of its accuracy, its exact format or its share of EOS over its last 640 completions is
below half of the best such mean. Of the runs of SmolLM2 that came after the rules it is not the log that says whether
they failed but their held-out questions (`studies.block10`).
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.series import History
from gtpo_verl.monitor.verdict import CANNOT_TELL, DEGRADED, FAILED, HEALTHY, Verdict, judge
from gtpo_verl.tools.diagnose import logs
from studies import block10, verl_runs
from studies.plan import ROOT, Cell, blocks, complete, number, one_prompt, planned, read_log

PAGE = ROOT / "docs/results/diagnose/calibration.md"
STORED_TABLE = re.compile(r"^\| stored runs \| (?:.+\n)+", re.MULTILINE)
FORMS_TABLE = re.compile(r"^\| the log has \| (?:.+\n)+", re.MULTILINE)
FIRST = ("1a", "1b", "1c", "2", "3", "4", "5", "6", "7")
"""Blocks whose runs are in the first table; the others came after its rules."""
WORDS = (FAILED, DEGRADED, CANNOT_TELL, HEALTHY)
COMPLETIONS = 640
LIMIT = 64
"""Tokens of a completion under verl."""
MODEL, MANY_PROMPTS, REAL_MODEL = "0.4 M parameters", "0.4 M parameters, 8 prompts a step", "SmolLM2-135M"
FORMS = {
    "all that this package logs": None,
    "all but the exact format": {"exact_format": False},
    "what verl logs by itself": dict.fromkeys(
        ("reward", "highest", "terminated", "length", "entropy", "grad_norm"), True
    ),
}
"""Three kinds of log: the numbers that one leaves out, or the only ones that it has."""
_FAST = {
    "terminated": "eos",
    "accuracy": "acc",
    "zero_std_groups": "no_spread",
    "exact_format": "strict",
    "format": "format",
    "entropy": "entropy",
    "length": "length",
    "grad_norm": "grad_norm",
    "dropped": "dropped",
}

Steps = dict[int, dict[str, float]]


class Stored(NamedTuple):
    """A stored run, with our numbers at each step.

    Args:
        completions: of how many completions a step's numbers are.
    """

    name: str
    model: str
    completions: int
    steps: Steps


def of_fast_loop(cell: Cell, seed: int) -> Stored:
    """Return a run of the study's own loop."""
    logged = read_log(cell.log(seed))["steps"]
    count = len(logged["acc"])
    steps: Steps = {}
    for place in range(count):
        numbers = {ours: float(logged[theirs][place]) for ours, theirs in _FAST.items() if theirs in logged}
        numbers["reward"] = numbers["format"] + 10 * numbers["accuracy"]
        numbers["highest"] = 20.0
        steps[place + 1] = numbers
    model = REAL_MODEL if cell.start.is_real else MODEL if cell.start.prompts == 1 else MANY_PROMPTS
    completions = 12 if cell.method.endswith("G12") else 8 * cell.start.prompts
    return Stored(_name(cell.log(seed)), model, completions, steps)


def stored_runs() -> Iterator[Stored]:
    """Yield the runs of the first blocks, and those under verl, that have two windows of 640 completions."""
    later = {run for block in map(number, blocks()) if block not in FIRST for run in planned(block)}
    found = [of_fast_loop(*run) for run in complete([*one_prompt(), *planned()]) if run not in later]
    for cell, seed in verl_runs.runs():
        steps = _translated(verl_runs.read_steps(cell, seed))
        found.append(Stored(_name(verl_runs.log_of(cell, seed)), f"{MODEL}, under verl", 8, steps))
    for path in sorted((ROOT / "docs/results/cpu").glob("*.jsonl")):
        found.append(Stored(_name(path), f"{MODEL}, under verl", 64, _translated(logs.read_log(path).steps)))
    for run in found:
        if len(run.steps) >= 2 * _window(run):
            yield run


def _translated(steps: Mapping[int, Mapping[str, float]]) -> Steps:
    return {step: translate(metrics, "verl", LIMIT) for step, metrics in steps.items()}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)).partition(".json")[0]


def _window(run: Stored) -> int:
    return max(10, -(-COMPLETIONS // run.completions))


def lost_half(run: Stored) -> bool:
    """Return whether the last mean of accuracy, exact format or the share of EOS is below half of its best one."""
    window = _window(run)
    for name in ("accuracy", "exact_format", "terminated"):
        values = [numbers[name] for numbers in run.steps.values() if name in numbers]
        sums = [sum(values[end - window : end]) for end in range(window, len(values) + 1)]
        if sums and sums[-1] < max(sums) / 2:
            return True
    return False


def verdict(run: Stored) -> Verdict:
    """Return the verdict on a run."""
    history = History(run.completions)
    for step, numbers in run.steps.items():
        history.add(step, numbers)
    return judge(history)


def stored_table() -> str:
    """Return a row for each model: what the verdicts are on the runs that lost half, and on the others."""
    counts: dict[str, Counter[tuple[bool, str]]] = {}
    for run in stored_runs():
        counts.setdefault(run.model, Counter())[lost_half(run), verdict(run).word] += 1
    head = ["stored runs"]
    for kind in ("lost half", "others"):
        head += [f"{kind}: {word}" for word in WORDS]
    rows = [[model, *_cells(counts[model])] for model in sorted(counts)]
    return _markdown([head, *rows])


def forms_table() -> str:
    """Return a row for each kind of log: the verdicts on SmolLM2's later runs that failed, and on the others."""
    counts: dict[str, Counter[tuple[bool, str]]] = {form: Counter() for form in FORMS}
    for run, has_failed in later_runs():
        for form, numbers in FORMS.items():
            counts[form][has_failed, verdict(_with(run, numbers)).word] += 1
    head = ["the log has"]
    for kind in ("failed runs", "others"):
        head += [f"{kind}: {word}" for word in WORDS]
    return _markdown([head, *([form, *_cells(counts[form])] for form in FORMS)])


def later_runs() -> Iterator[tuple[Stored, bool]]:
    """Yield the runs of blocks 9 and 10 on both devices, and whether they failed on their held-out questions."""
    for device in ("cpu", "cuda"):
        lost = block10.runs_on(device).set_index(["method", "lr", "seed"])["failed"]
        for cell, seed in block10.made_on(device):
            yield of_fast_loop(cell, seed), bool(lost[cell.method, cell.lr, seed])


def _with(run: Stored, numbers: Mapping[str, bool] | None) -> Stored:
    """Return a run without some numbers, or with some alone."""
    if numbers is None:
        return run
    kept = {name for name, is_kept in numbers.items() if is_kept}
    steps: Steps = {}
    for step, logged in run.steps.items():
        steps[step] = {
            name: value for name, value in logged.items() if name in kept or (not kept and name not in numbers)
        }
    return run._replace(steps=steps)


def _cells(counts: Counter[tuple[bool, str]]) -> list[str]:
    return [str(counts[is_lost, word]) for is_lost in (True, False) for word in WORDS]


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def withdrawals(run: Stored) -> Iterator[tuple[int, Verdict, int]]:
    """Yield each verdict that had become "cannot tell" ten steps later, with both steps."""
    verdicts = []
    history = History(run.completions)
    for place, (step, numbers) in enumerate(run.steps.items(), start=1):
        history.add(step, numbers)
        if place % 10 == 0:
            verdicts.append((step, judge(history)))
    for (step, before), (later, after) in pairwise(verdicts):
        if after.word == CANNOT_TELL != before.word:
            yield step, before, later


def replay(runs: Iterable[Stored]) -> None:
    """Print each withdrawal of these runs, and how many there are."""
    count = 0
    total = Counter[str]()
    for run in runs:
        count += 1
        for step, before, later in withdrawals(run):
            total[before.word] += 1
            print(f"{run.name}: {before.word} at step {step} ({before.why}), cannot tell at {later}")
    print(f"{count} runs, {sum(total.values())} withdrawals: {dict(total)}")


def main() -> None:
    """Write the tables into the page, or replay the runs."""
    if sys.argv[1:] == ["withdrawals"]:
        replay([*stored_runs(), *(run for run, _ in later_runs())])
        return
    page = STORED_TABLE.sub(lambda _: stored_table(), PAGE.read_text())
    PAGE.write_text(FORMS_TABLE.sub(lambda _: forms_table(), page))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
