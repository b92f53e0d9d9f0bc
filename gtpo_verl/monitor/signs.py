"""What goes wrong in a run of reinforcement learning, from the numbers that it logs, under any advantage estimator.

One set of rules for `trainer.collapse_watch` and `gtpo-verl diagnose`. A `Watch` takes the numbers of a step at a time
and compares means over the last steps with the run's first and best ones; after a resume the first count as healthy.
The limits were tried on this project's stored runs.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from gtpo_verl.monitor.frameworks import PART, remedy

STEPS, COMPLETIONS = 10, 640
"""A number is averaged over `STEPS` steps, and over more where these have fewer than `COMPLETIONS` completions: with
one prompt a step, ten hard questions in a row would look like a collapse."""

NUMBERS = {
    "ended": ("completions that end", True),
    "aborted": ("aborted completions", False),
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
    "kl": ("KL", False),
    "grad_norm": ("gradient norm", None),
    "loss": ("loss", None),
}
"""What is read, in the order in which faults are looked for: what it is called, and whether more is better."""
SHARES = ("ended", "strict", "accuracy")


class Trend:
    """Mean of a number over the last `window` steps: now, in the first window, and the highest and lowest so far.

    `floor` is what it falls to at worst, and `limit` what it cannot exceed. A value that is not finite enters no mean,
    and its step is one of `bad_steps`; `broken_since` is the first of the last steps that has one.
    """

    def __init__(self, window: int) -> None:
        self.window, self.floor, self.limit, self.is_share = window, 0.0, math.inf, False
        self._last: deque[float] = deque(maxlen=window)
        self._bad: deque[bool] = deque(maxlen=window)
        self._squares, self._sums = 0.0, [0.0]
        self.first = self.now = math.nan
        self.best, self.lowest = -math.inf, math.inf
        self.highest_step, self.lowest_step = -math.inf, math.inf
        self.bad_steps: list[int] = []
        self.broken_since = self._zeros = self._first_zeros = 0

    @property
    def count(self) -> int:
        """How many finite values there were."""
        return len(self._sums) - 1

    @property
    def known(self) -> bool:
        """Whether a whole window of values was seen."""
        return not math.isnan(self.first)

    @property
    def broken(self) -> float:
        """The share of the last steps whose values were not finite, if the last one's was not."""
        return sum(self._bad) / self.window if self._bad and self._bad[-1] else 0.0

    @property
    def deviation(self) -> float:
        """Standard deviation of a step's value, from the differences between consecutive ones."""
        return math.sqrt(self._squares / (2 * (self.count - 1))) if self.count > 1 else math.inf

    @property
    def noise(self) -> float:
        """Standard error of a window's mean."""
        return self.deviation / math.sqrt(self.window)

    @property
    def margin(self) -> float:
        """What it must lose to be called lost: a tenth, of what it was at best if it is no share, and beyond noise."""
        return max(0.1 * (1 if self.is_share else self.best - self.floor), 4 * self.noise)

    def thirds(self) -> tuple[float, float, float]:
        """Means of the first and of the last third of its values, and two standard errors of their difference."""
        third = self.count // 3
        first, last = self._sums[third] / third, (self._sums[-1] - self._sums[-1 - third]) / third
        return first, last, 2 * self.deviation * math.sqrt(2 / third)

    def is_zero(self) -> float:
        """1 if two windows or more, from the first on, had hardly a value but 0."""
        often = self._zeros >= 0.95 * self.count and self._first_zeros >= 0.9 * self.window
        return float(often and self.count >= 2 * self.window)

    def add(self, step: int, value: float) -> None:
        """Take the value of one more step."""
        if not any(self._bad):
            self.broken_since = step
        self._bad.append(not math.isfinite(value))
        if self._bad[-1]:
            self.bad_steps.append(step)
            return
        if self._last:
            self._squares += (value - self._last[-1]) ** 2
        self._zeros += value == 0
        self._last.append(value)
        self._sums.append(self._sums[-1] + value)
        self.highest_step, self.lowest_step = max(self.highest_step, value), min(self.lowest_step, value)
        if len(self._last) == self.window:
            self.now = sum(self._last) / self.window
            self.best, self.lowest = max(self.best, self.now), min(self.lowest, self.now)
            if not self.known:
                self.first, self._first_zeros = self.now, self._zeros


class Sign(NamedTuple):
    """A sign of a fault, which shows while `measure` of its numbers' trends exceeds `limit`.

    Args:
        numbers: names of the numbers, in the order of `measure`'s arguments.
        measure: how far it has gone; 0 if it cannot show.
        limit (float): beyond it the sign shows.
        meaning (str): what has happened.
        remedy (str): a kind of `Framework.remedies`.
        calibrated (bool): whether stored runs that failed show it.
        fails (float): beyond it, at the end, the run has failed.
        throughout (bool): whether it is there from the start, however late it shows.
        advice (str): what else to do, as a sentence.
    """

    numbers: tuple[str, ...]
    measure: Callable[..., float]
    limit: float
    meaning: str
    remedy: str = "lr"
    calibrated: bool = True
    fails: float = math.inf
    throughout: bool = False
    advice: str = ""


def drop(trend: Trend) -> float:
    """How far a number is below its best."""
    return trend.best - trend.now


def share_lost(trend: Trend) -> float:
    """How much of its best a number has lost, from 0 to 1; 0 for one that was never above its floor."""
    if trend.best <= trend.floor or drop(trend) < 4 * trend.noise:
        return 0.0
    return drop(trend) / (trend.best - trend.floor)


def loss(outcome: Trend) -> float:
    """Above 0.5 if it is lost by more than its margin: below half of its best or of what it gained, or below its start.

    What it gained counts for no share, and where it is more than twice the margin.
    """
    lost, gained = drop(outcome), outcome.best - outcome.first
    if lost <= outcome.margin:
        return 0.0
    of_gain = 0.0 if outcome.is_share or min(gained, lost) <= 2 * outcome.margin else lost / gained
    return max(share_lost(outcome), of_gain, float(outcome.first - outcome.now > outcome.margin))


def part_lost(part: Trend, reward: Trend) -> float:
    """The share lost of a part of the reward, if that is no small part of it."""
    return share_lost(part) if drop(part) > reward.margin else 0


def growth(length: Trend) -> float:
    """Length as a share of its limit, if it was short at first."""
    return length.now / length.limit if length.first < 0.7 * length.limit else 0


def fell(trend: Trend) -> float:
    """How many times smaller a number is than at first."""
    return trend.first / max(trend.now, 1e-9)


def fell_early(entropy: Trend, reward: Trend) -> float:
    """The same of entropy, while there is a fifth of the reward left to gain."""
    return fell(entropy) if reward.now - reward.floor < 0.8 * (reward.limit - reward.floor) else 0


def rose(trend: Trend, least: float) -> float:
    """How many times larger a number is than at first, or than `least`."""
    return trend.now / max(trend.first, least)


def all_equal(equal: Trend) -> float:
    """1 if all groups of two windows and before had equal rewards."""
    return float(equal.count >= 2 * equal.window and equal.lowest_step >= 1)


def no_progress(outcome: Trend) -> float:
    """1 if a hundred steps or more left an outcome where it was, and a tenth more would have been seen.

    An outcome that is at its ceiling from the start has nowhere to go, and one that was better in between has lost it.
    """
    if outcome.count < max(3 * outcome.window, 100):
        return 0.0
    first, last, error = outcome.thirds()
    at_ceiling = outcome.first >= 0.95 * outcome.limit or outcome.highest_step - outcome.first < 2 * outcome.deviation
    moved = abs(last - first) > error or last - outcome.first > math.hypot(2 * outcome.noise, error / math.sqrt(2))
    return float(
        not moved and not at_ceiling and drop(outcome) < 4 * outcome.noise and error < 0.1 * (first - outcome.floor)
    )


_LOOK = "Look at the reward function, the form of an answer that it reads, the limit of a completion and the questions."
_NO_GRADIENT = "Groups need rewards that differ: a finer reward, a higher temperature, easier or harder questions."
_NAN = "Go back to a checkpoint before it; the step's batch, the precision and the loss may say why."
_never_began = partial(Sign, limit=0.5, remedy="look", calibrated=False, throughout=True)
SIGNS = (
    *(
        Sign((name,), lambda x: x.broken, 0, f"{NUMBERS[name][0]} is not finite", "lr", False, 0.499, advice=_NAN)
        for name in ("loss", "grad_norm", "kl", "entropy", "reward")
    ),
    Sign(("ended",), lambda x: drop(x) if x.best > 0.5 else 0, 0.1, "some completions no longer end"),
    Sign(
        ("ended",), lambda x: 1 - x.best, 0.5, "most completions are cut off, from the start", "limit", throughout=True
    ),
    Sign(("aborted",), lambda x: x.now, 0.1, "completions are aborted", "look", False),
    Sign(("repetition",), lambda x: x.now - x.lowest, 0.2, "completions repeat themselves", calibrated=False),
    _never_began(("equal",), all_equal, meaning="no gradient: all groups have equal rewards", advice=_NO_GRADIENT),
    _never_began(("grad_norm",), Trend.is_zero, meaning="no gradient: its norm is 0", advice=_NO_GRADIENT),
    _never_began(("reward",), Trend.is_zero, meaning="hardly a completion ever got a reward", advice=_LOOK),
    Sign(
        ("equal", "reward"),
        lambda equal, reward: equal.now if share_lost(reward) > 0.1 else 0,
        0.95,
        "nearly all groups have equal rewards, below the best",
        "filter",
    ),
    Sign(
        ("equal", "accuracy"),
        lambda equal, accuracy: equal.now if accuracy.now < 0.5 else 0,
        0.95,
        "nearly all groups have equal rewards, and most answers are wrong",
        "filter",
    ),
    Sign(("unearned",), lambda x: x.now, 0.5, "most unequal groups have no right answer", "filter", calibrated=False),
    Sign(("strict",), drop, 0.1, "completions are no longer the format alone, which the format reward does not see"),
    Sign(("format",), share_lost, 0.5, "completions lose their format"),
    Sign(("accuracy",), loss, 0.5, "accuracy is lost: below its start, or half of its best"),
    Sign(("reward",), loss, 0.5, "the reward is lost: below its start, or half of its best or of what it gained"),
    *(
        Sign((name,), no_progress, 0.5, f"no progress: {x} is no better than at the start", "raise", throughout=True)
        for name, x in (("accuracy", "accuracy"), ("reward", "the reward"))
    ),
    Sign(("entropy",), lambda x: rose(x, math.log(2) / 2), 2, "the policy drifts towards noise", calibrated=False),
    Sign(("entropy", "reward"), fell_early, 10, "entropy fell to almost nothing: no exploration is left", "explore"),
    Sign(("length",), growth, 0.9, "completions grow to the limit", "limit"),
    Sign(("length",), fell, 4, "completions shrink", "look"),
    Sign(("mismatch",), lambda x: rose(x, 0.01), 3, "rollout and trainer log-probs diverge", "correct", False),
    Sign(("kl",), lambda x: rose(x, 0.1) if x.now > 1 else 0, 5, "KL explodes", calibrated=False),
)


def part_sign(name: str) -> Sign:
    """The sign of a part of the reward."""
    part = name.removeprefix(PART)
    return Sign((name, "reward"), part_lost, 0.5, f"{part}, a part of the reward, fell below half of its best")


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
        showing: the signs that show, and the step from which on, but for breaks shorter than a window.
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
        self.lr, self._highest, self._start = 0.0, -math.inf, -1
        self._framework, self._limit = framework, limit
        of_parts = [part_sign(name) for name in windows if name.startswith(PART)]
        self._signs = [sign for sign in (*signs, *of_parts) if windows.keys() >= set(sign.numbers)]
        if "accuracy" in windows:
            self._signs = [x for x in self._signs if x.numbers != ("reward",) or x.measure not in (loss, no_progress)]
        self._named: set[tuple[Sign, bool]] = set()
        self._gone: dict[Sign, tuple[float, int]] = {}
        self._steps = 0
        if limit and "length" in windows:
            self.trends["length"].limit = limit
        for name in windows.keys() & SHARES:
            self.trends[name].limit, self.trends[name].is_share = 1.0, True

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[tuple[str, bool]]:
        """Take one more step.

        Returns:
            The signs that show, or fail a run, for the first time, each as a sentence, and whether it is to be stopped.
        """
        alarms = []
        self._steps += 1
        self._start = step if self._start < 0 else self._start
        self.lr = max(self.lr, numbers.get("lr", 0.0))
        for name in self.trends.keys() & numbers.keys():
            trend, lowest = self.trends[name], numbers[name]
            if name == "reward":
                trend.floor = min(trend.floor, numbers.get("lowest", lowest))
                self._highest = max(self._highest, numbers.get("highest", -math.inf))
                trend.limit = self._highest if self._highest > 0 else math.inf
            trend.add(step, numbers[name])
        for sign in self._signs:
            value = self.value(sign)
            if value <= sign.limit:
                if sign in self.showing:
                    self._gone[sign] = self._steps, self.showing.pop(sign)
                continue
            gone, since = self._gone.get(sign, (-math.inf, step))
            came_back = self._steps - gone <= self.trends[sign.numbers[0]].window
            self.showing.setdefault(sign, since if came_back else step)
            named = sign, value > sign.fails
            if named not in self._named:
                self._named.add(named)
                alarms.append((self._sentence(sign), named[1] or (sign.calibrated and not sign.throughout)))
        return alarms

    def value(self, sign: Sign) -> float:
        """A sign's measure, 0 as long as a number has no trend."""
        trends = [self.trends[name] for name in sign.numbers]
        return sign.measure(*trends) if sign.fails < math.inf or all(trend.known for trend in trends) else 0.0

    def since(self, sign: Sign) -> int:
        """The step from which on there is what a sign says."""
        if sign.throughout:
            return self._start
        return self.trends[sign.numbers[0]].broken_since if sign.fails < math.inf else self.showing[sign]

    def lost(self, known: Collection[str]) -> list[str]:
        """Which of the `known` outcomes are lost; the reward is one only where accuracy is not known."""
        return [name for name in outcomes(known) if self.trends[name].known and loss(self.trends[name]) > 0.5]

    def remedy(self, kind: str) -> str:
        """The override of a remedy, in the run's framework."""
        return remedy(kind, self._framework, self.lr, self._limit)

    def _sentence(self, sign: Sign) -> str:
        trends = ((name, self.trends[name]) for name in sign.numbers)
        numbers = ", ".join(f"{label(name)} {x.now:.3g} (first {x.first:.3g}, best {x.best:.3g})" for name, x in trends)
        means = f"{numbers}, means over {self.trends[sign.numbers[0]].window} steps"
        means = f"since step {self.since(sign)}" if sign.fails < math.inf else means
        note = "" if sign.calibrated else " (uncalibrated)"
        sentences = (f"{sign.meaning}{note}: {means}.", sign.advice, f"Try: {self.remedy(sign.remedy)}")
        return " ".join(filter(None, sentences))


def label(name: str) -> str:
    """What a number is called."""
    return NUMBERS[name][0] if name in NUMBERS else name


def outcomes(known: Collection[str]) -> list[str]:
    """The numbers that decide whether a run has failed."""
    return [name for name in ("ended", "strict", "accuracy" if "accuracy" in known else "reward") if name in known]
