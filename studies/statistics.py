"""Tests of paired differences, exact where there is an exact one."""

from collections import Counter
from collections.abc import Mapping, Sequence

GRAIN = 1e-6
"""Sums of differences that are nearer to each other than this, for each pair, are equal: shares are rounded."""


def sign_flips(differences: Sequence[float]) -> float:
    """Exact two-sided p of paired differences whose mean is 0 if each sign is a coin's.

    The sums of all 2^n choices of signs are counted pair by pair, so that 30 pairs take no longer than their distinct
    sums.
    """
    sums = Counter({0: 1})
    for difference in differences:
        size = round(abs(difference) / GRAIN)
        next_sums: Counter[int] = Counter()
        for total, number in sums.items():
            next_sums[total + size] += number
            next_sums[total - size] += number
        sums = next_sums
    observed = abs(sum(round(difference / GRAIN) for difference in differences))
    as_large = sum(number for total, number in sums.items() if abs(total) >= observed - len(differences))
    return as_large / 2 ** len(differences)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p values by name, corrected for their number by Holm's method."""
    corrected = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        largest = max(largest, (len(p_values) - rank) * p_values[name])
        corrected[name] = min(1.0, largest)
    return corrected
