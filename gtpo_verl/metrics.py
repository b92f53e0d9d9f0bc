"""The `gtpo/*` metrics of a batch, over real completions only (rows without tokens are padding)."""

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

    def put(name: str, values: torch.Tensor, **stats) -> None:
        for stat, function in stats.items():
            if values.numel():
                metrics["/".join(filter(None, (f"gtpo/{name}", stat)))] = function(values.float()).item()

    members = result.groups >= 0
    group_advantages = torch.where(members, result.group_advantages[result.groups], 0)
    group_conflict = torch.where(members, result.conflicts.conflict_len[result.groups], 0)
    group_keep = torch.where(members, result.keep[result.groups], False)

    tokens = lengths.sum().clamp(min=1)
    metrics["gtpo/conflict/token_frac"] = (conflict_len.sum() / tokens).item()
    put("conflict/prefix_len", prefix_len, mean=torch.mean, max=torch.max)
    put("conflict/suffix_len", suffix_len, mean=torch.mean, max=torch.max)
    put("conflict/group_frac", (group_conflict > 0).any(-1), **{"": torch.mean})
    zeroed = conflict_len[negative].sum() if config.conflict_weight_negative == 0 else conflict_len[:0].sum()
    amplified = conflict_len[positive].sum() if config.conflict_weight_positive > 1 else conflict_len[:0].sum()
    metrics["gtpo/lambda/zeroed_frac"] = (zeroed / tokens).item()
    metrics["gtpo/lambda/amplified_frac"] = (amplified / tokens).item()
    added = ((config.conflict_weight_positive - 1) * conflict_share * advantages)[positive].sum()
    removed = ((config.conflict_weight_negative - 1) * conflict_share * advantages)[negative].sum()
    moved = added.abs() + removed.abs()
    metrics["gtpo/lambda/signal_residual"] = ((added - removed) / moved).item() if moved > 0 else 0.0

    put("entropy", entropy, mean=torch.mean, max=torch.max)
    put("entropy/positive", entropy[positive], **{"": torch.mean})
    put("entropy/negative", entropy[negative], **{"": torch.mean})
    put("entropy/truncated", entropy[truncated[rows]], **{"": torch.mean})
    if initial_entropy is not None:
        metrics["gtpo/entropy/initial"] = float(initial_entropy)
    metrics["gtpo/entropy/threshold"] = config.entropy_threshold

    put("filter/dropped_frac", ~keep, **{"": torch.mean})
    put("filter/dropped_groups", ~group_keep.any(-1), **{"": torch.sum})

    regularizer = config.entropy_coeff * entropy
    put("regularizer", regularizer, mean=torch.mean)
    put("regularizer/sign_flip_frac", positive & (advantages < regularizer), **{"": torch.mean})

    put("group/size_min", members.sum(-1), **{"": torch.min})
    put("group/zero_std_frac", (group_advantages == 0).all(-1), **{"": torch.mean})
    return metrics
