"""GTPO's advantages in a run of verl: the estimator, its initial entropy and its metrics."""

import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage, check_finite, compute_gtpo, regularize
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
    """A batch between its advantages and its update: GTPO's result, and what is logged and dumped with the update."""

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

    Under another estimator, with a token dump, it computes the advantages that GTPO would give.

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
        if run.applies_gtpo:
            if trainer.global_steps > 1:
                resumed_from = run.resumed_from or folder
        else:
            # A dump under another estimator keeps the record of ⟨H⟩_ini beside itself.
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

        Keeps in `pending` the result, what the actor needs to complete λA, and the metrics, if they are known by now.

        If a session of an agent loop has several outputs, the last one counts, as in verl's `grpo`: group statistics,
        entropy, conflicts and metrics are those of the last outputs. The other outputs of a session get its
        δ(A − γ⟨H⟩) with λ = 1 on all their tokens, since their prompts are different. (With the entropy from the
        update δ and ⟨H⟩ are each output's own.)

        Raises:
            ValueError: a reward that is not finite, or an entropy that no distribution has; it names uid and row.
            Or too many batches in a row gave no signal (`SignalCheck`).
        """
        fields = pending.fields
        last_outputs = fields.last_outputs
        if len(last_outputs) == len(token_level_rewards):
            pending.rewards = token_level_rewards.sum(-1)
            result = self.compute(fields, token_level_rewards, index)
            advantages = result.advantages
        else:
            self._warn_of_sessions(fields)
            rewards = token_level_rewards[last_outputs]
            pending.rewards = rewards.sum(-1)
            uids = np.asarray(index, dtype=object)[last_outputs]
            result = self.compute(fields.select_last_outputs(), rewards, uids)
            advantages = result.unweighted_advantages[fields.sessions].unsqueeze(-1) * fields.response_mask
            advantages[last_outputs] = result.advantages
        pending.result = result
        if self.run.entropy_from_update:
            advantages = self._prepare_update(pending, result, advantages)
        else:
            self._check_and_measure(pending)
        if self._rejects:
            advantages = advantages * response_mask
        return advantages

    def _prepare_update(self, pending: PendingUpdate, result: GTPOAdvantage, advantages: torch.Tensor) -> torch.Tensor:
        """Set what the actor needs to complete the advantages, λA, and return these (bs, response_length) advantages.

        Where λ is a user's own, they are λ times `weight_scale` of the inputs: such a function weighs a completion with
        A = 0 too, whose λA does not tell λ.
        """
        fields = pending.fields
        group_advantages = result.group_advantages[fields.sessions]
        scale = group_advantages
        if result.own_weights is not None:
            scale = torch.where(group_advantages == 0, update_pass.WEIGHT_ALONE, group_advantages)
            advantages = scale.unsqueeze(-1) * fields.response_mask
            advantages[fields.last_outputs] = scale[fields.last_outputs].unsqueeze(-1) * result.own_weights
        initial_entropy = self.gtpo_run.initial_entropy_value
        pending.inputs = update_pass.UpdateInputs.make(group_advantages, self.config, initial_entropy, scale)
        return advantages

    def complete(self, pending: PendingUpdate, trajectory_entropy: torch.Tensor) -> None:
        """Complete a batch with the (bs,) ⟨H⟩_i of its update, nats per token, and add its metrics.

        Raises:
            ValueError: an entropy that is not finite, or that the update did not return; it names uid and row.
                Or too many batches in a row gave no signal (`SignalCheck`).
        """
        assert pending.result and pending.inputs
        result = pending.result
        last_outputs = pending.fields.last_outputs
        entropy = trajectory_entropy[last_outputs]
        check_finite("entropy", entropy, result.completions.uids)
        self.gtpo_run.measure(entropy, result.completions)
        highest_kept = pending.inputs.highest_entropy[last_outputs]
        regularized = regularize(result.group_advantages, entropy, self.config.entropy_coeff, highest_kept)
        pending.result = result._replace(
            trajectory_entropy=entropy,
            regularizer=regularized.regularizer,
            keep=regularized.keep,
            unweighted_advantages=regularized.advantages,
        )
        self._check_and_measure(pending)

    def compute(self, fields: BatchFields, token_level_rewards: torch.Tensor, index: Any) -> GTPOAdvantage:
        """Compute GTPO on one output per session; the first batch with entropies fixes ⟨H⟩_ini."""
        # Token positions are compared in a group, and there between prompts of equal token ids and pictures only.
        pictures = fields.pictures or [b""] * len(fields.prompts)
        prompts = [(ids.tobytes(), digest) for ids, digest in zip(fields.prompts, pictures, strict=True)]
        completions = Completions(fields.response_mask, index, prompts)

        name = self.config.base
        base_advantages = None
        if name != "gtpo":
            base_advantages = compute_base_advantages(name, token_level_rewards, completions)

        trajectory_entropy = None
        if fields.entropy is not None:
            trajectory_entropy = completions.mean(fields.entropy)
            if self.run.applies_gtpo:
                update_pass.check_range("entropy", trajectory_entropy, self._entropy_range, completions.uids)
            self.gtpo_run.measure(trajectory_entropy, completions)

        return compute_gtpo(
            rewards=token_level_rewards.sum(-1),
            advantages=base_advantages,
            responses=fields.responses,
            response_mask=fields.response_mask,
            group_ids=completions,
            entropy=fields.entropy,
            trajectory_entropy=trajectory_entropy,
            config=self.config,
            initial_entropy=self.gtpo_run.initial_entropy_value,
            norm_adv_by_std_in_grpo=self._norm_by_std,
            old_log_probs=fields.old_log_probs,
        )

    def _check_and_measure(self, pending: PendingUpdate) -> None:
        """Check that the batch has a signal, and add GTPO's metrics to those that its update logs."""
        assert pending.rewards is not None and pending.result
        self.gtpo_run.check(pending.rewards, pending.result)
        fields = pending.fields.select_last_outputs()
        prompt_len = torch.tensor([len(ids) for ids in fields.prompts])
        fills_response = fields.response_len >= self._max_response_length
        fills_context = prompt_len + fields.response_len >= self._max_model_len
        pending.metrics |= compute_gtpo_metrics(
            pending.result,
            self.config,
            self.gtpo_run.initial_entropy_value,
            truncated=fills_response | fills_context,
        )

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
        """Return the last checkpoint that verl has noted, and when it did so, in nanoseconds."""
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
