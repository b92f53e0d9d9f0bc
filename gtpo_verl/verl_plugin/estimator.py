"""GTPO's advantages in a run of verl: the estimator, its initial entropy and its metrics."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtpo_verl.advantage import GTPOAdvantage, apply_gtpo, check_finite, compute_group_advantages
from gtpo_verl.completions import Completions
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.metrics import compute_gtpo_metrics
from gtpo_verl.verl_plugin import names_and_versions, preflight, update_pass
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.config import VerlGTPOConfig
from gtpo_verl.verl_plugin.names_and_versions import select

logger = logging.getLogger("gtpo_verl")


@dataclass
class Estimate:
    """What the estimator says of a batch.

    Args:
        advantages (torch.Tensor): (bs, response_length), for the loss.
        result (GTPOAdvantage): of one output per session.
        final (list): their rows.
        truncated (torch.Tensor): bool, which of them were cut off at a limit.
        columns (update_pass.Columns | None): what the actor needs, if the entropy comes from the update.
        metrics (dict): to be logged; in that case there are none before the update.
    """

    advantages: torch.Tensor
    result: GTPOAdvantage
    final: list[int]
    truncated: torch.Tensor
    columns: update_pass.Columns | None = None
    metrics: dict[str, float] = field(default_factory=dict)


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
        self._max_model_len = select(config, "actor_rollout_ref.rollout.max_model_len") or math.inf
        self._rejects = select(config, "algorithm.rollout_correction.rollout_rs") is not None
        self._told_of_sessions = False
        if known := InitialEntropy.known_before(self.config, resumed_from):
            self._settle(known)

    @classmethod
    def of(cls, trainer: Any) -> "GTPOEstimator":
        """The estimator of a trainer of verl that is at its first batch.

        Raises:
            ValueError: a resumed run without its initial entropy.
        """
        config = trainer.config
        if names_and_versions.serves(config):
            folder, resumed_from = config.trainer.default_local_dir, preflight.resume_folder(config)
            resumes = trainer.global_steps > 1
        else:
            folder = resumed_from = config.algorithm.gtpo.dump_dir
            resumes = InitialEntropy.path(folder).exists()
        return cls(config, folder, resumed_from if resumes else None)

    def estimate(self, fields: BatchFields, rewards: torch.Tensor, response_mask: torch.Tensor, index: Any) -> Estimate:
        """Advantages of a batch; λA, where the entropy comes from the update.

        If a session of an agent loop has several outputs, the last one counts, as in verl's `grpo`: group statistics,
        entropy, conflicts and metrics are those of the last outputs. The other outputs of a session get
        its δ(A − γ⟨H⟩) with λ = 1 on all their tokens, since their prompts are others. (With the entropy from the
        update δ and ⟨H⟩ are each output's own.)

        Args:
            fields (BatchFields): of the batch.
            rewards, response_mask, index: as for `compute_gtpo_outcome_advantage`.

        Raises:
            ValueError: a reward or entropy that is not finite; the message names uid and row.
        """
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
        estimate = Estimate(advantages, result, final, self._truncated(fields.of_sessions()))
        if self.entropy_from_update:
            a = result.group_advantages[fields.session]
            estimate.columns = update_pass.Columns.make(a, self.config, self.initial_entropy_value)
        else:
            estimate.metrics = self._metrics(estimate)
        return estimate

    def complete(self, estimate: Estimate, entropies: list[update_pass.RowEntropy]) -> None:
        """Give an estimate the entropy that came from the update, and its metrics.

        Raises:
            ValueError: an entropy that is not finite, or of which the update said nothing; the message names uid and
                row.
        """
        result, columns = estimate.result, estimate.columns
        assert columns is not None
        trajectory_entropy = update_pass.gather_means(entropies, len(columns.row))[estimate.final]
        completions = result.completions
        check_finite("entropy", trajectory_entropy, completions.uids)
        if self.initial_entropy is None and not self._resumed:
            self._settle(InitialEntropy.measure(trajectory_entropy, completions.lengths, completions.uids))
        estimate.result = result._replace(
            trajectory_entropy=trajectory_entropy,
            regularizer=self.config.entropy_coeff * trajectory_entropy,
            keep=trajectory_entropy <= columns.highest_entropy[estimate.final],
        )
        estimate.metrics |= self._metrics(estimate)

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

    def _metrics(self, estimate: Estimate) -> dict[str, float]:
        return compute_gtpo_metrics(estimate.result, self.config, self.initial_entropy_value, estimate.truncated)

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
            level = logging.WARNING if initial_entropy.may_be_chance(self.config) else logging.INFO
            logger.log(level, "GTPO %s; written to %s", initial_entropy.decision(self.config), path)

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
