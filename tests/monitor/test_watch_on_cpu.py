"""The monitor step by step: what it tells, what it ends, and the stored runs replayed."""

import gzip
import json
import math
import zipfile
from pathlib import Path

import pytest

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.watch import STEPS_PER_STAGE, Watch

ROOT = Path(__file__).resolve().parents[2]
SOUND = {"entropy": 0.3, "grad_norm": 0.5, "loss": 0.1, "terminated": 1.0, "exact_format": 0.9, "lr": 1e-4}


def replay(curves, steps=120, completions=64):
    """The alarms, each with its step."""
    watch = Watch("verl", completions, 64)
    found = []
    for step in range(1, steps + 1):
        numbers = {}
        for name, curve in {**SOUND, **curves}.items():
            value = curve(step) if callable(curve) else curve
            if value is not None:
                numbers[name] = value + (0.01 if name == "reward" and step % 2 else 0)
        found += [(step, alarm) for alarm in watch.observe(step, numbers)]
    return found


def ends(curves, **settings):
    """The steps at which a run should end, and whether for what the reward need not see."""
    return [(step, alarm.is_unseen) for step, alarm in replay(curves, **settings) if alarm.ends]


def rising(step):
    return min(0.3 + 0.01 * step, 0.7)


def lost(step):
    return rising(step) if step < 60 else 0.02


def test_a_healthy_run_is_silent():
    assert replay({"reward": rising}) == []


def test_a_lost_outcome_is_told_at_once_and_ends_the_run_after_a_window():
    found = replay({"reward": lost})
    assert all(word in ("DEGRADED", "FAILED") for word in [alarm.text.split()[0] for _, alarm in found])
    (first, _), (last, end) = found[0], found[-1]
    assert 62 <= first < 70 and 70 < last < 80
    assert [alarm.ends for _, alarm in found] == [False] * (len(found) - 1) + [True] and not end.is_unseen
    assert end.text.startswith("FAILED since step ") and "before step " in end.text
    assert "Try actor_rollout_ref.actor.optim.lr=5e-05." in end.text


def test_a_run_of_few_completions_a_step_is_ended_later():
    assert ends({"reward": lost}, steps=200, completions=8)[0][0] > 60 + 640 / 8


def test_what_was_told_is_not_told_again_where_noise_hides_it():
    counts = [0, 3, 0, 6, 4, 2, 6, 3, 0, 0, 0, 1, 0, 0, 1, *[0] * 8, 1, 0, 3, 0, 0, 0, 0, 1, 1, 0, 0, 5]
    found = replay({"accuracy": lambda s: counts[s - 1] / 8}, steps=len(counts), completions=8)
    assert [step for step, _ in found] == [19]


def test_what_else_moved_is_told_with_it():
    (_, alarm), *_ = replay({"reward": lost, "kl": lambda s: 0.02 if s < 55 else 0.9})
    assert "KL went from" in alarm.text
    assert "reference model" in alarm.text


def test_a_run_that_came_back_is_not_ended():
    assert ends({"reward": lambda s: 0.02 if 60 <= s < 68 else rising(s)}) == []
    assert ends({"reward": lambda s: 0.02 if 60 <= s < 70 else rising(s) if s < 60 else 0.6}) == []


def test_a_number_that_stays_not_finite_ends_a_run_after_five_steps():
    assert ends({"reward": rising, "grad_norm": lambda s: 0.5 if s < 60 else math.nan}) == [(64, False)]
    assert ends({"reward": rising, "grad_norm": lambda s: math.nan if 60 <= s < 64 else 0.5}) == []


@pytest.mark.parametrize("name", ["terminated", "exact_format"])
def test_the_share_of_eos_or_the_exact_format_is_what_the_reward_need_not_see(name):
    ((step, is_unseen),) = ends({"reward": rising, name: lambda s: 0.9 if s < 60 else 0.2})
    assert is_unseen and 70 < step < 90


def test_an_accuracy_that_was_never_above_a_tenth_is_too_little_to_end_a_run_for():
    assert ends({"accuracy": lambda s: 0.08 if s < 60 else 0.0, "reward": rising}) == []
    assert ends({"accuracy": lambda s: 0.2 if s < 60 else 0.0, "reward": rising})


def every_fifty(*values):
    return lambda step: values[step // 50 - 1] if step % 50 == 0 and step // 50 <= len(values) else None


def test_a_run_with_validations_is_not_ended_before_the_next_one_has_come():
    """Harder questions from step 160 on, while validations go on rising; then none comes."""
    fell = {"reward": lambda s: rising(s) if s < 160 else 0.2}
    rises = every_fifty(0.3, 0.36, 0.42, 0.5, 0.55, 0.6)
    assert ends(fell | {"validation": rises}, steps=300) == []
    assert ends(fell | {"validation": every_fifty(0.3, 0.36, 0.42, 0.02, 0.02, 0.02)}, steps=300)[0][0] == 200
    assert ends(fell | {"validation": every_fifty(0.3, 0.36, 0.42)}, steps=300)[0][0] == 200


def test_a_long_run_is_looked_at_now_and_then_and_not_ended_by_one_value_that_is_not_finite():
    watch = Watch("verl", 64)
    for step in range(1, 4 * STEPS_PER_STAGE):
        watch.history.add(step, {"reward": 0.5})
    alarms = []
    for step in range(4 * STEPS_PER_STAGE, 4 * STEPS_PER_STAGE + 20):
        alarms += [(step, alarm.ends) for alarm in watch.observe(step, {"reward": math.nan})]
    # Five steps apart; not finite in one step at the first look, and in six at the second.
    assert alarms == [(4 * STEPS_PER_STAGE, False), (4 * STEPS_PER_STAGE + 5, True)]


def test_one_value_that_is_not_finite_ends_a_fallen_run_no_sooner():
    ((without, _),) = ends({"reward": lost})
    ((step, _),) = ends({"reward": lambda step: math.nan if step == without - 2 else lost(step)})
    assert step >= without


def falling(first, between, last):
    """Validations that fall from 0.6 to 0.05 after step 400."""
    return lambda step: (0.05 if step > 400 else 0.6) if step % between == first and step <= last else None


def test_a_validation_of_a_step_that_is_not_looked_at_counts():
    assert ends({"validation": falling(5, 10, 499)}, steps=499, completions=640)  # each is at an odd step


def test_a_validation_counts_once_where_each_second_step_is_looked_at():
    ten_validations = {"validation": falling(0, 8, 480)}
    assert not ends(ten_validations, steps=499, completions=64)
    assert ends(ten_validations, steps=499, completions=128)


def test_what_a_step_logs_later_counts_no_value_of_it_again():
    """A log without a step of its own is of the step before it."""

    def step_of_end(has_later_log):
        watch = Watch("verl", 64)
        for step in range(1, 121):
            alarms = watch.observe(step, SOUND | {"reward": lost(step)})
            if has_later_log:
                alarms += watch.observe(step, {"kl": 0.02})
            if any(alarm.ends for alarm in alarms):
                return step
        return None

    assert step_of_end(has_later_log=True) == step_of_end(has_later_log=False)


RESULTS = ROOT / "studies/results"
PLACES = [RESULTS, *map(zipfile.Path, RESULTS.glob("verl.zip"))]  # neither is there under scripts/mutation.sh
STUDY = {
    f"{folder.name}/{log.name.removesuffix('.jsonl.gz')}": log
    for place in PLACES
    if (place / "verl").exists()
    for folder in (place / "verl").iterdir()
    for log in folder.iterdir()
}
CPU = {path.stem: path for path in sorted((ROOT / "docs/results/cpu").glob("*.jsonl"))}
ENDED = {  # by `stop`, or else by `stop_format`, and the steps at which an earlier version did
    "arithmetic/grpo-lr0.0003-seed1": ("stop", 352),
    "arithmetic/grpo-lr0.001-seed1": ("stop", 168),
    "arithmetic/gtpo-lr0.0003-seed1": ("stop", 426),
    "arithmetic/gtpo-lr0.001-seed1": ("stop", 181),
    "letter_counting/grpo_coin-lr5e-05-seed1": ("stop", 406),
    "arithmetic-100-T1/grpo-lr0.0002-seed1": ("stop_format", 202),
    "letter_counting/entropy-lr0.0001-seed1": ("stop_format", 593),
    "letter_counting/forward-lr0.0001-seed1": ("stop_format", 463),
    "letter_counting/grpo-lr5e-05-seed1": ("stop_format", 398),
}


def ended(records, completions):
    watch = Watch("verl", completions, 64)
    found = {}
    for step, record in enumerate(records, start=1):
        for alarm in watch.observe(step, translate(record, "verl", 64)):
            if alarm.ends:
                found.setdefault("stop_format" if alarm.is_unseen else "stop", step)
    return found


def read(log):
    return [json.loads(line) for line in gzip.decompress(log.read_bytes()).splitlines()]


@pytest.mark.parametrize("log", sorted(ENDED.keys() & STUDY.keys()))
def test_the_sick_runs_of_the_study_are_ended_no_later_than_they_were(log):
    how, step = ENDED[log]
    found = ended(read(STUDY[log]), 8)
    assert found[how] <= step + 1 and (how == "stop" or "stop" not in found)


@pytest.mark.nightly
@pytest.mark.parametrize("log", sorted(STUDY.keys() - ENDED.keys()))
def test_no_other_run_of_the_study_is_ended(log):
    assert ended(read(STUDY[log]), 8) == {}


@pytest.mark.parametrize("log", sorted(CPU))
def test_no_run_of_the_recipe_is_ended(log):
    assert ended(map(json.loads, CPU[log].read_text().splitlines()), 64) == {}
