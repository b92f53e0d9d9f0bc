"""GTPO between verl's old-log-prob pass and its update: the estimator, and what it needs beside rewards.

verl hands an advantage estimator neither token ids nor entropy and takes no metrics from it. So the hooks of
`gtpo_verl.verl_plugin` bring the former to a trainer's `GTPOStage` before the estimator runs, and take the latter away.
"""

import logging
import os
import time
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from omegaconf import OmegaConf

from gtpo_verl import preflight
from gtpo_verl.advantage import compute_group_advantages, weigh_tokens
from gtpo_verl.entropy import compute_trajectory_entropy
from gtpo_verl.group import Completions
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.metrics import compute_gtpo_metrics

logger = logging.getLogger("gtpo_verl")
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

problems: list[str] = []
"""What keeps GTPO from running in this process; empty if nothing does."""

_current: ContextVar["GTPOStage | None"] = ContextVar("gtpo_stage", default=None)


def name_problems(names: Iterable[tuple[str, str]]) -> list[str]:
    """Names that another package registered before this one.

    Args:
        names: pairs of a verl key, `preflight.ADV_ESTIMATOR` or `preflight.LOSS_MODE`, and the name it asks for.
    """
    from verl.trainer.ppo import core_algos

    served = {
        preflight.ADV_ESTIMATOR: (core_algos.ADV_ESTIMATOR_REGISTRY, estimate_gtpo_advantage),
        preflight.LOSS_MODE: (core_algos.POLICY_LOSS_REGISTRY, compute_policy_loss_gtpo),
    }
    found = []
    for key, name in names:
        registry, ours = served[key]
        other = registry.get(name, ours)
        if other is not ours and not other.__module__.startswith("verl."):  # verl may have GTPO of its own
            found.append(
                f"{key}={name} is {other.__module__}.{other.__qualname__} of another package; two other papers are "
                f"called GTPO (arXiv:2508.04349, arXiv:2511.14846). For arXiv:2508.03772 set {key}={preflight.ALIAS}"
            )
    return found


def raise_problems(config: Any = None) -> None:
    """Raise if GTPO cannot run in this process, or not by the names that this verl config asks for.

    Raises:
        RuntimeError: naming each cause and its remedy.
    """
    asked = [] if config is None else [(key, str(OmegaConf.select(config, key))) for key in preflight.NAMED_BY]
    found = problems + name_problems((key, name) for key, name in asked if name in preflight.NAMES)
    if found:
        raise RuntimeError("GTPO cannot run: " + "; ".join(found))


class GTPOStage:
    """The advantage stage of one trainer: initial entropy, advantages and metrics of each batch.

    Args:
        config: verl's whole config.
        global_steps (int): the trainer's step at its first batch; above 1 in a resumed run.

    Raises:
        RuntimeError: GTPO cannot run in this process, see `problems`.
        ValueError: a setting with which it cannot run, or a resumed run without its initial entropy.
    """

    def __init__(self, config: Any, global_steps: int):
        raise_problems(config)
        self.config = preflight.check(config)
        self.norm_adv_by_std_in_grpo = config.algorithm.get("norm_adv_by_std_in_grpo", True)
        self.max_response_length = config.data.max_response_length
        self.checkpoints = config.trainer.default_local_dir
        self.initial_entropy: InitialEntropy | None = None
        self._resumed = global_steps > 1
        self._batch: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, float] = {}
        if self.config.initial_entropy is not None:
            self._settle(InitialEntropy(self.config.initial_entropy))
        elif self._resumed:
            folder = preflight.resume_folder(config)
            if self.config.completion_filter == "auto" or InitialEntropy.path(folder).exists():
                self._settle(InitialEntropy.load(folder))
        if not preflight.needs_reference_policy(config):
            logger.info("GTPO runs without a reference policy: no KL term, no reference worker")

    @classmethod
    def of(cls, trainer: Any) -> "GTPOStage":
        """The stage of a trainer, made at its first batch."""
        if not hasattr(trainer, "_gtpo_stage"):
            trainer._gtpo_stage = cls(trainer.config, trainer.global_steps)
        return trainer._gtpo_stage

    @staticmethod
    def take_current_metrics() -> dict[str, float]:
        """The metrics of the last batch of this process's trainer, once."""
        stage = _current.get()
        return stage.take_metrics() if stage else {}

    def collect(
        self, responses: torch.Tensor, entropy: torch.Tensor, response_mask: torch.Tensor, row_len: torch.Tensor
    ) -> None:
        """Take what the next call of the estimator needs, rows in the order in which it will get them.

        Args:
            responses, entropy, response_mask: (bs, response_length), as for `compute_gtpo_outcome_advantage`.
            row_len (torch.Tensor): (bs,), length of each response, tool output included.
        """
        self._batch = {"responses": responses, "entropy": entropy, "response_mask": response_mask, "row_len": row_len}
        _current.set(self)

    def estimate(
        self, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages of the collected batch; its metrics are then in `take_metrics`.

        Raises:
            RuntimeError: these are not the collected rows.
        """
        start = time.perf_counter()
        batch, self._batch = self._batch, {}
        if response_mask.shape != batch["response_mask"].shape or (response_mask > batch["response_mask"]).any():
            raise RuntimeError("the trainer changed the rows of the batch after its old-log-prob pass")
        if self.initial_entropy is None and not self._resumed:
            entropy = compute_trajectory_entropy(batch["entropy"], batch["response_mask"])
            self._settle(InitialEntropy.measure(entropy, batch["response_mask"].sum(-1), index))
        initial_entropy = self.initial_entropy.value if self.initial_entropy else None
        completions = Completions(batch["response_mask"], index)
        group_advantages = compute_group_advantages(
            token_level_rewards.sum(-1), completions, self.norm_adv_by_std_in_grpo
        )
        result = weigh_tokens(
            group_advantages,
            completions,
            batch["responses"],
            batch["response_mask"],
            batch["entropy"],
            self.config,
            initial_entropy,
        )
        truncated = batch["row_len"] >= self.max_response_length
        self._metrics = compute_gtpo_metrics(result, self.config, initial_entropy, truncated)
        advantages = result.advantages
        # verl's rollout correction may have rejected tokens: they get no advantage, but keep their position and group.
        if not torch.equal(response_mask, batch["response_mask"]):
            advantages = advantages * response_mask
        self._metrics["timing_s/gtpo"] = time.perf_counter() - start
        return advantages, advantages

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the last batch, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @property
    def has_batch(self) -> bool:
        """Whether a batch was collected that no estimate was made of yet."""
        return bool(self._batch)

    def _settle(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self.checkpoints)
        logger.info("GTPO %s; written to %s", initial_entropy.decision(self.config), path)


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on what the trainer's hook collected.

    Raises:
        RuntimeError: it was called by a trainer of which GTPO has no hook.
    """
    raise_problems()
    stage = _current.get()
    if stage is None or not stage.has_batch:
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    return stage.estimate(token_level_rewards, response_mask, index)
