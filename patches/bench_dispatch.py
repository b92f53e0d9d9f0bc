"""Measure what the series costs a step: the dispatch of an estimator, and GTPO's advantages beside GRPO's.

    PYTHONPATH=/path/to/verl python patches/bench_dispatch.py

The numbers are CPU time of one thread. The dispatch is timed with an estimator that does nothing.
"""

import functools
import time
import timeit

import numpy as np
import torch
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage

CALLS = 10_000
DISPATCHED = ("gpg", "rloo_vectorized", "optimal_token_baseline")
PROMPTS = 1024
RESPONSES = 8  # to each prompt
LENGTH = 2048
SHARED_TOKENS = 20  # at the beginning of every response


def time_dispatch(name: str) -> float:
    """Return the microseconds that `compute_advantage` takes around the estimator of that name."""
    ones = torch.ones(8, 4)
    fields = ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")
    uids = np.array(list("aabbccdd"), dtype=object)
    data = DataProto.from_dict({field: ones for field in fields}, non_tensors={"uid": uids})

    # `wraps` keeps the signature, by which verl decides what the estimator gets.
    @functools.wraps(core_algos.get_adv_estimator_fn(name))
    def do_nothing(**kwargs):
        return ones, ones

    core_algos.ADV_ESTIMATOR_REGISTRY[name] = do_nothing
    call = functools.partial(compute_advantage, data, name, config={})
    seconds = timeit.repeat(call, number=CALLS, repeat=5, timer=time.process_time)
    return min(seconds) / CALLS * 1e6


def time_advantages(name: str) -> float:
    """Return the seconds that an estimator takes for responses of random length whose beginnings are equal."""
    rows = PROMPTS * RESPONSES
    lengths = torch.randint(LENGTH // 4, LENGTH, (rows, 1))
    response_mask = (torch.arange(LENGTH) < lengths).long()

    # The reward is 0 or 1, on the first token.
    rewards = torch.zeros(rows, LENGTH)
    rewards[:, 0] = torch.randint(0, 2, (rows,))

    responses = torch.randint(SHARED_TOKENS, 150_000, (rows, LENGTH))
    responses[:, :SHARED_TOKENS] = torch.arange(SHARED_TOKENS)
    index = np.repeat([f"prompt {i}" for i in range(PROMPTS)], RESPONSES).astype(object)
    prompts = torch.randint(150_000, (PROMPTS, 512)).repeat_interleave(RESPONSES, 0)
    entropy = torch.rand(rows, LENGTH)
    fields = {"responses": responses, "entropy": entropy, "prompts": prompts} if name == "gtpo" else {}

    estimator = core_algos.get_adv_estimator_fn(name)
    start = time.process_time()
    estimator(rewards, response_mask, index, config=AlgoConfig(), **fields)
    return time.process_time() - start


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in DISPATCHED:
        print(f"dispatch of {name}: {time_dispatch(name):.0f} µs")
    for name in ("grpo", "gtpo"):
        if name in core_algos.ADV_ESTIMATOR_REGISTRY:
            size = f"{PROMPTS} prompts × {RESPONSES} responses × {LENGTH} tokens"
            print(f"{name}, {size}: {time_advantages(name):.2f} s")
