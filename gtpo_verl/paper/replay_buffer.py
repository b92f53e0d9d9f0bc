"""A replay buffer for verl's V1 trainer that logs what the reward says about each completion.

verl keeps the dict that a reward function returns, but logs it in validation only. With

    trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.paper.replay_buffer
    trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer
    +trainer.v1.sampler.sampler_kwargs.max_response_length=${data.max_response_length}

every training step logs the mean of each number in it as `reward/<key>/mean` (with `gtpo_verl.paper.reward`: score,
format, acc, strict), `completion/eos_rate` and `completion/length/mean`; for GRPO as for GTPO.
"""

from collections import defaultdict
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class RewardMetricsReplayBuffer(ReplayBuffer):
    """verl's `ReplayBuffer` of the sync trainer, with the metrics above on every training batch.

    Args (of `sampler_kwargs`):
        max_response_length (int): a completion of that many tokens has no end of its own.
    """

    def sample(self, *args: Any, **kwargs: Any) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's batch; its metrics, and ours."""
        batch, metrics = super().sample(*args, **kwargs)
        if batch.partition_id == "train":
            metrics.update(self._completion_metrics(batch))
        return batch, metrics

    def _completion_metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["responses", "extra_fields"]
        )
        lengths = data["responses"].offsets().diff()
        ended = lengths < self.sampler_kwargs.max_response_length
        values: dict[str, list[float]] = defaultdict(list)
        for fields, has_ended in zip(data["extra_fields"], ended.tolist(), strict=True):
            for key, value in getattr(fields, "data", fields).get("reward_extra_info", {}).items():
                if isinstance(value, int | float):
                    # A text that is cut off cannot be strictly well formed, whatever it says so far.
                    values[key].append(float(value) * (has_ended or key != "strict"))
        metrics = {f"reward/{key}/mean": sum(numbers) / len(numbers) for key, numbers in values.items()}
        metrics["completion/eos_rate"] = ended.float().mean().item()
        metrics["completion/length/mean"] = lengths.float().mean().item()
        return metrics
