"""What goes wrong in a run of reinforcement learning, from the numbers that it logs, under any advantage estimator.

One set of rules for `trainer.collapse_watch` and `gtpo-verl diagnose`. A `Watch` takes the numbers of a step at a time
and compares means over the last steps with the run's first and best ones; after a resume the first count as healthy.
The limits were tried on this project's stored runs.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from gtpo_verl.algorithm.config import LN2
from gtpo_verl.monitor.frameworks import remedy

STEPS, COMPLETIONS = 10, 640
"""A number is averaged over `STEPS` steps, and over more where these have fewer than `COMPLETIONS` completions: with
one prompt a step, ten hard questions in a row would look like a collapse."""

NUMBERS = {
    "ended": ("completions that end", True),
    "repetition": ("repetition", False),
    "equal": ("groups with equal rewards", None),
    "unearned": ("unequal groups, none right", False),
    "strict": ("format and nothing else", True),
    "format": ("format reward", True),
    "accuracy": ("accuracy", True),
    "reward": ("reward", True),
    "entropy": ("entropy, nats per token", None),
    "length": ("length, tokens", None),
    "mismatch": ("rollout/trainer mismatch", False),
}
"""What is read, in the order in which faults are looked for: what it is called, and whether more is better."""


class Trend:
    """Mean of a number over the last `window` steps: now, in the first window, and the highest and lowest so far.

    `floor` is what it falls to at worst, and `limit` what it cannot exceed.
    """

    def __init__(self, window: int) -> None:
        self.window, self.floor, self.limit = window, 0.0, math.inf
        self._last: deque[float] = deque(maxlen=window)
        self.first = self.now = math.nan
        self.best, self.lowest = -math.inf, math.inf

    @property
    def known(self) -> bool:
        """Whether there were so many steps."""
        return not math.isnan(self.first)

    def add(self, value: float) -> None:
        """Take the value of one more step."""
        self._last.append(value)
        if len(self._last) == self.window:
            self.now = sum(self._last) / self.window
            self.best, self.lowest = max(self.best, self.now), min(self.lowest, self.now)
            self.first = self.first if self.known else self.now


class Sign(NamedTuple):
    """A sign of a fault, which shows while `measure` of its numbers' trends exceeds `limit`.

    Args:
        numbers: names of the numbers, in the order of `measure`'s arguments.
        measure: how far it has gone; 0 if it cannot show.
        limit (float): beyond it the sign shows.
        meaning (str): what has happened.
        remedy (str): a kind of `Framework.remedies`.
        calibrated (bool): whether stored runs that failed show it.
    """

    numbers: tuple[str, ...]
    measure: Callable[..., float]
    limit: float
    meaning: str
    remedy: str = "lr"
    calibrated: bool = True


def drop(trend: Trend) -> float:
    """How far a number is below its best."""
    return trend.best - trend.now


def share_lost(trend: Trend) -> float:
    """How much of its best a number has lost, from 0 to 1; 0 for one that was never above its floor."""
    return drop(trend) / (trend.best - trend.floor) if trend.best > trend.floor else 0.0


def no_longer_end(ended: Trend) -> float:
    """The drop, if most completions ended once."""
    return drop(ended) if ended.best > 0.5 else 0


def equal_and_worse(equal: Trend, reward: Trend) -> float:
    """The share of groups with equal rewards, if these are not all right."""
    return equal.now if share_lost(reward) > 0.1 else 0


def equal_and_wrong(equal: Trend, accuracy: Trend) -> float:
    """The share of groups with equal rewards, if most answers are wrong."""
    return equal.now if accuracy.now < 0.5 else 0


def accuracy_lost(accuracy: Trend) -> float:
    """The share lost, if it is no small number of completions."""
    return share_lost(accuracy) if drop(accuracy) > 0.1 else 0


def noise(entropy: Trend) -> float:
    """Entropy now against the first, or half of ln 2."""
    return entropy.now / max(LN2 / 2, entropy.first)


def growth(length: Trend) -> float:
    """Length as a share of its limit, if it was short at first."""
    return length.now / length.limit if length.first < 0.7 * length.limit else 0


SIGNS = (
    Sign(("ended",), no_longer_end, 0.1, "some completions no longer end"),
    Sign(("ended",), lambda ended: 1 - ended.best, 0.5, "most completions are cut off, from the start", "limit"),
    Sign(("repetition",), lambda x: x.now - x.lowest, 0.2, "completions repeat themselves", calibrated=False),
    Sign(("equal", "reward"), equal_and_worse, 0.95, "nearly all groups have equal rewards, below the best", "filter"),
    Sign(
        ("equal", "accuracy"),
        equal_and_wrong,
        0.95,
        "nearly all groups have equal rewards, and most answers are wrong",
        "filter",
    ),
    Sign(("unearned",), lambda x: x.now, 0.5, "most unequal groups have no right answer", "filter", calibrated=False),
    Sign(("strict",), drop, 0.1, "completions are no longer the format alone, which the format reward does not see"),
    Sign(("format",), share_lost, 0.5, "completions lose their format"),
    Sign(("accuracy",), accuracy_lost, 0.5, "accuracy fell below half of its best"),
    Sign(("reward",), share_lost, 0.5, "the reward fell below half of its best"),
    Sign(("entropy",), noise, 2, "the policy drifts towards noise", calibrated=False),
    Sign(("length",), growth, 0.9, "completions grow to the limit", "limit"),
    Sign(
        ("mismatch",), lambda x: x.now / max(x.first, 0.01), 3, "rollout and trainer part", "correct", calibrated=False
    ),
)


def window(completions_per_step: float) -> int:
    """Steps over which numbers are averaged."""
    return max(STEPS, math.ceil(COMPLETIONS / completions_per_step))


class Watch:
    """The signs in one run.

    Args:
        windows: steps over which each number is averaged, by its name; what is not in it is not watched.
        framework (str): whose overrides are the remedies.
        limit (float | None): tokens at which completions are cut off.
        signs: what to look for.

    Attributes:
        trends: of each number. The reward's floor is the smallest reward that was seen, if that is below 0.
        showing: the signs that show, and the step from which on.
        lr (float): the highest learning rate; 0 if none was logged.
    """

    def __init__(
        self,
        windows: Mapping[str, int],
        framework: str,
        limit: float | None = None,
        signs: tuple[Sign, ...] = SIGNS,
    ):
        self.trends = {name: Trend(steps) for name, steps in windows.items()}
        self.showing: dict[Sign, int] = {}
        self.lr = 0.0
        self._framework, self._limit = framework, limit
        self._signs = [sign for sign in signs if windows.keys() >= set(sign.numbers)]
        self._named: set[Sign | str] = set()
        if limit and "length" in windows:
            self.trends["length"].limit = limit

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[tuple[str, bool]]:
        """Take one more step.

        Returns:
            The signs that show for the first time, each as a sentence, and whether its limit is calibrated.
        """
        alarms = []
        if "reward" in self.trends:
            self.trends["reward"].floor = min(self.trends["reward"].floor, numbers.get("lowest", 0.0))
        self.lr = max(self.lr, numbers.get("lr", 0.0))
        for name in self.trends.keys() & numbers.keys():
            value = numbers[name]
            if math.isfinite(value):
                self.trends[name].add(value)
            elif name not in self._named:
                self._named.add(name)
                alarms.append((f"{label(name)} is {value}. Try: {self.remedy('lr')}", True))
        for sign in self._signs:
            if self.value(sign) <= sign.limit:
                self.showing.pop(sign, None)
                continue
            self.showing.setdefault(sign, step)
            if sign not in self._named:
                self._named.add(sign)
                alarms.append((self._sentence(sign), sign.calibrated))
        return alarms

    def value(self, sign: Sign) -> float:
        """A sign's measure, 0 as long as a number has no trend."""
        trends = [self.trends[name] for name in sign.numbers]
        return sign.measure(*trends) if all(trend.known for trend in trends) else 0.0

    def margin(self, name: str) -> float:
        """What an outcome must lose to be called lost: 0.1, of the reward a tenth of its best."""
        trend = self.trends[name]
        return 0.1 * (trend.best - trend.floor if name == "reward" else 1)

    def lost(self, known: Collection[str]) -> list[str]:
        """Which of the `known` outcomes are lost: below half of their best or below their start, by the `margin`.

        The reward is one only where accuracy is not known.
        """
        found = []
        for name in outcomes(known):
            trend, margin = self.trends[name], self.margin(name)
            half = (trend.best + trend.floor) / 2
            if trend.known and trend.now < max(trend.first - margin, min(half, trend.best - margin)):
                found.append(name)
        return found

    def remedy(self, kind: str) -> str:
        """The override of a remedy, in the run's framework."""
        return remedy(kind, self._framework, self.lr, self._limit)

    def _sentence(self, sign: Sign) -> str:
        trends = ((name, self.trends[name]) for name in sign.numbers)
        numbers = ", ".join(f"{label(name)} {x.now:.3g} (first {x.first:.3g}, best {x.best:.3g})" for name, x in trends)
        steps = self.trends[sign.numbers[0]].window
        note = "" if sign.calibrated else " (uncalibrated)"
        return f"{sign.meaning}{note}: {numbers}, means over {steps} steps. Try: {self.remedy(sign.remedy)}"


def label(name: str) -> str:
    """What a number is called."""
    return NUMBERS[name][0]


def outcomes(known: Collection[str]) -> list[str]:
    """The numbers that decide whether a run has failed."""
    return [name for name in ("ended", "strict", "accuracy" if "accuracy" in known else "reward") if name in known]
