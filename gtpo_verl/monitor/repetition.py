"""What is monitored of completions, whatever trains them: repetition, and groups that teach nothing right."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

NGRAM = 8
"""Tokens; a power of two."""


def repetition(token_ids: "Sequence[int] | np.ndarray") -> float:
    """Return the share of a completion's (length,) tokens that lie in an n-gram of `NGRAM` tokens that it has more than
    once; 0 for a completion shorter than two such n-grams that overlap."""
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
    """Return the share of groups with equal rewards, and of the other groups that in which no completion is right.

    Groups are the scores of each prompt's completions: `reward`, and `right`, above 0 for a right answer. The second is
    None if there is no other group, or not every completion says whether it is right.
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
