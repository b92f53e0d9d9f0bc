"""Blocks 13 and 14: the rules of studies/DESIGN.md, and what they say of runs that are made up."""

import itertools

import numpy as np
import pytest

from studies import block13, plan, run
from studies.plan import planned
from studies.statistics import holm, sign_flips

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict", "acc")


def test_sign_flips_count_every_choice_of_signs():
    differences = [0.25, -0.125, 0.5, 0.0, 0.375]
    sums = [abs(np.dot(signs, differences)) for signs in itertools.product((-1, 1), repeat=len(differences))]
    assert sign_flips(differences) == np.mean([total >= abs(sum(differences)) for total in sums])


def test_sums_that_rounding_alone_parts_are_equal():
    thirds = [round(share, 9) for share in (1 / 3, 2 / 3, -1.0, 1 / 3)]
    assert sign_flips(thirds) == sign_flips([1.0, 2.0, -3.0, 1.0])


def test_sign_flips_of_thirty_pairs():
    assert sign_flips([0.1] * 30) == 2 / 2**30


def test_holm_doubles_the_smaller_of_two_and_keeps_their_order():
    assert holm({"a": 0.04, "b": 0.01}) == {"b": 0.02, "a": 0.04}
    assert holm({"a": 0.03, "b": 0.02}) == {"b": 0.04, "a": 0.04}
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0}


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.2] * 8, "keeps"),
        ([-0.2] * 8, "loses"),
        ([0.05] * 8, "nothing that matters"),  # p = 2 / 256, but too small a mean
        ([0.05, -0.05] * 4, "nothing that matters"),
        ([0.9, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "undecided"),
    ],
)
def test_the_rule_of_block_13(differences, verdict):
    assert block13.verdicts({"C − A": differences})["C − A"] == verdict


def test_a_comparison_that_is_significant_alone_is_not_beside_another():
    borderline = [0.4, 0.4, 0.4, 0.4, 0.4, 0.4, -0.1, -0.2]  # p = 8 / 256, doubled .0625
    assert sign_flips(borderline) == 8 / 256
    assert block13.verdicts({"C − A": borderline}) == {"C − A": "keeps"}
    assert block13.verdicts({"C − A": borderline, "C − B": borderline})["C − A"] == "undecided"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.05] * 30, "GTPO is more accurate"),
        ([-0.05] * 30, "GTPO is less accurate"),
        ([0.1, -0.1] * 15, "no difference"),
        ([0.5, -0.5] * 15, "undecided"),
    ],
)
def test_the_rule_of_block_14(differences, verdict):
    assert block13.answer_alone_verdict(differences) == verdict


def test_seeds_are_judged_once_all_eight_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setattr(plan, "_archives", lambda folder: {})
    plan.read_log.cache_clear()
    exact_format = {("corpo_gtpo", 1e-5): 95, ("grpo", 1e-5): 40, ("grpo", 5e-6): 94}
    runs = planned("13-cpu")
    assert len(runs) == 24
    for made, (cell, seed) in enumerate(runs):
        if made in (2, 3, 23):
            whole = f"not judged yet ({made // 3} of 8 seeds)"
            assert block13.answers("13-cpu") == {"C − A": whole, "C − B": whole}
        held_out = {"samples": 100, "right": [50], "strict": [exact_format[cell.method, cell.lr]]}
        run.keep({"steps": {name: [0.5] * 60 for name in COLUMNS}, "held_out": held_out}, cell.log(seed))
    answers = block13.answers("13-cpu")
    assert answers["C − A"].startswith("*keeps*, +0.55") and answers["C − B"].startswith(
        "*nothing that matters*, +0.01"
    )
    assert block13.answers("13-cpu", without=28)["C − A"].startswith("*keeps*, +0.55")
    plan.read_log.cache_clear()
