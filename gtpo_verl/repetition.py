"""Repetition inside a completion."""

from collections.abc import Sequence

import numpy as np

NGRAM = 8
"""Tokens; a power of two."""


def repetition(token_ids: Sequence[int] | np.ndarray) -> float:
    """The share of a completion's tokens that lie in an n-gram of `NGRAM` tokens that it has more than once.

    Args:
        token_ids: (length,) its tokens.

    Returns:
        From 0 to 1; 0 for a completion shorter than two such n-grams that overlap.
    """
    # Tokens, then pairs, then pairs of pairs, are numbered so that equal ones have equal numbers.
    numbers, width = np.asarray(token_ids, dtype=np.int64), 1
    if len(numbers) <= NGRAM:
        return 0.0
    while width < NGRAM:
        pairs = numbers[:-width] * (numbers.max() + 1) + numbers[width:]
        numbers, width = np.unique(pairs, return_inverse=True)[1], 2 * width
    is_repeated = np.bincount(numbers)[numbers] > 1
    return float((np.convolve(is_repeated, np.ones(NGRAM)) > 0).mean())
