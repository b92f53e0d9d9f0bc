"""Time and memory of GTPO's advantages against verl's own GRPO, on the same batch in one process.

    python scripts/bench_advantage.py [--repeats 7] [--threads N] [--json]

Batches of 8,192 completions with varied lengths, beginnings and ends of tens of tokens shared within a
group, a vocabulary of 151,936; GTPO's metrics included. The floor reads `token_level_rewards`, `response_mask` and
`entropy` once and writes `advantages` once.

Runs alternate. Times are of the process's CPU, so that other processes count less; they are medians, and ratios the
medians of the ratios of neighbouring runs. Memory is the peak of the process above where it was before.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl import GTPOConfig
from gtpo_verl.algorithm.advantage import compute_gtpo
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics

SIZES = [(1024, 8, 4096), (512, 16, 8192), (128, 64, 8192)]
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
    result = compute_gtpo(
        rewards=batch["token_level_rewards"].sum(-1),
        responses=batch["responses"],
        response_mask=batch["response_mask"],
        group_ids=completions,
        entropy=batch["entropy"],
        config=config,
        initial_entropy=INITIAL_ENTROPY,
    )
    truncated = completions.lengths >= batch["responses"].shape[1]
    compute_gtpo_metrics(result, config, INITIAL_ENTROPY, truncated)
    return result.advantages


def floor(batch: dict[str, Any]) -> torch.Tensor:
    for field in ("token_level_rewards", "response_mask", "entropy"):
        batch[field].sum(-1)
    return torch.full_like(batch["entropy"], 1.0)


def seconds(function: Callable, batch: dict[str, Any]) -> float:
    start = time.process_time()
    function(batch)
    return time.process_time() - start


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each")
    parser.add_argument("--threads", type=int, default=None, help="torch threads; torch's default otherwise")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, raw runs included")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    results = [measure(size, args.repeats) for size in SIZES]
    if args.json:
        machine = {
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "cores": len(os.sched_getaffinity(0)),
            "processor": platform.machine(),
            "load_average": os.getloadavg(),
        }
        print(json.dumps({**machine, "results": results}, indent=2))
        return
    print("| prompts × G, length | GRPO s | GTPO s | GTPO / GRPO | GTPO / floor | extra peak / responses (GRPO) |")
    print("|---|---|---|---|---|---|")
    for r in results:
        print(
            f"| {r['prompts']:,} × {r['group_size']}, {r['response_length']:,} | {r['grpo_s']:.3f} | {r['gtpo_s']:.3f} "
            f"| {r['ratio_to_grpo']:.2f} | {r['ratio_to_floor']:.2f} | {r['extra_peak_over_responses']:.2f} "
            f"({r['grpo_extra_peak_over_responses']:.2f}) |"
        )


if __name__ == "__main__":
    main()
