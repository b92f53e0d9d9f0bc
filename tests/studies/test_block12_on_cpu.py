"""Block 12: the rule of studies/DESIGN.md, and what it says of runs that are made up."""

import re

import pytest

from studies import block12, plan, run
from studies.plan import BOTH_CLAMPED, CONTROL_SEEDS, planned

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict", "acc")


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.1] * 8, "with the clamp, GTPO keeps the exact format where GRPO does not"),  # p = 2 / 256
        ([-0.1] * 8, "with the clamp, GRPO keeps the exact format where GTPO does not"),
        (
            [0.9, 0.9, 0.03, 0.03, 0.02, 0.02, 0.01, -0.01],
            "with the clamp, GTPO keeps the exact format where GRPO does not",
        ),
        ([0.9, -0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "undecided"),
        ([0.02, -0.01] * 4, "with the clamp, GTPO adds nothing to the exact format that matters"),
        ([-0.9, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "undecided"),  # the interval reaches .14
    ],
)
def test_the_rule(differences, verdict):
    assert block12.verdict(differences) == verdict


def test_pairs_are_judged_once_there_are_eight(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setattr(plan, "_archives", lambda folder: {})
    plan.read_log.cache_clear()
    assert block12.answer("12-cpu") == "not judged yet (0 of 8 pairs)"
    runs = planned("12-cpu")
    assert len(runs) == 16 and not {seed for _, seed in runs} & {*CONTROL_SEEDS}
    for number, (cell, seed) in enumerate(runs):
        exact = 40 if cell.method == BOTH_CLAMPED[0] and seed < 18 else 90
        held_out = {"samples": 100, "right": [50], "strict": [exact + seed - 15]}
        run.keep({"steps": {name: [0.5] * 60 for name in COLUMNS}, "held_out": held_out}, cell.log(seed))
        if number in (0, 1, 14):
            assert block12.answer("12-cpu") == f"not judged yet ({(number + 1) // 2} of 8 pairs)"
    answer = block12.answer("12-cpu")
    assert answer.startswith("*undecided*; GTPO − GRPO is ")
    # The differences of exact format and accuracy, and the runs that lost the exact format.
    assert re.findall(r"[+−][\d.]+ \[.*?\] \(p .*?\)|\d of 8 .*?G.PO|\(p .*?\)", answer) == [
        "+0.19 [−0.03, +0.40] (p .250)",
        "+0.00 [+0.00, +0.00] (p 1.000)",
        "0 of 8 runs of GTPO",
        "3 of 8 of GRPO",
        "(p .250)",
    ]
    plan.read_log.cache_clear()
