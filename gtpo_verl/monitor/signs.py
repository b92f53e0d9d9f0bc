"""What goes wrong in a run of reinforcement learning, from the numbers that it logs, under any advantage estimator.

One set of rules for `trainer.collapse_watch` and `gtpo-verl diagnose`, and one rule above them: the outcome decides. It
is the validation, else accuracy, else the reward. A run has failed if its outcome is lost or a number is not finite;
lengths, endings, entropy, KL and repetition are faults only where the outcome falls, or does not rise where it could.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from statistics import fmean, median
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
    "positive": ("positive advantages", None),
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
    the `best` and `lowest` so far; of single steps the `highest_value` and `lowest_value`.

    `floor` and `limit` are the least and the most that it can be. It is `known` from two windows on, and `settled` if
    these are ten values. `deviation` is that of a step, from the differences between consecutive ones, `noise` that of
    a window. `drop` is how far it is below its best, 0 within noise; it `falls` if that exceeds the `margin`: a tenth,
    of its best if it is no share, and beyond noise, a validation's without the largest difference: it may be the fall.
    Values of `bad_steps` are not finite and in no mean; `broken` is their share of a last window that ends in one.
    """

    def __init__(self, window: int, is_share: bool = False) -> None:
        self.window, self.is_share, self.floor, self.limit = window, is_share, 0.0, 1.0 if is_share else math.inf
        self.steps: list[int] = []
        self.values: list[float] = []
        self.bad_steps: list[int] = []
        self._bad: deque[bool] = deque(maxlen=window)
        self._squares, self._largest, self._sums = 0.0, 0.0, [0.0]
        self.first = self.now = math.nan
        self.best = self.highest_value = -math.inf
        self.lowest = self.lowest_value = self.deviation = self.noise = self.margin = math.inf
        self.broken = self.drop = 0.0
        self.known = self.settled = self.falls = False
        self.count = self._zeros = self._first_zeros = 0

    def thirds(self, since: int = 0) -> tuple[float, float, float]:
        """Return the means of the first and the last third of its values, and two standard errors between them."""
        third = (self.count - since) // 3
        first = (self._sums[since + third] - self._sums[since]) / max(third, 1)
        last = (self._sums[-1] - self._sums[-1 - third]) / max(third, 1)
        return first, last, 2 * self.deviation * math.sqrt(2 / third) if third else math.inf

    def rose(self) -> bool:
        """Return whether it is better than at first, by more than noise, or was from the start where it cannot rise."""
        first, last, error = self.thirds()
        rose = self.now - self.first > 2 * math.sqrt(2) * self.noise or (last - first > error and self.now > self.first)
        return self.known and (rose or self.limit >= self.first >= 0.95 * self.limit)

    def is_flat_since(self, step: int) -> bool:
        """Return whether it has not risen in the steps since then, of which there are enough to see it."""
        since = bisect_left(self.steps, step)
        first, last, error = self.thirds(since)
        return self.count - since >= 3 * self.window and last - first < error

    def is_zero(self) -> bool:
        """Return whether two windows or more, from the first on, had hardly a value but 0."""
        return self.settled and self._zeros >= 0.95 * self.count and self._first_zeros >= 0.9 * self.window

    def always_below(self, most: float) -> bool:
        """Return whether it was lower in two windows or more, from the first on."""
        return self.settled and self.best < most

    def is_near_its_best(self) -> bool:
        """Return whether its mean or last value is within the margin of its best, and that value above half of it."""
        last = self.values[-1]
        return max(last, self.now) >= self.best - self.margin and last >= (self.best + self.floor) / 2

    def comes_back(self) -> bool:
        """Return whether the newest quarter of a window has half of what was lost again."""
        return self.best - fmean(self.values[-max(1, self.window // 4) :]) < self.drop / 2

    def could_rise(self) -> bool:
        """Return whether a fifth of what it can be is left to gain."""
        return self.now - self.floor < 0.8 * (self.limit - self.floor)

    def change(self) -> int:
        """Return the step of a change: from which on the values of two windows differ most from those before, or, of a
        validation, which follows the last value near the best, if that is earlier."""
        start = max(0, self.count - 2 * self.window)
        sums, size = self._sums[start:], self.count - start
        mean = (sums[-1] - sums[0]) / size
        least = 1 + self.window // 8  # fewer values than that are chance
        contrasts = {k: abs(sums[k] - sums[0] - k * mean) / math.sqrt(k * (size - k)) for k in range(least, size)}
        split = start + max(contrasts, key=contrasts.__getitem__, default=0)
        near = self.best - self.deviation if self.drop and self.window <= VALIDATIONS else -math.inf
        return self.steps[next((place for place in range(start, split) if max(self.values[place:]) < near), split)]

    def add(self, step: int, value: float) -> None:
        """Take the value of one more step."""
        self._bad.append(not abs(value) < 1e100)  # whose square a float can hold
        self.broken = sum(self._bad) / self.window if self._bad[-1] else 0.0
        if self._bad[-1]:
            self.bad_steps.append(step)
            return
        if self.count:
            square = (value - self.values[-1]) ** 2
            self._squares, self._largest = self._squares + square, max(self._largest, square)
            self.deviation = math.sqrt(self._squares / (2 * self.count))
            self.noise = self.deviation / math.sqrt(self.window)
        self._zeros += value == 0
        self.count += 1
        self.steps.append(step)
        self.values.append(value)
        self._sums.append(self._sums[-1] + value)
        self.highest_value, self.lowest_value = max(self.highest_value, value), min(self.lowest_value, value)
        if self.count >= self.window:
            self.now = sum(self.values[-self.window :]) / self.window
            self.best, self.lowest = max(self.best, self.now), min(self.lowest, self.now)
            if self.count == self.window:
                self.first, self._first_zeros = self.now, self._zeros
        self.known = self.count >= 2 * self.window
        self.settled = self.known and self.count >= STEPS
        # The best of more windows is further from their mean by chance.
        least = max(4.0, 2 * math.sqrt(2 * math.log(max(self.count / self.window, 1)))) * self.noise
        if self.window <= VALIDATIONS and self.count > 3 and self._squares:  # wider again, since so few tell little
            least *= math.sqrt(1 - self._largest / self._squares) * (self.count - 1) / (self.count - 3)
        self.margin = max(0.1 * (1 if self.is_share else self.best - self.floor), least)
        self.drop = self.best - self.now if self.best - self.now >= least else 0.0
        self.falls = self.drop > self.margin


class Sign(NamedTuple):
    """A sign of a fault: what has happened to a number, which shows while its `measure` is above `limit`.

    `level` is what it amounts to, where None is a fault if the outcome is held back, else a note. `remedy` is a kind
    of `Framework.remedies`, `advice` what else to do, with {since} for the step. Stored runs show it if it is
    `calibrated`; it may have held `from_start`, the first step.
    """

    number: str
    meaning: str
    measure: Callable[[Trend, "Watch"], float | None]
    limit: float = 0.5
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


def differ(watch: "Watch") -> bool | None:
    """Return whether rewards ever differed within a group; None if it was not logged, in ten steps and two windows."""
    equal, spread = watch["zero_std_groups"], watch["reward_std"]
    if not (equal.settled or spread.settled):
        return None
    return (equal.settled and equal.lowest_value < 1) or (spread.settled and not spread.is_zero())


def all_equal_without_shares(x: Trend, watch: "Watch") -> bool:
    """Return whether rewards never differed, by a log that does not count the groups of equal rewards."""
    return x.is_zero() and not watch["zero_std_groups"].settled


def no_progress(x: Trend, watch: "Watch") -> bool:
    """Return whether a hundred steps or more left the outcome where it was, and a tenth more would have been seen.

    An outcome that is at its ceiling from the start has nowhere to go, and one that was better in between has lost it.
    """
    if x.count < max(3 * x.window, 100) or watch[watch.decides()] is not x:
        return False
    trained = differ(watch) is not False and not watch["grad_norm"].is_zero()
    first, last, error = x.thirds()
    moved = abs(last - first) > error or last - x.first > math.hypot(2 * x.noise, error / math.sqrt(2))
    nowhere = x.first >= 0.95 * x.limit or x.highest_value - x.first < 2 * x.deviation
    return trained and not moved and not nowhere and not x.drop and error < 0.1 * (first - x.floor)


def validation_falls(x: Trend, watch: "Watch") -> float:
    """Return what the validation lost, in margins, while the outcome in training rises."""
    rises = any(watch[name].rose() and not watch[name].falls for name in ("accuracy", "reward"))
    return x.drop / x.margin if x.drop and rises and x.known else 0.0


_LOST = (
    "Go back to the last checkpoint before step {since}, and read completions of both sides of it: did data, the "
    "reward function or a tool change? If not, the updates are too large."
)
_CLEAN = "Go back to the last checkpoint before step {since}. A reward for the exact format and nothing else sees it."
_NAN = "Go back to the last checkpoint before step {since}; that step's batch, the precision and the loss may say why."
_AS_IT_BEGAN = (
    "It was so from the first step, so there is no checkpoint to go back to: look at the configuration: the precision, "
    "a micro batch larger than a rank's share, the reference model."
)
_CUT = "Completions are cut off at the limit: raise it, or mask or penalise overlong ones."
_LOOK = "Look at the reward function, the form of an answer that it reads, the limit of a completion and the questions."
_EQUAL = "Groups need rewards that differ: a finer reward, a higher temperature, easier or harder questions."
_NEGATIVE = "Rewards differ, but none reaches algorithm.gtpo.min_correct_reward: set it to that of a right answer."
_FROZEN = "Nothing is trained, and not for the rewards: look for frozen or unattached adapters, a learning rate of 0 "
_FROZEN += "(warm-up, schedule), the version of DeepSpeed with ZeRO, the precision."
_IDLE = f"Do the rewards of a group differ? If they do: {_FROZEN}"
_TOO_LARGE = "Is the reference model the one that training starts from? Look at the precision and at the loss's scale."
_STUCK = "Look at completions: is there anything to learn? If so, try larger updates."
_EXPLORE = "Add an entropy bonus or KL, make fewer updates a batch, or raise the upper clip range where it clips."
_BOTH = "Use a checkpoint before step {since}; does the reward in training pay for what the validation does not?"
_lost: dict[str, Any] = {"measure": lambda x, _: loss(x), "level": FAILED, "remedy": "lr", "advice": _LOST}
_clean: dict[str, Any] = {"measure": lambda x, _: share_lost(x), "level": FAULT, "remedy": "lr", "advice": _CLEAN}
_always: dict[str, Any] = {"level": FAULT, "calibrated": False, "from_start": True}
_equal, _frozen, _idle, _absurd = (_always | {"advice": x} for x in (_EQUAL, _FROZEN, _IDLE, _TOO_LARGE))
_cut: dict[str, Any] = {"remedy": "limit", "advice": _CUT}
_look: dict[str, Any] = {"remedy": "look", "advice": _LOOK}
_explore: dict[str, Any] = {"remedy": "explore", "advice": _EXPLORE}
_guess: dict[str, Any] = {"calibrated": False}
_correct, _noise, _seldom, _hard = (_guess | {"remedy": x} for x in ("correct", "lr", "look", "filter"))
BROKEN = tuple(
    Sign(name, f"{NUMBERS[name][0]} is not finite", lambda x, _: x.broken, 0, FAILED, advice=_NAN, calibrated=False)
    for name in ("loss", "grad_norm", "kl", "entropy", "reward")
)
CLEAN = (
    Sign("terminated", "completions stopped terminating cleanly", **_clean),
    Sign("exact_format", "completions contain text outside the required blocks", **_clean),
    Sign("format", "completions lost their format", **_clean),
)
"""Clean endings or a format that are lost, which no reward need see."""
SIGNS = (
    *BROKEN,
    Sign("validation", "the validation is lost", **_lost),
    Sign("accuracy", "accuracy is lost", **_lost),
    Sign("reward", "the reward is lost", **_lost),
    Sign("validation", "the validation falls while training rises", validation_falls, 1, FAULT, advice=_BOTH, **_guess),
    Sign("terminated", "nearly all completions are cut off", lambda x, _: x.always_below(0.3), **_cut, **_always),
    Sign("zero_std_groups", "no gradient: all groups have equal rewards", lambda _, w: differ(w) is False, **_equal),
    Sign("reward_std", "no gradient: all groups have equal rewards", all_equal_without_shares, **_equal),
    Sign("positive", "no advantage is positive", lambda x, w: x.is_zero() and differ(w), advice=_NEGATIVE, **_always),
    Sign("grad_norm", "the gradient is 0 although rewards differ", lambda x, w: x.is_zero() and differ(w), **_frozen),
    Sign("grad_norm", "no gradient: its norm is 0", lambda x, w: x.is_zero() and differ(w) is None, **_idle),
    Sign("reward", "hardly a completion ever got a reward", lambda x, _: x.is_zero(), **_look, **_always),
    Sign("accuracy", "hardly a completion was ever right", lambda x, _: x.always_below(0.02), **_look, **_always),
    Sign("kl", "KL is absurd from the start", lambda x, _: x.settled and x.lowest > 10, **_absurd),
    Sign("grad_norm", "the gradient norm is absurd", lambda x, _: x.settled and x.lowest > 1000, **_absurd),
    Sign("accuracy", "no progress in accuracy", no_progress, advice=_STUCK, **_always),
    Sign("reward", "no progress in the reward", no_progress, advice=_STUCK, **_always),
    *CLEAN,
    Sign("terminated", "more completions are cut off", lambda x, _: x.drop if x.best > 0.5 else 0, 0.1, **_cut),
    Sign("terminated", "most completions are cut off", lambda x, _: 1 - x.best, from_start=True, **_cut),
    Sign("exact_format", "fewer completions have the exact format", lambda x, _: x.drop, 0.1, advice=_CLEAN),
    Sign("aborted", "completions are aborted", lambda x, _: x.now, 0.1, **_seldom),
    Sign("repetition", "completions repeat themselves", lambda x, _: x.now - x.lowest, 0.2, **_seldom),
    Sign("zero_std_groups", "nearly all groups have equal rewards", lambda x, _: x.now, 0.95, remedy="filter"),
    Sign("no_correct_groups", "most groups have no correct answer", lambda x, _: x.now, **_hard),
    Sign("entropy", "the policy drifts towards noise", lambda x, _: x.now / max(x.first, math.log(2) / 2), 2, **_noise),
    Sign("entropy", "entropy fell to almost nothing", lambda x, w: w.could_rise() * fell(x), 10, **_explore),
    Sign("length", "completions near the limit", lambda x, _: (x.first < 0.7 * x.limit) * x.now / x.limit, 0.9, **_cut),
    Sign("length", "completions shrink", lambda x, _: fell(x), 4, remedy="look"),
    Sign("mismatch", "rollout and trainer log-probs diverge", lambda x, _: x.now / max(x.first, 0.01), 3, **_correct),
    Sign("kl", "KL explodes", lambda x, _: x.now / max(x.first, 0.1) if x.now > 1 else 0, 5, **_noise),
)


def _signs_of_part(name: str) -> tuple[Sign, Sign]:
    """Return the signs of a part of the reward: that it lost what is no small part of it, and that it never paid."""
    part, look = f"{name.removeprefix(PART)}, a part of the reward,", "Look at what it is to match, and at completions."
    lost, never_paid = f"{part} fell below half of its best", f"{part} never paid anything"
    return (
        Sign(name, lost, lambda x, w: share_lost(x) if x.drop > w["reward"].margin else 0.0),
        Sign(name, never_paid, lambda x, _: x.is_zero(), 0.5, NOTE, advice=look, from_start=True, **_seldom),
    )


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
    the reward. Of each number that was logged there is one of the `trends`, whose floor is its lowest value if below 0;
    the reward's also a completion's lowest, its median over a window. `showing` are those of its `signs` that show, and
    since which step.
    """

    def __init__(self, windows: Mapping[str, int], framework: str, limit: float | None, signs: Iterable[Sign] = SIGNS):
        self.trends: dict[str, Trend] = {}
        self.showing: dict[Sign, int] = {}
        self._unlogged, self._lowest_rewards = Trend(1), deque[float](maxlen=windows.get("reward"))
        self._windows, self._framework, self._limit, self.signs = windows, framework, limit, [*signs]
        self._most, self._start, self._steps = {"lr": 0.0, "clipped": 0.0, "highest": 0.0}, -1, 0
        self._named: dict[Sign, int] = {}  # what it amounted to when it was named
        self._lasting: dict[Sign, int] = {}  # for how many values it has been grave
        self._gone: dict[Sign, tuple[float, int]] = {}  # when, and since when it had shown

    def __getitem__(self, name: str) -> Trend:
        """Return the trend of a number, one without values if it was not logged."""
        return self.trends.get(name, self._unlogged)

    def observe(self, step: int, numbers: Mapping[str, float]) -> list[Alarm]:
        """Take one more step, and return what shows for the first time."""
        self._steps += 1
        self._start = step if self._start < 0 else self._start
        self._most = {name: max(most, numbers.get(name, most)) for name, most in self._most.items()}
        for name, value in numbers.items():
            is_part = name.startswith(PART)
            size = self._windows.get(name) or (self._windows.get("reward") if is_part else None)
            if size is None:
                continue
            if name not in self.trends:
                self.trends[name] = Trend(size, name in SHARES)
                self.signs += _signs_of_part(name) if is_part else ()
            trend = self.trends[name]
            if math.isfinite(value):
                trend.floor = min(trend.floor, value)
            if name == "reward" and math.isfinite(lowest := numbers.get("lowest", value)):
                self._lowest_rewards.append(lowest)
                if len(self._lowest_rewards) == size:
                    trend.floor = min(trend.floor, median(self._lowest_rewards))
            if name in ("reward", "validation") and (highest := numbers.get(f"{name}_limit", self._most["highest"])):
                trend.limit = highest
            if name == "length" and self._limit:
                trend.limit = self._limit
            trend.add(step, value)
        return [alarm for sign in self.signs for alarm in self._look(sign, step, sign.number in numbers)]

    def _look(self, sign: Sign, step: int, is_new: bool) -> Iterator[Alarm]:
        trend = self[sign.number]
        if not self.value(sign) > sign.limit:
            if sign in self.showing:
                self._gone[sign] = self._steps, self.showing.pop(sign)
            self._lasting.pop(sign, None)
            return
        if sign not in self.showing:
            gone, since = self._gone.get(sign, (-math.inf, -1))
            if sign.from_start:
                since = self._start
            elif self._steps - gone > trend.window:  # else it came back
                since = step if sign in BROKEN else trend.change()
            self.showing[sign] = since
        level = self.level(sign)
        of_half = half_lost(trend) > 0.5 if sign.level == FAILED else sign in CLEAN
        self._lasting[sign] = self._lasting.get(sign, 0) + is_new if of_half and level else 0
        lasts = self._lasting[sign] > trend.window and level == sign.level and not trend.comes_back()
        lasts = lasts and not (sign.number in ("accuracy", "reward") and self._validation_is_due(sign, step))
        grave = level == FAILED if sign in BROKEN else lasts
        if level + grave > self._named.get(sign, -1):
            self._named[sign] = level + grave
            yield Alarm(sign, self.sentence(sign), grave)

    def _validation_is_due(self, sign: Sign, step: int) -> bool:
        """Return whether the next validation, which can outweigh a sign, has yet to come."""
        validation = self["validation"]
        if validation.count < 2 * validation.window - 1 or validation.steps[-1] > self.showing[sign]:
            return False
        return step < 2 * validation.steps[-1] - validation.steps[-2]

    def value(self, sign: Sign) -> float:
        """Return a sign's measure, 0 as long as its number has no trend."""
        trend = self[sign.number]
        return float(sign.measure(trend, self) or 0) if trend.count >= trend.window or trend.broken else 0.0

    def level(self, sign: Sign) -> int:
        """Return what a sign that shows amounts to: `NOTE`, `FAULT` or `FAILED`."""
        if sign in BROKEN:
            trains = any(self[x].count and not self[x].broken for x in ("loss", "grad_norm"))
            if not (sign.number in ("kl", "entropy") and trains):
                return FAILED if self.value(sign) >= 0.5 else FAULT
        elif sign.level == FAILED:
            validation, accuracy = self["validation"], self["accuracy"]
            holds = validation.known and validation.is_near_its_best()
            holds = holds and sign.number != "validation" and validation.steps[-1] > self.showing[sign]
            told_apart = sign.number == "reward" and accuracy.known and accuracy.best > 0.1
            return NOTE if holds or told_apart else FAILED
        elif sign.level is not None:
            return sign.level
        elif sign.remedy == "explore" and self[self.decides()].is_flat_since(self.showing[sign]):
            return FAULT
        return FAULT if self.held_back() else NOTE

    def decides(self) -> str:
        """Return the name of the outcome; empty if none was logged."""
        logged = [name for name in OUTCOMES if self[name].count]
        return next((name for name in logged if self[name].known), next(iter(logged), ""))

    def could_rise(self) -> bool:
        """Return whether every outcome has a fifth left to gain."""
        return all(self[name].could_rise() for name in OUTCOMES if self[name].count >= self[name].window)

    def held_back(self) -> bool:
        """Return whether the outcome falls, or did not rise where it could, nor did another."""
        outcome, rose = self[self.decides()], any(self[name].rose() for name in OUTCOMES)
        return outcome.known and (outcome.falls or (outcome.could_rise() and not rose))

    def advice(self, sign: Sign) -> str:
        """Return what to do about a sign, as a sentence."""
        since = self.showing[sign]
        return _AS_IT_BEGAN if sign in BROKEN and since == self._start else sign.advice.format(since=since)

    def remedy(self, sign: Sign) -> str:
        """Return the override that is a sign's remedy, in the run's framework; empty if there is none."""
        kind = sign.remedy if self._most["clipped"] or sign.remedy != "explore" else ""  # else the range is wide enough
        return remedy(kind, self._framework, self._most["lr"], self._limit)

    def best(self, name: str) -> float | None:
        """Return the best mean of a number so far, the lowest where less is better; None where neither is."""
        more_is_better = NUMBERS[name][1] if name in NUMBERS else True
        return None if more_is_better is None else self[name].best if more_is_better else self[name].lowest

    def sentence(self, sign: Sign) -> str:
        """Return what a sign means, by which numbers, and what to do about it."""
        x, override, outcome = self[sign.number], self.remedy(sign), self.decides()
        said = sign.meaning if sign.calibrated else f"{sign.meaning} (uncalibrated)"
        if self.level(sign) == NOTE and outcome:
            said += f" (a note: {label(outcome)} is {self[outcome].now:.3g}, best {self[outcome].best:.3g})"
        best = "" if (best_so_far := self.best(sign.number)) is None else f", best {best_so_far:.3g}"
        numbers = f"{x.now:.3g} (first {x.first:.3g}{best}), means over {x.window} steps"
        said += f" since step {self.showing[sign]}." if sign in BROKEN else f": {label(sign.number)} {numbers}."
        return " ".join(filter(None, (said, self.advice(sign), f"Try: {override}" if override else "")))


def label(name: str) -> str:
    """Return what a number is called."""
    return NUMBERS[name][0] if name in NUMBERS else name
