"""A replay buffer for verl's V1 trainer that logs what the reward says about each completion.

verl keeps the dict that a reward function returns, but logs it in validation only. With

    trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward.replay_buffer
    trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer

every training step logs, for GRPO as for GTPO and in every mode of the trainer,

    reward/<key>/mean             the mean of each number in it, such as format of `gtpo_verl.reward.score`
    completion/eos_rate           the share of completions that end with EOS
    completion/repetition/mean    the share of repeated tokens
    completion/length/mean        tokens
    group/zero_std_frac           the share of groups with equal scores
    group/none_right_frac         of the other groups, the share of those without a right answer

With a reward model that is colocated with the actor, verl computes rewards only after sampling: then there is no
`reward/*` and no `group/*`, and a warning says so.

verl passes the settings of `algorithm.filter_groups` to its own buffers only; this one reads them itself.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from transfer_queue import KVBatchMeta
from transformers import GenerationConfig
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import hf_tokenizer
from verl.utils.fs import copy_to_local

from gtpo_verl.monitor.completions import group_shares, repetition
from gtpo_verl.tokens import eos_ids

logger = logging.getLogger("gtpo_verl")

# verl looks for finished completions every 2 s. With one prompt per step that wait would dominate a run: an epoch of
# GSM8K has 7,473 steps. A look costs TransferQueue about 2.5 µs per completion, so one every 50 µs per completion takes
# 5% of its time.
_SHORTEST_POLL_S = 0.02
_POLL_S_PER_COMPLETION = 5e-5
_LONGEST_POLL_S = 2.0  # verl's
# Repetition is measured on at most this many completions, evenly spaced: a quarter of a second at 2,000 tokens each.
_MAX_REPETITION_SAMPLES = 256


class _RewardMetrics:
    """Adds the metrics above to one of verl's replay buffers."""

    def __init__(self, *, sampler_kwargs: DictConfig, **kwargs: Any):
        config: Any = sampler_kwargs._get_root()
        self._eos_token_ids = eos_token_ids(config.actor_rollout_ref.model)
        self._has_warned = False
        super().__init__(sampler_kwargs=sampler_kwargs, **_settings(config) | kwargs)  # type: ignore[call-arg]

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """Return verl's batch, and its metrics with ours."""
        batch, metrics = super().sample(*args, **kwargs)  # type: ignore[misc]
        if batch.partition_id == "train":
            metrics.update(self._completion_metrics(batch))
        return batch, metrics

    def _completion_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        fields = ["responses", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        # A nested tensor: one tensor with the tokens of all completions, one after the other, and the offsets at which
        # each begins and the last one ends.
        tokens = data["responses"].values()
        offsets = data["responses"].offsets()
        lengths = offsets.diff()
        has_ended = torch.isin(tokens[offsets[1:] - 1], self._eos_token_ids) & (lengths > 0)

        scores = [_returned_numbers(extra_fields) for extra_fields in data["extra_fields"]]
        if not any(scores) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "no completion has a number from the reward function when the batch is sampled, so reward/* and "
                "group/* are not logged: a reward model needs reward.reward_model.enable_resource_pool=True for them"
            )
        metrics = _reward_metrics(scores, has_ended.tolist())
        metrics |= _group_metrics(batch.keys, scores)

        metrics["completion/eos_rate"] = has_ended.float().mean().item()
        stride = 1 + (len(lengths) - 1) // _MAX_REPETITION_SAMPLES
        completions = tokens.tensor_split(offsets[1:-1])[::stride]
        metrics["completion/repetition/mean"] = fmean(repetition(completion.numpy()) for completion in completions)
        metrics["completion/length/mean"] = lengths.float().mean().item()
        return metrics


def _returned_numbers(extra_fields: Any) -> dict[str, float]:
    """Return the numbers that the reward function returned for a completion."""
    # A reward function may leave anything in its dict; anything that is not a number is skipped.
    returned = getattr(extra_fields, "data", extra_fields).get("reward_extra_info") or {}
    scores = {}
    for key, value in returned.items():
        number = _number(value)
        if number is not None:
            scores[key] = number
    if scores.keys() == {"acc"}:  # where verl puts a reward that is a bare number
        return {"score": scores["acc"]}
    return scores


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float | np.number | np.bool_):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _reward_metrics(scores: Sequence[Mapping[str, float]], has_ended: Sequence[bool]) -> dict[str, float]:
    """Return the mean of each number that the reward function returned; `strict` is 0 for a completion without EOS."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers_of_one, ended in zip(scores, has_ended, strict=True):
        for key, number in numbers_of_one.items():
            # `strict` of `gtpo_verl.reward.score` judges the text alone, and a text that is cut off is not whole.
            is_cut_off = key == "strict" and not ended
            values[key].append(0.0 if is_cut_off else number)
    return {f"reward/{key}/mean": sum(numbers) / len(numbers) for key, numbers in values.items()}


def _group_metrics(keys: Sequence[str], scores: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the share of groups with equal scores, and that of the others without a right answer."""
    if not all("score" in numbers for numbers in scores):
        return {}
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for key, numbers in zip(keys, scores, strict=True):
        uid, _session, _output = key.rsplit("_", 2)
        groups[uid].append(numbers)
    zero_std, none_right = group_shares(groups.values(), "score", "acc")
    metrics = {"group/zero_std_frac": zero_std}
    if none_right is not None:
        metrics["group/none_right_frac"] = none_right
    return metrics


def RewardMetricsReplayBuffer(*, trainer_mode: str, **kwargs: Any) -> ReplayBuffer:
    """Return verl's replay buffer for this `trainer.v1.trainer_mode`, extended with the metrics above.

    The name is that of a class, since verl calls it as one. Raises what verl raises if `algorithm.filter_groups` cannot
    work with the config.
    """
    base = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    buffer = type("RewardMetricsReplayBuffer", (_RewardMetrics, base), {})
    return buffer(trainer_mode=trainer_mode, **kwargs)


def eos_token_ids(model: DictConfig) -> torch.Tensor:
    """Return the ids of the tokens that end a completion, (n,) int64.

    A completion whose last token is none of them counts as cut off. They are the tokenizer's EOS token and those of the
    generation config, at which rollout engines stop too. `model` is verl's `actor_rollout_ref.model`.
    """
    tokenizer_path = copy_to_local(model.get("tokenizer_path") or model.path)
    sources: list[Any] = [hf_tokenizer(tokenizer_path, trust_remote_code=model.get("trust_remote_code", False))]
    with suppress(OSError):  # a model need not have a generation config
        sources.append(GenerationConfig.from_pretrained(copy_to_local(model.path)))
    return torch.tensor(eos_ids(*sources), dtype=torch.int64)


def _settings(config: Any) -> dict[str, Any]:
    """Return the arguments that verl passes to its own buffers but not to a custom one, and a poll interval.

    With these arguments a buffer replaces groups that were filtered out or failed. The interval grows with the
    completions of a step, and reaches verl's own at 40,000.
    """
    # verl's method reads nothing of the trainer but its config.
    metric = PPOTrainer._resolve_filter_groups_metric(SimpleNamespace(config=config))  # type: ignore[arg-type]
    completions = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    poll_s = max(_SHORTEST_POLL_S, _POLL_S_PER_COMPLETION * completions)
    settings: dict[str, Any] = {"poll_interval": min(_LONGEST_POLL_S, poll_s)}
    if metric:
        settings["filter_groups_metric"] = metric
        settings["max_inflight_gen_batches"] = config.algorithm.filter_groups.get("max_inflight_gen_batches", 1)
    refills = bool(OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups"))
    if metric or refills:
        settings["train_batch_size"] = config.data.train_batch_size
        settings["gen_batch_size"] = 1
        settings["sync_refill_failed_groups"] = refills
    return settings
