"""What diagnose says of runs, from a log alone: each kind of run that it once misjudged, in each form of log."""

import json
import math
import re

import pytest
import run_logs
from rollout_files import LETTER_COUNTING, write_rollouts

from gtpo_verl.tools.diagnose.entries import Log
from gtpo_verl.tools.diagnose.report import completions_per_step, read_run, report_on

COLLAPSE = [*run_logs.collapse()]
TO_NAN = [*run_logs.collapse(grad_norm=lambda step: 0.2 if step < 63 else math.nan, kl=lambda s: 0.1)]
LOST_ACCURACY = [
    x
    | {
        "rewards/accuracy": 0.4 if n < 35 else 0.005 * n % 0.01,
        "rewards/tag/mean": 0.01 * n,
        "completion_length": 600.0,
    }
    for n, x in enumerate(run_logs.trl(run_logs.verl()))
]
FEW = {"steps": 300, "completions": 2, "noise": 0.2, "cut": lambda step: 0.0, "lowest": lambda step: -1.0}
CUT_OFF = [*run_logs.verl(steps=10, cut=lambda s: 1.0, score=lambda s: 0.0)]
NEVER_RIGHT = [
    x | {"rewards/accuracy_reward/mean": 0.001 * (n % 7 == 0)} for n, x in enumerate(run_logs.trl(run_logs.verl()))
]
NAN_IN_KL = [*run_logs.verl(kl=lambda step: math.nan)]
OVERLONG = [*run_logs.verl(cut=lambda s: max(0.0, 0.002 * s - 0.04), length=lambda s: 300 + 4.0 * s)]
SHORTER = [*run_logs.verl(score=lambda s: min(0.5 + 0.01 * s, 0.97), length=lambda s: max(3600 - 80.0 * s, 470.0))]
VALIDATION_FALLS = [
    x | ({"val-core/a/reward/mean@1": min(0.2 + s / 250, max(0.44 - (s - 60) / 125, 0.05))} if s % 10 == 0 else {})
    for s, x in enumerate(run_logs.verl(score=lambda s: 0.2 + 0.004 * s), start=1)
]


def validated(*results, training=lambda s: 0.2 + 0.004 * s):
    """A run of 120 steps with so many validations."""
    every = 120 // len(results)
    found = {every * n: x for n, x in enumerate(results, start=1)}
    return [
        x | ({"val-core/a/acc/mean@1": found[s]} if s in found else {})
        for s, x in enumerate(run_logs.verl(score=training), start=1)
    ]


NOISY = [
    {"reward": 20.0 if n % 3 else 9.0, "reward_std": 5.0} if n < 22 else {"reward": 8.0, "reward_std": 0.5}
    for n in range(60)
]


def diagnose(path, **options):
    return report_on(read_run(path, **options))


def write(form, folder, records):
    if form in ("state", "printed", "swift"):
        records = records if "reward" in records[0] else [*run_logs.trl(records)]
    name = {"state": "outputs/checkpoint-9/trainer_state.json", "csv": "a.csv", "swift": "logging.jsonl"}.get(
        form, "a.log"
    )
    return getattr(run_logs, f"write_{form}")(folder / name, records)


@pytest.mark.parametrize(
    ("form", "records", "verdict", "since", "number"),
    [
        *(
            (form, COLLAPSE, "failed", 72, "reward")
            for form in ("console", "jsonl", "state", "printed", "swift", "csv")
        ),
        ("console", [*run_logs.verl()], "healthy", None, "reward"),
        (
            "console",
            [*run_logs.verl(steps=200, score=lambda step: 0.98, noise=0.01)],
            "healthy",
            None,
            "reward",
        ),  # ceiling
        ("jsonl", [*run_logs.collapse(cut=0.0)], "failed", 72, "reward"),
        ("jsonl", TO_NAN, "failed", 63, "loss"),
        ("console", TO_NAN, "failed", 63, "loss"),
        ("state", LOST_ACCURACY, "failed", 35, "accuracy"),
        (
            "state",
            [x | {"frac_reward_zero_std": 1} for x in run_logs.trl(run_logs.verl())],
            "degraded",
            1,
            "zero_std_groups",
        ),
        ("jsonl", [*run_logs.verl(grad_norm=lambda s: 0.0)], "degraded", 1, "grad_norm"),
        ("state", [*run_logs.verl(grad_norm=lambda s: 0.0)], "degraded", 1, "grad_norm"),
        (
            "jsonl",
            [x | {"gtpo/group/positive_frac": 0.0, "gtpo/group/zero_std_frac": 0.5} for x in run_logs.verl()],
            "degraded",
            1,
            "positive",
        ),
        ("console", CUT_OFF, "degraded", 1, "terminated"),
        ("state", NEVER_RIGHT, "degraded", 1, "accuracy"),
        ("state", [x | {"rewards/tag/mean": 0.0} for x in run_logs.trl(run_logs.verl())], "healthy", None, "reward"),
        ("console", [*run_logs.verl(grad_norm=lambda s: math.nan)], "failed", 1, "loss"),
        ("console", NAN_IN_KL, "healthy", None, "reward"),
        ("console", OVERLONG, "healthy", None, "reward"),
        ("csv", SHORTER, "healthy", None, "reward"),
        ("console", VALIDATION_FALLS, "failed", 70, "validation"),
        ("console", [*run_logs.verl(steps=29, score=lambda s: 0.3)], "cannot tell", None, "reward"),
        ("state", NOISY, "failed", 20, "reward"),
        ("jsonl", [*run_logs.verl(score=lambda s: 0.0)], "degraded", 1, "reward"),
        ("state", [*run_logs.verl(score=lambda s: 0.5)], "degraded", 1, "reward"),
        (
            "jsonl",
            [*run_logs.verl(entropy=lambda s: 0.55 * 0.93**s, score=lambda s: min(0.3 + 0.01 * s, 0.55))],
            "degraded",
            30,
            "entropy",
        ),
        (
            "jsonl",
            [*run_logs.verl(score=lambda s: min(-0.9 + 0.01 * s, -0.2), lowest=lambda s: -1.0)],
            "healthy",
            None,
            "reward",
        ),
        ("jsonl", [*run_logs.verl(score=lambda s: -0.44 + 0.0026 * s, **FEW)], "healthy", None, "reward"),
        (
            "jsonl",
            [*run_logs.verl(score=lambda s: 0.18 if s < 90 else -0.44, **FEW)],
            "failed",
            90,
            "reward",
        ),
    ],
)
def test_each_kind_of_run_gets_its_verdict_since_when_and_the_number(tmp_path, form, records, verdict, since, number):
    report = diagnose(write(form, tmp_path, records))
    assert (report["verdict"], report["number"]) == (verdict, number)
    window = 20 if number == "validation" else 10 if len(records) < 200 else 40
    assert report["since"] == since or since <= report["since"] <= since + window


@pytest.mark.parametrize(
    ("results", "verdict", "number"),
    [
        ((0.55, 0.05), "healthy", "reward"),  # two show nothing
        ((0.55, 0.6, 0.05), "healthy", "reward"),
        ((0.55, 0.6, 0.05, 0.03), "failed", "validation"),
        ((0.35, 0.34, 0.36, 0.35, 0.34, 0.35, 0.36, 0.35, 0.34, 0.35), "degraded", "validation"),
        ((0.3, 0.36, 0.42, 0.48), "healthy", "validation"),
        ((0.97, 0.98, 0.97, 0.96, 0.97, 0.98), "healthy", "validation"),  # ceiling
    ],
)
@pytest.mark.parametrize("training", [lambda s: 0.2 + 0.004 * s, lambda s: 0.98 - 0.001 * (s % 2)])
def test_a_validation_that_can_tell_decides_whatever_training_does(results, verdict, number, training, tmp_path):
    report = diagnose(run_logs.write_console(tmp_path / "a.log", validated(*results, training=training)))
    assert (report["verdict"], report["number"]) == (verdict, number)


def test_what_the_log_implies_is_used_and_an_option_overrides_it(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", COLLAPSE)
    report = diagnose(path)
    assert (report["completions"], report["limit"]) == (512, 1024)
    report = diagnose(path, completions=16, limit=2048)
    assert (report["completions"], report["limit"]) == (16, 2048)


@pytest.mark.parametrize(
    ("steps", "config", "completions"),
    [
        pytest.param(
            [{"tokens": 410.0 * 512, "prompt": 110.0, "length": 300.0}], {"prompts": 1, "n": 1}, 512, id="tokens"
        ),
        pytest.param([{"terminated": 0.875}], {"prompts": 64, "n": 8}, 512, id="config"),
        pytest.param([{"terminated": 0.875}, {"terminated": 0.5}], {}, 8, id="shares"),
        pytest.param([{"terminated": 1.0}, {"terminated": 0.9583333134651184}], {}, 24, id="single precision"),
        pytest.param([{"terminated": share} for share in (0.8438, 0.0312, 0.2188)], {}, 32, id="rounded"),
        pytest.param([{"terminated": 1.0, "accuracy": 0.3}], {}, None, id="unknown"),
    ],
)
def test_of_how_many_completions_a_log_is(steps, config, completions):
    log = Log("log", "verl", dict(enumerate(steps)), config, [])
    assert completions_per_step(log) == completions


def test_a_gradient_that_was_not_finite_once_is_named_and_no_failure(tmp_path):
    records = [*run_logs.verl()]
    records[50] |= {"actor/grad_norm": math.inf}
    report = diagnose(run_logs.write_console(tmp_path / "train.log", records))
    assert report["verdict"] == "healthy"
    (note,) = report["notes"]
    assert re.match(r"gradient norm .*\b1 steps\b.* step 51\b.*no failure", note)


def test_an_outcome_that_is_lost_counts_though_its_last_value_is_not_finite(tmp_path):
    records = [*COLLAPSE[:-1], COLLAPSE[-1] | {"critic/score/mean": math.nan}]
    report = diagnose(run_logs.write_jsonl(tmp_path / "run.jsonl", records))
    assert report["verdict"] == "failed" and report["number"] == "reward"
    records = [*COLLAPSE, {"training/global_step": 121, "actor/grad_norm": 0.2}]
    records[-2] = records[-2] | {"critic/score/mean": math.nan}
    report = diagnose(run_logs.write_jsonl(tmp_path / "run.jsonl", records))
    assert report["verdict"] == "failed" and report["numbers"]["reward"]["value"] is None


def test_advice_is_that_of_the_verdict(tmp_path):
    report = diagnose(run_logs.write_console(tmp_path / "train.log", TO_NAN))
    assert "checkpoint before step 63;" in report["advice"]
    kind, numbers = report["why"].split(": ")
    assert kind == "not finite" and numbers.split(", ") == ["loss", "gradient norm"]


@pytest.mark.parametrize("steps", [2, 5, 11])
def test_a_log_that_is_too_short_is_no_verdict_and_says_what_it_needs(tmp_path, steps):
    report = diagnose(run_logs.write_console(tmp_path / "train.log", [*run_logs.verl(steps=steps)]))
    assert report["verdict"] == "cannot tell" and "needs 12 steps " in report["why"]


def test_a_move_beside_an_outcome_at_its_best_has_its_own_remedy(tmp_path):
    report = diagnose(run_logs.write_console(tmp_path / "train.log", OVERLONG))
    (move,) = (move for move in report["moved"] if move["number"] == "terminated")
    assert move["try"] == "data.max_response_length=2048" and report["try"] == ""


def test_a_reward_function_that_never_pays_is_named(tmp_path):
    records = [x | {"rewards/tag/mean": 0.0} for x in run_logs.trl(run_logs.verl())]
    report = diagnose(run_logs.write_state(tmp_path / "trainer_state.json", records))
    assert report["constant_parts"] == {"tag": 0.0} and report["verdict"] == "healthy"


def test_a_number_that_was_hardly_ever_finite_is_left_out_of_the_report(tmp_path):
    records = [*run_logs.verl(steps=40, kl=lambda step: math.nan if step < 40 else 0.1)]
    report = diagnose(write("jsonl", tmp_path, records))
    assert "kl" not in report["numbers"] and json.dumps(report, allow_nan=False)


def test_the_most_repetitive_completions_are_shown(tmp_path):
    loop = "12" * 30
    groups = [[("12", 1.0, 1), ("13", 0.0, 0)]] * 20 + [[(loop, 0.0, 0), ("12", 0.1, 0)]] * 20
    report = diagnose(write_rollouts(tmp_path / "r", groups), tokenizer=str(LETTER_COUNTING))
    (move,) = (move for move in report["moved"] if move["number"] == "repetition")
    assert {shown["text"] for shown in move["completions"]} == {loop}


def test_of_completions_that_got_longer_the_longest_are_shown(tmp_path):
    longest = "123456789" * 9
    groups = [[("12", 1.0, 1), ("13", 0.0, 0)]] * 20 + [[(longest, 1.0, 1), ("13", 0.0, 0)]] * 20
    report = diagnose(write_rollouts(tmp_path / "r", groups), tokenizer=str(LETTER_COUNTING))
    (move,) = (move for move in report["moved"] if move["number"] == "length")
    assert {shown["text"] for shown in move["completions"]} == {longest}


def test_a_validation_set_that_was_added_later_is_left_out_of_the_mean(tmp_path):
    rising = validated(*(0.7 + 0.01 * n for n in range(12)))
    records = [x | ({"val-core/b/acc/mean@1": 0.03} if s > 60 and s % 10 == 0 else {}) for s, x in enumerate(rising, 1)]
    report = diagnose(run_logs.write_jsonl(tmp_path / "a.jsonl", records))
    assert report["verdict"] == "healthy" and report["numbers"]["validation"]["now"] > 0.75
    (note,) = report["notes"]
    assert note.startswith("left out") and note.endswith(": val-core/b/acc/mean@1")


def test_a_validation_of_another_scale_than_the_others_is_left_out(tmp_path):
    """verl's before training may log accuracies, where the later ones log rewards."""
    records = [{**x} for x in run_logs.verl(score=lambda s: -0.9 + 0.004 * s, lowest=lambda s: -1.0)]
    records[0]["val-core/a/acc/mean@1"] = 0.04
    for step in range(10, 120, 10):
        records[step]["val-aux/a/reward/mean@1"] = -0.8 + 0.002 * step
    report = diagnose(run_logs.write_jsonl(tmp_path / "a.jsonl", records))
    assert (report["verdict"], report["number"]) == ("healthy", "validation")
    assert "val-core/a/acc/mean@1" in report["notes"][0] and report["numbers"]["validation"]["best"] < 0


def test_a_log_without_an_outcome_gets_no_verdict(tmp_path):
    of_sft = {"loss": 1.0, "entropy": 0.5, "grad_norm": 1.0, "learning_rate": 1e-5}
    with pytest.raises(ValueError, match="supervised training"):
        read_run(run_logs.write_state(tmp_path / "trainer_state.json", [of_sft] * 30))
    numbers = {"actor/entropy": 0.3, "response_length/mean": 30.0, "actor/pg_loss": 0.1}
    records = [{"training/global_step": step, **numbers} for step in range(1, 41)]
    report = diagnose(run_logs.write_jsonl(tmp_path / "a.jsonl", records))
    assert report["verdict"] == "cannot tell" and re.search(r"no validation, accuracy .*reward", report["why"])
