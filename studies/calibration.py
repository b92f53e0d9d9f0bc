"""What `gtpo-verl diagnose` says of the runs stored here, and how often it takes a verdict back.

    python -m studies.calibration                        writes the tables in docs/results/diagnose/calibration.md
    python -m studies.calibration withdrawals [LOG ...]  asks for the verdict at every tenth step of each run, of the
                                                         cases of the tests and of these logs, in two minutes, and
                                                         prints each time that a verdict became "cannot tell"

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
from gtpo_verl.tools.diagnose.report import read_run
from studies import block10, verl_runs
from studies.plan import ROOT, Cell, blocks, complete, number, one_prompt, planned, read_log

PAGE = ROOT / "docs/results/diagnose/calibration.md"
CASES = ROOT / "tests/tools/diagnose/cases"
STORED_TABLE = re.compile(r"^\| stored runs \| (?:.+\n)+", re.MULTILINE)
FORMS_TABLE = re.compile(r"^\| the log has \| (?:.+\n)+", re.MULTILINE)
FIRST = ("1a", "1b", "1c", "2", "3", "4", "5", "6", "7")
"""Blocks whose runs are in the first table; the others came after its rules."""
WORDS = (FAILED, DEGRADED, CANNOT_TELL, HEALTHY)
COMPLETIONS = 640
LIMIT = 64
"""Tokens of a completion under verl."""
MODEL = "0.4 M parameters"
MANY_PROMPTS = "0.4 M parameters, 8 prompts a step"
UNDER_VERL = "0.4 M parameters, under verl"
REAL_MODEL = "SmolLM2-135M"
VERLS_NUMBERS = ("reward", "highest", "terminated", "length", "entropy", "grad_norm")
FORMS = {
    "all that this package logs": None,
    "all but the exact format": {"exact_format": False},
    "what verl logs by itself": dict.fromkeys(VERLS_NUMBERS, True),
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
"""What the study's own loop calls our numbers."""

Steps = dict[int, dict[str, float]]
Counts = Counter[tuple[bool, str]]
"""How often a run that is lost, or is not, has a verdict."""


class Stored(NamedTuple):
    """A stored run, with our numbers at each step.

    Args:
        completions: of how many completions a step's numbers are; None if that is unknown.
    """

    name: str
    model: str
    completions: int | None
    steps: Steps


def of_fast_loop(cell: Cell, seed: int) -> Stored:
    """Return a run of the study's own loop."""
    logged = read_log(cell.log(seed))["steps"]
    steps: Steps = {}
    for place in range(len(logged["acc"])):
        numbers = {}
        for ours, theirs in _FAST.items():
            if theirs in logged:
                numbers[ours] = float(logged[theirs][place])
        numbers["reward"] = numbers["format"] + 10 * numbers["accuracy"]
        numbers["highest"] = 20.0
        steps[place + 1] = numbers

    completions = 12 if cell.method.endswith("G12") else 8 * cell.start.prompts
    return Stored(name=_name(cell.log(seed)), model=_model(cell), completions=completions, steps=steps)


def _model(cell: Cell) -> str:
    if cell.start.is_real:
        return REAL_MODEL
    return MODEL if cell.start.prompts == 1 else MANY_PROMPTS


def stored_runs() -> Iterator[Stored]:
    """Yield the runs of the first blocks, and those under verl, that have two windows of 640 completions."""
    for run in _first_runs():
        if len(run.steps) >= 2 * _window(run):
            yield run


def _first_runs() -> Iterator[Stored]:
    later = set()
    for block in map(number, blocks()):
        if block not in FIRST:
            later.update(planned(block))
    for cell, seed in complete([*one_prompt(), *planned()]):
        if (cell, seed) not in later:
            yield of_fast_loop(cell, seed)
    for cell, seed in verl_runs.runs():
        name = _name(verl_runs.log_of(cell, seed))
        steps = _translated(verl_runs.read_steps(cell, seed))
        yield Stored(name=name, model=UNDER_VERL, completions=8, steps=steps)
    for path in sorted((ROOT / "docs/results/cpu").glob("*.jsonl")):
        steps = _translated(logs.read_log(path).steps)
        yield Stored(name=_name(path), model=UNDER_VERL, completions=64, steps=steps)


def _translated(steps: Mapping[int, Mapping[str, float]]) -> Steps:
    return {step: translate(metrics, "verl", LIMIT) for step, metrics in steps.items()}


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT)).partition(".json")[0]


def _window(run: Stored) -> int:
    """Return the steps that have 640 completions, at least ten."""
    return max(10, -(-COMPLETIONS // (run.completions or COMPLETIONS)))


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
    counts: dict[str, Counts] = {}
    for run in stored_runs():
        counts.setdefault(run.model, Counter())[lost_half(run), verdict(run).word] += 1
    return _table("stored runs", ("lost half", "others"), dict(sorted(counts.items())))


def forms_table() -> str:
    """Return a row for each kind of log: the verdicts on SmolLM2's later runs that failed, and on the others."""
    counts: dict[str, Counts] = {form: Counter() for form in FORMS}
    for run, has_failed in later_runs():
        for form, numbers in FORMS.items():
            counts[form][has_failed, verdict(_with(run, numbers)).word] += 1
    return _table("the log has", ("failed runs", "others"), counts)


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
    only = {name for name, is_kept in numbers.items() if is_kept}
    steps: Steps = {}
    for step, logged in run.steps.items():
        names = only & logged.keys() if only else logged.keys() - numbers.keys()
        steps[step] = {name: value for name, value in logged.items() if name in names}
    return run._replace(steps=steps)


def _table(first: str, kinds: tuple[str, str], counts: Mapping[str, Counts]) -> str:
    """Return a table in Markdown: of each row the verdicts on the runs that are lost, and on the others."""
    head = [first]
    for kind in kinds:
        head += [f"{kind}: {word}" for word in WORDS]
    rows = [head, ["---"] * len(head)]
    for name, of_row in counts.items():
        cells = [name]
        for is_lost in (True, False):
            cells += [str(of_row[is_lost, word]) for word in WORDS]
        rows.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


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


def logs_as_runs(paths: Iterable[Path]) -> Iterator[Stored]:
    """Yield the runs in these logs, without those that `diagnose` does not read."""
    for path in paths:
        try:
            run = read_run(path)
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        steps = {step: run.log.steps[step] for step in sorted(run.log.steps)}
        yield Stored(name=str(path), model="", completions=run.completions, steps=steps)


def replay(kind: str, runs: Iterable[Stored]) -> None:
    """Print each withdrawal of these runs as it is found, and how many there are."""
    count = 0
    total = Counter[str]()
    for run in runs:
        count += 1
        for step, before, later in withdrawals(run):
            total[before.word] += 1
            print(f"{run.name}: {before.word} at step {step} ({before.why}), cannot tell at {later}", flush=True)
        if count % 100 == 0:
            print(f"… {count} {kind}", file=sys.stderr, flush=True)
    print(f"{count} {kind}: {sum(total.values())} withdrawals {dict(total)}", flush=True)


def replay_all(paths: Sequence[Path]) -> None:
    """Replay the stored runs, the later ones, the cases of the tests and these logs."""
    replay("stored runs", stored_runs())
    replay("later runs of SmolLM2", (run for run, _ in later_runs()))
    replay("cases", logs_as_runs(sorted(CASES.rglob("*.gz"))))
    if paths:
        replay("logs", logs_as_runs(paths))


def main() -> None:
    """Write the tables into the page, or replay the runs."""
    if sys.argv[1:2] == ["withdrawals"]:
        replay_all([Path(path) for path in sys.argv[2:]])
        return
    page = STORED_TABLE.sub(lambda _: stored_table(), PAGE.read_text())
    PAGE.write_text(FORMS_TABLE.sub(lambda _: forms_table(), page))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
