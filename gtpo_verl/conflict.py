"""Conflict-aware gradient correction of GTPO (arXiv:2508.03772, Sec. 5.1): conflict masks M and token weights λ.

A token v is a conflict token at position p of a group if it stands there in a completion with A > 0 and in one with
A < 0: counted from the first token for the forward mask, from the last token for the backward mask. Positions count a
completion's own tokens (`response_mask` = 1), so tool output inside a response shifts nothing.

Only the runs of conflict tokens at the two ends matter. So the masks look at a block of positions at a time, of many
groups at once, and drop a group as soon as its runs have ended: the work follows the conflict that is found, not the
response length, and never the vocabulary.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import torch

from gtpo_verl.config import CHOICES, GTPOConfig
from gtpo_verl.group import Completions, pick

# Token positions, and rows of whole groups, looked at together: below the 32,768 elements from which on torch divides
# an operation among threads, since many short operations would each wait for the slowest thread. For the same
# reason `pick` and `masked_select` stand in place of indexing.
_POSITIONS = 32
_ROWS = 1000


class Conflicts(NamedTuple):
    """Conflict tokens of a batch.

    Args:
        tokens (torch.Tensor): (n,) int64, where they stand in the flattened (bs * response_length,) responses: M =
            forward OR backward; a token on both masks may be there twice.
        prefix_len (torch.Tensor): (bs,) int64, tokens on the forward mask.
        suffix_len (torch.Tensor): (bs,) int64, tokens on the backward mask.
        conflict_len (torch.Tensor): (bs,) int64, tokens on either, each counted once.
    """

    tokens: torch.Tensor
    prefix_len: torch.Tensor
    suffix_len: torch.Tensor
    conflict_len: torch.Tensor


def compute_conflict_mask(
    responses: torch.Tensor,
    response_mask: torch.Tensor,
    advantages: torch.Tensor,
    index: Iterable[Hashable],
    span: str = "leading",
    masks: str = "both",
) -> torch.Tensor:
    """Conflict mask M of each completion, forward OR backward (arXiv:2508.03772, Sec. 5.1).

    The forward mask of a completion is a run of conflict tokens met from its first token, the backward mask one met
    from its last token. The partner of opposite sign may differ from token to token. No token is masked in a group
    without completions of both signs, in particular where all rewards are equal.

    Args:
        responses (torch.Tensor): (bs, response_length) int64 token ids.
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens; nothing else says what
            is a token.
        advantages (torch.Tensor): (bs,), one per completion, before the entropy term; only the sign is used.
        index: (bs,) uids; completions with equal uids are one group.
        span (str): `leading`, the run that starts at the first (last) token itself; `first`, the first run met from
            the end, wherever it starts; `all`, every conflict token; `none`.
        masks (str): `both`, `forward` or `backward`, to leave the other one out.

    Returns:
        (bs, response_length) bool, False off the response mask.

    Raises:
        ValueError: an unknown `span` or `masks`, or not one uid and one advantage per row.
    """
    conflicts = find_conflicts(responses, Completions(response_mask, index), advantages, span, masks)
    mask = torch.zeros(responses.shape, dtype=torch.bool, device=responses.device)
    mask.view(-1)[conflicts.tokens] = True
    return mask


def compute_conflict_weights(
    conflict_mask: torch.Tensor,
    advantages: torch.Tensor,
    positive: float = GTPOConfig.conflict_weight_positive,
    negative: float = GTPOConfig.conflict_weight_negative,
) -> torch.Tensor:
    """Token weights λ (arXiv:2508.03772, Eq. 9): 1 off the mask; on it `positive` where A > 0, `negative` where A < 0.

    With 2 and 0, negative updates of conflict tokens are skipped and positive ones doubled. A completion with A = 0,
    which Eq. 9 leaves open, keeps λ = 1.

    Args:
        conflict_mask (torch.Tensor): (bs, response_length) bool.
        advantages (torch.Tensor): (bs,), one per completion, before the entropy term.
        positive (float): λ on the mask where A > 0.
        negative (float): λ on the mask where A < 0.

    Returns:
        (bs, response_length) float32.
    """
    return torch.where(conflict_mask, sign_weights(advantages, positive, negative).unsqueeze(-1), 1.0)


def sign_weights(advantages: torch.Tensor, positive: float, negative: float) -> torch.Tensor:
    """λ of the conflict tokens of each completion, (bs,) float32: `compute_conflict_weights` on the mask."""
    weights = torch.ones(advantages.shape, dtype=torch.float32, device=advantages.device)
    return weights.masked_fill_(advantages > 0, positive).masked_fill_(advantages < 0, negative)


@torch.no_grad()
def find_conflicts(
    responses: torch.Tensor, completions: Completions, advantages: torch.Tensor, span: str, masks: str = "both"
) -> Conflicts:
    """Like `compute_conflict_mask`, as the places of the tokens instead of a mask."""
    for name, value in (("span", span), ("masks", masks)):
        if value not in (choices := CHOICES[f"conflict_{name}"]):
            raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}")
    if advantages.shape != responses.shape[:1]:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}: give one per completion, {responses.shape[:1]}"
        )
    sign = advantages.sign().to(torch.int8)
    table = completions.same_prompt
    member_sign = torch.where(table >= 0, sign[table], 0)
    table = table[(member_sign > 0).any(-1) & (member_sign < 0).any(-1)]
    prefix_len, suffix_len = torch.zeros_like(completions.lengths), torch.zeros_like(completions.lengths)
    tokens = [completions.lengths.new_empty(0)]
    if span != "none" and len(table):
        flat_responses = responses.reshape(-1)
        for rows in table.split(max(1, _ROWS // table.shape[1])):
            rows = rows[:, : int((rows[-1] >= 0).sum())].T  # groups are sorted by size: the last one is the widest
            if masks != "backward":
                tokens += _find_runs(flat_responses, completions, sign, rows, span, False, prefix_len)
            if masks != "forward":
                tokens += _find_runs(flat_responses, completions, sign, rows, span, True, suffix_len)
    found = torch.cat(tokens)
    if span == "leading":
        conflict_len = torch.minimum(prefix_len + suffix_len, completions.lengths)
    else:
        conflict_len = (found.unique() // responses.shape[1]).bincount(minlength=len(responses))
    return Conflicts(found, prefix_len, suffix_len, conflict_len)


def _find_runs(
    responses: torch.Tensor,
    completions: Completions,
    sign: torch.Tensor,
    rows: torch.Tensor,
    span: str,
    from_end: bool,
    run_len: torch.Tensor,
) -> list[torch.Tensor]:
    """Tokens of the runs of one direction, whose lengths are added to `run_len`.

    `responses` is flattened, `rows` is (members, groups), padded with -1.
    """
    lengths = torch.where(rows >= 0, completions.lengths[rows], 0)
    rows = rows.clamp(min=0)
    begun = torch.full(rows.shape, span != "first", device=rows.device)
    ended = torch.zeros_like(begun)
    found = []
    start = 0
    while rows.numel():
        offsets = torch.arange(start, start + _POSITIONS, device=rows.device)
        is_token = offsets < lengths.unsqueeze(-1)
        numbers = torch.where(is_token, lengths.unsqueeze(-1) - 1 - offsets if from_end else offsets, 0)
        tokens = completions.flat(rows.unsqueeze(-1), numbers)
        ids = torch.where(is_token, pick(responses, tokens), -1).int()
        conflict = _is_conflict(ids, sign[rows]) & is_token
        if span != "all":
            begun_here = begun.unsqueeze(-1) | (conflict.cumsum(-1) > 0)
            ended_here = ended.unsqueeze(-1) | ((begun_here & ~conflict).cumsum(-1) > 0)
            conflict &= ~ended_here
            begun, ended = begun_here[..., -1], ended_here[..., -1]
        found.append(tokens.masked_select(conflict))
        run_len.index_add_(0, rows.flatten(), conflict.sum(-1).flatten())
        start += _POSITIONS
        has_open_run = (~ended & (lengths > start)).any(0)
        rows, lengths, begun, ended = (x[:, has_open_run] for x in (rows, lengths, begun, ended))
    return found


def _is_conflict(tokens: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Whether each token stands at its position with both signs: (members, groups, k) ids, (members, groups) signs."""
    with_positive, with_negative = 1, 2
    sides = ((signs > 0) * with_positive + (signs < 0) * with_negative).to(tokens.dtype).unsqueeze(-1)
    seen, equal = torch.zeros_like(tokens), torch.empty_like(tokens)
    for partner, side in zip(tokens, sides, strict=True):  # all pairs at once would not fit in memory
        # Torch compares far faster into integers than into booleans.
        seen |= torch.eq(tokens, partner, out=equal).mul_(side)
    return seen == with_positive | with_negative
