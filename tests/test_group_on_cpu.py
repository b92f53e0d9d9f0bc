import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl import compute_gtpo_outcome_advantage
from gtpo_verl.group import Completions, group_rows, rows_of


def test_the_width_of_the_padding_changes_no_bit():
    """Nine rows of eight tokens, and the same among 9,000 columns."""
    generator = torch.Generator().manual_seed(0)
    narrow = {
        "token_level_rewards": torch.rand(9, 8, generator=generator),
        "response_mask": (torch.rand(9, 8, generator=generator) < 0.7).long(),
        "responses": torch.randint(0, 3, (9, 8), generator=generator),
        "entropy": torch.rand(9, 8, generator=generator) / 2,
    }
    wide = {name: torch.nn.functional.pad(values, (0, 8_992), value=0) for name, values in narrow.items()}
    small, large = (
        compute_gtpo_outcome_advantage(**x, index="aaabbbccc", initial_entropy=0.3)[0] for x in (narrow, wide)
    )
    torch.testing.assert_close(large[:, :8], small)
    assert (large[:, 8:] == 0).all() and (small != 0).any(-1).all()


def test_groups_are_sorted_by_size_and_rows_without_tokens_are_in_none():
    members = torch.tensor([True, True, False, True, True, True])
    assert group_rows("aabacb", members).tolist() == [[5, -1, -1], [4, -1, -1], [0, 1, 3]]
    assert group_rows("aa", torch.tensor([False, False])).shape == (0, 0)
    assert group_rows("ab", torch.tensor([True, False])).tolist() == [[0]]
    with pytest.raises(ValueError, match="^index has 3 uids for 2 rows: give one uid per row$"):
        group_rows("aaa", torch.tensor([True, True]))


def test_tokens_stand_where_the_mask_is_one():
    completions = Completions(torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]]), "ab")
    assert completions.lengths.tolist() == [2, 2]
    assert completions.flat(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])).tolist() == [1, 3, 4, 5]
    row = torch.arange(4)
    assert [row[own].tolist() for own in completions.own] == [[1, 3], [0, 1]]


@given(st.integers(0, 200), st.lists(st.integers(0, 199), max_size=6), st.integers(0, 200), st.booleans())
def test_holes_are_found_wherever_they_are(length, holes, padding, of_bools):
    """A row of `length` ones and then zeros, with further zeros at `holes`."""
    row = torch.zeros(1, length + padding, dtype=torch.bool if of_bools else torch.int64)
    row[0, :length] = 1
    row[0, [hole for hole in holes if hole < length]] = 0
    ones = row[0].nonzero().flatten().tolist()
    completions = Completions(row, "a")
    assert completions.lengths.tolist() == [len(ones)]
    assert isinstance(completions.own[0], slice) == (ones == list(range(len(ones))))
    assert torch.arange(length + padding)[completions.own[0]].tolist() == ones


def test_rows_are_numpys_on_a_cpu_and_torchs_elsewhere():
    values = torch.zeros(2, 3)
    rows = rows_of(values)
    rows[1, :2] = 5
    assert isinstance(rows, np.ndarray) and values.tolist() == [[0, 0, 0], [5, 5, 0]]
    elsewhere = torch.zeros(2, 3, device="meta")
    assert rows_of(elsewhere) is elsewhere


@pytest.mark.parametrize("index", [np.array(["a", "b"]), torch.tensor([0, 1]), ("a", "b")])
def test_uids_are_plain_values_of_whatever_holds_them(index):
    uids = Completions(torch.ones(2, 3), index).uids
    assert len(set(uids)) == 2 and all(type(uid) in (str, int) for uid in uids)
