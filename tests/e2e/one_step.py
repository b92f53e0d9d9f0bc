"""One step of verl's V1 trainer on given rollouts, split in many ways; run by test_parallelism_on_cpu.py.

    python tests/e2e/one_step.py TASK OUT    writes OUT/<mode>/<split>.pt for every mode and split

The modes are where GTPO's entropy comes from: `old_log_prob`, and then `update`, under bypass mode, whose rollout
log-probs are those that the other mode has computed.
"""

import sys
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import torch
import torch.distributed as dist
from harness.one_process import N, be_rank, rollouts, step
from transformers import AttentionInterface, AutoTokenizer
from transformers.integrations.flash_attention import flash_attention_forward
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import padding_utils

PROMPTS = 4
ROWS_IN_UPDATE = PROMPTS * N


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


def packed_attention(query, key, value, attention_mask, query_length, *args, position_ids, softmax_scale, **kwargs):
    """Causal attention within each of the rows that are packed into one (1, length, heads, head_dim), on CPU."""
    row = (position_ids == 0).cumsum(-1)
    mask = (row.unsqueeze(-1) == row.unsqueeze(-2)).tril().unsqueeze(1)
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=softmax_scale)
    return output.transpose(1, 2)


def run(rank, world_size, store, task, out):
    be_rank(rank, world_size, store)
    AttentionInterface.register("ulysses_on_cpu", flash_attention_forward)
    padding_utils.uuid = SimpleNamespace(uuid4=lambda: UUID(int=0))  # padding rows have one name in all processes
    monkey_patch._flash_attention_forward = packed_attention  # what verl's Ulysses calls between its all-to-alls
    rows = rollouts(AutoTokenizer.from_pretrained(task / "model"), PROMPTS)
    for seed, (name, overrides) in enumerate(SPLITS[world_size].items()):
        for mode, more in MODES.items():
            result = step(
                task, out, [f"data.train_batch_size={PROMPTS}", *overrides, *more], seed + 10 * world_size, rows
            )
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
