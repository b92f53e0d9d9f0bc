"""Do the patched verl and the stock verl with the plugin compute the same GTPO (arXiv:2508.03772), bit for bit?

    python patches/same_numbers.py compute OUT.pt        with the verl that is first on sys.path
    python patches/same_numbers.py compare A.pt B.pt …

`compute` sends random batches through the V1 trainer's own `_compute_advantage`, with TransferQueue replaced by a
dictionary, and through the registered policy loss. Nothing here knows which of the two implementations it calls.
"""

import itertools
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch

ROWS, LENGTH, PADDING = 40, 48, 3
SETTINGS: list[dict[str, Any]] = [
    {},
    {
        "completion_filter": "on",
        "entropy_coeff": 0.37,
        "conflict_weight_positive": 1.7,
        "conflict_weight_negative": 0.3,
    },
    {"completion_filter": "off", "entropy_coeff": 0.0},
    {"initial_entropy": 0.5, "entropy_threshold": 0.6},
    {"conflict_weight_positive": 1.0, "conflict_weight_negative": 1.0},
]
BATCHES = 20


def random_batch(generator: torch.Generator, batch_number: int) -> dict[str, Any]:
    """Groups of unequal size, tool output inside responses, padding rows; a small vocabulary, so that tokens conflict.

    Returns:
        The fields that a trainer keeps in TransferQueue: rows of unequal length as nested tensors.
    """
    from tensordict.tensorclass import NonTensorStack

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator)

    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    uids = [f"p{i}" for i in torch.randint(0, 6, (ROWS,), generator=generator).tolist()]
    # Of the three kinds of reward, the first makes groups of equal rewards.
    rewards = [(rand(ROWS) < 0.7).float() * 0.1, rand(ROWS), torch.randn(ROWS, generator=generator)][batch_number % 3]
    rows: dict[str, list[torch.Tensor]] = {"responses": [], "response_mask": [], "entropy": [], "rm_scores": []}
    for row, length in enumerate(lengths.tolist()):
        own = (rand(length) < 0.85).long() if row % 4 == 0 else torch.ones(length, dtype=torch.int64)
        own[0] = 1
        score = torch.zeros(length)
        score[-1] = rewards[row]
        rows["responses"].append(torch.randint(0, 4, (length,), generator=generator))
        rows["response_mask"].append(own)
        rows["entropy"].append(rand(length) * 2 * rand(1))
        rows["rm_scores"].append(score)
    for _ in range(PADDING):
        uids.append("pad")
        for name, value in (("responses", 3), ("response_mask", 0), ("entropy", 1.5), ("rm_scores", 0.0)):
            rows[name].append(torch.tensor([value]))
    fields = {name: torch.nested.as_nested_tensor(tensors, layout=torch.jagged) for name, tensors in rows.items()}
    return {"uid": NonTensorStack(*uids), **fields}


def trainer_config(gtpo: dict[str, Any], checkpoints: str) -> Any:
    """verl's own default config, set up for GTPO; `++` because only the patched verl has the keys."""
    from hydra import compose, initialize_config_module

    overrides = ["algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8"]
    overrides += [f"trainer.default_local_dir={checkpoints}", "trainer.resume_mode=disable"]
    overrides += [f"++algorithm.gtpo.{key}={value}" for key, value in gtpo.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def advantages(gtpo: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Advantages of the batches of one run; the initial entropy is measured on its first."""
    from tensordict import TensorDict
    from verl.trainer.ppo.v1 import trainer_base

    generator = torch.Generator().manual_seed(seed)
    found = []
    with tempfile.TemporaryDirectory() as checkpoints:
        trainer = SimpleNamespace(config=trainer_config(gtpo, checkpoints), global_steps=1, adv_estimator_state={})
        compute_advantage = trainer_base.PPOTrainer._compute_advantage.__get__(trainer)
        for number in range(BATCHES):
            stored = random_batch(generator, number)
            size = ROWS + PADDING
            put: dict[str, Any] = {}
            trainer_base.tq = SimpleNamespace(
                kv_batch_get=lambda keys, partition_id, select_fields, stored=stored, size=size: TensorDict(
                    {name: stored[name] for name in select_fields if name in stored}, batch_size=size
                ),
                kv_batch_put=lambda keys, partition_id, fields, put=put: put.update(fields),
            )
            batch = _Batch(keys=[f"{i}_0_0" for i in range(size)], partition_id="train", tags=[{}] * size)
            compute_advantage(batch, {})
            found.append(put["advantages"].values())
    return found


class _Batch(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.keys)


def losses(seed: int) -> list[torch.Tensor]:
    """Loss, gradient and metric of the registered policy loss."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(seed)
    found = []
    for mode, with_weights in itertools.product(("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"), (0, 1)):
        old_log_prob = torch.randn(ROWS, LENGTH, generator=generator)
        log_prob = (old_log_prob + 0.5 * torch.randn(ROWS, LENGTH, generator=generator)).requires_grad_()
        response_mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).long()
        weights = torch.rand(ROWS, LENGTH, generator=generator) if with_weights else None
        advantage = torch.randn(ROWS, LENGTH, generator=generator)
        info = {"dp_size": 2, "batch_num_tokens": 3 * int(response_mask.sum()), "global_batch_size": 3 * ROWS}
        config = SimpleNamespace(global_batch_info=info)
        loss, metrics = get_policy_loss_fn("gtpo")(
            old_log_prob, log_prob, advantage, response_mask, mode, config, weights
        )
        loss.backward()
        found += [loss.detach(), log_prob.grad, torch.tensor(metrics["actor/ppo_kl"])]
    return found


def compute(path: str) -> None:
    """Write all numbers, and whose they are, to `path`."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

    numbers: dict[str, Any] = {f"advantages {gtpo}": advantages(gtpo, seed) for seed, gtpo in enumerate(SETTINGS)}
    numbers["loss"] = losses(seed=0)
    numbers["served by"] = f"{get_adv_estimator_fn('gtpo').__module__}, {get_policy_loss_fn('gtpo').__module__}"
    torch.save(numbers, path)


def compare(paths: list[str]) -> int:
    """Print where the files differ; 0 if nowhere, and if they do not all come from the same implementation."""
    files = [torch.load(path) for path in paths]
    servers = [file.pop("served by") for file in files]
    print("\n".join(f"{path}: estimator and loss of {server}" for path, server in zip(paths, servers, strict=True)))
    different = [
        f"{path}: {name}, tensor {i}"
        for path, file in zip(paths, files, strict=True)
        for name, tensors in files[0].items()
        for i, (a, b) in enumerate(zip(tensors, file[name], strict=True))
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.int32), b.view(torch.int32))
    ]
    print("\n".join(different))
    batches = [tensor for name, tensors in files[0].items() if name != "loss" for tensor in tensors]
    print(
        f"{len(set(servers))} implementations, {len(batches)} batches with {sum(x.numel() for x in batches)} "
        f"advantages, {len(files[0]['loss']) // 3} losses with gradients: {len(different)} differ in any bit"
    )
    return 1 if different or len(set(servers)) < 2 else 0


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "compare":
        sys.exit(compare(arguments))
    compute(*arguments)
