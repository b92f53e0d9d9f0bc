"""The verdict on a run that goes on, step by step: what is new about it, and whether the run should end."""

from bisect import bisect_left
from collections.abc import Mapping
from statistics import fmean
from typing import NamedTuple

from gtpo_verl.monitor import explain
from gtpo_verl.monitor.series import TENTH, History
from gtpo_verl.monitor.verdict import (
    DEGRADED,
    FAILED,
    HALF,
    Verdict,
    current_verdict,
    not_finite,
    outcome_fell,
    unseen_loss,
)

NOT_FINITE_STEPS = 5
"""A run ends after so many steps in a row with a number that is not finite."""
LOOKS = 250
"""The verdict is asked for at each of so many steps, at every second of as many more, at every third, and so on."""
COMPLETIONS = 640
"""A failure ends a run after a window, and after the steps that have so many completions.

Of a number that is not logged at each step, such as a validation, each value counts as a step.
"""
VALIDATIONS_AWAITED = 3
"""After so many validations the next one is waited for."""
MOVES_TOLD = 3
"""Beside a verdict, so many other numbers that moved are named."""

_FAILURES = (not_finite, outcome_fell, unseen_loss)


class Alarm(NamedTuple):
    """A verdict that is new, or one that has lasted so long that the run should end.

    Args:
        sentence: what is wrong, since when, and what to do.
        ends: whether the run should end.
        is_unseen: whether it lost only what the reward need not see.
    """

    sentence: str
    ends: bool
    is_unseen: bool


class Watch:
    """Asks for the verdict on the steps so far.

    Args:
        framework: whose override is named.
        completions: of how many completions a step's numbers are the mean; None if that is unknown.
        limit: tokens at which a completion is cut off; None if that is unknown.
    """

    def __init__(self, framework: str, completions: int | None = None, limit: float | None = None) -> None:
        self.history = History(completions)
        self._framework = framework
        self._limit = limit
        self._told: set[tuple[str, str]] = set()
        self._lasting = dict.fromkeys(_FAILURES, 0)  # values in a row with this failure

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[Alarm]:
        """Take the numbers of one more step, and return what is new."""
        self.history.add(step, numbers)
        between = 1 + len(self.history.steps) // LOOKS
        if len(self.history.steps) % between:
            return []

        alarms = []
        verdict = current_verdict(self.history)  # `judge` would repeat what was told at an earlier step
        if verdict.word in (DEGRADED, FAILED) and self._is_new(verdict.number, verdict.word):
            alarms.append(Alarm(self._sentence(verdict), ends=False, is_unseen=False))

        for question in _FAILURES:
            failure = question(self.history)
            if failure is None or (question is outcome_fell and failure.word != FAILED):
                self._lasting[question] = 0
                continue
            self._lasting[question] += self._values_in_the_last(between, failure.number)
            if self._should_end(failure, self._lasting[question], step) and self._is_new(failure.number, "ends"):
                alarms.append(Alarm(self._sentence(failure), ends=True, is_unseen=question is unseen_loss))
        return alarms

    def _values_in_the_last(self, count: int, number: str) -> int:
        """Return how many values a number has in the last `count` steps."""
        first = self.history.steps[-count]
        series = self.history[number]
        values = 0
        for steps in (series.steps, series.bad_steps):
            values += len(steps) - bisect_left(steps, first)
        return values

    def _is_new(self, number: str, word: str) -> bool:
        """Return whether this was not told before; now it is."""
        is_new = (number, word) not in self._told
        self._told.add((number, word))
        return is_new

    def _sentence(self, verdict: Verdict) -> str:
        """Return a verdict with its step, what to do, and what else moved."""
        since = "" if verdict.since is None else f" since step {verdict.since}"
        parts = [f"{verdict.word.upper()}{since}: {verdict.why}."]
        if verdict.advice is not None:
            parts.append(verdict.advice.sentence.format(since=verdict.since))
        override = explain.override(verdict.advice, self.history, self._framework, self._limit)
        if override:
            parts.append(f"Try {override}.")
        others = [move for move in explain.moves(self.history) if move.row.number != verdict.number]
        for move in others[:MOVES_TOLD]:
            parts.append(f"{move.text().capitalize()} since step {move.since}.")
        return " ".join(parts)

    def _should_end(self, verdict: Verdict, lasting: int, step: int) -> bool:
        """Return whether a failure has lasted, is not half undone, and no validation that may outweigh it is due."""
        series = self.history[verdict.number]
        if series.not_finite_since() is not None:
            return lasting >= NOT_FINITE_STEPS

        steps = COMPLETIONS / self.history.completions if self.history.completions else 1
        if lasting <= max(verdict.window, steps):
            return False

        levels = series.levels(verdict.window)
        if verdict.number == "accuracy" and series.levels(series.windows()[-1]).best <= TENTH:
            return False  # too little to lose

        newest = fmean(series.values[-max(1, verdict.window // 4) :])
        if levels.best - newest < HALF * (levels.best - levels.last):
            return False
        return verdict.number == "validation" or not self._validation_is_due(verdict.since, step)

    def _validation_is_due(self, since: int | None, step: int) -> bool:
        """Return whether the next validation after a fall, which may outweigh it, has yet to come."""
        validation = self.history["validation"]
        if len(validation) < VALIDATIONS_AWAITED or since is None or validation.steps[-1] > since:
            return False
        return step < 2 * validation.steps[-1] - validation.steps[-2]
