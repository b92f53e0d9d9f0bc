"""Block 11: the rule of studies/DESIGN.md on runs that are made up, and how a run fails."""

import numpy as np
import pytest

from studies import block11, plan, run
from studies.plan import GUESSED, GUESSING_ARMS, GUESSING_SEEDS, Cell
from studies.questions import TASKS, WARM_STARTS

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict")
RATES = (1e-4, 4e-4)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write both runs of an arm on each seed, of which so many failed, in the place of the study's."""
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setattr(plan, "_archives", lambda folder: {})
    plan.read_log.cache_clear()

    def written(method, failures, short=0.9, exact_format=1.0):
        for seed, failed in zip(GUESSING_SEEDS, failures, strict=False):
            for i, lr in enumerate(RATES):
                gave_up = [0.0] * 90 + [short if i < failed else 0.5] * 10
                held_out = {"samples": 100, "right": [50], "strict": [round(100 * (exact_format if i < failed else 1))]}
                record = {"steps": {name: [0.5] * 100 for name in COLUMNS} | {"short": gave_up}, "held_out": held_out}
                run.keep(record, Cell(GUESSED, method, lr).log(seed))

    yield written
    plan.read_log.cache_clear()


def test_a_run_fails_by_its_reasoning_or_its_format(write):
    write("gtpo", [1, 0], short=0.51)
    write("grpo", [2, 0], short=0.5, exact_format=0.49)
    write("masks", [2, 2], short=0.5, exact_format=0.5)
    runs = block11.runs().groupby("method", sort=False)[["gave up", "lost", "failed"]].sum()
    assert runs.loc["gtpo"].tolist() == [1, 0, 1] and runs.loc["grpo"].tolist() == [0, 2, 2]
    assert not runs.loc["masks"].any()
    assert block11.judge(block11.runs(), "gtpo", "grpo").verdict == "nothing: the start does not show the failure"
    header, rows = block11.arm_table(block11.runs())
    assert rows[0][:7] == ["GRPO", "0 of 2", "0 of 2", "1 of 2", "1 of 2", "0.50", "0.50"] and len(header) == len(
        rows[0]
    )


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        ([2] * 6 + [0] * 6, [0] * 12, "the first fails more often"),  # p = 2 / 64
        ([0] * 12, [1] * 6 + [0] * 6, "the first fails less often"),
        ([2] * 5 + [0] * 7, [0] * 12, "undecided"),  # p = 2 / 32
        ([1, 0] * 6, [1, 0] * 6, "no difference that matters"),
        ([1] + [0] * 11, [0] * 12, "no difference that matters"),  # 0.04 [-0.05, 0.13]
        ([2] + [0] * 11, [0] * 12, "undecided"),  # 0.08 [-0.10, 0.27]
    ],
)
def test_the_rule(write, first, second, verdict):
    write("gtpo", [2, 2])
    write("gtpo_clamped", first)
    write("grpo_clamped", second)
    pair = block11.judge(block11.runs(), "gtpo_clamped", "grpo_clamped")
    assert pair.verdict == verdict and pair.differences["accuracy"] == [0] * 12
    assert np.mean(pair.differences["failed"]) == pytest.approx((np.mean(first) - np.mean(second)) / 2)


def test_only_seeds_with_all_runs_of_both_arms_are_paired(write):
    write("gtpo", [2, 2, 2])
    write("grpo", [0, 0])
    assert block11.judge(block11.runs(), "gtpo", "grpo").differences["failed"] == [1, 1]


def test_the_runs_of_the_block():
    runs = plan.planned("11")
    assert len(runs) == 120 and {(cell.method, cell.lr) for cell, _ in runs} == {
        (method, lr) for method in GUESSING_ARMS for lr in RATES
    }
    (batch, *_) = run.batches(runs)
    assert batch[1] == 41 and len(batch[2]) == 10


def test_half_of_the_solutions_are_guesses():
    question = TASKS["addition_or_guess"]()[0]
    assert [bool(reasoning) for reasoning in question.reasonings] == [True, True, False, False]
    assert WARM_STARTS["addition_or_guess"] == {"damaged_tag_share": 0.5}
