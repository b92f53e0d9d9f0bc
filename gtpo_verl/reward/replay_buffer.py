"""A replay buffer for verl's V1 trainer that logs what the reward says about each completion.

verl keeps the dict that a reward function returns, but logs it in validation only. With

    trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward.replay_buffer
    trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer

every training step logs the mean of each number in it as `reward/<key>/mean` (with `gtpo_verl.reward.score`: score,
format, acc, strict, timeout), `completion/eos_rate`, `completion/repetition/mean` and `completion/length/mean`, the
share of groups with equal scores, `group/zero_std_frac`, and that of the other groups which have no right answer,
`group/none_right_frac`; for GRPO as for GTPO, and in every mode of the trainer. verl hands a buffer that is not its own
nothing of `algorithm.filter_groups`; this one reads it itself.
"""

from collections import defaultdict
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

from gtpo_verl.monitor.repetition import group_shares, repetition
from gtpo_verl.run_files.tokens import eos_ids

# verl looks for finished completions every 2 s, which one prompt per step would wait for in each of 7,473 steps. A look
# takes TransferQueue 2.5 µs per completion; more often than this it would have little time for anything else.
_SHORTEST_POLL_S, _POLL_S_PER_COMPLETION = 0.02, 5e-5
# Completions, evenly chosen, whose repetition is measured: a quarter of a second for 2,000 tokens each.
_REPETITION_OF = 256


class _RewardMetrics:
    """Adds the metrics above to one of verl's replay buffers."""

    def __init__(self, *, sampler_kwargs: DictConfig, **kwargs: Any):
        config: Any = sampler_kwargs._get_root()
        self._eos_token_ids = eos_token_ids(config.actor_rollout_ref.model)
        super().__init__(sampler_kwargs=sampler_kwargs, **_settings(config) | kwargs)  # type: ignore[call-arg]

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's batch; its metrics, and ours."""
        batch, metrics = super().sample(*args, **kwargs)  # type: ignore[misc]
        if batch.partition_id == "train":
            metrics.update(self._completion_metrics(batch))
        return batch, metrics

    def _completion_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        fields = ["responses", "extra_fields"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        offsets, tokens = data["responses"].offsets(), data["responses"].values()
        lengths = offsets.diff()
        ended = torch.isin(tokens[offsets[1:] - 1], self._eos_token_ids) & (lengths > 0)
        values: dict[str, list[float]] = defaultdict(list)
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row, extra, has_ended in zip(batch.keys, data["extra_fields"], ended.tolist(), strict=True):
            # A reward function may leave anything in its dict; what is no number is not averaged.
            said = getattr(extra, "data", extra).get("reward_extra_info") or {}
            scores = {key: number for key, value in said.items() if (number := _number(value)) is not None}
            if scores.keys() == {"acc"}:  # where verl puts a reward that is no dict
                scores = {"score": scores["acc"]}
            groups[row.rsplit("_", 2)[0]].append(scores)  # {uid}_{session}_{output}
            for key, number in scores.items():
                # A text that is cut off cannot be strictly well formed, whatever it says so far.
                values[key].append(number if has_ended or key != "strict" else 0.0)
        metrics = {f"reward/{key}/mean": sum(numbers) / len(numbers) for key, numbers in values.items()}
        if all("score" in scores for group in groups.values() for scores in group):
            metrics["group/zero_std_frac"], none_right = group_shares(groups.values(), "score", "acc")
            metrics |= {} if none_right is None else {"group/none_right_frac": none_right}
        metrics["completion/eos_rate"] = ended.float().mean().item()
        completions = tokens.tensor_split(offsets[1:-1])[:: 1 + (len(lengths) - 1) // _REPETITION_OF]
        metrics["completion/repetition/mean"] = fmean(repetition(completion.numpy()) for completion in completions)
        metrics["completion/length/mean"] = lengths.float().mean().item()
        return metrics


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | np.number | np.bool_) else None
    except OverflowError:
        return None


def RewardMetricsReplayBuffer(*, trainer_mode: str, **kwargs: Any) -> ReplayBuffer:
    """verl's buffer of its `trainer.v1.trainer_mode`, with the metrics above; the async one drops stale groups or waits
    for them. Raises what verl raises if groups cannot be filtered."""
    verls = ReplayBuffer if trainer_mode == "sync" else ReplayBufferAsync
    return type("RewardMetricsReplayBuffer", (_RewardMetrics, verls), {})(trainer_mode=trainer_mode, **kwargs)


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
    """Seconds between two looks for the completions of a step, verl's own at 40,000 of them; and what verl gives its
    own buffers, so that they replace groups that are filtered or failed."""
    metric = PPOTrainer._resolve_filter_groups_metric(SimpleNamespace(config=config))  # type: ignore[arg-type]
    completions = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    settings: dict[str, Any] = {"poll_interval": min(2.0, max(_SHORTEST_POLL_S, _POLL_S_PER_COMPLETION * completions))}
    if metric:
        settings["filter_groups_metric"] = metric
        settings["max_inflight_gen_batches"] = config.algorithm.filter_groups.get("max_inflight_gen_batches", 1)
    refills = bool(OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups"))
    if metric or refills:
        settings |= {"train_batch_size": config.data.train_batch_size, "gen_batch_size": 1}
        settings["sync_refill_failed_groups"] = refills
    return settings
