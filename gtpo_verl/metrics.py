"""The `gtpo/*` metrics of a batch, over real completions only (rows without tokens are padding)."""

from collections.abc import Callable

import torch

from gtpo_verl.advantage import GTPOAdvantage
from gtpo_verl.config import GTPOConfig


@torch.no_grad()
def compute_gtpo_metrics(
    result: GTPOAdvantage, config: GTPOConfig, initial_entropy: float | None, truncated: torch.Tensor
) -> dict[str, float]:
    """What GTPO (arXiv:2508.03772) did to a batch, as a flat dict of floats for any logger of verl.

    A fraction `*_frac` is of all tokens (conflict, λ), of all completions (filter, sign flip) or of all groups.
    `signal_residual` tests App. 8.2: (weight added to positive completions − weight taken from negative ones) over
    their sum, each weight being |A_i| · |λ − 1| · the conflict share of the completion; 0 = total signal preserved.
    `regularizer/mean` is the mean of γ⟨H⟩_i. Entropies are in nats per token; a mean over no completions is left out.

    Args:
        result (GTPOAdvantage): of the batch.
        config (GTPOConfig): the settings it was computed with.
        initial_entropy (float | None): ⟨H⟩_ini of the run, if it is known.
        truncated (torch.Tensor): (bs,) bool, completions that reached the response limit.
    """
    rows = result.lengths > 0
    lengths = result.lengths[rows].float()
    advantages, entropy, keep = (x[rows] for x in (result.group_advantages, result.trajectory_entropy, result.keep))
    prefix_len, suffix_len, conflict_len = (x[rows].float() for x in result.conflicts[1:])
    conflict_share = conflict_len / lengths
    positive, negative = advantages > 0, advantages < 0

    metrics: dict[str, float] = {}

    def put(name: str, values: torch.Tensor, stat: Callable = torch.mean) -> None:
        if values.numel():
            metrics[f"gtpo/{name}"] = stat(values.float()).item()

    members = result.groups >= 0
    group_advantages = torch.where(members, result.group_advantages[result.groups], 0)
    group_conflict = torch.where(members, result.conflicts.conflict_len[result.groups], 0)
    group_keep = torch.where(members, result.keep[result.groups], False)

    tokens = lengths.sum().clamp(min=1)
    metrics["gtpo/conflict/token_frac"] = (conflict_len.sum() / tokens).item()
    put("conflict/prefix_len/mean", prefix_len)
    put("conflict/prefix_len/max", prefix_len, torch.max)
    put("conflict/suffix_len/mean", suffix_len)
    put("conflict/suffix_len/max", suffix_len, torch.max)
    put("conflict/group_frac", (group_conflict > 0).any(-1))
    zeroed = conflict_len[negative].sum() if config.conflict_weight_negative == 0 else conflict_len[:0].sum()
    amplified = conflict_len[positive].sum() if config.conflict_weight_positive > 1 else conflict_len[:0].sum()
    metrics["gtpo/lambda/zeroed_frac"] = (zeroed / tokens).item()
    metrics["gtpo/lambda/amplified_frac"] = (amplified / tokens).item()
    added = ((config.conflict_weight_positive - 1) * conflict_share * advantages)[positive].sum()
    removed = ((config.conflict_weight_negative - 1) * conflict_share * advantages)[negative].sum()
    moved = added.abs() + removed.abs()
    metrics["gtpo/lambda/signal_residual"] = ((added - removed) / moved).item() if moved > 0 else 0.0

    put("entropy/mean", entropy)
    put("entropy/max", entropy, torch.max)
    put("entropy/positive", entropy[positive])
    put("entropy/negative", entropy[negative])
    put("entropy/truncated", entropy[truncated[rows]])
    if initial_entropy is not None:
        metrics["gtpo/entropy/initial"] = float(initial_entropy)
    metrics["gtpo/entropy/threshold"] = config.entropy_threshold

    metrics["gtpo/filter/active"] = float(config.filter_is_active(initial_entropy))
    put("filter/dropped_frac", ~keep)
    put("filter/dropped_groups", ~group_keep.any(-1), torch.sum)

    regularizer = config.entropy_coeff * entropy
    put("regularizer/mean", regularizer)
    put("regularizer/sign_flip_frac", positive & (advantages < regularizer))

    put("group/size_min", members.sum(-1), torch.min)
    put("group/zero_std_frac", (group_advantages == 0).all(-1))
    return metrics
