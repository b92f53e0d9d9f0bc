"""One step of verl's V1 trainer on given rollouts, split in many ways; run by tests/e2e/test_parallelism_on_cpu.py.

Trainer, worker, FSDP engine and loss are verl's, with our hooks in them. Ray and TransferQueue are left out: every
process runs the same trainer, holds all rows in a dictionary, and is itself one rank of the worker group.

    VERL_PLATFORM=cpu python tests/one_step.py TASK OUT    writes OUT/<mode>/<split>.pt for every mode and split

The modes are where GTPO's entropy comes from: `old_log_prob`, and then `update`, under bypass mode, whose rollout
log-probs are those that the other mode has computed.
"""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from in_memory_queue import InMemoryQueue
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from transformers import AttentionInterface, AutoTokenizer
from transformers.integrations.flash_attention import flash_attention_forward
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import config as verl_config
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from gtpo_verl.cpu import tiny
from gtpo_verl.paper.reward import compute_score

ROOT = Path(__file__).resolve().parents[1]
PROMPTS, N = 4, 8
ROWS_IN_UPDATE = PROMPTS * N
ENTROPY_THRESHOLD = 0.4
LR, MAX_GRAD_NORM = 1.0, 0.5

# The gradient is what a split may change. AdamW's first step would turn the rounding of tiny ones into whole steps.
OVERRIDES = [
    f"data.train_batch_size={PROMPTS}",
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.calculate_log_probs=false",
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    f"actor_rollout_ref.actor.optim.lr={LR}",
    f"actor_rollout_ref.actor.optim.clip_grad={MAX_GRAD_NORM}",
    "algorithm.gtpo.completion_filter=always",
    f"+algorithm.gtpo.entropy_threshold={ENTROPY_THRESHOLD}",
]


def micro_batches_of(size):
    return [
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={size}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={size}",
    ]


def tokens_per_micro_batch(number):
    return [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={number}"]


PACKED = ["actor_rollout_ref.model.use_remove_padding=true"]
ULYSSES = [
    *PACKED,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
    "actor_rollout_ref.model.override_config.attn_implementation=ulysses_on_cpu",
]

# Of each number of processes: name -> overrides. The order of the rows is another one in each.
SPLITS = {
    1: {
        "one process": [],
        "micro-batches of 1": micro_batches_of(1),
        "micro-batches of 2": micro_batches_of(2),
        "micro-batches of 8": micro_batches_of(8),
        "dynamic micro-batches": tokens_per_micro_batch(200),
        "packed rows": PACKED + tokens_per_micro_batch(500),
    },
    2: {
        "dp 2": [],
        "dp 2, micro-batches of 1": micro_batches_of(1),
        "dp 2, micro-batches of 8": micro_batches_of(8),
        "dp 2, dynamic micro-batches": tokens_per_micro_batch(200),
        "sp 2": ULYSSES + tokens_per_micro_batch(250),
    },
    4: {
        "dp 4": [],
        "dp 4, micro-batches of 2": micro_batches_of(2),
        "dp 4, micro-batches of 8": micro_batches_of(8),
        "dp 4, dynamic micro-batches": tokens_per_micro_batch(150),
        "dp 2, sp 2": ULYSSES + tokens_per_micro_batch(250),
    },
}


FROM_UPDATE = ["algorithm.gtpo.entropy_from=update", "algorithm.rollout_correction.bypass_mode=true"]
MODES = {"old_log_prob": [], "update": FROM_UPDATE}


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


def rollouts(tokenizer):
    """{key: fields}: groups of 8, one of 7, and in every third row a tool's tokens."""
    rng, config = random.Random(0), tiny.WarmStartConfig()
    rows = {}
    questions = {question.text: question for question in tiny.two_digit()}
    for question in range(PROMPTS):
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
        ranks = [None] * dist.get_world_size()
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
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        for rows in everyones:
            for key, fields in rows.items():
                self.queue.rows[key].update(fields)
        return batch

    def update_actor(self, batch):
        outputs = [self.worker.update_actor(self._own(batch)[1])]
        dist.broadcast_object_list(outputs)
        return outputs[0]


def packed_attention(query, key, value, attention_mask, query_length, *args, position_ids, softmax_scale, **kwargs):
    """Causal attention within each of the rows that are packed into one (1, length, heads, head_dim), on CPU."""
    row = (position_ids == 0).cumsum(-1)
    mask = (row.unsqueeze(-1) == row.unsqueeze(-2)).tril().unsqueeze(1)
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=softmax_scale)
    return output.transpose(1, 2)


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


def step(task, out, overrides, seed, rows):
    """The parameters after one step, its metrics and the rows."""
    # Every rank is a driver here, with a record of its own.
    trainer = make_trainer(task, out / f"rank{os.environ['RANK']}", [*OVERRIDES, *overrides])
    queue, batch = take(trainer, rows, seed)
    extra_info, metrics = batch.extra_info, {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch.extra_info = extra_info
    trainer._update_actor(batch, metrics)
    engine = trainer.actor_rollout_wg.worker.actor.engine
    parameters = {name: tensor.detach().clone() for name, tensor in engine.get_per_tensor_param()[0]}
    return {"parameters": parameters, "metrics": metrics, "rows": queue.rows, "in_update": len(batch.keys)}


def be_rank(rank, world_size, store):
    """What verl's workers read of the environment that Ray gives them."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DIST_INIT_METHOD": f"file://{store}"}
    torch.set_num_threads(1)


def run(rank, world_size, store, task, out):
    be_rank(rank, world_size, store)
    AttentionInterface.register("ulysses_on_cpu", flash_attention_forward)
    padding_utils.uuid = SimpleNamespace(uuid4=lambda: UUID(int=0))  # padding rows have one name in all processes
    monkey_patch._flash_attention_forward = packed_attention  # what verl's Ulysses calls between its all-to-alls
    rows = rollouts(AutoTokenizer.from_pretrained(task / "model"))
    for seed, (name, overrides) in enumerate(SPLITS[world_size].items()):
        for mode, more in MODES.items():
            result = step(task, out, [*overrides, *more], seed + 10 * world_size, rows)
            for key, fields in rows.items():
                fields["rollout_log_probs"] = result["rows"][key]["old_log_probs"]
            if rank == 0:
                torch.save(result, out / mode / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    task, out = Path(sys.argv[1]), Path(sys.argv[2])
    for mode in MODES:
        (out / mode).mkdir()
    for world_size in SPLITS:
        arguments = world_size, out / f"store{world_size}", task, out
        # Forked, they need not import verl again.
        torch.multiprocessing.start_processes(run, arguments, nprocs=world_size, start_method="fork")
