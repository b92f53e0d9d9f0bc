"""Small logs as people have them, each of a kind that an earlier version misjudged: the exit status, and what is named.

They are stored compressed in `cases`, under the names that people gave them.
"""

import gzip
import json
from pathlib import Path

import pytest

from gtpo_verl import cli
from gtpo_verl.monitor.watch import Watch
from gtpo_verl.tools.diagnose.report import read_run

CASES = Path(__file__).resolve().parent / "cases"
HEALTHY, DEGRADED, FAILED, CANNOT_TELL, BAD_INPUT = range(5)
STATUSES = {
    "01-verl-console/train.log": [FAILED],
    "02-verl-jsonl-plain/exp.jsonl": [FAILED],
    "03-verl-nan-null/exp.jsonl": [FAILED],
    "04-verl-nan-literal/entropy-nan.jsonl": [FAILED],
    "04-verl-nan-literal/only-grad-nan.jsonl": [FAILED],
    "05-trl-old-names/trainer_state.json": [DEGRADED, FAILED],
    "07-trl-no-gradient/trainer_state.json": [DEGRADED],
    "09-trl-flat/trainer_state.json": [DEGRADED],
    "10-verl-entropy-collapse/exp.jsonl": [DEGRADED],
    "12-trl-logging-steps-10/trainer_state.json": [HEALTHY],
    "15-swift-logging-jsonl/logging.jsonl": [FAILED],
    "16-trl-printed/nohup.out": [FAILED],
    "16-trl-printed/nohup-quoted.out": [FAILED],
    "17-wandb-csv/chart.csv": [FAILED],
    "17-wandb-csv/history.csv": [FAILED],
    "19-verl-no-reward/exp.jsonl": [DEGRADED],
    "22-trl-negative-reward-sound/trainer_state.json": [HEALTHY],
    "24-few-completions/a.jsonl": [HEALTHY],
    "24-few-completions/b.jsonl": [FAILED],
    "31-wandb-api-csv/index.csv": [FAILED],
    "31-wandb-api-csv/trl.csv": [FAILED],
    "32-notebook-table/pasted.csv": [HEALTHY],
    "32-notebook-table/pasted.tsv": [HEALTHY],
    "32-notebook-table/train.ipynb": [HEALTHY, BAD_INPUT],
    "33-validation-falls/train.log": [DEGRADED, FAILED],
    "34-long-reasoning-cut-off/train.log": [HEALTHY],
    "35-frozen-advice/a.jsonl": [DEGRADED],
    "36-all-cut-few-steps/hundred-steps.json": [DEGRADED],
    "37-accuracy-never/trainer_state.json": [DEGRADED],
    "39-nan-from-the-first-step/grad-norm.log": [FAILED],
    "40-reward-function-never-pays/trainer_state.json": [HEALTHY],
    "42-lost-and-nothing-lost/trainer_state.json": [DEGRADED, FAILED],
    "43-too-early-for-healthy/a.log": [CANNOT_TELL, DEGRADED],
    "45-supervised-log/logging.jsonl": [BAD_INPUT],
    "46-shorter-and-better/history.csv": [HEALTHY],
    "advice-of-the-failure/train.log": [FAILED],
    "another-name-of-the-reward/metrics.jsonl": [HEALTHY, BAD_INPUT],
    "back-to-half-of-the-gain/trainer_state.json": [DEGRADED, FAILED],
    "back-to-half-of-the-gain/without-accuracy.json": [DEGRADED, FAILED],
    "dicts-wrapped-at-80/nohup.out": [FAILED],
    "gradient-norm-explodes/train.log": [DEGRADED, FAILED, CANNOT_TELL],
    "healthy-until-the-second-validation/95-steps.json": [HEALTHY],
    "healthy-until-the-second-validation/trainer_state.json": [HEALTHY],
    "json-lines-in-a-json-file/metrics.json": [HEALTHY],
    "learning-rate-of-the-config/train.log": [FAILED],
    "log-history-as-a-list/log_history.json": [HEALTHY],
    "log-history-under-steps/training_metrics.json": [HEALTHY],
    "no-progress-two-prompts/trainer_state.json": [DEGRADED],
    "notebook-that-printed/train.ipynb": [HEALTHY, BAD_INPUT],
    "one-outlier-is-no-ceiling/history.csv": [HEALTHY],
    "parts-that-never-move/trainer_state.json": [HEALTHY, DEGRADED],
    "reward-std-nearly-always-0/trainer_state.json": [DEGRADED, CANNOT_TELL],
    "sft-then-grpo/nohup.out": [HEALTHY],
    "thirteen-steps-rise/train.log": [HEALTHY, CANNOT_TELL],
    "two-validations/train.log": [FAILED],
}
"""What is right, by the person who judged each."""
SINCE = {
    "01-verl-console/train.log": (70, 80),
    "02-verl-jsonl-plain/exp.jsonl": (70, 80),
    "03-verl-nan-null/exp.jsonl": (63, 63),
    "05-trl-old-names/trainer_state.json": (20, 40),
    "07-trl-no-gradient/trainer_state.json": (1, 1),
    "31-wandb-api-csv/index.csv": (48, 52),
    "36-all-cut-few-steps/hundred-steps.json": (1, 1),
    "37-accuracy-never/trainer_state.json": (1, 1),
    "39-nan-from-the-first-step/grad-norm.log": (1, 1),
    "42-lost-and-nothing-lost/trainer_state.json": (20, 32),
    "advice-of-the-failure/train.log": (12, 16),
    "back-to-half-of-the-gain/trainer_state.json": (180, 210),
    "two-validations/train.log": (28, 38),
}


@pytest.fixture
def unpacked(tmp_path):
    def unpack(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.decompress((CASES / f"{name}.gz").read_bytes()))
        return path

    return unpack


@pytest.fixture
def report(unpacked, capsys):
    def diagnose(name):
        cli.main(["diagnose", str(unpacked(name)), "--json"])
        return json.loads(capsys.readouterr().out)

    return diagnose


@pytest.mark.parametrize("name", STATUSES)
def test_a_case_has_the_status_that_is_right(unpacked, capsys, name):
    status = cli.main(["diagnose", str(unpacked(name))])
    out, err = capsys.readouterr()
    assert status in STATUSES[name]
    if status == BAD_INPUT:
        assert out == "" and err.count("\n") == 1
    else:
        lines = out.splitlines()
        assert max(map(len, lines)) <= 80
        table = next(place for place, line in enumerate(lines) if line.startswith("means over"))
        assert table <= 25 and len("\n".join(lines).split("\n\n")[0].splitlines()) <= 15


@pytest.mark.parametrize("name", SINCE)
def test_a_case_names_the_step(report, name):
    first, last = SINCE[name]
    assert first <= report(name)["since"] <= last


def test_every_stored_case_is_tried():
    stored = {str(path.relative_to(CASES)).removesuffix(".gz") for path in CASES.rglob("*.gz")}
    assert stored - STATUSES.keys() == {
        "20-trl-output-dir/outputs/checkpoint-60/trainer_state.json",
        "20-trl-output-dir/outputs/checkpoint-120/trainer_state.json",
    }


def test_of_an_output_folder_the_newest_checkpoint_is_read(unpacked):
    for number in (60, 120):
        newest = unpacked(f"20-trl-output-dir/outputs/checkpoint-{number}/trainer_state.json")
    assert read_run(newest.parent.parent).log.name == str(newest)


def test_what_the_log_itself_says_needs_no_option(report):
    found = report("01-verl-console/train.log")
    assert (found["completions"], found["limit"]) == (512, 1024)
    assert report("02-verl-jsonl-plain/exp.jsonl")["completions"] == 512


def test_all_that_is_not_finite_is_named(report):
    why = report("03-verl-nan-null/exp.jsonl")["why"]
    assert "loss" in why and "gradient norm" in why and "entropy" in why


@pytest.mark.parametrize(
    ("log", "numbers"),
    [
        ("05-trl-old-names/trainer_state.json", ["accuracy"]),
        ("10-verl-entropy-collapse/exp.jsonl", ["entropy"]),
        ("33-validation-falls/train.log", ["validation"]),
        ("gradient-norm-explodes/train.log", ["kl", "grad_norm"]),
    ],
)
def test_the_number_that_decides_is_named(report, log, numbers):
    assert report(log)["number"] in numbers


def test_a_gradient_of_0_beside_rewards_that_differ_is_not_for_the_rewards(report):
    assert "adapters" in report("35-frozen-advice/a.jsonl")["advice"]


def test_cut_off_completions_beside_the_best_reward_are_told_with_the_limit_to_try(report):
    moved = {move["number"]: move for move in report("34-long-reasoning-cut-off/train.log")["moved"]}
    assert moved["terminated"]["try"] == "data.max_response_length=16192"


def test_advice_is_that_of_the_failure(report):
    found = report("advice-of-the-failure/train.log")
    assert f"before step {found['since']}" in found["advice"] and "optim.lr" in found["try"]
    assert [move["number"] for move in found["moved"][:2]] == ["kl", "grad_norm"]


def test_the_learning_rate_is_that_of_the_config_where_the_console_rounds_it_to_0(report):
    assert report("learning-rate-of-the-config/train.log")["try"].endswith("optim.lr=5e-06")


def test_parts_of_the_reward_that_never_moved_are_named(report):
    never_paid = report("40-reward-function-never-pays/trainer_state.json")["constant_parts"]
    assert never_paid == {"soft_format_reward_func": 0.0, "strict_format_reward_func": 0.0}
    assert len(report("parts-that-never-move/trainer_state.json")["constant_parts"]) == 2


def test_groups_of_equal_rewards_are_seen_by_their_deviation(report):
    assert "equal rewards" in report("reward-std-nearly-always-0/trainer_state.json")["why"]


def test_a_supervised_warm_up_in_the_same_file_is_another_run(report):
    found = report("sft-then-grpo/nohup.out")
    assert found["entries"] == 30 and found["numbers"]["entropy"]["start"] < 0.15
    assert "entropy" not in [move["number"] for move in found["moved"]]


def test_a_rise_in_few_steps_is_named_with_its_levels(report):
    assert "0.40" in report("thirteen-steps-rise/train.log")["why"]


@pytest.mark.parametrize("name", ["34-long-reasoning-cut-off/train.log", "46-shorter-and-better/history.csv"])
def test_the_monitor_ends_no_run_whose_reward_is_at_its_best(unpacked, name):
    run = read_run(unpacked(name))
    watch = Watch("verl", run.completions, run.limit)
    alarms = [alarm for step, numbers in sorted(run.log.steps.items()) for alarm in watch.observe(step, numbers)]
    assert not any(alarm.ends for alarm in alarms)
