"""δ and −γ⟨H⟩ applied where the actor computes its loss, against Eq. 11 on the whole batch."""

import math
from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage
from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.verl_plugin import update_pass
from gtpo_verl.verl_plugin.update_pass import RowEntropy, UpdateInputs, apply_entropy

UIDS = [f"uid{row // 4}" for row in range(16)]


@pytest.fixture
def batch():
    """Four groups of four: one of equal rewards, rows with holes in the mask, and a row of padding."""
    generator = torch.Generator().manual_seed(3)
    rewards = torch.zeros(16, 9)
    rewards[:, -1] = torch.randint(0, 3, (16,), generator=generator)
    rewards[4:8] = 1
    mask = (torch.rand(16, 9, generator=generator) < 0.8).long()
    mask[11] = 0
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": UIDS,
        "responses": torch.randint(0, 3, (16, 9), generator=generator),
        "entropy": torch.rand(16, 9, generator=generator),
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"entropy_coeff": 2.0, "entropy_threshold": 0.5, "conflict_span": "all"},
        {"entropy_threshold": 0.5, "filter_scope": "negative", "conflict_weight_positive": 1.7},
        {"entropy_threshold": 0.5, "conflict_weight_negative": 0.3},
        {"initial_entropy": 0.9},
        {"min_correct_reward": 2},
    ],
)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_micro_batches_of_whole_rows_get_eq_11(batch, settings, size):
    config = GTPOConfig(**({"initial_entropy": 0.1} | settings))
    whole, _ = compute_gtpo_outcome_advantage(**batch, config=config)
    completions = Completions(batch["response_mask"], UIDS)
    scores, least = batch["token_level_rewards"].sum(-1), config.min_correct_reward
    group_advantages = compute_group_advantages(scores, completions, min_correct_reward=least)
    weighed, _ = compute_gtpo_outcome_advantage(
        **batch, config=replace(config, entropy_coeff=0, completion_filter="never")
    )
    inputs = UpdateInputs.make(group_advantages, config, config.initial_entropy)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(size))
    means = torch.empty(16)
    for micro in order.split(size):
        advantages, means[micro] = apply_entropy(
            weighed[micro],
            batch["response_mask"][micro],
            batch["entropy"][micro],
            UpdateInputs(*(column[micro] for column in inputs)),
        )
        torch.testing.assert_close(advantages, whole[micro])
    mask = batch["response_mask"]
    torch.testing.assert_close(means, (batch["entropy"] * mask).sum(-1) / mask.sum(-1).clamp(min=1))


def test_both_ways_of_taking_the_entropy_give_one_mean_to_the_bit():
    """The estimator's, of the pass before the update, and the actor's, of the update itself."""
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(3000, 60, generator=generator) * torch.rand(3000, 1, generator=generator) * 9
    mask = (torch.rand(3000, 60, generator=generator) < 0.8).long()
    inputs = UpdateInputs.make(torch.ones(3000), GTPOConfig(), 0.1)
    _, means = apply_entropy(mask.float(), mask, entropy, inputs)
    assert torch.equal(means, Completions(mask, range(3000)).mean(entropy))


def test_entropy_off_the_mask_may_be_anything(batch):
    inputs = UpdateInputs.make(torch.ones(16), GTPOConfig(), 0.1)
    kept, _ = apply_entropy(batch["response_mask"].float(), batch["response_mask"], batch["entropy"], inputs)
    entropy = torch.where(batch["response_mask"].bool(), batch["entropy"], torch.nan)
    torch.testing.assert_close(
        apply_entropy(batch["response_mask"].float(), batch["response_mask"], entropy, inputs)[0], kept
    )


def test_the_first_entropy_of_a_row_counts_and_a_missing_one_is_nan():
    """Several come of `ppo_epochs` above 1; the advantages that are dumped are the first epoch's."""
    found = [RowEntropy(2, 0.5, [0.4, 0.6]), RowEntropy(0, 0.1, None), RowEntropy(2, 0.9, [0.8, 1.0, 9.0])]
    means, tokens = update_pass.gather(found, torch.Size((4, 2)))
    torch.testing.assert_close(means, torch.tensor([0.1, torch.nan, 0.5, torch.nan]), equal_nan=True)
    torch.testing.assert_close(tokens, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.4, 0.6], [0.0, 0.0]]))


def test_inputs_pass_through_a_batch_of_verl_in_any_order():
    inputs = UpdateInputs.make(torch.arange(4.0), GTPOConfig(), 0.1)
    data = TensorDict(inputs.to_batch(), batch_size=4)[[2, 0, 3, 1]]
    assert (
        UpdateInputs.from_batch(data).row.tolist()
        == UpdateInputs.from_batch(data).group_advantage.tolist()
        == [2, 0, 3, 1]
    )
    assert UpdateInputs.from_batch(data.exclude("gtpo_row")) is None


def test_a_forward_pass_without_entropy_is_an_error():
    inputs = UpdateInputs.make(torch.ones(2), GTPOConfig(), 0.1)
    with pytest.raises(RuntimeError, match="set actor_rollout_ref.actor.calculate_entropy=True"):
        update_pass.apply_in_actor(None, {"entropy": None}, TensorDict(inputs.to_batch(), batch_size=2), inputs)


def test_a_completion_exactly_at_the_threshold_is_kept():
    inputs = UpdateInputs.make(torch.tensor([1.0, 1.0]), GTPOConfig(entropy_threshold=0.5, entropy_coeff=0.0), 0.1)
    ones = torch.ones(2, 1)
    advantages, _ = apply_entropy(ones, ones, torch.tensor([[0.5], [0.5000001]]), inputs)
    assert advantages.tolist() == [[1.0], [0.0]]
    inputs = UpdateInputs.make(torch.tensor([1.0]), GTPOConfig(entropy_coeff=0.0), 0.1)  # ln 2, which float32 has not
    advantages, _ = apply_entropy(ones[:1], ones[:1], torch.tensor([[math.log(2)]]), inputs)
    assert advantages.tolist() == [[1.0]]
