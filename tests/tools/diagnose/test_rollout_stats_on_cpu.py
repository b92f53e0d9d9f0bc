import re

import pytest
import run_logs
from rollout_files import LETTER_COUNTING as DEMO
from rollout_files import write_rollouts

from gtpo_verl.tools.diagnose.report import read_run, report_on
from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts
from gtpo_verl.tools.diagnose.text_report import screen


def test_the_demos_rollouts_show_repetition_and_three_completions():
    report = report_on(read_run(DEMO, tokenizer=str(DEMO)))
    said = screen(report)
    assert report["verdict"] == "cannot tell"  # 11 steps of one prompt
    assert said.count("step 400: '<reasoning>") == 3
    assert re.search(r"completions share .* in 73% of groups\.", " ".join(said.split()))
    assert max(map(len, said.splitlines())) <= 80 and len(said.splitlines()) <= 40


def test_groups_whose_rewards_differ_without_a_right_answer_are_counted(tmp_path):
    wrong = [("12", 1.0, 0), ("13", 0.0, 0)]
    right = [("12", 1.0, 1), ("13", 0.0, 0)]
    folder = write_rollouts(tmp_path / "rollouts", [right] * 2 + [wrong] * 18)
    report = report_on(read_run(folder, tokenizer=str(DEMO)))
    assert report["numbers"]["no_correct_groups"]["now"] == 1.0 and report["numbers"]["accuracy"]["now"] == 0
    (move,) = (move for move in report["moved"] if move["number"] == "no_correct_groups")
    assert move["try"] == "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc"


def test_rollouts_add_to_the_log_what_it_lacks(tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("13", 0.0, 0)]] * 40)
    records = [*run_logs.verl(steps=40, score=lambda step: 0.25, noise=0, length=lambda step: 2.0)]
    log = run_logs.write_jsonl(tmp_path / "run.jsonl", records)
    report = report_on(read_run(log, rollouts=folder, tokenizer=str(DEMO)))
    assert report["numbers"]["reward"]["now"] == 0.25 and report["numbers"]["repetition"]["now"] == 0
    assert set(report["not_logged"]) & {"repetition", "zero_std_groups", "accuracy"} == set()


def test_rollouts_of_steps_that_the_log_has_not_are_left_out(tmp_path):
    groups = [[("12", 1.0, 1), ("13", 0.0, 0)]] * 40
    folder = write_rollouts(tmp_path / "rollouts", [*groups, *[[("14", 0.0, 0), ("15", 0.0, 0)]] * 20])
    log = run_logs.write_jsonl(tmp_path / "run.jsonl", [*run_logs.verl(steps=40, length=lambda step: 2.0)])
    run = read_run(log, rollouts=folder, tokenizer=str(DEMO))
    assert max(run.log.steps) == 40 == max(run.rollouts.steps) and {x["text"] for x in run.rollouts.completions} == {
        "12",
        "13",
    }
    (note,) = report_on(run)["notes"]
    assert note.startswith(f"20 steps of {folder} are left out")
    later = write_rollouts(tmp_path / "later", groups, first=41)
    with pytest.raises(ValueError, match=r"later has no step .*\b40\b.*same run"):
        read_run(log, rollouts=later, tokenizer=str(DEMO))


def test_a_score_that_some_completions_lack_is_left_out(tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("13", 0.0, None)]])
    assert "accuracy" not in read_rollouts(folder, str(DEMO), None).steps[1]


@pytest.mark.parametrize(("limit", "ended"), [(None, None), (2, 0.5), (8, 1.0)])
def test_a_text_as_long_as_the_limit_did_not_end(tmp_path, limit, ended):
    folder = write_rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("1", 0.0, 0)]] * 2)
    found = read_rollouts(folder, str(DEMO), limit)
    assert found.steps[1].get("terminated") == ended and found.steps[1]["length"] == 1.5


def test_what_good_and_bad_completions_share_is_a_fact_of_the_runs_own(tmp_path):
    folder = write_rollouts(tmp_path / "rollouts", [[("1234", 1.0, 1), ("1256", 0.0, 0)]] * 20)
    report = report_on(read_run(folder, tokenizer=str(DEMO)))
    assert report["shared_tokens"] == {"forward": 0.5, "backward": 0, "either": 0.5, "groups": 1.0}
