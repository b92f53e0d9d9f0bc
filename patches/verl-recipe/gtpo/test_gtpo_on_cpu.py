import math

import pytest
import torch
from gtpo_verl import compute_gtpo_token_advantages

from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

# They share their first two tokens and their last.
GOOD = [5, 6, 7, 9]
BAD = [5, 6, 8, 9]


def advantages(entropy):
    """Token advantages of the two responses, whose tokens all have this entropy in nats."""
    responses = torch.tensor([GOOD, BAD])
    result = compute_gtpo_token_advantages(
        torch.tensor([1.0, -1.0]),
        ["prompt", "prompt"],
        responses,
        torch.ones_like(responses),
        torch.full(responses.shape, entropy),
        initial_entropy=0.3,
    )
    return result.advantages


def test_verl_has_the_estimator_and_its_loss():
    assert get_adv_estimator_fn("gtpo").__module__.startswith("gtpo_verl")
    assert get_policy_loss_fn("gtpo").__module__.startswith("gtpo_verl")


def test_shared_tokens_are_doubled_in_the_good_response_and_left_out_of_the_bad_one():
    assert advantages(0.0).tolist() == [[2, 2, 1, 2], [0, 0, -1, 0]]


def test_entropy_lowers_the_advantage_and_filters_above_ln_2():
    assert advantages(0.5)[1].tolist() == pytest.approx([0, 0, -1.05, 0])
    assert not advantages(math.log(2) + 0.01).any()
