"""The advantage of GTPO for a whole batch: δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of arXiv:2508.03772, Eq. 11."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from gtpo_verl.config import GTPOConfig
from gtpo_verl.conflict import Conflicts, compute_conflict_weights, find_conflicts
from gtpo_verl.entropy import compute_completion_filter, total_entropy
from gtpo_verl.group import TokenPositions, group_rows, row_blocks


class GTPOAdvantage(NamedTuple):
    """The advantages of a batch, and what GTPO did to get them.

    Args:
        advantages (torch.Tensor): (bs, response_length), δ(A − γ⟨H⟩)λ on the response mask, 0 off it.
        group_advantages (torch.Tensor): (bs,), A_i, before the entropy term; 0 for a row without tokens.
        trajectory_entropy (torch.Tensor): (bs,), ⟨H⟩_i in nats per token.
        keep (torch.Tensor): (bs,) bool, δ_i.
        conflicts (Conflicts): the conflict mask M and the lengths of its runs.
        lengths (torch.Tensor): (bs,) int64, own tokens of each completion; 0 marks padding rows.
        groups (torch.Tensor): (groups, size) int64, rows of each group, padded with -1.
    """

    advantages: torch.Tensor
    group_advantages: torch.Tensor
    trajectory_entropy: torch.Tensor
    keep: torch.Tensor
    conflicts: Conflicts
    lengths: torch.Tensor
    groups: torch.Tensor


def compute_gtpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Iterable[Hashable],
    responses: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantage of GTPO (Group-relative Trajectory-based Policy Optimization, arXiv:2508.03772, Eq. 11).

    advantages[i, t] = δ_i · (A_i − γ⟨H⟩_i) · λ_{i,t} · response_mask[i, t], with
    A_i = (R_i − mean(R)) / (std(R) + epsilon) over the completions of one prompt (Sec. 3, as in GRPO),
    ⟨H⟩_i the mean entropy of the completion, δ_i the completion filter (Eq. 10) and λ the conflict weights (Eq. 9).
    Unlike GRPO's, the advantage differs from token to token. With all three parts off it is GRPO's.

    Degenerate groups: where all rewards are equal, and for a group of one, A_i = 0 exactly, so that nothing conflicts
    and −γ⟨H⟩_i stays with λ = 1. (verl's `grpo` gives a group of one its raw reward.) A row without tokens gets 0 and
    belongs to no group.

    Args:
        token_level_rewards (torch.Tensor): (bs, response_length), summed to one reward per completion.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens.
        index: (bs,) uids; completions with equal uids are one group.
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        entropy (torch.Tensor): (bs, response_length), entropy of the policy at each token, in nats; any floating dtype.
        config: the settings; a `GTPOConfig`, verl's `algorithm` config or its `gtpo` section. None: the defaults.
        initial_entropy (float | None): ⟨H⟩_ini in nats per token; by default `config.initial_entropy`.
        norm_adv_by_std_in_grpo (bool): divide by the group's standard deviation, as in Sec. 3.
        epsilon (float): added to the standard deviation.
        **kwargs: what else a trainer hands to every estimator; not used.

    Returns:
        (advantages, returns), the same (bs, response_length) tensor twice.

    Raises:
        ValueError: the filter is `auto` and no initial entropy is given; shapes that do not fit; a reward or entropy
            that is not finite; an unknown or invalid setting.
    """
    result = compute_gtpo_advantage(
        token_level_rewards,
        response_mask,
        index,
        responses,
        entropy,
        GTPOConfig.from_config(config),
        initial_entropy,
        norm_adv_by_std_in_grpo,
        epsilon,
    )
    return result.advantages, result.advantages


@torch.no_grad()
def compute_gtpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Iterable[Hashable],
    responses: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig,
    initial_entropy: float | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> GTPOAdvantage:
    """Like `compute_gtpo_outcome_advantage`, and returns all that the metrics need."""
    for name, tensor in (("response_mask", response_mask), ("responses", responses), ("entropy", entropy)):
        if tensor.shape != token_level_rewards.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, token_level_rewards {tuple(token_level_rewards.shape)}: "
                "all must be (bs, response_length) of the same rows"
            )
    filter_active = config.filter_is_active(config.initial_entropy if initial_entropy is None else initial_entropy)

    positions = TokenPositions(response_mask)
    groups = group_rows(index, positions.lengths > 0)
    scores = token_level_rewards.sum(-1)
    group_advantages = _group_advantages(scores, groups, norm_adv_by_std_in_grpo, epsilon)
    mean_entropy = total_entropy(entropy, response_mask) / positions.lengths.clamp(min=1)
    for name, values in (("reward", group_advantages), ("entropy", mean_entropy)):
        if not values.isfinite().all():
            row = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"the {name} of row {row} of the batch, or of its group, is not finite: find out why before training"
            )

    keep = torch.ones_like(mean_entropy, dtype=torch.bool)
    if filter_active:
        signs = group_advantages if config.filter_scope == "negative" else None
        keep = compute_completion_filter(mean_entropy, config.entropy_threshold, signs)
    conflicts = find_conflicts(responses, positions, group_advantages, groups, config.conflict_span)

    regularized = torch.where(keep, group_advantages - config.entropy_coeff * mean_entropy, 0)
    dtype = torch.promote_types(token_level_rewards.dtype, torch.float32)
    advantages = torch.empty(responses.shape, dtype=dtype, device=responses.device)
    for rows in row_blocks(advantages):
        torch.mul(response_mask[rows], regularized[rows].unsqueeze(-1), out=advantages[rows])
    on_mask = regularized * compute_conflict_weights(
        torch.ones_like(keep).unsqueeze(-1),
        group_advantages,
        config.conflict_weight_positive,
        config.conflict_weight_negative,
    ).squeeze(-1)
    row_of_token = conflicts.tokens // responses.shape[1]
    advantages.view(-1)[conflicts.tokens] = on_mask[row_of_token].to(dtype)
    return GTPOAdvantage(advantages, group_advantages, mean_entropy, keep, conflicts, positions.lengths, groups)


def _group_advantages(
    scores: torch.Tensor, groups: torch.Tensor, norm_adv_by_std_in_grpo: bool, epsilon: float
) -> torch.Tensor:
    """A_i of Sec. 3, as (bs,) float32: deviation from the group's mean reward, over its standard deviation."""
    member = groups >= 0
    rewards = scores.double()[groups]
    size = member.sum(-1, keepdim=True)
    mean = torch.where(member, rewards, 0).sum(-1, keepdim=True) / size
    deviation = torch.where(member, rewards - mean, 0)
    highest = rewards.masked_fill(~member, -torch.inf).amax(-1, keepdim=True) if groups.numel() else mean
    lowest = rewards.masked_fill(~member, torch.inf).amin(-1, keepdim=True) if groups.numel() else mean
    # Without this, rounding of the mean over a std of 0 would give a group of equal rewards an advantage.
    deviation.masked_fill_(highest == lowest, 0)
    if norm_adv_by_std_in_grpo:
        std = (deviation.square().sum(-1, keepdim=True) / (size - 1).clamp(min=1)).sqrt()
        deviation = deviation / (std + epsilon)
    advantages = torch.zeros(scores.shape, dtype=torch.float32, device=scores.device)
    advantages[groups[member]] = deviation[member].float()
    return advantages
