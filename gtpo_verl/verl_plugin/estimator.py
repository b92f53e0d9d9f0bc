"""GTPO's advantages in a run of verl: the estimator, its initial entropy and its metrics."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithm.advantage import (
    GTPOAdvantage,
    check_finite,
    compute_gtpo,
    regularize,
)
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.metrics import compute_gtpo_metrics
from gtpo_verl.run.gtpo_run import GTPORun
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import update_pass
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.run_config import ADV_ESTIMATOR, RunConfig, registry, select

logger = logging.getLogger("gtpo_verl")


@dataclass
class PendingUpdate:
    """A batch whose update has not passed yet: what GTPO makes of it, and what is logged and dumped once it has."""

    step: int  # verl's `global_steps`
    fields: BatchFields
    rewards: torch.Tensor | None = None  # of one output per session; None until verl asks for advantages
    result: GTPOAdvantage | None = None  # of the same outputs
    inputs: update_pass.UpdateInputs | None = None  # what the actor needs, if its update is to give the entropy
    metrics: dict[str, float] = field(default_factory=dict)  # to be logged with those of the update
    batch_to_dump: Any = None  # verl's DataProto, whose dump waits for the entropies of the update


def compute_base_advantages(name: str, token_level_rewards: torch.Tensor, completions: Completions) -> torch.Tensor:
    """Return A_i of verl's estimator of this name, (bs,) float64: in float32 it would round more than the rewards do.

    Raises:
        ValueError: a reward that is not finite, or an advantage that differs between tokens of a completion.
    """
    check_finite("reward", token_level_rewards.sum(-1), completions.uids)
    estimate = registry(ADV_ESTIMATOR)[name]
    rewards = token_level_rewards.double()
    mask = completions.mask.long()
    if mask.shape[1] == 0:  # no completion has a token, and so none an advantage
        return rewards.new_zeros(len(rewards))
    by_token, _ = estimate(token_level_rewards=rewards, response_mask=mask, index=completions.groups.numpy())
    advantages = by_token.gather(1, mask.argmax(-1, keepdim=True)).squeeze(-1)
    if not torch.equal(completions.spread(advantages), by_token):
        raise ValueError(
            f"algorithm.gtpo.base={name}: {estimate.__module__}.{estimate.__qualname__} gives tokens of one completion "
            "different advantages, and GTPO needs one A_i per completion: set it to gtpo"
        )
    return advantages


class GTPOEstimator:
    """GTPO in one run: it fixes ⟨H⟩_ini on the first batch, then computes token advantages.

    Under another estimator, with a token dump, it computes what GTPO would do.

    Args:
        trainer: verl's, at its first batch.
        run (RunConfig): what its config asks for.

    Attributes:
        gtpo_run (GTPORun): with the run's initial entropy; raises what it raises.
    """

    def __init__(self, trainer: Any, run: RunConfig):
        config = trainer.config
        folder = config.trainer.default_local_dir
        resumed_from = None
        if run.applies_gtpo and trainer.global_steps > 1:
            resumed_from = run.resumed_from or folder
        if not run.applies_gtpo:
            # A dump under another estimator keeps the record beside itself.
            folder = run.gtpo.dump_dir or folder
            if InitialEntropy.path(folder).exists():
                resumed_from = folder
        self.run = run
        self.config = run.gtpo
        self._norm_by_std = config.algorithm.get("norm_adv_by_std_in_grpo", True)
        self.gtpo_run = GTPORun(self.config, folder, resumed_from, applied=run.applies_gtpo)
        self._max_response_length = config.data.max_response_length
        self._max_model_len = select(config, "actor_rollout_ref.rollout.max_model_len") or math.inf
        self._rejects = select(config, "algorithm.rollout_correction.rollout_rs") is not None
        self._entropy_range = update_pass.entropy_range(getattr(trainer, "tokenizer", None))
        self._warned_of_sessions = False
        self._folder = folder
        self._saved = self._last_saved()

    def estimate(
        self, pending: PendingUpdate, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any
    ) -> torch.Tensor:
        """Return the advantages of a batch, (bs, response_length); λA, where the entropy comes from the update.

        If a session of an agent loop has several outputs, the last one counts, as in verl's `grpo`: group statistics,
        entropy, conflicts and metrics are those of the last outputs. The other outputs of a session get
        its δ(A − γ⟨H⟩) with λ = 1 on all their tokens, since their prompts are others. (With the entropy from the
        update δ and ⟨H⟩ are each output's own.)

        Raises:
            ValueError: a reward that is not finite, or an entropy that no distribution has; it names uid and row.
            Or too many batches in a row gave no signal (`SignalCheck`).
        """
        fields = pending.fields
        last = fields.last_outputs
        if len(last) == len(token_level_rewards):
            rewards = token_level_rewards.sum(-1)
            result = self.compute(fields, token_level_rewards, index)
            advantages = result.advantages
        else:
            self._warn_of_sessions(fields)
            rewards = token_level_rewards[last].sum(-1)
            uids = np.asarray(index, dtype=object)[last]
            result = self.compute(fields.of_sessions(), token_level_rewards[last], uids)
            advantages = result.unweighted_advantages[fields.sessions].unsqueeze(-1) * fields.response_mask
            advantages[last] = result.advantages
        pending.rewards = rewards
        pending.result = result
        if self.run.entropy_from_update:
            a = result.group_advantages[fields.sessions]
            scale = a
            if result.own_weights is not None:
                # Such a rule weighs a completion with A = 0 too, whose λA says nothing of λ.
                scale = torch.where(a == 0, update_pass.WEIGHT_ALONE, a)
                advantages = scale.unsqueeze(-1) * fields.response_mask
                advantages[last] = scale[last].unsqueeze(-1) * result.own_weights
            initial_entropy = self.gtpo_run.initial_entropy_value
            pending.inputs = update_pass.UpdateInputs.make(a, self.config, initial_entropy, scale)
        if self._rejects:
            advantages = advantages * response_mask
        if not self.run.entropy_from_update:
            pending.metrics = self._metrics(pending)
        return advantages

    def complete(self, pending: PendingUpdate, trajectory_entropy: torch.Tensor) -> None:
        """Give a batch the (bs,) ⟨H⟩_i that its update returned, nats per token, and its metrics.

        Raises:
            ValueError: an entropy that is not finite, or of which the update said nothing; it names uid and row.
        """
        assert pending.result and pending.inputs
        result = pending.result
        last = pending.fields.last_outputs
        entropy = trajectory_entropy[last]
        check_finite("entropy", entropy, result.completions.uids)
        self.gtpo_run.measure(entropy, result.completions)
        highest_kept = pending.inputs.highest_entropy[last]
        regularized = regularize(result.group_advantages, entropy, self.config.entropy_coeff, highest_kept)
        pending.result = result._replace(
            trajectory_entropy=entropy,
            regularizer=regularized.regularizer,
            keep=regularized.keep,
            unweighted_advantages=regularized.advantages,
        )
        pending.metrics |= self._metrics(pending)

    def compute(self, fields: BatchFields, token_level_rewards: torch.Tensor, index: Any) -> GTPOAdvantage:
        """GTPO on one output per session."""
        # Token positions are compared between answers to the same prompt only, token for token.
        prompts = [(uid, ids.tobytes()) for uid, ids in zip(index, fields.prompts, strict=True)]
        if fields.pictures:
            prompts = [*zip(prompts, fields.pictures, strict=True)]
        completions = Completions(fields.response_mask, index, prompts)
        entropy = None if fields.entropy is None else completions.mean(fields.entropy)
        if entropy is not None and self.run.applies_gtpo:
            update_pass.check_range("entropy", entropy, self._entropy_range, completions.uids)
        name = self.config.base
        base = None if name == "gtpo" else compute_base_advantages(name, token_level_rewards, completions)
        rewards = token_level_rewards.sum(-1)
        if entropy is not None:
            self.gtpo_run.measure(entropy, completions)
        return compute_gtpo(
            rewards=rewards,
            advantages=base,
            responses=fields.responses,
            response_mask=fields.response_mask,
            group_ids=completions,
            entropy=fields.entropy,
            trajectory_entropy=entropy,
            config=self.config,
            initial_entropy=self.gtpo_run.initial_entropy_value,
            norm_adv_by_std_in_grpo=self._norm_by_std,
            old_log_probs=fields.old_log_probs,
        )

    def _metrics(self, pending: PendingUpdate) -> dict[str, float]:
        assert pending.rewards is not None and pending.result
        self.gtpo_run.check(pending.rewards, pending.result)
        last = pending.fields.of_sessions()
        prompt_len = torch.tensor([len(ids) for ids in last.prompts])
        fills_response = last.response_len >= self._max_response_length
        fills_context = prompt_len + last.response_len >= self._max_model_len
        truncated = fills_response | fills_context
        return compute_gtpo_metrics(pending.result, self.config, self.gtpo_run.initial_entropy_value, truncated)

    def keep_with_checkpoint(self) -> None:
        """Write the record of ⟨H⟩_ini into a checkpoint that verl has saved since the last call.

        By default the runs of a project share one folder of checkpoints, where each start writes its own record.
        """
        before = self._saved
        self._saved = self._last_saved()
        if self._saved is None or self._saved == before:
            return
        checkpoint, _ = self._saved
        if checkpoint.is_dir() and self.gtpo_run.initial_entropy:
            self.gtpo_run.initial_entropy.save(checkpoint, self.config)

    def _last_saved(self) -> tuple[Path, int] | None:
        """Return the last checkpoint, and when verl noted it."""
        from verl.utils.checkpoint.checkpoint_manager import get_checkpoint_tracker_filename  # imports the engines

        tracker = Path(get_checkpoint_tracker_filename(self._folder))
        try:
            return Path(self._folder, f"global_step_{tracker.read_text().strip()}"), tracker.stat().st_mtime_ns
        except OSError:  # none yet, or a file system that fails: no reason to end a run
            return None

    def _warn_of_sessions(self, fields: BatchFields) -> None:
        if self._warned_of_sessions:
            return
        self._warned_of_sessions = True
        is_real = fields.response_mask.any(-1)  # verl's padding rows have no token
        outputs = int(is_real.sum())
        sessions = int(is_real[fields.last_outputs].sum())
        logger.warning(
            "GTPO: the agent loop made %d outputs in %d sessions; GTPO uses the last output of each session. A "
            "session weighs as much as it has outputs (verl #7580). verl counts its mini-batches in outputs too, "
            "so it may update more than once per rollout, and the gtpo loss does not clip",
            outputs,
            sessions,
        )
