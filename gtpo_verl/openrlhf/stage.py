"""GTPO between OpenRLHF's forward passes and its update: the advantages of a whole rollout, its metrics and ⟨H⟩_ini."""

import time
from collections.abc import Callable
from typing import Any

import ray
import torch
import wrapt
from openrlhf.utils.logging_utils import init_logger
from openrlhf.utils.utils import zero_pad_sequences

from gtpo_verl.algorithm.advantage import compute_gtpo
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics
from gtpo_verl.run.gtpo_run import GTPORun


class GTPOStage:
    """The advantages of one trainer of OpenRLHF, whose experience maker's are GTPO's from now on.

    `metrics` are those of the last rollout; `resumed` says that the run goes on from a checkpoint. Raises what
    `GTPORun` raises.
    """

    def __init__(self, trainer: Any, resumed: bool):
        init_logger("gtpo_verl")
        self.args = trainer.args
        self.config: GTPOConfig = trainer.args.algo.gtpo
        self.metrics: dict[str, float] = {}
        self._actors = trainer.actor_model_group
        folder = self.args.ckpt.path
        self._run = GTPORun(self.config, folder, folder if resumed else None)
        # One that OpenRLHF knows, whose advantages GTPO's then replace; elsewhere `gtpo` stays, and raises.
        trainer.experience_maker.advantage_estimator = "group_norm"
        wrapt.wrap_function_wrapper(trainer.experience_maker, "compute_advantages_and_returns", self._estimate)

    @torch.no_grad()
    def _estimate(self, wrapped: Callable, maker: Any, args: tuple, kwargs: dict) -> Any:
        """OpenRLHF's own rewards, penalties and logs; then the advantages are GTPO's."""
        experiences = wrapped(*args, **kwargs)
        start = time.perf_counter()
        index = [i // self.args.rollout.n_samples_per_prompt for experience in experiences for i in experience.index]
        mask = zero_pad_sequences([experience.action_mask for experience in experiences], "right")
        responses = zero_pad_sequences([experience.sequences[:, 1:] for experience in experiences], "right")
        entropy = zero_pad_sequences(self._take_entropies(len(experiences)), "right")
        rewards = torch.cat([experience.rewards for experience in experiences])
        truncated = torch.cat([experience.truncated for experience in experiences])

        completions = Completions(mask, index)
        trajectory_entropy = completions.mean(entropy)
        self._run.measure(trajectory_entropy, completions)
        result = compute_gtpo(
            rewards=rewards,
            responses=responses,
            response_mask=mask,
            group_ids=completions,
            entropy=entropy,
            trajectory_entropy=trajectory_entropy,
            config=self.config,
            initial_entropy=self._run.initial_entropy_value,
            old_log_probs=self._old_log_probs(experiences),
            norm_adv_by_std_in_grpo=not self.args.algo.advantage.no_std_norm,
        )
        self._run.check(rewards, result)
        rows = result.advantages.split([len(experience.index) for experience in experiences])
        for experience, advantages in zip(experiences, rows, strict=True):
            experience.advantages = advantages[:, : experience.action_mask.size(1)].clone()
            experience.returns = experience.advantages.clone()
        self.metrics = compute_gtpo_metrics(result, self.config, self._run.initial_entropy_value, truncated)
        self.metrics["timing_s/gtpo"] = time.perf_counter() - start
        return experiences

    def _old_log_probs(self, experiences: list[Any]) -> torch.Tensor | None:
        """(bs, response_length), of the forward pass before the update, if the run's rule for λ asks for them."""
        if "old_log_probs" not in self.config.token_weight_fields:
            return None
        return zero_pad_sequences([experience.action_log_probs for experience in experiences], "right")

    def _take_entropies(self, micro_batches: int) -> list[torch.Tensor]:
        """(micro-batch, length - 1) each, from the ranks that have computed them, dealt out as for their forward."""
        refs = self._actors.async_run_method_batch("take_gtpo_entropy", number=list(range(micro_batches)))
        same = self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size  # ranks that compute one micro-batch
        return [entropy for of_rank in ray.get(refs)[::same] for entropy in of_rank]
