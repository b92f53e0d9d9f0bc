"""Time and memory of GTPO's advantages (arXiv:2508.03772) against verl's own GRPO, on the same batch in one process.

    python scripts/bench_advantage.py [--completions 128 2048 8192] [--lengths 512 4096] [--threads 1 2 0] [--json]

Batches of varied lengths in groups of eight; beginnings and ends of tens of tokens are shared within a group, and the
vocabulary has 151,936 tokens. GTPO's metrics are included. verl has two estimators with the same numbers: `grpo`, its
default, is a loop in Python; `grpo_vectorized` is not. With `--threads 0` torch has as many threads as there are cores.

Runs of all three alternate. Times are medians, of the wall clock and of the process's CPU; ratios are medians of the
ratios of neighbouring runs. Memory is the peak of the process above where it was before. Wall times mean something only
on a machine that does nothing else.
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
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_grpo_vectorized_outcome_advantage

from gtpo_verl import GTPOConfig, compute_gtpo, compute_gtpo_metrics

GROUP_SIZE = 8
VOCABULARY = 151_936
INITIAL_ENTROPY = 0.3


def make_batch(prompts: int, group_size: int, response_length: int, seed: int = 0) -> dict[str, Any]:
    """Make a batch as verl's trainer holds it; a group's completions share 20 to 59 first and 10 to 29 last tokens."""
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


def grpo_vectorized(batch: dict[str, Any]) -> torch.Tensor:
    rewards = batch["token_level_rewards"]
    return compute_grpo_vectorized_outcome_advantage(rewards, batch["response_mask"], batch["index"])[0]


def gtpo(batch: dict[str, Any]) -> torch.Tensor:
    config = GTPOConfig()
    result = compute_gtpo(
        rewards=batch["token_level_rewards"].sum(-1),
        responses=batch["responses"],
        response_mask=batch["response_mask"],
        group_ids=batch["index"],
        entropy=batch["entropy"],
        config=config,
        initial_entropy=INITIAL_ENTROPY,
    )
    truncated = result.completions.lengths >= batch["responses"].shape[1]
    compute_gtpo_metrics(result, config, INITIAL_ENTROPY, truncated)
    return result.advantages


ESTIMATORS = {"gtpo": gtpo, "grpo": grpo, "grpo_vectorized": grpo_vectorized}


def time_call(function: Callable, batch: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of wall clock and of the process's CPU that a call takes."""
    wall = time.perf_counter()
    cpu = time.process_time()
    function(batch)
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def extra_peak_bytes(function: Callable, batch: dict[str, Any]) -> int:
    """Return the peak of a call's resident memory above the memory before it (Linux)."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    function(batch)
    return status("VmHWM") - before


def measure(batch: dict[str, Any], repeats: int, threads: int) -> dict[str, Any]:
    """Time all estimators in turn, after one call of each, and return the times and what follows from them."""
    torch.set_num_threads(threads)
    for function in ESTIMATORS.values():
        function(batch)
    runs = []
    for _ in range(repeats):
        runs.append({name: time_call(function, batch) for name, function in ESTIMATORS.items()})
    summary: dict[str, Any] = {"threads": threads, "runs": runs}
    for clock in ("wall", "cpu"):
        for name in ESTIMATORS:
            summary[f"{name}_{clock}_ms"] = 1000 * statistics.median(run[name][clock] for run in runs)
        for name in ("grpo", "grpo_vectorized"):
            ratios = [run["gtpo"][clock] / run[name][clock] for run in runs]
            summary[f"{clock}_ratio_to_{name}"] = statistics.median(ratios)
    responses_bytes = batch["responses"].numel() * batch["responses"].element_size()
    for name in ("gtpo", "grpo"):
        summary[f"{name}_extra_peak_over_responses"] = extra_peak_bytes(ESTIMATORS[name], batch) / responses_bytes
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--completions", type=int, nargs="+", default=[128, 2048, 8192], help="of a batch")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096], help="longest response, in tokens")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 0], help="of torch; 0: one per core")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON, raw runs included")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    threads = list(dict.fromkeys(number or cores for number in args.threads))

    results = []
    for completions in args.completions:
        for length in args.lengths:
            batch = make_batch(completions // GROUP_SIZE, GROUP_SIZE, length)
            for number in threads:
                size = {"completions": completions, "response_length": length}
                results.append(size | measure(batch, args.repeats, number))
    if args.json:
        machine = {
            "torch": torch.__version__,
            "cores": cores,
            "processor": platform.machine(),
            "load_average": os.getloadavg(),
        }
        print(json.dumps({**machine, "results": results}, indent=2))
        return
    print("| completions × tokens | threads | GTPO, ms: wall, CPU | / grpo: wall, CPU | / grpo_vectorized: wall, CPU |")
    print("|---|---|---|---|---|")
    for result in results:
        print(
            f"| {result['completions']:,} × {result['response_length']:,} | {result['threads']} "
            f"| {result['gtpo_wall_ms']:.1f}, {result['gtpo_cpu_ms']:.1f} "
            f"| {result['wall_ratio_to_grpo']:.2f}, {result['cpu_ratio_to_grpo']:.2f} "
            f"| {result['wall_ratio_to_grpo_vectorized']:.1f}, {result['cpu_ratio_to_grpo_vectorized']:.1f} |"
        )


if __name__ == "__main__":
    main()
