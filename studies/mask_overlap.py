"""Which tokens the arms of block 7 mask on completions of the starts, before any update: two that mask alike are one.

python -m studies.mask_overlap [SEED …]
"""

import random
import sys
from itertools import combinations
from pathlib import Path

import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl.algorithm.conflict import compute_conflict_mask
from studies import variants
from studies.fast import read_scores
from studies.model import pad_rows, sample
from studies.plan import LEGS, ROOT
from studies.tasks import open_task

QUESTIONS, COMPLETIONS = 16, 8


def masks_of(seed: int, outputs: Path) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    """The masks of each arm on own tokens, (tokens,) bool, the sign of A there, and the number of mixed groups."""
    task = open_task(LEGS, seed, outputs)
    asked = random.Random(seed).sample(task.train, QUESTIONS)
    generator = torch.Generator().manual_seed(1000 + seed)
    prompts, eos = [question.prompt for question in asked], task.tokenizer.eos_token_id
    (rollouts,) = sample(
        task.shape, [task.weights], prompts, COMPLETIONS, task.limit, 1.0, eos, [generator], LEGS.dtype
    )
    responses, mask = (pad_rows([getattr(r, name) for r in rollouts]) for name in ("responses", "response_mask"))
    scores = torch.tensor([parts["score"] for parts in read_scores(rollouts, asked, task, "paper")])
    index = [row // COMPLETIONS for row in range(len(responses))]
    rewards = torch.zeros(mask.shape).index_put((torch.arange(len(scores)), torch.tensor(0)), scores.float())
    a = compute_grpo_outcome_advantage(rewards, mask, index)[0][:, 0]
    own = mask.bool()

    def flat(found: list[list[bool]]) -> torch.Tensor:
        return torch.tensor([value for row in found for value in row])

    ids = variants.own_tokens(responses, mask)
    backward = compute_conflict_mask(responses, mask, a, index, masks="backward")[own]
    forward = {
        name: flat(of(ids, index, a.tolist()))
        for name, of in (("leading", variants.leading), ("common", variants.common), ("agreed", variants.agreed))
    }
    assert torch.equal(forward["leading"], compute_conflict_mask(responses, mask, a, index, masks="forward")[own])
    signs = a.sign().unsqueeze(-1).expand(mask.shape)[own]
    mixed = sum(bool((a[i : i + COMPLETIONS] != 0).any()) for i in range(0, len(a), COMPLETIONS))
    return {name: found | backward for name, found in forward.items()} | {"backward": backward}, signs, mixed


def main() -> None:
    """Print the share of own tokens that each arm masks, and of two arms the share of their tokens that both mask."""
    torch.set_num_threads(1)
    outputs = ROOT / "outputs/study"
    outputs.mkdir(parents=True, exist_ok=True)
    for seed in map(int, sys.argv[1:] or range(1, 7)):
        masks, signs, mixed = masks_of(seed, outputs)
        shares = "  ".join(f"{name} {mask.float().mean():.3f}" for name, mask in masks.items())
        skipped = "  ".join(f"{name} {mask[signs < 0].float().mean():.3f}" for name, mask in masks.items())
        alike = "  ".join(
            f"{a}-{b} {(masks[a] & masks[b]).sum() / (masks[a] | masks[b]).sum():.2f}"
            for a, b in combinations(masks, 2)
        )
        print(f"seed {seed}, {mixed} of {QUESTIONS} groups mixed\n  masked   {shares}\n  where A < 0  {skipped}")
        print(f"  in both, of those in one  {alike}", flush=True)


if __name__ == "__main__":
    main()
