"""The completions of a batch: which tokens are a completion's own, and which completions answer the same prompt."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch


class Completions:
    """Token ownership and groups, from response_mask and uids.

    Args:
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens. Zeros may occur anywhere:
            padding after a response, tool output inside it.
        index: (bs,) uids of any hashable type; completions with equal uids are one group.
        prompts: (bs,), if the prompts of a group differ: token positions are compared between equal ones only.

    Attributes:
        shape (torch.Size): (bs, response_length).
        mask (torch.Tensor): (bs, response_length) bool, response_mask.
        lengths (torch.Tensor): (bs,) int64, own tokens of each completion.
        uids (list): (bs,).
        groups, prompts (torch.Tensor): (bs,) int64, a number from 0 on for each uid and prompt. A row without tokens,
            such as verl's padding rows, is alone whatever its uid.
    """

    def __init__(self, response_mask: torch.Tensor, index: Iterable[Hashable], prompts: Iterable[Hashable] = ()):
        self.shape = response_mask.shape
        self.mask = response_mask.bool()
        mask, width = response_mask.cpu().numpy(), self.shape[1]
        lengths = mask.sum(-1, dtype=int)
        self.lengths = torch.from_numpy(lengths).to(response_mask.device)
        self.uids: list[Hashable] = index.tolist() if hasattr(index, "tolist") else list(index)
        self.groups = self._numbers(self.uids)
        self.prompts = self._numbers(list(prompts) or self.uids)
        self._own_of_row: list[slice | np.ndarray] = [slice(length) for length in lengths.tolist()]
        self._own: torch.Tensor | None = None
        if width and ((lengths < width) & (mask.argmin(-1) != lengths)).any():  # a one comes after a zero
            self._own_of_row = list(mask.astype(bool))
            self._own = response_mask.flatten().nonzero().flatten()
            self._first_own = self.lengths.cumsum(0) - self.lengths

    def _numbers(self, keys: Sequence[Hashable]) -> torch.Tensor:
        if len(keys) != len(self.lengths):
            raise ValueError(f"index has {len(keys)} uids for {len(self.lengths)} rows: give one uid per row")
        numbers: dict[Hashable, int] = {}
        keys = [key if length else object() for key, length in zip(keys, self.lengths.tolist(), strict=True)]
        return self.lengths.new_tensor([numbers.setdefault(key, len(numbers)) for key in keys])

    def places(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Where own tokens are in the flattened (bs * response_length,) batch; a row's first has number 0."""
        if self._own is None:
            return rows * self.shape[1] + numbers
        return self._own[self._first_own[rows] + numbers]

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of (bs, response_length) values over each completion's own tokens, (bs,) float32; 0 if it has none."""
        rows = values.detach().float().cpu().numpy()
        # Sum and quotient are float64, and rounded to float32 once. So neither padding nor the order of summation
        # changes a bit, and the mean of equal numbers is that number, as Eq. 10 needs at exactly ln 2.
        totals = np.array([row[own].sum(dtype=float) for row, own in zip(rows, self._own_of_row, strict=True)])
        counts = self.lengths.clamp(min=1).cpu().numpy()
        return torch.tensor(totals / counts, dtype=torch.float32, device=values.device)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(bs, response_length) with each completion's value, of (bs,), on its own tokens and 0 elsewhere."""
        spread = np.zeros(self.shape, dtype=values.cpu().numpy().dtype)
        for row, own, value in zip(spread, self._own_of_row, values.tolist(), strict=True):
            row[own] = value
        return torch.from_numpy(spread).to(values.device)
