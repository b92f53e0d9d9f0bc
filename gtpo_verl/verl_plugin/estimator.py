"""GTPO between verl's old-log-prob pass and its update: the estimator, and what it needs beside rewards.

verl hands an advantage estimator neither token ids nor entropy and takes no metrics from it. So the hooks of
`gtpo_verl.verl_plugin` give every row of the trainer's batch what GTPO needs of it (`batch_fields`), show the batch
to the estimator, and log the metrics of the trainer's `GTPOEstimator` afterwards.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from gtpo_verl.advantage import GTPOAdvantage, check_finite, compute_group_advantages, weigh_tokens
from gtpo_verl.entropy import mean_entropy
from gtpo_verl.group import Completions
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.metrics import compute_gtpo_metrics
from gtpo_verl.verl_plugin import preflight
from gtpo_verl.verl_plugin.batch_fields import ENTROPY, RESPONSE_MASK, RESPONSES, ROW, final_outputs

logger = logging.getLogger("gtpo_verl")

problems: list[str] = []
"""What keeps GTPO from running in this process; empty if nothing does."""

_current: ContextVar["GTPOEstimator | None"] = ContextVar("gtpo_stage", default=None)
_batch: ContextVar[Any] = ContextVar("gtpo_batch", default=None)


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


@contextmanager
def estimating(batch: Any) -> Iterator[None]:
    """Show the estimator the batch (a TensorDict) that verl computes advantages of."""
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


class GTPOEstimator:
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
        self._metrics: dict[str, float] = {}
        self._told_of_sessions = False
        if self.config.initial_entropy is not None:
            self._settle(InitialEntropy(self.config.initial_entropy))
        elif self._resumed:
            folder = preflight.resume_folder(config)
            if self.config.completion_filter == "auto" or InitialEntropy.path(folder).exists():
                self._settle(InitialEntropy.load(folder))
        if not preflight.needs_reference_policy(config):
            logger.info("GTPO runs without a reference policy: no KL term, no reference worker")

    @classmethod
    def of(cls, trainer: Any) -> "GTPOEstimator":
        """The stage of a trainer, made at its first batch; the estimator's calls are for it from now on."""
        if not hasattr(trainer, "_gtpo_stage"):
            trainer._gtpo_stage = cls(trainer.config, trainer.global_steps)
        _current.set(trainer._gtpo_stage)
        return trainer._gtpo_stage

    @staticmethod
    def take_current_metrics() -> dict[str, float]:
        """The metrics of the last batch of this process's trainer, once."""
        stage = _current.get()
        return stage.take_metrics() if stage else {}

    def estimate(
        self, batch: Any, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages of a batch; its metrics are then in `take_metrics`.

        Where an agent loop's session has several outputs, its last one stands for it, as in verl's `grpo`: group
        statistics, entropy, conflicts and metrics are those of the last outputs. The other outputs of a session get
        its δ(A − γ⟨H⟩) with λ = 1 on all their tokens, since their prompts are others.

        Args:
            batch: the trainer's TensorDict; the fields that only GTPO needs are taken out of it.
            token_level_rewards, response_mask, index: as for `compute_gtpo_outcome_advantage`.

        Raises:
            ValueError: a reward, entropy or log-probability that is not finite; the message names uid and row.
        """
        start = time.perf_counter()
        entropy, row = batch.pop(ENTROPY), batch.pop(ROW)
        responses = batch.pop(RESPONSES) if RESPONSES in batch.keys() else batch["responses"]
        # verl's rollout correction may have rejected tokens: they get no advantage, but keep their position and group.
        own_mask = batch.pop(RESPONSE_MASK) if RESPONSE_MASK in batch.keys() else response_mask
        _check_log_probs(batch, own_mask, index)
        final, session_of_row = final_outputs(row)
        if len(final) == len(row):
            result = self._weigh(token_level_rewards, own_mask, responses, entropy, row, index)
            advantages = result.advantages
        else:
            self._tell_of_sessions(own_mask, final)
            own = token_level_rewards[final], own_mask[final], responses[final], entropy[final], row[final]
            result = self._weigh(*own, index=np.asarray(index, dtype=object)[final.numpy()])
            advantages = result.unweighted_advantages[session_of_row].unsqueeze(-1) * own_mask
            advantages[final] = result.advantages
        if own_mask is not response_mask:
            advantages = advantages * response_mask
        self._metrics["timing_s/gtpo"] = time.perf_counter() - start
        return advantages, advantages

    def _weigh(
        self,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        responses: torch.Tensor,
        entropy: torch.Tensor,
        row: torch.Tensor,
        index: Any,
    ) -> GTPOAdvantage:
        """GTPO on one output per session, and its metrics."""
        response_len, prompt, _, _ = row.unbind(-1)
        completions = Completions(response_mask, index, response_len)
        if self.initial_entropy is None and not self._resumed:
            trajectory_entropy = mean_entropy(entropy, completions)
            self._settle(InitialEntropy.measure(trajectory_entropy, completions.lengths, index))
        initial_entropy = self.initial_entropy.value if self.initial_entropy else None
        group_advantages = compute_group_advantages(
            token_level_rewards.sum(-1), completions, self.norm_adv_by_std_in_grpo
        )
        if prompt.any():  # positions are compared between answers to the same prompt only
            completions.positions_by(list(zip(index, prompt.tolist(), strict=True)))
        result = weigh_tokens(group_advantages, completions, responses, entropy, self.config, initial_entropy)
        truncated = response_len >= self.max_response_length
        self._metrics = compute_gtpo_metrics(result, self.config, initial_entropy, truncated)
        return result

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the last batch, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _settle(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self.checkpoints, self.config)
        logger.info("GTPO %s; written to %s", initial_entropy.decision(self.config), path)

    def _tell_of_sessions(self, response_mask: torch.Tensor, final: torch.Tensor) -> None:
        if not self._told_of_sessions:
            real = response_mask.any(-1)  # verl's padding rows have no token
            logger.warning(
                "GTPO: the agent loop made %d outputs in %d sessions; the last output of a session stands for it. verl "
                "counts its mini-batches in outputs, so it may update more often than once per rollout, where the "
                "gtpo loss does not clip",
                int(real.sum()),
                int(real[final].sum()),
            )
        self._told_of_sessions = True


def _check_log_probs(batch: Any, response_mask: torch.Tensor, index: Any) -> None:
    for name in ("old_log_probs", "rollout_log_probs"):
        if name in batch.keys() and not batch[name].sum().isfinite():
            per_row = torch.where(response_mask.bool(), batch[name], 0).sum(-1)
            check_finite(name, per_row, index)


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on the trainer's batch.

    Raises:
        RuntimeError: it was called by a trainer of which GTPO has no hook.
    """
    raise_problems()
    stage, batch = _current.get(), _batch.get()
    if stage is None or batch is None or ENTROPY not in batch.keys():
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    return stage.estimate(batch, token_level_rewards, response_mask, index)
