"""The arms of blocks 7 to 9, by hand and against the package's masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.conflict import compute_conflict_mask
from studies import variants

GOOD_SHORT, GOOD_LONG, BAD_SHORT = [1, 2, 5, 9], [1, 2, 6, 7, 9], [1, 2, 5, 8, 9]
IDS, INDEX, ADVANTAGES = [GOOD_SHORT, GOOD_LONG, BAD_SHORT], [0, 0, 0], [1.0, 1.0, -2.0]


def test_the_papers_forward_mask_covers_the_fork_where_good_and_bad_took_the_same_way():
    assert [sum(own) for own in variants.leading(IDS, INDEX, ADVANTAGES)] == [3, 2, 3]


def test_the_common_beginning_ends_before_the_first_fork():
    assert variants.common(IDS, INDEX, ADVANTAGES) == [[True] * 2 + [False] * (len(own) - 2) for own in IDS]


def test_the_agreed_run_leaves_the_fork_out_and_goes_on_behind_it():
    ids = [[1, 5, 6, 9], [1, 5, 6, 8], [1, 4, 9]]
    assert variants.agreed(ids, [0] * 3, [1.0, -1.0, 0.5]) == [[True, False, True, False]] * 2 + [[True, False, False]]


def test_an_end_is_a_fork_and_a_row_without_tokens_is_no_company():
    ids = [[1, 2], [1], []]
    assert variants.agreed(ids, [0] * 3, [1.0, -1.0, 0.0]) == [[True, False], [True], []]
    assert variants.common(ids, [0] * 3, [1.0, -1.0, 0.0]) == [[True, False], [True], []]


def test_a_row_without_advantage_ends_the_common_beginning():
    assert variants.common([[1, 2], [1, 2], [1, 3]], [0] * 3, [1.0, -1.0, 0.0])[0] == [True, False]


@pytest.mark.parametrize("mask", [variants.leading, variants.common, variants.agreed])
def test_a_group_of_one_sign_has_no_mask(mask):
    assert mask([[1, 2], [1, 2]], [0, 0], [0.0, 1.0]) == [[False, False], [False, False]]


def test_no_update_from_groups_of_equal_correctness():
    right = torch.tensor([True, True, False, False, True, False])
    a = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    assert variants.gate(a, right, [0, 0, 1, 1, 2, 2]).tolist() == [0, 0, 0, 0, 1, -1]


def test_a_wrong_completion_gets_no_positive_advantage():
    right = torch.tensor([True, False, False])
    assert variants.never_positive_if_wrong(torch.tensor([1.0, 0.5, -1.0]), right, [0] * 3).tolist() == [1, 0, -1]


def test_the_key_min_correct_reward_is_that_arm():
    """Under the paper's reward, where a right answer earns 11 or more and a wrong one 10 or less."""
    scores = torch.tensor([20.0, 11.0, 10.0, 4.0, 10.0, 2.0, 10.0, 10.0])
    index = [0] * 4 + [1] * 4
    completions = Completions(torch.ones(8, 1), index)
    arm = variants.never_positive_if_wrong(compute_group_advantages(scores, completions), scores > 10, index)
    assert compute_group_advantages(scores, completions, min_correct_reward=11).equal(arm)


tokens = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=2, max_size=6)


@given(tokens, st.data())
def test_the_masks_are_parts_of_the_papers(ids, data):
    index = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    advantages = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=len(ids), max_size=len(ids)))
    leading, common, agreed = (
        of(ids, index, advantages) for of in (variants.leading, variants.common, variants.agreed)
    )
    length = max(map(len, ids))
    responses = torch.tensor([own + [0] * (length - len(own)) for own in ids]).view(len(ids), length)
    mask = torch.tensor([[1] * len(own) + [0] * (length - len(own)) for own in ids]).view(len(ids), length)
    expected = compute_conflict_mask(responses, mask, torch.tensor(advantages), index, masks="forward")
    for row, own in enumerate(ids):
        assert expected[row, : len(own)].tolist() == leading[row]
        # Where the whole group goes on alike, nobody goes elsewhere, and nobody of both signs is missing.
        for part, whole in ((common[row], agreed[row]), (agreed[row], leading[row])):
            assert all(y for x, y in zip(part, whole, strict=True) if x)
