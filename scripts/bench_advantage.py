"""Time and memory of GTPO's advantages against verl's own GRPO, on the same batch in one process.

    python scripts/bench_advantage.py [--stage] [--busy] [--repeats 7] [--threads N] [--json]

The estimator: batches of 8,192 completions with varied lengths, beginnings and ends of tens of tokens shared within a
group, a vocabulary of 151,936; GTPO's metrics included. The floor reads `token_level_rewards`, `response_mask` and
`entropy` once and writes `advantages` once. With --stage: the whole of `PPOTrainer._compute_advantage` for 4,096
completions, as a trainer sees it, with a TransferQueue that hands out what it holds without copying.

Runs alternate. Times are medians, ratios the medians of the ratios of neighbouring runs. Memory is the peak of the
process above where it stood. With --busy every core is kept busy by another process.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from same_numbers import trainer_config
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.v1 import trainer_base

from gtpo_verl import GTPOConfig
from gtpo_verl.advantage import apply_gtpo, compute_group_advantages
from gtpo_verl.group import Completions
from gtpo_verl.metrics import compute_gtpo_metrics

SIZES = [(1024, 8, 4096), (512, 16, 8192), (128, 64, 8192)]
STAGE_SIZES = [(512, 8, 4096), (512, 8, 8192)]
PROMPT_LENGTH = 512
VOCABULARY = 151_936
INITIAL_ENTROPY = 0.3


def make_batch(prompts: int, group_size: int, response_length: int, seed: int = 0) -> dict[str, Any]:
    """A batch as verl's trainer holds it; a group's completions share 20 to 59 first and 10 to 29 last tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = prompts * group_size

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    lengths = integers(response_length // 16, response_length + 1, (rows,)).unsqueeze(-1)
    columns = torch.arange(response_length)
    response_mask = (columns < lengths).long()
    responses = integers(0, VOCABULARY, (rows, response_length))
    for name, low, high in (("first", 20, 60), ("last", 10, 30)):
        shared = integers(0, VOCABULARY, (prompts, high)).repeat_interleave(group_size, 0)
        number = (columns if name == "first" else lengths - 1 - columns).expand(rows, -1)
        is_shared = (number >= 0) & (number < integers(low, high, (rows, 1)))
        responses = torch.where(is_shared, shared.gather(1, number.clamp(0, high - 1)), responses)
    token_level_rewards = torch.zeros(rows, response_length)
    token_level_rewards.scatter_(1, lengths - 1, integers(0, 3, (rows, 1)).float() * 10)
    uids = np.array([str(uuid.uuid4()) for _ in range(prompts)], dtype=object)
    return {
        "token_level_rewards": token_level_rewards,
        "response_mask": response_mask,
        "index": np.repeat(uids, group_size),
        "responses": responses * response_mask,
        "entropy": torch.rand(rows, response_length, generator=generator) * response_mask,
    }


def grpo(batch: dict[str, Any]) -> torch.Tensor:
    return compute_grpo_outcome_advantage(batch["token_level_rewards"], batch["response_mask"], batch["index"])[0]


def gtpo(batch: dict[str, Any]) -> torch.Tensor:
    config = GTPOConfig()
    completions = Completions(batch["response_mask"], batch["index"])
    advantages = compute_group_advantages(batch["token_level_rewards"].sum(-1), completions)
    result = apply_gtpo(advantages, completions, batch["responses"], batch["entropy"], config, INITIAL_ENTROPY)
    truncated = completions.lengths >= batch["responses"].shape[1]
    compute_gtpo_metrics(result, config, INITIAL_ENTROPY, truncated)
    return result.advantages


def floor(batch: dict[str, Any]) -> torch.Tensor:
    for field in ("token_level_rewards", "response_mask", "entropy"):
        batch[field].sum(-1)
    return torch.full_like(batch["entropy"], 1.0)


def seconds(function: Callable, batch: dict[str, Any]) -> float:
    start = time.perf_counter()
    function(batch)
    return time.perf_counter() - start


def extra_peak_bytes(function: Callable, batch: dict[str, Any]) -> int:
    """Peak resident memory of a call above the memory before it (Linux)."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    function(batch)
    return status("VmHWM") - before


def measure(size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    batch = make_batch(*size)
    for function in (grpo, gtpo, floor):
        function(batch)
    runs = [tuple(seconds(function, batch) for function in (grpo, gtpo, floor)) for _ in range(repeats)]
    responses_bytes = batch["responses"].numel() * batch["responses"].element_size()
    return {
        **dict(zip(("prompts", "group_size", "response_length"), size, strict=True)),
        "grpo_s": statistics.median(run[0] for run in runs),
        "gtpo_s": statistics.median(run[1] for run in runs),
        "floor_s": statistics.median(run[2] for run in runs),
        "ratio_to_grpo": statistics.median(run[1] / run[0] for run in runs),
        "ratio_to_floor": statistics.median(run[1] / run[2] for run in runs),
        "extra_peak_over_responses": extra_peak_bytes(gtpo, batch) / responses_bytes,
        "grpo_extra_peak_over_responses": extra_peak_bytes(grpo, batch) / responses_bytes,
        "runs_s": runs,
    }


def in_transfer_queue(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as TransferQueue holds it after the old-log-prob pass."""
    lengths = batch["response_mask"].sum(-1)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    real = batch["response_mask"].bool()

    def jagged(padded: torch.Tensor) -> torch.Tensor:
        return torch.nested.nested_tensor_from_jagged(
            padded[real], offsets, min_seqlen=int(lengths.min()), max_seqlen=int(lengths.max())
        )

    rows = len(lengths)
    prompts = torch.ones(rows, PROMPT_LENGTH, dtype=torch.int64)
    ends = torch.arange(0, rows * PROMPT_LENGTH + 1, PROMPT_LENGTH)
    return {
        "uid": NonTensorStack(*batch["index"]),
        "prompts": torch.nested.nested_tensor_from_jagged(
            prompts.flatten(), ends, min_seqlen=PROMPT_LENGTH, max_seqlen=PROMPT_LENGTH
        ),
        "rm_scores": jagged(batch["token_level_rewards"]),
        "old_log_probs": jagged(-batch["entropy"]),
        **{name: jagged(batch[name]) for name in ("responses", "response_mask", "entropy")},
    }


def measure_stage(size: tuple[int, int, int], repeats: int) -> dict[str, Any]:
    batch = make_batch(*size)
    stored, rows = in_transfer_queue(batch), len(batch["index"])
    keys = [f"{uid}_{i % size[1]}_0" for i, uid in enumerate(batch["index"])]
    meta = KVBatchMeta(keys=keys, partition_id="train", tags=[{}] * rows)
    del batch
    trainer_base.tq = SimpleNamespace(
        kv_batch_get=lambda keys, partition_id, select_fields: TensorDict(
            {name: stored[name] for name in select_fields if name in stored}, batch_size=rows
        ),
        kv_batch_put=lambda keys, partition_id, fields: meta,
    )
    with tempfile.TemporaryDirectory() as checkpoints:
        gtpo_config = trainer_config({"initial_entropy": INITIAL_ENTROPY}, checkpoints)
        grpo_config = trainer_config({}, checkpoints)
        grpo_config.algorithm.adv_estimator = "grpo"
        trainers = [SimpleNamespace(config=config, global_steps=1) for config in (grpo_config, gtpo_config)]

        def step(trainer: Any) -> None:
            trainer_base.PPOTrainer._compute_advantage.__get__(trainer)(meta, {})

        for trainer in trainers:
            step(trainer)
        runs = [tuple(seconds(step, trainer) for trainer in trainers) for _ in range(repeats)]
    return {
        **dict(zip(("prompts", "group_size", "response_length"), size, strict=True)),
        "grpo_s": statistics.median(run[0] for run in runs),
        "gtpo_s": statistics.median(run[1] for run in runs),
        "ratio_to_grpo": statistics.median(run[1] / run[0] for run in runs),
        "runs_s": runs,
    }


@contextmanager
def busy_cores(busy: bool) -> Iterator[None]:
    """A process that never waits on every core."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(len(os.sched_getaffinity(0)))] if busy else []
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="store_true", help="the whole advantage stage of verl's V1 trainer")
    parser.add_argument("--busy", action="store_true", help="keep every core busy with another process")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each")
    parser.add_argument("--threads", type=int, default=None, help="torch threads; torch's default otherwise")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, raw runs included")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    with busy_cores(args.busy):
        results = [
            (measure_stage if args.stage else measure)(size, args.repeats)
            for size in (STAGE_SIZES if args.stage else SIZES)
        ]
    if args.json:
        machine = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.machine(),
            "busy": args.busy,
            "load_average": os.getloadavg(),
            "what": "PPOTrainer._compute_advantage" if args.stage else "estimator",
        }
        print(json.dumps({**machine, "results": results}, indent=2))
        return
    print("| prompts × G, length | GRPO s | GTPO s | GTPO / GRPO | GTPO / floor | extra peak / responses (GRPO) |")
    print("|---|---|---|---|---|---|")
    for r in results:
        floor_and_memory = "– | –"
        if not args.stage:
            floor_and_memory = f"{r['ratio_to_floor']:.2f} | {r['extra_peak_over_responses']:.2f} "
            floor_and_memory += f"({r['grpo_extra_peak_over_responses']:.2f})"
        print(
            f"| {r['prompts']:,} × {r['group_size']}, {r['response_length']:,} | {r['grpo_s']:.3f} | {r['gtpo_s']:.3f} "
            f"| {r['ratio_to_grpo']:.2f} | {floor_and_memory} |"
        )


if __name__ == "__main__":
    main()
