"""Arms of blocks 7 to 9: other forward masks than GTPO's (arXiv:2508.03772, Eq. 9), and other A_i.

`never_positive_if_wrong` became the package's key `min_correct_reward`, the others are none. They are written row by
row, to be read rather than to be fast.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.algorithm.conflict import compute_conflict_mask, compute_conflict_weights, find_conflicts

Ids = list[list[int]]
"""The own tokens of each row."""
Mask = Callable[[Ids, Sequence[int], Sequence[float]], list[list[bool]]]
"""From own tokens, groups and advantages of the rows: which of their own tokens are masked."""


def own_tokens(responses: torch.Tensor, response_mask: torch.Tensor) -> Ids:
    """The own tokens of each row of (rows, response_length) ids: what tools said between them is left out."""
    return [row[own].tolist() for row, own in zip(responses, response_mask.bool(), strict=True)]


def leading(ids: Ids, index: Sequence[int], advantages: Sequence[float]) -> list[list[bool]]:
    """GTPO's forward mask: the leading run of conflict tokens."""
    mask = [[False] * len(own) for own in ids]
    for rows in _with_both_signs(ids, index, advantages):
        for row in rows:
            for t, token in enumerate(ids[row]):
                same = [advantages[other] for other in rows if ids[other][t : t + 1] == [token]]
                if not min(same) < 0 < max(same):
                    break
                mask[row][t] = True
    return mask


def common(ids: Ids, index: Sequence[int], advantages: Sequence[float]) -> list[list[bool]]:
    """In a group with both signs the longest beginning that all its completions share, at most the shortest one.

    Rows with A = 0 count, rows without own tokens do not.
    """
    mask = [[False] * len(own) for own in ids]
    for rows in _with_both_signs(ids, index, advantages):
        for row in rows:
            mask[row][: common_length([ids[other] for other in rows])] = [True] * common_length([ids[r] for r in rows])
    return mask


def common_length(completions: Ids) -> int:
    """Tokens that all of these begin with."""
    for t, tokens in enumerate(zip(*completions, strict=False)):
        if len(set(tokens)) > 1:
            return t
    return min(map(len, completions))


def agreed(ids: Ids, index: Sequence[int], advantages: Sequence[float]) -> list[list[bool]]:
    """GTPO's forward mask without its forks.

    A token is a fork if a completion of the group with the same tokens before it has another token there; the end
    counts as one.
    """
    mask = leading(ids, index, advantages)
    groups = defaultdict(list)
    for row, group in enumerate(index):
        groups[group].append(row)
    for row, own in enumerate(mask):
        for t in range(len(own)):
            company = [other for other in groups[index[row]] if ids[other] and ids[other][:t] == ids[row][:t]]
            own[t] &= len({tuple(ids[other][t : t + 1]) for other in company}) == 1
    return mask


def _with_both_signs(ids: Ids, index: Sequence[int], advantages: Sequence[float]) -> Iterator[list[int]]:
    groups = defaultdict(list)
    for row, group in enumerate(index):
        if ids[row]:
            groups[group].append(row)
    for rows in groups.values():
        if min(advantages[row] for row in rows) < 0 < max(advantages[row] for row in rows):
            yield rows


def weigh(forward: Mask, positive: float = 2.0) -> Callable:
    """The control that multiplies λ on M = `forward` OR GTPO's backward mask."""

    def control(advantages: torch.Tensor, batch, generator: torch.Generator) -> torch.Tensor:
        signs, index = batch.group_advantages, batch.index.tolist()
        found = forward(own_tokens(batch.responses, batch.response_mask), index, signs.tolist())
        mask = compute_conflict_mask(batch.responses, batch.response_mask, signs, index, masks="backward")
        for row, own in enumerate(found):
            mask[row, batch.response_mask[row].bool()] |= torch.tensor(own, dtype=torch.bool)
        weights = compute_conflict_weights(signs, positive, 0.0).unsqueeze(-1)
        return torch.where(mask, advantages * weights, advantages)

    return control


def divide(advantages: torch.Tensor, batch, generator: torch.Generator) -> torch.Tensor:
    """A completion's loss divided by the number of its conflict tokens, if there is one, as in the authors' code."""
    completions = Completions(batch.response_mask, batch.index)
    conflicts = find_conflicts(batch.responses, completions, batch.group_advantages, GTPOConfig())
    return advantages / conflicts.conflict_len.clamp(min=1).unsqueeze(-1)


def gate(group_advantages: torch.Tensor, right: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """No update from a group whose completions are all right or all wrong (outcome gating, verl-recipe #125)."""
    groups = torch.as_tensor(index)
    same = [bool((right[groups == group] == right[row]).all()) for row, group in enumerate(groups)]
    return group_advantages.masked_fill(torch.tensor(same), 0)


def never_positive_if_wrong(group_advantages: torch.Tensor, right: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """No A > 0 for a wrong completion. (CoRPO, arXiv:2511.04439, limits the baseline instead, so that A < 0.)"""
    return torch.where(right, group_advantages, group_advantages.clamp(max=0))
