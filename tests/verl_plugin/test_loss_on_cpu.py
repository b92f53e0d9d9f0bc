from types import SimpleNamespace

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

from gtpo_verl import compute_policy_loss_gtpo

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
ADVANTAGES = torch.tensor([[2.0, 1.0, 1.0, 9.0], [0.0, -1.0, 9.0, 9.0]])


@pytest.fixture
def log_probs():
    old_log_prob = torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-0.1, -3.0, 0.0, 0.0]])
    return old_log_prob, (old_log_prob + torch.tensor([0.3, -0.2, 0.1, 5.0])).requires_grad_()


def test_loss_and_gradient_in_closed_form(log_probs):
    """Eq. 11: loss = −1/G Σ_i 1/|o_i| Σ_t r·Â, gradient of a token −r·Â / (G |o_i|), 0 off the mask."""
    old_log_prob, log_prob = log_probs
    loss, metrics = compute_policy_loss_gtpo(old_log_prob, log_prob, ADVANTAGES, MASK, "seq-mean-token-mean")
    loss.backward()
    weight = MASK / MASK.sum(-1, keepdim=True) / len(MASK)
    expected = -(log_prob - old_log_prob).detach().exp() * ADVANTAGES * weight
    torch.testing.assert_close(log_prob.grad, expected)
    torch.testing.assert_close(loss.detach(), expected.sum())
    assert metrics["actor/ppo_kl"] == pytest.approx((-0.3 + 0.2 - 0.1 - 0.3 + 0.2) / 5)


@pytest.mark.parametrize("log_ratio", [-30.0, 30.0])
def test_a_ratio_is_not_clipped_but_where_it_would_overflow_held_at_e_to_the_20(log_probs, log_ratio):
    old_log_prob, _ = log_probs
    loss, metrics = compute_policy_loss_gtpo(old_log_prob, old_log_prob + log_ratio, torch.ones(2, 4), MASK)
    held = torch.tensor(log_ratio).clamp(-20, 20)
    torch.testing.assert_close(loss, -held.exp())
    assert metrics["actor/ppo_kl"] == -held


def test_rollout_is_weights_multiply_the_loss_of_a_token(log_probs):
    old_log_prob, log_prob = log_probs
    weights = torch.tensor([[0.5, 1.0, 2.0, 1.0], [1.0, 0.0, 1.0, 1.0]])
    plain = compute_policy_loss_gtpo(old_log_prob, log_prob, ADVANTAGES * weights, MASK)[0]
    weighted = compute_policy_loss_gtpo(old_log_prob, log_prob, ADVANTAGES, MASK, rollout_is_weights=weights)[0]
    torch.testing.assert_close(weighted, plain)


def test_equals_verls_vanilla_loss_where_nothing_is_clipped(log_probs):
    old_log_prob, _ = log_probs
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
    config.get = lambda key, default=None: getattr(config, key, default)
    vanilla, _ = compute_policy_loss_vanilla(
        old_log_prob, old_log_prob, ADVANTAGES, MASK, "seq-mean-token-mean", config
    )
    torch.testing.assert_close(compute_policy_loss_gtpo(old_log_prob, old_log_prob, ADVANTAGES, MASK)[0], vanilla)


@pytest.mark.parametrize("split", [[1, 1], [2]])
@pytest.mark.parametrize("dp_size", [1, 2])
def test_micro_batch_and_data_parallel_split_change_nothing(log_probs, split, dp_size):
    """Gradients summed over micro-batches and averaged over ranks equal those of the whole batch."""
    old_log_prob, log_prob = log_probs
    whole = compute_policy_loss_gtpo(old_log_prob, log_prob, ADVANTAGES, MASK)[0]
    config = SimpleNamespace(
        global_batch_info={"dp_size": dp_size, "global_batch_size": len(MASK), "batch_num_tokens": int(MASK.sum())}
    )
    total, start = torch.zeros(()), 0
    for rows in split:
        part = slice(start, start + rows)
        start += rows
        args = (old_log_prob[part], log_prob[part], ADVANTAGES[part], MASK[part], "seq-mean-token-mean", config)
        total = total + compute_policy_loss_gtpo(*args)[0] / dp_size
    torch.testing.assert_close(total, whole)
