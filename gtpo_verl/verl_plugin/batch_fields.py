"""What a row of verl's batch carries for GTPO, so that it follows the row wherever the trainer moves it.

`QueueWithGTPO` adds it in the V1 trainer, whose rows are in TransferQueue, `add_to` in the legacy trainer.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
import wrapt

RESPONSES, ENTROPY, RESPONSE_MASK, ROW = "gtpo_responses", "gtpo_entropy", "gtpo_response_mask", "gtpo_row"
"""Fields of the batch; the first and the third are only there where verl's own field is not what is meant."""


class QueueWithGTPO(wrapt.ObjectProxy):
    """TransferQueue that, asked for what advantages are computed of, gives each row GTPO's fields too."""

    _FIELDS = ("responses", "entropy", "prompts")

    def __init__(self, tq: Any, keys: list[str], with_rejection: bool):
        super().__init__(tq)
        self._self_keys, self._self_with_rejection = keys, with_rejection

    def kv_batch_get(self, *, select_fields: list[str], **kwargs: Any) -> Any:
        more = [name for name in self._FIELDS if name not in select_fields]
        data = self.__wrapped__.kv_batch_get(select_fields=[*select_fields, *more], **kwargs)
        check_fields(data, [*self._FIELDS, "response_mask"])
        responses, entropy, prompts = (data[name] for name in self._FIELDS)
        offsets = responses.offsets()
        if not torch.equal(offsets, entropy.offsets()):
            raise RuntimeError("the entropy in TransferQueue is not as long as the responses in every row")
        ids, ends = prompts.values().numpy(), prompts.offsets().tolist()
        sessions, outputs = zip(*(key.rsplit("_", 1) for key in self._self_keys), strict=True)
        data[ROW] = row_fields(
            [session.rsplit("_", 1)[0] for session in sessions],
            (ids[start:end].tobytes() for start, end in pairwise(ends)),
            offsets.diff(),
            sessions,
            [int(output) for output in outputs],
        )
        data[RESPONSES], data[ENTROPY] = responses, entropy
        if self._self_with_rejection:
            data[RESPONSE_MASK] = data["response_mask"]
        return data.exclude(*more)


def check_fields(data: Any, fields: Iterable[str]) -> None:
    """TransferQueue leaves out a field that it does not hold, without a word.

    Raises:
        RuntimeError: one of `fields` is not in what it gave.
    """
    if missing := set(fields) - set(data.keys()):
        raise RuntimeError(f"GTPO needs {', '.join(sorted(missing))} of every row, which TransferQueue does not hold")


def add_to(old_log_prob: Any, data: Any, with_rejection: bool) -> None:
    """Give what the legacy trainer's old-log-prob pass returns, and joins with the batch, GTPO's fields too.

    Args:
        old_log_prob: TensorDict with `entropys`.
        data: the batch, a DataProto.
        with_rejection (bool): verl may take tokens out of `response_mask` before it computes advantages.
    """
    batch = data.batch
    response_len = batch["attention_mask"][:, -batch["responses"].shape[1] :].sum(-1)
    prompts = (ids.tobytes() for ids in batch["prompts"].numpy())
    old_log_prob[ROW] = row_fields(data.non_tensor_batch["uid"], prompts, response_len)
    old_log_prob[ENTROPY] = old_log_prob["entropys"]
    if with_rejection:
        old_log_prob[RESPONSE_MASK] = batch["response_mask"]


def row_fields(
    uids: Sequence[Hashable],
    prompts: Iterable[bytes],
    response_len: torch.Tensor,
    sessions: Sequence[Hashable] | None = None,
    outputs: Sequence[int] | None = None,
) -> torch.Tensor:
    """The field `gtpo_row` of each row of a batch: what is known of it beside its tokens.

    Args:
        uids: (bs,) uid of each row.
        prompts: (bs,) token ids of each row's prompt.
        response_len (torch.Tensor): (bs,), length of each response, tool output included.
        sessions: (bs,) session of the agent loop that each row is an output of; None where each has one output.
        outputs: (bs,) number of each row among the outputs of its session.

    Returns:
        (bs, 4) int64: response length; number of the prompt among those of its uid, so 0 unless they differ; number of
        the session in this batch, or -1; number of the output.
    """
    prompts_of: dict[Hashable, dict[bytes, int]] = defaultdict(dict)
    prompt = [prompts_of[uid].setdefault(ids, len(prompts_of[uid])) for uid, ids in zip(uids, prompts, strict=True)]
    number_of: dict[Hashable, int] = {}
    session = [-1] * len(uids) if sessions is None else [number_of.setdefault(x, len(number_of)) for x in sessions]
    numbers = torch.tensor([prompt, session, outputs or [0] * len(uids)], dtype=torch.int64)
    return torch.cat([response_len.cpu().unsqueeze(0), numbers]).T.contiguous()


def final_outputs(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are the last output of their session.

    Args:
        row (torch.Tensor): (bs, 4), the field `gtpo_row`.

    Returns:
        (sessions,) rows, ascending, and (bs,) for each row the place of its session in them.
    """
    _, _, session, output = row.unbind(-1)
    everyone = torch.arange(len(row))
    if len(row) == 0 or session[0] < 0 or not output.any():
        return everyone, everyone
    last = output.new_zeros(int(session.max()) + 1).scatter_reduce(0, session, output, "amax")
    final = (output == last[session]).nonzero().squeeze(-1)
    place = torch.empty_like(last)
    place[session[final]] = torch.arange(len(final))
    return final, place[session]
