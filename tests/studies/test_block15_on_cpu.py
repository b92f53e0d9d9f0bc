"""Block 15: its runs, its rule on differences that are made up, and its table."""

import pytest

from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from studies import block15, plan, run
from studies.fast import build_config
from studies.plan import METHODS, RULES_ARMS, RULES_RATES, RULES_SEEDS, planned
from studies.runs import results
from studies.statistics import Comparison

COLUMNS = ("entropy", "length", "template", "change", "conflict", "conflict_first", "conflict_last", "strict", "acc")


def test_the_block_has_180_runs_on_seeds_that_the_tiny_model_has_not_had():
    runs = planned("15")
    assert len(runs) == 180
    assert {(cell.method, cell.lr) for cell, _ in runs} == {(method, lr) for method in RULES_ARMS for lr in RULES_RATES}
    others = {
        seed
        for block in plan.blocks()
        for cell, seed in planned(plan.number(block))
        if not cell.start.is_real and plan.number(block) != "15"
    }
    assert not others & set(RULES_SEEDS)
    assert len(list(run.batches(runs))) == 15  # the runs of a task and seed train side by side


@pytest.mark.parametrize("method", ["prefix_weights", "highest_entropy", "shared_beginning"])
def test_a_rule_has_neither_entropy_term_nor_filter(method):
    settings = VerlGTPOConfig.from_config(build_config(METHODS[method]).algorithm)
    assert settings.token_weight_function is not None
    assert settings.entropy_coeff == 0 and settings.completion_filter == "never"


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.03] * 15, "more accurate"),
        ([-0.01] * 15, "less accurate"),  # however small
        ([0.01, -0.01] * 7 + [0.0], "no difference that matters"),
        ([0.1, -0.1] * 7 + [0.0], "undecided"),
    ],
)
def test_the_rule(differences, expected):
    comparison = Comparison(differences)
    assert block15.verdict(comparison, comparison.p) == expected


def test_a_difference_that_is_significant_alone_is_not_among_eight():
    borderline = Comparison([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, -0.2])  # p = 8 / 128
    decided = Comparison([0.1] * 8)  # p = 2 / 256
    alone = block15.verdicts({("masks", "grpo"): decided})
    assert alone["masks", "grpo"] == "*more accurate* (p .008)"
    among = {(f"{number}", "grpo"): borderline for number in range(7)} | {("masks", "grpo"): decided}
    assert block15.verdicts(among)["masks", "grpo"].startswith("*undecided* (p .06")


def test_nothing_is_judged_before_all_runs_are_made(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "HERE", tmp_path)
    monkeypatch.setattr(plan, "_archives", lambda folder: {})
    plan.read_log.cache_clear()
    *first, last = planned("15")
    right = {"grpo": 50, "gtpo": 52, "masks": 52, "highest_entropy": 40}

    def write(cell, seed):
        held_out = {"samples": 100, "right": [right.get(cell.method, 50)], "strict": [90], "eos": [95]}
        held_out["well_formed"] = [99]
        run.keep({"steps": {name: [0.5] * 100 for name in COLUMNS}, "held_out": held_out}, cell.log(seed))

    for cell, seed in first:
        write(cell, seed)
    assert block15.progress() == "not judged yet (179 of 180 runs)"
    assert block15.table()[1] == []
    write(*last)
    header, rows = block15.table()
    cells = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert len(rows) == len(RULES_ARMS)
    of_rule = cells["GRPO, tokens of highest entropy only"]
    assert of_rule["accuracy minus GRPO's"].startswith("−0.10 [−0.10, −0.10]: *less accurate*")
    assert of_rule["exact format"] == "0.90" and of_rule["ends with EOS"] == "0.95"
    assert cells["GTPO"]["accuracy minus GRPO's"] == "+0.02 [+0.02, +0.02]"  # beside, without a verdict
    assert cells["λ-GRPO"]["accuracy minus GRPO's"] == "+0.00 [+0.00, +0.00]: *no difference that matters* (p 1.000)"
    assert not results(planned("15"))["lost"].any()
    plan.read_log.cache_clear()
