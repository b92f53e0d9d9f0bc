"""A small batch as verl's trainers hold it after the old-log-prob pass; imported by the tests of both trainers."""

import numpy as np
import torch

from gtpo_verl import compute_gtpo_outcome_advantage

LENGTHS = [5, 4, 3, 5, 1, 6]  # the fifth row is verl's padding
UIDS = ["p", "p", "q", "p", "pad0f", "q"]
SCORES = [20.0, 10.0, 1.0, 10.0, 0.0, 20.0]


def make_rows(uids=UIDS, lengths=LENGTHS, scores=SCORES):
    """Fields of rows of these lengths and rewards; one whose uid begins with `pad` is padding."""
    generator = torch.Generator().manual_seed(0)
    return {
        "uid": uids,
        "prompts": [torch.full((3,), ord(uid[0])) for uid in uids],
        "responses": [torch.randint(1, 4, (n,), generator=generator) for n in lengths],
        "response_mask": [torch.full((n,), 1 - uid.startswith("pad")) for uid, n in zip(uids, lengths, strict=True)],
        "rm_scores": [torch.tensor([0.0] * (n - 1) + [score]) for n, score in zip(lengths, scores, strict=True)],
        "entropy": [torch.rand(n, generator=generator) for n in lengths],
        "old_log_probs": [-torch.rand(n, generator=generator) for n in lengths],
    }


def padded(rows, field):
    return torch.nn.utils.rnn.pad_sequence(rows[field], batch_first=True)


def expected(rows, **kwargs):
    arguments = {k: padded(rows, k) for k in ("response_mask", "responses", "entropy")}
    return compute_gtpo_outcome_advantage(padded(rows, "rm_scores"), index=np.array(UIDS), **arguments, **kwargs)[0]


def real_mean_entropy(rows):
    return torch.stack([e.mean() for i, e in enumerate(rows["entropy"]) if i != 4]).mean().item()
