"""verl's legacy trainer, and those with loops of their own: rows that move before they get their advantages."""

import pytest
import ray
import torch
from ray import cloudpickle
from rollout_batch import expected, padded, real_mean_entropy
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer

from gtpo_verl import GTPOConfig

KNOWN = "algorithm.gtpo.initial_entropy=0.3"


@pytest.fixture
def legacy(make_stage):
    return lambda *overrides: make_stage("legacy", *overrides)


def test_rows_without_entropy_are_an_error(legacy):
    stage = legacy(KNOWN)
    data = stage.compute_advantage(stage.old_log_prob_pass())
    with pytest.raises(RuntimeError, match="without token ids and entropy"):  # it served once
        stage.compute_advantage(data)


def test_entropy_moves_with_the_rows(legacy, rows):
    """A trainer may reorder, drop and join rows between its old-log-prob pass and the estimator, as DAPO's does."""
    stage = legacy(KNOWN)
    data = stage.old_log_prob_pass()
    whole = expected(rows, initial_entropy=0.3)
    reordered = data[[5, 1, 2, 3, 4, 0]]
    joined = DataProto.concat([data[[1, 0, 3]], data[[5, 2, 4]]])
    for changed, order in ((reordered, [5, 1, 2, 3, 4, 0]), (joined, [1, 0, 3, 5, 2, 4]), (data[[5, 2]], [5, 2])):
        stage.compute_advantage(changed)
        torch.testing.assert_close(changed.batch["advantages"], whole[order])


def test_a_group_that_lost_its_positives_has_no_conflicts_and_keeps_the_entropy_term(legacy, rows):
    """What is left of a group after rollouts that failed is a group of its own."""
    stage = legacy("algorithm.gtpo.initial_entropy=0.9")
    left = stage.compute_advantage(stage.old_log_prob_pass()[[1, 3]])  # the third, row 0, had the higher reward
    regularizer = torch.stack([0.1 * rows["entropy"][row].mean() for row in (1, 3)]).unsqueeze(-1)
    torch.testing.assert_close(left.batch["advantages"], -regularizer * left.batch["response_mask"])
    metrics = stage.update()
    assert metrics["gtpo/conflict/token_frac"] == 0 and metrics["gtpo/group/zero_std_frac"] == 1


def test_fully_async_under_bypass_mode_completes_its_advantages_in_the_actor(legacy, rows):
    """Its trainer is an actor of Ray, and makes no old-log-prob pass: no other hook comes before the advantages'."""
    stage = legacy(
        *(KNOWN, "algorithm.gtpo.entropy_from=update", "+algorithm.gtpo.entropy_threshold=0.5"),
        "algorithm.rollout_correction.bypass_mode=True",
    )
    trainer = stage.trainer
    actor = ray.remote(type("Trainer", (SeparateRayPPOTrainer,), {}))
    trainer.__class__ = cloudpickle.loads(cloudpickle.dumps(actor.__ray_metadata__.modified_class))
    trainer.metrics, trainer.timing_raw, trainer.reward_extra_infos_dict = {}, {}, {}
    trainer.reward_tensor = padded(rows, "rm_scores")
    stage.batch = trainer._fit_compute_advantage(stage.data()).batch
    metrics = stage.update()
    config = GTPOConfig(entropy_threshold=0.5, initial_entropy=0.3)
    torch.testing.assert_close(stage.used, expected(rows, config=config))
    assert metrics["gtpo/entropy/mean"] == pytest.approx(real_mean_entropy(rows))
    assert metrics["gtpo/entropy/initial"] == 0.3 and 0 < metrics["gtpo/filter/dropped_frac"] < 1
