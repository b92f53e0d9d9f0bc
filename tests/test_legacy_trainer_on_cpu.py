"""The data-proto stage in verl's legacy trainer, with the workers replaced by what they return."""

from contextvars import ContextVar
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_batch import LENGTHS, UIDS, expected, padded, real_mean_entropy
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.tensordict_utils import get_tensordict

from gtpo_verl import stage


@pytest.fixture
def trainer(compose_config, rows, monkeypatch):
    """verl's trainer without its workers, in a process without an earlier one."""
    monkeypatch.setattr(stage, "_current", ContextVar("stage", default=None))
    trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
    trainer.config, trainer.global_steps = compose_config("data.max_response_length=6"), 1
    trainer.use_legacy_worker_impl = "disable"  # verl 0.7.1's word for the workers of all later versions
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


def test_advantages_are_those_of_the_bare_function_and_the_metrics_are_logged(trainer, batch, rows):
    """The three calls that `fit` makes, in its order."""
    trainer._compute_old_log_prob(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = padded(rows, "rm_scores")
    batch = compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(batch.batch["advantages"], expected(rows, initial_entropy=initial_entropy))

    metrics = ray_trainer.compute_data_metrics(batch=batch, use_critic=False)
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert "critic/score/mean" in metrics and metrics["timing_s/gtpo"] > 0
    assert "gtpo/entropy/initial" not in ray_trainer.compute_data_metrics(batch=batch, use_critic=False)


def test_what_was_collected_serves_one_call_of_the_estimator(trainer, batch, rows):
    trainer._compute_old_log_prob(batch)
    batch.batch["token_level_rewards"] = padded(rows, "rm_scores")
    compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)
    with pytest.raises(RuntimeError, match="without token ids and entropy"):
        compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)


def test_rows_that_are_not_those_collected_are_an_error(trainer, batch, rows):
    trainer._compute_old_log_prob(batch)
    batch.batch["token_level_rewards"] = padded(rows, "rm_scores")
    batch.reorder(torch.tensor([5, 1, 2, 3, 4, 0]))
    with pytest.raises(RuntimeError, match="changed the rows"):
        compute_advantage(batch, adv_estimator="gtpo", config=trainer.config.algorithm)


def test_grpo_in_the_same_process_is_verls(trainer, batch, rows):
    trainer.config.algorithm.adv_estimator = "grpo"
    trainer._compute_old_log_prob(batch)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"] = padded(rows, "rm_scores")
    batch = compute_advantage(batch, adv_estimator="grpo", config=trainer.config.algorithm)
    assert not any(key.startswith("gtpo/") for key in ray_trainer.compute_data_metrics(batch=batch, use_critic=False))
    assert not hasattr(trainer, "_gtpo_stage")


def test_rejected_tokens_keep_their_position_and_get_no_advantage(compose_config, rows):
    """verl's rollout correction zeroes the mask of rejected tokens after the batch was collected."""
    gtpo = stage.GTPOStage(compose_config("algorithm.gtpo.initial_entropy=0.3"), global_steps=1)
    fields = {k: padded(rows, k) for k in ("responses", "entropy", "response_mask")}
    gtpo.collect(**fields, row_len=torch.tensor(LENGTHS))
    kept = fields["response_mask"].clone()
    kept[0, 0] = 0
    advantages, _ = gtpo.estimate(padded(rows, "rm_scores"), kept, np.array(UIDS))
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=0.3) * kept)
