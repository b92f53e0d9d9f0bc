import math

import pytest
import torch

from gtpo_verl import compute_gtpo_outcome_advantage
from gtpo_verl.group import _BLOCK_ELEMENTS, Completions, group_rows, row_blocks


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1, 1), (100_000, 1), (9, 8_000), (3, 40_000)])
def test_blocks_hold_each_row_once_and_as_many_as_one_thread_takes(shape):
    rows, width = shape
    blocks = row_blocks(torch.empty(shape))
    assert [row for block in blocks for row in range(*block.indices(rows))] == list(range(rows))
    assert len(blocks) == math.ceil(rows / max(1, _BLOCK_ELEMENTS // max(1, width)))
    assert all(block.stop - block.start == 1 or (block.stop - block.start) * width <= 32_000 for block in blocks)


def test_advantages_of_many_blocks_are_those_of_one():
    """Nine rows of eight tokens, and the same among 9,000 columns: three blocks."""
    generator = torch.Generator().manual_seed(0)
    narrow = {
        "token_level_rewards": torch.rand(9, 8, generator=generator),
        "response_mask": (torch.rand(9, 8, generator=generator) < 0.7).long(),
        "responses": torch.randint(0, 3, (9, 8), generator=generator),
        "entropy": torch.rand(9, 8, generator=generator) / 2,
    }
    wide = {name: torch.nn.functional.pad(values, (0, 8_992), value=0) for name, values in narrow.items()}
    assert len(row_blocks(wide["entropy"])) == 3
    small, large = (
        compute_gtpo_outcome_advantage(**x, index="aaabbbccc", initial_entropy=0.3)[0] for x in (narrow, wide)
    )
    torch.testing.assert_close(large[:, :8], small)
    assert (large[:, 8:] == 0).all() and (small != 0).any(-1).all()


def test_groups_are_sorted_by_size_and_rows_without_tokens_are_in_none():
    members = torch.tensor([True, True, False, True, True, True])
    assert group_rows("aabacb", members).tolist() == [[5, -1, -1], [4, -1, -1], [0, 1, 3]]
    assert group_rows("aa", torch.tensor([False, False])).shape == (0, 0)
    with pytest.raises(ValueError, match="^index has 3 uids for 2 rows: give one uid per row$"):
        group_rows("aaa", torch.tensor([True, True]))


def test_tokens_stand_where_the_mask_is_one():
    completions = Completions(torch.tensor([[0, 1, 0, 1], [1, 1, 0, 0]]), "ab")
    assert completions.lengths.tolist() == [2, 2]
    assert completions.flat(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])).tolist() == [1, 3, 4, 5]


def test_a_known_response_length_spares_the_search_for_holes():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
    rows, numbers = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2])
    for response_len in (None, torch.tensor([2, 3])):
        completions = Completions(mask, "aa", response_len)
        assert completions._flat is None and completions.flat(rows, numbers).tolist() == [1, 4, 6]
    mask[1, 1] = 0
    assert Completions(mask, "aa", torch.tensor([2, 3])).flat(rows, torch.tensor([1, 0, 1])).tolist() == [1, 4, 6]
