"""The `gtpo/*` metrics of a batch, over real completions only (rows without tokens are padding)."""

from collections.abc import Mapping
from typing import Any

import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.algorithm.conflict import Conflicts


@torch.no_grad()
def compute_gtpo_metrics(
    result: GTPOAdvantage,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
    truncated: torch.Tensor | None = None,
) -> dict[str, float]:
    """Compute what GTPO (arXiv:2508.03772) did to a batch, as a flat dict of floats for any logger.

    A fraction `*_frac` is of all tokens (`conflict/token_frac`, λ), of all groups (`*group_frac`, `zero_std_frac`), or
    of all completions (the others).
    `signal_residual` tests App. 8.2: (weight added to positive completions − weight taken from negative ones) over
    their sum, each weight being |A_i| · |the mean of λ − 1 over the completion|; 0 = total signal preserved.
    With λ of a user's own function there is no conflict mask, and `conflict/*` is left out.
    `regularizer/mean` is the mean of γ⟨H⟩_i. Entropies are in nats per token; a mean over no completions is left out.

    Args:
        result (GTPOAdvantage): what `compute_gtpo` returned for the batch.
        config: the settings it was computed with, as for `compute_gtpo`.
        initial_entropy (float | None): ⟨H⟩_ini of the run in nats per token; by default `config.initial_entropy`.
        truncated (torch.Tensor | None): (bs,) bool, completions that reached a limit of length, if they are known.

    Raises:
        ValueError: the filter is `auto` and there is no initial entropy; a wrong setting.
    """
    settings = GTPOConfig.from_config(config)
    if initial_entropy is None:
        initial_entropy = settings.initial_entropy
    is_real = result.completions.lengths > 0
    conflict_metrics = {}
    if result.conflicts is not None:
        conflict_metrics = _conflict_metrics(result, result.conflicts, is_real)
    metrics = {
        **conflict_metrics,
        **_lambda_metrics(result),
        "entropy/initial": initial_entropy,
        "entropy/threshold": settings.entropy_threshold,
        **_entropy_metrics(result, is_real, truncated),
        "filter/active": settings.filter_is_active(initial_entropy),
        "filter/dropped_frac": _mean(~result.keep[is_real]),
        "filter/dropped_group_frac": _mean(~_groups_with_any(result, result.keep)),
        **_regularizer_metrics(result, is_real),
        **_group_metrics(result, is_real),
    }
    return {f"gtpo/{name}": float(value) for name, value in metrics.items() if value is not None}


def _conflict_metrics(result: GTPOAdvantage, conflicts: Conflicts, is_real: torch.Tensor) -> dict[str, Any]:
    return {
        "conflict/token_frac": conflicts.conflict_len.sum() / _number_of_tokens(result),
        "conflict/group_frac": _mean(_groups_with_any(result, conflicts.conflict_len > 0)),
        "conflict/fork_frac": _mean(conflicts.forks[is_real]),
        "conflict/prefix_len/mean": _mean(conflicts.prefix_len[is_real]),
        "conflict/prefix_len/max": _max(conflicts.prefix_len[is_real]),
        "conflict/suffix_len/mean": _mean(conflicts.suffix_len[is_real]),
        "conflict/suffix_len/max": _max(conflicts.suffix_len[is_real]),
    }


def _lambda_metrics(result: GTPOAdvantage) -> dict[str, Any]:
    a = result.group_advantages
    lengths = result.completions.lengths
    tokens = _number_of_tokens(result)
    if result.conflicts is not None:
        conflict_len = result.conflicts.conflict_len
        zeroed = conflict_len * (result.conflict_weights == 0)
        amplified = conflict_len * (result.conflict_weights > 1)
        change = (result.conflict_weights - 1) * (conflict_len / lengths.clamp(min=1))
    else:
        is_own = result.completions.mask
        zeroed = (is_own & (result.token_weights == 0)).sum(-1)
        amplified = (is_own & (result.token_weights > 1)).sum(-1)
        change = (result.token_weights - 1).where(is_own, 0).sum(-1) / lengths.clamp(min=1)

    # A completion's part of the update grows by the mean of λ − 1 over its tokens, times A_i.
    signal = change * a
    added = signal[a > 0].sum()
    removed = signal[a < 0].sum()
    moved = added.abs() + removed.abs()
    return {
        "lambda/mean": 1 + (change * lengths).sum() / tokens,
        "lambda/zeroed_frac": zeroed.sum() / tokens,
        "lambda/amplified_frac": amplified.sum() / tokens,
        "lambda/signal_residual": (added - removed) / moved if moved > 0 else 0.0,
    }


def _entropy_metrics(
    result: GTPOAdvantage, is_real: torch.Tensor, truncated: torch.Tensor | None
) -> dict[str, float | None]:
    a = result.group_advantages
    entropy = result.trajectory_entropy
    metrics = {
        "entropy/mean": _mean(entropy[is_real]),
        "entropy/max": _max(entropy[is_real]),
        "entropy/positive": _mean(entropy[is_real & (a > 0)]),
        "entropy/negative": _mean(entropy[is_real & (a < 0)]),
    }
    if truncated is not None:
        metrics["entropy/truncated"] = _mean(entropy[is_real & truncated])
    return metrics


def _regularizer_metrics(result: GTPOAdvantage, is_real: torch.Tensor) -> dict[str, float | None]:
    a = result.group_advantages
    flips_sign = (a > 0) & (a < result.regularizer)
    return {
        "regularizer/mean": _mean(result.regularizer[is_real]),
        "regularizer/sign_flip_frac": _mean(flips_sign[is_real]),
    }


def _group_metrics(result: GTPOAdvantage, is_real: torch.Tensor) -> dict[str, Any]:
    a = result.group_advantages
    _, sizes = result.completions.groups[is_real].unique(return_counts=True)
    return {
        "group/size_min": sizes.min() if len(sizes) else None,
        "group/zero_std_frac": _mean(~_groups_with_any(result, a != 0)),
        "group/positive_frac": _mean(a[is_real] > 0),
    }


@torch.no_grad()
def compute_log_prob_metrics(
    old_log_probs: torch.Tensor, group_advantages: torch.Tensor, completions: Completions
) -> dict[str, float]:
    """Compute how likely the completions with A_i > 0, and those with A_i < 0, are under the policy.

    `gtpo/log_prob/positive` and `gtpo/log_prob/negative` are means over completions of the mean log-probability of
    their own tokens, in nats per token; a mean over no completions is left out. Completions with A_i = 0 count in
    neither. `old_log_probs` is (bs, response_length), of the old-log-prob pass; `group_advantages` (bs,).
    """
    means = completions.mean(old_log_probs)
    is_real = completions.lengths > 0
    metrics = {
        "gtpo/log_prob/positive": _mean(means[is_real & (group_advantages > 0)]),
        "gtpo/log_prob/negative": _mean(means[is_real & (group_advantages < 0)]),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _mean(values: torch.Tensor) -> float | None:
    return values.float().mean().item() if values.numel() else None


def _max(values: torch.Tensor) -> float | None:
    return values.max().item() if values.numel() else None


def _number_of_tokens(result: GTPOAdvantage) -> torch.Tensor:
    return result.completions.lengths.sum().clamp(min=1)


def _groups_with_any(result: GTPOAdvantage, flags: torch.Tensor) -> torch.Tensor:
    """Return for each group, (groups,) bool, whether the (bs,) flag of one of its completions is set."""
    groups = result.completions.groups
    real_groups = groups[result.completions.lengths > 0].unique()
    return torch.isin(real_groups, groups[flags])
