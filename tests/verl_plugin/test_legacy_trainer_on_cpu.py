"""The data-proto stage in verl's legacy trainer, with the workers replaced by what they return."""

from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from omegaconf import open_dict
from ray import cloudpickle
from rollout_batch import LENGTHS, UIDS, expected, padded, real_mean_entropy
from verl import DataProto
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.tensordict_utils import get_tensordict

from gtpo_verl import GTPOConfig
from gtpo_verl.verl_plugin import estimator, update_pass


@pytest.fixture
def trainer(compose_config, rows):
    """verl's trainer without its workers, in a process without an earlier one."""
    estimator.current_step.set(None)
    trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
    trainer.config, trainer.global_steps = compose_config("data.max_response_length=6"), 1
    # An engine returns its value for a token at the position before it.
    entropy = [torch.nn.functional.pad(row, (0, 1)) for row in rows["entropy"]]
    entropy = torch.nested.as_nested_tensor(entropy, layout=torch.jagged)
    output = get_tensordict({"entropy": entropy, "log_probs": -entropy}, {"metrics": {"mfu": 0.0}})
    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=lambda batch: output)
    return trainer


@pytest.fixture
def batch(rows):
    """The rows behind prompts of one token, padded as the agent loop pads them."""
    real = (torch.arange(6) < torch.tensor(LENGTHS).unsqueeze(-1)).long()
    attention_mask = torch.nn.functional.pad(real, (1, 0), value=1)
    tensors = {
        "prompts": torch.ones(6, 1, dtype=torch.int64),
        "responses": padded(rows, "responses"),
        "input_ids": torch.nn.functional.pad(padded(rows, "responses"), (1, 0), value=1),
        "attention_mask": attention_mask,
        "position_ids": attention_mask.cumsum(-1) - 1,
        "response_mask": padded(rows, "response_mask"),
    }
    return DataProto.from_dict(tensors, non_tensors={"uid": np.array(UIDS, dtype=object)})


def old_log_prob_pass(trainer, batch, rows):
    """What `fit` does before it computes advantages, in its order."""
    old_log_prob, _ = trainer._compute_old_log_prob(batch)
    old_log_prob.batch.pop("entropys")
    batch = batch.union(old_log_prob)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = padded(rows, "rm_scores")
    return batch


def test_advantages_are_those_of_the_bare_function_and_the_metrics_are_logged(trainer, batch, rows):
    batch = old_log_prob_pass(trainer, batch, rows)
    batch = compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(batch.batch["advantages"], expected(rows, initial_entropy=initial_entropy))
    assert not any(key.startswith("gtpo_") for key in batch.batch.keys())

    metrics = ray_trainer.compute_data_metrics(batch=batch, use_critic=False)
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert "critic/score/mean" in metrics and metrics["timing_s/gtpo"] > 0
    assert "gtpo/entropy/initial" not in ray_trainer.compute_data_metrics(batch=batch, use_critic=False)


def test_the_alias_computes_the_same(trainer, batch, rows):
    trainer.config.algorithm.adv_estimator = "gtpo_trajectory"
    batch = old_log_prob_pass(trainer, batch, rows)
    batch = compute_advantage(batch, adv_estimator="gtpo_trajectory", config=trainer.config.algorithm)
    torch.testing.assert_close(batch.batch["advantages"], expected(rows, initial_entropy=real_mean_entropy(rows)))


def test_rows_without_entropy_are_an_error(trainer, batch, rows):
    batch = old_log_prob_pass(trainer, batch, rows)
    compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    with pytest.raises(RuntimeError, match="without token ids and entropy"):  # it served once
        compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)


def test_entropy_moves_with_the_rows(trainer, batch, rows):
    """A trainer may reorder, drop and join rows between its old-log-prob pass and the estimator, as DAPO's does."""
    trainer.config.algorithm.gtpo.initial_entropy = 0.3
    batch = old_log_prob_pass(trainer, batch, rows)
    whole = expected(rows, initial_entropy=0.3)
    reordered = batch[[5, 1, 2, 3, 4, 0]]
    joined = DataProto.concat([batch[[1, 0, 3]], batch[[5, 2, 4]]])
    for changed, order in ((reordered, [5, 1, 2, 3, 4, 0]), (joined, [1, 0, 3, 5, 2, 4]), (batch[[5, 2]], [5, 2])):
        compute_advantage(changed, adv_estimator="gtpo", config=trainer.config.algorithm)
        torch.testing.assert_close(changed.batch["advantages"], whole[order])


def test_a_group_that_lost_its_positives_has_no_conflicts_and_keeps_the_entropy_term(trainer, batch, rows):
    """What is left of a group after rollouts that failed is a group of its own."""
    trainer.config.algorithm.gtpo.initial_entropy = 0.9
    left = old_log_prob_pass(trainer, batch, rows)[[1, 3]]  # the third, row 0, had the higher reward
    compute_advantage(left, adv_estimator="gtpo", config=trainer.config.algorithm)
    regularizer = torch.stack([0.1 * rows["entropy"][row].mean() for row in (1, 3)]).unsqueeze(-1)
    torch.testing.assert_close(left.batch["advantages"], -regularizer * left.batch["response_mask"])
    metrics = ray_trainer.compute_data_metrics(batch=left, use_critic=False)
    assert metrics["gtpo/conflict/token_frac"] == 0 and metrics["gtpo/group/zero_std_frac"] == 1


def test_grpo_in_the_same_process_is_verls(trainer, batch, rows):
    trainer.config.algorithm.adv_estimator = "grpo"
    batch = old_log_prob_pass(trainer, batch, rows)
    batch = compute_advantage(batch, adv_estimator="grpo", config=trainer.config.algorithm)
    assert not any(key.startswith("gtpo/") for key in ray_trainer.compute_data_metrics(batch=batch, use_critic=False))
    assert not hasattr(trainer, "_gtpo_estimator") and not any(key.startswith("gtpo_") for key in batch.batch.keys())


def test_rejected_tokens_keep_their_position_and_get_no_advantage(trainer, batch, rows):
    """verl's rollout correction takes them out of the mask after the old-log-prob pass."""
    trainer.config.algorithm.gtpo.initial_entropy = 0.3
    trainer.config.algorithm.rollout_correction.rollout_rs = "token_k1"
    batch = old_log_prob_pass(trainer, batch, rows)
    kept = batch.batch["response_mask"].clone()
    kept[0, 0] = 0
    batch.batch["response_mask"] = kept
    compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    torch.testing.assert_close(batch.batch["advantages"], expected(rows, initial_entropy=0.3) * kept)


def test_prompts_that_differ_within_a_group_share_no_positions(trainer, batch, rows):
    trainer.config.algorithm.gtpo.initial_entropy = 0.3
    rows["responses"][2][0] = rows["responses"][5][0] = 7
    batch.batch["responses"] = padded(rows, "responses")
    batch.batch["prompts"][5] = 2
    batch = old_log_prob_pass(trainer, batch, rows)
    compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    plain = expected(rows, config=GTPOConfig(conflict_span="none"), initial_entropy=0.3)
    torch.testing.assert_close(batch.batch["advantages"][[2, 5]], plain[[2, 5]])
    assert not torch.equal(expected(rows, initial_entropy=0.3)[[2, 5]], plain[[2, 5]])


@pytest.mark.parametrize(("field", "name"), [("token_level_rewards", "reward"), ("old_log_probs", "old_log_probs")])
def test_a_value_that_is_not_finite_is_an_error_that_names_uid_and_row(trainer, batch, rows, field, name):
    trainer.config.algorithm.gtpo.initial_entropy = 0.3
    batch = old_log_prob_pass(trainer, batch, rows)
    batch.batch[field][2, 1] = torch.nan
    with pytest.raises(ValueError, match=rf"the {name} of row 2 \(uid q\) is nan"):
        compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)


@pytest.mark.parametrize("old_log_prob", [False, True])
def test_with_the_entropy_from_the_update_the_actor_completes_the_advantages(trainer, batch, rows, old_log_prob):
    """Under bypass mode nothing but the advantages passes through a hook before the update."""
    with open_dict(trainer.config):
        trainer.config.algorithm.gtpo.update(entropy_from="update", initial_entropy=0.3, entropy_threshold=0.5)
    if old_log_prob:
        batch = old_log_prob_pass(trainer, batch, rows)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = padded(rows, "rm_scores")
    trainer.metrics, trainer.timing_raw, trainer.reward_extra_infos_dict = {}, {}, {}
    trainer.reward_tensor = padded(rows, "rm_scores")
    trainer.config.algorithm.rollout_correction.bypass_mode = True
    # In fully_async, whose trainer is an actor of Ray, no other hook comes first.
    actor = ray.remote(type("Trainer", (SeparateRayPPOTrainer,), {}))
    trainer.__class__ = cloudpickle.loads(cloudpickle.dumps(actor.__ray_metadata__.modified_class))
    batch = trainer._fit_compute_advantage(batch)
    advantages, means = update_pass.apply_entropy(
        *(batch.batch[name] for name in ("advantages", "response_mask")),
        padded(rows, "entropy"),
        batch.batch[update_pass.ROWS],
    )
    config = GTPOConfig(entropy_threshold=0.5, initial_entropy=0.3)
    torch.testing.assert_close(advantages, expected(rows, config=config))

    entropies = [(row, mean, None) for row, mean in enumerate(means.tolist())]
    update = {"actor/pg_loss": [1.0], f"actor/{update_pass.ENTROPIES}": entropies}
    metrics = ray_trainer.reduce_metrics(update)
    assert metrics["gtpo/entropy/mean"] == pytest.approx(real_mean_entropy(rows))
    assert metrics["gtpo/entropy/initial"] == 0.3 and 0 < metrics["gtpo/filter/dropped_frac"] < 1
    assert "gtpo/entropy/mean" not in ray_trainer.compute_data_metrics(batch=batch, use_critic=False)
