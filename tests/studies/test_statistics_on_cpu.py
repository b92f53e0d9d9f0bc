"""The statistics of paired differences, by hand."""

import itertools

import numpy as np
import pytest

from studies.statistics import Comparison, holm, interval, iqm, mcnemar, short, sign_flips


def test_sign_flips_count_every_choice_of_signs():
    differences = [0.25, -0.125, 0.5, 0.0, 0.375]
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=len(differences))]
    assert sign_flips(differences) == np.mean([total >= abs(sum(differences)) for total in sums])


def test_sums_that_rounding_alone_parts_are_equal():
    thirds = [round(share, 9) for share in (1 / 3, 2 / 3, -1.0, 1 / 3)]
    assert sign_flips(thirds) == sign_flips([1.0, 2.0, -3.0, 1.0])


def test_sign_flips_of_thirty_pairs():
    assert sign_flips([0.1] * 30) == 2 / 2**30


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ({"a": 0.04, "b": 0.01}, {"b": 0.02, "a": 0.04}),
        ({"a": 0.03, "b": 0.02}, {"b": 0.04, "a": 0.04}),
        ({"a": 0.9, "b": 0.8}, {"b": 1.0, "a": 1.0}),
    ],
    ids=["doubled", "not above the larger", "at most 1"],
)
def test_holm_doubles_the_smaller_of_two_and_keeps_their_order(p_values, corrected):
    assert holm(p_values) == corrected


def test_the_exact_tests_by_hand():
    assert sign_flips([0.1] * 6) == 2 / 64 and short(2 / 64) == ".031"
    assert sign_flips([0.3, -0.1]) == 1 and sign_flips([0.0] * 6) == 1
    # Of the sums of ±1, ±2, ±3 two are as far from 0 as 6, and four as far as 4.
    assert sign_flips([1, 2, 3]) == 0.25 and sign_flips([-1, 2, 3]) == 0.5
    assert mcnemar([True] * 4 + [False] * 2, [False] * 6) == 0.125
    assert mcnemar([True, False], [True, False]) == 1


def test_the_statistics_by_hand():
    assert iqm(np.array([0.0, 1.0, 2.0, 100.0])) == 1.5
    assert interval([1.0, 1.0]) == (1.0, 1.0)
    # t of 2 degrees of freedom is 4.303, and the standard error of 0, 1, 2 is 1 / √3.
    assert interval([0.0, 1.0, 2.0]) == pytest.approx((1 - 4.303 / 3**0.5, 1 + 4.303 / 3**0.5), abs=1e-3)
    assert str(Comparison([-0.5, -0.5])) == "−0.50 [−0.50, −0.50]"
    # Pairs of one task and seed at several rates are one value.
    clustered = Comparison([0.0, 2.0, 3.0, 3.0, 5.0], ["a", "a", "b", "b", "c"])
    assert clustered.mean == 2.6 and str(clustered) == str(Comparison([1.0, 3.0, 5.0])).replace("+3.00", "+2.60")
