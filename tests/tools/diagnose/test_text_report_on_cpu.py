import math
import re

import pytest
import run_logs

from gtpo_verl.tools.diagnose.report import read_run, report_on
from gtpo_verl.tools.diagnose.text_report import screen


def report(tmp_path, **curves):
    return report_on(read_run(run_logs.write_console(tmp_path / "train.log", [*run_logs.collapse(**curves)])))


def test_it_is_one_screen_with_the_verdict_first_and_one_override(tmp_path):
    said = screen(report(tmp_path, kl=lambda step: 0.1 if step < 70 else 9.0)).splitlines()
    assert said[0].startswith("FAILED since step 7") and len(said) <= 36 and max(map(len, said)) <= 80
    (run,) = (line for line in said if line.startswith("verl, "))
    assert [part for part in ("steps 1 to 120", "512 completions", "cut off at 1024 tokens") if part not in run] == []
    assert said.count("Try actor_rollout_ref.actor.optim.lr=5e-07") == 1
    table = next(place for place, line in enumerate(said) if line.startswith("means over"))
    moved = next(place for place, line in enumerate(said) if line.startswith("What moved"))
    assert said.index("Try actor_rollout_ref.actor.optim.lr=5e-07") < moved < table
    (row,) = (line for line in said if line.startswith("reward  "))
    assert [float(x) for x in row.split()[1:]] == pytest.approx([0.35, 0.6, 0.01, 0.01], abs=0.06)


def test_nan_shows_as_no_number_and_the_advice_is_to_go_back(tmp_path):
    said = screen(report(tmp_path, entropy=lambda step: 0.4 if step < 63 else math.nan))
    (row,) = (line for line in said.splitlines() if line.startswith("entropy"))
    assert row.split()[-1] == "NaN"
    assert said.startswith("FAILED since step 63: not finite: entropy")
    assert "checkpoint before step 63;" in said


def test_entries_that_are_ten_steps_apart_are_counted_in_both(tmp_path):
    records = [*run_logs.trl(run_logs.verl(steps=60))]
    found = report_on(read_run(run_logs.write_state(tmp_path / "trainer_state.json", records, every=10)))
    assert found["steps"] == [10, 600] and found["entries"] == 60 and found["verdict"] == "healthy"
    assert "means over up to 8 entries (80 steps)" in screen(found)


def test_what_is_not_logged_is_one_line_at_the_end_without_any_key(tmp_path):
    said = screen(report(tmp_path)).splitlines()
    (line,) = (line for line in said if line.startswith("Not logged: "))
    assert said.index(line) == len(said) - 2 and "accuracy" in line and "=" not in line


def test_a_move_has_its_levels_its_step_and_its_size(tmp_path):
    said = " ".join(screen(report(tmp_path)).split())
    move = re.search(r"- entropy, nats .*?: .*?policy drifts", said)[0]
    assert [
        part for part in (" 0.450 to 6.000 ", "since step 72 ", "(over 1000 standard errors)") if part not in move
    ] == []


def test_healthy_by_the_reward_alone_is_said(tmp_path):
    records = [*run_logs.verl()]
    said = screen(report_on(read_run(run_logs.write_console(tmp_path / "train.log", records))))
    assert said.startswith("HEALTHY: ") and "reward alone" in said
    records = [x | {"reward/acc/mean": x["critic/score/mean"]} for x in records]
    assert "alone" not in screen(report_on(read_run(run_logs.write_console(tmp_path / "train.log", records))))
