import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_verl import compute_gtpo_outcome_advantage
from gtpo_verl.algorithm.completions import Completions


@pytest.mark.parametrize("has_holes", [False, True])
def test_the_width_of_the_padding_changes_no_bit(has_holes):
    """Nine rows of eight tokens, and the same among 9,000 columns."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(8) < torch.randint(1, 9, (9, 1), generator=generator)
    if has_holes:
        mask &= torch.rand(9, 8, generator=generator) < 0.7
    narrow = {
        "token_level_rewards": torch.rand(9, 8, generator=generator),
        "response_mask": mask.long(),
        "responses": torch.randint(0, 3, (9, 8), generator=generator),
        "entropy": torch.rand(9, 8, generator=generator) / 2,
    }
    wide = {name: torch.nn.functional.pad(values, (0, 8_992), value=0) for name, values in narrow.items()}
    small, large = (
        compute_gtpo_outcome_advantage(**x, index="aaabbbccc", initial_entropy=0.3)[0] for x in (narrow, wide)
    )
    assert torch.equal(large[:, :8], small)
    assert (large[:, 8:] == 0).all() and (small != 0).any()


def test_groups_are_numbered_by_their_first_rows_and_a_row_without_tokens_is_alone():
    mask = torch.tensor([[1], [1], [0], [1], [1], [1], [0]])
    completions = Completions(mask, "aabacbb", [1, 2, 2, 1, 1, 1, 1])
    assert completions.groups.tolist() == [0, 0, 1, 0, 2, 3, 4]
    assert completions.prompts.tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert Completions(mask, "aabacbb").prompts.tolist() == completions.groups.tolist()


def test_another_number_of_uids_than_of_rows_is_an_error():
    with pytest.raises(ValueError, match="^index .*3 uids .*2 rows"):
        Completions(torch.ones(2, 1), "aaa")


@pytest.mark.parametrize(("prompts", "message"), [("xyz", "3 prompts .*2 rows"), (torch.zeros(2, 1), r"\(2, 1\)")])
def test_prompts_of_a_wrong_size_are_an_error_that_names_them(prompts, message):
    with pytest.raises(ValueError, match=f"^prompts .*{message}"):
        Completions(torch.ones(2, 1), "aa", prompts)


@given(
    st.integers(0, 200),
    st.lists(st.integers(0, 199), max_size=6),
    st.integers(0, 200),
    st.sampled_from([torch.bool, torch.int64, torch.float32]),
)
def test_own_tokens_are_where_the_mask_is_one(length, holes, padding, dtype):
    """A row of `length` ones and then zeros, with further zeros at `holes`, below a row without any."""
    mask = torch.zeros(2, length + padding, dtype=dtype)
    mask[:, :length] = 1
    mask[1, [hole for hole in holes if hole < length]] = 0
    ones = mask[1].nonzero().flatten()
    completions = Completions(mask, "ab")
    assert completions.lengths.tolist() == [length, len(ones)]
    rows = np.ones(len(ones), dtype=int)
    assert completions.places(rows, np.arange(len(ones))).tolist() == (mask.shape[1] + ones).tolist()
    values = torch.where(mask.bool(), torch.arange(mask.shape[1]).float(), torch.nan)
    assert completions.mean(values)[1] == (ones.double().mean().float() if len(ones) else 0)
    assert torch.equal(completions.spread(torch.tensor([2.0, 3.0])), mask.float() * torch.tensor([[2.0], [3.0]]))


def test_the_mean_of_equal_numbers_is_that_number():
    """So a completion all of whose tokens have an entropy of exactly ln 2 is not above ln 2 (Eq. 10)."""
    ln_2 = torch.tensor(math.log(2))
    mask = torch.ones(2000, 2000).tril()
    assert (Completions(mask, range(2000)).mean(ln_2.expand(2000, 2000)) == ln_2).all()


@pytest.mark.parametrize(
    "index",
    [
        np.array(["a", "b", "a"]),
        torch.tensor([0, 1, 0]),
        ("a", "b", "a"),
        list(torch.tensor([0, 1, 0])),
        np.array([*torch.tensor([0.5, 1.5, 0.5])], dtype=object),
    ],
)
def test_uids_are_plain_values_of_whatever_holds_them(index):
    """Tensors are compared as objects: a list of them would make each completion a group of its own."""
    completions = Completions(torch.ones(3, 3), index)
    assert len(set(completions.uids)) == 2 and all(type(uid) in (str, int, float) for uid in completions.uids)
    assert completions.groups.tolist() == completions.prompts.tolist() == [0, 1, 0]


def test_a_mask_that_is_no_matrix_is_an_error():
    with pytest.raises(ValueError, match=r"^response_mask has shape \(3,\), not \(bs, response_length\)"):
        Completions(torch.ones(3), "aaa")


def test_the_first_wrong_value_of_a_mask_is_named_though_zeros_come_before_it():
    with pytest.raises(ValueError, match=r"^response_mask\[1, 2\] is 7: "):
        Completions(torch.tensor([[0, 1, 1], [0, 1, 7]]), "aa")


def test_ids_that_are_no_column_are_an_error():
    with pytest.raises(ValueError, match=r"^index has shape \(2, 1\), not \(bs,\)"):
        Completions(torch.ones(2, 3), torch.zeros(2, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [-1, 2, 7, 0.5])
def test_a_mask_that_is_not_0_or_1_is_an_error_that_names_the_place(dtype, value):
    mask = torch.ones(2, 3, dtype=dtype)
    Completions(mask, "ab")
    if value == 0.5 and not dtype.is_floating_point:
        return
    mask[1, 2] = value
    with pytest.raises(ValueError, match=rf"^response_mask\[1, 2\] is {value:g}\b"):
        Completions(mask, "ab")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8, torch.bool])
def test_a_mask_of_few_bits_is_read(dtype):
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    assert Completions(mask.to(dtype), "ab").lengths.tolist() == [2, 2]
