import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference import conflict_mask as slow_conflict_mask

from gtpo_verl import (
    GTPOConfig,
    compute_conflict_mask,
    compute_conflict_weights,
    compute_token_weights,
)
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.conflict import find_conflicts

PAD = 0  # also a token that completions may contain, as where pad = eos


def masks_of(completions, advantages, index, span="leading"):
    """Conflict masks of unpadded completions, as strings of 0 and 1."""
    length = max(len(c) for c in completions)
    responses = torch.tensor([c + [PAD] * (length - len(c)) for c in completions])
    response_mask = torch.tensor([[1] * len(c) + [0] * (length - len(c)) for c in completions])
    mask = compute_conflict_mask(responses, response_mask, torch.tensor(advantages), index, span)
    assert mask.dtype == torch.bool and not mask[response_mask == 0].any()
    return ["".join(str(int(x)) for x in row[: len(c)]) for row, c in zip(mask, completions, strict=True)]


def test_shared_beginning_and_end_are_masked_by_hand():
    completions = [[7, 8, 1, 1, 9], [7, 8, 2, 9], [7, 5, 3, 3, 3, 9]]
    # Forward: 7 in all, 8 in the first two. Backward: 9 in all; then 1, 2, 3 differ.
    assert masks_of(completions, [1.0, -1.0, 0.0], "aaa") == ["11001", "1101", "100001"]


def test_holes_are_passed_over_where_no_row_is_padded_without_one():
    """Tool output stands inside both completions, and nothing is behind them but one token of padding."""
    responses = torch.tensor([[7, 99, 8, 1, 0], [7, 98, 8, 2, 0]])
    response_mask = torch.tensor([[1, 0, 1, 1, 0], [1, 0, 1, 1, 0]])
    mask = compute_conflict_mask(responses, response_mask, torch.tensor([1.0, -1.0]), "aa", masks="forward")
    assert mask.int().tolist() == [[1, 0, 1, 0, 0], [1, 0, 1, 0, 0]]


@pytest.mark.parametrize("other", range(1, 40))
def test_no_token_is_compared_with_one_at_another_position_of_another_prompt(other):
    """Each token is unique, but for one: second in a right completion, and first in a wrong one of another prompt."""
    responses = torch.arange(160).reshape(80, 2)
    responses[2 * other + 1, 0] = responses[0, 1]
    ids = [prompt for prompt in range(40) for _ in "+-"]
    advantages = torch.tensor([1.0, -1.0] * 40)
    assert not compute_conflict_mask(responses, torch.ones(80, 2), advantages, ids, "all", "forward").any()


def test_the_lengths_of_both_masks_of_a_completion_are_told_by_name():
    responses = torch.tensor([[7, 8, 1, 9], [7, 8, 2, 9], [7, 5, 3, 9]])
    completions = Completions(torch.ones(3, 4), "aaa")
    conflicts = find_conflicts(responses, completions, torch.tensor([1.0, -1.0, -1.0]), GTPOConfig())
    assert [conflicts.lengths_of(row) for row in range(3)] == [
        {"prefix_len": 2, "suffix_len": 1},
        {"prefix_len": 2, "suffix_len": 1},
        {"prefix_len": 1, "suffix_len": 1},
    ]


def test_lambda_has_the_weights_of_the_config():
    batch = {"responses": torch.tensor([[7, 1], [7, 2]]), "response_mask": torch.ones(2, 2), "group_ids": "aa"}
    config = GTPOConfig(conflict_weight_positive=3.0, conflict_weight_negative=0.5)
    weights = compute_token_weights(**batch, advantages=torch.tensor([1.0, -1.0]), config=config)
    assert weights.tolist() == [[3.0, 1.0], [0.5, 1.0]]


def test_lambda_of_eq_9_is_not_that_of_a_rule_in_its_place():
    batch = {"responses": torch.tensor([[7, 1], [7, 2]]), "response_mask": torch.ones(2, 2), "group_ids": "aa"}
    config = {"token_weights": "pkg://examples.token_weights.lambda_grpo"}
    with pytest.raises(ValueError, match=r"token_weights=pkg://examples.*compute_gtpo\("):
        compute_token_weights(**batch, advantages=torch.tensor([1.0, -1.0]), config=config)


def test_one_mask_may_be_left_out():
    responses = torch.tensor([[7, 1, 9], [7, 2, 9]])
    arguments = responses, torch.ones(2, 3), torch.tensor([1.0, -1.0]), "aa", "leading"
    assert compute_conflict_mask(*arguments, "forward").tolist() == [[True, False, False]] * 2
    assert compute_conflict_mask(*arguments, "backward").tolist() == [[False, False, True]] * 2


def test_partner_may_differ_from_token_to_token():
    completions = [[1, 2, 5], [1, 9, 6], [8, 2, 7]]
    assert masks_of(completions, [1.0, -1.0, -1.0], "aaa") == ["110", "100", "000"]


def test_no_conflict_without_both_signs_and_zero_has_none():
    assert masks_of([[1, 2], [1, 2], [1, 2]], [1.0, 1.0, 0.0], "aaa") == ["00", "00", "00"]
    assert masks_of([[1, 2], [1, 2], [1, 2]], [-1.0, -1.0, 0.0], "aaa") == ["00", "00", "00"]


def test_groups_do_not_mix():
    assert masks_of([[1, 2], [1, 2]], [1.0, -1.0], "ab") == ["00", "00"]


SHARED_IN_BETWEEN = [[1, 7, 7, 2, 7, 3, 4], [5, 7, 7, 6, 7, 8, 9]]
SHARED_AT_THE_ENDS = [[7, 1, 7, 2, 7, 3, 7], [7, 4, 7, 5, 7, 6, 7]]


@pytest.mark.parametrize(
    ("completions", "span", "mask"),
    [
        (SHARED_IN_BETWEEN, "leading", "0000000"),
        (SHARED_IN_BETWEEN, "first", "0110100"),
        (SHARED_IN_BETWEEN, "all", "0110100"),
        (SHARED_AT_THE_ENDS, "leading", "1000001"),
        (SHARED_AT_THE_ENDS, "all", "1010101"),
        (SHARED_AT_THE_ENDS, "none", "0000000"),
    ],
)
def test_spans_differ_in_where_a_run_may_begin(completions, span, mask):
    assert masks_of(completions, [1.0, -1.0], "aa", span) == [mask] * 2


def test_identical_completions_of_opposite_sign_are_masked_whole_over_many_blocks():
    completion = list(range(1, 200))
    assert masks_of([completion, completion], [1.0, -1.0], "aa") == ["1" * 199] * 2


@pytest.mark.parametrize("at", [1, 5, 30, 31, 32, 63, 64, 90])
def test_a_run_begins_and_ends_at_any_place_of_a_block(at):
    """Equal but for one token: the runs end there. Different but for two: the first run is one token."""
    advantages, response_mask = torch.tensor([1.0, -1.0]), torch.ones(2, 100)
    equal = torch.arange(100).repeat(2, 1)
    equal[1, at] = -7
    found = find_conflicts(equal, Completions(response_mask, "aa"), advantages, GTPOConfig())
    assert (found.prefix_len.tolist(), found.suffix_len.tolist()) == ([at] * 2, [99 - at] * 2)
    different = torch.stack([torch.arange(100), torch.arange(100, 200)])
    different[:, [at, at + 2]] = 7
    found = find_conflicts(different, Completions(response_mask, "aa"), advantages, GTPOConfig(conflict_span="first"))
    assert (found.prefix_len.tolist(), found.suffix_len.tolist()) == ([1, 1], [1, 1])


@pytest.mark.parametrize("token", [-1, PAD, 2**40])
def test_a_token_of_any_id_is_a_token_and_no_padding(token):
    """The second completion has ended where the first has its last token."""
    assert masks_of([[7, token], [7]], [1.0, -1.0], "aa") == ["10", "1"]
    assert masks_of([[7, token], [7, token]], [1.0, -1.0], "aa") == ["11", "11"]


def test_tool_output_inside_a_response_shifts_nothing():
    responses = torch.tensor([[7, 8, 50, 51, 9, 3], [7, 8, 9, 4, 0, 0]])
    response_mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 0, 0]])
    mask = compute_conflict_mask(responses, response_mask, torch.tensor([1.0, -1.0]), ["a", "a"])
    assert mask.int().tolist() == [[1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]


def test_positions_are_compared_between_equal_prompts_only():
    """Rows of one token and of none among them: the second is no completion."""
    responses, response_mask = torch.tensor([[7], [7], [7], [7], [7]]), torch.tensor([[1], [1], [1], [1], [0]])
    completions = Completions(response_mask, ["a"] * 5, prompts=["p", "q", "q", "r", "r"])
    found = find_conflicts(responses, completions, torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]), GTPOConfig())
    assert found.rows.tolist() == [1, 2]


def test_groups_with_the_same_prompt_have_no_conflict_with_each_other():
    """Row 0 and row 2 begin with one token and have opposite signs, but are in two groups."""
    responses = torch.tensor([[5, 1], [6, 2], [5, 3], [7, 4]])
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0])
    completions = Completions(torch.ones(4, 2), "aabb", prompts="xxxx")
    assert find_conflicts(responses, completions, advantages, GTPOConfig()).rows.tolist() == []


def test_a_mask_and_weights_are_computed_of_completions_too():
    """Their prompts count: the first two rows answer the same."""
    response_mask = torch.ones(3, 1)
    completions = Completions(response_mask, "aaa", prompts="xxy")
    batch = {"responses": torch.tensor([[7], [7], [7]]), "response_mask": response_mask}
    batch["advantages"] = torch.tensor([1.0, -1.0, -1.0])
    assert compute_conflict_mask(**batch, index=completions).tolist() == [[True], [True], [False]]
    assert compute_token_weights(**batch, group_ids=completions).tolist() == [[2.0], [0.0], [1.0]]


@pytest.mark.parametrize("shape", [(2, 4), (2, 2), (3, 3)])
@pytest.mark.parametrize("given_as", ["ids", "completions"])
def test_responses_of_another_shape_than_the_mask_are_an_error(shape, given_as):
    response_mask = torch.ones(2, 3)
    group_ids = "aa" if given_as == "ids" else Completions(response_mask, "aa")
    responses = torch.zeros(shape, dtype=torch.int64)
    advantages = torch.tensor([1.0, -1.0])
    message = rf"^responses has shape \({shape[0]}, {shape[1]}\), .*\(2, 3\)$"
    with pytest.raises(ValueError, match=message):
        compute_conflict_mask(responses, response_mask, advantages, group_ids)
    with pytest.raises(ValueError, match=message):
        compute_token_weights(
            responses=responses, response_mask=response_mask, group_ids=group_ids, advantages=advantages
        )


@st.composite
def batches(draw):
    """Groups of any sizes in any row order, few token ids so that conflicts are common, rows of any length, holes."""
    rows = draw(st.integers(1, 10))
    length = draw(st.integers(1, 70) if draw(st.booleans()) else st.integers(1, 6))
    index = draw(st.lists(st.sampled_from(["a", "b", 3]), min_size=rows, max_size=rows))
    advantages = draw(st.lists(st.sampled_from([-1.5, -0.1, 0.0, 0.2, 2.0]), min_size=rows, max_size=rows))
    row = draw(st.lists(st.integers(-1, 1), min_size=length, max_size=length))
    responses, response_mask = [], []
    for _ in range(rows):
        own = list(row)  # mostly shared, so that runs get long
        for _ in range(draw(st.integers(0, 3))):
            own[draw(st.integers(0, length - 1))] = draw(st.integers(-1, 1))
        tokens = draw(st.integers(0, length))
        mask = [1] * tokens + [0] * (length - tokens)
        for _ in range(draw(st.integers(0, 2))):
            mask[draw(st.integers(0, length - 1))] = 0
        responses.append(own)
        response_mask.append(mask)
    return responses, response_mask, advantages, index


@given(
    batch=batches(),
    span=st.sampled_from(["leading", "first", "all", "none"]),
    masks=st.sampled_from(["both", "forward", "backward"]),
)
@example(([[1, 0]] * 4, [[1, 1]] * 4, [2.0, -0.1, 2.0, 0.2], ["a", "a", "b", "b"]), "leading", "both")  # one is mixed
def test_masks_equal_the_slow_reference(batch, span, masks):
    responses, response_mask, advantages, index = batch
    fast = compute_conflict_mask(
        torch.tensor(responses), torch.tensor(response_mask), torch.tensor(advantages), index, span, masks
    )
    assert fast.tolist() == slow_conflict_mask(responses, response_mask, advantages, index, span, masks)


@given(batch=batches(), span=st.sampled_from(["leading", "first", "all"]))
def test_run_lengths_count_what_the_mask_marks(batch, span):
    responses, response_mask, advantages = (torch.tensor(x) for x in batch[:3])
    index = batch[3]
    found = find_conflicts(responses, Completions(response_mask, index), advantages, GTPOConfig(conflict_span=span))
    mask = compute_conflict_mask(responses, response_mask, advantages, index, span)
    assert found.conflict_len.tolist() == mask.sum(-1).tolist()
    assert (found.prefix_len + found.suffix_len >= found.conflict_len).all()
    assert (torch.maximum(found.prefix_len, found.suffix_len) <= found.conflict_len).all()


@given(batch=batches())
def test_a_fork_is_a_forward_mask_beyond_the_beginning_that_the_group_shares(batch):
    responses, response_mask, advantages, index = batch
    mask, signs, ids = (torch.tensor(x) for x in (response_mask, advantages, responses))
    found = find_conflicts(ids, Completions(mask, index), signs, GTPOConfig())
    own = [[t for t, m in zip(*row, strict=True) if m] for row in zip(responses, response_mask, strict=True)]
    for row, forks in enumerate(found.forks.tolist()):
        group = [own[j] for j in range(len(own)) if index[j] == index[row] and own[j]]
        prefix = own[row][: found.prefix_len[row]]
        assert forks == any(tokens[: len(prefix)] != prefix for tokens in group)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32])
def test_mask_may_have_any_dtype(dtype):
    responses = torch.tensor([[7, 8, 0], [7, 9, 9]])
    response_mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).to(dtype)
    mask = compute_conflict_mask(responses, response_mask, torch.tensor([1.0, -1.0]), ["a", "a"])
    assert mask.tolist() == [[True, False, False], [True, False, False]]


def test_non_contiguous_responses_are_read_right():
    wide = torch.tensor([[5, 7, 8, 1], [5, 7, 8, 2]])
    mask = compute_conflict_mask(wide[:, 1:], torch.ones(2, 3), torch.tensor([1.0, -1.0]), ["a", "a"])
    assert mask.tolist() == [[True, True, False]] * 2


def test_conflict_weights_by_hand():
    advantages = torch.tensor([0.5, -0.5, 0.0])
    assert compute_conflict_weights(advantages).tolist() == [2.0, 0.0, 1.0]
    assert compute_conflict_weights(advantages, positive=3.0, negative=0.25).tolist() == [3.0, 0.25, 1.0]


def test_long_responses_of_large_groups_fit_in_memory():
    """64 completions of 32,768 tokens, alike but for one token: a mask of vocabulary or group squared would not fit."""
    responses = torch.randint(0, 151_936, (1, 32_768)).repeat(64, 1)
    responses[:, 100] = torch.arange(64)
    advantages = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)
    mask = compute_conflict_mask(responses, torch.ones_like(responses), advantages, [0] * 64)
    expected = torch.ones_like(mask)
    expected[:, 100] = False
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(
    ("advantages", "index", "options", "message"),
    [
        (torch.tensor([1.0, -1.0]), "aa", ["trailing"], "conflict_span='trailing' .* leading, first, all, none$"),
        (torch.tensor([1.0, -1.0]), "aa", ["leading", "upward"], "conflict_masks='upward' .* both, forward, backward$"),
        (torch.tensor([1.0, -1.0]), "a", [], "^index .*1 uids .*2 rows"),
        (torch.ones(2, 3), "aa", [], r"^advantages has shape \(2, 3\): .* \(2,\)$"),
    ],
    ids=["span", "masks", "uids", "advantages"],
)
def test_unknown_span_and_wrong_sizes_are_errors(advantages, index, options, message):
    tokens, mask = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3)
    with pytest.raises(ValueError, match=message):
        compute_conflict_mask(tokens, mask, advantages, index, *options)
