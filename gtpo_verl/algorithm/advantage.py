"""The advantage of GTPO for a whole batch: δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of arXiv:2508.03772, Eq. 11."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gtpo_verl.algorithm.completions import (
    Completions,
    GroupIds,
    as_completions,
    check_one_per_completion,
    check_shapes,
)
from gtpo_verl.algorithm.config import GTPOConfig, check_initial_entropy
from gtpo_verl.algorithm.conflict import Conflicts, compute_conflict_weights, find_conflicts
from gtpo_verl.algorithm.token_weights import compute_own_weights


class GTPOAdvantage(NamedTuple):
    """The advantages of a batch, and the parts they are made of."""

    advantages: torch.Tensor  # (bs, response_length), δ(A − γ⟨H⟩)λ on the response mask, 0 off it
    group_advantages: torch.Tensor  # (bs,), A_i, before the entropy term
    trajectory_entropy: torch.Tensor  # (bs,), ⟨H⟩_i in nats per token
    regularizer: torch.Tensor  # (bs,), γ⟨H⟩_i
    keep: torch.Tensor  # (bs,) bool, δ_i
    unweighted_advantages: torch.Tensor  # (bs,), δ_i (A_i − γ⟨H⟩_i): the advantage of a token with λ = 1
    completions: Completions
    conflicts: Conflicts | None  # the conflict mask M and the lengths of its runs; None with λ of a user's own
    conflict_weights: torch.Tensor  # (bs,), λ of each completion's tokens on M
    own_weights: torch.Tensor | None = None  # (bs, response_length), λ of a user's own function

    @property
    def token_weights(self) -> torch.Tensor:
        """(bs, response_length) float32, λ_{i,t} of Eq. 9: 1 off the conflict mask; or the user's own."""
        if self.own_weights is not None:
            return self.own_weights
        assert self.conflicts is not None
        return self.conflicts.spread(self.conflict_weights, self.advantages.shape)


@torch.no_grad()
def compute_gtpo(
    *,
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: GroupIds | Completions,
    entropy: torch.Tensor | None,
    rewards: torch.Tensor | None = None,
    advantages: torch.Tensor | None = None,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    trajectory_entropy: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    token_weights: Callable[..., torch.Tensor] | None = None,
) -> GTPOAdvantage:
    """Compute the advantages of GTPO (Group-relative Trajectory-based Policy Optimization, arXiv:2508.03772, Eq. 11).

    advantages[i, t] = δ_i · (A_i − γ⟨H⟩_i) · λ_{i,t} · response_mask[i, t], with
    A_i = (R_i − mean(R)) / (std(R) + epsilon) over the completions of one group (Sec. 3, as in GRPO),
    ⟨H⟩_i the mean entropy of the completion, δ_i the completion filter (Eq. 10) and λ the conflict weights (Eq. 9).
    Unlike GRPO's, the advantage differs from token to token. With all three parts off it is GRPO's.

    Degenerate groups: where all rewards are equal, and for a group of one, A_i = 0 exactly, so that nothing conflicts
    and −γ⟨H⟩_i stays with λ = 1. (verl's `grpo` gives a group of one its raw reward.) A row without tokens gets 0 and
    belongs to no group.

    Args:
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens, 0 elsewhere.
        group_ids: (bs,) ids of any type that can be hashed; completions with equal ids are one group. Or the
            `Completions` of this mask, where the caller has them.
        entropy (torch.Tensor | None): (bs, response_length), entropy of the policy at each token, in nats; any floating
            dtype. None: it is not known yet, and without `trajectory_entropy` the advantages are λ_{i,t} A_i.
        rewards (torch.Tensor | None): (bs,), R_i. Give them, or A_i as `advantages`.
        advantages (torch.Tensor | None): (bs,), A_i of any group-relative estimator, exactly 0 where a group gives no
            signal, or a completion is at its group's mean. The paper's have zero mean over a group, which keeps the
            total signal (App. 8.2). With `rewards` too they are taken as differences of these rewards, and
            `compute_group_advantages` sets to 0 what is only rounding.
        config: the settings; a `GTPOConfig`, verl's `algorithm` config or its `gtpo` section. None: the defaults.
        initial_entropy (float | None): ⟨H⟩_ini in nats per token; by default `config.initial_entropy`.
        norm_adv_by_std_in_grpo (bool): divide by the group's standard deviation, plus `epsilon`, as in Sec. 3.
        trajectory_entropy (torch.Tensor | None): (bs,), ⟨H⟩_i in nats per token, where the caller has them; they may be
            any finite numbers.
        old_log_probs (torch.Tensor | None): (bs, response_length), for a function of `token_weights` that asks for it.
        token_weights: a function that gives λ_{i,t} in place of Eq. 9 (`gtpo_verl.algorithm.token_weights`); by default
            the one that the settings name, if any.

    Raises:
        ValueError: no initial entropy for the filter `auto`; wrong shapes; a value that is not finite; `entropy` below
            0; neither rewards nor advantages; a wrong setting.
    """
    settings = GTPOConfig.from_config(config)
    completions = as_completions(response_mask, group_ids)
    check_shapes(completions.shape, responses=responses)
    if entropy is not None:
        check_shapes(completions.shape, entropy=entropy)
    if old_log_probs is not None:
        check_shapes(completions.shape, old_log_probs=old_log_probs)
    if trajectory_entropy is None:
        trajectory_entropy = _mean_entropy(entropy, completions)
    check_one_per_completion("trajectory_entropy", trajectory_entropy, completions)
    check_finite("entropy", trajectory_entropy, completions.uids)

    group_advantages = _group_advantages_from(
        rewards, advantages, completions, settings, norm_adv_by_std_in_grpo, epsilon
    )
    check_finite("advantage", group_advantages, completions.uids)

    if initial_entropy is None:
        initial_entropy = settings.initial_entropy
    highest_kept = highest_kept_entropy(group_advantages, settings, initial_entropy)
    regularized = regularize(group_advantages, trajectory_entropy, settings.entropy_coeff, highest_kept)

    setting = "token_weights"
    if token_weights is None:
        token_weights = settings.token_weight_function
        setting = f"{settings.section}.token_weights={settings.token_weights}"
    if token_weights is not None:
        fields = {
            "responses": responses,
            "advantages": group_advantages,
            "entropy": entropy,
            "old_log_probs": old_log_probs,
        }
        conflicts = None
        conflict_weights = torch.ones_like(group_advantages)
        own_weights = compute_own_weights(token_weights, fields, completions, setting)
        weighted = completions.spread(regularized.advantages) * own_weights
    else:
        own_weights = None
        conflicts = find_conflicts(responses, completions, group_advantages, settings)
        conflict_weights = compute_conflict_weights(
            group_advantages, settings.conflict_weight_positive, settings.conflict_weight_negative
        )
        # λ is 1 off the mask: every token gets its completion's advantage, and then those on the mask get λ times it.
        spread = completions.spread_in_numpy(regularized.advantages)
        advantages_on_mask = (regularized.advantages * conflict_weights).cpu().numpy()
        rows = conflicts.rows.cpu().numpy()
        columns = conflicts.columns.cpu().numpy()
        spread[rows, columns] = advantages_on_mask[rows]
        weighted = torch.from_numpy(spread).to(group_advantages.device)

    return GTPOAdvantage(
        advantages=weighted,
        group_advantages=group_advantages,
        trajectory_entropy=trajectory_entropy,
        regularizer=regularized.regularizer,
        keep=regularized.keep,
        unweighted_advantages=regularized.advantages,
        completions=completions,
        conflicts=conflicts,
        conflict_weights=conflict_weights,
        own_weights=own_weights,
    )


def compute_gtpo_outcome_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: GroupIds,
    responses: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the advantages of GTPO (arXiv:2508.03772, Eq. 11) with the names of verl's estimators.

    `token_level_rewards`, (bs, response_length), are summed to one reward per completion; `index` are the ids of the
    groups, verl's uids. All else is as for `compute_gtpo`, which says what is raised.

    Returns:
        (advantages, returns), the same (bs, response_length) tensor twice.
    """
    check_shapes(token_level_rewards.shape, response_mask=response_mask)
    result = compute_gtpo(
        rewards=token_level_rewards.sum(-1),
        responses=responses,
        response_mask=response_mask,
        group_ids=index,
        entropy=entropy,
        config=config,
        initial_entropy=initial_entropy,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        epsilon=epsilon,
    )
    return result.advantages, result.advantages


def compute_gtpo_token_advantages(
    advantages: torch.Tensor,
    index: GroupIds,
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    entropy: torch.Tensor,
    config: GTPOConfig | Mapping[str, Any] | None = None,
    initial_entropy: float | None = None,
) -> GTPOAdvantage:
    """Compute GTPO (arXiv:2508.03772, Eq. 9 to 11) on (bs,) advantages A_i that a trainer already has.

    To learn nothing from a completion, such as one that nobody scored, clear its row of `response_mask`: A = 0 alone
    leaves −γ⟨H⟩. All else is as for `compute_gtpo`, which says what is raised.
    """
    return compute_gtpo(
        advantages=advantages,
        responses=responses,
        response_mask=response_mask,
        group_ids=index,
        entropy=entropy,
        config=config,
        initial_entropy=initial_entropy,
    )


def compute_group_advantages(
    rewards: torch.Tensor,
    group_ids: GroupIds | Completions,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    min_correct_reward: float | None = None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute A_i of Sec. 3, as in GRPO: (R_i − mean(R)) / (std(R) + epsilon) over the completions of one group.

    Returns (bs,) for (bs,) rewards, at least float32. It is exactly 0 where R_i is the mean, and for a group of one.
    Without `norm_adv_by_std_in_grpo` it is R_i − mean(R). With `min_correct_reward` it is at most 0 where R_i is lower.
    With `base`, (bs,) differences of rewards, A_i is taken from there, with the same zeros and the same limit; it is
    not divided by the standard deviation.
    `group_ids` are (bs,) ids, or the `Completions` of the batch, of which a row without tokens gets 0.

    The mean of 0.1, 0.2 and 0.3 is 0.2, but the mean of these numbers as float32 is slightly off, and the sign of that
    error would decide λ. So a deviation of at most four ulps of the group's largest |R| becomes 0: half an ulp for the
    rounding of the reward, as much for that of the mean, and the rest for rewards that are sums of rounded parts. It is
    the size of the rewards that counts, and not their range: 100.1, 100.2 and 100.3 have the rounding errors of 100.
    Whole rewards below 2^21 / G lose nothing: their deviations are 0 or larger than this limit.

    Raises:
        ValueError: a reward that is not finite; rewards or `base` that are not (bs,).
    """
    if rewards.ndim != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: give one per completion, (bs,)")
    if isinstance(group_ids, Completions):
        completions = group_ids
    else:
        completions = Completions(torch.ones_like(rewards, dtype=torch.bool).unsqueeze(-1), group_ids)
    check_one_per_completion("rewards", rewards, completions)
    if base is not None:
        check_one_per_completion("base", base, completions)
    check_finite("reward", rewards, completions.uids)
    groups = completions.groups
    exact = rewards.double()
    sizes = groups.bincount()
    largest = torch.zeros_like(exact).scatter_reduce(0, groups, exact.abs(), "amax")

    if base is None:
        # Once the group's highest reward is subtracted, equal rewards are exactly 0, and so is their mean.
        highest = exact.scatter_reduce(0, groups, exact, "amax", include_self=False)
        exact = exact - highest[groups]
        means = groups.bincount(exact) / sizes
        deviation = exact - means[groups]
    else:
        deviation = torch.where(sizes[groups] > 1, base, 0)
    rounding = 4 * torch.finfo(torch.float32).eps * largest[groups]
    deviation = torch.where(deviation.abs() > rounding, deviation, 0)

    if norm_adv_by_std_in_grpo and base is None:
        variance = groups.bincount(deviation.square()) / (sizes - 1).clamp(min=1)
        deviation = deviation / (variance.sqrt() + epsilon)[groups]
    if min_correct_reward is not None:
        deviation = torch.where(rewards.float() < min_correct_reward, deviation.clamp(max=0), deviation)
    return deviation.to(torch.promote_types(rewards.dtype, torch.float32))


def compute_trajectory_entropy(entropy: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Compute the mean entropy of each completion, ⟨H⟩_i = Σ_t H(π(·|s_t)) / |o_i| (Sec. 4.2).

    Entropy, in nats, and mask are (bs, response_length); returns (bs,) float32, nats per token, 0 for a row without
    tokens. It carries no gradient.
    """
    return Completions(response_mask, range(len(response_mask))).mean(entropy)


@torch.no_grad()
def entropy_from_logits(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Compute H(π(·|s_t)) = −Σ_v π(v|s_t) log π(v|s_t) from logits of shape (…, vocabulary): (…) float32, nats.

    `temperature` is the one that completions are sampled at. The result carries no gradient; a logit of −inf is a token
    that cannot be sampled.
    """
    positions = logits.reshape(-1, logits.shape[-1])
    entropies = []
    for part in positions.split(1024):  # float32 logits of a whole batch can be larger than the model
        probabilities = (part.float() / temperature).softmax(-1)
        entropies.append(torch.special.entr(probabilities).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


def compute_completion_filter(
    trajectory_entropy: torch.Tensor,
    threshold: float | torch.Tensor,
    advantages: torch.Tensor | None = None,
    initial_entropy: float | None = None,
) -> torch.Tensor:
    """Return δ of Eq. 10, (bs,) bool: whether the (bs,) ⟨H⟩_i are at most the threshold.

    The threshold is a number, or (bs,), a number for each completion; entropies are in nats per token. With (bs,)
    `advantages`, before the entropy term, only those below 0 are filtered (OnlyNeg, Fig. 4c). With `initial_entropy`,
    ⟨H⟩_ini, the filter acts only if that is below the threshold; without, it acts.

    Raises:
        ValueError: `initial_entropy` is no entropy.
    """
    keep = trajectory_entropy <= threshold
    if advantages is not None:
        keep = keep | (advantages >= 0)
    if initial_entropy is not None:
        check_initial_entropy(initial_entropy)
        acts = torch.as_tensor(initial_entropy < threshold, device=keep.device)
        keep = keep | ~acts
    return keep


def highest_kept_entropy(advantages: torch.Tensor, config: GTPOConfig, initial_entropy: float | None) -> torch.Tensor:
    """Return the highest ⟨H⟩_i that δ_i keeps with these settings (Eq. 10), nats per token: (bs,) float64.

    It is infinite where the filter is off or, with `filter_scope="negative"`, where A_i, of the (bs,) `advantages`, is
    not negative. Raises what `GTPOConfig.filter_is_active` raises.
    """
    infinite = torch.full_like(advantages, math.inf, dtype=torch.float64)
    if not config.filter_is_active(initial_entropy):
        return infinite
    # Entropies are float32, in which ln 2 is rounded up. The threshold has to be rounded alike: at ln 2 δ is 1.
    threshold = torch.tensor(config.entropy_threshold, dtype=torch.float32, device="cpu").item()
    highest = torch.full_like(infinite, threshold)
    if config.filter_scope == "negative":
        highest = torch.where(advantages < 0, highest, infinite)
    return highest


class Regularized(NamedTuple):
    """The advantages of completions after δ and the entropy term, and these two."""

    advantages: torch.Tensor  # (bs,), δ_i (A_i − γ⟨H⟩_i)
    regularizer: torch.Tensor  # (bs,), γ⟨H⟩_i
    keep: torch.Tensor  # (bs,) bool, δ_i


def regularize(
    group_advantages: torch.Tensor,
    trajectory_entropy: torch.Tensor,
    entropy_coeff: float | torch.Tensor,
    highest_kept: torch.Tensor,
) -> Regularized:
    """Return δ_i (A_i − γ⟨H⟩_i) of Eq. 11, which λ_{i,t} then multiplies.

    Args:
        group_advantages, trajectory_entropy: (bs,), A_i, and ⟨H⟩_i in nats per token.
        entropy_coeff: γ, or (bs,) the same γ in each row.
        highest_kept: (bs,), `highest_kept_entropy`.
    """
    regularizer = entropy_coeff * trajectory_entropy
    keep = compute_completion_filter(trajectory_entropy, highest_kept)
    return Regularized(torch.where(keep, group_advantages - regularizer, 0), regularizer, keep)


def _group_advantages_from(
    rewards: torch.Tensor | None,
    advantages: torch.Tensor | None,
    completions: Completions,
    settings: GTPOConfig,
    norm_by_std: bool,
    epsilon: float,
) -> torch.Tensor:
    """Return A_i, from the rewards or the advantages that `compute_gtpo` is given."""
    if advantages is not None:
        check_one_per_completion("advantages", advantages, completions)
    if rewards is not None:
        check_one_per_completion("rewards", rewards, completions)
        least = settings.min_correct_reward
        return compute_group_advantages(rewards, completions, norm_by_std, epsilon, least, base=advantages)
    if advantages is None:
        raise ValueError("give rewards, or advantages: A_i, one per completion")
    if settings.min_correct_reward is not None:
        key = f"{settings.section}.min_correct_reward={settings.min_correct_reward!r}"
        raise ValueError(f"{key}: leave it out, and limit the A_i yourself")
    return advantages


def _mean_entropy(entropy: torch.Tensor | None, completions: Completions) -> torch.Tensor:
    """Return ⟨H⟩_i, or without entropies zeros, with which δ = 1 and γ⟨H⟩ = 0."""
    if entropy is None:
        return torch.zeros(completions.shape[:1], device=completions.device)
    means = completions.mean(entropy)
    if not len(means):
        return means
    # With logits in 16 bits an entropy may be a quarter of a nat too low, but as often it is too high. So the mean of a
    # completion may be below 0, but hardly that of a batch.
    if means.min() < -0.25 or means.mean() < -0.01:
        row = int(means.argmin())
        raise ValueError(
            f"the entropy of row {row} (uid {completions.uids[row]}) is {means[row]:.4g} nats per token, and the mean "
            f"of the batch {means.mean():.4g}: an entropy is at least 0; were log-probabilities given?"
        )
    return means


def check_finite(name: str, values: torch.Tensor, uids: Sequence[Hashable]) -> None:
    """Raise a ValueError on the first of (bs,) values that is not finite, naming its row and uid."""
    rows = (~values.isfinite()).nonzero().flatten().tolist()
    if rows:
        row = rows[0]
        raise ValueError(f"the {name} of row {row} (uid {uids[row]}) is {values[row]}: find out why before training")
