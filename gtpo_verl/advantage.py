"""The advantage of GTPO for a whole batch: δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of arXiv:2508.03772, Eq. 11.

`compute_gtpo_token_advantages` is GTPO itself, for advantages A_i that a trainer already has.
`compute_gtpo_outcome_advantage` computes the A_i from rewards, as GRPO does, and hands them to it.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gtpo_verl.completion_filter import completions_to_keep, mean_entropy
from gtpo_verl.config import GTPOConfig
from gtpo_verl.conflict import Conflicts, find_conflicts, sign_weights
from gtpo_verl.group import Completions, new_zeros, rows_of


class GTPOAdvantage(NamedTuple):
    """The advantages of a batch, and the parts they are made of.

    Args:
        advantages (torch.Tensor): (bs, response_length), δ(A − γ⟨H⟩)λ on the response mask, 0 off it.
        group_advantages (torch.Tensor): (bs,), A_i, before the entropy term.
        trajectory_entropy (torch.Tensor): (bs,), ⟨H⟩_i in nats per token.
        regularizer (torch.Tensor): (bs,), γ⟨H⟩_i.
        keep (torch.Tensor): (bs,) bool, δ_i.
        conflicts (Conflicts): the conflict mask M and the lengths of its runs.
        conflict_weights (torch.Tensor): (bs,), λ of each completion's tokens on the conflict mask.
        completions (Completions): lengths and groups of the rows.
    """

    advantages: torch.Tensor
    group_advantages: torch.Tensor
    trajectory_entropy: torch.Tensor
    regularizer: torch.Tensor
    keep: torch.Tensor
    conflicts: Conflicts
    conflict_weights: torch.Tensor
    completions: Completions

    @property
    def unweighted_advantages(self) -> torch.Tensor:
        """(bs,), δ_i (A_i − γ⟨H⟩_i): the advantage of a token off the conflict mask."""
        return torch.where(self.keep, self.group_advantages - self.regularizer, 0)

    @property
    def token_weights(self) -> torch.Tensor:
        """(bs, response_length) float32, λ_{i,t} of Eq. 9: 1 off the conflict mask."""
        weights = torch.ones(self.advantages.shape, device=self.advantages.device)
        rows = self.conflicts.tokens // weights.shape[1]
        weights.view(-1)[self.conflicts.tokens] = self.conflict_weights[rows]
        return weights


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
    _check_shapes(token_level_rewards.shape, response_mask=response_mask.shape)
    completions = Completions(response_mask, index)
    group_advantages = compute_group_advantages(
        token_level_rewards.sum(-1), completions, norm_adv_by_std_in_grpo, epsilon
    )
    settings = GTPOConfig.from_config(config)
    result = apply_gtpo(group_advantages, completions, responses, entropy, settings, initial_entropy)
    return result.advantages, result.advantages


def compute_gtpo_token_advantages(
    advantages: torch.Tensor,
    index: Iterable[Hashable],
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
) -> GTPOAdvantage:
    """GTPO (arXiv:2508.03772, Eq. 9 to 11) on advantages A_i that a trainer already has, one per completion.

    result.advantages[i, t] = δ_i · (A_i − γ⟨H⟩_i) · λ_{i,t} · response_mask[i, t]

    The factors stand in the result: `keep` is δ_i, `regularizer` γ⟨H⟩_i, `token_weights` λ_{i,t}. The A_i may come from
    any group-relative estimator; the paper's have zero mean over a group, which keeps the total signal (App. 8.2).

    Args:
        advantages (torch.Tensor): (bs,), A_i; 0 where a group gives no signal.
        index: (bs,) uids; completions with equal uids answer the same prompt.
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens.
        entropy (torch.Tensor): (bs, response_length), entropy of the policy at each token, in nats; any floating dtype.
        config: the settings; a `GTPOConfig`, verl's `algorithm` config or its `gtpo` section. None: the defaults.
        initial_entropy (float | None): ⟨H⟩_ini in nats per token; by default `config.initial_entropy`.

    Raises:
        ValueError: the filter is `auto` and no initial entropy is given; shapes that do not fit; an advantage or
            entropy that is not finite; an unknown or invalid setting.
    """
    completions = Completions(response_mask, index)
    settings = GTPOConfig.from_config(config)
    return apply_gtpo(advantages, completions, responses, entropy, settings, initial_entropy)


@torch.no_grad()
def apply_gtpo(
    advantages: torch.Tensor,
    completions: Completions,
    responses: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig,
    initial_entropy: float | None = None,
) -> GTPOAdvantage:
    """Like `compute_gtpo_token_advantages`, from `Completions` that the caller already has."""
    _check_shapes(responses.shape, response_mask=completions.shape, entropy=entropy.shape)
    initial_entropy = config.initial_entropy if initial_entropy is None else initial_entropy
    trajectory_entropy = mean_entropy(entropy, completions)
    check_finite("advantage", advantages, completions.uids)
    check_finite("entropy", trajectory_entropy, completions.uids)

    keep = completions_to_keep(trajectory_entropy, advantages, config, initial_entropy)
    conflicts = find_conflicts(responses, completions, advantages, config.conflict_span, config.conflict_masks)
    conflict_weights = sign_weights(advantages, config.conflict_weight_positive, config.conflict_weight_negative)

    regularizer = config.entropy_coeff * trajectory_entropy
    regularized = torch.where(keep, advantages - regularizer, 0)
    token_advantages = new_zeros(regularized, responses.shape)
    rows = rows_of(token_advantages)
    for row, (own, value) in enumerate(zip(completions.own, regularized.tolist(), strict=True)):
        rows[row, own] = value
    row_of_token = conflicts.tokens // responses.shape[1]
    token_advantages.view(-1)[conflicts.tokens] = (regularized * conflict_weights)[row_of_token]
    return GTPOAdvantage(
        token_advantages, advantages, trajectory_entropy, regularizer, keep, conflicts, conflict_weights, completions
    )


def compute_group_advantages(
    scores: torch.Tensor, completions: Completions, norm_adv_by_std_in_grpo: bool = True, epsilon: float = 1e-6
) -> torch.Tensor:
    """A_i of Sec. 3, as in GRPO: deviation from the group's mean reward, over its standard deviation.

    Args:
        scores (torch.Tensor): (bs,), reward of each completion.
        completions (Completions): which rows are one group.
        norm_adv_by_std_in_grpo (bool): divide by the group's standard deviation.
        epsilon (float): added to the standard deviation.

    Returns:
        (bs,), at least float32; exactly 0 where all rewards of a group are equal, and for a row in no group.

    Raises:
        ValueError: a reward that is not finite.
    """
    check_finite("reward", scores, completions.uids)
    groups = completions.groups
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
    advantages = scores.new_zeros(scores.shape, dtype=torch.promote_types(scores.dtype, torch.float32))
    advantages[groups[member]] = deviation[member].to(advantages.dtype)
    return advantages


def _check_shapes(shape: torch.Size, **shapes: torch.Size) -> None:
    for name, other in shapes.items():
        if other != shape:
            raise ValueError(
                f"{name} has shape {tuple(other)}, not {tuple(shape)}: "
                "all must be (bs, response_length) of the same rows"
            )


def check_finite(name: str, values: torch.Tensor, uids: Sequence[Hashable]) -> None:
    """Raise on the first of (bs,) values that is not finite.

    Raises:
        ValueError: naming the row, its uid and the value.
    """
    if not values.isfinite().all():
        row = int((~values.isfinite()).nonzero()[0])
        raise ValueError(
            f"the {name} of row {row} (uid {uids[row]}) is {values[row].item()}: find out why before training"
        )
