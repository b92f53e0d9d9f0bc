"""Do several verls compute the same GTPO (arXiv:2508.03772), bit for bit?

    python scripts/same_numbers.py compute OUT.pt v1|legacy [OUT.pt TRAINER …]
    python scripts/same_numbers.py compare A.pt B.pt …

`compute` sends random batches through that trainer's own functions, with TransferQueue or the workers replaced by what
they would return, and through the policy loss, all of the verl that is first on sys.path. Nothing here knows which verl
or which GTPO it calls.
"""

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))
from harness.stages import STAGES, Rows, padded  # noqa: E402

ROWS, LENGTH, PADDING = 40, 48, 3
# All of these batches start below ln 2. So the defaults filter, whether GTPO measures that or takes it for granted.
SETTINGS: list[dict[str, Any]] = [
    {},
    {
        "completion_filter": "always",
        "entropy_coeff": 0.37,
        "conflict_weight_positive": 1.7,
        "conflict_weight_negative": 0.3,
    },
    {"completion_filter": "never", "entropy_coeff": 0.0},
    {"completion_filter": "always", "entropy_threshold": 0.6},
    {"conflict_weight_positive": 1.0, "conflict_weight_negative": 1.0},
]
BATCHES = 20


def random_batch(generator: torch.Generator, batch_number: int) -> Rows:
    """Groups of unequal size, tool output inside responses, padding rows; few different tokens: some conflict.

    In every other batch some completions of a group answer another prompt, as a session of several outputs does.
    """

    def rand(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator)

    lengths = torch.randint(1, LENGTH + 1, (ROWS,), generator=generator)
    lengths[0] = LENGTH  # so that both trainers pad to the same width
    uids = [f"p{i}" for i in torch.randint(0, 6, (ROWS,), generator=generator).tolist()]
    # Of the three kinds of reward, the first makes groups of equal rewards, the second rewards at their group's mean.
    tenths = (rand(ROWS) * 10).round() / 10
    rewards = [(rand(ROWS) < 0.7).float() * 0.1, tenths, torch.randn(ROWS, generator=generator)][batch_number % 3]
    rows: dict[str, list[torch.Tensor]] = {"responses": [], "response_mask": [], "entropy": [], "rm_scores": []}
    for row, length in enumerate(lengths.tolist()):
        mask = torch.ones(length, dtype=torch.int64)
        if row % 4 == 0:  # tool output
            mask = (rand(length) < 0.85).long()
            mask[0] = 1
        score = torch.zeros(length)
        score[-1] = rewards[row]
        rows["responses"].append(torch.randint(0, 4, (length,), generator=generator))
        rows["response_mask"].append(mask)
        rows["entropy"].append(rand(length) * 2 * rand(1))
        rows["rm_scores"].append(score)
    for _ in range(PADDING):
        uids.append("pad")
        for name, value in (("responses", 3), ("response_mask", 0), ("entropy", 1.5), ("rm_scores", 0.0)):
            rows[name].append(torch.tensor([value]))
    prompts = [torch.tensor([1 + batch_number % 2 * (row % 3)]) for row in range(len(uids))]
    return {"uid": uids, **rows, "prompts": prompts, "old_log_probs": [-row for row in rows["entropy"]]}


def trainer_config(gtpo: dict[str, Any], checkpoints: str) -> Any:
    """Return verl's own default config, set up for GTPO; `++` because only the patched verl has the keys."""
    from hydra import compose, initialize_config_module

    overrides = ["algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8"]
    overrides += [f"trainer.default_local_dir={checkpoints}", "trainer.resume_mode=disable"]
    overrides += [f"++algorithm.gtpo.{key}={value}" for key, value in gtpo.items()]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides)


def advantages(trainer: str, gtpo: dict[str, Any], seed: int) -> list[torch.Tensor]:
    """Return the advantages of the batches of one run, a tensor of all real tokens for each.

    The first batch sets the initial entropy.
    """
    generator = torch.Generator().manual_seed(seed)
    with tempfile.TemporaryDirectory() as checkpoints:
        first, *others = (random_batch(generator, number) for number in range(BATCHES))
        stage = STAGES[trainer](trainer_config(gtpo, checkpoints), first)
        of_batches = [stage.advantages()[_real(first)]]
        for rows in others:
            stage.rows = rows
            of_batches.append(stage.advantages()[_real(rows)])
        return of_batches


def _real(rows: Rows) -> torch.Tensor:
    """Return the mask of all tokens but the padding, tool output included."""
    return padded([torch.ones_like(row) for row in rows["responses"]]).bool()


def losses(loss_mode: str, spread: float, seed: int) -> list[torch.Tensor]:
    """Return loss, gradient and metric of a policy loss in each mode; `spread` is that of the ratios' logarithms."""
    from omegaconf import OmegaConf
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(seed)
    numbers = []
    for mode, with_weights in itertools.product(("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"), (0, 1)):
        old_log_prob = torch.randn(ROWS, LENGTH, generator=generator)
        log_prob = (old_log_prob + spread * torch.randn(ROWS, LENGTH, generator=generator)).requires_grad_()
        response_mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.7).long()
        weights = torch.rand(ROWS, LENGTH, generator=generator) if with_weights else None
        advantage = torch.randn(ROWS, LENGTH, generator=generator)
        info = {"dp_size": 2, "batch_num_tokens": 3 * int(response_mask.sum()), "global_batch_size": 3 * ROWS}
        config = OmegaConf.create({"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2})
        config.global_batch_info = info
        loss, metrics = get_policy_loss_fn(loss_mode)(
            old_log_prob, log_prob, advantage, response_mask, mode, config, weights
        )
        loss.backward()
        numbers += [loss.detach(), log_prob.grad, torch.tensor(metrics["actor/ppo_kl"])]
    return numbers


def compute(path: str, trainer: str) -> None:
    """Write all numbers to `path`, with the verl, the trainer and the module that computed them."""
    import verl
    from verl.trainer.ppo.core_algos import AdvantageEstimator, get_adv_estimator_fn

    numbers: dict[str, Any] = {
        f"advantages {gtpo}": advantages(trainer, gtpo, seed) for seed, gtpo in enumerate(SETTINGS)
    }
    # A patched verl trains with vanilla, which is the same at ratio 1, before the first update of a rollout.
    loss_mode = "vanilla" if "GTPO" in AdvantageEstimator.__members__ else "gtpo"
    numbers["loss at ratio 1"] = losses(loss_mode, spread=0.0, seed=0)
    if loss_mode == "gtpo":
        numbers["loss"] = losses(loss_mode, spread=0.5, seed=0)
    server = get_adv_estimator_fn("gtpo").__module__
    numbers["source"] = f"verl {verl.__version__}, {trainer} trainer, gtpo of {server}"
    torch.save(numbers, path)


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float32 numbers, those of 0 for −0: off the mask some write the one, some the other."""
    return (values + 0.0).view(torch.int32)


def are_equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits."""
    if first.dtype != other.dtype or first.shape != other.shape:
        return False
    return torch.equal(bits(first), bits(other))


def compare(paths: list[str]) -> int:
    """Print where the files differ, and how many sources they have; 0 if there are two files or more, all equal."""
    files = [torch.load(path) for path in paths]
    sources = [file.pop("source") for file in files]
    print("\n".join(sources))
    common = [name for name in files[0] if all(name in file for file in files)]
    different = []
    for source, file in zip(sources, files, strict=True):
        for name in common:
            for number, (first, other) in enumerate(zip(files[0][name], file[name], strict=True)):
                if not are_equal(first, other):
                    different.append(f"{source}: {name}, tensor {number}")
    print("\n".join(different))

    batches = 0
    advantage_count = 0
    loss_count = 0
    for name in common:
        tensors = files[0][name]
        if name.startswith("advantages"):
            batches += len(tensors)
            advantage_count += sum(tensor.numel() for tensor in tensors)
        else:
            loss_count += len(tensors) // 3  # each with its gradient and its metric
    print(
        f"{len(set(sources))} sources, {batches} batches with {advantage_count} "
        f"advantages, {loss_count} losses with gradients: {len(different)} differ in any bit"
    )
    return 1 if different or len(paths) < 2 else 0


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "compare":
        sys.exit(compare(arguments))
    for path, trainer in zip(arguments[::2], arguments[1::2], strict=True):
        compute(path, trainer)
