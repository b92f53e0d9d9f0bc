"""The data-proto stage in verl's V1 trainer, with TransferQueue replaced by a dictionary."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from rollout_batch import UIDS, expected, padded, real_mean_entropy
from tensordict import TensorDict
from verl.trainer.ppo import core_algos

from gtpo_verl import GTPOConfig
from gtpo_verl.initial_entropy import InitialEntropy

if not find_spec("verl.trainer.ppo.v1"):
    pytest.skip("V1 came with verl 0.9.0", allow_module_level=True)
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync  # noqa: E402


class InMemoryQueue:
    """The two calls of TransferQueue that the advantage stage makes."""

    def __init__(self, rows):
        self.rows = rows
        self.put = {}

    def kv_batch_get(self, keys, partition_id, select_fields):
        data = {}
        for field in set(select_fields) & set(self.rows):
            values = [self.rows[field][int(key.rsplit("_", 2)[1])] for key in keys]
            data[field] = (
                np.array(values) if field == "uid" else torch.nested.as_nested_tensor(values, layout=torch.jagged)
            )
        uid = data.pop("uid", None)
        batch = TensorDict(data, batch_size=len(keys))
        if uid is not None:
            batch["uid"] = uid.tolist()
        return batch

    def kv_batch_put(self, keys, partition_id, fields):
        self.put = {field: fields[field].to_padded_tensor(0.0) for field in fields.keys()}
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{}] * len(keys))


@pytest.fixture
def trainer(compose_config):
    """verl's sync trainer without its workers."""

    def made(*overrides, global_steps=1):
        trainer = PPOTrainerSync.__new__(PPOTrainerSync)
        trainer.config = compose_config("data.max_response_length=6", *overrides)
        trainer.global_steps = global_steps
        return trainer

    return made


def step(trainer, rows, monkeypatch, order=range(6)):
    """One call of the trainer's advantage stage; the metrics, and advantages in the rows' own order."""
    queue = InMemoryQueue(rows)
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys = [f"{UIDS[i]}_{i}_0" for i in order]
    metrics = {}
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 6), metrics=metrics)
    advantages = torch.empty(6, queue.put["advantages"].shape[1])
    advantages[list(order)] = queue.put["advantages"]
    return metrics, advantages


@pytest.mark.parametrize("order", [range(6), [4, 2, 0, 5, 1, 3]])
def test_v1_trainer_gets_the_advantages_of_the_bare_function(trainer, rows, monkeypatch, order):
    metrics, advantages = step(trainer(), rows, monkeypatch, order)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=initial_entropy))
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/group/size_min"] == 2
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert metrics["timing_s/gtpo"] > 0


def test_settings_reach_the_estimator(trainer, rows, monkeypatch):
    overrides = ["algorithm.gtpo.entropy_coeff=0.7", "+algorithm.gtpo.conflict_span=all"]
    gtpo = trainer(*overrides, "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.gtpo.initial_entropy=0.3")
    _, advantages = step(gtpo, rows, monkeypatch)
    config = GTPOConfig(entropy_coeff=0.7, conflict_span="all", initial_entropy=0.3)
    torch.testing.assert_close(advantages, expected(rows, config=config, norm_adv_by_std_in_grpo=False))


def test_initial_entropy_is_measured_once_and_written(trainer, rows, monkeypatch, compose_config):
    gtpo = trainer()
    first, _ = step(gtpo, rows, monkeypatch)
    rows["entropy"] = [e + 0.5 for e in rows["entropy"]]
    second, _ = step(gtpo, rows, monkeypatch)
    assert second["gtpo/entropy/initial"] == first["gtpo/entropy/initial"] < second["gtpo/entropy/mean"]
    record = InitialEntropy.load(gtpo.config.trainer.default_local_dir)
    assert record.value == first["gtpo/entropy/initial"] and (record.completions, record.prompts) == (5, 2)


def test_resumed_run_reads_the_record_and_does_not_measure(trainer, rows, monkeypatch):
    gtpo = trainer(global_steps=9)
    InitialEntropy(0.123).save(gtpo.config.trainer.default_local_dir)
    assert step(gtpo, rows, monkeypatch)[0]["gtpo/entropy/initial"] == 0.123
    gtpo = trainer("trainer.default_local_dir=/nowhere", global_steps=9)
    with pytest.raises(ValueError, match="algorithm.gtpo.initial_entropy"):
        step(gtpo, rows, monkeypatch)


def test_resumed_run_without_record_needs_none_where_the_filter_does_not_rest_on_it(
    trainer, rows, monkeypatch, tmp_path
):
    gtpo = trainer(
        f"trainer.default_local_dir={tmp_path / 'none'}", "algorithm.gtpo.completion_filter=always", global_steps=9
    )
    metrics, _ = step(gtpo, rows, monkeypatch)
    assert "gtpo/entropy/initial" not in metrics and metrics["gtpo/filter/active"] == 1


def test_missing_entropy_is_an_error_and_not_a_zero(trainer, rows, monkeypatch):
    del rows["entropy"]
    with pytest.raises(RuntimeError, match="GTPO needs entropy"):
        step(trainer(), rows, monkeypatch)


def test_grpo_in_the_same_process_is_verls(trainer, rows, monkeypatch):
    del rows["entropy"]
    metrics, advantages = step(trainer("algorithm.adv_estimator=grpo"), rows, monkeypatch)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(
        padded(rows, "rm_scores"), padded(rows, "response_mask"), np.array(UIDS)
    )
    torch.testing.assert_close(advantages, grpo)
    assert not any(key.startswith("gtpo/") for key in metrics)
