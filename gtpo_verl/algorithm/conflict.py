"""Conflict tokens of GTPO and their weights λ (arXiv:2508.03772, Sec. 5.1).

A token v is a conflict token at position p of a group if it is there in a completion with A > 0 and in one with A < 0:
counted from the first token for the forward mask, from the last token for the backward mask. Positions count a
completion's own tokens (`response_mask` = 1), so tool output inside a response shifts nothing.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gtpo_verl.algorithm.completions import (
    Completions,
    GroupIds,
    as_completions,
    check_one_per_completion,
    check_shapes,
)
from gtpo_verl.algorithm.config import ConflictMasks, ConflictSpan, GTPOConfig

_BLOCK = 32  # positions looked at together; later blocks only while a run continues


class Conflicts(NamedTuple):
    """The conflict mask M = forward OR backward of a batch: its tokens are `responses[rows, columns]`."""

    rows: torch.Tensor  # (n,) int64
    columns: torch.Tensor  # (n,) int64
    conflict_len: torch.Tensor  # (bs,) int64, tokens on M
    prefix_len: torch.Tensor  # (bs,) int64, tokens on the forward mask
    suffix_len: torch.Tensor  # (bs,) int64, tokens on the backward mask
    # (bs,) bool, whether the forward mask runs past the beginning that all completions of the prompt share
    forks: torch.Tensor

    def lengths_of(self, row: int) -> dict[str, int]:
        """Return a row's `prefix_len` and `suffix_len`."""
        return {"prefix_len": int(self.prefix_len[row]), "suffix_len": int(self.suffix_len[row])}

    def spread(self, weights: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return (bs, response_length) float32, of this shape, with each completion's weight, of (bs,), on M and 1 off
        it."""
        spread = torch.ones(shape, device=weights.device)
        spread[self.rows, self.columns] = weights[self.rows]
        return spread


def compute_conflict_mask(
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    index: GroupIds | Completions,
    span: ConflictSpan = "leading",
    masks: ConflictMasks = "both",
) -> torch.Tensor:
    """Compute the conflict mask M (arXiv:2508.03772, Sec. 5.1), (bs, response_length) bool: the tokens on which λ acts.

    `span` and `masks` are the keys `conflict_span` and `conflict_masks` of `GTPOConfig`. All else is as for
    `compute_token_weights`; `index` are the ids of the groups.

    Raises:
        ValueError: wrong shapes, a wrong mask, or a wrong span or masks.
    """
    config = GTPOConfig(conflict_span=span, conflict_masks=masks)
    conflicts = find_conflicts(responses, as_completions(response_mask, index), advantages, config)
    mask = torch.zeros_like(responses, dtype=torch.bool)
    mask[conflicts.rows, conflicts.columns] = True
    return mask


def compute_conflict_weights(advantages: torch.Tensor, positive: float = 2.0, negative: float = 0.0) -> torch.Tensor:
    """Compute λ of each completion's conflict tokens (arXiv:2508.03772, Eq. 9), (bs,) float32; other tokens have λ = 1.

    It is `positive` where the (bs,) advantage is above 0 and `negative` where it is below: with the paper's 2 and 0,
    negative updates of conflict tokens are skipped and positive ones doubled. A = 0, which Eq. 9 leaves open, keeps
    λ = 1.
    """
    return torch.where(advantages > 0, positive, torch.where(advantages < 0, negative, 1.0))


def compute_token_weights(
    *,
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    group_ids: GroupIds | Completions,
    advantages: torch.Tensor,
    config: GTPOConfig | Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Compute λ_{i,t} (arXiv:2508.03772, Eq. 9), (bs, response_length) float32: 1 off the conflict mask.

    Responses, mask and ids are as for `compute_gtpo`; `advantages` are (bs,) A_i, before the entropy term.

    Raises:
        ValueError: the settings have `token_weights`, a rule in place of Eq. 9; wrong shapes; a wrong mask.
    """
    settings = GTPOConfig.from_config(config)
    if settings.token_weights is not None:
        raise ValueError(
            f"{settings.section}.token_weights={settings.token_weights} takes the place of Eq. 9: read "
            "compute_gtpo(…).token_weights"
        )
    conflicts = find_conflicts(responses, as_completions(response_mask, group_ids), advantages, settings)
    weights = compute_conflict_weights(advantages, settings.conflict_weight_positive, settings.conflict_weight_negative)
    return conflicts.spread(weights, responses.shape)


@torch.no_grad()
def find_conflicts(
    responses: torch.Tensor, completions: Completions, advantages: torch.Tensor, config: GTPOConfig
) -> Conflicts:
    """Return the conflict mask M of each completion, forward OR backward (arXiv:2508.03772, Sec. 5.1).

    The forward mask is a run of conflict tokens met from the first token, the backward mask one met from the last;
    `config.conflict_span` says which run. The partner of opposite sign may differ from token to token. No token is
    masked in a group without completions of both signs, in particular where all rewards are equal.

    Args:
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        advantages (torch.Tensor): (bs,), one per completion, before the entropy term; only the sign is used.
        completions (Completions): says which tokens are whose, and which completions answer one prompt.
        config (GTPOConfig): its `conflict_span` and `conflict_masks` are used.

    Raises:
        ValueError: responses that are not of the shape of the completions, or advantages that are not (bs,).
    """
    check_shapes(completions.shape, responses=responses)
    check_one_per_completion("advantages", advantages, completions)
    bs, width = responses.shape
    # Places are indices into the flattened (bs * response_length,) batch.
    forward = np.empty(0, dtype=int)
    forks = np.empty(0, dtype=int)
    backward = np.empty(0, dtype=int)
    if config.conflict_span != "none" and config.conflict_masks in ("both", "forward"):
        forward, forks = _find_runs(responses, completions, advantages, config.conflict_span, from_end=False)
    if config.conflict_span != "none" and config.conflict_masks in ("both", "backward"):
        backward, _ = _find_runs(responses, completions, advantages, config.conflict_span, from_end=True)
    # Each place once. numpy's unique takes a second for a large batch.
    on_either = np.sort(np.concatenate([forward, backward]))
    on_mask = on_either[np.diff(on_either, prepend=-1) > 0]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(responses.device)

    def per_row(places: np.ndarray) -> torch.Tensor:
        return tensor(np.bincount(places // width, minlength=bs))

    return Conflicts(
        rows=tensor(on_mask // width),
        columns=tensor(on_mask % width),
        conflict_len=per_row(on_mask),
        prefix_len=per_row(forward),
        suffix_len=per_row(backward),
        forks=per_row(forks) > 0,
    )


def _find_runs(
    responses: torch.Tensor, completions: Completions, advantages: torch.Tensor, span: str, from_end: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Find the tokens on the forward mask, or with `from_end` those on the backward mask.

    It looks at `_BLOCK` positions of all remaining completions at a time. A prompt whose runs have all ended is left,
    so that the work grows with the conflicts and not with the responses.

    Returns:
        Places of the tokens in the flattened responses; and those of them that are forks, where another completion of
        the prompt has another token, or none.
    """
    all_tokens = responses.cpu().numpy().reshape(-1)
    all_prompts = completions.prompts.cpu().numpy()
    all_lengths = completions.lengths.cpu().numpy()
    all_signs = advantages.sign().cpu().to(torch.int8).numpy()
    completions_of_prompt = np.bincount(all_prompts)

    is_in_mixed_prompt, _ = _shared_by_both_signs(all_prompts[:, None], all_signs)
    rows = np.flatnonzero(is_in_mixed_prompt)
    # Whether a completion's run has begun, and has ended, at each position of the block before.
    has_begun = np.full((len(rows), 1), span != "first")
    has_ended = np.zeros((len(rows), 1), dtype=bool)
    found = [np.empty(0, dtype=int)]
    forks = [np.empty(0, dtype=int)]
    start = 0
    while len(rows):
        prompts = all_prompts[rows, None]
        lengths = all_lengths[rows, None]
        positions = np.arange(start, start + _BLOCK)
        is_token = positions < lengths

        # Position p is a completion's p-th token, from its start or from its end.
        from_start = lengths - 1 - positions if from_end else np.broadcast_to(positions, is_token.shape)
        places = completions.places(rows[:, None], np.where(is_token, from_start, 0))
        tokens = all_tokens[places].astype(np.int64)

        # Completions share a token if these three numbers, packed into one, are equal.
        tokens -= tokens.min()
        keys = (prompts * _BLOCK + positions - start) * (tokens.max() + 1) + tokens
        keys[~is_token] = -1
        is_shared_by_both, times_shared = _shared_by_both_signs(keys, all_signs[rows])
        is_conflict = is_shared_by_both & is_token

        if span != "all":
            has_begun = has_begun[:, -1:] | (is_conflict.cumsum(-1) > 0)
            has_ended = has_ended[:, -1:] | ((has_begun & ~is_conflict).cumsum(-1) > 0)
            is_conflict &= ~has_ended
        found.append(places[is_conflict])
        forks.append(places[is_conflict & (times_shared < completions_of_prompt[prompts])])

        # Go on with the prompts of which a completion has a run that reaches the end of the block.
        start += _BLOCK
        goes_on = ~has_ended[:, -1] & (all_lengths[rows] > start)
        stay = np.isin(all_prompts[rows], all_prompts[rows][goes_on])
        rows = rows[stay]
        has_begun = has_begun[stay]
        has_ended = has_ended[stay]
    return np.concatenate(found), np.concatenate(forks)


def _shared_by_both_signs(keys: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the (bs, n) keys occur in a row of sign 1 and in one of sign −1; and how often each occurs."""
    if not keys.size:
        return np.zeros(keys.shape, dtype=bool), np.zeros(keys.shape, dtype=int)
    order = keys.argsort(axis=None, kind="stable")
    sorted_keys = keys.ravel()[order]
    sorted_signs = np.broadcast_to(signs[:, None], keys.shape).ravel()[order]

    # Equal keys are neighbours now.
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=sorted_keys[0] - 1))
    counts = np.diff(starts, append=keys.size)
    has_both = (np.maximum.reduceat(sorted_signs, starts) > 0) & (np.minimum.reduceat(sorted_signs, starts) < 0)

    has_both_of_key = np.empty(keys.size, dtype=bool)
    has_both_of_key[order] = has_both.repeat(counts)
    count_of_key = np.empty(keys.size, dtype=int)
    count_of_key[order] = counts.repeat(counts)
    return has_both_of_key.reshape(keys.shape), count_of_key.reshape(keys.shape)
