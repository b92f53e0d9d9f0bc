import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from reference import advantages as slow_advantages
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl import (
    GTPOConfig,
    compute_completion_filter,
    compute_gtpo,
    compute_gtpo_outcome_advantage,
    compute_gtpo_token_advantages,
    compute_trajectory_entropy,
)
from gtpo_verl.algorithm.advantage import compute_group_advantages, entropy_from_logits
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics

LN2 = math.log(2)
ALL_OFF = GTPOConfig(entropy_coeff=0, completion_filter="never", conflict_span="none")


def at_last_token(rewards, response_mask):
    """token_level_rewards as verl's reward managers make them: the score stands at the last token."""
    token_level_rewards = torch.zeros(response_mask.shape)
    last = (response_mask.cumsum(-1) * response_mask).argmax(-1)
    token_level_rewards[torch.arange(len(rewards)), last] = torch.tensor(rewards)
    return token_level_rewards


@pytest.fixture
def two_completions():
    """One good and one bad completion of four tokens, which share the first and the last one."""
    response_mask = torch.ones(2, 4, dtype=torch.int64)
    return {
        "token_level_rewards": at_last_token([20.0, 10.0], response_mask),
        "response_mask": response_mask,
        "index": np.array(["p", "p"], dtype=object),
        "responses": torch.tensor([[5, 1, 2, 9], [5, 3, 4, 9]]),
        "entropy": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.4, 0.4, 0.8]]),
    }


def test_equation_11_by_hand(two_completions):
    # A = ±5 / (7.0711 + 1e-6) = ±0.7071; <H> = 0.25, 0.5; gamma = 0.1.
    advantages, returns = compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)
    good, bad = 0.70710668 - 0.025, -0.70710668 - 0.05
    expected = torch.tensor([[2 * good, good, good, 2 * good], [0, bad, bad, 0]])
    torch.testing.assert_close(advantages, expected)
    assert returns is advantages
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3, epsilon=1.0)
    torch.testing.assert_close(advantages[0, 1].item(), 5 / (math.sqrt(50) + 1) - 0.025)
    completions = Completions(two_completions["response_mask"], two_completions["index"])
    a = compute_group_advantages(torch.tensor([20e-6, 10e-6]), completions)  # of the size of the default epsilon
    torch.testing.assert_close(a[0].item(), 5 / (math.sqrt(50) + 1))


def ones(rows):
    """A batch of completions of one token each, without what decides A_i."""
    tokens = torch.arange(rows).unsqueeze(-1)
    return {"responses": tokens, "response_mask": torch.ones(rows, 1), "entropy": torch.zeros(rows, 1)}


def test_without_epsilon_a_deviation_is_divided_by_the_standard_deviation_almost_alone():
    result = compute_gtpo(**ones(2), rewards=torch.tensor([20.0, 10.0]), group_ids="pp", initial_entropy=0.0)
    assert result.group_advantages[0].item() == pytest.approx(5 / (math.sqrt(50) + 1e-6), rel=1e-7)


def test_the_a_i_of_another_estimator_have_the_zeros_and_the_limit_of_the_rewards():
    """Group q has equal rewards, and its A_i are what rounding leaves; group r is one completion."""
    rewards = torch.tensor([20.0, 10.0, 15.0, 15.0, 7.0])
    base = torch.tensor([3.0, 1.0, 1e-7, -1e-7, 5.0], dtype=torch.float64)
    batch = {**ones(5), "rewards": rewards, "advantages": base, "group_ids": "ppqqr", "initial_entropy": 0.0}
    assert compute_gtpo(**batch).group_advantages.tolist() == [3, 1, 0, 0, 0]
    limited = compute_gtpo(**batch, config=GTPOConfig(min_correct_reward=15))
    assert limited.group_advantages.tolist() == [3, 0, 0, 0, 0]


def test_a_response_mask_of_another_shape_than_the_completions_is_named():
    batch = ones(2)
    completions = Completions(batch["response_mask"], "pp")
    batch["response_mask"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"response_mask.*\(2, 2\).*\(2, 1\)"):
        compute_gtpo(**batch, rewards=torch.tensor([20.0, 10.0]), group_ids=completions, initial_entropy=0.0)


@pytest.mark.parametrize("temperature", [None, 0.5])
def test_the_entropy_of_logits_is_that_of_their_distribution(temperature):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    if temperature is None:
        found = entropy_from_logits(logits)
    else:
        found = entropy_from_logits(logits, temperature)
    distribution = torch.distributions.Categorical(logits=logits / (temperature or 1.0))
    torch.testing.assert_close(found, distribution.entropy())


@pytest.mark.parametrize(
    ("entropies", "row"),
    [
        pytest.param([5.0, -0.3], 1, id="one completion is far below 0"),
        pytest.param([5.0, -0.25], None, id="one is as far below 0 as 16 bits explain"),
        pytest.param([-0.03, -0.02], 0, id="the mean of the batch is below 0"),
        pytest.param([0.0, -0.02], None, id="the mean is as far below 0 as 16 bits explain"),
    ],
)
def test_what_is_no_entropy_is_named(entropies, row):
    batch = ones(2) | {"entropy": torch.tensor(entropies).unsqueeze(-1)}
    batch |= {"rewards": torch.tensor([20.0, 10.0]), "group_ids": "pp", "config": GTPOConfig(completion_filter="never")}
    if row is None:
        compute_gtpo(**batch)
    else:
        with pytest.raises(ValueError, match=rf"entropy of row {row} "):
            compute_gtpo(**batch)


@pytest.mark.parametrize(("initial_entropy", "kept"), [(0.3, False), (0.8, True)])
def test_equation_10_filters_what_exceeds_the_threshold_by_the_initial_entropy(two_completions, initial_entropy, kept):
    two_completions["entropy"][1] = 0.7
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, initial_entropy=initial_entropy)
    assert (advantages != 0).tolist() == [[True] * 4, [False, kept, kept, False]]
    of_the_settings = {"config": GTPOConfig(initial_entropy=initial_entropy)}
    assert torch.equal(compute_gtpo_outcome_advantage(**two_completions, **of_the_settings)[0], advantages)


def test_every_tensor_is_made_on_the_device_of_the_batch(two_completions):
    """As on a GPU: a tensor that is made without a device is on another one."""
    del two_completions["token_level_rewards"]
    config, group_advantages = GTPOConfig(initial_entropy=0.3), torch.tensor([0.7, -0.7])
    expected = compute_gtpo_token_advantages(group_advantages, **two_completions, config=config)
    with torch.device("meta"):
        found = compute_gtpo_token_advantages(group_advantages, **two_completions, config=config)
        metrics = compute_gtpo_metrics(found, config, 0.3, found.keep)
    assert torch.equal(found.advantages, expected.advantages)
    assert metrics == compute_gtpo_metrics(expected, config, 0.3, expected.keep)


def test_entropy_equal_to_the_threshold_is_kept():
    entropy = torch.tensor([LN2 - 1e-6, LN2, LN2 + 1e-6], dtype=torch.float64)
    assert compute_completion_filter(entropy, LN2).tolist() == [True, True, False]


def test_negative_scope_filters_negative_completions_only():
    entropy = torch.tensor([2.0, 2.0, 2.0, 0.1])
    keep = compute_completion_filter(entropy, LN2, advantages=torch.tensor([1.0, 0.0, -1.0, -1.0]))
    assert keep.tolist() == [True, True, False, True]


def test_trajectory_entropy_is_the_mean_over_own_tokens():
    entropy = torch.tensor([[0.2, 0.4, torch.nan], [1.0, torch.inf, 3.0], [5.0, 5.0, 5.0], [0.7, 5.0, 5.0]])
    response_mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 0, 0]])
    torch.testing.assert_close(compute_trajectory_entropy(entropy, response_mask), torch.tensor([0.3, 2.0, 0.0, 0.7]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_entropy_of_any_dtype_is_averaged_in_float32(dtype):
    entropy = torch.full((1, 5000), 0.25, dtype=dtype)
    assert compute_trajectory_entropy(entropy, torch.ones(1, 5000)).tolist() == [0.25]


def test_entropy_term_and_filter_carry_no_gradient(two_completions):
    two_completions["entropy"].requires_grad_()
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)
    assert not advantages.requires_grad


def test_signs_for_lambda_come_from_before_the_entropy_term(two_completions):
    """A completion whose sign the entropy term flips is still a positive one: λ = 2, not 0."""
    config = GTPOConfig(entropy_coeff=10.0, completion_filter="never")
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=config)
    flipped = 0.70710668 - 2.5
    torch.testing.assert_close(advantages[0], torch.tensor([2 * flipped, flipped, flipped, 2 * flipped]))


def test_equal_rewards_give_exactly_zero_and_no_conflict(two_completions):
    two_completions["token_level_rewards"][:] = 0.1  # 0.4 each, which no float holds exactly
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=ALL_OFF)
    assert (advantages == 0).all()
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)
    torch.testing.assert_close(advantages, -0.1 * torch.tensor([[0.25] * 4, [0.5] * 4]))


@pytest.mark.parametrize("norm", [True, False])
def test_three_equal_rewards_whose_mean_is_rounded_give_no_sign(norm):
    """The mean of three float64 0.1 is not 0.1: the residue over a std of 0 must not become an advantage."""
    batch = {
        "response_mask": torch.ones(7, 2, dtype=torch.int64),
        "index": ["p"] * 3 + ["q"] * 4,  # a group of other size, whose rewards differ
        "responses": torch.tensor([[5, 9]] * 7),
        "entropy": torch.zeros(7, 2),
    }
    rewards = torch.tensor([[0.0, 0.1]] * 3 + [[0.0, 0.05]] + [[0.0, 0.3]] * 3, dtype=torch.float64)
    assert rewards[:3].sum() / 3 != 0.1
    advantages, _ = compute_gtpo_outcome_advantage(rewards, **batch, initial_entropy=0.3, norm_adv_by_std_in_grpo=norm)
    assert (advantages[:3] == 0).all() and (advantages[4:] != 0).all()


@given(
    st.lists(st.integers(-60, 60), min_size=2, max_size=9),
    st.integers(-20, 3),
    st.sampled_from([0, 1000]),
    st.booleans(),
)
def test_a_reward_has_the_sign_of_its_decimal_deviation_at_any_scale(small, exponent, offset, norm):
    """So it is 0 exactly at the mean, whether the reward came whole or, as a format and an answer may, in two parts."""
    numbers = [offset + number for number in small]
    rewards = torch.tensor([float(f"{number}e{exponent}") for number in numbers])
    halves = [(number // 2, number - number // 2) for number in numbers]
    parts = torch.tensor([[float(f"{part}e{exponent}") for part in pair] for pair in halves])
    signs = [np.sign(len(numbers) * number - sum(numbers)) for number in numbers]
    for scores in (rewards, parts.sum(-1)):
        a = compute_group_advantages(scores, Completions(torch.ones_like(parts), "p" * len(numbers)), norm)
        assert a.double().sign().tolist() == signs


@given(st.lists(st.integers(-9999, 9999), min_size=1, max_size=64), st.sampled_from([torch.float32, torch.float64]))
def test_whole_rewards_lose_nothing_to_rounding(rewards, dtype):
    scores = torch.tensor(rewards, dtype=dtype)
    shifted = scores.double() - scores.double().max()
    deviation = shifted - shifted.sum() / len(rewards)
    std = (deviation.square().sum() / max(1, len(rewards) - 1)).sqrt()
    completions = Completions(torch.ones(len(rewards), 1), "p" * len(rewards))
    assert torch.equal(compute_group_advantages(scores, completions, False), deviation.to(dtype))
    torch.testing.assert_close(compute_group_advantages(scores, completions), (deviation / (std + 1e-6)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_reward_is_compared_with_the_least_right_one_as_it_is_written(dtype):
    """7.5 is below 7.501, though both are one number in bfloat16; 0.7 in float32 is not below 0.7."""
    completions = Completions(torch.ones(2, 1), "pp")
    a = compute_group_advantages(torch.tensor([7.5, 0.0], dtype=dtype), completions, min_correct_reward=7.501)
    assert a.tolist()[0] == 0 > a.tolist()[1]
    if dtype.itemsize > 2:
        a = compute_group_advantages(torch.tensor([0.7, 0.0], dtype=dtype), completions, min_correct_reward=0.7)
        assert a.tolist()[0] > 0


def test_advantages_of_rewards_in_bfloat16_are_float32(two_completions):
    two_completions["token_level_rewards"] = two_completions["token_level_rewards"].bfloat16()
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=ALL_OFF)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages[0, 0].item(), 5 / (math.sqrt(50) + 1e-6))


@pytest.mark.parametrize("scale", [1e-20, 1e-6, 1e6, 1e20])
@pytest.mark.parametrize("norm", [True, False])
def test_rewards_of_any_size_keep_their_signs_and_the_papers_advantage(two_completions, scale, norm):
    two_completions["token_level_rewards"] *= scale
    advantages, _ = compute_gtpo_outcome_advantage(
        **two_completions,
        config=GTPOConfig(entropy_coeff=0, completion_filter="never"),
        norm_adv_by_std_in_grpo=norm,
    )
    a = 5 * scale / (math.sqrt(50) * scale + 1e-6) if norm else 5 * scale
    torch.testing.assert_close(advantages, torch.tensor([[2 * a, a, a, 2 * a], [0, -a, -a, 0]]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [2, 512])
def test_groups_of_any_size_equal_the_slow_reference(size):
    generator = torch.Generator().manual_seed(size)
    rewards = torch.randint(0, 3, (size,), generator=generator).tolist()
    lengths = torch.randint(0, 5, (size,), generator=generator)
    batch = {
        "response_mask": (torch.arange(4) < lengths.unsqueeze(-1)).long(),
        "index": ["p"] * size,
        "responses": torch.randint(0, 3, (size, 4), generator=generator),
        "entropy": torch.rand(size, 4, generator=generator),
    }
    rewards = [float(r) if n else 0.0 for r, n in zip(rewards, lengths, strict=True)]
    token_level_rewards = at_last_token(rewards, batch["response_mask"])
    fast, _ = compute_gtpo_outcome_advantage(token_level_rewards, **batch, initial_entropy=0.3)
    columns = (batch["response_mask"].tolist(), batch["index"], batch["responses"].tolist(), batch["entropy"].tolist())
    slow = slow_advantages(rewards, *columns, GTPOConfig(), 0.3, True, 1e-6)
    torch.testing.assert_close(fast, torch.tensor(slow), rtol=1e-5, atol=1e-5)


def test_responses_of_no_token_one_and_32768_share_a_group():
    """Two completions of 32,768 equal tokens conflict everywhere, one of a single token on its only one."""
    long = 32_768
    response_mask = (torch.arange(long) < torch.tensor([[long], [long], [1], [0]])).long()
    responses = torch.full((4, long), 7)
    entropy = torch.full((4, long), 0.25, dtype=torch.bfloat16)
    rewards = at_last_token([1.0, 0.0, 0.0, 0.0], response_mask)
    batch = rewards, response_mask, ["p"] * 4, responses, entropy
    advantages, _ = compute_gtpo_outcome_advantage(*batch, initial_entropy=0.3)
    a = 2 / 3 / (math.sqrt(1 / 3) + 1e-6)
    torch.testing.assert_close(advantages[0], torch.full((long,), 2 * (a - 0.025)))
    assert (advantages[1:] == 0).all()
    responses[0] += 1
    advantages, _ = compute_gtpo_outcome_advantage(*batch, initial_entropy=0.3)
    torch.testing.assert_close(advantages[1], torch.full((long,), -a / 2 - 0.025))
    torch.testing.assert_close(advantages[2, 0], advantages[1, 0])


def test_a_batch_of_which_all_is_filtered_gives_zeros_and_is_counted(two_completions):
    config = GTPOConfig(completion_filter="always", entropy_threshold=0.01)
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=config)
    assert (advantages == 0).all()
    del two_completions["token_level_rewards"]
    result = compute_gtpo_token_advantages(torch.tensor([1.0, -1.0]), **two_completions, config=config)
    metrics = compute_gtpo_metrics(result, config, None, torch.tensor([False, False]))
    assert metrics["gtpo/filter/dropped_frac"] == metrics["gtpo/filter/dropped_group_frac"] == 1


def test_group_of_one_has_no_relative_advantage(two_completions):
    two_completions["index"] = np.array(["p", "q"], dtype=object)
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=ALL_OFF)
    assert (advantages == 0).all()


def test_given_advantages_are_weighed_part_by_part(two_completions):
    """δ, γ⟨H⟩ and λ on advantages without the standard deviation, as other trainers have them."""
    del two_completions["token_level_rewards"]
    result = compute_gtpo_token_advantages(torch.tensor([5.0, -5.0]), **two_completions, initial_entropy=0.3)
    assert result.keep.tolist() == [True, True]
    torch.testing.assert_close(result.regularizer, torch.tensor([0.025, 0.05]))
    assert result.token_weights.tolist() == [[2, 1, 1, 2], [0, 1, 1, 0]]
    torch.testing.assert_close(result.advantages, torch.tensor([[4.975], [-5.05]]) * result.token_weights)


def test_a_completion_whose_mask_is_cleared_gives_no_signal(two_completions):
    """A = 0 alone leaves −γ⟨H⟩."""
    del two_completions["token_level_rewards"]
    config = GTPOConfig(completion_filter="never")
    zero = compute_gtpo_token_advantages(torch.tensor([1.0, 0.0]), **two_completions, config=config)
    two_completions["response_mask"][1] = 0
    cleared = compute_gtpo_token_advantages(torch.tensor([1.0, 0.0]), **two_completions, config=config)
    assert zero.advantages[1].lt(0).all() and not cleared.advantages[1].any()
    assert zero.advantages[0].equal(cleared.advantages[0])


REWARDS = [0.0, 1.0, 10.0, 11.0, 20.0], [0.1, 0.2, 0.3, 11.1], [x / 10 for x in range(11)]


@st.composite
def batches(draw):
    rows = draw(st.integers(1, 9))
    length = draw(st.integers(1, 8))
    column = st.lists(st.integers(-1, 1), min_size=length, max_size=length)
    mask = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    mask |= st.integers(0, length).map(lambda tokens: [1] * tokens + [0] * (length - tokens))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    return {
        "rewards": draw(st.lists(st.sampled_from(draw(st.sampled_from(REWARDS))), min_size=rows, max_size=rows)),
        "response_mask": [draw(mask) for _ in range(rows)],
        "index": draw(st.lists(st.sampled_from("ab"), min_size=rows, max_size=rows)),
        "responses": [draw(column) for _ in range(rows)],
        "entropy": (torch.rand(rows, length, generator=generator) * 1.5).tolist(),
    }


def run(batch, **kwargs):
    response_mask = torch.tensor(batch["response_mask"])
    # A row without tokens has a reward of 0, as verl's padding rows.
    rewards = [r if any(m) else 0.0 for r, m in zip(batch["rewards"], batch["response_mask"], strict=True)]
    return compute_gtpo_outcome_advantage(
        at_last_token(rewards, response_mask),
        response_mask,
        np.array(batch["index"], dtype=object),
        torch.tensor(batch["responses"]),
        torch.tensor(batch["entropy"]),
        **kwargs,
    )[0]


configs = st.builds(
    GTPOConfig,
    entropy_coeff=st.sampled_from([0.0, 0.1, 1.0]),
    entropy_threshold=st.sampled_from([LN2, 1.05]),
    completion_filter=st.sampled_from(["auto", "always", "never"]),
    filter_scope=st.sampled_from(["all", "negative"]),
    conflict_span=st.sampled_from(["leading", "first", "all", "none"]),
    conflict_masks=st.sampled_from(["both", "forward", "backward"]),
    conflict_weight_positive=st.sampled_from([1.0, 2.0]),
    conflict_weight_negative=st.sampled_from([0.0, 0.5]),
    min_correct_reward=st.sampled_from([None, 11.0]),
)


@given(batch=batches(), config=configs, initial_entropy=st.sampled_from([0.2, 0.9]), norm=st.booleans())
def test_advantages_equal_the_slow_reference(batch, config, initial_entropy, norm):
    fast = run(batch, config=config, initial_entropy=initial_entropy, norm_adv_by_std_in_grpo=norm)
    slow = slow_advantages(**batch, config=config, initial_entropy=initial_entropy, norm_by_std=norm, epsilon=1e-6)
    torch.testing.assert_close(fast, torch.tensor(slow), rtol=1e-5, atol=1e-5)


THREE_EQUAL = {
    "rewards": [11.1] * 3,
    "response_mask": [[1]] * 3,
    "index": ["a"] * 3,
    "responses": [[0]] * 3,
    "entropy": [[0.5]] * 3,
}


@given(batch=batches(), norm=st.booleans())
@example(batch=THREE_EQUAL, norm=True)
def test_all_components_off_is_verls_grpo(batch, norm):
    """But for groups of one, to which verl gives their raw reward, and of equal rewards, whose rounding residue it
    divides by itself: three times 11.1 get -0.44."""
    response_mask = torch.tensor(batch["response_mask"])
    real = response_mask.any(-1)
    index = np.array([u if r else f"pad{i}" for i, (u, r) in enumerate(zip(batch["index"], real, strict=True))])
    rewards = at_last_token([r * x for r, x in zip(batch["rewards"], real.tolist(), strict=True)], response_mask)
    grpo, _ = compute_grpo_outcome_advantage(rewards.clone(), response_mask, index, norm_adv_by_std_in_grpo=norm)
    equal = torch.tensor([len({*rewards.sum(-1)[torch.from_numpy(index == uid)].tolist()}) == 1 for uid in index])
    gtpo = run(batch, config=ALL_OFF, norm_adv_by_std_in_grpo=norm)
    torch.testing.assert_close(gtpo[~equal], grpo[~equal], rtol=1e-5, atol=1e-5)
    assert (gtpo[equal] == 0).all()


def test_a_wrong_completion_above_the_mean_of_its_group_gets_no_positive_advantage(two_completions):
    """Nor is it company for a conflict: with A = 0 its tokens, and those of the other, keep λ = 1."""
    rewards = two_completions["token_level_rewards"]
    below = rewards.sum(-1).max().item() + 1
    config = GTPOConfig(entropy_coeff=0, completion_filter="never", min_correct_reward=below)
    limited, _ = compute_gtpo_outcome_advantage(**two_completions, config=config)
    grpo, _ = compute_gtpo_outcome_advantage(**two_completions, config=ALL_OFF)
    assert (grpo > 0).any() and torch.equal(limited, grpo.clamp(max=0))
    at_the_least = replace(config, min_correct_reward=below - 1)  # a reward of exactly that is right
    papers = replace(config, min_correct_reward=None)
    first, second = (compute_gtpo_outcome_advantage(**two_completions, config=c)[0] for c in (at_the_least, papers))
    assert torch.equal(first, second)


def test_advantages_without_rewards_cannot_be_limited_by_a_reward(two_completions):
    del two_completions["token_level_rewards"]
    with pytest.raises(ValueError, match=r"^algorithm\.gtpo\.min_correct_reward=20: leave it out"):
        compute_gtpo_token_advantages(torch.ones(2), **two_completions, config={"min_correct_reward": 20})


def test_auto_filter_without_initial_entropy_says_what_to_do(two_completions):
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.initial_entropy.*measure it|measure it.*initial_entropy"):
        compute_gtpo_outcome_advantage(**two_completions)


def test_settings_may_come_as_verls_algorithm_config(two_completions):
    algorithm = {
        "adv_estimator": "gtpo",
        "gtpo": {"entropy_coeff": 0, "completion_filter": "never", "conflict_span": "none"},
    }
    advantages, _ = compute_gtpo_outcome_advantage(**two_completions, config=algorithm)
    assert torch.equal(advantages, compute_gtpo_outcome_advantage(**two_completions, config=ALL_OFF)[0])


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "message"),
    [
        ("entropy", 1, 2, torch.nan, r"entropy .*row 1 \(uid p\) .*nan"),
        ("token_level_rewards", 0, 3, torch.inf, r"reward .*row 0 \(uid p\) .*inf"),
    ],
)
def test_values_that_are_not_finite_are_an_error(two_completions, name, row, column, value, message):
    two_completions[name][row, column] = value
    with pytest.raises(ValueError, match=message):
        compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)


def test_an_advantage_that_is_not_finite_is_an_error(two_completions):
    del two_completions["token_level_rewards"]
    with pytest.raises(ValueError, match=r"advantage .*row 1 \(uid p\) .*nan"):
        compute_gtpo_token_advantages(torch.tensor([1.0, torch.nan]), **two_completions, initial_entropy=0.3)


NOT_THE_SHAPE = r"^{name} has shape \(2, {width}\), .*= \(2, {expected}\)$"


@pytest.mark.parametrize(
    ("short", "message"),
    [
        ("entropy", NOT_THE_SHAPE.format(name="entropy", width=3, expected=4)),
        # The mask is compared with the rewards, which give the shape.
        ("token_level_rewards", NOT_THE_SHAPE.format(name="response_mask", width=4, expected=3)),
    ],
)
def test_a_shape_that_does_not_fit_the_rewards_is_an_error(two_completions, short, message):
    two_completions[short] = two_completions[short][:, :3]
    with pytest.raises(ValueError, match=message):
        compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)


@pytest.mark.parametrize("short", ["entropy", "responses"])
def test_a_shape_that_does_not_fit_the_mask_is_an_error(two_completions, short):
    del two_completions["token_level_rewards"]
    two_completions[short] = two_completions[short][:, :3]
    with pytest.raises(ValueError, match=NOT_THE_SHAPE.format(name=short, width=3, expected=4)):
        compute_gtpo_token_advantages(torch.tensor([1.0, -1.0]), **two_completions, initial_entropy=0.3)


def test_the_given_entropies_of_completions_are_those_of_their_tokens(two_completions):
    rewards = two_completions.pop("token_level_rewards").sum(-1)
    mask = two_completions["response_mask"]
    batch = {"rewards": rewards, "responses": two_completions["responses"], "response_mask": mask}
    completions = Completions(mask, two_completions["index"])
    means = completions.mean(two_completions["entropy"])
    first = compute_gtpo(**batch, group_ids=["p", "p"], entropy=two_completions["entropy"], initial_entropy=0.3)
    second = compute_gtpo(**batch, group_ids=completions, entropy=None, trajectory_entropy=means, initial_entropy=0.3)
    assert torch.equal(first.advantages, second.advantages)


@pytest.mark.parametrize("shape", [(), (3,), (2, 1)])
@pytest.mark.parametrize("name", ["trajectory_entropy", "rewards", "advantages"])
def test_what_is_not_one_number_per_completion_is_an_error(two_completions, name, shape):
    del two_completions["token_level_rewards"]
    two_completions["group_ids"] = two_completions.pop("index")
    batch = two_completions | {"rewards": torch.tensor([20.0, 10.0]), name: torch.full(shape, 0.2)}
    with pytest.raises(ValueError, match=rf"^{name} has shape {re.escape(str(shape))}: .*\(2,\)$"):
        compute_gtpo(**batch, initial_entropy=0.3)


@pytest.mark.parametrize("name", ["rewards", "base"])
def test_rewards_of_another_number_than_completions_are_an_error(name):
    completions = Completions(torch.ones(2, 1), "aa")
    fields = {"rewards": torch.tensor([1.0, 0.0]), name: torch.ones(3)}
    with pytest.raises(ValueError, match=rf"^{name} has shape \(3,\): .*\(2,\)$"):
        compute_group_advantages(group_ids=completions, **fields)


def test_log_probs_of_another_shape_are_an_error(two_completions):
    rewards = two_completions.pop("token_level_rewards").sum(-1)
    two_completions["group_ids"] = two_completions.pop("index")
    with pytest.raises(ValueError, match=NOT_THE_SHAPE.format(name="old_log_probs", width=3, expected=4)):
        compute_gtpo(**two_completions, rewards=rewards, initial_entropy=0.3, old_log_probs=torch.zeros(2, 3))


def test_without_entropies_the_advantages_are_lambda_a(two_completions):
    result = compute_gtpo(
        rewards=torch.tensor([20.0, 10.0]),
        responses=two_completions["responses"],
        response_mask=two_completions["response_mask"],
        group_ids="pp",
        entropy=None,
        initial_entropy=0.3,
    )
    assert torch.equal(result.advantages, result.token_weights * result.group_advantages.unsqueeze(-1))
    assert torch.equal(result.unweighted_advantages, result.group_advantages)


@pytest.mark.parametrize("entropy", [-0.1, -0.02, -3.0])
def test_log_probabilities_in_place_of_entropies_are_an_error(two_completions, entropy):
    two_completions["entropy"][:] = entropy
    with pytest.raises(ValueError, match=rf"entropy .*row 0 \(uid p\) .*{entropy:g} .*at least 0"):
        compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)
    two_completions["entropy"][:] = torch.tensor([[-0.2], [0.4]])  # as 16 bits may round
    compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3)


@pytest.mark.parametrize("initial_entropy", [math.nan, -1.0, math.inf])
@pytest.mark.parametrize("completion_filter", ["auto", "always", "never"])
def test_an_initial_entropy_that_is_none_is_an_error_under_any_filter(
    two_completions, initial_entropy, completion_filter
):
    config = {"completion_filter": completion_filter}
    with pytest.raises(ValueError, match=f"^initial_entropy={initial_entropy}: .*nats"):
        compute_gtpo_outcome_advantage(**two_completions, config=config, initial_entropy=initial_entropy)


def test_an_argument_of_another_name_is_an_error(two_completions):
    with pytest.raises(TypeError, match="entropy_coeff"):
        compute_gtpo_outcome_advantage(**two_completions, initial_entropy=0.3, entropy_coeff=0.0)


def test_swapped_responses_and_mask_are_an_error(two_completions):
    mask, responses = two_completions["response_mask"], two_completions["responses"]
    with pytest.raises(ValueError, match="response_mask.*swapped"):
        compute_gtpo_outcome_advantage(
            **two_completions | {"response_mask": responses, "responses": mask}, initial_entropy=0.3
        )


@pytest.fixture
def without_rewards(two_completions):
    """The arguments of `compute_gtpo` but the rewards."""
    del two_completions["token_level_rewards"]
    two_completions["group_ids"] = two_completions.pop("index")
    return two_completions


def test_neither_rewards_nor_advantages_are_an_error(without_rewards):
    with pytest.raises(ValueError, match="rewards, or advantages"):
        compute_gtpo(**without_rewards, initial_entropy=0.3)


@pytest.mark.parametrize("name", ["rewards", "advantages"])
def test_rewards_or_advantages_of_tokens_are_an_error(without_rewards, name):
    with pytest.raises(ValueError, match=rf"^{name} has shape \(2, 4\): .* \(2,\)$"):
        compute_gtpo(**without_rewards, initial_entropy=0.3, **{name: torch.zeros(2, 4)})


def test_rewards_of_tokens_are_no_rewards_of_a_group():
    with pytest.raises(ValueError, match=r"^rewards has shape \(2, 4\): "):
        compute_group_advantages(torch.zeros(2, 4), "pp")


def test_group_advantages_of_ids_are_those_of_completions():
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0])
    of_ids = compute_group_advantages(rewards, torch.tensor([7, 7, 7, 8]))
    assert torch.equal(of_ids, compute_group_advantages(rewards, Completions(torch.ones(4, 1), "aaab")))
    assert of_ids[1] == of_ids[3] == 0 and of_ids[0] == -of_ids[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_entropy_from_logits_is_that_of_the_distribution(dtype, temperature):
    logits = torch.randn(3, 1500, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = -torch.inf
    logits[0, 0, 3] = 5.0  # the only token that can be sampled
    expected = torch.distributions.Categorical(logits=logits.float() / temperature).entropy()
    expected[0, 0] = 0
    entropy = entropy_from_logits(logits.requires_grad_(), temperature)
    torch.testing.assert_close(entropy, expected)
    assert entropy.dtype == torch.float32 and not entropy.requires_grad


@pytest.mark.parametrize(("initial_entropy", "kept"), [(0.9, [True, False]), (1.0, [True, True]), (1.1, [True, True])])
def test_equation_10_with_the_initial_entropy_filters_only_from_below_the_threshold(initial_entropy, kept):
    entropy = torch.tensor([0.5, 1.5])
    assert compute_completion_filter(entropy, 1.0, initial_entropy=initial_entropy).tolist() == kept
    of_each = compute_completion_filter(entropy, torch.tensor([1.0, 1.0]), initial_entropy=initial_entropy)
    assert of_each.tolist() == kept


@pytest.mark.parametrize("initial_entropy", [math.nan, -0.1, math.inf])
def test_equation_10_refuses_an_initial_entropy_that_is_none(initial_entropy):
    with pytest.raises(ValueError, match=f"^initial_entropy={initial_entropy}:"):
        compute_completion_filter(torch.tensor([0.5, 1.5]), 1.0, initial_entropy=initial_entropy)
