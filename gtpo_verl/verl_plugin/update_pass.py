"""GTPO's entropy from the update's own forward pass, `algorithm.gtpo.entropy_from=update` (arXiv:2508.03772, Eq. 11).

The estimator then knows A_i and λ_{i,t} alone and hands λA to the update, with `UpdateInputs` beside it. Where the
actor computes its loss it has the entropy too: advantages ← δ_i (λA − γ⟨H⟩_i λ), without gradient. Each ⟨H⟩_i goes back
among the update's metrics, so that the trainer logs the same as with `entropy_from=old_log_prob`.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gtpo_verl.algorithm.advantage import highest_kept_entropy, regularize
from gtpo_verl.algorithm.config import GTPOConfig

ENTROPIES = "gtpo_entropies"
"""Metric of the actor: a list of `RowEntropy`."""

WEIGHT_ALONE = 2.0**-100
"""What λ is multiplied by to reach the actor, where A_i = 0 and λ is a user's own: a power of 2 rounds nothing, and
next to advantages it is 0."""

_ROUNDING = 0.25
"""Nats by which bfloat16, whose numbers have 8 bits, can miss an entropy or log-probability of logits up to 64."""


def entropy_range(tokenizer: Any) -> tuple[float, float]:
    """Return 0 and ln V, nats per token; V is taken as twice the tokenizer's size, since output layers are padded."""
    highest = math.inf
    if tokenizer is not None:
        highest = math.log(2 * len(tokenizer))
    return 0.0, highest


def check_range(
    name: str, values: torch.Tensor, bounds: tuple[float, float], ids: Sequence, id_name: str = "uid"
) -> None:
    """Raise a ValueError on the first of (bs,) values in nats that no distribution has, naming its row and id."""
    lowest, highest = bounds
    is_impossible = (values < lowest - _ROUNDING) | (values > highest + _ROUNDING)
    rows = is_impossible.nonzero().flatten().tolist()
    if rows:
        row = rows[0]
        raise ValueError(
            f"the {name} of row {row} ({id_name} {ids[row]}) is {values[row]:.4g} nats, which must be from "
            f"{lowest:.4g} to {highest:.4g}: the forward pass is wrong; if it uses fused kernels, set "
            "actor_rollout_ref.model.use_fused_kernels=False"
        )


class RowEntropy(NamedTuple):
    """The entropy of one row of the batch, as its update saw it."""

    row: int  # its place in the batch
    mean: float  # ⟨H⟩_i, nats per token
    tokens: list[float] | None  # nats, if the token dump asks for them


class UpdateInputs(NamedTuple):
    """What the actor needs of each row to apply δ and −γ⟨H⟩: tensors of shape (bs,).

    They travel in verl's batch as fields `gtpo_<name>` of shape (bs, 1), wherever its rows go.
    """

    row: torch.Tensor  # int64, its place in the batch
    group_advantage: torch.Tensor  # float64, A_i
    # float64, the factor by which λ was multiplied to be the advantage: A_i, or `WEIGHT_ALONE`; 0 where all λ are 1
    weight_scale: torch.Tensor
    entropy_coeff: torch.Tensor  # float64, γ
    highest_entropy: torch.Tensor  # float64, the highest ⟨H⟩_i that δ_i keeps
    wants_token_entropy: torch.Tensor  # bool, whether the token dump asks for the entropy of each token

    @classmethod
    def make(
        cls,
        group_advantages: torch.Tensor,
        config: GTPOConfig,
        initial_entropy: float | None,
        weight_scale: torch.Tensor | None = None,
    ) -> "UpdateInputs":
        """Make the inputs from (bs,) A_i, ⟨H⟩_ini in nats per token and `weight_scale`, which is A_i by default.

        Raises what `GTPOConfig.filter_is_active` raises.
        """
        advantages = group_advantages.double()
        return cls(
            row=torch.arange(len(advantages)),
            group_advantage=advantages,
            weight_scale=advantages if weight_scale is None else weight_scale.double(),
            entropy_coeff=torch.full_like(advantages, config.entropy_coeff),
            highest_entropy=highest_kept_entropy(advantages, config, initial_entropy),
            wants_token_entropy=torch.zeros_like(advantages, dtype=torch.bool),
        )

    def to_batch(self) -> dict[str, torch.Tensor]:
        """Return the fields of a batch of verl."""
        return {f"gtpo_{name}": column.unsqueeze(-1) for name, column in self._asdict().items()}

    @classmethod
    def from_batch(cls, data: Any) -> "UpdateInputs | None":
        """Read the inputs from the fields of a batch of verl, or of a part of it; None if it has none."""
        if "gtpo_row" not in data.keys():
            return None
        field_names = {name: f"gtpo_{name}" for name in cls._fields}
        padded = data.select(*field_names.values()).to_padded_tensor()
        return cls(**{name: padded[field].squeeze(-1) for name, field in field_names.items()})


@torch.no_grad()
def apply_entropy(
    advantages: torch.Tensor, response_mask: torch.Tensor, entropy: torch.Tensor, inputs: UpdateInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of Eq. 11, for each row by itself.

    λ_{i,t} is advantages / A_i. Where A_i = 0 nothing conflicts and it is 1, or a user's own (`WEIGHT_ALONE`).

    Args:
        advantages, response_mask, entropy: (bs, response_length), λ_{i,t} A_i, 1 on own tokens, and nats.
        inputs (UpdateInputs): of these rows.

    Returns:
        The advantages, (bs, response_length), and ⟨H⟩_i, (bs,) in nats per token; 0 for a row without tokens.
    """
    mask = response_mask.bool()
    total = torch.where(mask, entropy, 0).sum(-1, dtype=torch.float64)
    means = (total / mask.sum(-1).clamp(min=1)).float()
    regularized = regularize(inputs.group_advantage, means, inputs.entropy_coeff, inputs.highest_entropy)
    scale = inputs.weight_scale.unsqueeze(-1)
    weights = torch.where(scale == 0, mask.double(), advantages / scale)
    weighted = regularized.advantages.unsqueeze(-1) * weights
    return weighted.to(advantages.dtype), means


def apply_in_actor(
    config: Any, model_output: dict[str, Any], data: Any, inputs: UpdateInputs
) -> tuple[torch.Tensor, list[RowEntropy]]:
    """Return `apply_entropy` of a micro-batch, (bs, response_length), and the value of the metric `ENTROPIES`.

    Config (verl's ActorConfig), model output and data are as verl's `ppo_loss` gets them; the output's `entropy` is
    detached, unless the loss has verl's own entropy term.

    Raises:
        RuntimeError: the forward pass computed no entropy.
        ValueError: an entropy that no distribution has; the message names the row of the batch.
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
    padded = data.select("response_mask", "advantages").to_padded_tensor()
    advantages, means = apply_entropy(padded["advantages"], padded["response_mask"], entropy, inputs)
    bounds = entropy_range(getattr(config.model_config, "tokenizer", None))
    check_range("entropy", means, bounds, inputs.row.tolist(), "row of the batch")
    entropies = []
    mean_of_row = means.tolist()
    is_wanted = inputs.wants_token_entropy.tolist()
    for place, row in enumerate(inputs.row.tolist()):
        tokens = None
        if is_wanted[place]:
            tokens = entropy[place].tolist()
        entropies.append(RowEntropy(row=row, mean=mean_of_row[place], tokens=tokens))
    return advantages, entropies


def gather(entropies: list[RowEntropy], shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ⟨H⟩_i of a whole update, (bs,), and the entropy of each token, (bs, response_length).

    ⟨H⟩_i is nan where there is none, and a token's entropy 0 where the dump has not asked for it. A row can be there
    several times, with `ppo_epochs` above 1 and from ranks that share their rows; its first entropy counts.
    """
    means = torch.full(shape[:1], torch.nan)
    tokens = torch.zeros(shape)
    for entropy in reversed(entropies):  # so that the first of a row is written last
        means[entropy.row] = entropy.mean
        if entropy.tokens is not None:
            in_response = torch.tensor(entropy.tokens[: shape[1]])
            tokens[entropy.row, : len(in_response)] = in_response
    return means, tokens
