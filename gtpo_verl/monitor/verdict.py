"""Whether a run is healthy: five questions in this order, of which the first with an answer decides.

The outcome decides: the validation, else accuracy, else the reward. Another number is a fault only if nothing could be
learned because of it from the first step on, if it is the share of EOS or the format, which no reward need see, or if
the outcome did not rise.
"""

import math
from collections.abc import Callable
from statistics import fmean
from typing import NamedTuple

from gtpo_verl.monitor import explain
from gtpo_verl.monitor.explain import Advice, Move, label
from gtpo_verl.monitor.series import TENTH, WINDOW, History, Series

HEALTHY = "healthy"
DEGRADED = "degraded"
FAILED = "failed"
CANNOT_TELL = "cannot tell"

OUTCOMES = ("validation", "accuracy", "reward")
"""The outcomes, the one that says most first."""
UNSEEN = ("terminated", "exact_format", "format")
"""What the reward need not see."""
VALIDATIONS = 4
"""Fewer validations decide nothing."""
VALUES = 12
"""Fewer values of accuracy or the reward decide nothing."""
FIRST_STEPS = 10
"""What is so in as many first values, and nearly always after, is so "from the first step on"."""
NEARLY_ALL = 0.9
"""What is so in this share of steps is so nearly always."""
ALL_EQUAL = 0.99
"""All groups have equal rewards if at least this share has."""
MOSTLY_CUT_OFF = 0.85
"""Nearly all completions are cut off if at least this share is."""
HARDLY_EVER = 0.02
"""Hardly a completion is right if at most this share is."""
HALF = 0.5
"""The run failed if more than this share of what an outcome was, or had gained, is gone."""
NO_PROGRESS_STEPS = 100
"""In fewer steps an outcome need not make progress."""
SEEN = 2.5
"""A change between two thirds of a run is seen from so many of its standard errors on."""
AT_CEILING = 0.9
"""An outcome has nowhere to rise from this share of its ceiling on."""
ROOM = 0.8
"""An outcome has room to rise below this share of its ceiling."""
FAR = 8.0
"""A number that moved by more standard errors than that moved "far"."""
MOVED_VALUES = 48
"""A move is a fault beside an outcome that does not rise if its number has so many values."""
AT_FLOOR = 0.1
"""A number is at its floor below this share of its first level."""
BETWEEN_LOOKS_BACK = 10
"""Where the steps so far show nothing, the verdicts at every tenth of them are looked at, from the last one back."""
LONG = 2500
"""From so many steps on the verdicts that are looked at are further apart, so that a long run takes no longer."""


class Verdict(NamedTuple):
    """What is wrong with a run, if anything.

    Args:
        word: `HEALTHY`, `DEGRADED`, `FAILED` or `CANNOT_TELL`.
        why: one line, with its numbers.
        number: the number that decides; empty if there is none.
        since: the step since which it is so; None if there is none.
        advice: what to do; None if nothing is wrong.
        window: values that the levels in `why` are means over; 0 if it has none.
        lost: the share of the number that is gone; 0 if it did not fall.
        is_worse_high: whether the number is worse the higher it is.
    """

    word: str
    why: str
    number: str = ""
    since: int | None = None
    advice: Advice | None = None
    window: int = 0
    lost: float = 0.0
    is_worse_high: bool = False


def judge(history: History) -> Verdict:
    """Return the verdict on a run: the current one, or an earlier one if that is "cannot tell".

    What was decided stays decided until other numbers decide otherwise: noise alone takes no verdict back.
    """
    verdict = current_verdict(history)
    if verdict.word != CANNOT_TELL:
        return verdict
    return _earlier_verdict(history) or verdict


def current_verdict(history: History) -> Verdict:
    """Return the answer of the first question that has one, by all steps so far."""
    return not_finite(history) or _verdict_on_finite_numbers(history)


def _verdict_on_finite_numbers(history: History) -> Verdict:
    questions: list[Callable[[History], Verdict | None]] = [nothing_to_learn_from, outcome_fell, unseen_loss]
    for question in questions:
        verdict = question(history)
        if verdict is not None:
            return verdict
    return outcome_rose(history)


def _earlier_verdict(history: History) -> Verdict | None:
    """Return what is left of the last earlier verdict; None if every one was "cannot tell".

    A number that was not finite then is finite now, which is no noise, so such verdicts do not count.
    """
    between = BETWEEN_LOOKS_BACK * (1 + len(history.steps) // LONG)
    last = (len(history.steps) - 1) // between * between
    for count in range(last, 0, -between):
        step = history.steps[count - 1]
        before = _verdict_on_finite_numbers(history.until(step))
        if before.word != CANNOT_TELL:
            return _what_is_left_of(before, step, history)
    return None


def _what_is_left_of(before: Verdict, step: int, history: History) -> Verdict:
    """Return the verdict at an earlier step, after which nothing was decided, as it is now.

    A failure that is no longer seen is none: the run is degraded, or healthy if what it had lost is back.
    """
    series = history[before.number]
    now = series.levels().last
    if not before.lost:
        return before._replace(why=f"as of step {step}, {before.why}; {label(before.number)} is {now:.3g} now")
    best = series.levels(before.window).best
    if best - now <= TENTH * (best - history.floor(before.number)):
        return Verdict(
            word=HEALTHY,
            why=f"{before.why} by step {step}, and is back at {now:.3g}",
            number=before.number,
            window=series.window(),
        )
    return before._replace(word=DEGRADED, why=f"{before.why} by step {step}; it is {now:.3g} now")


def not_finite(history: History) -> Verdict | None:
    """Is the loss, the gradient norm, the reward or the entropy not finite at the end?

    KL counts only where neither of the first two is logged: beside them it has no effect.
    """
    names = ["loss", "grad_norm", "reward", "entropy"]
    if "loss" not in history.series and "grad_norm" not in history.series:
        names.append("kl")
    broken = {}
    for name in names:
        since = history[name].not_finite_since()
        if since is not None:
            broken[name] = since
    if not broken:
        return None
    number = min(broken, key=broken.__getitem__)
    since = broken[number]
    return Verdict(
        word=FAILED,
        why=f"not finite: {', '.join(map(label, broken))}",
        number=number,
        since=since,
        advice=explain.NOT_FINITE if len(history[number]) else explain.NEVER_FINITE,
    )


def nothing_to_learn_from(history: History) -> Verdict | None:
    """Was something so in nearly every step, from the first one on, that nothing can be learned?"""
    rewards_differ = _rewards_differ(history)
    can_be_equal = not _is_at_ceiling(history)
    if _mean_is_always(history["terminated"], 0.0, 1 - MOSTLY_CUT_OFF):
        return _from_the_start(history, "terminated", "nearly all completions are cut off", explain.CUT_OFF)
    if _mean_is_always(history["dropped"], NEARLY_ALL, 1.0):
        return _from_the_start(history, "dropped", "GTPO's filter drops nearly every completion", explain.FILTERED)
    if can_be_equal and _mean_is_always(history["zero_std_groups"], ALL_EQUAL, 1.0):
        return _from_the_start(history, "zero_std_groups", "all groups have equal rewards", explain.EQUAL_REWARDS)
    if can_be_equal and not len(history["zero_std_groups"]) and _is_always_0(history["reward_std"]):
        return _from_the_start(history, "reward_std", "nearly all groups have equal rewards", explain.EQUAL_REWARDS)
    if _is_always_0(history["grad_norm"]) and not _equal_rewards_stop_the_gradient(history):
        if rewards_differ:
            return _from_the_start(history, "grad_norm", "the gradient is 0 although rewards differ", explain.FROZEN)
        return _from_the_start(history, "grad_norm", "the gradient is 0", explain.NO_GRADIENT)
    if rewards_differ and _is_always_0(history["positive"]):
        return _from_the_start(history, "positive", "no advantage is positive", explain.NONE_POSITIVE)
    if _is_always_0(history["reward"]):
        return _from_the_start(history, "reward", "hardly a completion ever got a reward", explain.NEVER_PAID)
    if _mean_is_always(history["accuracy"], 0.0, HARDLY_EVER):
        return _from_the_start(history, "accuracy", "hardly a completion was ever right", explain.NEVER_PAID)
    return None


def outcome_fell(history: History) -> Verdict | None:
    """Did the outcome fall below its best sustained level, beyond noise and a tenth, and stay there?

    Failed if half of what lies between its floor and its best, or half of what it had gained, is gone; else degraded.
    Validations outweigh a fall in training that some of them came before and after.
    """
    for name in _outcomes_that_may_fall(history):
        verdict = _fell(history, name, explain.VALIDATION_FELL if name == "validation" else explain.LOST)
        if verdict is None or verdict.since is None:
            continue
        if name == "validation" or not _validation_holds(history, verdict.since):
            return verdict._replace(word=FAILED if verdict.lost > HALF else DEGRADED)
    return None


def _outcomes_that_may_fall(history: History) -> list[str]:
    """Return the outcomes that can decide, the one that says most of a fall first.

    An accuracy says more than the reward, which is left out; but one that was never above a tenth says less.
    """
    names = outcomes(history)
    if "accuracy" not in names or "reward" not in names:
        return names
    names.remove("reward")
    if history["accuracy"].levels().best <= TENTH:
        names.insert(names.index("accuracy"), "reward")
    return names


def unseen_loss(history: History) -> Verdict | None:
    """Did what the reward need not see, the share of EOS or of the format, lose half?"""
    for name in UNSEEN:
        if len(history[name]) >= VALUES:
            verdict = _fell(history, name, explain.row_of(name).advice)
            if verdict is not None and verdict.lost > HALF:
                return verdict
    return None


def outcome_rose(history: History) -> Verdict:
    """Did the outcome rise, or does it stand at its ceiling?

    If not, the run is degraded by another number that moved far the way that failing runs go, or by no progress where a
    rise of a tenth would have been seen.
    """
    names = outcomes(history)
    if not names:
        return _no_outcome(history)

    # The first outcome that rose decides; one that did not, though that would have been seen, makes no progress.
    name = names[0]
    makes_no_progress = False
    for candidate in names:
        verdict = _rose(history, candidate)
        if verdict is not None:
            return verdict
        if _shows_a_tenth(history, candidate) and not _may_be_at_ceiling(history, candidate):
            name = candidate
            makes_no_progress = True
            break

    window = history[name].window()
    moved = _moved_far(history)
    if moved:
        worst = moved[0]
        return Verdict(
            word=DEGRADED,
            why=f"{_levels_text(history, name)}; {worst.text()}",
            number=worst.row.number,
            since=worst.since,
            advice=worst.row.advice,
            window=window,
            is_worse_high=worst.row.worse == "up",
        )
    if makes_no_progress:
        return Verdict(
            word=DEGRADED,
            why=f"no progress: {_levels_text(history, name)}",
            number=name,
            since=history[name].steps[0],
            advice=explain.NO_PROGRESS,
            window=window,
        )
    return Verdict(
        word=CANNOT_TELL,
        why=f"neither rose nor fell beyond noise: {_levels_text(history, name)}; {_what_would_tell(history, name)}",
        number=name,
        window=window,
    )


def outcomes(history: History) -> list[str]:
    """Return the outcomes that can decide, the one that says most first."""
    names = []
    for name in OUTCOMES:
        if len(history[name]) >= (VALIDATIONS if name == "validation" else VALUES):
            names.append(name)
    return names


def _from_the_start(history: History, name: str, why: str, advice: Advice) -> Verdict:
    """Return the verdict on a run that has been degraded since its first value of a number."""
    return Verdict(word=DEGRADED, why=why, number=name, since=history[name].steps[0], advice=advice)


def _is_always_0(series: Series) -> bool:
    """Return whether nearly all of ten values or more are 0, and most of the first ones."""
    first = series.values[:FIRST_STEPS]
    if len(first) < FIRST_STEPS:
        return False
    return first.count(0.0) > HALF * len(first) and series.values.count(0.0) >= NEARLY_ALL * len(series)


def _mean_is_always(series: Series, low: float, high: float) -> bool:
    """Return whether the means of the first ten values, of the last third and of all lie within these limits."""
    first = series.values[:FIRST_STEPS]
    if len(first) < FIRST_STEPS:
        return False
    last = series.values[-(len(series) // 3) :]
    return all(low <= fmean(part) <= high for part in (first, last, series.values))


def _rewards_differ(history: History) -> bool:
    """Return whether rewards are known to differ within groups."""
    equal = history["zero_std_groups"].values
    return min(equal, default=1.0) < 1 or history.most("reward_std") > 0


def _equal_rewards_stop_the_gradient(history: History) -> bool:
    """Return whether the gradient is 0 in hardly more steps than groups have equal rewards, as in steps of one group.

    If all groups have equal rewards, that is a fault by itself.
    """
    equal = history["zero_std_groups"].values
    gradients = history["grad_norm"].values
    return bool(equal) and gradients.count(0.0) / len(gradients) < fmean(equal) + TENTH


def _is_at_ceiling(history: History) -> bool:
    """Return whether the outcome that says most began where it has nowhere to rise."""
    names = outcomes(history)
    return bool(names) and history.filled(names[0], history[names[0]].levels().first) >= AT_CEILING


def _fell(history: History, name: str, advice: Advice) -> Verdict | None:
    """Return how a number fell below its best level, beyond noise and a tenth; None if it did not."""
    series = history[name]
    floor = history.floor(name)
    smallest = series.window(2 * TENTH)
    windows = [window for window in series.windows() if window >= smallest]
    first = series.levels(smallest).first
    worst: Verdict | None = None
    for window in windows:
        levels = series.levels(window)
        lost = levels.best - levels.last
        whole = levels.best - floor
        gained = levels.best - first
        if lost <= levels.chance or lost <= TENTH * whole:
            continue
        if not _stays_below(series, window, levels.best - TENTH * whole):
            continue
        share = lost / whole
        if name in OUTCOMES and gained > TENTH * whole:
            share = max(share, min(lost / gained, 1.0))
        if worst is None or share > worst.lost:
            worst = Verdict(
                word=DEGRADED,
                why=f"{label(name)} fell from {levels.best:.3g} to {levels.last:.3g}",
                number=name,
                since=series.left_since(levels),
                advice=advice,
                window=window,
                lost=share,
            )
    return worst


def _stays_below(series: Series, window: int, level: float) -> bool:
    """Return whether both halves of the last window are below a level: it has fallen, and has not come back."""
    half = max(1, window // 2)
    values = series.values[-window:]
    return max(fmean(values[:half]), fmean(values[-half:])) < level


def _validation_holds(history: History, since: int) -> bool:
    """Return whether validations from before and after a step show that nothing was lost there."""
    validation = history["validation"]
    if len(validation) < VALIDATIONS or not validation.steps[0] < since < validation.steps[-1]:
        return False
    levels = validation.levels()
    now = max(levels.last, validation.values[-1])
    return levels.best - now <= TENTH * (levels.best - history.floor("validation")) + levels.error


def _rose(history: History, name: str) -> Verdict | None:
    """Return the verdict on an outcome that rose, or stands at its ceiling; None if it does neither."""
    series = history[name]
    healthy = Verdict(HEALTHY, _levels_text(history, name), name, window=series.window())
    if series.rose():
        return _lost_its_gain(history, name) or _stands_still(history, name) or healthy
    if _shows_a_tenth(history, name) and series.rise_in_errors() > SEEN:
        return _stands_still(history, name) or healthy
    filled = history.filled(name, series.levels().first)
    if filled >= AT_CEILING or (filled >= ROOM and _shows_a_tenth(history, name)):
        return healthy
    return None


def _lost_its_gain(history: History, name: str) -> Verdict | None:
    """Return the verdict on an outcome that rose and is back, by the means of a quarter of the run or more."""
    series = history[name]
    levels = series.levels(series.windows()[-1])
    lost = levels.best - levels.last
    gained = levels.best - levels.first
    if lost <= HALF * gained or lost <= TENTH * (levels.best - history.floor(name)) or series.rise_in_errors() >= 1:
        return None
    return Verdict(
        word=DEGRADED,
        why=f"{label(name)} rose from {levels.first:.3g} to {levels.best:.3g} and is back at {levels.last:.3g}",
        number=name,
        since=series.left_since(levels),
        advice=explain.LOST,
        window=levels.window,
    )


def _stands_still(history: History, name: str) -> Verdict | None:
    """Return the verdict on an outcome that has not risen since the entropy reached its floor.

    None if that was less than half of the run ago, or if the outcome has no room to rise.
    """
    series = history[name]
    entropy = history["entropy"]
    if len(entropy) < MOVED_VALUES or history.filled(name, series.levels().last) >= ROOM:
        return None
    levels = entropy.levels()
    floor = AT_FLOOR * levels.first
    if levels.last >= floor:
        return None

    # Back from the end, to the last window whose mean is above the floor.
    end = len(entropy)
    while end > levels.window and fmean(entropy.values[end - levels.window : end]) < floor:
        end -= 1
    since = entropy.steps[min(end, len(entropy) - 1)]
    rest = series.since(since)
    if len(rest) <= HALF * len(series) or rest.rose():
        return None
    return Verdict(
        word=DEGRADED,
        why=f"entropy fell from {levels.first:.3g} to {levels.last:.3g}, and {label(name)} stands still below its "
        f"ceiling, at {series.levels().last:.3g}",
        number="entropy",
        since=since,
        advice=explain.row_of("entropy").advice,
        window=series.window(),
    )


def _shows_a_tenth(history: History, name: str) -> bool:
    """Return whether a rise of a tenth, in a hundred steps or more, would have been seen."""
    series = history[name]
    if history.steps[-1] - history.steps[0] + 1 < NO_PROGRESS_STEPS:
        return False
    first = fmean(series.values[: len(series) // 3])
    return SEEN * series.error_of_thirds() < TENTH * (first - history.floor(name))


def _may_be_at_ceiling(history: History, name: str) -> bool:
    """Return whether an outcome is near a value that many of its steps share, and none exceeds.

    That may be its ceiling, where none is known.
    """
    if history.ceiling(name) < math.inf:
        return False
    series = history[name]
    highest = history.most(name)
    shared = series.values.count(highest)
    if not max(WINDOW, TENTH * len(series)) <= shared < len(series):
        return False
    floor = history.floor(name)
    return series.levels().last - floor >= ROOM * (highest - floor)


def _moved_far(history: History) -> list[Move]:
    """Return what moved far the way that failing runs go, if each outcome has room to rise."""
    for name in outcomes(history):
        if history.filled(name, history[name].levels().last) >= ROOM or _may_be_at_ceiling(history, name):
            return []
    far = []
    for move in explain.moves(history):
        if move.deviations > FAR and len(history[move.row.number]) >= MOVED_VALUES:
            far.append(move)
    return far


def _no_outcome(history: History) -> Verdict:
    logged = [name for name in OUTCOMES if len(history[name])]
    if not logged:
        return Verdict(CANNOT_TELL, "no validation, accuracy or reward is logged")
    counts = [f"{len(history[name])} of {label(name)}" for name in logged]
    least = f"{VALUES} steps with a reward, or {VALIDATIONS} validations"
    return Verdict(CANNOT_TELL, f"it needs {least}, and has {', '.join(counts)}", logged[0])


def _what_would_tell(history: History, name: str) -> str:
    """Return what would tell more: so many steps that a rise of a tenth shows, or an outcome that is not logged."""
    series = history[name]
    if _may_be_at_ceiling(history, name):
        return f"it is healthy if {history.most(name):.3g}, which many steps reach, is the most that it can be"
    # A standard error falls with the square root of the number of steps.
    third = max(len(series) // 3, 1)
    tenth = TENTH * abs(fmean(series.values[:third]) - history.floor(name))
    change_seen = SEEN * series.error_of_thirds()
    steps_between = (series.steps[-1] - series.steps[0]) / max(len(series) - 1, 1)
    steps_made = len(series) * steps_between
    steps_needed = math.inf
    if tenth:
        steps_needed = max(steps_made * (change_seen / tenth) ** 2, NO_PROGRESS_STEPS)
    more = f"about {steps_needed:.0f} steps" if steps_needed < 10 * steps_made else "more completions a step"
    if len(history["validation"]) < VALIDATIONS:
        more += f", or {VALIDATIONS} validations"
    if not len(history["accuracy"]):
        more += ", or a logged accuracy"
    return f"{more} would tell"


def _levels_text(history: History, name: str) -> str:
    levels = history[name].levels()
    return f"{label(name)} {levels.first:.3g} at first, {levels.last:.3g} at the end"
