"""Per-row fields of verl's batch that GTPO needs and verl does not give an estimator: token ids, entropy, prompts."""

from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

# Fields of the legacy trainer's batch between its old-log-prob pass and its advantages.
ENTROPY = "gtpo_entropy"
RESPONSE_MASK = "gtpo_response_mask"

_SESSIONS_PER_FETCH = 64
"""Sessions whose pictures are fetched together."""


class BatchFields(NamedTuple):
    """Fields of the rows of a batch, in their order."""

    responses: torch.Tensor  # (bs, response_length) int64 token ids
    entropy: torch.Tensor | None  # (bs, response_length), nats; None where it comes from the update
    # (bs, response_length), 1 on tokens that the model itself wrote, also where verl's rollout correction masks them
    response_mask: torch.Tensor
    response_len: torch.Tensor  # (bs,) int64, length of each response, tool output included
    prompts: Sequence[np.ndarray]  # (bs,) token ids of each prompt
    last_outputs: list[int]  # rows that are the last output of their session, one for each session of the agent loop
    sessions: list[int]  # (bs,), for each row the place of its session in `last_outputs`
    # For each session a digest of the pictures in its last prompt; empty if rows of one uid cannot differ in theirs.
    pictures: Sequence[bytes] = ()
    # (bs, response_length), of verl's old-log-prob pass; under its bypass mode those of the rollout
    old_log_probs: torch.Tensor | None = None

    def select_last_outputs(self) -> "BatchFields":
        """Return the fields of the last outputs alone, in the order in which verl's `grpo` has them."""
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

    Args:
        tq: the module `transfer_queue`, as verl imports it.
        batch: verl's KVBatchMeta.
        with_entropy: whether to fetch the entropy, which is there only after verl's old-log-prob pass.

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

    # The prompts are one flat array of ids; each lies between two successive boundaries.
    ids = data["prompts"].values().numpy()
    boundaries = data["prompts"].offsets().tolist()
    prompts = [ids[start:end] for start, end in pairwise(boundaries)]

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
        # Every session has a single output, and its prompt is the dataset's: rows of one uid have the same pictures.
        return fields
    return fields._replace(pictures=_digests_of_pictures(tq, batch, last_outputs))


def _digests_of_pictures(tq: Any, batch: Any, rows: Sequence[int]) -> list[bytes]:
    """Return a digest of the pictures in the prompt of each of these rows.

    An agent's later prompts may have pictures of their own. A whole batch of them is too large to hold in memory, so
    they are fetched in parts.
    """
    keys = [batch.keys[row] for row in rows]
    digests: list[bytes] = []
    for start in range(0, len(keys), _SESSIONS_PER_FETCH):
        digests += _fetch_digests(tq, batch.partition_id, keys[start : start + _SESSIONS_PER_FETCH])
    return digests


def _fetch_digests(tq: Any, partition_id: str, keys: Sequence[str]) -> list[bytes]:
    """Return a digest of the pictures of each key."""
    name = "multi_modal_inputs"
    data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[name])
    if name in data.keys():
        return [_digest(pictures) for pictures in data.pop(name).tolist()]
    if len(keys) == 1:
        return [_digest(None)]
    # TransferQueue leaves out a field as soon as one of the keys lacks it, so each is asked for by itself.
    digests = []
    for key in keys:
        digests += _fetch_digests(tq, partition_id, [key])
    return digests


def _digest(pictures: dict[str, Any] | None) -> bytes:
    """Return a digest of the values in a row's `multi_modal_inputs`, whatever the order of their names."""
    digest = sha256()
    for name, value in sorted((pictures or {}).items()):
        digest.update(name.encode())
        if torch.is_tensor(value):
            digest.update(value.flatten().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.digest()


def add_to_old_log_prob(old_log_prob: Any, batch: Any) -> None:
    """Store in `old_log_prob`, the result of the legacy trainer's old-log-prob pass, what `take_from_batch` will need.

    verl takes the field `entropys` out of it and joins the rest with the batch, so that our fields move with the rows.
    Both are TensorDicts.
    """
    old_log_prob[ENTROPY] = old_log_prob["entropys"]
    old_log_prob[RESPONSE_MASK] = batch["response_mask"]


def take_from_batch(batch: Any, with_entropy: bool = True) -> BatchFields | None:
    """Return the fields of a batch of the legacy trainer, a TensorDict, and remove from it what `add_to_old_log_prob`
    added; None if that was not called. Without `with_entropy` it need not be, since only verl's own fields are read.
    """
    if with_entropy and ENTROPY not in batch.keys():
        return None
    responses = batch["responses"]
    attention_mask = batch["attention_mask"].bool()
    padded_prompts = batch["prompts"].numpy()
    prompt_length = padded_prompts.shape[1]
    prompt_mask = attention_mask[:, :prompt_length].numpy()
    prompts = [ids[is_token] for ids, is_token in zip(padded_prompts, prompt_mask, strict=True)]
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
        response_len=attention_mask[:, prompt_length:].sum(-1),
        prompts=prompts,
        last_outputs=rows,
        sessions=rows,
    )


def _sessions(keys: Iterable[str]) -> tuple[list[int], list[int]]:
    """Return `last_outputs` and `sessions` of `BatchFields` for rows with these keys."""
    places: dict[str, int] = {}  # sessions are numbered in the order of their first rows
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
