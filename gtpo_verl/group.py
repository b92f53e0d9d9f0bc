"""Groups of completions (one per prompt) and where the tokens of each completion stand."""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch


def rows_of(tensor: torch.Tensor) -> torch.Tensor | np.ndarray:
    """The same memory, row by row: on a CPU, torch takes longer to reach a row than to sum it."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def new_zeros(like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`like.new_zeros(shape)`; on a CPU from NumPy, which takes the empty pages of the kernel and writes no zeros."""
    if like.device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=like.numpy().dtype))
    return like.new_zeros(shape)


def pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """`values[places]` of a vector, in one thread up to 32,768 places; torch divides indexing from 3,000 on."""
    return values.index_select(0, places.flatten()).view_as(places)


class Completions:
    """The completions of a batch: how many own tokens each has, where its k-th token stands, who shares its prompt.

    Args:
        response_mask (torch.Tensor): (bs, response_length), 1 on the completion's own tokens. Zeros may stand anywhere:
            padding behind a response, tool output inside it.
        index: (bs,) uids; completions with equal uids are one group.

    Attributes:
        shape (torch.Size): (bs, response_length).
        lengths (torch.Tensor): (bs,) int64, own tokens of each completion; 0 marks padding rows, which are in no group.
        groups (torch.Tensor): (groups, size) int64, rows of each group, smallest groups first, padded with -1.
        same_prompt (torch.Tensor): the same of the rows whose token positions may be compared: `groups`, unless
            `positions_by` has split them.
        own (list): (bs,), what selects each completion's own tokens from its row.
        uids (list): (bs,).

    Raises:
        ValueError: not one uid per row.
    """

    def __init__(self, response_mask: torch.Tensor, index: Iterable[Hashable]):
        if response_mask.dtype == torch.bool:
            response_mask = response_mask.view(torch.uint8)
        self.shape = response_mask.shape
        self._flat: torch.Tensor | None = None
        self.lengths, has_holes = own_tokens(response_mask)
        self.uids = index.tolist() if isinstance(index, np.ndarray | torch.Tensor) else list(index)
        self.groups = self.same_prompt = group_rows(self.uids, self.lengths > 0)
        self.own: list[slice | torch.Tensor | np.ndarray] = [slice(length) for length in self.lengths.tolist()]
        if has_holes.any():
            self._flat = response_mask.reshape(-1).nonzero().flatten()
            self._starts = self.lengths.cumsum(0) - self.lengths
            for row in has_holes.nonzero().flatten().tolist():
                self.own[row] = rows_of(response_mask[row].bool())

    def positions_by(self, prompts: Sequence[Hashable]) -> None:
        """Compare token positions only between rows of equal `prompts`, (bs,), where those of a group may differ."""
        self.same_prompt = group_rows(prompts, self.lengths > 0)

    def flat(self, rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Where tokens stand in the flattened (bs * response_length,) responses.

        Args:
            rows (torch.Tensor): int64 rows of the batch, of a shape that broadcasts with `numbers`.
            numbers (torch.Tensor): int64 numbers of the tokens, 0 being a completion's first; below `lengths[rows]`.
        """
        if self._flat is None:
            return rows * self.shape[1] + numbers
        return pick(self._flat, self._starts[rows] + numbers)


def own_tokens(response_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many ones each row of a (bs, width) mask has, (bs,) int64, and whether zeros stand before them, (bs,) bool.

    The mask is read once: ones at the start of a row alone give all its blocks of columns the numbers that they have.
    """
    width, block = response_mask.shape[1], 64
    whole = width - width % block
    in_block = response_mask[:, :whole].unflatten(1, (whole // block, block)).sum(-1, dtype=torch.int64)
    lengths = in_block.sum(-1) + response_mask[:, whole:].sum(-1, dtype=torch.int64)
    ends = lengths.unsqueeze(-1)
    columns = torch.arange(block, device=lengths.device)
    has_holes = (in_block != (ends - columns.new_tensor(range(0, whole, block))).clamp(0, block)).any(-1)
    # Left is the block in which a row ends.
    columns = (ends - ends % block + columns).clamp(max=max(width - 1, 0))
    if width:
        has_holes |= ((columns < ends) != response_mask.gather(1, columns).bool()).any(-1)
    return lengths, has_holes


def group_rows(index: Sequence[Hashable], members: torch.Tensor) -> torch.Tensor:
    """Table of the rows of each group, smallest groups first.

    Args:
        index: (bs,) uid of each row's prompt; rows with equal uids are one group.
        members (torch.Tensor): (bs,) bool; a row that is no member belongs to no group.

    Returns:
        (groups, size of the largest group) int64; each line holds a group's rows, then -1.
    """
    if len(index) != len(members):
        raise ValueError(f"index has {len(index)} uids for {len(members)} rows: give one uid per row")
    number_of: dict[Hashable, int] = {}
    number = torch.tensor([number_of.setdefault(uid, len(number_of)) for uid in index], device=members.device)
    rows = members.nonzero().flatten()
    if rows.numel() == 0:
        return rows.new_empty((0, 0))
    number, order = number[rows].sort(stable=True)
    sizes = number.bincount(minlength=len(number_of))
    slots = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[number]
    table = rows.new_full((len(sizes), int(sizes.max())), -1)
    table[number, slots] = rows[order]
    sizes, by_size = sizes.sort()
    return table[by_size[sizes > 0]]
