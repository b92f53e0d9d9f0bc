import math
import random

import pytest

from gtpo_verl.monitor.series import History, Series


def series(values, **settings):
    found = Series(**settings)
    for step, value in enumerate(values, start=1):
        found.add(step, value)
    return found


def noisy(*means, steps=100, noise=0.1, seed=1):
    drawn = random.Random(seed)
    return [drawn.gauss(mean, noise) for mean in means for _ in range(steps)]


def test_the_noise_is_that_of_a_step_around_a_trend_and_a_jump():
    flat = noisy(1.0, steps=400)
    rising = [value + 0.05 * step for step, value in enumerate(flat)]
    jumped = [value + (5.0 if step > 200 else 0.0) for step, value in enumerate(flat)]
    for values in (flat, rising, jumped):
        assert series(values).noise() == pytest.approx(0.1, rel=0.15)
    assert series([0.5] * 50).noise() == pytest.approx(0) and series([1.0, 2.0, 3.0]).noise() == math.inf


def test_a_share_of_few_completions_has_at_least_their_noise():
    assert series([0.5] * 50, is_share=True, completions=4).noise() == 0.25
    assert series([0.5] * 50, completions=4).noise() == pytest.approx(0)


def test_a_level_is_a_mean_over_as_many_values_as_show_a_tenth_and_at_most_a_third():
    assert series(noisy(1.0, noise=0.001)).window() == 8
    assert series(noisy(1.0, steps=1000, noise=0.2)).window() > 60
    assert series(noisy(1.0, steps=30, noise=0.5)).window() == 8
    assert series(range(5)).windows() == [1] and series(range(13)).windows() == [4]
    assert series(range(100)).windows() == [4, 8, 16, 32]


def test_levels_are_the_first_the_best_the_lowest_and_the_last_mean():
    values = [0.1] * 20 + [0.9] * 20 + [0.5] * 20
    levels = series(values).levels(8)
    assert (levels.first, levels.best, levels.lowest, levels.last) == pytest.approx((0.1, 0.9, 0.1, 0.5))


def test_chance_grows_with_the_number_of_windows_and_falls_with_their_size():
    found = series(noisy(1.0, steps=2000))
    assert found.chance(64) < found.chance(8)
    assert found.chance(8, 1900) > found.chance(8, 100) * 1.05


@pytest.mark.parametrize("seed", range(5))
def test_what_rises_rose_and_noise_does_not(seed):
    assert series(noisy(0.5, 0.7, seed=seed)).rose()
    assert not series(noisy(0.5, 0.5, 0.5, seed=seed)).rose()
    assert not series(noisy(0.7, 0.5, seed=seed)).rose()
    assert not series([0.1] * 300).rose()  # nor does rounding


def test_what_rose_by_a_step_has_risen_at_each_later_one():
    values = noisy(0.5, 0.8, 0.6, 0.55)
    rose = [series(values[:count]).rose() for count in range(20, len(values), 20)]
    assert True in rose and all(rose[rose.index(True) :])


def test_the_rise_between_thirds_is_in_standard_errors():
    assert series(noisy(0.5, 0.5, 0.9)).rise_in_errors() > 20 and abs(series(noisy(0.5, 0.5, 0.5)).rise_in_errors()) < 3
    assert series([0.1] * 3).rise_in_errors() == 0 and series([0.0, 0.0, 1.0, 1.0]).rise_in_errors() > 0


@pytest.mark.parametrize("step", [40, 61, 83])
def test_the_step_since_which_it_left_its_best_level_follows_the_last_good_window(step):
    found = series([0.8 if n < step else 0.1 for n in range(1, 121)])
    assert found.left_since(found.levels(8)) == step
    found = series([0.1 if n < step else 0.8 for n in range(1, 121)])
    assert found.left_since(found.levels(8), is_up=True) == step


def test_a_value_that_is_not_finite_enters_no_level():
    found = series([1.0, math.nan, 1.0, 1e200, 1.0])
    assert [*found.values] == [1.0] * 3 and [*found.bad_steps] == [2, 4] and found.not_finite_since() is None
    assert series([1.0, math.inf, math.nan]).not_finite_since() == 2 == series([1.0, math.nan]).not_finite_since()


def test_a_part_begins_at_its_step():
    assert [*series(range(10)).since(8).values] == [7, 8, 9]


def test_a_part_ends_with_its_step():
    whole = series([1.0, 2.0, math.nan, 4.0, math.nan])
    part = whole.until(4)
    assert ([*part.steps], [*part.values], [*part.bad_steps]) == ([1, 2, 4], [1.0, 2.0, 4.0], [3])
    assert (part.is_share, part.is_validation) == (whole.is_share, whole.is_validation)
    found = history(6, reward=1.0)
    found.add(7, {"kl": 0.1})
    until = found.until(6)
    assert [*until.steps] == [1, 2, 3, 4, 5, 6] and [*until.series] == ["reward"]


def history(steps, **numbers):
    found = History()
    for step in range(1, steps + 1):
        found.add(step, numbers)
    return found


def test_the_floor_and_the_ceiling_of_the_reward_are_those_of_a_usual_steps_completions():
    found = history(20, reward=0.5, lowest=-1.0, highest=1.0, accuracy=0.5)
    for step in (21, 22):
        found.add(step, {"lowest": -50.0, "highest": 50.0})
    assert (found.floor("reward"), found.ceiling("reward")) == (-1.0, 1.0)
    assert found.filled("reward", 0.5) == 0.75 and found.span("reward") == 1.5
    assert (found.floor("accuracy"), found.ceiling("accuracy")) == (0.0, 1.0)


def test_a_ceiling_that_is_not_known_is_infinite():
    assert history(5, reward=-2.0).ceiling("reward") == math.inf == history(5, accuracy=2.0).ceiling("accuracy")
    assert history(5, reward=0.0, highest=0.0).ceiling("reward") == math.inf
    assert history(5, validation=0.3, validation_limit=1.0).ceiling("validation") == 1.0


def test_a_number_that_was_not_logged_has_no_values():
    assert len(history(5, reward=1.0)["kl"]) == 0 and history(5, reward=1.0).most("kl") == 0
