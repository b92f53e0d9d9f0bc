"""What moved in a run, what that means, and what to try: a table with a row for each way in which a number gets worse.

A move is no fault by itself: `verdict` says whether there is one, from the outcome.
"""

import math
from typing import NamedTuple

from gtpo_verl.monitor.frameworks import PART, remedy
from gtpo_verl.monitor.series import History

LABELS = {
    "terminated": "completions with EOS",
    "aborted": "aborted completions",
    "repetition": "repetition",
    "zero_std_groups": "zero-std groups",
    "reward_std": "reward std in a group",
    "no_correct_groups": "no-correct groups",
    "positive": "positive advantages",
    "dropped": "filtered completions",
    "exact_format": "exact format",
    "format": "format reward",
    "validation": "validation",
    "accuracy": "accuracy",
    "reward": "reward",
    "entropy": "entropy, nats per token",
    "length": "length, tokens",
    "mismatch": "rollout/trainer mismatch",
    "kl": "KL",
    "grad_norm": "gradient norm",
    "loss": "loss",
}
"""What each number of a run is called on the screen, in the order of its table."""
LESS_IS_BETTER = ("aborted", "repetition", "no_correct_groups", "mismatch", "kl")
"""Numbers whose best level is the lowest one."""
FACTOR = 3.0
"""A number that is no share moved if its levels differ by this factor."""
SHARE = 0.15
"""A share moved if its levels differ by so much; a part of the reward, by so much of what the reward spans."""


class Advice(NamedTuple):
    """What to do.

    Args:
        sentence: for the screen, with {since} for the step since which something is wrong.
        remedy: a key of `frameworks.Framework.remedies`, whose override is named with it; empty if there is none.
    """

    sentence: str
    remedy: str = ""


LOST = Advice(
    "Go back to the last checkpoint before step {since}, and read completions from before and after it: did the data, "
    "the reward function or a tool change? If not, the updates are too large: lower the learning rate.",
    remedy="lr",
)
VALIDATION_FELL = Advice(
    "Use a checkpoint from before step {since}. Does the reward in training pay for what the validation does not?",
)
EOS_LOST = Advice(
    "Read completions. If they reason longer, raise the limit; if they run on, go back to the last checkpoint before "
    "step {since}, and lower the learning rate.",
    remedy="limit",
)
FORMAT_LOST = Advice(
    "Go back to the last checkpoint before step {since}, and lower the learning rate; a reward for the exact format, "
    "and for nothing else, sees it.",
    remedy="lr",
)
NOT_FINITE = Advice(
    "Go back to the last checkpoint before step {since}; that step's batch, the precision and the loss may say why.",
)
NEVER_FINITE = Advice(
    "It was so from the first step, so there is no checkpoint to go back to. Look at the configuration: the precision, "
    "a micro batch larger than a rank's share, the reference model.",
)
CUT_OFF = Advice(
    "Completions are cut off at the limit: raise it, or mask or penalise overlong completions.",
    remedy="limit",
)
EQUAL_REWARDS = Advice(
    "Groups need rewards that differ: a finer reward, a higher temperature, easier or harder questions.",
)
FROZEN = Advice(
    "Nothing is trained, and not for the rewards: look for frozen or unattached adapters, a learning rate of 0 "
    "(warm-up, schedule), the version of DeepSpeed with ZeRO, the precision.",
)
NO_GRADIENT = Advice(
    "Do the rewards of a group differ? If they do, look for frozen or unattached adapters, a learning rate of 0 "
    "(warm-up, schedule), the version of DeepSpeed with ZeRO, the precision.",
)
FILTERED = Advice(
    "Each completion's entropy is above the limit of the filter: set algorithm.gtpo.completion_filter=never, or look "
    "at the model's first entropy.",
)
NONE_POSITIVE = Advice(
    "Rewards differ, but none reaches algorithm.gtpo.min_correct_reward: set it to that of a right answer.",
)
NEVER_PAID = Advice(
    "Look at the reward function, the form of an answer that it reads, the limit of a completion, and the questions.",
    remedy="look",
)
NO_PROGRESS = Advice(
    "Read completions: is there anything to learn? If there is, try larger updates or more completions a step.",
)


class Row(NamedTuple):
    """One way in which a number gets worse.

    Args:
        number: a key of `LABELS`, or a part of the reward.
        worse: "up" or "down".
        meaning: what it means that it got worse.
        advice: what to do.
        least: levels below this one are taken for it, since what happens below means nothing.
    """

    number: str
    worse: str
    meaning: str
    advice: Advice
    least: float = 0.0


ROWS = (
    Row(
        number="kl",
        worse="up",
        meaning="the policy moves far from the reference model",
        advice=Advice("Lower the learning rate, or raise the coefficient of KL.", remedy="lr"),
        least=0.1,
    ),
    Row(
        number="grad_norm",
        worse="up",
        meaning="updates get larger",
        advice=Advice("Lower the learning rate, or clip the gradient.", remedy="lr"),
        least=0.05,
    ),
    Row(
        number="entropy",
        worse="up",
        meaning="the policy drifts towards noise",
        advice=Advice("Lower the learning rate, and an entropy bonus if there is one.", remedy="lr"),
        least=0.2,
    ),
    Row(
        number="entropy",
        worse="down",
        meaning="the policy no longer explores",
        advice=Advice(
            "Add an entropy bonus or KL, make fewer updates a batch, or raise the upper clip range where it clips.",
            remedy="explore",
        ),
        least=0.03,
    ),
    Row(
        number="terminated",
        worse="down",
        meaning="completions are cut off at the limit",
        advice=EOS_LOST,
    ),
    Row(
        number="length",
        worse="up",
        meaning="completions get longer",
        advice=Advice("Read some. If they reason longer, raise the limit; if not, penalise length.", remedy="limit"),
    ),
    Row(
        number="length",
        worse="down",
        meaning="completions get shorter",
        advice=Advice("Read some: is the reasoning gone?", remedy="look"),
    ),
    Row(
        number="exact_format",
        worse="down",
        meaning="completions have text outside the exact format",
        advice=FORMAT_LOST,
    ),
    Row(
        number="format",
        worse="down",
        meaning="completions lose their format",
        advice=FORMAT_LOST,
    ),
    Row(
        number="repetition",
        worse="up",
        meaning="completions repeat themselves",
        advice=Advice("Read some; lower the learning rate.", remedy="look"),
    ),
    Row(
        number="aborted",
        worse="up",
        meaning="completions are aborted",
        advice=Advice("Look at the rollout server's log.", remedy="look"),
    ),
    Row(
        number="zero_std_groups",
        worse="up",
        meaning="groups have equal rewards, which teach nothing",
        advice=Advice("Leave such groups out, change the questions, or make the reward finer.", remedy="filter"),
    ),
    Row(
        number="no_correct_groups",
        worse="up",
        meaning="groups have no right answer",
        advice=Advice("Leave such groups out, or take easier questions.", remedy="filter"),
    ),
    Row(
        number="reward_std",
        worse="down",
        meaning="rewards in a group hardly differ",
        advice=EQUAL_REWARDS,
    ),
    Row(
        number="mismatch",
        worse="up",
        meaning="rollout and trainer disagree about probabilities",
        advice=Advice("Correct for it, and look at the precision of both.", remedy="correct"),
        least=0.01,
    ),
    Row(
        number="dropped",
        worse="up",
        meaning="GTPO's filter drops completions",
        advice=FILTERED,
    ),
)
"""Each way in which a number that is no outcome gets worse."""


class Move(NamedTuple):
    """A number that got worse: from its first level to its last one, since a step.

    `deviations` is the change in standard errors of a level.
    """

    row: Row
    first: float
    last: float
    since: int
    deviations: float

    def text(self) -> str:
        """Return what moved, with its levels, and what that means."""
        return f"{label(self.row.number)} went from {self.first:.3g} to {self.last:.3g}: {self.row.meaning}"


def label(name: str) -> str:
    """Return what a number is called."""
    return LABELS.get(name, name)


def row_of(number: str, worse: str = "down") -> Row:
    """Return the row of a number that gets worse by going up, or down."""
    return next(row for row in ROWS if (row.number, row.worse) == (number, worse))


def moves(history: History) -> list[Move]:
    """Return what got worse, the largest first, by one rule for all numbers.

    The last level differs from the first one by more than chance, *and* by a factor, or by a share if it is one.
    """
    moved = []
    for row in [*ROWS, *_rows_of_parts(history)]:
        move = _move(row, history)
        if move is not None:
            moved.append(move)
    return sorted(moved, key=lambda move: -move.deviations)


def constant_parts(history: History) -> dict[str, float]:
    """Return the parts of the reward that had one value in each of ten steps or more, with that value."""
    constant = {}
    for name, series in history.series.items():
        if name.startswith(PART) and len(series) >= 10 and series.statistics().lowest == series.statistics().highest:
            constant[name] = series.values[0]
    return constant


def _rows_of_parts(history: History) -> list[Row]:
    rows = []
    for name in history.series:
        if name.startswith(PART):
            row = Row(
                number=name,
                worse="down",
                meaning=f"{name.removeprefix(PART)}, a part of the reward, falls",
                advice=Advice("Read completions: what does the sum of the rewards pay for instead?"),
            )
            rows.append(row)
    return rows


def _move(row: Row, history: History) -> Move | None:
    """Return how far a number went the way that is worse; None if that is not far."""
    series = history[row.number]
    if len(series) < 4:
        return None

    # Levels are no further apart than values: for most numbers this costs little and is enough.
    extremes = series.statistics()
    if not _is_far(row, history, extremes.lowest, extremes.highest):
        return None

    window = series.window()
    first, last = series.ends(window)
    is_up = row.worse == "up"
    change = last - first if is_up else first - last
    if change <= series.chance(window) or not _is_far(row, history, first, last):
        return None
    levels = series.levels(window)
    return Move(
        row=row,
        first=levels.first,
        last=levels.last,
        since=series.left_since(levels, is_up),
        deviations=change / levels.error if levels.error else math.inf,
    )


def _is_far(row: Row, history: History, first: float, last: float) -> bool:
    """Return whether two levels differ by the factor, or by the share, from which on a number moved."""
    if row.number.startswith(PART):
        return abs(last - first) >= SHARE * history.span("reward")
    if history[row.number].is_share:
        return abs(last - first) >= SHARE
    low, high = sorted((max(first, row.least), max(last, row.least)))
    return high >= FACTOR * low


def override(advice: Advice | None, history: History, framework: str, limit: float | None) -> str:
    """Return the override to try, in a run's framework; empty if there is none, or an old value that it needs."""
    if advice is None:
        return ""
    if advice.remedy == "explore" and not history.most("clipped"):
        return ""  # the clip range is wide enough: nothing was clipped
    return remedy(advice.remedy, framework, history.most("lr"), limit)
