import math

import run_logs

from gtpo_verl.tools.diagnose.text_report import screen
from gtpo_verl.tools.diagnose.verdict import read_run, report_on


def report(tmp_path, **curves):
    return report_on(read_run(run_logs.write_console(tmp_path / "train.log", [*run_logs.collapse(**curves)])))


def test_it_is_one_screen_with_the_verdict_first_and_one_override(tmp_path):
    said = screen(report(tmp_path, kl=lambda step: 0.1 if step < 70 else 9.0)).splitlines()
    assert said[0].startswith("FAILED since step 7") and len(said) <= 36 and max(map(len, said)) <= 80
    assert "verl, steps 1 to 120, 512 completions a step, cut off at 1024 tokens" in said
    assert sum("Try " in line for line in said) == 1 and "actor_rollout_ref.actor.optim.lr=5e-07" in " ".join(said)
    (row,) = (line for line in said if line.startswith("reward  "))
    assert row.split()[1:3] == ["0.330", "0.624"] and "step 7" in row


def test_nan_shows_as_no_number_and_the_advice_is_to_go_back(tmp_path):
    said = screen(report(tmp_path, entropy=lambda step: 0.4 if step < 63 else math.nan))
    (row,) = (line for line in said.splitlines() if line.startswith("entropy"))
    assert row.split()[-3:] == ["NaN", "step", "63"]
    assert "Go back to the last checkpoint before step 63;" in said


def test_entries_that_are_ten_steps_apart_are_counted_in_both(tmp_path):
    records = [*run_logs.trl(run_logs.verl(steps=60))]
    found = report_on(read_run(run_logs.write_state(tmp_path / "trainer_state.json", records, every=10)))
    assert found["steps"] == [10, 600] and found["entries"] == 60 and found["verdict"] == "healthy"
    assert "means over 10 entries (100 steps)" in screen(found)
