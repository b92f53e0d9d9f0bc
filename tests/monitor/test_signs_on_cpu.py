import gzip
import json
import math
import random
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.signs import FAILED, FAULT, NOTE, NUMBERS, STEPS, VALIDATIONS, Watch, window

ROOT = Path(__file__).resolve().parents[2]
LOGS = sorted((ROOT / "docs/results/cpu").glob("*.jsonl"))
HEALTHY = {
    "aborted": 0.0,
    "terminated": 1.0,
    "repetition": 0.02,
    "zero_std_groups": 0.3,
    "no_correct_groups": 0.1,
    "exact_format": 0.95,
    "format": 9.5,
    "accuracy": 0.7,
    "reward": 15.0,
    "entropy": 0.1,
    "length": 30.0,
    "mismatch": 0.01,
    "kl": 0.01,
    "grad_norm": 0.5,
    "lr": 1e-4,
}
START = {"accuracy": 0.3, "reward": 7.0}
WORSE = {"accuracy": 0.55, "reward": 13.4}


def run(**changed):
    """A run that is healthy in its second window, then changed for three."""
    start = [HEALTHY | START] * STEPS
    return start + [HEALTHY if step < 2 * STEPS else HEALTHY | changed for step in range(STEPS, 5 * STEPS)]


def watch(records, steps=STEPS, framework="verl", limit=64, names=NUMBERS):
    """The watch after these records, and each alarm with its step."""
    windows = dict.fromkeys(names, steps) | ({"validation": VALIDATIONS} if "validation" in names else {})
    watched = Watch(windows, framework, limit)
    return watched, [(step, alarm) for step, numbers in enumerate(records) for alarm in watched.observe(step, numbers)]


def levels(records, **settings):
    """What shows at the end, and what it amounts to."""
    watched, _ = watch(records, **settings)
    return {sign.meaning: watched.level(sign) for sign in watched.showing}


def stops(records, **settings):
    """The steps at which something is grave, and which."""
    return [(step, alarm.sign.number) for step, alarm in watch(records, **settings)[1] if alarm.grave]


@pytest.mark.parametrize(
    ("within", "beyond", "meaning"),
    [
        ({"terminated": 0.901}, {"terminated": 0.899}, "more completions are cut off"),
        ({"repetition": 0.219}, {"repetition": 0.221}, "completions repeat themselves"),
        ({"zero_std_groups": 0.949}, {"zero_std_groups": 0.951}, "nearly all groups have equal rewards"),
        ({"no_correct_groups": 0.5}, {"no_correct_groups": 0.501}, "most groups have no correct answer"),
        ({"exact_format": 0.851}, {"exact_format": 0.849}, "fewer completions have the exact format"),
        ({"entropy": 0.69}, {"entropy": 0.70}, "the policy drifts towards noise"),
        ({"length": 57.5}, {"length": 57.7}, "completions near the limit"),
        ({"length": 7.6}, {"length": 7.4}, "completions shrink"),
        ({"mismatch": 0.0299}, {"mismatch": 0.0301}, "rollout and trainer log-probs diverge"),
        ({"aborted": 0.099}, {"aborted": 0.101}, "completions are aborted"),
        ({"kl": 0.99}, {"kl": 1.01}, "KL explodes"),
    ],
)
def test_a_symptom_is_a_note_beside_an_outcome_at_its_best_and_a_fault_where_it_falls(within, beyond, meaning):
    assert levels(run(**within)) == {}
    assert levels(run(**beyond)) == {meaning: NOTE}
    assert levels(run(**beyond, **WORSE))[meaning] == FAULT
    for changed in (beyond, beyond | WORSE):
        assert stops(run(**changed)) == []  # no run is ended by it
    sentence = watch(run(**beyond))[1][0][1].sentence
    (name,) = beyond
    best = "" if NUMBERS[name][1] is None else f", best {HEALTHY[name]:.3g}"
    assert f"{NUMBERS[name][0]} " in sentence and f"(first {HEALTHY[name]:.3g}{best})" in sentence
    assert "(a note: accuracy is 0.7, best 0.7)" in sentence


def test_a_symptom_is_a_fault_too_where_the_outcome_does_not_rise_though_it_could():
    flat = [HEALTHY | {"accuracy": 0.3, "reward": 7.0, "length": 30.0 if step < 20 else 60.0} for step in range(50)]
    assert levels(flat) == {"completions near the limit": FAULT}
    assert levels([x | {"accuracy": 0.97} for x in flat]) == {"completions near the limit": NOTE}


def test_a_remedy_is_that_of_its_own_sign():
    ((_, alarm),) = watch(run(terminated=0.85))[1]
    assert alarm.sentence.endswith("mask or penalise overlong ones. Try: data.max_response_length=128")
    ((_, alarm),) = watch(run(terminated=0.85), limit=None)[1]
    assert "Try" not in alarm.sentence


@pytest.mark.parametrize(
    ("changed", "number"),
    [({"terminated": 0.49}, "terminated"), ({"exact_format": 0.4}, "exact_format"), ({"format": 4.5}, "format")],
)
def test_clean_endings_or_a_format_that_are_half_lost_are_a_fault_beside_any_reward(changed, number):
    found = levels(run(**changed, accuracy=0.99, reward=20.0))
    assert FAULT in found.values() and FAILED not in found.values()
    _, alarms = watch(run(**changed))
    assert [(a.sign.number, a.grave) for _, a in alarms if a.grave] == [(number, True)]  # which `stop` does not heed


def test_what_was_cut_off_from_the_start_is_a_sign_of_a_low_limit():
    assert levels([HEALTHY | {"terminated": 0.501}] * 2 * STEPS) == {}
    found = levels([HEALTHY | START | {"terminated": 0.499}] * 2 * STEPS)
    assert found == {"most completions are cut off": FAULT}
    found = levels([HEALTHY | {"terminated": 0.25}] * 2 * STEPS)
    assert found["nearly all completions are cut off"] == FAULT


BEGUN, LATER = {"entropy": 0.8, "length": 60.0, "accuracy": 0.1}, {"entropy": 1.5, "length": 63.0, "accuracy": 0.05}


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(run(), id="healthy"),
        pytest.param([{"entropy": 0.2}] * 50, id="numbers that are not logged"),
        pytest.param([HEALTHY | (BEGUN if n < 2 * STEPS else LATER) for n in range(4 * STEPS)], id="it began so"),
        pytest.param([{"mismatch": 0.001}] * STEPS + [{"mismatch": 0.02}] * STEPS, id="a tiny mismatch grows tenfold"),
        pytest.param(
            [*run()[:25], HEALTHY | {"accuracy": 0, "reward": 0, "terminated": 0.1}, *run()[26:]], id="a bad step"
        ),
    ],
)
def test_a_run_that_has_not_collapsed_is_silent(records):
    assert watch(records)[1] == []


def constant(steps=2 * STEPS, **numbers):
    return [HEALTHY | numbers] * steps


FROZEN = {"grad_norm": 0.0}


@pytest.mark.parametrize(
    ("numbers", "meaning", "advice"),
    [
        ({"reward": 0.0}, "hardly a completion ever got a reward", "Look at the reward function"),
        ({"zero_std_groups": 1.0}, "no gradient: all groups have equal rewards", "Groups need rewards that differ"),
        (FROZEN | {"zero_std_groups": 1.0}, "no gradient: all groups have equal rewards", "Groups need rewards"),
        (FROZEN, "the gradient is 0 although rewards differ", "not for the rewards: look for frozen"),
        (FROZEN | {"zero_std_groups": math.nan}, "no gradient: its norm is 0", "Do the rewards of a group differ?"),
        ({"positive": 0.0}, "no advantage is positive", "none reaches algorithm.gtpo.min_correct_reward"),
        ({"accuracy": 0.01}, "hardly a completion was ever right", "Look at the reward function"),
        ({"kl": 50.0}, "KL is absurd from the start", "Is the reference model"),
        ({"grad_norm": 5e4}, "the gradient norm is absurd", "Is the reference model"),
    ],
)
def test_what_holds_in_every_step_is_a_fault_since_the_first_after_two_windows(numbers, meaning, advice):
    found = [watch(constant(steps, **numbers)) for steps in (2 * STEPS - 1, 2 * STEPS)]
    assert meaning not in [sign.meaning for sign in found[0][0].showing]
    watched, alarms = found[1]
    (sign,) = (sign for sign in watched.showing if sign.meaning == meaning)
    assert watched.level(sign) == FAULT and watched.showing[sign] == 0 and advice in watched.advice(sign)
    assert meaning not in levels([*constant(STEPS), *constant(STEPS, **numbers)])


@pytest.mark.parametrize(
    ("reward_std", "meaning"),
    [(0.5, "the gradient is 0 although rewards differ"), (0.0, "no gradient: all groups have equal rewards")],
)
def test_the_deviation_of_rewards_alone_says_whether_they_differ(reward_std, meaning):
    """As in TRL before it logged how many groups have equal rewards. No progress is no surprise then."""
    names = ["reward", "reward_std", "grad_norm"]
    assert levels(noisy(1.0, 1.0, 1.0, reward_std=reward_std, grad_norm=0.0), names=names) == {meaning: FAULT}


def noisy(*means, steps=60, **numbers):
    """Rewards that go from each mean to the next, without a word of accuracy."""
    noise, known = random.Random(1), {name: value for name, value in HEALTHY.items() if name != "accuracy"}
    line = [a + (b - a) * i / steps for a, b in zip(means, means[1:], strict=False) for i in range(steps)]
    return [known | {"reward": x + noise.gauss(0, 0.05)} | numbers for x in line]


@pytest.mark.parametrize(
    ("records", "named"),
    [
        (noisy(1.0, 1.0, 1.0), True),
        (noisy(1.0, 1.0), False),  # fewer than a hundred steps
        (noisy(1.0, 1.3, 1.3), False),
        (noisy(1.0, 1.3, 1.0), False),  # lost again, which is another sign
        (noisy(0.2, 0.2, 0.2), False),  # too noisy for a tenth of it to show
        (noisy(1.0, 1.0, 1.0, highest=1.02), False),  # at its ceiling from the start
        (noisy(0.5, 0.5, 0.5, lowest=-2), True),
        ([x | {"accuracy": x["reward"] / 2} for x in noisy(1.0, 1.0, 1.0)], True),
    ],
)
def test_no_progress_is_named_where_progress_would_have_been_seen(records, named):
    found = [meaning for meaning in levels(records) if "is lost" not in meaning]
    outcome = "accuracy" if "accuracy" in records[0] else "the reward"
    assert found == ([f"no progress in {outcome}"] if named else [])


def test_entropy_near_0_is_a_fault_where_the_reward_stops_rising_though_it_could():
    records = [x | {"highest": 20} for x in run(entropy=0.009)]
    assert levels([x | {"reward": min(x["reward"] + 2, 17)} for x in records]) == {}
    assert levels(records)["entropy fell to almost nothing"] == FAULT
    rising = [x | {"accuracy": 0.3 + 0.01 * step} for step, x in enumerate(records)]
    assert levels(rising)["entropy fell to almost nothing"] == NOTE


def test_a_wider_clip_range_is_tried_only_where_something_was_clipped():
    records = [x | {"accuracy": 0.3, "reward": 7.0} for x in run(entropy=0.009)]
    tried = []
    for share in (math.nan, 0.0, 0.01):
        watched, _ = watch([*records[:-1], records[-1] | {"clipped": share}])
        (sign,) = (sign for sign in watched.showing if sign.meaning == "entropy fell to almost nothing")
        tried.append(watched.remedy(sign))
    assert tried == ["", "", "actor_rollout_ref.actor.clip_ratio_high=0.28"]
    assert translate({"actor/pg_clipfrac": 0.01}, "verl") == {"clipped": 0.01}
    assert translate({"clip_ratio/region_mean": 0.01}, "TRL") == {"clipped": 0.01}


def test_a_part_of_the_reward_is_named_if_it_is_lost_or_never_paid():
    records = [{"reward": 1.0, "part tag": 0.5 if step < 20 else 0.0, "part never": 0.0} for step in range(40)]
    assert levels(records, framework="TRL", names=["reward"]) == {
        "tag, a part of the reward, fell below half of its best": FAULT,
        "never, a part of the reward, never paid anything": NOTE,
    }
    small = [x | {"part tag": x["part tag"] / 50, "part never": 1.0} for x in records]
    assert levels(small, framework="TRL", names=["reward"]) == {}


def test_the_window_has_ten_steps_and_640_completions():
    assert [window(completions) for completions in (8, 63, 64, 10_000)] == [80, 11, 10, 10]


def test_a_sign_that_is_gone_shows_no_longer():
    watched, alarms = watch([*run(exact_format=0.6), *[HEALTHY] * 2 * STEPS])
    assert len(alarms) == 1 and not watched.showing


@pytest.mark.parametrize("step", [30, 33, 37])
def test_the_step_of_a_sign_is_that_of_the_change(step):
    records = [HEALTHY | {"accuracy": 0.7 if n < step else 0.1} for n in range(60)]
    watched, _ = watch(records)
    assert {*watched.showing.values()} == {step}


def test_a_number_that_stays_not_finite_fails_the_run_within_half_a_window():
    watched, alarms = watch(run(grad_norm=math.nan))
    assert [(step, alarm.grave) for step, alarm in alarms] == [(2 * STEPS, False), (2.5 * STEPS - 1, True)]
    assert [*watched.showing.values()] == [2 * STEPS]
    assert "Go back to the last checkpoint before step 20;" in alarms[0][1].sentence


def test_what_is_not_finite_from_the_first_step_is_a_matter_of_the_configuration():
    watched, alarms = watch([HEALTHY | {"grad_norm": math.nan}] * 20)
    (sign,) = watched.showing
    assert watched.level(sign) == FAILED and "there is no checkpoint to go back to" in watched.advice(sign)


@pytest.mark.parametrize(("reward", "level"), [(lambda n: 7.0 + n, NOTE), (lambda n: 7.0, FAULT)])
def test_nan_in_kl_alone_fails_no_run_whose_loss_is_finite(reward, level):
    records = [{"kl": math.nan, "loss": 0.1, "grad_norm": 0.2, "reward": reward(n)} for n in range(40)]
    assert levels(records)["KL is not finite"] == level


def test_a_value_that_was_not_finite_once_enters_no_mean():
    records = run()
    records[25] = HEALTHY | {"grad_norm": math.inf, "reward": math.nan, "accuracy": 1e300}
    watched, alarms = watch(records)
    assert [(step, alarm.grave) for step, alarm in alarms] == [(25, False), (25, False)] and not watched.showing
    assert watched["grad_norm"].bad_steps == [25] and watched["reward"].now == 15.0


@pytest.mark.parametrize(
    ("means", "lost"),
    [
        ([{"accuracy": 0.7}, {"accuracy": 0.61}], []),
        ([{"accuracy": 0.7}, {"accuracy": 0.59}], ["accuracy"]),  # below its start
        ([{"accuracy": 0.1}, {"accuracy": 0.9}, {"accuracy": 0.44}], ["accuracy"]),  # below half of its best
        ([{"accuracy": 0.1}, {"accuracy": 0.9}, {"accuracy": 0.46}], []),
        ([{"reward": x, "lowest": -1} for x in (0.3, 0.6, -0.19)], ["reward"]),  # below its start
        ([{"reward": x, "lowest": -1} for x in (-0.5, 0.6, 0.06)], []),
        ([{"reward": x, "lowest": -1} for x in (-0.5, 0.6, 0.04)], ["reward"]),  # half of what it gained
        ([{"reward": x, "lowest": -9} for x in (1.0, 0.1)], []),  # by a tenth of the way to the lowest
        ([{"reward": x, "lowest": -9} for x in (1.0, -0.1)], ["reward"]),
        ([{"reward": 10.0}, {"reward": 9.1}], []),
        ([{"reward": 10.0}, {"reward": 8.9}], ["reward"]),  # by a tenth
        ([{"accuracy": 0.7, "reward": 10.0}, {"accuracy": 0.7, "reward": 1.0}], []),  # accuracy says more
        ([{"accuracy": 0.0, "reward": 10.0}, {"accuracy": 0.0, "reward": 1.0}], ["reward"]),  # it had none to lose
        ([{"terminated": 1.0}, {"terminated": 0.1}], []),  # no outcome
    ],
)
def test_an_outcome_is_lost_below_half_of_its_best_or_below_its_start(means, lost):
    watched, _ = watch(mean for mean in means for _ in range(2 * STEPS))
    assert [sign.number for sign in watched.showing if watched.level(sign) == FAILED] == lost


def test_a_lost_outcome_ends_a_run_once_it_lasted_a_window():
    falls = [HEALTHY | {"reward": 0.6 if n < 30 else 0.0} for n in range(60)]
    no_accuracy = [{name: x for name, x in record.items() if name != "accuracy"} for record in falls]
    ((step, number),) = stops(no_accuracy)
    assert number == "reward" and 40 < step < 55
    assert stops(no_accuracy[:40] + no_accuracy[:20]) == []  # it came back
    assert stops([x | {"reward": x["reward"] - 0.08} for x in no_accuracy[:30]]) == []


VALIDATED = [HEALTHY | {"reward": 0.2 + 0.005 * n, "accuracy": 0.2 + 0.005 * n} for n in range(100)]


def validated(*results):
    return [x | ({"validation": results[n // 10]} if n % 10 == 0 else {}) for n, x in enumerate(VALIDATED)]


def test_a_validation_that_falls_while_training_rises_is_a_fault_and_a_lost_one_a_failure():
    assert levels(validated(*[0.3] * 4, *[0.45] * 6)) == {}
    records = validated(0.3, 0.33, 0.36, 0.39, 0.42, 0.45, 0.45, 0.41, 0.38, 0.36)
    for outcome in ("reward", "accuracy"):
        found = levels(records, names=["validation", outcome])
        assert found == {"the validation falls while training rises": FAULT}
    assert levels([x | {"reward": 0.4, "accuracy": 0.4} for x in records]) == {}
    found = levels(validated(0.24, 0.28, 0.32, 0.36, 0.44, 0.36, 0.28, 0.2, 0.05, 0.05))
    assert found["the validation is lost"] == FAILED
    watched, _ = watch(validated(*[0.3] * 4, *[0.45] * 6))
    assert watched.decides() == "validation" and watched["validation"].rose()


@pytest.mark.parametrize("results", [(0.55, 0.6, 0.05, 0.03), (0.55, 0.6, 0.62, 0.05, 0.03)])
def test_a_fall_among_few_validations_does_not_hide_in_the_noise_that_it_makes(results):
    found = dict(zip(range(0, 100, 20), results, strict=False))
    records = [x | ({"validation": found[n]} if n in found else {}) for n, x in enumerate(VALIDATED)]
    assert levels(records)["the validation is lost"] == FAILED


VALUES = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.3, 20.0, 1e99, math.nan, math.inf]), min_size=1, max_size=3)
OTHERS = sorted({*NUMBERS, "highest", "lowest", "part tags", "lr"} - {"validation", "reward"})
LOGGED = st.fixed_dictionaries(dict.fromkeys(("validation", "reward"), VALUES), optional=dict.fromkeys(OTHERS, VALUES))


@given(LOGGED)
def test_the_watch_ends_no_run_by_an_error_of_its_own(logged):
    """Each number is constant, or changes once or twice."""
    records = [{name: values[n * len(values) // 24] for name, values in logged.items()} for n in range(24)]
    watched, _ = watch(records, steps=4, names=[*NUMBERS, "part tags"])
    assert all(watched.sentence(sign) for sign in watched.showing)


@pytest.mark.parametrize("result", [0.0, -1.0])
def test_a_validation_that_never_leaves_its_floor_does_not_fall(result):
    assert levels(validated(*[result] * 10)) == {}


def test_few_validations_that_stay_where_they_are_do_not_seem_to_fall():
    drawn = random.Random(1)
    runs = [[x | {"validation": drawn.gauss(0.3, 0.06)} for x in VALIDATED[:count]] for count in [4, 5, 6, 8] * 50]
    found = [levels(records, names=["validation", "accuracy", "reward"]) for records in runs]
    assert sum(bool(x) for x in found) <= 6  # of 200


def test_an_accuracy_in_validation_is_at_its_ceiling_near_1_whatever_the_rewards():
    records = [
        x | {"highest": 20.0} | ({"validation": 0.975} if n % 10 == 0 else {}) for n, x in enumerate([HEALTHY] * 100)
    ]
    assert not watch(records)[0]["validation"].rose()
    assert watch([x | {"validation_limit": 1.0} for x in records])[0]["validation"].rose()


def test_a_validation_is_at_its_ceiling_if_the_reward_in_training_goes_no_higher():
    for results, at_ceiling in (([0.97] * 8, True), ([0.6] * 8, False)):
        watched, _ = watch(x | {"highest": 1.0, "validation": y} for x, y in zip(VALIDATED, results, strict=False))
        assert watched["validation"].rose() == at_ceiling


def test_a_validation_that_holds_after_it_excuses_a_reward_that_fell():
    lost = [{**x, "accuracy": 0.7 if n < 60 else 0.2} for n, x in enumerate(validated(*[0.3] * 4, *[0.45] * 6))]
    assert levels(lost)["accuracy is lost"] == NOTE and stops(lost) == []


def reward_of(means, **more):
    """Steps with these rewards, ten of each."""
    return [{"reward": mean, **more} for mean in means for _ in range(10)]


def test_one_completion_with_a_very_low_reward_does_not_hide_a_collapse():
    records = reward_of([0.2, 0.4, 0.6, 0.7, 0.7, 0.0, 0.0, 0.0], lowest=0.0)
    records[25] = records[25] | {"lowest": -5.0}
    assert levels(records)["the reward is lost"] == FAILED and stops(records)


def test_a_run_whose_reward_came_back_is_not_ended():
    records = reward_of([0.2, 0.4, 0.6, *[0.7] * 8])
    records[60:68] = [{"reward": 0.0}] * 8  # the server that gives it was away
    watched, alarms = watch(records)
    assert [alarm.grave for _, alarm in alarms] == [False] and not watched.showing


def test_a_run_with_validations_is_not_ended_before_the_next_one_has_come():
    """Harder questions from step 101 on; the validation, every 50 steps, goes on rising."""
    records = reward_of([0.2, 0.4, 0.6, *[0.7] * 7, *[0.3] * 10])
    overdue = [dict(record) for record in records]
    for step, result in ((0, 0.3), (50, 0.36), (100, 0.42), (150, 0.5)):
        records[step]["validation"] = result
        overdue[step] |= {"validation": result} if step <= 100 else {}
    assert not stops(records)
    for step in (150, 199):
        records[step]["validation"] = 0.02
    assert stops(records)[0] == (150, "reward") and stops(overdue) == [(150, "reward")]


@pytest.mark.parametrize(
    ("every", "results", "level"),
    [(20, (0.3, 0.34, 0.38, 0.42, 0.46, 0.5, 0.53, 0.55, 0.57, 0.49), NOTE), (60, (0.31, 0.7, 0.02, 0.02), FAILED)],
)
def test_a_validation_excuses_a_lost_reward_only_near_its_best(every, results, level):
    records = reward_of([0.2, 0.5, *[0.75] * 8, *[0.3] * 10])
    for place, result in enumerate(results):
        records[every * place]["validation"] = result
    assert levels(records)["the reward is lost"] == level


def test_a_rare_reward_that_stays_as_rare_seldom_seems_lost():
    """Of the forty windows of such a run one is best by chance."""
    drawn = random.Random(0)
    flat = [[{"reward": sum(drawn.random() < 0.03 for _ in range(64)) / 64} for _ in range(400)] for _ in range(50)]
    assert sum(bool(stops(records, names=["reward"])) for records in flat) <= 8


def test_a_validation_before_training_does_not_hide_that_entropy_fell():
    records = [{"reward": 0.3, "entropy": 0.5 if step < 30 else 0.002} for step in range(120)]
    assert levels(records) == levels([records[0] | {"validation": 0.3}, *records[1:]]) != {}


def test_entropy_near_0_is_no_fault_where_hardly_an_answer_is_wrong():
    records = [
        {"accuracy": x, "reward": x, "entropy": max(0.3 - 0.01 * n, 0.008)} for n, x in enumerate([0.6, *[0.93] * 59])
    ]
    assert levels(records) == {}


@pytest.mark.parametrize(
    ("framework", "override"),
    [
        ("verl", "actor_rollout_ref.actor.optim.lr=5e-05"),
        ("TRL", "learning_rate=5e-05"),
        ("ms-swift", "--learning_rate 5e-05"),
        ("OpenRLHF", "--actor.adam.lr 5e-05"),
    ],
)
def test_the_remedy_is_an_override_of_the_runs_own_framework(framework, override):
    _, alarms = watch(run(terminated=0.4), framework=framework)
    assert alarms[-1][1].sentence.endswith(f"Try: {override}")


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_no_false_alarm_on_healthy_runs(log):
    assert watch(translate(json.loads(line), "verl", 64) for line in log.read_text().splitlines())[1] == []


RESULTS = ROOT / "studies/results"
PLACES = [RESULTS, *map(zipfile.Path, RESULTS.glob("verl.zip"))]  # neither is there under scripts/mutation.sh
STUDY = {
    f"{folder.name}/{log.name.removesuffix('.jsonl.gz')}": log
    for place in PLACES
    if (place / "verl").exists()
    for folder in (place / "verl").iterdir()
    for log in folder.iterdir()
}
ENDED = {  # by `stop`, or else by `stop_format`, and the step
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
"""What ails the study's runs of one prompt a step, as their curves show it: docs/results/diagnose/watch.md."""


@pytest.mark.parametrize("log", sorted(STUDY), ids=str)
def test_the_watch_ends_the_sick_runs_of_the_study_and_no_other(log):
    records = [
        translate(json.loads(line), "verl", 64) for line in gzip.decompress(STUDY[log].read_bytes()).splitlines()
    ]
    _, alarms = watch(records, steps=window(8))
    grave = [(step + 1, alarm.sign.level == FAILED) for step, alarm in alarms if alarm.grave]
    ends = min((("stop", step) for step, is_lost in grave if is_lost), default=None)
    assert (ends or min((("stop_format", step) for step, _ in grave), default=None)) == ENDED.get(log)
