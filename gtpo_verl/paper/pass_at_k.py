"""pass@k and maj@k of one question (GTPO, arXiv:2508.03772, Sec. 6.1).

Both are means over all k-subsets of a question's n completions: for pass@k Chen et al.'s estimator
1 − C(n−c, k)/C(n, k) (arXiv:2107.03374), for maj@k the same mean of a majority vote, exact as well. (verl's best@k and
maj@k are bootstraps with replacement, which are biased, and its votes give a tie to the first seen.)
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

RIGHT = 0
UNPARSED = -1


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n completions, drawn without replacement, hold one of the c right ones (arXiv:2107.03374).

    Raises:
        ValueError: If not 1 <= k <= n or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={n}, c={c}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@lru_cache(maxsize=100_000)
def majority_at_k(right: int, others: tuple[int, ...], k: int) -> float:
    """Expected outcome of a majority vote among k completions drawn without replacement, a t-way tie counting 1/t.

    The votes that k draws give each answer are independent Binomial(count, k/n) variables conditioned on their sum
    being k, so the mean over all C(n, k) subsets is exact and costs a small convolution per number of right votes.

    Args:
        right: How many of the n completions give the right answer.
        others: How many give each other answer; n = right + sum(others).
        k: Size of the vote.

    Raises:
        ValueError: If not 1 <= k <= n.
    """
    n = right + sum(others)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got k={k}, n={n}")
    p = k / n
    won = 0.0
    for j in range(1, min(right, k) + 1):
        rest = k - j
        # chance[t, s]: the other answers share s votes, t of them hold exactly j and none holds more.
        chance = np.zeros((rest // j + 1, rest + 1))
        # Answers given fewer than j times cannot reach j, whatever is drawn: together they are one binomial.
        rare = _binomial(sum(count for count in others if count < j), p)[: rest + 1]
        chance[0, : len(rare)] = rare
        for count in others:
            if count < j:
                continue
            votes = _binomial(count, p)
            longer = np.zeros_like(chance)
            for v in range(min(j, rest + 1)):
                longer[:, v:] += votes[v] * chance[:, : rest + 1 - v]
            if j <= rest:
                longer[1:, j:] += votes[j] * chance[:-1, : rest + 1 - j]
            chance = longer
        won += _binomial(right, p)[j] * float((chance[:, rest] / np.arange(1, len(chance) + 1)).sum())
    return won / float(_binomial(n, p)[k])


@lru_cache(maxsize=100_000)
def _binomial(n: int, p: float) -> np.ndarray:
    """The n + 1 probabilities of Binomial(n, p), 0 < p <= 1."""
    if p == 1.0:
        return np.eye(n + 1)[n]
    log_comb = np.array([math.lgamma(n + 1) - math.lgamma(v + 1) - math.lgamma(n - v + 1) for v in range(n + 1)])
    v = np.arange(n + 1)
    return np.exp(log_comb + v * math.log(p) + (n - v) * math.log1p(-p))


def majority_of_draw(votes: Sequence[int]) -> float:
    """Outcome of one vote: 1 if ``RIGHT`` leads alone, 1/t if it shares the lead with t − 1 others, else 0."""
    counts = Counter(votes)
    most = max(counts.values())
    if counts[RIGHT] < most:
        return 0.0
    return 1.0 / sum(count == most for count in counts.values())


def expected_majority(votes: Sequence[int], k: int) -> float:
    """:func:`majority_at_k` of the votes of one question."""
    counts = Counter(votes)
    right = counts.pop(RIGHT, 0)
    return majority_at_k(right, tuple(sorted(counts.values())), k)
