"""Conflict tokens of GTPO and their weights λ (arXiv:2508.03772, Sec. 5.1).

A token v is a conflict token at position p of a group if it is there in a completion with A > 0 and in one with A < 0:
counted from the first token for the forward mask, from the last token for the backward mask. Positions count a
completion's own tokens (`response_mask` = 1), so tool output inside a response shifts nothing.
"""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import torch

from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig

_BLOCK = 32  # positions looked at together; later blocks only while a run continues


class Conflicts(NamedTuple):
    """The conflict mask M = forward OR backward of a batch: its tokens are `responses[rows, columns]`.

    Of a user's own mask the last three are unknown.
    """

    rows: torch.Tensor  # (n,) int64
    columns: torch.Tensor  # (n,) int64
    conflict_len: torch.Tensor  # (bs,) int64, tokens on M
    prefix_len: torch.Tensor | None = None  # (bs,) int64, tokens on the forward mask
    suffix_len: torch.Tensor | None = None  # (bs,) int64, tokens on the backward mask
    # (bs,) bool, whether the forward mask runs past the beginning that all completions of the prompt share
    forks: torch.Tensor | None = None

    def ends(self, row: int) -> dict[str, int]:
        """`prefix_len` and `suffix_len` of a row, where they are known."""
        lengths = {"prefix_len": self.prefix_len, "suffix_len": self.suffix_len}
        return {name: int(length[row]) for name, length in lengths.items() if length is not None}


def compute_conflict_mask(
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    index: Iterable[Hashable],
    span: str = "leading",
    masks: str = "both",
) -> torch.Tensor:
    """`find_conflicts` as a (bs, response_length) bool mask; span and masks are keys of `GTPOConfig`."""
    config = GTPOConfig(conflict_span=span, conflict_masks=masks)
    conflicts = find_conflicts(responses, Completions(response_mask, index), advantages, config)
    mask = torch.zeros_like(responses, dtype=torch.bool)
    mask[conflicts.rows, conflicts.columns] = True
    return mask


def compute_conflict_weights(advantages: torch.Tensor, positive: float = 2.0, negative: float = 0.0) -> torch.Tensor:
    """λ of each completion's conflict tokens (arXiv:2508.03772, Eq. 9), (bs,) float32; off the conflict mask it is 1.

    `positive` where the (bs,) advantage is above 0, `negative` where it is below: with the paper's 2 and 0, negative
    updates of conflict tokens are skipped and positive ones doubled. A = 0, which Eq. 9 leaves open, keeps λ = 1.
    """
    return torch.where(advantages > 0, positive, torch.where(advantages < 0, negative, 1.0))


@torch.no_grad()
def find_conflicts(
    responses: torch.Tensor, completions: Completions, advantages: torch.Tensor, config: GTPOConfig
) -> Conflicts:
    """Return the conflict mask M of each completion, forward OR backward (arXiv:2508.03772, Sec. 5.1).

    The forward mask is a run of conflict tokens met from the first token, the backward mask one met from the last;
    `config.conflict_span` says which run. The partner of opposite sign may differ from token to token. No token is
    masked in a group without completions of both signs, in particular where all rewards are equal.

    With `pkg://module.function` M is what that returns for copies of (responses, response_mask, groups, advantages):
    (bs, response_length) bool, True on own tokens only. `groups` are (bs,) numbers of equal uids *and* prompts.

    Args:
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        advantages (torch.Tensor): (bs,), one per completion, before the entropy term; only the sign is used.
        completions, config: whose `prompts`, `conflict_span` and `conflict_masks` are used.

    Raises:
        ValueError: the user's function returns something else, or masks a token that is no completion's own.
    """
    bs, width = responses.shape
    if advantages.shape != (bs,):
        raise ValueError(f"advantages has shape {tuple(advantages.shape)}: give one per completion, {(bs,)}")
    if function := config.own_mask:
        mask = function(*(x.clone() for x in (responses, completions.mask, completions.prompts, advantages)))
        _check_own_mask(mask, completions, f"{config.section}.conflict_span={config.conflict_span}")
        rows, columns = mask.nonzero(as_tuple=True)
        return Conflicts(rows, columns, mask.sum(-1))
    forward = backward = unshared = completions.lengths.new_empty(0)
    if config.conflict_span != "none" and config.conflict_masks != "backward":
        forward, unshared = _find_runs(responses, completions, advantages, config.conflict_span, from_end=False)
    if config.conflict_span != "none" and config.conflict_masks != "forward":
        backward, _ = _find_runs(responses, completions, advantages, config.conflict_span, from_end=True)
    either = torch.cat([forward, backward]).unique()
    first, last, both, forks = ((x // width).bincount(minlength=bs) for x in (forward, backward, either, unshared))
    return Conflicts(either // width, either % width, both, first, last, forks > 0)


def _check_own_mask(mask: Any, completions: Completions, setting: str) -> None:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.shape != completions.shape:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"{setting} returned {found}: it must be torch.bool {tuple(completions.shape)}")
    for row in (mask & ~completions.mask).any(-1).nonzero().flatten().tolist():
        uid = completions.uids[row]
        raise ValueError(f"{setting} masks a token of row {row} (uid {uid}) that is not its own: `& response_mask`")


def _find_runs(
    responses: torch.Tensor, completions: Completions, advantages: torch.Tensor, span: str, from_end: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the tokens on the forward mask, or from the end on the backward mask, in the flattened responses; and
    those among them at which another completion of the prompt has another token, or none.

    The rows of a prompt are left once all their runs have ended: the work grows with the conflicts, not the responses.
    """
    rows = _with_both_signs(completions.prompts, advantages)[0].nonzero().flatten()
    sizes = completions.prompts.bincount()
    begun = torch.full((len(rows), 1), span != "first", device=rows.device)
    ended = torch.zeros_like(begun)
    found, unshared, start = [rows.new_empty(0)], [rows.new_empty(0)], 0
    while len(rows):
        prompts, lengths = completions.prompts[rows, None], completions.lengths[rows, None]
        positions = torch.arange(start, start + _BLOCK, device=rows.device)
        is_token = positions < lengths
        numbers = torch.where(is_token, lengths - 1 - positions if from_end else positions, 0)
        places = completions.places(rows[:, None], numbers)

        tokens = responses.take(places)
        tokens = tokens - tokens.min()
        keys = (prompts * _BLOCK + positions) * (tokens.max() + 1) + tokens  # (prompt, position, token) as one number
        conflict, sharing = _with_both_signs(torch.where(is_token, keys, -1), advantages[rows])
        conflict &= is_token
        if span != "all":  # the last column of the block before tells whether a run has begun or ended
            begun = begun[:, -1:] | (conflict.cumsum(-1) > 0)
            ended = ended[:, -1:] | ((begun & ~conflict).cumsum(-1) > 0)
            conflict &= ~ended
        found.append(places.masked_select(conflict))
        unshared.append(places.masked_select(conflict & (sharing < sizes[prompts])))

        start += _BLOCK
        goes_on = ~ended[:, -1:] & (lengths > start)
        stay = torch.isin(prompts, prompts[goes_on]).squeeze(-1)
        rows, begun, ended = rows[stay], begun[stay], ended[stay]
    return torch.cat(found), torch.cat(unshared)


def _with_both_signs(keys: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the (bs, …) keys occur both in a row with A > 0 and in one with A < 0; and how often each occurs."""
    _, numbers, counts = keys.unique(return_inverse=True, return_counts=True)
    positive, negative = torch.zeros(2, keys.numel(), dtype=torch.bool, device=keys.device)
    positive[numbers[advantages > 0]] = True
    negative[numbers[advantages < 0]] = True
    return (positive & negative).take(numbers), counts.take(numbers)
