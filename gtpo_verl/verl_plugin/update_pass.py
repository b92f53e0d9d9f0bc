"""GTPO's entropy from the update's own forward pass, `algorithm.gtpo.entropy_from=update` (arXiv:2508.03772, Eq. 11).

The estimator then knows A_i and λ_{i,t} alone and hands λA to the update, with five numbers for each row beside it.
Where the actor computes its loss it has the entropy too: advantages ← δ_i (λA − γ⟨H⟩_i λ), without gradient. Each ⟨H⟩_i
goes back among the update's metrics, so that the trainer logs what it logs otherwise.
"""

from typing import Any

import torch

from gtpo_verl.config import GTPOConfig

ROWS = "gtpo_rows"
"""Field of a batch, (bs, 5) float64: place of the row in the batch, A_i, γ, the highest ⟨H⟩_i that δ_i keeps, and 1
where the token dump asks for the entropy of each token."""

ENTROPIES = "gtpo_entropies"
"""Metric of the actor: a list of (place of the row in the batch, ⟨H⟩_i, the entropy of each token or None)."""

Entropies = list[tuple[int, float, list[float] | None]]


def make_rows(group_advantages: torch.Tensor, config: GTPOConfig, initial_entropy: float | None) -> torch.Tensor:
    """The field `ROWS` of a batch.

    Args:
        group_advantages (torch.Tensor): (bs,), A_i.
        config (GTPOConfig): the settings.
        initial_entropy (float | None): ⟨H⟩_ini in nats per token.

    Raises:
        ValueError: the filter needs the initial entropy, which is None.
    """
    advantages = group_advantages.double()
    highest = torch.full_like(advantages, torch.inf)
    if config.filter_is_active(initial_entropy):
        may_be_dropped = advantages < 0 if config.filter_scope == "negative" else torch.ones_like(advantages).bool()
        highest[may_be_dropped] = config.entropy_threshold
    coeff = torch.full_like(advantages, config.entropy_coeff)
    dumped = torch.zeros_like(advantages)
    return torch.stack([torch.arange(len(advantages)), advantages, coeff, highest, dumped], dim=-1)


@torch.no_grad()
def apply_entropy(
    advantages: torch.Tensor, response_mask: torch.Tensor, entropy: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of Eq. 11, for each row by itself.

    λ_{i,t} is advantages / A_i; where A_i = 0 nothing conflicts, and it is 1.

    Args:
        advantages (torch.Tensor): (bs, response_length), λ_{i,t} A_i.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens.
        entropy (torch.Tensor): (bs, response_length), in nats.
        rows (torch.Tensor): (bs, 5), the field `ROWS`.

    Returns:
        The advantages, (bs, response_length), and ⟨H⟩_i, (bs,) in nats per token; 0 for a row without tokens.
    """
    mask = response_mask.bool()
    total = torch.where(mask, entropy, 0).sum(-1, dtype=torch.float64)
    means = (total / mask.sum(-1).clamp(min=1)).float()
    _, group_advantage, coeff, highest, _ = rows.unbind(-1)
    regularized = torch.where(means <= highest, group_advantage - coeff * means, 0).unsqueeze(-1)
    group_advantage = group_advantage.unsqueeze(-1)
    weights = torch.where(group_advantage == 0, mask.double(), advantages / group_advantage)
    return (regularized * weights).to(advantages.dtype), means


def apply_in_actor(config: Any, model_output: dict[str, Any], data: Any) -> tuple[torch.Tensor, Entropies]:
    """`apply_entropy` on a micro-batch, as verl's `ppo_loss` gets it.

    Args:
        config: verl's ActorConfig.
        model_output: has `entropy`, which is detached here, unless the loss has verl's own entropy term.
        data: TensorDict with `ROWS`, left as it is.

    Returns:
        The new advantages, (bs, response_length), and the value of the metric `ENTROPIES`.

    Raises:
        RuntimeError: the forward pass computed no entropy.
    """
    from verl.workers.utils.losses import no_padding_2_padding

    if model_output.get("entropy") is None:
        raise RuntimeError(
            "algorithm.gtpo.entropy_from=update, but the actor's forward pass computed no entropy: "
            "set actor_rollout_ref.actor.calculate_entropy=True"
        )
    if config.entropy_coeff == 0:
        model_output["entropy"] = model_output["entropy"].detach()  # which frees its graph before the backward pass
    entropy = no_padding_2_padding(model_output["entropy"].detach(), data)
    rows, response_mask, advantages = (_padded(data[name]) for name in (ROWS, "response_mask", "advantages"))
    advantages, means = apply_entropy(advantages, response_mask, entropy, rows)
    tokens = [row.tolist() if dumped else None for row, dumped in zip(entropy, rows[:, -1].tolist(), strict=True)]
    return advantages, list(zip(rows[:, 0].long().tolist(), means.tolist(), tokens, strict=True))


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_padded_tensor(0) if tensor.is_nested else tensor


def gather_means(entropies: Entropies, rows: int) -> torch.Tensor:
    """(rows,) ⟨H⟩_i from the metric `ENTROPIES` of a whole update; nan where there is none, of several the first.

    Several for a row come of `ppo_epochs` above 1, and from ranks that share their rows.
    """
    gathered = torch.full((rows,), torch.nan)
    for row, mean, _ in reversed(entropies):
        gathered[row] = mean
    return gathered


def gather_tokens(entropies: Entropies, shape: torch.Size) -> torch.Tensor:
    """The entropy of each token, (bs, response_length), of the rows of which the dump has asked for it; 0 elsewhere."""
    gathered = torch.zeros(shape)
    for row, _, tokens in reversed(entropies):
        if tokens is not None:
            own = torch.tensor(tokens[: shape[1]])
            gathered[row, : len(own)] = own
    return gathered
