"""A small batch as verl's trainers hold it after the old-log-prob pass; imported by the tests of both trainers."""

import numpy as np
import torch

from gtpo_verl import compute_gtpo_outcome_advantage

LENGTHS = [5, 4, 3, 5, 1, 6]  # the fifth row is verl's padding
UIDS = ["p", "p", "q", "p", "pad0f", "q"]
SCORES = [20.0, 10.0, 1.0, 10.0, 0.0, 20.0]


def make_rows():
    """Fields of rows of unequal length, a padding row among them."""
    generator = torch.Generator().manual_seed(0)
    masks = [torch.ones(n, dtype=torch.int64) for n in LENGTHS]
    masks[4] = torch.zeros(1, dtype=torch.int64)
    scores = [torch.zeros(n) for n in LENGTHS]
    for score, reward in zip(scores, SCORES, strict=True):
        score[-1] = reward
    return {
        "uid": UIDS,
        "prompts": [torch.full((3,), ord(uid[0])) for uid in UIDS],
        "responses": [torch.randint(1, 4, (n,), generator=generator) for n in LENGTHS],
        "response_mask": masks,
        "rm_scores": scores,
        "entropy": [torch.rand(n, generator=generator) for n in LENGTHS],
        "old_log_probs": [-torch.rand(n, generator=generator) for n in LENGTHS],
    }


def padded(rows, field):
    return torch.nn.utils.rnn.pad_sequence(rows[field], batch_first=True)


def expected(rows, **kwargs):
    arguments = {k: padded(rows, k) for k in ("response_mask", "responses", "entropy")}
    return compute_gtpo_outcome_advantage(padded(rows, "rm_scores"), index=np.array(UIDS), **arguments, **kwargs)[0]


def real_mean_entropy(rows):
    return torch.stack([e.mean() for i, e in enumerate(rows["entropy"]) if i != 4]).mean().item()
