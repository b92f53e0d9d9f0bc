"""The advantage stage and the update of verl's trainers, V1 and legacy, on rows that are given.

TransferQueue is a dictionary, and the workers are what they return. Nothing here decides which GTPO is called: it is
whichever `gtpo` the verl at hand serves.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tensordict import NonTensorStack, TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.tensordict_utils import get_tensordict

Rows = dict[str, Any]
"""Fields of the rows of a batch: `uid`, a list, and lists of tensors of unequal length, as TransferQueue holds them."""


class InMemoryQueue:
    """What verl's trainers ask of TransferQueue: fields of rows by key, and tags of keys by partition."""

    def __init__(self, rows: dict[str, dict[str, Any]], tags: dict[str, dict[str, Any]] | None = None):
        self.rows = {key: dict(fields) for key, fields in rows.items()}
        self.tags = tags or {}

    def kv_list(self) -> dict[str, dict[str, Any]]:
        return self.tags

    def kv_clear(self, partition_id: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Sequence[str] | None = None
    ) -> TensorDict:
        held = set.intersection(*(set(self.rows[key]) for key in keys))
        columns = {name: [self.rows[key][name] for key in keys] for name in sorted(held & set(select_fields or held))}
        fields = {
            name: _nested(values) if torch.is_tensor(values[0]) else NonTensorStack(*values)
            for name, values in columns.items()
        }
        return TensorDict(fields, batch_size=[len(keys)])

    def kv_batch_put(self, keys: Sequence[str], partition_id: str, fields: Any, tags: Any = None) -> KVBatchMeta:
        for name in fields.keys():
            values = fields[name]
            values = values.unbind() if torch.is_tensor(values) else list(values)
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault(key, {})[name] = value
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=tags or [{}] * len(keys))


def _nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """(rows, longest), with 0 behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


class Stage:
    """A trainer of verl at one step, with a batch of `rows` that TransferQueue holds under `keys`."""

    trainer_class: Any
    """verl's, of which an instance is made without what it makes of a config."""

    def __init__(self, config: Any, rows: Rows, global_steps: int = 1, keys: Sequence[str] | None = None):
        self.config, self.rows = config, rows
        self.keys = keys or [f"{uid}_{i}_0" for i, uid in enumerate(rows["uid"])]
        self.trainer: Any = object.__new__(self.trainer_class)
        self.trainer.config, self.trainer.global_steps = config, global_steps
        self.order: list[int] = []
        self.batch: Any = {}

    def advantages(self, order: Sequence[int] | None = None) -> torch.Tensor:
        """(rows, response_length), in the rows' own order, of a batch that has them in another one."""
        raise NotImplementedError

    def step(self, order: Sequence[int] | None = None) -> tuple[dict[str, float], torch.Tensor]:
        """What the trainer logs of a step and its update, and the advantages in the rows' own order."""
        advantages = self.advantages(order)
        return self.update(), advantages

    def update(self) -> dict[str, float]:
        """What the trainer logs of its actor's update; `self.used` are then the advantages that it used, in the order
        of the batch."""
        from gtpo_verl.verl_plugin.update_pass import ENTROPIES, RowEntropy, UpdateInputs, apply_entropy

        metrics: dict[str, Any] = {"actor/pg_loss": [1.0]}
        if inputs := UpdateInputs.from_batch(self.batch):
            entropy, mask = (padded([self.rows[name][i] for i in self.order]) for name in ("entropy", "response_mask"))
            self.used, means = apply_entropy(self.batch["advantages"], mask, entropy, inputs)
            tokens = [
                row.tolist() if dumped else None
                for row, dumped in zip(entropy, inputs.wants_token_entropy, strict=True)
            ]
            found = [*map(RowEntropy, inputs.row.tolist(), means.tolist(), tokens)]
            metrics[f"actor/{ENTROPIES}"] = found[3:] + found[:3]  # workers return them in an order of their own
        logged = reduce_metrics(metrics)
        assert logged.pop("actor/pg_loss") == 1.0
        return logged

    def in_own_order(self, values: torch.Tensor) -> torch.Tensor:
        """The batch's values, row by row as they were given."""
        own = torch.empty_like(values)
        own[self.order] = values
        return own


class V1Stage(Stage):
    """The V1 trainer's `_compute_advantage`, on what TransferQueue would hold."""

    trainer_class = PPOTrainerSync

    def advantages(self, order: Sequence[int] | None = None) -> torch.Tensor:
        self.order = list(range(len(self.keys)) if order is None else order)
        rows = {key: {name: self.rows[name][i] for name in self.rows} for i, key in enumerate(self.keys)}
        queue = trainer_base.tq = InMemoryQueue(rows)
        keys = [self.keys[i] for i in self.order]
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys))
        self.trainer._compute_advantage(batch, metrics={})
        own = set.intersection(*(set(fields) for fields in queue.rows.values())) - {"uid", "multi_modal_inputs"}
        columns = {name: padded([queue.rows[key][name] for key in keys]) for name in own}
        self.batch = TensorDict(columns, batch_size=len(keys))
        return self.in_own_order(self.batch["advantages"])


class LegacyStage(Stage):
    """What the legacy trainer's `fit` calls, on padded rows behind their prompts."""

    trainer_class = ray_trainer.RayPPOTrainer

    def output_of_the_workers(self, _: Any) -> TensorDict:
        """An engine returns its value for a token at the position before it."""

        def output(name: str) -> torch.Tensor:
            values = zip(self.rows[name], self.rows["prompts"], strict=True)
            rows = [F.pad(value, (len(prompt) - 1, 1)) for value, prompt in values]
            return _nested([rows[i] for i in self.order])

        return get_tensordict(
            {"entropy": output("entropy"), "log_probs": output("old_log_probs")}, {"metrics": {"mfu": 0.0}}
        )

    def data(self, order: Sequence[int] | None = None) -> DataProto:
        """The rows behind their prompts, padded as the agent loop pads them, after the old-log-prob pass."""
        self.order = list(range(len(self.keys)) if order is None else order)
        fields = {name: [self.rows[name][i] for i in self.order] for name in self.rows}
        prompts = padded([ids.flip(0) for ids in fields["prompts"]]).flip(1)
        prompt_mask = padded([torch.ones_like(ids) for ids in fields["prompts"]]).flip(1)
        attention_mask = torch.cat([prompt_mask, padded([torch.ones_like(ids) for ids in fields["responses"]])], dim=1)
        tensors = {
            "prompts": prompts,
            "responses": padded(fields["responses"]),
            "input_ids": torch.cat([prompts, padded(fields["responses"])], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": padded(fields["response_mask"]),
        }
        if "rollout_log_probs" in self.rows:
            tensors["rollout_log_probs"] = padded(fields["rollout_log_probs"])
        return DataProto.from_dict(tensors, non_tensors={"uid": np.array(fields["uid"], dtype=object)})

    def old_log_prob_pass(self, order: Sequence[int] | None = None) -> DataProto:
        """What `fit` does before it computes advantages, in its order."""
        data = self.data(order)
        self.trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=self.output_of_the_workers)
        old_log_prob, _ = self.trainer._compute_old_log_prob(data)
        old_log_prob.batch.pop("entropys")
        data = data.union(old_log_prob)
        rewards = padded([self.rows["rm_scores"][i] for i in self.order])
        data.batch["token_level_rewards"] = data.batch["token_level_scores"] = rewards
        if "rollout_log_probs" in self.rows:
            data, _ = compute_rollout_correction_and_add_to_batch(data, self.config.algorithm.rollout_correction)
        return data

    def compute_advantage(self, data: DataProto) -> DataProto:
        """verl's function of this name."""
        algorithm = self.config.algorithm
        data = ray_trainer.compute_advantage(data, adv_estimator=algorithm.adv_estimator, config=algorithm)
        self.batch = data.batch
        return data

    def advantages(self, order: Sequence[int] | None = None) -> torch.Tensor:
        return self.in_own_order(self.compute_advantage(self.old_log_prob_pass(order)).batch["advantages"])


STAGES: dict[str, type[Stage]] = {"v1": V1Stage, "legacy": LegacyStage}
