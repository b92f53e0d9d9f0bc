"""Entropy control of GTPO (arXiv:2508.03772, Sec. 5.2): the trajectory entropy ⟨H⟩_i and the completion filter δ_i."""

import torch

from gtpo_verl.group import row_blocks


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
    return total_entropy(entropy, response_mask) / response_mask.sum(-1).clamp(min=1)


def total_entropy(entropy: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """The sum of which `compute_trajectory_entropy` is the mean, (bs,) float32 in nats."""
    total = torch.empty(entropy.shape[0], dtype=torch.float32, device=entropy.device)
    for rows in row_blocks(entropy):
        total[rows] = torch.where(response_mask[rows].bool(), entropy[rows], 0).sum(-1, dtype=torch.float32)
    return total


def compute_completion_filter(
    trajectory_entropy: torch.Tensor, threshold: float, advantages: torch.Tensor | None = None
) -> torch.Tensor:
    """The completion filter δ_i of a run in which it is active (arXiv:2508.03772, Eq. 10).

    δ_i = 1 where ⟨H⟩_i <= threshold, else 0. With `advantages`, only completions of negative advantage may be
    filtered (OnlyNeg, Fig. 4c). Whether the filter is active in a run is `GTPOConfig.filter_is_active`.

    Args:
        trajectory_entropy (torch.Tensor): (bs,), nats per token.
        threshold (float): nats per token; ln 2 in the paper.
        advantages (torch.Tensor | None): (bs,), one per completion, before the entropy term.

    Returns:
        (bs,) bool, True = kept (δ_i = 1).
    """
    keep = trajectory_entropy <= threshold
    return keep if advantages is None else keep | (advantages >= 0)
