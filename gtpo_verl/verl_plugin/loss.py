"""The policy loss of GTPO (arXiv:2508.03772, Eq. 8 and 11): −r·Â, unclipped."""

from typing import Any

import torch


def compute_policy_loss_gtpo(
    old_log_prob: torch.Tensor,
    log_prob: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Policy loss of GTPO (arXiv:2508.03772, Eq. 11), with verl's `PolicyLossFn` signature.

    pg_losses = −exp(log_prob − old_log_prob) · advantages, aggregated by `loss_agg_mode`, which is
    `seq-mean-token-mean` in Eq. 11. The gradient of a token is −r · advantage · ∇log π. λ, δ and the entropy term are
    in `advantages` already. Unlike GRPO there is no clipping: the paper makes one update per rollout, where r = 1. For
    several updates per rollout take one of verl's clipped losses with the same advantages.

    Args:
        old_log_prob, log_prob: (bs, response_length), under the policy of the rollout, and the current one.
        advantages (torch.Tensor): (bs, response_length), from `compute_gtpo_outcome_advantage`.
        response_mask (torch.Tensor): (bs, response_length), 1 on the tokens that are trained.
        loss_agg_mode (str): one of verl's `agg_loss` modes.
        config: verl's actor config, for its `global_batch_info`; None in a call outside of a worker.
        rollout_is_weights (torch.Tensor | None): (bs, response_length), weights of verl's rollout correction.

    Returns:
        The scalar loss, and metrics: `actor/ppo_kl`, the mean of old_log_prob − log_prob (nats per token).
    """
    from verl.trainer.ppo.core_algos import agg_loss
    from verl.utils.torch_functional import masked_mean

    negative_approx_kl = torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0)
    pg_losses = -torch.exp(negative_approx_kl) * advantages
    if rollout_is_weights is not None:
        pg_losses = pg_losses * rollout_is_weights
    global_batch_info = {} if config is None else config.global_batch_info
    pg_loss = agg_loss(loss_mat=pg_losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **global_batch_info)
    return pg_loss, {"actor/ppo_kl": masked_mean(-negative_approx_kl, response_mask).detach().item()}
