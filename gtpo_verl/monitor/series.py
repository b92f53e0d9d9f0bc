"""One number of a run: its values by step, how noisy a step is, its levels, and where it changed.

A level is a mean over several steps. Everything is computed from the values when it is asked for.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate, islice
from operator import mul, sub
from statistics import fmean, median
from typing import NamedTuple

WINDOW = 4
"""A level is a mean over at least so many values, or over a third of them if that is less."""
VALIDATION_WINDOW = 2
"""The same for a level of validations, of which there are few."""
BEYOND_NOISE = 5.0
"""Two levels differ by more than chance if they differ by more than so many standard errors of a level."""
TENTH = 0.1
"""A change counts from a tenth of what lies between a number's floor and its best."""
SHARES = ("terminated", "exact_format", "accuracy", "zero_std_groups", "no_correct_groups", "repetition", "aborted")
"""Numbers that are judged as shares: from 0 to 1, and as noisy as a share of so many completions is at least."""
USUAL = 0.9
"""The share of steps whose highest reward is at most the ceiling of the reward."""
ROUNDING = 1e-9
"""What a mean of many values may be off by rounding, as a share of it."""
BEYOND_REASON = 1e100
"""A value from here on counts as not finite; the square of a smaller one is a float."""


class Levels(NamedTuple):
    """The levels of a series, each a mean over `window` values with the standard error `error`.

    `chance` is the most by which two of them differ by chance.
    """

    window: int
    first: float
    best: float
    lowest: float
    last: float
    error: float
    chance: float


class RunningStatistics:
    """Statistics of a series that go on with each value, so that a long run is not added up anew at every step.

    Attributes:
        totals: `totals[n]` is the sum of the first n values.
        squares: `squares[n]` is the sum of the squares of the first n differences between a value and the one before.
        jumps: `jumps[n]` is the difference furthest from 0 among the first n.
        lowest: the lowest value of all.
        highest: the highest value of all.
        levels: those that were computed since the last value came, by their windows.
    """

    def __init__(self) -> None:
        self.totals = array("d", [0.0])
        self.squares = array("d", [0.0])
        self.jumps = array("d", [0.0])
        self.lowest = math.inf
        self.highest = -math.inf
        self.levels: dict[int, Levels] = {}

    def extend(self, values: array) -> None:
        """Go on to the newest of all values of the series."""
        count = len(self.totals) - 1
        if count == len(values):
            return
        new = values[count:]
        start = max(count, 1)  # the very first value has none before it
        differences = list(map(sub, values[start:], values[start - 1 :]))

        # The last entry is taken off, since `accumulate` begins by yielding it again.
        self.totals.extend(accumulate(new, initial=self.totals.pop()))
        self.squares.extend(accumulate(map(mul, differences, differences), initial=self.squares.pop()))
        self.jumps.extend(accumulate(differences, _further_from_0, initial=self.jumps.pop()))
        self.lowest = min(self.lowest, min(new))
        self.highest = max(self.highest, max(new))
        self.levels = {}


class Series:
    """The values of one number of a run by step.

    Args:
        is_share: whether it is a share of completions, from 0 to 1.
        completions: of how many completions a value is the mean; None if that is unknown.
        is_validation: whether its values are of validations, which are few.
    """

    def __init__(self, is_share: bool = False, completions: int | None = None, is_validation: bool = False) -> None:
        self.is_share = is_share
        self.completions = completions
        self.is_validation = is_validation
        self.steps = array("q")
        self.values = array("d")
        self.bad_steps = array("q")
        self._statistics = RunningStatistics()

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, value: float) -> None:
        """Take the value of one more step; one that is not finite enters no level."""
        if abs(value) < BEYOND_REASON:
            self.steps.append(step)
            self.values.append(value)
        else:
            self.bad_steps.append(step)

    def since(self, step: int) -> "Series":
        """Return the part of it from a step on."""
        return self._part(bisect_left(self.steps, step), len(self.steps))

    def until(self, step: int) -> "Series":
        """Return the part of it up to a step."""
        part = self._part(0, bisect_right(self.steps, step))
        part.bad_steps = self.bad_steps[: bisect_right(self.bad_steps, step)]
        return part

    def _part(self, first: int, end: int) -> "Series":
        """Return the series of the values from the place `first` to before `end`, without what was not finite."""
        part = Series(self.is_share, self.completions, self.is_validation)
        part.steps = self.steps[first:end]
        part.values = self.values[first:end]
        return part

    def not_finite_since(self) -> int | None:
        """Return the step from which on no value is finite; None if the last one is."""
        last_good = self.steps[-1] if self.steps else -1
        for step in self.bad_steps:
            if step > last_good:
                return step
        return None

    def statistics(self) -> RunningStatistics:
        """Return the running statistics of all its values."""
        self._statistics.extend(self.values)
        return self._statistics

    def noise(self, count: int | None = None) -> float:
        """Return the standard deviation of a value around its trend, over the first `count` values.

        The mean difference between consecutive values is the trend, and the deviation of the differences from it is
        noise. The largest difference is left out, since it may be a fall. A share is at least as noisy as one of so
        many completions. The noise of three values or fewer is infinite.
        """
        count = count or len(self.values)
        if count < 4:
            return math.inf
        statistics = self.statistics()
        jump = statistics.jumps[count - 1]
        trend = (self.values[count - 1] - self.values[0] - jump) / (count - 2)
        squares = statistics.squares[count - 1] - jump**2 - (count - 2) * trend**2
        # The trend takes one degree of freedom, and a difference has twice the variance of a value.
        noise = math.sqrt(max(squares, 0.0) / (2 * (count - 3)))
        if self.is_share and self.completions:
            share = min(max(statistics.totals[count] / count, 0.0), 1.0)
            noise = max(noise, math.sqrt(share * (1 - share) / self.completions))
        return noise

    def chance(self, window: int, count: int | None = None) -> float:
        """Return the most by which two levels differ by chance, over the first `count` values.

        Among many windows the best one is further from their mean, and the noise of few values is less certain.
        """
        count = count or len(self.values)
        rounding = ROUNDING * abs(self.statistics().totals[count]) / count
        noise = self.noise(count)
        if noise == 0 or noise == math.inf:
            return noise + rounding
        luck = max(BEYOND_NOISE, 2 * math.sqrt(2 * math.log(count / window)))
        certainty = (count - 3) / (count - 1)
        if not self.is_validation:  # a step is a mean over fewer prompts than a validation, with larger outliers
            certainty **= 2
        return luck * noise / math.sqrt(window) / certainty + rounding

    def windows(self) -> list[int]:
        """Return how many values its levels can be means over: each twice the one before, up to a third of them."""
        most = max(1, len(self.values) // 3)
        windows = [min(VALIDATION_WINDOW if self.is_validation else WINDOW, most)]
        while 2 * windows[-1] <= most:
            windows.append(2 * windows[-1])
        return windows

    def window(self, change: float = TENTH) -> int:
        """Return the smallest of its windows, but the first, whose levels are certain enough to show a change.

        `change` is a share of what lies between 0, or its lowest value if that is less, and its highest value. If no
        window is large enough for it, the largest one is returned.
        """
        statistics = self.statistics()
        span = 1.0 if self.is_share else statistics.highest - min(0.0, statistics.lowest)
        noise = self.noise()
        windows = self.windows()
        for window in windows[1:]:
            if BEYOND_NOISE * noise / math.sqrt(window) <= change * span:
                return window
        return windows[-1]

    def ends(self, window: int) -> tuple[float, float]:
        """Return its first and its last level over a window."""
        totals = self.statistics().totals
        return totals[window] / window, (totals[-1] - totals[-1 - window]) / window

    def levels(self, window: int | None = None) -> Levels:
        """Return its levels over a window, or over that of `window()`; it must have a value."""
        window = window or self.window()
        known = self.statistics().levels
        if window not in known:
            known[window] = self._levels(window)
        return known[window]

    def _levels(self, window: int) -> Levels:
        totals = self.statistics().totals
        window_sums = list(map(sub, islice(totals, window, None), totals))
        return Levels(
            window=window,
            first=window_sums[0] / window,
            best=max(window_sums) / window,
            lowest=min(window_sums) / window,
            last=window_sums[-1] / window,
            error=self.noise() / math.sqrt(window),
            chance=self.chance(window),
        )

    def rose(self) -> bool:
        """Return whether some level was above the first one by more than chance, judged by the values up to it.

        What rose once has risen, whatever came later; whether it fell is another question.
        """
        count = len(self.values)
        totals = self.statistics().totals
        for window in self.windows():
            for end in range(3 * window, count + 1, max(1, window // 2)):
                gained = (totals[end] - totals[end - window] - totals[window]) / window
                if gained > 0 and gained > self.chance(window, end):
                    return True
        return False

    def rise_in_errors(self) -> float:
        """Return by how many standard errors the mean of its last third is above that of its first one."""
        third = len(self.values) // 3
        if third == 0:
            return 0.0
        difference = fmean(self.values[-third:]) - fmean(self.values[:third])
        error = self.error_of_thirds()
        if error == 0:
            return math.copysign(math.inf, difference) if difference else 0.0
        return difference / error

    def error_of_thirds(self) -> float:
        """Return the standard error of the difference between the means of its last and its first third."""
        count = len(self.values)
        if count < 4:
            return math.inf
        return self.noise() * math.sqrt(2 / (count // 3)) * (count - 1) / (count - 3)

    def left_since(self, levels: Levels, is_up: bool = False) -> int:
        """Return the step since which it has been away from its best level, or with `is_up` from its lowest one.

        That is the step after the last window whose mean is still near to that level: no further from it than half of
        what chance explains, and than a quarter of the way to the last level.
        """
        window = levels.window
        left_at_last = levels.last - levels.lowest if is_up else levels.best - levels.last
        near = min(levels.chance / 2, left_at_last / 4)
        totals = self.statistics().totals
        for end in range(len(self.values), window - 1, -1):
            mean = (totals[end] - totals[end - window]) / window
            left = mean - levels.lowest if is_up else levels.best - mean
            if left <= near:
                return self.steps[min(end, len(self.steps) - 1)]
        return self.steps[0]


def _further_from_0(one: float, other: float) -> float:
    return one if abs(one) >= abs(other) else other


class History:
    """The numbers of a run so far, a series each, by the names of `frameworks`.

    Args:
        completions: of how many completions a step's numbers are the mean; None if that is unknown.
    """

    def __init__(self, completions: int | None = None) -> None:
        self.completions = completions
        self.series: dict[str, Series] = {}
        self.steps = array("q")

    def __getitem__(self, name: str) -> Series:
        """Return the series of a number, one without values if it was not logged."""
        return self.series.get(name, _EMPTY)

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one more step."""
        self.steps.append(step)
        for name, value in numbers.items():
            if name not in self.series:
                self.series[name] = Series(name in SHARES, self.completions, is_validation=name == "validation")
            self.series[name].add(step, value)

    def until(self, step: int) -> "History":
        """Return the part of it up to a step."""
        part = History(self.completions)
        part.steps = self.steps[: bisect_right(self.steps, step)]
        for name, series in self.series.items():
            until = series.until(step)
            if until.values or until.bad_steps:
                part.series[name] = until
        return part

    def most(self, name: str) -> float:
        """Return the largest value of a number, 0 if it has none."""
        return self[name].statistics().highest if len(self[name]) else 0.0

    def floor(self, name: str) -> float:
        """Return the least that a number can be: 0, or its lowest value if that is less.

        A reward can also be as low as that of the worst completion of a usual step.
        """
        floor = self[name].statistics().lowest
        if name == "reward" and len(self["lowest"]):
            floor = min(floor, median(self["lowest"].values))
        return min(floor, 0.0)

    def ceiling(self, name: str) -> float:
        """Return the most that an outcome can be: 1 if it is a share, else the reward of the best completion of a usual
        step; infinite where that is not logged."""
        is_share = self[name].is_share or (name == "validation" and len(self["validation_limit"]) > 0)
        if is_share:
            return 1.0 if self.most(name) <= 1 else math.inf
        highest = sorted(self["highest"].values)
        if not highest:
            return math.inf
        usual = highest[int(USUAL * len(highest))]
        return usual if usual > self.floor(name) else math.inf

    def filled(self, name: str, level: float) -> float:
        """Return a level of an outcome as a share of what lies between its floor and its ceiling."""
        floor = self.floor(name)
        return (level - floor) / (self.ceiling(name) - floor)

    def span(self, name: str) -> float:
        """Return what lies between a number's floor and its highest value."""
        return self.most(name) - self.floor(name)


_EMPTY = Series()
