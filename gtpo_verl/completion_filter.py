"""Entropy control of GTPO (arXiv:2508.03772, Sec. 5.2): the mean entropy ⟨H⟩_i, and which completions are dropped.

Completions are dropped (δ_i = 0, Eq. 10) only in a run for which `GTPOConfig.filter_is_active`.
"""

from typing import Any

import torch

from gtpo_verl.config import GTPOConfig
from gtpo_verl.group import Completions, rows_of


@torch.no_grad()
def compute_trajectory_entropy(entropy: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Mean entropy of each completion, ⟨H⟩_i = Σ_t H(π(·|s_t)) / |o_i| (arXiv:2508.03772, Sec. 4.2).

    Args:
        entropy (torch.Tensor): (bs, response_length), Shannon entropy of the policy at each token, in nats; any
            floating dtype. Values off the mask are never read into the mean.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens.

    Returns:
        (bs,) float32, nats per token; 0 for a row without tokens. Carries no gradient.
    """
    return mean_entropy(entropy, Completions(response_mask, range(len(response_mask))))


def mean_entropy(entropy: torch.Tensor, completions: Completions) -> torch.Tensor:
    """Like `compute_trajectory_entropy`, from `Completions` that the caller already has."""
    rows: Any = rows_of(entropy.detach().float())
    # In float64, so that neither padding nor the order of summation changes a bit of the float32 that is left.
    totals = [rows[row, own].sum(dtype=float) for row, own in enumerate(completions.own)]
    return torch.as_tensor(totals, dtype=torch.float32, device=entropy.device) / completions.lengths.clamp(min=1)


def compute_completion_filter(
    trajectory_entropy: torch.Tensor, threshold: float, advantages: torch.Tensor | None = None
) -> torch.Tensor:
    """The completion filter δ_i of a run in which it is active (arXiv:2508.03772, Eq. 10).

    δ_i = 1 where ⟨H⟩_i <= threshold, else 0. With `advantages`, only completions of negative advantage may be
    filtered (OnlyNeg, Fig. 4c).

    Args:
        trajectory_entropy (torch.Tensor): (bs,), nats per token.
        threshold (float): nats per token; ln 2 in the paper.
        advantages (torch.Tensor | None): (bs,), one per completion, before the entropy term.

    Returns:
        (bs,) bool, True = kept (δ_i = 1).
    """
    keep = trajectory_entropy <= threshold
    return keep if advantages is None else keep | (advantages >= 0)


def completions_to_keep(
    trajectory_entropy: torch.Tensor, advantages: torch.Tensor, config: GTPOConfig, initial_entropy: float | None
) -> torch.Tensor:
    """δ_i of any run, (bs,) bool: all are kept where `config.filter_is_active(initial_entropy)` is false."""
    if not config.filter_is_active(initial_entropy):
        return torch.ones_like(trajectory_entropy, dtype=torch.bool)
    signs = advantages if config.filter_scope == "negative" else None
    return compute_completion_filter(trajectory_entropy, config.entropy_threshold, signs)
