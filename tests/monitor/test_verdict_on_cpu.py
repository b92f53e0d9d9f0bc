import math
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.monitor import verdict as rules
from gtpo_verl.monitor.explain import LABELS
from gtpo_verl.monitor.series import History
from gtpo_verl.monitor.verdict import CANNOT_TELL, DEGRADED, FAILED, HEALTHY, current_verdict, judge

SOUND = {"entropy": 0.3, "length": 100.0, "grad_norm": 0.5, "kl": 0.01, "loss": 0.1, "terminated": 1.0}


def run(steps=120, noise=0.01, completions=None, **curves):
    """A history whose numbers are `curves`, functions of the step or constants, beside those of a sound run."""
    drawn = random.Random(1)
    history = History(completions)
    for step in range(1, steps + 1):
        numbers = {}
        for name, curve in {**SOUND, **curves}.items():
            value = curve(step) if callable(curve) else curve
            if value is not None:
                numbers[name] = value + (drawn.gauss(0, noise) if name in ("accuracy", "reward") and value else 0.0)
        history.add(step, numbers)
    return history


def rising(step):
    return min(0.3 + 0.005 * step, 0.62)


def lines(*points):
    """Straight lines between values that are thirty steps apart."""

    def curve(step):
        place = min(step // 30, len(points) - 2)
        return points[place] + (points[place + 1] - points[place]) * (step - 30 * place) / 30

    return curve


def every(between, *values):
    """Validations, so many steps apart."""

    def curve(step):
        place = step // between - 1
        return values[place] if step % between == 0 and place < len(values) else None

    return curve


@pytest.mark.parametrize(
    ("curves", "word", "number"),
    [
        ({"reward": rising}, HEALTHY, "reward"),
        ({"reward": rising, "accuracy": rising}, HEALTHY, "accuracy"),
        ({"accuracy": 0.97, "reward": 0.97}, HEALTHY, "accuracy"),
        ({"reward": 0.97, "highest": 1.0}, HEALTHY, "reward"),
        ({"reward": lambda s: -0.9 + 0.005 * s}, HEALTHY, "reward"),
        ({"accuracy": lines(0.3, 0.9, 0.9, 0.49, 0.49)}, FAILED, "accuracy"),
        ({"reward": lines(0.3, 0.9, 0.9, 0.49, 0.49)}, FAILED, "reward"),
        ({"accuracy": lines(0.3, 0.9, 0.9, 0.7, 0.7)}, DEGRADED, "accuracy"),
        ({"accuracy": lines(0.7, 0.7, 0.7, 0.66, 0.66)}, DEGRADED, "accuracy"),  # no tenth, but no progress
        ({"accuracy": lines(0.7, 0.7, 0.7, 0.3, 0.3)}, FAILED, "accuracy"),
        ({"reward": lines(-0.5, 0.6, 0.6, 0.02, 0.02), "lowest": -1.0}, FAILED, "reward"),
        ({"reward": lines(-0.5, 0.6, 0.6, 0.3, 0.3), "lowest": -1.0}, DEGRADED, "reward"),
        ({"accuracy": rising, "reward": lines(0.3, 0.9, 0.9, 0.1, 0.1)}, HEALTHY, "accuracy"),  # which says more
        ({"accuracy": 0.0, "reward": lines(0.3, 0.9, 0.9, 0.1, 0.1)}, DEGRADED, "accuracy"),
        ({"reward": 0.5}, DEGRADED, "reward"),
        ({"reward": None}, CANNOT_TELL, ""),
    ],
)
def test_the_outcome_decides(curves, word, number):
    verdict = judge(run(steps=150, **curves))
    assert (verdict.word, verdict.number) == (word, number)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "reward", "entropy"])
def test_a_number_that_is_not_finite_at_the_end_is_a_failure_since_it_began(name):
    curves = {"reward": rising, name: lambda step: 0.4 if step < 63 else math.nan}
    verdict = judge(run(**curves))
    assert (verdict.word, verdict.number, verdict.since) == (FAILED, name, 63)
    assert "before step {since}" in verdict.advice.sentence
    verdict = judge(run(**(curves | {name: math.nan})))
    assert (verdict.word, verdict.since) == (FAILED, 1) and "no checkpoint" in verdict.advice.sentence


def test_a_number_that_was_not_finite_once_is_no_failure():
    assert judge(run(reward=rising, grad_norm=lambda s: math.inf if s == 63 else 0.5)).word == HEALTHY


def test_kl_alone_is_no_failure_while_the_loss_or_the_gradient_is_logged():
    assert judge(run(reward=rising, kl=math.nan)).word == HEALTHY
    assert judge(run(reward=rising, kl=math.nan, loss=None, grad_norm=None)).word == FAILED


@pytest.mark.parametrize(
    ("curves", "number", "advice"),
    [
        ({"terminated": 0.14}, "terminated", "raise it"),
        ({"dropped": 1.0}, "dropped", "completion_filter"),
        ({"zero_std_groups": 1.0}, "zero_std_groups", "rewards that differ"),
        ({"reward_std": 0.0}, "reward_std", "rewards that differ"),
        ({"grad_norm": 0.0, "zero_std_groups": 0.5}, "grad_norm", "Nothing is trained"),
        ({"grad_norm": 0.0, "reward_std": 0.5}, "grad_norm", "Nothing is trained"),
        ({"grad_norm": 0.0}, "grad_norm", "group differ?"),
        ({"positive": 0.0, "zero_std_groups": 0.5}, "positive", "min_correct_reward"),
        ({"reward": 0.0}, "reward", "reward function"),
        ({"accuracy": 0.005}, "accuracy", "reward function"),
    ],
)
@pytest.mark.parametrize("steps", [10, 120])
def test_what_is_so_from_the_first_step_on_needs_no_statistics(curves, number, advice, steps):
    verdict = judge(run(steps, noise=0, **{"reward": rising, **curves}))
    assert (verdict.word, verdict.number, verdict.since) == (DEGRADED, number, 1)
    assert advice in verdict.advice.sentence
    assert judge(run(9, noise=0, **{"reward": rising, **curves})).word == CANNOT_TELL


@pytest.mark.parametrize("name", ["terminated", "zero_std_groups", "dropped"])
def test_a_share_that_is_so_in_the_second_half_alone_is_not_so_from_the_first_step(name):
    bad = 0.0 if name == "terminated" else 1.0
    verdict = judge(run(reward=rising, **{name: lambda s: 1 - bad if s < 60 else bad}))
    assert verdict.since != 1


def test_groups_of_equal_rewards_are_no_fault_where_every_answer_is_right():
    assert judge(run(accuracy=1.0, reward=1.0, noise=0, zero_std_groups=1.0)).word == HEALTHY
    assert judge(run(accuracy=0.5, reward=0.5, noise=0, zero_std_groups=1.0)).word == DEGRADED


def test_rewards_that_never_differ_are_no_matter_of_min_correct_reward():
    assert judge(run(reward=rising, positive=0.0)).word == HEALTHY


@pytest.mark.parametrize("name", ["terminated", "exact_format", "format"])
def test_what_the_reward_need_not_see_is_a_fault_once_half_is_lost(name):
    verdict = judge(run(reward=rising, **{name: lambda s: 0.9 if s < 80 else 0.4}))
    assert (verdict.word, verdict.number, verdict.since) == (DEGRADED, name, 80)
    assert judge(run(reward=rising, **{name: lambda s: 0.9 if s < 80 else 0.5})).word == HEALTHY


@pytest.mark.parametrize(
    ("results", "word", "number"),
    [
        ((0.3, 0.36, 0.42, 0.48, 0.5, 0.52), HEALTHY, "validation"),
        ((0.55, 0.6, 0.62, 0.6, 0.05, 0.03, 0.04, 0.05), FAILED, "validation"),
        ((0.55, 0.6, 0.05), HEALTHY, "accuracy"),  # three show nothing
        ((0.35, 0.34, 0.36, 0.35, 0.34, 0.35, 0.36, 0.35, 0.34, 0.35), DEGRADED, "validation"),  # no progress
        ((0.1, 0.5, 0.2, 0.4, 0.3, 0.1), HEALTHY, "accuracy"),  # noise
    ],
)
def test_validations_decide_from_four_on_where_they_can(results, word, number):
    verdict = judge(run(steps=130, accuracy=rising, reward=rising, validation=every(13, *results)))
    assert (verdict.word, verdict.number) == (word, number)


HOLDING = (0.3, 0.36, 0.42, 0.48, 0.52, 0.55, 0.56, 0.56, 0.57, 0.58)
LOST = (*HOLDING[:6], 0.2, 0.2, 0.2, 0.2)


def only_after_the_fall(step):
    return 0.3 if step > 120 and step % 5 == 0 else None


@pytest.mark.parametrize(
    ("validation", "word"),
    [(every(15, *HOLDING), HEALTHY), (every(15, *LOST), FAILED), (only_after_the_fall, FAILED)],
    ids=["near their best", "lost", "only after"],
)
def test_validations_from_before_and_after_a_fall_outweigh_it_near_their_best_alone(validation, word):
    assert judge(run(150, accuracy=lines(0.3, 0.7, 0.7, 0.2, 0.2), validation=validation)).word == word


@pytest.mark.parametrize(
    ("curves", "number"),
    [
        ({"kl": lambda s: 0.03 if s < 40 else 0.9}, "kl"),
        ({"grad_norm": lambda s: 1.0 if s < 40 else 10.0}, "grad_norm"),
        ({"entropy": lambda s: 0.3 if s < 40 else 2.0}, "entropy"),
        ({"terminated": lambda s: 1.0 if s < 40 else 0.7}, "terminated"),
    ],
)
def test_another_number_is_a_fault_beside_an_outcome_that_does_not_rise(curves, number):
    verdict = judge(run(reward=0.5, **curves))
    assert (verdict.word, verdict.number) == (DEGRADED, number) and 35 <= verdict.since <= 42
    assert judge(run(reward=rising, **curves)).word == HEALTHY
    assert judge(run(reward=0.85, highest=1.0, **curves)).number == "reward"  # which has no room to rise


@pytest.mark.parametrize("flat", [0.55, lambda s: 0.55 if s < 60 else 0.56])
def test_an_outcome_that_stands_still_since_the_entropy_is_at_its_floor_is_degraded(flat):
    def collapsed(step):
        return max(0.5 * 0.9**step, 0.006)

    def stuck(step):
        return 0.3 + 0.01 * step if step < 25 else 0.55

    verdict = judge(run(reward=stuck, highest=1.0, entropy=collapsed))
    assert (verdict.word, verdict.number) == (DEGRADED, "entropy") and verdict.advice.remedy == "explore"
    assert judge(run(reward=rising, highest=0.65, entropy=collapsed)).word == HEALTHY  # near its ceiling
    assert judge(run(reward=lambda s: 0.3 + 0.004 * s, highest=1.0, entropy=collapsed)).word == HEALTHY


@pytest.mark.parametrize(("equal", "word"), [(0.5, DEGRADED), (0.93, HEALTHY)])
def test_a_gradient_of_0_wherever_rewards_are_equal_is_no_fault(equal, word):
    """In steps of one group, of which nearly all have equal rewards, the reward may rise by the others."""
    curves = {"grad_norm": lambda s: 0.4 if s % 14 == 0 else 0.0, "zero_std_groups": equal}
    assert judge(run(reward=rising, **curves)).word == word


AT_ONE = {"reward": lambda s: (0.9, 1.0, 0.85, 0.95, 0.9)[s % 5], "noise": 0}


def test_an_outcome_that_many_steps_share_at_its_highest_may_be_at_its_ceiling():
    verdict = judge(run(150, **AT_ONE, kl=lambda s: 0.03 if s < 40 else 0.9))
    assert (verdict.word, verdict.number) == (CANNOT_TELL, "reward") and "healthy if 1" in verdict.why


def test_an_outcome_whose_mean_is_far_below_its_highest_has_room_to_rise():
    below = AT_ONE | {"reward": lambda s: (0.5, 1.0, 0.45, 0.55, 0.5)[s % 5]}
    assert judge(run(1500, **below)).advice.sentence.startswith("Read completions")


@pytest.mark.parametrize(
    "curves",
    [
        AT_ONE | {"reward": lambda s: 1.0 if s % 15 == 0 else (0.9, 0.85, 0.95)[s % 3]},
        {"reward": 0.9, "noise": 0},
        AT_ONE | {"highest": 1.5},
    ],
    ids=["few steps at its highest", "never below", "a ceiling that is known"],
)
def test_an_outcome_that_does_not_rise_is_not_taken_to_be_at_its_ceiling(curves):
    assert judge(run(150, **curves)).word == DEGRADED


def test_no_progress_needs_a_hundred_steps_and_that_a_tenth_would_have_been_seen():
    assert judge(run(120, reward=0.5)).advice.sentence.startswith("Read completions: ")
    assert judge(run(80, reward=0.5)).word == CANNOT_TELL
    verdict = judge(run(120, reward=0.5, noise=0.2))
    assert verdict.word == CANNOT_TELL and "would tell" in verdict.why and "validations" in verdict.why
    assert judge(run(1500, reward=0.5, noise=0.2)).word == DEGRADED


def test_what_it_gained_and_lost_again_within_noise_is_not_healthy():
    verdict = judge(run(300, reward=lambda s: 0.9 if 60 < s < 120 else 0.6, noise=0.25))
    assert verdict.word in (DEGRADED, FAILED)


def test_few_steps_are_enough_where_they_show_it_and_fewer_than_twelve_are_not():
    assert judge(run(13, reward=lambda s: 0.4 + 0.02 * s, noise=0.02)).word == HEALTHY
    verdict = judge(run(11, reward=lambda s: 0.4 + 0.02 * s, noise=0.02))
    assert verdict.word == CANNOT_TELL and "12 steps" in verdict.why and "11 of reward" in verdict.why


def test_one_very_low_completion_does_not_hide_a_collapse():
    history = run(120, reward=lambda s: 0.7 if s < 60 else 0.05, lowest=lambda s: -5.0 if s == 25 else 0.0)
    assert judge(history).word == FAILED


def test_rare_rewards_that_stay_as_rare_seldom_seem_lost():
    drawn = random.Random(0)
    words = []
    for _ in range(50):
        rewards = [sum(drawn.random() < 0.03 for _ in range(64)) / 64 for _ in range(400)]
        words.append(judge(run(400, noise=0, reward=lambda s, rewards=rewards: rewards[s - 1])).word)
    assert words.count(FAILED) <= 1 and words.count(HEALTHY) <= 1


@pytest.mark.parametrize("steps", [13, 20, 60, 200])
def test_flat_accuracies_of_few_completions_are_seldom_healthy_or_failed(steps):
    words = []
    for seed in range(50):
        drawn = random.Random(seed)
        accuracies = [sum(drawn.random() < 0.5 for _ in range(8)) / 8 for _ in range(steps)]
        curve = lambda step, values=accuracies: values[step - 1]  # noqa: E731
        words.append(judge(run(steps, noise=0, completions=8, accuracy=curve)).word)
    assert words.count(HEALTHY) + words.count(FAILED) <= 2


# Right answers of 8 a step: .56 in steps 4 to 7, hardly any by step 20, and then some now and then.
LOST_EARLY = [0, 3, 0, 6, 4, 2, 6, 3, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 3, 0, 0, 0, 0, 1, 1, 0, 0, 5]


def of_eighths(counts, **numbers):
    return run(len(counts), noise=0, completions=8, accuracy=lambda s: counts[s - 1] / 8, **numbers)


def test_later_noise_does_not_take_back_that_an_outcome_fell():
    assert judge(of_eighths(LOST_EARLY[:20])).word == FAILED
    later = of_eighths(LOST_EARLY)
    assert current_verdict(later).word == CANNOT_TELL
    verdict = judge(later)
    assert (verdict.word, verdict.number, verdict.since) == (DEGRADED, "accuracy", 9)
    assert "fell from 0.562 to 0 by step 20" in verdict.why and verdict.advice.remedy == "lr"


def test_the_last_earlier_step_that_decides_counts():
    """The last tenth step before these 35 is step 30, which decides nothing."""
    assert current_verdict(of_eighths(LOST_EARLY[:30])).word == CANNOT_TELL
    assert judge(of_eighths(LOST_EARLY[:19])).word == current_verdict(of_eighths(LOST_EARLY[:19])).word


def test_what_fell_and_is_back_is_healthy():
    verdict = judge(of_eighths(LOST_EARLY[:20] + [4, 5, 5, 4, 5, 5, 6, 4, 5, 5, 5, 4]))
    assert (verdict.word, verdict.since, verdict.advice) == (HEALTHY, None, None)
    assert re.search(r" step 20\b.* back at 0\.6", verdict.why)


def test_a_share_of_eos_that_fell_and_is_half_back_is_degraded_still():
    ended = [8] * 12 + [1] * 8 + [7, 3, 8, 2, 6, 1, 8, 4]
    verdict = judge(of_eighths([4, 3, 5, 4] * 7, terminated=lambda s: ended[s - 1] / 8))
    assert (verdict.word, verdict.number) == (DEGRADED, "terminated")


def test_a_move_that_was_far_stays_told():
    """Beside an outcome that does not rise."""

    def kl(step):
        return 0.9 if 20 <= step <= 50 else 0.02

    curves = {"noise": 0.2, "reward": 0.5, "kl": kl}
    assert judge(run(50, **curves)).number == "kl"
    assert current_verdict(run(70, **curves)).word == CANNOT_TELL
    verdict = judge(run(70, **curves))
    assert (verdict.word, verdict.number) == (DEGRADED, "kl") and "as of step 60" in verdict.why


def test_a_number_that_is_finite_again_is_no_noise():
    curves = {"noise": 0.2, "reward": 0.5, "loss": lambda s: math.nan if s == 20 else 0.1}
    assert judge(run(20, **curves)).word == FAILED and judge(run(25, **curves)).word == CANNOT_TELL


def test_of_a_long_run_no_more_earlier_steps_are_tried(monkeypatch):
    asked = []
    monkeypatch.setattr(
        rules, "_verdict_on_finite_numbers", lambda history: asked.append(1) or rules.Verdict(CANNOT_TELL, "")
    )
    judge(run(10 * rules.LONG, reward=0.5))
    assert 200 < len(asked) < 300


VALUES = st.lists(st.sampled_from([0.0, 1.0, -1.0, 0.3, 20.0, 1e99, math.nan, math.inf]), min_size=1, max_size=3)
LOGGED = st.dictionaries(st.sampled_from([*LABELS, "highest", "lowest", "part tags", "lr"]), VALUES, min_size=1)


@given(LOGGED, st.sampled_from([3, 14, 60]))
def test_whatever_is_logged_has_a_verdict(logged, steps):
    """Each number is constant, or changes once or twice."""
    history = History(8)
    for step in range(steps):
        history.add(step, {name: values[step * len(values) // steps] for name, values in logged.items()})
    verdict = judge(history)
    assert verdict.why and verdict.word in (HEALTHY, DEGRADED, FAILED, CANNOT_TELL)
