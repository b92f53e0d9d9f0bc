"""The `gtpo/*` metrics of a batch, over real completions only (rows without tokens are padding)."""

import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig


@torch.no_grad()
def compute_gtpo_metrics(
    result: GTPOAdvantage, config: GTPOConfig, initial_entropy: float | None, truncated: torch.Tensor
) -> dict[str, float]:
    """Return what GTPO (arXiv:2508.03772) did to a batch, as a flat dict of floats for any logger of verl.

    A fraction `*_frac` is of all tokens (`conflict/token_frac`, λ), of all groups (`*group_frac`, `zero_std_frac`), or
    of all completions (the others).
    `signal_residual` tests App. 8.2: (weight added to positive completions − weight taken from negative ones) over
    their sum, each weight being |A_i| · |λ − 1| · the conflict share of the completion; 0 = total signal preserved.
    `regularizer/mean` is the mean of γ⟨H⟩_i. Entropies are in nats per token; a mean over no completions is left out.

    Args:
        result (GTPOAdvantage): of the batch.
        config (GTPOConfig): the settings it was computed with.
        initial_entropy (float | None): ⟨H⟩_ini of the run, if it is known.
        truncated (torch.Tensor): (bs,) bool, completions that reached a limit of length.
    """
    a, entropy = result.group_advantages, result.trajectory_entropy
    conflicts, weights = result.conflicts, result.conflict_weights
    lengths, groups = result.completions.lengths, result.completions.groups
    real, tokens = lengths > 0, lengths.sum().clamp(min=1)
    sizes = groups[real].unique(return_counts=True)[1]
    signal = (weights - 1) * (conflicts.conflict_len / lengths.clamp(min=1)) * a
    added, removed = signal[a > 0].sum(), signal[a < 0].sum()
    moved = added.abs() + removed.abs()
    metrics = {
        "conflict/token_frac": conflicts.conflict_len.sum() / tokens,
        "conflict/group_frac": _mean(_groups_with_any(result, conflicts.conflict_len > 0)),
        "conflict/fork_frac": None if conflicts.forks is None else _mean(conflicts.forks[real]),
        "lambda/zeroed_frac": (conflicts.conflict_len * (weights == 0)).sum() / tokens,
        "lambda/amplified_frac": (conflicts.conflict_len * (weights > 1)).sum() / tokens,
        "lambda/signal_residual": (added - removed) / moved if moved > 0 else 0.0,
        "entropy/initial": initial_entropy,
        "entropy/threshold": config.entropy_threshold,
        "entropy/mean": _mean(entropy[real]),
        "entropy/max": _max(entropy[real]),
        "entropy/positive": _mean(entropy[real & (a > 0)]),
        "entropy/negative": _mean(entropy[real & (a < 0)]),
        "entropy/truncated": _mean(entropy[real & truncated]),
        "filter/active": config.filter_is_active(initial_entropy),
        "filter/dropped_frac": _mean(~result.keep[real]),
        "filter/dropped_group_frac": _mean(~_groups_with_any(result, result.keep)),
        "regularizer/mean": _mean(result.regularizer[real]),
        "regularizer/sign_flip_frac": _mean(((a > 0) & (a < result.regularizer))[real]),
        "group/size_min": sizes.min() if len(sizes) else None,
        "group/zero_std_frac": _mean(~_groups_with_any(result, a != 0)),
        "group/positive_frac": _mean(a[real] > 0),
    }
    for end, length in (("prefix", conflicts.prefix_len), ("suffix", conflicts.suffix_len)):
        if length is not None:
            metrics |= {f"conflict/{end}_len/mean": _mean(length[real]), f"conflict/{end}_len/max": _max(length[real])}
    return {f"gtpo/{name}": float(value) for name, value in metrics.items() if value is not None}


@torch.no_grad()
def compute_log_prob_metrics(
    old_log_probs: torch.Tensor, group_advantages: torch.Tensor, completions: Completions
) -> dict[str, float]:
    """How likely the completions with A_i > 0, and those with A_i < 0, are under the policy.

    `gtpo/log_prob/positive` and `gtpo/log_prob/negative` are means over completions of the mean log-probability of
    their own tokens, in nats per token; a mean over no completions is left out. Completions with A_i = 0 count in
    neither. `old_log_probs` is (bs, response_length), of the old-log-prob pass; `group_advantages` (bs,).
    """
    means = completions.mean(old_log_probs)
    sides = {"positive": group_advantages > 0, "negative": group_advantages < 0}
    found = {side: _mean(means[chosen & (completions.lengths > 0)]) for side, chosen in sides.items()}
    return {f"gtpo/log_prob/{side}": value for side, value in found.items() if value is not None}


def _mean(values: torch.Tensor) -> float | None:
    return values.float().mean().item() if values.numel() else None


def _max(values: torch.Tensor) -> float | None:
    return values.max().item() if values.numel() else None


def _groups_with_any(result: GTPOAdvantage, flags: torch.Tensor) -> torch.Tensor:
    """Return, (groups,) bool, whether one of the group's (bs,) flags is set."""
    groups = result.completions.groups
    return torch.isin(groups[result.completions.lengths > 0].unique(), groups[flags])
