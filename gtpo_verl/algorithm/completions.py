"""The completions of a batch: which tokens are a completion's own, and which completions answer the same prompt."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch

GroupIds: TypeAlias = torch.Tensor | np.ndarray | Iterable[Hashable]
"""(bs,) ids of groups: a tensor, an array or any other iterable of values that can be hashed, or of 0-d tensors."""


class Completions:
    """Token ownership and groups of a batch, from its response mask and the ids of its groups.

    All work on indices is numpy's, on the CPU. torch would share out each of these many small operations over its
    threads, and they would spend more time waiting for one another than at work.

    Args:
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens. Zeros may occur anywhere:
            padding after a response, tool output inside it.
        group_ids (GroupIds): (bs,); completions with equal ids are one group, verl's `uid`.
        prompts (GroupIds): (bs,), if the prompts of a group differ: token positions are compared between completions of
            one group with equal prompts only. None: all completions of a group answer one prompt.

    Attributes:
        shape (torch.Size): (bs, response_length).
        mask (torch.Tensor): (bs, response_length) bool, response_mask.
        lengths (torch.Tensor): (bs,) int64, own tokens of each completion.
        uids (list): (bs,), the ids of the groups as plain values.
        groups, prompts (torch.Tensor): (bs,) int64, a number from 0 on for each group, and for each prompt of each
            group. A row without tokens, such as verl's padding rows, is alone whatever its id.

    Raises:
        ValueError: a mask that is not 0 or 1 everywhere, or another number of ids or of prompts than of rows.
    """

    def __init__(self, response_mask: torch.Tensor, group_ids: GroupIds, prompts: GroupIds | None = None):
        self.shape = response_mask.shape
        self.device = response_mask.device
        is_own = _as_booleans(response_mask)
        lengths = np.count_nonzero(is_own, axis=-1)
        self.mask = torch.from_numpy(is_own).to(self.device)
        self.lengths = torch.from_numpy(lengths).to(self.device)

        self.uids = _as_values(group_ids, "index", "uid", len(lengths))
        self.groups = self._numbers_of(self.uids)
        self.prompts = self.groups
        if prompts is not None:
            prompt_ids = _as_values(prompts, "prompts", "prompt", len(lengths))
            self.prompts = self._numbers_of([*zip(self.uids, prompt_ids, strict=True)])

        self._is_own = is_own
        # Where the own tokens are in the flattened batch. It is only needed if a row has a hole: a zero before its last
        # own token, so that its first zero is not at its number of own tokens.
        self._own_places: np.ndarray | None = None
        width = self.shape[-1]
        if width and ((lengths < width) & (is_own.argmin(-1) != lengths)).any():
            self._own_places = np.flatnonzero(is_own)
            self._first_of_row = lengths.cumsum() - lengths  # the index in `_own_places` of each row's first

    def _numbers_of(self, ids: Sequence[Hashable]) -> torch.Tensor:
        """Return a number for each row, the same where the ids are equal; a row without tokens has its own."""
        numbers: dict[Hashable, int] = {}
        number_of_row = []
        for row_id, length in zip(ids, self.lengths.tolist(), strict=True):
            key = row_id if length else object()
            number_of_row.append(numbers.setdefault(key, len(numbers)))
        return torch.tensor(number_of_row, dtype=torch.int64, device=self.device)

    def places(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return where own tokens are in the flattened (bs * response_length,) batch; a row's first has position 0."""
        if self._own_places is None:
            return rows * self.shape[1] + positions
        return self._own_places[self._first_of_row[rows] + positions]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of (bs, response_length) values over each completion's own tokens, (bs,) float32; 0 if it has
        none."""
        rows = values.detach().float().cpu().numpy()
        # Sum and quotient are float64, and rounded to float32 once. So the mean of equal numbers is that number, as
        # Eq. 10 needs at exactly ln 2. Width and order of the values may change the last bits of the sum; the rounding
        # hides them nearly always.
        totals = rows.sum(-1, dtype=float, where=self._is_own)
        counts = self.lengths.cpu().numpy().clip(min=1)
        return torch.tensor(totals / counts, dtype=torch.float32, device=values.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return (bs, response_length) with each completion's value, of (bs,), on its own tokens and 0 elsewhere."""
        return torch.from_numpy(self.spread_in_numpy(values)).to(values.device)

    def spread_in_numpy(self, values: torch.Tensor) -> np.ndarray:
        """Return what `spread` returns as an array, for a caller that changes it before it becomes a tensor."""
        per_row = values.cpu().numpy()
        spread = _large_array(self.shape, values.dtype)
        spread.fill(0)
        np.copyto(spread, per_row[:, None], where=self._is_own)
        return spread


def as_completions(response_mask: torch.Tensor, group_ids: GroupIds | Completions) -> Completions:
    """Return `group_ids`, if they are the `Completions` of this mask already; else those of the mask and these ids."""
    if isinstance(group_ids, Completions):
        check_shapes(group_ids.shape, response_mask=response_mask)
        return group_ids
    return Completions(response_mask, group_ids)


def check_shapes(shape: torch.Size, **tensors: torch.Tensor) -> None:
    """Raise a ValueError on the first tensor that has not this shape, (bs, response_length), naming it."""
    for name, tensor in tensors.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not (bs, response_length) = {tuple(shape)}")


def check_one_per_completion(name: str, values: torch.Tensor, completions: Completions) -> None:
    """Raise a ValueError, with this name, if the values are not (bs,)."""
    shape = completions.shape[:1]
    if values.shape != shape:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: give one per completion, {tuple(shape)}")


def _as_booleans(response_mask: torch.Tensor) -> np.ndarray:
    """Return a mask as (bs, response_length) bool."""
    if response_mask.ndim != 2:
        raise ValueError(f"response_mask has shape {tuple(response_mask.shape)}, not (bs, response_length)")
    mask = response_mask.detach().cpu()
    if mask.dtype == torch.bfloat16:  # which numpy has not
        mask = mask.float()
    numbers = mask.numpy()
    if numbers.dtype == bool:
        return numbers
    is_one = _large_array(mask.shape, torch.bool)
    np.equal(numbers, 1, out=is_one)
    if np.count_nonzero(numbers) != np.count_nonzero(is_one):
        row, column = np.argwhere((numbers != 0) & (numbers != 1))[0]
        raise ValueError(
            f"response_mask[{row}, {column}] is {numbers[row, column]:g}: it must be 1 on a completion's own tokens "
            "and 0 elsewhere; were responses and response_mask swapped?"
        )
    return is_one


def _large_array(shape: torch.Size, dtype: torch.dtype) -> np.ndarray:
    """Return an array that is not initialised, in memory that torch allocates.

    numpy would ask for huge pages. On a machine that has been up for a while, finding them can take longer than all the
    work on the array.
    """
    return torch.empty(shape, dtype=dtype, device="cpu").numpy()


def _as_values(ids: GroupIds, name: str, noun: str, rows: int) -> list[Hashable]:
    """Return ids as plain values: tensors are compared as objects, so that each would be another id.

    `name` and `noun` say in messages what the argument is called, and what it must hold for each of the `rows`.
    """
    if getattr(ids, "ndim", 1) != 1:
        shape = tuple(ids.shape)  # type: ignore[union-attr]
        raise ValueError(f"{name} has shape {shape}, not (bs,): give one {noun} per row")
    values = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else list(ids)
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} {noun}s for {rows} rows: give one {noun} per row")
    return [value.item() if isinstance(value, torch.Tensor) else value for value in values]
