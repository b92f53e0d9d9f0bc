"""What goes wrong in a run of reinforcement learning, from the numbers that it logs, under any advantage estimator.

One set of rules for `trainer.collapse_watch` and `gtpo-verl diagnose`, and one rule above them: the outcome decides. It
is the validation, else accuracy, else the reward. A run has failed if its outcome is lost or a number is not finite;
lengths, endings, entropy, KL and repetition are faults only where the outcome falls, or does not rise where it could.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from gtpo_verl.monitor.frameworks import PART, remedy

STEPS, COMPLETIONS = 10, 640
"""A number is averaged over `STEPS` steps, and over more where these have fewer than `COMPLETIONS` completions: with
one prompt a step, ten hard questions in a row would look like a collapse."""
VALIDATIONS = 2
"""Validations that are averaged: each is a mean over many prompts already."""

NUMBERS = {
    "terminated": ("completions terminated", True),
    "aborted": ("aborted completions", False),
    "repetition": ("repetition", False),
    "zero_std_groups": ("zero-std groups", None),
    "reward_std": ("reward std in a group", None),
    "no_correct_groups": ("no-correct groups", False),
    "exact_format": ("exact format", True),
    "format": ("format reward", True),
    "validation": ("validation", True),
    "accuracy": ("accuracy", True),
    "reward": ("reward", True),
    "entropy": ("entropy, nats per token", None),
    "length": ("length, tokens", None),
    "mismatch": ("rollout/trainer mismatch", False),
    "kl": ("KL", False),
    "grad_norm": ("gradient norm", None),
    "loss": ("loss", None),
}
"""What is read: what it is called, and whether more is better."""
OUTCOMES = ("validation", "accuracy", "reward")
SHARES = ("terminated", "exact_format", "accuracy")
NOTE, FAULT, FAILED = range(3)
"""What a sign amounts to."""


class Trend:
    """Mean of a number, perhaps a share of completions, over the last `window` steps: `now`, in the `first` window, and
    the `best` and `lowest` so far.

    Attributes:
        floor, limit: what it falls to at worst, and cannot exceed.
        known, settled: whether there are two windows of values, and ten of these.
        deviation, noise: standard deviation of a step, from the differences between consecutive ones; that of a window.
        margin: what it must lose to be called lost: a tenth, of its best if it is no share, and beyond noise.
        drop, falls: how far it is below its best, 0 where that may be noise; whether by more than its margin.
        bad_steps, broken, broken_since: steps whose values are not finite, which enter no mean; their share of the last
            window if the last one is such; the first of those.
    """

    def __init__(self, window: int, is_share: bool = False) -> None:
        self.window, self.is_share, self.floor, self.limit = window, is_share, 0.0, 1.0 if is_share else math.inf
        self.steps: list[int] = []
        self.values: list[float] = []
        self.bad_steps: list[int] = []
        self._bad: deque[bool] = deque(maxlen=window)
        self._squares, self._sums = 0.0, [0.0]
        self.first = self.now = math.nan
        self.best = self.highest_step = -math.inf
        self.lowest = self.lowest_step = self.deviation = self.noise = self.margin = math.inf
        self.broken = self.drop = 0.0
        self.known = self.settled = self.falls = False
        self.broken_since = self.count = self._zeros = self._first_zeros = 0

    def thirds(self, since: int = 0) -> tuple[float, float, float]:
        """Return the means of the first and the last third of its values, and two standard errors between them."""
        third = (self.count - since) // 3
        first = (self._sums[since + third] - self._sums[since]) / max(third, 1)
        last = (self._sums[-1] - self._sums[-1 - third]) / max(third, 1)
        return first, last, 2 * self.deviation * math.sqrt(2 / third) if third else math.inf

    def rose(self) -> bool:
        """Return whether it is better than at first, by more than noise, or was from the start where it cannot rise."""
        first, last, error = self.thirds()
        by_windows = self.now - self.first > 2 * math.sqrt(2) * self.noise
        rose = by_windows or (last - first > error and self.now > self.first)
        return self.known and (rose or self.first >= 0.95 * self.limit)

    def is_flat_since(self, step: int) -> bool:
        """Return whether it has not risen in the steps since then, of which there are enough to see it."""
        since = bisect_left(self.steps, step)
        first, last, error = self.thirds(since)
        return self.count - since >= 3 * self.window and last - first < error

    def is_zero(self) -> bool:
        """Return whether two windows or more, from the first on, had hardly a value but 0."""
        return self.settled and self._zeros >= 0.95 * self.count and self._first_zeros >= 0.9 * self.window

    def change(self) -> int:
        """Return the step of a change: from which on the values of two windows differ most from those before, or, of a
        validation, which follows the last value near the best, if that is earlier."""
        start = max(0, self.count - 2 * self.window)
        sums, size = self._sums[start:], self.count - start
        mean = (sums[-1] - sums[0]) / max(size, 1)
        least = 1 + self.window // 8  # fewer values than that are chance
        contrasts = [abs(sums[k] - sums[0] - k * mean) / math.sqrt(k * (size - k)) for k in range(least, size)]
        split = start + least + contrasts.index(max(contrasts)) if contrasts else 0
        near = self.best - self.deviation if self.drop and self.window <= VALIDATIONS else -math.inf
        after = next((place for place in range(start, split) if max(self.values[place:]) < near), split)
        return self.steps[after] if self.count else -1

    def add(self, step: int, value: float) -> None:
        """Take the value of one more step."""
        if not any(self._bad):
            self.broken_since = step
        self._bad.append(not abs(value) < 1e100)  # whose square a float can hold
        self.broken = sum(self._bad) / self.window if self._bad[-1] else 0.0
        if self._bad[-1]:
            self.bad_steps.append(step)
            return
        if self.count:
            self._squares += (value - self.values[-1]) ** 2
            self.deviation = math.sqrt(self._squares / (2 * self.count))
            self.noise = self.deviation / math.sqrt(self.window)
        self._zeros += value == 0
        self.count += 1
        self.steps.append(step)
        self.values.append(value)
        self._sums.append(self._sums[-1] + value)
        self.highest_step, self.lowest_step = max(self.highest_step, value), min(self.lowest_step, value)
        if self.count >= self.window:
            self.now = sum(self.values[-self.window :]) / self.window
            self.best, self.lowest = max(self.best, self.now), min(self.lowest, self.now)
            if self.count == self.window:
                self.first, self._first_zeros = self.now, self._zeros
        self.known = self.count >= 2 * self.window
        self.settled = self.known and self.count >= STEPS
        self.margin = max(0.1 * (1 if self.is_share else self.best - self.floor), 4 * self.noise)
        self.drop = self.best - self.now if self.best - self.now >= 4 * self.noise else 0.0
        self.falls = self.drop > self.margin


class Sign(NamedTuple):
    """A sign of a fault, which shows while its `measure` in a `Watch` exceeds `limit`.

    `number` is whose change it is, `meaning` what has happened, and `level` what it amounts to, where None is a fault
    if the outcome is held back, and else a note. `remedy` is a kind of `Framework.remedies`, `advice` what else to do,
    with {since} for the step. Stored runs show it if it is `calibrated`; `from_start` means from the first step on.
    """

    number: str
    measure: Callable[["Watch"], float]
    limit: float
    meaning: str
    level: int | None = None
    remedy: str = ""
    advice: str = ""
    calibrated: bool = True
    from_start: bool = False


def share_lost(trend: Trend) -> float:
    """Return how much of its best a number has lost, from 0 to 1; 0 for one that was never above its floor."""
    return trend.drop / (trend.best - trend.floor) if trend.best > trend.floor else 0.0


def half_lost(outcome: Trend) -> float:
    """Return what an outcome lost by more than its margin, as a share of its best or, where that is more than twice the
    margin, of what it gained, which counts for no share."""
    lost, gained = outcome.drop, outcome.best - outcome.first
    if not lost > outcome.margin:
        return 0.0
    of_gain = 0.0 if outcome.is_share or min(gained, lost) <= 2 * outcome.margin else lost / gained
    return max(share_lost(outcome), of_gain)


def loss(outcome: Trend) -> float:
    """Return the same; 1 of an outcome that is below its start by more than its margin."""
    return 1.0 if outcome.falls and outcome.first - outcome.now > outcome.margin else half_lost(outcome)


def fell(trend: Trend) -> float:
    """Return how many times smaller a number is than at first."""
    return trend.first / max(trend.now, 1e-9)


def rose(trend: Trend, least: float) -> float:
    """Return how many times larger a number is than at first, or than `least`."""
    return trend.now / max(trend.first, least)


def differ(watch: "Watch") -> bool | None:
    """Return whether rewards ever differed within a group; None if it was not logged, in ten steps and two windows."""
    equal, spread = watch["zero_std_groups"], watch["reward_std"]
    if not (equal.settled or spread.settled):
        return None
    return (equal.settled and equal.lowest_step < 1) or (spread.settled and not spread.is_zero())


def no_progress(watch: "Watch", name: str) -> bool:
    """Return whether a hundred steps or more left an outcome where it was, and a tenth more would have been seen.

    An outcome that is at its ceiling from the start has nowhere to go, and one that was better in between has lost it.
    """
    x = watch[name]
    if x.count < max(3 * x.window, 100) or watch.decides() != name:
        return False
    trained = differ(watch) is not False and not watch["grad_norm"].is_zero()
    first, last, error = x.thirds()
    moved = abs(last - first) > error or last - x.first > math.hypot(2 * x.noise, error / math.sqrt(2))
    nowhere = x.first >= 0.95 * x.limit or x.highest_step - x.first < 2 * x.deviation
    return trained and not moved and not nowhere and not x.drop and error < 0.1 * (first - x.floor)


def validation_falls(watch: "Watch") -> float:
    """Return what the validation lost, in margins, while the outcome in training rises."""
    validation = watch["validation"]
    rises = any(watch[name].rose() and not watch[name].falls for name in ("accuracy", "reward"))
    return validation.drop / validation.margin if rises and validation.known else 0.0


def exploration_lost(watch: "Watch") -> float:
    """Return how many times smaller entropy is, while a fifth of the reward is left to gain."""
    reward = watch["reward"]
    return fell(watch["entropy"]) if reward.now - reward.floor < 0.8 * (reward.limit - reward.floor) else 0.0


def part_lost(watch: "Watch", name: str) -> float:
    """Return the share lost of a part of the reward, if that is no small part of it."""
    return share_lost(watch[name]) if watch[name].drop > watch["reward"].margin else 0.0


def sign_of(number: str, measure: Callable[[Trend], float], limit: float, meaning: str, **more: Any) -> Sign:
    """Return the sign of one number alone."""
    return Sign(number, lambda watch: measure(watch[number]), limit, meaning, **more)


def _always(
    number: str, holds: Callable[["Watch"], object], meaning: str, advice: str, remedy: str = "", level: int = FAULT
) -> Sign:
    """Return the sign of what holds in ten steps and two windows, from the first on."""
    return Sign(
        number, lambda w: float(w[number].settled and bool(holds(w))), 0.5, meaning, level, remedy, advice, False, True
    )


_LOST = (
    "Go back to the last checkpoint before step {since}, and read completions of both sides of it: did data, the "
    "reward function or a tool change? If not, the updates are too large."
)
_CLEAN = "Go back to the last checkpoint before step {since}. A reward for the exact format and nothing else sees it."
_NAN = "Go back to the last checkpoint before step {since}; that step's batch, the precision and the loss may say why."
_AS_IT_BEGAN = (
    "It was so from the first step, so that there is no checkpoint to go back to: look at the configuration: the "
    "precision, a micro batch larger than a rank's share, the reference model."
)
_CUT = "Completions are cut off at the limit: raise it, or mask or penalise overlong ones."
_LOOK = "Look at the reward function, the form of an answer that it reads, the limit of a completion and the questions."
_EQUAL = "Groups need rewards that differ: a finer reward, a higher temperature, easier or harder questions."
_FROZEN = "Nothing is trained, and not for the rewards: look for frozen or unattached adapters, a learning rate of 0 "
_FROZEN += "(warm-up, schedule), the version of DeepSpeed with ZeRO, the precision."
_IDLE = "Do the rewards of a group differ? If they do: "
_TOO_LARGE = "Is the reference model the one that training starts from? Look at the precision and at the loss's scale."
_STUCK = "Look at completions: is there anything to learn? If so, try larger updates."
_EXPLORE = "Raise the upper clip range, add an entropy bonus or KL, or make fewer updates a batch."
_BOTH = "Use a checkpoint before step {since}; does the reward in training pay for what the validation does not?"
_new: dict[str, Any] = {"calibrated": False}
_clean: dict[str, Any] = {"limit": 0.5, "level": FAULT, "remedy": "lr", "advice": _CLEAN}
_cut: dict[str, Any] = {"remedy": "limit", "advice": _CUT}
_lost: dict[str, Any] = {"limit": 0.5, "level": FAILED, "remedy": "lr", "advice": _LOST}
BROKEN = tuple(
    sign_of(name, lambda x: x.broken, 0, f"{NUMBERS[name][0]} is not finite", level=FAILED, advice=_NAN, **_new)
    for name in ("loss", "grad_norm", "kl", "entropy", "reward")
)
SIGNS = (
    *BROKEN,
    sign_of("validation", loss, meaning="the validation is lost", **_lost),
    sign_of("accuracy", loss, meaning="accuracy is lost", **_lost),
    sign_of("reward", loss, meaning="the reward is lost", **_lost),
    Sign("validation", validation_falls, 1, "the validation falls while training rises", FAULT, "", _BOTH, False),
    _always("terminated", lambda w: w["terminated"].best < 0.3, "nearly all completions are cut off", _CUT, "limit"),
    _always("zero_std_groups", lambda w: differ(w) is False, "no gradient: all groups have equal rewards", _EQUAL),
    _always(
        "grad_norm",
        lambda w: w["grad_norm"].is_zero() and differ(w),
        "the gradient is 0 although rewards differ",
        _FROZEN,
    ),
    _always(
        "grad_norm",
        lambda w: w["grad_norm"].is_zero() and differ(w) is None,
        "no gradient: its norm is 0",
        _IDLE + _FROZEN,
    ),
    _always("reward", lambda w: w["reward"].is_zero(), "hardly a completion ever got a reward", _LOOK, "look"),
    _always("accuracy", lambda w: w["accuracy"].best < 0.02, "hardly a completion was ever right", _LOOK, "look"),
    _always("kl", lambda w: w["kl"].lowest > 10, "KL is absurd from the start", _TOO_LARGE),
    _always("grad_norm", lambda w: w["grad_norm"].lowest > 1000, "the gradient norm is absurd", _TOO_LARGE),
    _always("accuracy", partial(no_progress, name="accuracy"), "no progress in accuracy", _STUCK),
    _always("reward", partial(no_progress, name="reward"), "no progress in the reward", _STUCK),
    sign_of("terminated", share_lost, meaning="completions stopped terminating cleanly", **_clean),
    sign_of("exact_format", share_lost, meaning="completions contain text outside the required blocks", **_clean),
    sign_of("format", share_lost, meaning="completions lost their format", **_clean),
    sign_of("terminated", lambda x: x.drop if x.best > 0.5 else 0, 0.1, "more completions are cut off", **_cut),
    sign_of("terminated", lambda x: 1 - x.best, 0.5, "most completions are cut off", from_start=True, **_cut),
    sign_of("exact_format", lambda x: x.drop, 0.1, "fewer completions have the exact format", advice=_CLEAN),
    sign_of("aborted", lambda x: x.now, 0.1, "completions are aborted", remedy="look", **_new),
    sign_of("repetition", lambda x: x.now - x.lowest, 0.2, "completions repeat themselves", remedy="look", **_new),
    sign_of("zero_std_groups", lambda x: x.now, 0.95, "nearly all groups have equal rewards", remedy="filter"),
    sign_of("no_correct_groups", lambda x: x.now, 0.5, "most groups have no correct answer", remedy="filter", **_new),
    sign_of("entropy", partial(rose, least=math.log(2) / 2), 2, "the policy drifts towards noise", remedy="lr", **_new),
    Sign("entropy", exploration_lost, 10, "entropy fell to almost nothing", remedy="explore", advice=_EXPLORE),
    sign_of("length", lambda x: (x.first < 0.7 * x.limit) * x.now / x.limit, 0.9, "completions near the limit", **_cut),
    sign_of("length", fell, 4, "completions shrink", remedy="look"),
    sign_of(
        "mismatch", partial(rose, least=0.01), 3, "rollout and trainer log-probs diverge", remedy="correct", **_new
    ),
    sign_of("kl", lambda x: rose(x, 0.1) if x.now > 1 else 0, 5, "KL explodes", remedy="lr", **_new),
)
CLEAN = tuple(sign for sign in SIGNS if sign.remedy == "lr" and sign.advice == _CLEAN)
"""Clean endings or a format that are lost, which no reward need see."""


def _of_part(name: str) -> tuple[Sign, Sign]:
    part = name.removeprefix(PART)
    lost = Sign(name, partial(part_lost, name=name), 0.5, f"{part}, a part of the reward, fell below half of its best")
    unpaid = f"{part}, a part of the reward, never paid anything"
    look = "Look at what it is to match, and at completions."
    return lost, _always(name, lambda w: w[name].is_zero(), unpaid, look, "look", NOTE)


def window(completions_per_step: float) -> int:
    """Return the steps over which numbers are averaged."""
    return max(STEPS, math.ceil(COMPLETIONS / completions_per_step))


class Alarm(NamedTuple):
    """A sign that shows for the first time, or amounts to more than before; `grave` if it does so for a window."""

    sign: Sign
    sentence: str
    grave: bool


class Watch:
    """The signs in one run, whose framework's overrides are the remedies, with `limit` tokens to a completion.

    `windows` are the steps over which each number is averaged; what is not in it is not watched, but for the parts of
    the reward. Of each number that was logged there is one of the `trends`, whose floor is its lowest value if below 0.
    `showing` are the signs that show, and since which step; `lr` is the highest learning rate, 0 if none was logged.
    """

    def __init__(
        self, windows: Mapping[str, int], framework: str, limit: float | None = None, signs: Collection[Sign] = SIGNS
    ):
        self.trends: dict[str, Trend] = {}
        self.showing: dict[Sign, int] = {}
        self.lr, self._start, self._steps, self._limit = 0.0, -1, 0, limit
        self._windows, self._framework, self._signs = windows, framework, [*signs]
        self._unknown, self._highest = Trend(1), -math.inf
        self._named: dict[Sign, int] = {}
        self._lasting: dict[Sign, int] = {}
        self._gone: dict[Sign, tuple[float, int]] = {}

    def __getitem__(self, name: str) -> Trend:
        """Return the trend of a number, one without values if it was not logged."""
        return self.trends.get(name, self._unknown)

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[Alarm]:
        """Take one more step, and return what shows for the first time."""
        self._steps += 1
        self._start = step if self._start < 0 else self._start
        self.lr = max(self.lr, numbers.get("lr", 0.0))
        self._highest = max(self._highest, numbers.get("highest", -math.inf))
        for name, value in numbers.items():
            if name in self._windows or (name.startswith(PART) and "reward" in self._windows):
                self._add(step, name, value, numbers)
        return [alarm for sign in self._signs for alarm in self._look(sign, step, sign.number in numbers)]

    def _add(self, step: int, name: str, value: float, numbers: Mapping[str, float]) -> None:
        if name not in self.trends:
            self.trends[name] = Trend(self._windows.get(name, self._windows.get("reward", STEPS)), name in SHARES)
            self._signs += _of_part(name) if name.startswith(PART) else ()
        trend = self.trends[name]
        lowest = min(value, numbers.get("lowest", value)) if name == "reward" else value
        trend.floor = min(trend.floor, lowest) if math.isfinite(lowest) else trend.floor
        if name == "reward" and self._highest > 0:
            trend.limit = self._highest
        if name == "length" and self._limit:
            trend.limit = self._limit
        trend.add(step, value)

    def _look(self, sign: Sign, step: int, is_new: bool) -> Iterator[Alarm]:
        value = self.value(sign)
        if not value > sign.limit:
            if sign in self.showing:
                self._gone[sign] = self._steps, self.showing.pop(sign)
            self._lasting.pop(sign, None)
            return
        if sign not in self.showing:
            gone, since = self._gone.get(sign, (-math.inf, step))
            came_back = self._steps - gone <= self[sign.number].window
            self.showing[sign] = since if came_back or sign.from_start else self[sign.number].change()
        level = self.level(sign)
        of_half = half_lost(self[sign.number]) > 0.5 if sign.level == FAILED else sign in CLEAN
        lasting = self._lasting[sign] = self._lasting.get(sign, 0) + is_new if of_half and level else 0
        grave = level == FAILED if sign in BROKEN else lasting > self[sign.number].window and level == sign.level
        if level + grave > self._named.get(sign, -1):
            self._named[sign] = level + grave
            yield Alarm(sign, self._sentence(sign), grave)

    def value(self, sign: Sign) -> float:
        """Return a sign's measure, 0 as long as its number has no trend."""
        trend = self[sign.number]
        return sign.measure(self) if trend.count >= trend.window or trend.broken else 0.0

    def shown(self) -> list[Sign]:
        """Return the signs that show, the gravest first, then those that came about first."""
        return sorted(filter(self.showing.__contains__, self._signs), key=lambda x: (-self.level(x), self.since(x)))

    def level(self, sign: Sign) -> int:
        """Return what a sign that shows amounts to: `NOTE`, `FAULT` or `FAILED`."""
        if sign in BROKEN:
            trained = any(self[x].count and not self[x].broken for x in ("loss", "grad_norm"))
            if sign.number in ("kl", "entropy") and trained:
                return FAULT if self.held_back() else NOTE
            return FAILED if self.value(sign) > 0.499 else FAULT
        if sign.level == FAILED and sign.number != "validation":
            validation = self["validation"]
            holds = validation.known and validation.values[-1] >= validation.best - validation.margin
            told_apart = sign.number == "reward" and self["accuracy"].known and self["accuracy"].best > 0.1
            return NOTE if told_apart or (holds and validation.steps[-1] > self.showing[sign]) else FAILED
        if sign.level is not None:
            return sign.level
        flat = sign.measure is exploration_lost and self[self.decides()].is_flat_since(self.since(sign))
        return FAULT if flat or self.held_back() else NOTE

    def decides(self) -> str:
        """Return the name of the outcome; empty if none was logged."""
        logged = [name for name in OUTCOMES if self[name].count]
        return next((name for name in logged if self[name].known), next(iter(logged), ""))

    def collapsed(self) -> bool:
        """Return whether the outcome, clean endings or the format are lost."""
        return any(sign in CLEAN or self.level(sign) == FAILED for sign in self.showing)

    def held_back(self) -> bool:
        """Return whether the outcome falls, or did not rise where it could."""
        outcome = self[self.decides()]
        could = outcome.now - outcome.floor < 0.8 * (outcome.limit - outcome.floor)
        return outcome.known and (outcome.falls or (could and not self.learned()))

    def learned(self) -> bool:
        """Return whether some outcome rose, or was right from the start."""
        return any(self[name].rose() for name in OUTCOMES)

    def since(self, sign: Sign) -> int:
        """Return the step from which on there is what a sign says."""
        if sign.from_start:
            return self._start
        return self[sign.number].broken_since if sign in BROKEN else self.showing[sign]

    def advice(self, sign: Sign) -> str:
        """Return what to do about a sign, as a sentence."""
        since = self.since(sign)
        return _AS_IT_BEGAN if sign in BROKEN and since == self._start else sign.advice.format(since=since)

    def remedy(self, sign: Sign) -> str:
        """Return the override that is a sign's remedy, in the run's framework; empty if there is none."""
        return remedy(sign.remedy, self._framework, self.lr, self._limit)

    def _sentence(self, sign: Sign) -> str:
        trend, override, outcome = self[sign.number], self.remedy(sign), self.decides()
        means = f"{label(sign.number)} {trend.now:.3g} (first {trend.first:.3g}, best {trend.best:.3g})"
        means = f"since step {self.since(sign)}" if sign in BROKEN else f"{means}, means over {trend.window} steps"
        note = "" if sign.calibrated else " (uncalibrated)"
        if self.level(sign) == NOTE and outcome:
            note += f" (a note: {label(outcome)} is {self[outcome].now:.3g}, best {self[outcome].best:.3g})"
        sentences = (f"{sign.meaning}{note}: {means}.", self.advice(sign), f"Try: {override}" if override else "")
        return " ".join(filter(None, sentences))


def label(name: str) -> str:
    """Return what a number is called."""
    return NUMBERS[name][0] if name in NUMBERS else name
