"""Per-row fields of verl's batch that GTPO needs and verl does not give an estimator: token ids, entropy, prompts."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

ENTROPY, RESPONSE_MASK = "gtpo_entropy", "gtpo_response_mask"
"""Fields of the legacy trainer's batch between its old-log-prob pass and its advantages."""


_AT_ONCE = 64
"""Sessions whose pictures are fetched together."""


class BatchFields(NamedTuple):
    """Fields of the rows of a batch, in their order."""

    responses: torch.Tensor  # (bs, response_length) int64 token ids
    entropy: torch.Tensor | None  # (bs, response_length), nats; None where it comes from the update
    # (bs, response_length), 1 on the completion's own tokens, also on those that verl's rollout correction takes out
    response_mask: torch.Tensor
    response_len: torch.Tensor  # (bs,) int64, length of each response, tool output included
    prompts: Sequence[np.ndarray]  # (bs,) token ids of each prompt
    last_outputs: list[int]  # rows that are the last output of their session, one for each session of the agent loop
    sessions: list[int]  # (bs,), for each row the place of its session in `last_outputs`
    pictures: Sequence[bytes] = ()  # of each session's last prompt, a digest; empty where equal ids are equal prompts
    # (bs, response_length), of verl's old-log-prob pass; under its bypass mode those of the rollout
    old_log_probs: torch.Tensor | None = None

    def of_sessions(self) -> "BatchFields":
        """Return the last outputs alone, in the order in which verl's `grpo` has them."""
        if len(self.last_outputs) == len(self.sessions):
            return self
        rows = self.last_outputs
        places = list(range(len(rows)))
        return BatchFields(
            responses=self.responses[rows],
            entropy=None if self.entropy is None else self.entropy[rows],
            response_mask=self.response_mask[rows],
            response_len=self.response_len[rows],
            prompts=[self.prompts[row] for row in rows],
            last_outputs=places,
            sessions=places,
            pictures=self.pictures,
            old_log_probs=None if self.old_log_probs is None else self.old_log_probs[rows],
        )


def from_transfer_queue(tq: Any, batch: Any, with_entropy: bool = True) -> BatchFields:
    """Return the fields of a batch of the V1 trainer, a KVBatchMeta whose keys are `{uid}_{session}_{output}`.

    `tq` is verl's module `transfer_queue`; without an old-log-prob pass there is no entropy in it.

    Raises:
        RuntimeError: TransferQueue does not hold a field, or entropy and responses do not fit together.
    """
    names = ["responses", "response_mask", "prompts"]
    if with_entropy:
        names.append("entropy")
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=names)
    if missing := sorted(set(names) - set(data.keys())):  # TransferQueue silently omits missing fields
        raise RuntimeError(f"TransferQueue lacks {', '.join(missing)}, which GTPO needs for every row")
    offsets = data["responses"].offsets()
    if with_entropy and not torch.equal(offsets, data["entropy"].offsets()):
        raise RuntimeError("the entropy in TransferQueue is not as long as the responses in some row")

    # The prompts are one array of ids and the places at which each begins.
    ids = data["prompts"].values().numpy()
    ends = data["prompts"].offsets().tolist()
    prompts = [ids[start:end] for start, end in pairwise(ends)]

    padded = data.exclude("prompts").to_padded_tensor()
    last_outputs, sessions = _sessions(batch.keys)
    fields = BatchFields(
        responses=padded["responses"],
        entropy=padded["entropy"] if with_entropy else None,
        response_mask=padded["response_mask"],
        response_len=offsets.diff(),
        prompts=prompts,
        last_outputs=last_outputs,
        sessions=sessions,
    )
    if len(last_outputs) == len(prompts):
        return fields
    return fields._replace(pictures=_pictures_of(tq, batch, last_outputs))


def _pictures_of(tq: Any, batch: Any, rows: Sequence[int]) -> list[bytes]:
    """Return a digest of the pictures of each of these rows: an agent's later prompts may have some of their own, and
    they are too large to be held together."""
    name = "multi_modal_inputs"
    keys = [batch.keys[row] for row in rows]
    digests: list[bytes] = []
    for start in range(0, len(keys), _AT_ONCE):
        some_keys = keys[start : start + _AT_ONCE]
        data = tq.kv_batch_get(keys=some_keys, partition_id=batch.partition_id, select_fields=[name])
        if name in data.keys():
            digests += [_digest(pictures) for pictures in data.pop(name).tolist()]
    return digests


def _digest(pictures: dict[str, Any] | None) -> bytes:
    digest = sha256()
    for name, value in sorted((pictures or {}).items()):
        digest.update(name.encode())
        if torch.is_tensor(value):
            digest.update(value.flatten().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.digest()


def keep_in_batch(old_log_prob: Any, batch: Any) -> None:
    """Add what `take_from_batch` needs to the result of the legacy trainer's old-log-prob pass; it moves with the rows.

    verl joins `old_log_prob` with the batch, without its field `entropys`; both are a TensorDict.
    """
    old_log_prob[ENTROPY] = old_log_prob["entropys"]
    old_log_prob[RESPONSE_MASK] = batch["response_mask"]


def take_from_batch(batch: Any, with_entropy: bool = True) -> BatchFields | None:
    """Return the fields of a batch of the legacy trainer, a TensorDict; None if `keep_in_batch` added nothing to it.

    Without entropy they are those of the batch itself.
    """
    if with_entropy and ENTROPY not in batch.keys():
        return None
    responses = batch["responses"]
    prompt_mask, mask = batch["attention_mask"].bool().tensor_split([-responses.shape[1]], dim=1)
    prompts = [ids[own] for ids, own in zip(batch["prompts"].numpy(), prompt_mask.numpy(), strict=True)]
    entropy = None
    response_mask = batch["response_mask"]
    if with_entropy:
        entropy = batch.pop(ENTROPY)
        response_mask = batch.pop(RESPONSE_MASK)
    rows = list(range(len(responses)))  # each is a session of its own
    return BatchFields(
        responses=responses,
        entropy=entropy,
        response_mask=response_mask,
        response_len=mask.sum(-1),
        prompts=prompts,
        last_outputs=rows,
        sessions=rows,
    )


def _sessions(keys: Iterable[str]) -> tuple[list[int], list[int]]:
    """Return `last_outputs` and `sessions` of rows with these keys."""
    places: dict[str, int] = {}  # of each session, in the order of their first rows
    sessions: list[int] = []
    outputs: list[int] = []
    for key in keys:
        name, output = key.rsplit("_", 1)
        sessions.append(places.setdefault(name, len(places)))
        outputs.append(int(output))

    last: dict[int, int] = {}
    for row, session in enumerate(sessions):
        if session not in last or outputs[row] >= outputs[last[session]]:
            last[session] = row
    return [last[session] for session in range(len(places))], sessions
