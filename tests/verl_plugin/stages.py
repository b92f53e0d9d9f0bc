"""The advantage stage and the update of verl's trainers, V1 and legacy, on the rows of `rollout_batch`.

TransferQueue is a dictionary, and the workers are what they return.
"""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from in_memory_queue import InMemoryQueue
from rollout_batch import UIDS
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.utils.tensordict_utils import get_tensordict

from gtpo_verl.verl_plugin.update_pass import ENTROPIES, Columns, RowEntropy, apply_entropy

KEYS = [f"{uid}_{i}_0" for i, uid in enumerate(UIDS)]


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Stage:
    """A trainer of verl at one step.

    Args:
        config: verl's.
        rows: fields of the rows, lists of tensors.
        global_steps: verl's.
        keys: of the rows in TransferQueue.
    """

    def __init__(self, config, rows, global_steps=1, keys=KEYS):
        self.config, self.rows, self.keys = config, rows, keys
        self.trainer = self.make_trainer()
        self.trainer.config, self.trainer.global_steps = config, global_steps

    def step(self, order=None):
        """What the trainer logs of a step and its update, and the advantages in the rows' own order."""
        advantages = self.advantages(order)
        return self.update(), advantages

    def update(self):
        """What the trainer logs of its actor's update; `self.used` are then the advantages that it used, in the order
        of the batch."""
        metrics = {"actor/pg_loss": [1.0]}
        if columns := Columns.of(self.batch):
            entropy, mask = (padded([self.rows[name][i] for i in self.order]) for name in ("entropy", "response_mask"))
            self.used, means = apply_entropy(self.batch["advantages"], mask, entropy, columns)
            tokens = [row.tolist() if dumped else None for row, dumped in zip(entropy, columns.dumped, strict=True)]
            found = [*map(RowEntropy, columns.row.tolist(), means.tolist(), tokens)]
            metrics[f"actor/{ENTROPIES}"] = found[3:] + found[:3]  # workers return them in an order of their own
        logged = reduce_metrics(metrics)
        assert logged.pop("actor/pg_loss") == 1.0
        return logged

    def in_own_order(self, values):
        own = torch.empty_like(values)
        own[self.order] = values
        return own


class V1Stage(Stage):
    def make_trainer(self):
        return PPOTrainerSync.__new__(PPOTrainerSync)

    def advantages(self, order=None):
        self.order = list(range(len(self.keys)) if order is None else order)
        queue = trainer_base.tq = InMemoryQueue.of_columns(self.rows, self.keys)
        keys = [self.keys[i] for i in self.order]
        batch = KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys))
        self.trainer._compute_advantage(batch, metrics={})
        own = set.intersection(*(set(fields) for fields in queue.rows.values())) - {"uid"}
        self.batch = {name: padded([queue.rows[key][name] for key in keys]) for name in own}
        return self.in_own_order(self.batch["advantages"])


class LegacyStage(Stage):
    def make_trainer(self):
        trainer = ray_trainer.RayPPOTrainer.__new__(ray_trainer.RayPPOTrainer)
        trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=self.output_of_the_workers)
        return trainer

    def output_of_the_workers(self, _):
        """An engine returns its value for a token at the position before it."""

        def output(name):
            rows = [F.pad(self.rows[name][i], (len(self.rows["prompts"][i]) - 1, 1)) for i in self.order]
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

        return get_tensordict(
            {"entropy": output("entropy"), "log_probs": output("old_log_probs")}, {"metrics": {"mfu": 0.0}}
        )

    def data(self, order=None):
        """The rows behind their prompts, padded as the agent loop pads them, after the old-log-prob pass."""
        self.order = list(range(len(UIDS)) if order is None else order)
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

    def old_log_prob_pass(self, order=None):
        """What `fit` does before it computes advantages, in its order."""
        data = self.data(order)
        old_log_prob, _ = self.trainer._compute_old_log_prob(data)
        old_log_prob.batch.pop("entropys")
        data = data.union(old_log_prob)
        rewards = padded([self.rows["rm_scores"][i] for i in self.order])
        data.batch["token_level_rewards"] = data.batch["token_level_scores"] = rewards
        if "rollout_log_probs" in self.rows:
            data, _ = compute_rollout_correction_and_add_to_batch(data, self.config.algorithm.rollout_correction)
        return data

    def compute_advantage(self, data):
        algorithm = self.config.algorithm
        data = ray_trainer.compute_advantage(data, adv_estimator=algorithm.adv_estimator, config=algorithm)
        self.batch = data.batch
        return data

    def advantages(self, order=None):
        return self.in_own_order(self.compute_advantage(self.old_log_prob_pass(order)).batch["advantages"])


STAGES = {"v1": V1Stage, "legacy": LegacyStage}
