"""What the series costs a step: the dispatch of an estimator, and GTPO's advantages beside GRPO's.

    PYTHONPATH=/path/to/verl python patches/bench_dispatch.py

CPU time of one thread. The dispatch is timed with the estimator itself replaced by nothing.
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

torch.set_num_threads(1)
_CALLS = 10_000


def dispatch(name: str) -> float:
    """Microseconds of `compute_advantage` around the estimator of that name."""
    estimator = core_algos.get_adv_estimator_fn(name)
    ones = torch.ones(8, 4)
    tensors = {key: ones for key in ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared")}
    data = DataProto.from_dict(tensors, non_tensors={"uid": np.array(list("aabbccdd"), dtype=object)})
    core_algos.ADV_ESTIMATOR_REGISTRY[name] = functools.wraps(estimator)(lambda **kwargs: (ones, ones))
    call = functools.partial(compute_advantage, data, name, config={})
    times = timeit.repeat(call, number=_CALLS, repeat=5, timer=time.process_time)
    return min(times) / _CALLS * 1e6


def advantages(name: str, prompts: int, n: int, length: int) -> float:
    """Seconds of an estimator on responses of random length that share their first 20 tokens."""
    mask = (torch.arange(length) < torch.randint(length // 4, length, (prompts * n, 1))).long()
    rewards = torch.randint(0, 2, (prompts * n, 1)) * (torch.arange(length) == 0.0)
    responses = torch.randint(20, 150_000, mask.shape)
    responses[:, :20] = torch.arange(20)
    index = np.array([f"prompt {i // n}" for i in range(prompts * n)], dtype=object)
    fields = {}
    if name == "gtpo":
        asked = torch.randint(150_000, (prompts, 512)).repeat_interleave(n, 0)
        fields = {"responses": responses, "entropy": torch.rand(mask.shape), "prompts": asked}
    start = time.process_time()
    core_algos.get_adv_estimator_fn(name)(rewards.float(), mask, index, config=AlgoConfig(), **fields)
    return time.process_time() - start


for name in ("gpg", "rloo_vectorized", "optimal_token_baseline"):
    print(f"dispatch of {name}: {dispatch(name):.0f} µs")
for name in ("grpo", "gtpo"):
    if name in core_algos.ADV_ESTIMATOR_REGISTRY:
        print(f"{name}, 1024 prompts × 8 responses × 2048 tokens: {advantages(name, 1024, 8, 2048):.2f} s")
