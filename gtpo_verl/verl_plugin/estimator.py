"""GTPO's advantages in a trainer of verl: the estimator, its initial entropy and its metrics.

A `Step` accompanies one batch of a trainer from verl's old-log-prob pass to its update. The hooks of `trainer_hooks`
create it and give it the fields of the batch; verl then calls the estimator, which finds it here.
"""

import logging
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from gtpo_verl.advantage import GTPOAdvantage, apply_gtpo, check_finite, compute_group_advantages
from gtpo_verl.completions import Completions
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.metrics import compute_gtpo_metrics
from gtpo_verl.verl_plugin import names_and_versions, preflight, update_pass
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.config import VerlGTPOConfig
from gtpo_verl.verl_plugin.token_dump import TokenDump

logger = logging.getLogger("gtpo_verl")


class GTPOEstimator:
    """GTPO in one run: it settles the initial entropy at the first batch, and weighs the tokens of each.

    Under another estimator, with a token dump, it computes what GTPO would do.

    Args:
        config: verl's whole config.
        folder: where to write the record of the initial entropy.
        resumed_from: the folder of the record, if the run is resumed; None if it is new.

    Raises:
        ValueError: a resumed run lacks the initial entropy that it needs.
    """

    def __init__(self, config: Any, folder: str | Path, resumed_from: str | Path | None):
        self.applied = names_and_versions.serves(config)
        self.config = VerlGTPOConfig.from_config(config.algorithm)
        self.entropy_from_update = self.applied and self.config.entropy_from == "update"
        self.initial_entropy: InitialEntropy | None = None
        self._folder, self._resumed = folder, resumed_from is not None
        self._norm_adv_by_std_in_grpo = config.algorithm.get("norm_adv_by_std_in_grpo", True)
        self._max_response_length = config.data.max_response_length
        self._max_model_len = OmegaConf.select(config, "actor_rollout_ref.rollout.max_model_len") or math.inf
        self._rejects = OmegaConf.select(config, "algorithm.rollout_correction.rollout_rs") is not None
        self._told_of_sessions = False
        if known := InitialEntropy.known_before(self.config, resumed_from):
            self._settle(known)

    @classmethod
    def of(cls, trainer: Any) -> "GTPOEstimator":
        """The estimator of a trainer of verl, made at its first batch.

        Raises:
            RuntimeError: GTPO cannot run in this process, see `names_and_versions.load_errors`.
            ValueError: a setting with which it cannot run, or a resumed run without its initial entropy.
        """
        if not hasattr(trainer, "_gtpo_estimator"):
            config = trainer.config
            preflight.validate(config)
            if names_and_versions.serves(config):
                folder, resumed_from = config.trainer.default_local_dir, preflight.resume_folder(config)
                resumes = trainer.global_steps > 1
            else:
                folder = resumed_from = config.algorithm.gtpo.dump_dir
                resumes = InitialEntropy.path(folder).exists()
            trainer._gtpo_estimator = cls(config, folder, resumed_from if resumes else None)
        return trainer._gtpo_estimator

    def estimate(self, step: "Step", rewards: torch.Tensor, response_mask: torch.Tensor, index: Any) -> torch.Tensor:
        """Advantages of a batch, (bs, response_length); `step` then has the result and the metrics.

        Where the entropy comes from the update they are λA, and `step` has what the actor needs beside them; `complete`
        then makes the metrics.

        If a session of an agent loop has several outputs, the last one counts, as in verl's `grpo`: group statistics,
        entropy, conflicts and metrics are those of the last outputs. The other outputs of a session get
        its δ(A − γ⟨H⟩) with λ = 1 on all their tokens, since their prompts are others. (With the entropy from the
        update δ and ⟨H⟩ are each output's own.)

        Args:
            step (Step): with the fields of the batch.
            rewards, response_mask, index: as for `compute_gtpo_outcome_advantage`.

        Raises:
            ValueError: a reward or entropy that is not finite; the message names uid and row.
        """
        start = time.perf_counter()
        fields = step.fields
        assert fields is not None
        final = fields.final
        if len(final) == len(rewards):
            result = self.weigh(fields, rewards, index)
            advantages = result.advantages
        else:
            self._tell_of_sessions(fields)
            result = self.weigh(fields.of_sessions(), rewards[final], np.asarray(index, dtype=object)[final])
            advantages = result.unweighted_advantages[fields.session].unsqueeze(-1) * fields.response_mask
            advantages[final] = result.advantages
        if self._rejects:
            advantages = advantages * response_mask
        step.result, step.final, step.truncated = result, final, self._truncated(fields.of_sessions())
        if self.entropy_from_update:
            a = result.group_advantages[fields.session]
            step.rows = update_pass.make_rows(a, self.config, self.initial_entropy_value)
        else:
            step.metrics = self.metrics(result, step.truncated)
        step.metrics["timing_s/gtpo"] = time.perf_counter() - start
        return advantages

    def complete(self, step: "Step", entropies: update_pass.Entropies) -> None:
        """The metrics of a step whose entropy came from the update.

        Args:
            step (Step): as `estimate` left it.
            entropies: the actor's metric `update_pass.ENTROPIES`.

        Raises:
            ValueError: an entropy that is not finite, or of which the update said nothing; the message names uid and
                row.
        """
        assert step.result is not None and step.rows is not None and step.truncated is not None
        trajectory_entropy = update_pass.gather_means(entropies, len(step.rows))[step.final]
        highest = step.rows[step.final, 3]
        completions = step.result.completions
        check_finite("entropy", trajectory_entropy, completions.uids)
        if self.initial_entropy is None and not self._resumed:
            self._settle(InitialEntropy.measure(trajectory_entropy, completions.lengths, completions.uids))
        step.result = step.result._replace(
            trajectory_entropy=trajectory_entropy,
            regularizer=self.config.entropy_coeff * trajectory_entropy,
            keep=trajectory_entropy <= highest,
        )
        step.metrics |= self.metrics(step.result, step.truncated)

    def weigh(self, fields: BatchFields, token_level_rewards: torch.Tensor, index: Any) -> GTPOAdvantage:
        """GTPO on one output per session."""
        # Token positions are compared between answers to the same prompt only, token for token.
        prompts = [(uid, ids.tobytes()) for uid, ids in zip(index, fields.prompts, strict=True)]
        completions = Completions(fields.response_mask, index, prompts)
        entropy = fields.entropy
        if entropy is None:
            entropy = torch.zeros(()).expand(fields.responses.shape)  # with which δ = 1 and γ⟨H⟩ = 0: λA is left
        elif self.initial_entropy is None and not self._resumed:
            self._settle(InitialEntropy.measure(completions.mean(entropy), completions.lengths, index))
        scores = token_level_rewards.sum(-1)
        group_advantages = compute_group_advantages(scores, completions, self._norm_adv_by_std_in_grpo)
        return apply_gtpo(
            group_advantages, completions, fields.responses, entropy, self.config, self.initial_entropy_value
        )

    def metrics(self, result: GTPOAdvantage, truncated: torch.Tensor) -> dict[str, float]:
        """`gtpo/*` of a batch, of which these (bs,) completions were cut off at a limit."""
        return compute_gtpo_metrics(result, self.config, self.initial_entropy_value, truncated)

    def _truncated(self, fields: BatchFields) -> torch.Tensor:
        length = fields.response_len + torch.tensor([len(ids) for ids in fields.prompts])
        return (fields.response_len >= self._max_response_length) | (length >= self._max_model_len)

    @property
    def initial_entropy_value(self) -> float | None:
        """⟨H⟩_ini in nats per token; None in a resumed run that does not need it and has no record of it."""
        return self.initial_entropy.value if self.initial_entropy else None

    def _settle(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self._folder, self.config)
        if self.applied:
            logger.info("GTPO %s; written to %s", initial_entropy.decision(self.config), path)

    def _tell_of_sessions(self, fields: BatchFields) -> None:
        if not self._told_of_sessions:
            real = fields.response_mask.any(-1)  # verl's padding rows have no token
            logger.warning(
                "GTPO: the agent loop made %d outputs in %d sessions; GTPO uses the last output of each session. verl "
                "counts its mini-batches in outputs, so it may update more than once per rollout, and the gtpo loss "
                "does not clip",
                int(real.sum()),
                int(real[fields.final].sum()),
            )
        self._told_of_sessions = True


@dataclass
class Step:
    """One batch of a trainer.

    Args:
        estimator (GTPOEstimator): the trainer's.
        dump (TokenDump | None): the trainer's, if this step is dumped.
        number (int): verl's `global_steps`.
        fields (BatchFields | None): of the batch, while verl computes its advantages.
        result (GTPOAdvantage | None): what the estimator computed, of one output per session.
        final (list): their rows.
        truncated (torch.Tensor | None): (bs,) bool, which of them were cut off at a limit.
        rows (torch.Tensor | None): the field `update_pass.ROWS`, until the update has given the entropy.
        write_dump (Callable | None): what is left to do for the dump once the update has given the entropies.
        metrics (dict): what is to be logged of it.
    """

    estimator: GTPOEstimator
    dump: TokenDump | None
    number: int
    fields: BatchFields | None = None
    result: GTPOAdvantage | None = None
    final: list[int] = field(default_factory=list)
    truncated: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    write_dump: Callable[[update_pass.Entropies], None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trainer: Any) -> "Step | None":
        """The next step of a trainer, from now on that of this process; None where it has nothing to do with GTPO."""
        dump = TokenDump.if_due(trainer)
        step = None
        if dump or names_and_versions.serves(trainer.config):
            step = cls(GTPOEstimator.of(trainer), dump, trainer.global_steps)
        current_step.set(step)
        return step


current_step: ContextVar[Step | None] = ContextVar("gtpo_step", default=None)
"""The step of this process's trainer."""


def check_log_probs(batch: Any, response_mask: torch.Tensor, index: Any) -> None:
    """Raise on a log-probability of a completion's own token that is not finite.

    Raises:
        ValueError: naming uid and row.
    """
    for name in ("old_log_probs", "rollout_log_probs"):
        if name in batch.keys() and not batch[name].sum().isfinite():
            per_row = torch.where(response_mask.bool(), batch[name], 0).sum(-1)
            check_finite(name, per_row, index)


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on the trainer's batch.

    Raises:
        RuntimeError: a trainer called it that GTPO does not hook.
    """
    step = current_step.get()
    if step is None or not step.estimator.applied or step.fields is None:
        names_and_versions.raise_load_errors()
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    advantages = step.estimator.estimate(step, token_level_rewards, response_mask, index)
    return advantages, advantages
