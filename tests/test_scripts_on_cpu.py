"""What the benchmarks time is what users get."""

import importlib.util
from pathlib import Path

import torch

from gtpo_verl import compute_gtpo_outcome_advantage

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_bench_advantage_times_the_advantages_of_gtpo():
    spec = importlib.util.spec_from_file_location("bench_advantage", SCRIPTS / "bench_advantage.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    batch = bench.make_batch(prompts=4, group_size=8, response_length=32)
    advantages = compute_gtpo_outcome_advantage(**batch, initial_entropy=bench.INITIAL_ENTROPY)[0]
    torch.testing.assert_close(bench.gtpo(batch), advantages, rtol=0, atol=0)
