"""What is monitored of completions, whatever trains them: repetition, and groups that teach nothing right."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

NGRAM = 8
"""Tokens; a power of two."""


def repetition(token_ids: Sequence[int] | np.ndarray) -> float:
    """Return the share of a completion's (length,) tokens that lie in an n-gram of `NGRAM` tokens that it has more than
    once; 0 for a completion shorter than two such n-grams that overlap."""
    # Tokens, then pairs, then pairs of pairs, are numbered so that equal ones have equal numbers.
    numbers, width = np.asarray(token_ids, dtype=np.int64), 1
    if len(numbers) <= NGRAM:
        return 0.0
    while width < NGRAM:
        pairs = numbers[:-width] * (numbers.max() + 1) + numbers[width:]
        numbers, width = np.unique(pairs, return_inverse=True)[1], 2 * width
    is_repeated = np.bincount(numbers)[numbers] > 1
    return float((np.convolve(is_repeated, np.ones(NGRAM)) > 0).mean())


def group_shares(
    groups: Collection[Collection[Mapping[str, float]]], reward: str, right: str
) -> tuple[float, float | None]:
    """Return the share of groups with equal rewards, and of the other groups that in which no completion is right.

    Groups are the scores of each prompt's completions: `reward`, and `right`, above 0 for a right answer. The second is
    None if there is no other group, or not every completion says whether it is right.
    """
    unequal = [group for group in groups if len({scores[reward] for scores in group}) > 1]
    known = unequal and all(right in scores for group in unequal for scores in group)
    none_right = sum(not any(scores[right] > 0 for scores in group) for group in unequal) if known else 0
    return 1 - len(unequal) / len(groups), none_right / len(unequal) if known else None
