"""A step of verl's V1 trainer in one process, without Ray and TransferQueue, for tests and benchmarks.

Trainer, worker, FSDP engine and loss are verl's, with the plugin's hooks in them. Every process runs the same trainer,
holds all rows in a dictionary, and is itself one rank of the worker group.
"""

import os
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.stages import InMemoryQueue
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import config as verl_config
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from gtpo_verl.reward.score import compute_score
from recipes.tasks import tiny

ROOT = Path(__file__).resolve().parents[3]
N = 8
ENTROPY_THRESHOLD = 0.4
LR, MAX_GRAD_NORM = 1.0, 0.5

# The gradient is what a split may change. AdamW's first step would turn the rounding of tiny ones into whole steps.
OVERRIDES = [
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.calculate_log_probs=false",
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    f"actor_rollout_ref.actor.optim.lr={LR}",
    f"actor_rollout_ref.actor.optim.clip_grad={MAX_GRAD_NORM}",
    "algorithm.gtpo.completion_filter=always",
    f"+algorithm.gtpo.entropy_threshold={ENTROPY_THRESHOLD}",
]


def row(uid, prompt, ids, score, mask=None):
    """Fields of a completion as the agent loop puts them; its own tokens are those of the mask, or all."""
    mask = torch.ones(len(ids), dtype=torch.long) if mask is None else torch.tensor(mask)
    return {
        "uid": uid,
        "prompts": torch.tensor(prompt),
        "responses": torch.tensor(ids),
        "input_ids": torch.tensor(prompt + ids),
        "position_ids": torch.arange(len(prompt + ids)),
        "response_mask": mask,
        "loss_mask": mask,
        "rm_scores": torch.tensor([0.0] * (len(ids) - 1) + [score]),
    }


def rollouts(tokenizer, prompts):
    """{key: fields} of so many prompts: groups of 8, one of 7, and in every third row a tool's tokens."""
    rng, config = random.Random(0), tiny.WarmStartConfig()
    rows: dict[str, dict[str, Any]] = {}
    questions = {question.text: question for question in tiny.two_digit()}
    for question in range(prompts):
        asked = questions[f"{rng.randrange(10, 100)}+{rng.randrange(10, 100)}="]
        prompt = tiny.encode_prompt(tokenizer, asked.text)
        for session in range(N - (question == 0)):
            text = tiny.completion_text(asked, rng, config)
            ids = tokenizer.encode(text)[: rng.choice([64, 64, 64, 9])]
            mask = [0 if len(rows) % 3 == 0 and 5 <= t < 8 else 1 for t in range(len(ids))]
            score = compute_score("arithmetic", text, asked.answer)["score"]
            rows[f"question{question}_{session}_0"] = row(f"question{question}", prompt, ids, score, mask)
    return rows


class WorkerGroup:
    """One rank's part of what verl's worker group does for the trainer."""

    def __init__(self, worker, queue, mesh="actor"):
        self.worker, self.queue = worker, queue
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, worker._query_dispatch_info(mesh))
        self._dispatch_info = {"actor": ranks}
        self.dp_rank, self.dp_size = ranks[dist.get_rank()], max(ranks) + 1

    def _own(self, batch):
        chunk = len(batch.keys) // self.dp_size
        keys = batch.keys[self.dp_rank * chunk : (self.dp_rank + 1) * chunk]
        data = self.queue.kv_batch_get(keys, batch.partition_id)
        tu.assign_non_tensor(data, **batch.extra_info)
        return keys, data

    def compute_log_prob(self, batch):
        keys, data = self._own(batch)
        output = self.worker.compute_log_prob(data)
        mine = {}  # of the ranks that share their rows, one has the output
        if output is not None:
            mine = {key: {name: output[name][i] for name in ("log_probs", "entropy")} for i, key in enumerate(keys)}
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        for rows in everyones:
            for key, fields in rows.items():
                self.queue.rows[key].update(fields)
        return batch

    def update_actor(self, batch):
        outputs = [self.worker.update_actor(self._own(batch)[1])]
        dist.broadcast_object_list(outputs)
        return outputs[0]


def make_trainer(task, folder, overrides):
    """verl's trainer with the CPU recipe's config, its actor in this process, and no rows yet."""
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        paths = [f"task_dir={task}", f"trainer.default_local_dir={folder}"]
        config = compose("gtpo_cpu", overrides=[*paths, *overrides])
    OmegaConf.resolve(config)
    verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)
    worker = ActorRolloutRefWorker(config=config.actor_rollout_ref, role="actor")
    worker.init_model()
    trainer = PPOTrainerSync.__new__(PPOTrainerSync)
    trainer.config, trainer.global_steps, trainer.use_critic = config, 1, False
    trainer.tokenizer = AutoTokenizer.from_pretrained(task / "model")
    trainer.actor_rollout_wg = WorkerGroup(worker, InMemoryQueue({}))
    return trainer


def take(trainer, rows, seed):
    """The rows as the trainer's next batch, in another order by each seed."""
    queue = padding_utils.tq = trainer_base.tq = trainer.actor_rollout_wg.queue = InMemoryQueue(rows)
    keys = random.Random(seed).sample(sorted(rows), len(rows))
    tags = [{"seq_len": len(rows[key]["input_ids"])} for key in keys]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    batch.extra_info["temperature"] = trainer.config.actor_rollout_ref.rollout.temperature
    return queue, trainer._balance_batch(batch, {})


def train_on(trainer, batch, metrics):
    """The trainer's step from the rollouts on, all but reward and weight sync; returns the batch of the update."""
    extra_info = batch.extra_info
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch.extra_info = extra_info
    if hasattr(trainer, "ref_policy_wg"):
        trainer._compute_ref_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch.extra_info = extra_info
    trainer._update_actor(batch, metrics)
    return batch


def step(task, out, overrides, seed, rows):
    """The parameters after one step, its metrics and the rows."""
    # Every rank is a driver here, with a record of its own.
    trainer = make_trainer(task, out / f"rank{os.environ['RANK']}", [*OVERRIDES, *overrides])
    queue, batch = take(trainer, rows, seed)
    metrics: dict[str, Any] = {}
    batch = train_on(trainer, batch, metrics)
    engine = trainer.actor_rollout_wg.worker.actor.engine
    parameters = {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}
    return {"parameters": parameters, "metrics": metrics, "rows": queue.rows, "in_update": len(batch.keys)}


def be_rank(rank, world_size, store):
    """What verl's workers read of the environment that Ray gives them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{store}"}
    torch.set_num_threads(1)
