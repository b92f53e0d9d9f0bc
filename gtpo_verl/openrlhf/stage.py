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
    """Replaces the advantages of a trainer of OpenRLHF with GTPO's.

    Args:
        trainer: OpenRLHF's; its experience maker gives GTPO's advantages from now on.
        resumed: whether the run goes on from a checkpoint.

    Attributes:
        metrics: those of the last rollout, by their names.

    Raises:
        ValueError: the run is resumed, its filter needs ⟨H⟩_ini, and the record is missing or damaged.
    """

    def __init__(self, trainer: Any, resumed: bool):
        init_logger("gtpo_verl")
        self.args = trainer.args
        self.config: GTPOConfig = trainer.args.algo.gtpo
        self.metrics: dict[str, float] = {}
        self._actors = trainer.actor_model_group
        folder = self.args.ckpt.path
        resumed_from = folder if resumed else None
        self._run = GTPORun(self.config, folder, resumed_from)
        # The experience maker gets an estimator that OpenRLHF knows, and GTPO's advantages replace those of it. The
        # options keep `gtpo`, on which OpenRLHF raises if it computes advantages anywhere else.
        trainer.experience_maker.advantage_estimator = "group_norm"
        wrapt.wrap_function_wrapper(trainer.experience_maker, "compute_advantages_and_returns", self._estimate)

    @torch.no_grad()
    def _estimate(self, wrapped: Callable, maker: Any, args: tuple, kwargs: dict) -> Any:
        """Let OpenRLHF compute its rewards, penalties and logs, and then put GTPO's advantages in place of its own."""
        experiences = wrapped(*args, **kwargs)
        start = time.perf_counter()
        mask = zero_pad_sequences([experience.action_mask for experience in experiences], "right")
        responses = zero_pad_sequences([experience.sequences[:, 1:] for experience in experiences], "right")
        entropy = zero_pad_sequences(self._take_entropies(len(experiences)), "right")
        rewards = torch.cat([experience.rewards for experience in experiences])
        truncated = torch.cat([experience.truncated for experience in experiences])

        completions = Completions(mask, self._prompt_numbers(experiences))
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
        _hand_out(result.advantages, experiences)
        self.metrics = compute_gtpo_metrics(result, self.config, self._run.initial_entropy_value, truncated)
        self.metrics["timing_s/gtpo"] = time.perf_counter() - start
        return experiences

    def _prompt_numbers(self, experiences: list[Any]) -> list[int]:
        """Return the prompt of each completion: OpenRLHF numbers the completions of one prompt in a row."""
        numbers = []
        for experience in experiences:
            for index in experience.index:
                numbers.append(index // self.args.rollout.n_samples_per_prompt)
        return numbers

    def _old_log_probs(self, experiences: list[Any]) -> torch.Tensor | None:
        """Return the log-probs of the pass before the update, (bs, response_length), if the run's rule for λ asks."""
        if "old_log_probs" not in self.config.token_weight_fields:
            return None
        return zero_pad_sequences([experience.action_log_probs for experience in experiences], "right")

    def _take_entropies(self, micro_batches: int) -> list[torch.Tensor]:
        """Return the entropy of each micro-batch, (micro-batch, length - 1), in the order of their forward passes."""
        refs = self._actors.async_run_method_batch("take_gtpo_entropy", number=list(range(micro_batches)))
        # Ranks that share a micro-batch each return its entropy; the first of them is enough.
        ranks_per_micro_batch = self.args.ds.ring_attn_size * self.args.ds.tensor_parallel_size
        entropies = []
        for entropies_of_rank in ray.get(refs)[::ranks_per_micro_batch]:
            entropies.extend(entropies_of_rank)
        return entropies


def _hand_out(advantages: torch.Tensor, experiences: list[Any]) -> None:
    """Give each micro-batch its rows of the advantages, (bs, response_length), cut to its own length."""
    sizes = [len(experience.index) for experience in experiences]
    for experience, rows in zip(experiences, advantages.split(sizes), strict=True):
        length = experience.action_mask.size(1)
        experience.advantages = rows[:, :length].clone()
        experience.returns = experience.advantages.clone()
