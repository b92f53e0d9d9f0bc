import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from gtpo_verl import GTPOConfig, compute_gtpo_token_advantages
from gtpo_verl.algorithm.advantage import compute_gtpo
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics, compute_log_prob_metrics


def metrics_of(config=GTPOConfig(), padding_rows=0):  # noqa: B008
    """Group p: a good completion of 4 tokens and a bad one of 2, sharing the first; group q: equal rewards."""
    rows = 4 + padding_rows
    response_mask = torch.zeros(rows, 4, dtype=torch.int64)
    for row, length in enumerate((4, 2, 3, 3)):
        response_mask[row, :length] = 1
    responses = torch.tensor([[5, 1, 2, 3], [5, 4, 0, 0], [7, 8, 9, 0], [7, 8, 9, 0], *[[0] * 4] * padding_rows])
    rewards = torch.zeros(rows, 4)
    rewards[:4, 0] = torch.tensor([20.0, 10.0, 10.0, 10.0])
    entropy = torch.full((rows, 4), 9.0)
    entropy[:4] = torch.tensor([0.1, 0.9, 0.2, 0.4]).unsqueeze(-1)
    index = np.array(["p", "p", "q", "q", *["pad"] * padding_rows], dtype=object)
    result = compute_gtpo(
        rewards=rewards.sum(-1),
        responses=responses,
        response_mask=response_mask,
        group_ids=index,
        entropy=entropy,
        config=config,
        initial_entropy=0.3,
    )
    truncated = response_mask.sum(-1) >= 4
    return compute_gtpo_metrics(result, config, 0.3, truncated)


@pytest.mark.parametrize(("threshold", "dropped", "dropped_groups"), [(0.693, 1 / 6, 0), (0.45, 3 / 6, 1 / 2)])
def test_every_metric_by_hand(threshold, dropped, dropped_groups):
    """Group p: A of 3, -1, -2 and 0; three share the first token, one of which has no other. Group q: no signal."""
    responses = torch.tensor([[5, 1], [5, 0], [6, 3], [5, 4], [7, 0], [7, 0]])
    response_mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 0], [1, 0]])
    entropy = torch.tensor([0.1, 0.9, 0.2, 0.4, 0.5, 0.5]).unsqueeze(-1).expand(6, 2)
    config = GTPOConfig(entropy_threshold=threshold, completion_filter="always")
    advantages = torch.tensor([3.0, -1.0, -2.0, 0.0, 0.0, 0.0])
    result = compute_gtpo_token_advantages(advantages, "ppppqq", responses, response_mask, entropy, config)
    metrics = compute_gtpo_metrics(result, config, 0.3, torch.tensor([True, True, *[False] * 4]))
    assert {type(value) for value in metrics.values()} == {float}
    assert metrics == pytest.approx(
        {
            "gtpo/conflict/token_frac": 3 / 9,
            "gtpo/conflict/prefix_len/mean": 3 / 6,
            "gtpo/conflict/prefix_len/max": 1,
            "gtpo/conflict/suffix_len/mean": 0,
            "gtpo/conflict/suffix_len/max": 0,
            "gtpo/conflict/fork_frac": 3 / 6,
            "gtpo/conflict/group_frac": 1 / 2,
            "gtpo/lambda/mean": (7 * 1 + 2 + 0) / 9,
            "gtpo/lambda/zeroed_frac": 1 / 9,
            "gtpo/lambda/amplified_frac": 1 / 9,
            # App. 8.2: |A| times the share of conflict tokens, which is 1/2 of the good one and all of the bad one.
            "gtpo/lambda/signal_residual": (3 / 2 - 1) / (3 / 2 + 1),
            "gtpo/entropy/mean": 2.6 / 6,
            "gtpo/entropy/max": 0.9,
            "gtpo/entropy/positive": 0.1,
            "gtpo/entropy/negative": 0.55,
            "gtpo/entropy/truncated": 0.5,
            "gtpo/entropy/initial": 0.3,
            "gtpo/entropy/threshold": threshold,
            "gtpo/filter/active": 1,
            "gtpo/filter/dropped_frac": dropped,
            "gtpo/filter/dropped_group_frac": dropped_groups,
            "gtpo/regularizer/mean": 0.26 / 6,
            "gtpo/regularizer/sign_flip_frac": 0,
            "gtpo/group/size_min": 2,
            "gtpo/group/zero_std_frac": 1 / 2,
            "gtpo/group/positive_frac": 1 / 6,
        },
        abs=1e-6,
    )
    assert result.unweighted_advantages.tolist() == pytest.approx(
        [2.99, 0, -2.02, -0.04, *[0 if dropped_groups else -0.05] * 2]
    )


def test_small_advantages_and_groups_of_equal_rewards_are_counted():
    responses = torch.tensor([[5, 1], [5, 0], *[[7, 0]] * 4])
    advantages = torch.tensor([0.3, -0.1, 0.0, 0.0, 0.0, 0.0])
    ones, truncated = (responses > 0).long(), torch.zeros(6, dtype=torch.bool)
    result = compute_gtpo_token_advantages(advantages, "ppqqrr", responses, ones, ones * 0.1, GTPOConfig(), 0.3)
    metrics = compute_gtpo_metrics(result, GTPOConfig(), 0.3, truncated)
    assert metrics["gtpo/lambda/signal_residual"] == pytest.approx((0.15 - 0.1) / (0.15 + 0.1))
    assert metrics["gtpo/group/zero_std_frac"] == pytest.approx(2 / 3)


def test_a_batch_of_padding_has_no_means():
    nothing = torch.zeros(3, 2, dtype=torch.int64)
    config = GTPOConfig(completion_filter="never")
    result = compute_gtpo_token_advantages(torch.zeros(3), "pqq", nothing, nothing, nothing.float(), config)
    assert compute_gtpo_metrics(result, config, None, torch.ones(3, dtype=torch.bool)) == pytest.approx(
        {
            "gtpo/conflict/token_frac": 0,
            "gtpo/lambda/mean": 1,
            "gtpo/lambda/zeroed_frac": 0,
            "gtpo/lambda/amplified_frac": 0,
            "gtpo/lambda/signal_residual": 0,
            "gtpo/entropy/threshold": math.log(2),
            "gtpo/filter/active": 0,
        }
    )


def test_padding_rows_count_in_no_metric():
    assert metrics_of(padding_rows=5) == metrics_of()


def test_sign_flips_and_dropped_groups_are_counted():
    metrics = metrics_of(GTPOConfig(entropy_coeff=10.0, entropy_threshold=0.15, completion_filter="always"))
    assert metrics["gtpo/regularizer/sign_flip_frac"] == 0.25
    assert metrics["gtpo/filter/dropped_frac"] == 0.75
    assert metrics["gtpo/filter/dropped_group_frac"] == 0.5


@pytest.mark.parametrize(("positive", "negative"), [(0.0, 0.0), (2.0, 2.0), (0.5, 3.0), (1.0, 1.0)])
def test_lambda_is_counted_as_it_is_on_either_side(positive, negative):
    config = GTPOConfig(conflict_weight_positive=positive, conflict_weight_negative=negative)
    metrics = metrics_of(config)
    # one conflict token in each of the two completions of group p, of 12 tokens in all
    assert metrics["gtpo/lambda/zeroed_frac"] == pytest.approx([positive, negative].count(0) / 12)
    assert metrics["gtpo/lambda/amplified_frac"] == pytest.approx(sum(x > 1 for x in (positive, negative)) / 12)
    assert (metrics["gtpo/lambda/signal_residual"] == 0) is (positive == 1)


def test_the_documented_metrics_are_those_that_are_logged():
    document = (Path(__file__).resolve().parents[2] / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", document.split("`timing_s/gtpo`")[0], re.MULTILINE)
    names = set()
    for name in re.findall(r"`(.*?)`", "".join(rows)):
        if name.endswith("…"):
            continue
        stem, _, stats = name.partition("{")
        names |= {f"gtpo/{stem}{stat}" for stat in stats.rstrip("}").split(",")}
    log_probs = compute_log_prob_metrics(
        torch.zeros(2, 1), torch.tensor([1.0, -1.0]), Completions(torch.ones(2, 1), "pp")
    )
    assert names == set(metrics_of()) | set(log_probs)


def test_log_probs_are_means_over_completions_of_each_sign():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    log_probs = torch.tensor([[-1.0, -2.0, -99, -3.0], [-4.0, 1, 1, 1], [-1.0] * 4, [-7.0] * 4, [-50.0] * 4])
    completions = Completions(mask, "ppppp")
    advantages = torch.tensor([1.0, 0.5, -1.0, 0.0, -1.0])
    assert compute_log_prob_metrics(log_probs, advantages, completions) == {
        "gtpo/log_prob/positive": -3.0,
        "gtpo/log_prob/negative": -1.0,
    }
    assert compute_log_prob_metrics(log_probs, torch.zeros(5), completions) == {}
