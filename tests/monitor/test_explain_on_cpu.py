import pytest

from gtpo_verl.monitor import explain
from gtpo_verl.monitor.explain import LABELS, ROWS, Row, constant_parts, moves, override, row_of
from gtpo_verl.monitor.series import History


def history(before, after, steps=60, completions=None):
    """Numbers that change at half of the steps."""
    found = History(completions)
    for step in range(1, steps + 1):
        found.add(step, before if step <= steps // 2 else {**before, **after})
    return found


def moved(before, after, **settings):
    return [(move.row.number, move.row.worse) for move in moves(history(before, after, **settings))]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.number} {row.worse}")
def test_each_row_is_found_beyond_its_factor_or_share_and_not_within(row):
    is_share = row.number in (
        "terminated",
        "exact_format",
        "zero_std_groups",
        "no_correct_groups",
        "repetition",
        "aborted",
    )
    start = 0.5 if is_share else 3.0
    far, near = (0.2, 0.1) if is_share else (6.5, 5.5)
    if row.worse == "down":
        far, near = (-0.2, -0.1) if is_share else (-2.1, -1.9)
    assert moved({row.number: start}, {row.number: start + far}) == [(row.number, row.worse)]
    assert moved({row.number: start}, {row.number: start + near}) == []
    assert moved({row.number: start}, {row.number: start - far}) in ([], [(row.number, _other(row))])


def _other(row: Row) -> str:
    return "down" if row.worse == "up" else "up"


@pytest.mark.parametrize(("number", "before", "after"), [("kl", 0.001, 0.09), ("mismatch", 0.001, 0.009)])
def test_below_what_means_something_nothing_moves(number, before, after):
    assert moved({number: before}, {number: after}) == []


def test_the_largest_move_is_the_first_by_its_own_noise():
    found = History()
    for step in range(1, 61):
        wobble = 0.5 if step % 2 else -0.5
        late = step > 30
        found.add(step, {"kl": 1.0 if late else 0.1, "length": 1000 + 200 * wobble - 700 * late, "grad_norm": 1.0})
    assert [move.row.number for move in moves(found)] == ["kl", "length"]
    move = moves(found)[1]
    assert move.first > 900 and move.last < 400 and 30 <= move.since <= 34 and 5 < move.deviations < 100


def test_a_part_of_the_reward_moved_if_it_lost_some_of_what_the_reward_can_be():
    before = {"reward": 1.0, "part tag": 0.5, "part small": 0.1}
    assert moved(before, {"part tag": 0.0, "part small": 0.0}) == [("part tag", "down")]


def test_a_part_that_has_one_value_in_each_of_ten_steps_is_named():
    found = history({"part a": -0.5, "part b": 0.0, "reward": 1.0}, {"part b": 0.1})
    assert constant_parts(found) == {"part a": -0.5}
    assert constant_parts(history({"part a": 0.0}, {}, steps=9)) == {}


def test_noise_moves_nothing():
    found = History()
    for step in range(1, 61):
        found.add(step, {"kl": 4.0 if step % 5 == 0 else 0.5})
    assert moves(found) == []


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [({"clipped": 0.0}, ""), ({"clipped": 0.01}, "actor_rollout_ref.actor.clip_ratio_high=0.28"), ({}, "")],
    ids=["nothing", "something", "not logged"],
)
def test_a_wider_clip_range_is_tried_only_where_something_was_clipped(numbers, expected):
    assert override(row_of("entropy").advice, history(numbers, {}), "verl", None) == expected


def test_without_advice_nothing_is_tried():
    assert override(None, history({}, {}), "verl", None) == ""


@pytest.mark.parametrize(
    ("framework", "expected"),
    [
        ("verl", "actor_rollout_ref.actor.optim.lr=5e-05"),
        ("TRL", "learning_rate=5e-05"),
        ("ms-swift", "--learning_rate 5e-05"),
        ("OpenRLHF", "--actor.adam.lr 5e-05"),
    ],
)
def test_an_override_is_of_the_runs_own_framework(framework, expected):
    assert override(explain.LOST, history({"lr": 1e-4}, {}), framework, None) == expected


def test_what_has_a_row_has_a_label():
    assert {row.number for row in ROWS} <= LABELS.keys()
