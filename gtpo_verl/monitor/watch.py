"""The verdict on a run in progress, step by step: what is new about it, and whether the run should end."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import NamedTuple, TypeAlias

from gtpo_verl.monitor import explain
from gtpo_verl.monitor.series import TENTH, History
from gtpo_verl.monitor.verdict import (
    DEGRADED,
    FAILED,
    HALF,
    VALIDATIONS,
    Verdict,
    current_verdict,
    not_finite,
    outcome_fell,
    unseen_loss,
)

NOT_FINITE_STEPS = 5
"""A run ends once a number was not finite in this many steps in a row."""
STEPS_PER_STAGE = 250
"""The verdict is computed at each of the first 250 steps, at every second of the next 250, at every third of the 250
after those, and so on."""
MIN_COMPLETIONS = 640
"""A failure ends a run once it has lasted for more values than the verdict's window, and for more steps than it takes
to generate this many completions.

Of a number that is not logged at each step, such as a validation, each value counts as a step.
"""
MIN_VALIDATIONS_TO_WAIT = VALIDATIONS - 1
"""With this many validations the next one is waited for: then there are enough to outweigh a fall."""
MAX_MOVES_TOLD = 3
"""Beside a verdict, at most this many other numbers that moved are named."""

_Question: TypeAlias = Callable[[History], Verdict | None]
_FAILURE_QUESTIONS: tuple[_Question, ...] = (not_finite, outcome_fell, unseen_loss)


class Alarm(NamedTuple):
    """A verdict that is new, or one that has lasted so long that the run should end.

    Args:
        text: what is wrong, since when, what to do, and what else moved.
        ends: whether the run should end.
        is_unseen: whether the run lost only EOS or its format, which the reward need not see.
    """

    text: str
    ends: bool
    is_unseen: bool


class Watch:
    """Asks for the verdict on the steps so far.

    Args:
        framework: the framework whose override an alarm suggests.
        completions: how many completions a step's numbers are averaged over; None if that is unknown.
        limit: tokens at which a completion is cut off; None if that is unknown.
    """

    def __init__(self, framework: str, completions: int | None = None, limit: float | None = None) -> None:
        self.history = History(completions)
        self._framework = framework
        self._limit = limit
        self._told: set[tuple[str, str]] = set()
        self._counts: dict[str, int] = {}  # how many values each number had at the last look
        # Values in a row with which this question found a failure. They may be of two numbers: a validation that fell
        # confirms a fall in training, and goes on from it. (Of a number that is not finite bad steps count, see below.)
        self._lasting = dict.fromkeys(_FAILURE_QUESTIONS, 0)

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[Alarm]:
        """Take the numbers of one more step, and return what is new."""
        self.history.add(step, numbers)
        count = len(self.history.steps)
        steps_between = 1 + count // STEPS_PER_STAGE
        if count % steps_between:
            return []

        alarms = []
        # Not `judge`: where the steps so far decide nothing, it repeats an earlier verdict, perhaps by another word.
        verdict = current_verdict(self.history)
        if verdict.word in (DEGRADED, FAILED) and self._tell_once(verdict.number, verdict.word):
            alarms.append(Alarm(self._text(verdict), ends=False, is_unseen=False))

        for question in _FAILURE_QUESTIONS:
            failure = question(self.history)
            # `outcome_fell` also finds what is only degraded. `unseen_loss` never says "failed", and counts anyway.
            if failure is None or (question is outcome_fell and failure.word != FAILED):
                self._lasting[question] = 0
                continue
            self._lasting[question] += self._values_since_the_last_look(failure.number)
            if self._has_to_end(question, failure) and self._tell_once(failure.number, "ends"):
                alarms.append(Alarm(self._text(failure), ends=True, is_unseen=question is unseen_loss))
        self._counts = {name: len(series) for name, series in self.history.series.items()}
        return alarms

    def _values_since_the_last_look(self, number: str) -> int:
        """Return how many values a number has got since then."""
        return len(self.history[number]) - self._counts.get(number, 0)

    def _tell_once(self, number: str, word: str) -> bool:
        """Note that this is told now, and return whether it had not been told before."""
        is_new = (number, word) not in self._told
        self._told.add((number, word))
        return is_new

    def _text(self, verdict: Verdict) -> str:
        """Return a verdict with its step, what to do, and what else moved."""
        since = "" if verdict.since is None else f" since step {verdict.since}"
        parts = [f"{verdict.word.upper()}{since}: {verdict.why}."]
        if verdict.advice is not None:
            parts.append(verdict.advice.sentence.format(since=verdict.since))
        override = explain.override(verdict.advice, self.history, self._framework, self._limit)
        if override:
            parts.append(f"Try {override}.")
        others = [move for move in explain.moves(self.history) if move.row.number != verdict.number]
        for move in others[:MAX_MOVES_TOLD]:
            text = move.text()
            parts.append(f"{text[0].upper()}{text[1:]} since step {move.since}.")  # KL and EOS stay in capitals
        return " ".join(parts)

    def _has_to_end(self, question: _Question, failure: Verdict) -> bool:
        """Return whether the run should end: the failure has lasted, has not recovered by half, and no validation that
        may outweigh it is due. A number that is not finite only has to last."""
        series = self.history[failure.number]
        if question is not_finite:
            in_a_row = len(series.bad_steps) - bisect_left(series.bad_steps, failure.since or 0)
            return in_a_row >= NOT_FINITE_STEPS

        steps = MIN_COMPLETIONS / self.history.completions if self.history.completions else 1
        if self._lasting[question] <= max(failure.window, steps):
            return False

        # A short window may have a lucky best.
        longest = series.windows()[-1]
        if failure.number == "accuracy" and series.levels(longest).best <= TENTH:
            return False  # too little to lose

        levels = series.levels(failure.window)
        newest = fmean(series.values[-max(1, failure.window // 4) :])
        if levels.best - newest < HALF * (levels.best - levels.last):
            return False
        return failure.number == "validation" or not self._validation_is_due(failure.since)

    def _validation_is_due(self, since: int | None) -> bool:
        """Return whether no validation has come since the fall, and the next one, which may outweigh it, is to come."""
        validation = self.history["validation"]
        if len(validation) < MIN_VALIDATIONS_TO_WAIT or since is None or validation.steps[-1] > since:
            return False
        next_validation = 2 * validation.steps[-1] - validation.steps[-2]
        return self.history.steps[-1] < next_validation
