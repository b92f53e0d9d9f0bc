"""A replay buffer for verl's V1 trainer that logs what the reward says about each completion.

verl keeps the dict that a reward function returns, but logs it in validation only. With

    trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward.replay_buffer
    trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer

every training step logs, for GRPO as for GTPO and in every mode of the trainer,

    reward/<key>/mean             the mean of each number in it, such as format of `gtpo_verl.reward.score`
    completion/eos_rate           the share of completions that ended
    completion/repetition/mean    the share of repeated tokens
    completion/length/mean        tokens
    group/zero_std_frac           the share of groups with equal scores
    group/none_right_frac         of the other groups, the share of those without a right answer

verl passes the settings of `algorithm.filter_groups` to its own buffers only; this one reads them itself.
"""

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

# verl looks for finished completions every 2 s, which one prompt per step would wait for in each of 7,473 steps. A look
# takes TransferQueue 2.5 µs per completion; more often than this it would have little time for anything else.
_SHORTEST_POLL_S = 0.02
_POLL_S_PER_COMPLETION = 5e-5
_LONGEST_POLL_S = 2.0  # verl's
# Of how many completions, evenly chosen, the repetition is measured: a quarter of a second if each has 2,000 tokens.
_REPETITION_SAMPLES = 256


class _RewardMetrics:
    """Adds the metrics above to one of verl's replay buffers."""

    def __init__(self, *, sampler_kwargs: DictConfig, **kwargs: Any):
        config: Any = sampler_kwargs._get_root()
        self._eos_token_ids = eos_token_ids(config.actor_rollout_ref.model)
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
        # A nested tensor: the completions one after the other in one tensor of tokens, and where each begins.
        tokens = data["responses"].values()
        offsets = data["responses"].offsets()
        lengths = offsets.diff()
        has_ended = torch.isin(tokens[offsets[1:] - 1], self._eos_token_ids) & (lengths > 0)

        scores = [_scores(extra_fields) for extra_fields in data["extra_fields"]]
        metrics = _reward_metrics(scores, has_ended.tolist())
        metrics |= _group_metrics(batch.keys, scores)

        metrics["completion/eos_rate"] = has_ended.float().mean().item()
        stride = 1 + (len(lengths) - 1) // _REPETITION_SAMPLES
        completions = tokens.tensor_split(offsets[1:-1])[::stride]
        metrics["completion/repetition/mean"] = fmean(repetition(completion.numpy()) for completion in completions)
        metrics["completion/length/mean"] = lengths.float().mean().item()
        return metrics


def _scores(extra_fields: Any) -> dict[str, float]:
    """Return the numbers that the reward function returned for a completion."""
    # A reward function may leave anything in its dict; what is no number is not averaged.
    returned = getattr(extra_fields, "data", extra_fields).get("reward_extra_info") or {}
    scores = {}
    for key, value in returned.items():
        number = _number(value)
        if number is not None:
            scores[key] = number
    if scores.keys() == {"acc"}:  # where verl puts a reward that is no dict
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
    """Return the mean of each number that the reward function returned."""
    values: dict[str, list[float]] = defaultdict(list)
    for numbers, ended in zip(scores, has_ended, strict=True):
        for key, number in numbers.items():
            # A text that is cut off cannot be strictly well formed, whatever it says so far.
            counts = ended or key != "strict"
            values[key].append(number if counts else 0.0)
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
    """Return verl's buffer of its `trainer.v1.trainer_mode`, with the metrics above.

    The name is that of a class, since verl calls it as one. The buffer of the async modes drops stale groups or waits
    for them. Raises what verl raises if groups cannot be filtered.
    """
    base = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    buffer = type("RewardMetricsReplayBuffer", (_RewardMetrics, base), {})
    return buffer(trainer_mode=trainer_mode, **kwargs)


def eos_token_ids(model: DictConfig) -> torch.Tensor:
    """Return the tokens that end a completion, (number of tokens,) int64; one that ends with none of them was cut off.

    They are the tokenizer's EOS token and those of the generation config, at which rollout engines stop too. `model` is
    verl's `actor_rollout_ref.model`.
    """
    tokenizer_path = copy_to_local(model.get("tokenizer_path") or model.path)
    sources: list[Any] = [hf_tokenizer(tokenizer_path, trust_remote_code=model.get("trust_remote_code", False))]
    with suppress(OSError):  # a model need not have a generation config
        sources.append(GenerationConfig.from_pretrained(copy_to_local(model.path)))
    return torch.tensor(eos_ids(*sources))


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings that verl gives its own buffers but not a custom one, and how often to look for completions.

    With the former, a buffer replaces groups that are filtered or failed. The latter grows with the completions of a
    step, up to verl's own interval at 40,000.
    """
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
