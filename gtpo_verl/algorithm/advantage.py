"""The advantage of GTPO for a whole batch: δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of arXiv:2508.03772, Eq. 11."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.algorithm.conflict import Conflicts, compute_conflict_weights, find_conflicts


class GTPOAdvantage(NamedTuple):
    """The advantages of a batch, and the parts they are made of."""

    advantages: torch.Tensor  # (bs, response_length), δ(A − γ⟨H⟩)λ on the response mask, 0 off it
    group_advantages: torch.Tensor  # (bs,), A_i, before the entropy term
    trajectory_entropy: torch.Tensor  # (bs,), ⟨H⟩_i in nats per token
    regularizer: torch.Tensor  # (bs,), γ⟨H⟩_i
    keep: torch.Tensor  # (bs,) bool, δ_i
    conflicts: Conflicts  # the conflict mask M and the lengths of its runs
    conflict_weights: torch.Tensor  # (bs,), λ of each completion's tokens on M
    completions: Completions

    @property
    def unweighted_advantages(self) -> torch.Tensor:
        """(bs,), δ_i (A_i − γ⟨H⟩_i): the advantage of a token off the conflict mask."""
        return torch.where(self.keep, self.group_advantages - self.regularizer, 0)

    @property
    def token_weights(self) -> torch.Tensor:
        """(bs, response_length) float32, λ_{i,t} of Eq. 9: 1 off the conflict mask."""
        weights = torch.ones(self.advantages.shape, device=self.advantages.device)
        weights[self.conflicts.rows, self.conflicts.columns] = self.conflict_weights[self.conflicts.rows]
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
        norm_adv_by_std_in_grpo (bool): divide by the group's standard deviation, plus `epsilon`, as in Sec. 3.
        **kwargs: what else a trainer hands to every estimator; not used.

    Returns:
        (advantages, returns), the same (bs, response_length) tensor twice.

    Raises:
        ValueError: no initial entropy for the filter `auto`; wrong shapes; a value that is not finite; a wrong setting.
    """
    _check_shapes(token_level_rewards.shape, response_mask=response_mask, entropy=entropy)
    completions = Completions(response_mask, index)
    settings, means = GTPOConfig.from_config(config), completions.mean(entropy)
    advantages = compute_group_advantages(
        token_level_rewards.sum(-1), completions, norm_adv_by_std_in_grpo, epsilon, settings.min_correct_reward
    )
    result = apply_gtpo(advantages, completions, responses, means, settings, initial_entropy)
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
    """GTPO (arXiv:2508.03772, Eq. 9 to 11) on advantages A_i that a trainer already has: (bs,), one per completion.

    The A_i may come from any group-relative estimator, and are exactly 0 where a group gives no signal, or a completion
    is at its group's mean. The paper's have zero mean over a group, which keeps the total signal (App. 8.2). To learn
    nothing from a completion, such as one that nobody scored, clear its row of `response_mask`: A = 0 alone leaves
    −γ⟨H⟩. All else is as for `compute_gtpo_outcome_advantage`.

    Raises:
        ValueError: as there, and for `min_correct_reward`, since there are no rewards here.
    """
    completions = Completions(response_mask, index)
    _check_shapes(completions.shape, entropy=entropy)
    settings, means = GTPOConfig.from_config(config), completions.mean(entropy)
    if (least := settings.min_correct_reward) is not None:
        raise ValueError(f"{settings.section}.min_correct_reward={least!r}: leave it out, and limit the A_i yourself")
    return apply_gtpo(advantages, completions, responses, means, settings, initial_entropy)


@torch.no_grad()
def apply_gtpo(
    advantages: torch.Tensor,
    completions: Completions,
    responses: torch.Tensor,
    trajectory_entropy: torch.Tensor,
    config: GTPOConfig,
    initial_entropy: float | None = None,
) -> GTPOAdvantage:
    """`compute_gtpo_token_advantages` of `Completions` and (bs,) ⟨H⟩_i (nats per token) that the caller already has."""
    _check_shapes(completions.shape, responses=responses)
    check_finite("advantage", advantages, completions.uids)
    check_finite("entropy", trajectory_entropy, completions.uids)

    known = config.initial_entropy if initial_entropy is None else initial_entropy
    keep = completions_to_keep(trajectory_entropy, advantages, config, known)
    conflicts = find_conflicts(responses, completions, advantages, config)
    weights = compute_conflict_weights(advantages, config.conflict_weight_positive, config.conflict_weight_negative)

    regularizer = config.entropy_coeff * trajectory_entropy
    regularized = torch.where(keep, advantages - regularizer, 0)
    weighted = completions.spread(regularized)
    weighted[conflicts.rows, conflicts.columns] = (regularized * weights)[conflicts.rows]
    return GTPOAdvantage(weighted, advantages, trajectory_entropy, regularizer, keep, conflicts, weights, completions)


def compute_group_advantages(
    scores: torch.Tensor,
    completions: Completions,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    min_correct_reward: float | None = None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """A_i of Sec. 3, as in GRPO: (R_i − mean(R)) / (std(R) + epsilon) over the completions of one group.

    For (bs,) scores; (bs,), at least float32. It is exactly 0 where R_i is the mean, and where a row has no tokens.
    Without `norm_adv_by_std_in_grpo` it is R_i − mean(R). With `min_correct_reward` it is at most 0 where R_i is lower.
    With `base`, (bs,) float64, it is this difference of rewards instead, with the same zeros and the same limit.

    The mean of .1, .2 and .3 is the second, but not once each is rounded to float32, and λ would go by the sign that is
    left. So a deviation of up to four ulps of the group's largest |R| is 0: each rounding is half an ulp of its own
    reward, that of the mean as much again, and a reward may be a sum of parts. The rewards' range would not do: 100.1,
    100.2 and 100.3 are rounded as 100 is. Whole rewards below 2^21 / G deviate by more, if at all.
    """
    check_finite("reward", scores, completions.uids)
    groups, rewards = completions.groups, scores.double()
    sizes, largest = groups.bincount(), torch.zeros_like(rewards).scatter_reduce(0, groups, rewards.abs(), "amax")
    if base is None:
        # Less the highest of the group, equal rewards are 0, and so is their mean, without rounding.
        rewards = rewards - rewards.scatter_reduce(0, groups, rewards, "amax", include_self=False)[groups]
        deviation = rewards - (groups.bincount(rewards) / sizes)[groups]
    else:
        deviation = torch.where(sizes[groups] > 1, base, 0)
    rounding = 4 * torch.finfo(torch.float32).eps * largest[groups]
    deviation = torch.where(deviation.abs() > rounding, deviation, 0)
    if norm_adv_by_std_in_grpo and base is None:
        variance = groups.bincount(deviation.square()) / (sizes - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + epsilon)[groups]
    if min_correct_reward is not None:
        deviation = torch.where(scores.float() < min_correct_reward, deviation.clamp(max=0), deviation)
    return deviation.to(torch.promote_types(scores.dtype, torch.float32))


def compute_trajectory_entropy(entropy: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Mean entropy of each completion, ⟨H⟩_i = Σ_t H(π(·|s_t)) / |o_i| (Sec. 4.2): (bs,) float32, nats per token.

    Entropy, in nats, and mask are (bs, response_length). 0 for a row without tokens. Carries no gradient.
    """
    return Completions(response_mask, range(len(response_mask))).mean(entropy)


def completions_to_keep(
    trajectory_entropy: torch.Tensor, advantages: torch.Tensor, config: GTPOConfig, initial_entropy: float | None
) -> torch.Tensor:
    """Return δ of a run with these settings (Eq. 10), (bs,) bool: all True where its filter is off.

    Raises what `GTPOConfig.filter_is_active` raises.
    """
    if not config.filter_is_active(initial_entropy):
        return torch.ones_like(advantages, dtype=torch.bool)
    only_negative = advantages if config.filter_scope == "negative" else None
    return compute_completion_filter(trajectory_entropy, config.entropy_threshold, only_negative)


def compute_completion_filter(
    trajectory_entropy: torch.Tensor, threshold: float, advantages: torch.Tensor | None = None
) -> torch.Tensor:
    """Return δ of an active completion filter (Eq. 10), (bs,) bool: whether ⟨H⟩_i <= threshold (nats per token).

    With (bs,) `advantages`, before the entropy term, only those below 0 are filtered (OnlyNeg, Fig. 4c).
    """
    keep = trajectory_entropy <= threshold
    return keep if advantages is None else keep | (advantages >= 0)


def _check_shapes(shape: torch.Size, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not (bs, response_length) = {tuple(shape)}")


def check_finite(name: str, values: torch.Tensor, uids: Sequence[Hashable]) -> None:
    """Raise a ValueError on the first of (bs,) values that is not finite, naming its row and uid."""
    for row in (~values.isfinite()).nonzero().flatten().tolist():
        raise ValueError(f"the {name} of row {row} (uid {uids[row]}) is {values[row]}: find out why before training")
