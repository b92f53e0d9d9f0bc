"""Blocks 13 and 14: the rules of studies/DESIGN.md, and what they say of runs that are made up."""

import pytest

from studies import block13, plan, run
from studies.plan import planned
from studies.statistics import sign_flips

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict", "acc")


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
    assert block13.without_split_seeds("13-cpu") == ""
    monkeypatch.setattr(block13, "SPLIT_SEEDS", (28,))
    assert block13.without_split_seeds("13-cpu").startswith("Without seed 28, ")
    plan.read_log.cache_clear()
