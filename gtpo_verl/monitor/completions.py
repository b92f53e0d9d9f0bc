"""Two metrics of completions, whatever trains them: how far they repeat themselves, and groups that teach nothing."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NGRAM = 8
"""Tokens; a power of two."""


def repetition(token_ids: "Sequence[int] | np.ndarray") -> float:
    """Return the share of a completion's (length,) tokens that lie in an n-gram which it has more than once.

    An n-gram has `NGRAM` tokens, and two of them may overlap; a completion too short for two repeats nothing.
    """
    import numpy as np  # here, since what imports this module may only print its help

    numbers = np.asarray(token_ids, dtype=np.int64)
    if len(numbers) <= NGRAM:
        return 0.0

    # Tokens, then pairs, then pairs of pairs, are numbered so that equal ones have equal numbers.
    width = 1
    while width < NGRAM:
        pairs = numbers[:-width] * (numbers.max() + 1) + numbers[width:]
        _, numbers = np.unique(pairs, return_inverse=True)
        width *= 2

    is_repeated = np.bincount(numbers)[numbers] > 1
    is_covered = np.convolve(is_repeated, np.ones(NGRAM)) > 0
    return float(is_covered.mean())


def group_shares(
    groups: Collection[Collection[Mapping[str, float]]], reward: str, right: str
) -> tuple[float, float | None]:
    """Return the share of groups with equal rewards, and the share of the other groups that have no right completion.

    Args:
        groups: for each prompt the scores of its completions.
        reward: which of the scores is the reward.
        right: which of them is above 0 for a right answer.

    The second share is None if all groups have equal rewards, or if a completion of the others lacks the score `right`.
    """
    unequal = []
    for group in groups:
        rewards = {scores[reward] for scores in group}
        if len(rewards) > 1:
            unequal.append(group)
    equal_share = 1 - len(unequal) / len(groups)
    if not unequal:
        return equal_share, None

    none_right = 0
    for group in unequal:
        if not all(right in scores for scores in group):
            return equal_share, None
        if not any(scores[right] > 0 for scores in group):
            none_right += 1
    return equal_share, none_right / len(unequal)
