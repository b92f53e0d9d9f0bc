"""δ and −γ⟨H⟩ applied where the actor computes its loss, against Eq. 11 on the whole batch."""

from dataclasses import replace

import pytest
import torch
from tensordict import TensorDict
from verl.utils.metric import reduce_metrics

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage
from gtpo_verl.advantage import compute_group_advantages
from gtpo_verl.completions import Completions
from gtpo_verl.verl_plugin import estimator, update_pass
from gtpo_verl.verl_plugin.update_pass import apply_entropy, make_rows

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
    ],
)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_micro_batches_of_whole_rows_get_eq_11(batch, settings, size):
    config = GTPOConfig(**({"initial_entropy": 0.1} | settings))
    whole, _ = compute_gtpo_outcome_advantage(**batch, config=config)
    completions = Completions(batch["response_mask"], UIDS)
    group_advantages = compute_group_advantages(batch["token_level_rewards"].sum(-1), completions)
    weighed, _ = compute_gtpo_outcome_advantage(
        **batch, config=replace(config, entropy_coeff=0, completion_filter="never")
    )
    rows = make_rows(group_advantages, config, config.initial_entropy)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(size))
    means = torch.empty(16)
    for micro in order.split(size):
        advantages, means[micro] = apply_entropy(
            weighed[micro], batch["response_mask"][micro], batch["entropy"][micro], rows[micro]
        )
        torch.testing.assert_close(advantages, whole[micro])
    mask = batch["response_mask"]
    torch.testing.assert_close(means, (batch["entropy"] * mask).sum(-1) / mask.sum(-1).clamp(min=1))


def test_entropy_off_the_mask_may_be_anything(batch):
    rows = make_rows(torch.ones(16), GTPOConfig(), 0.1)
    kept, _ = apply_entropy(batch["response_mask"].float(), batch["response_mask"], batch["entropy"], rows)
    entropy = torch.where(batch["response_mask"].bool(), batch["entropy"], torch.nan)
    torch.testing.assert_close(
        apply_entropy(batch["response_mask"].float(), batch["response_mask"], entropy, rows)[0], kept
    )


def test_the_first_mean_of_a_row_counts_and_a_missing_one_is_nan():
    means = update_pass.gather_means([(2, 0.5, None), (0, 0.1, None), (2, 0.9, None)], 4)
    torch.testing.assert_close(means, torch.tensor([0.1, torch.nan, 0.5, torch.nan]), equal_nan=True)


def test_a_forward_pass_without_entropy_is_an_error():
    data = TensorDict({update_pass.ROWS: make_rows(torch.ones(2), GTPOConfig(), 0.1)}, batch_size=2)
    with pytest.raises(RuntimeError, match="set actor_rollout_ref.actor.calculate_entropy=True"):
        update_pass.apply_in_actor(None, {"entropy": None}, data)


def test_an_update_that_did_not_apply_the_entropy_is_an_error():
    step = estimator.Step(None, None, 1, rows=make_rows(torch.ones(2), GTPOConfig(), 0.1))
    token = estimator.current_step.set(step)
    try:
        assert reduce_metrics({"critic/vf_loss": [1.0]}) == {"critic/vf_loss": 1.0}
        with pytest.raises(RuntimeError, match="the actor's loss did not apply the entropy"):
            reduce_metrics({"actor/pg_loss": [1.0]})
    finally:
        estimator.current_step.reset(token)
