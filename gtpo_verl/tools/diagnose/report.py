"""The report on a run: what was read of it, the verdict, and what moved."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from gtpo_verl.links import DOCS
from gtpo_verl.monitor import explain
from gtpo_verl.monitor.explain import LABELS, LESS_IS_BETTER, Move, label
from gtpo_verl.monitor.frameworks import FRAMEWORKS, PART, limit_of, translate, validation_results
from gtpo_verl.monitor.series import History, Series
from gtpo_verl.monitor.verdict import CANNOT_TELL, DEGRADED, FAILED, HEALTHY, OUTCOMES, Verdict, judge
from gtpo_verl.run.dumps import HEADER_NAME
from gtpo_verl.tools.diagnose.entries import Log
from gtpo_verl.tools.diagnose.logs import read_log

if TYPE_CHECKING:
    from gtpo_verl.tools.diagnose.rollout_stats import Rollouts

STATUS = {HEALTHY: 0, DEGRADED: 1, FAILED: 2, CANNOT_TELL: 3}
MOVES = 5
"""What moved is listed up to so many numbers."""
_COUNTED = ("terminated", "cut", "exact_format")
"""Shares of a step's completions that are counted one by one, so that they say how many there are."""
_MOST_COMPLETIONS = 2000
_STEPS_COUNTED = 1000
"""Of a longer log the first steps are enough to say how many completions they have."""
_ROUNDED = 1e-4
"""What a logged share may be off, since a console rounds it."""
_MOST_DEVIATIONS = 1e6
"""A change without any noise has infinitely many, which JSON does not have."""


class Run(NamedTuple):
    """What was read of a run.

    Args:
        log: with our numbers (`explain.LABELS`) at each step.
        completions: of how many completions a step's numbers are; None if that is unknown.
        limit: tokens at which a completion is cut off; None if that is unknown.
        rollouts: its completions; None if none were given.
    """

    log: Log
    completions: int | None
    limit: float | None
    rollouts: "Rollouts | None"


def read_run(
    path: Path,
    rollouts: Path | None = None,
    tokenizer: str | None = None,
    limit: float | None = None,
    completions: int | None = None,
) -> Run:
    """Read what a run left.

    Args:
        path: what the trainer logged, or a folder of rollouts alone.
        rollouts: a folder of rollouts beside it.
        tokenizer: the run's, which verl's rollouts need.
        limit: tokens at which a completion is cut off; if it is not given, what the log says.
        completions: how many there are in a step; if it is not given, what the log says.

    Raises:
        ValueError: nothing can be made of a file; it names the file and a remedy.
    """
    has_rollouts = path.is_dir() and ((path / HEADER_NAME).exists() or any(path.glob("[0-9]*.jsonl")))
    if rollouts is None and has_rollouts:
        log = Log(name=str(path), framework="verl", steps={}, config={}, notes=[])
        rollouts = path
    else:
        log = _same_validation(read_log(path))
        logged = (translate(metrics, log.framework) for metrics in log.steps.values())
        limit = limit or log.config.get("limit") or limit_of(logged)
        log = _translated(log, limit)
    added = None
    if rollouts is not None:
        added = _add_rollouts(log, rollouts, tokenizer, limit)
    if not _has_two_values_of_a_number(log):
        raise ValueError(f"{log.name} has one step, and nothing to compare it with: rerun once it has more steps")
    return Run(log=log, completions=completions or completions_per_step(log), limit=limit, rollouts=added)


def _has_two_values_of_a_number(log: Log) -> bool:
    seen = set[str]()
    for numbers in log.steps.values():
        ours = numbers.keys() & LABELS.keys()
        if seen & ours:
            return True
        seen |= ours
    return False


def _translated(log: Log, limit: float | None) -> Log:
    """Return a log with our numbers; a ValueError says what is missing if there is no outcome in it."""
    steps = {}
    for step, logged in log.steps.items():
        numbers = translate(logged, log.framework, limit)
        if numbers.keys() & LABELS.keys():
            steps[step] = numbers
    metrics = set[str]().union(*log.steps.values())
    known = set[str]().union(*steps.values())
    if not known:
        raise ValueError(f"{log.name} has no metrics of {log.framework} that diagnose reads: {DOCS}/diagnose.md")
    if not known & {*OUTCOMES}:
        similar = [name for name in sorted(metrics) if re.search(r"reward|score", name) and "std" not in name]
        if similar:
            raise ValueError(
                f"{log.name} has {', '.join(similar[:3])}, which diagnose does not read as {log.framework}'s reward: "
                f"rename it to {FRAMEWORKS[log.framework].metrics['reward'][0]}"
            )
        if known <= {"loss", "grad_norm", "lr", "entropy"}:
            raise ValueError(
                f"{log.name} has no reward that diagnose reads; if it is of supervised training, give an RL run"
            )
    return log._replace(steps=steps)


def _add_rollouts(log: Log, rollouts: Path, tokenizer: str | None, limit: float | None) -> "Rollouts":
    """Add to each step of a log the numbers that its completions give and it lacks; return the completions."""
    from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts

    added = read_rollouts(rollouts, tokenizer, limit, max(log.steps, default=math.inf))
    if added.left_out:
        log.notes.append(f"{added.left_out} steps of {rollouts} are left out: they are after the log's last")
    for step, numbers in added.steps.items():
        logged = log.steps.get(step, {})
        _check_length(log, rollouts, step, numbers["length"], logged.get("length"), added.is_text)
        log.steps[step] = numbers | logged
    return added


def _check_length(
    log: Log, rollouts: Path, step: int, length: float, logged_length: float | None, is_text: bool
) -> None:
    """Raise a ValueError if texts have another mean length, in tokens, than the log says of the same step.

    A text lacks its EOS, and may be cut into other tokens than those that were sampled. A dump is not compared: it has
    a completion's own tokens, of some groups, where a log may count what an agent's tools wrote.
    """
    if not is_text or logged_length is None:
        return
    if not 0.8 * logged_length <= length + 1 <= 1.25 * logged_length + 2:
        raise ValueError(
            f"{rollouts} has {length:.0f} tokens a completion at step {step}, {log.name} {logged_length:.0f}: "
            "give --tokenizer of the run, and rollouts of the same run"
        )


def _same_validation(log: Log) -> Log:
    """Return a log without the results that only some of its validations have.

    Where a set is added in the middle of a run, the mean of all sets would jump.
    """
    validations = []
    for metrics in log.steps.values():
        results = validation_results(metrics, log.framework)
        if results:
            validations.append(frozenset(results))
    if not validations:
        return log
    kept = frozenset.intersection(*validations)
    if not kept:  # as where one before training logs accuracies, and the others rewards
        kept = Counter(validations).most_common(1)[0][0]
    left_out = frozenset.union(*validations) - kept
    if not left_out:
        return log
    note = f"left out, since not every validation has it: {', '.join(sorted(left_out))}"
    steps = {}
    for step, metrics in log.steps.items():
        steps[step] = {name: value for name, value in metrics.items() if name not in left_out}
    return log._replace(steps=steps, notes=[*log.notes, note])


def completions_per_step(log: Log) -> int | None:
    """Return of how many completions a step's numbers are.

    That is a step's tokens divided by those of a completion with its prompt, or what verl's config says, or the
    smallest number by which all shares of completions are whole; None if the log has none of this.
    """
    quotients = []
    for numbers in log.steps.values():
        if numbers.keys() >= {"tokens", "prompt", "length"}:
            quotients.append(numbers["tokens"] / max(numbers["prompt"] + numbers["length"], 1))
    quotients = [quotient for quotient in quotients if math.isfinite(quotient)]
    if quotients and median(quotients) >= 1:
        return round(median(quotients))
    if log.config.keys() >= {"prompts", "n"}:
        return round(log.config["prompts"] * log.config["n"])

    shares = set[float]()
    for numbers in islice(log.steps.values(), _STEPS_COUNTED):
        shares.update(numbers[name] for name in _COUNTED if 0 < numbers.get(name, 0) < 1)
    if not shares:
        return None
    for count in range(2, _MOST_COMPLETIONS + 1):
        if all(abs(share * count - round(share * count)) < _ROUNDED * count for share in shares):
            return count
    return None


def report_on(run: Run) -> dict[str, Any]:
    """Return the report, as `--json` prints it."""
    history = _history_of(run)
    steps = list(history.steps)
    verdict = judge(history)
    moves = [move for move in explain.moves(history) if move.row.number != verdict.number]
    constant = explain.constant_parts(history)
    outcomes = [name for name in OUTCOMES if len(history[name])]
    window = verdict.window or max((history[name].window() for name in outcomes), default=1)
    return {
        "log": run.log.name,
        "framework": run.log.framework,
        "steps": [steps[0], steps[-1]],
        "entries": len(steps),
        "notes": [*run.log.notes, *_notes_on_not_finite(history)],
        "completions": run.completions,
        "means_over": window,
        "limit": run.limit,
        "outcome": outcomes[0] if outcomes else None,
        "number": verdict.number or None,
        "verdict": verdict.word,
        "why": verdict.why + _caution(history, verdict),
        "since": verdict.since,
        "advice": "" if verdict.advice is None else verdict.advice.sentence.format(since=verdict.since),
        "try": explain.override(verdict.advice, history, run.log.framework, run.limit),
        "completions_shown": _completions_at_worst(verdict.number, verdict.is_worse_high, run),
        "moved": [_move_report(move, history, run) for move in moves[:MOVES]],
        "constant_parts": {name.removeprefix(PART): value for name, value in constant.items()},
        "numbers": _numbers(history, window),
        "shared_tokens": run.rollouts.shares() if run.rollouts else None,
        "not_logged": [name for name in LABELS if name not in history.series],
    }


def window_text(report: Mapping[str, Any]) -> str:
    """Return what the levels of a report are means over. Of a number that is logged less often it is shorter."""
    window = report["means_over"]
    first, last = report["steps"]
    steps_per_entry = (last - first) / max(report["entries"] - 1, 1)
    if steps_per_entry >= 1.5:
        return f"means over up to {window} entries ({window * steps_per_entry:.0f} steps)"
    return f"means over up to {window} step{'' if window == 1 else 's'}"


def _history_of(run: Run) -> History:
    """Return the numbers of a run by step."""
    history = History(run.completions)
    steps = sorted(run.log.steps)
    for step in steps:
        history.add(step, run.log.steps[step])
    if not history.most("lr") and "lr" in run.log.config:  # verl's console rounds a small one to 0.000
        history.series["lr"] = Series()
        history.series["lr"].add(steps[-1], run.log.config["lr"])
    return history


def _caution(history: History, verdict: Verdict) -> str:
    """Return what to add to the verdict that a run is healthy by its reward alone; nothing to another one."""
    is_alone = not len(history["validation"]) and not len(history["accuracy"])
    if verdict.word == HEALTHY and is_alone:
        return " (by the reward alone, which cannot show what it does not see: log accuracy or a validation)"
    return ""


def _move_report(move: Move, history: History, run: Run) -> dict[str, Any]:
    """Return a move, with what to try and the completions that show it best."""
    return {
        "number": move.row.number,
        "meaning": move.row.meaning,
        "first": move.first,
        "last": move.last,
        "since": move.since,
        "deviations": min(move.deviations, _MOST_DEVIATIONS),
        "advice": move.row.advice.sentence.format(since=move.since),
        "try": explain.override(move.row.advice, history, run.log.framework, run.limit),
        "completions": _completions_at_worst(move.row.number, move.row.worse == "up", run),
    }


def _numbers(history: History, window: int) -> dict[str, dict[str, float | None]]:
    """Return the levels and the last value of each number that has two values or more, the parts of the reward last."""
    parts = sorted(name for name in history.series if name.startswith(PART))
    numbers = {}
    for name in [*LABELS, *parts]:
        series = history[name]
        if len(series) < 2:
            continue
        levels = series.levels(min(window, max(1, len(series) // 3)))
        is_broken = series.not_finite_since() is not None
        row = {"start": levels.first, "now": levels.last, "value": None if is_broken else series.values[-1]}
        if name in LESS_IS_BETTER:
            row["best"] = levels.lowest
        elif name in (*OUTCOMES, "terminated", "exact_format", "format") or name.startswith(PART):
            row["best"] = levels.best
        numbers[name] = row
    return numbers


def _notes_on_not_finite(history: History) -> list[str]:
    """Return a note for each number that was not finite at some steps, and is again."""
    notes = []
    for name, series in history.series.items():
        if series.bad_steps and series.not_finite_since() is None and name in LABELS:
            count = len(series.bad_steps)
            last = series.bad_steps[-1]
            note = f"{label(name)} was not finite in {count} steps, last in step {last}"
            notes.append(f"{note}: no failure if the trainer skipped them")
    return notes


def _completions_at_worst(number: str, is_worse_high: bool, run: Run) -> list[dict[str, Any]]:
    """Return the three completions of the last steps that show a number at its worst, without those at its best, 1."""
    if run.rollouts is None or not number:
        return []
    having = []
    for completion in run.rollouts.completions:
        if number in completion and (is_worse_high or completion[number] != 1):
            having.append(completion)
    sign = -1 if is_worse_high else 1
    worst = sorted(having, key=lambda completion: (sign * completion[number], -completion["step"]))[:3]
    shown = []
    for completion in worst:
        shown.append({"step": completion["step"], number: completion[number], "text": completion["text"]})
    return shown
