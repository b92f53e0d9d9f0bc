"""The plugin's state for one trainer of verl: GTPO's estimator, the dump, the monitor, the batch and its update."""

import logging
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from gtpo_verl.algorithm.advantage import check_finite
from gtpo_verl.algorithm.metrics import compute_log_prob_metrics
from gtpo_verl.verl_plugin import compat, preflight, update_pass
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.estimator import GTPOEstimator, PendingUpdate
from gtpo_verl.verl_plugin.run_config import RunConfig, select
from gtpo_verl.verl_plugin.token_dump import BATCH_FIELDS, TokenDump, bounded_rows
from gtpo_verl.verl_plugin.training_monitor import TrainingMonitor
from gtpo_verl.verl_plugin.update_check import UpdateCheck

logger = logging.getLogger("gtpo_verl")


class TrainerState:
    """What the plugin knows of one trainer of verl, whether or not its config asks for GTPO.

    Args:
        config: the trainer's.
        trainer: None if the plugin met only the trainer's logger, because it overrides every method that is hooked.

    Raises what `preflight.validated` raises, if there is a trainer.
    """

    def __init__(self, config: Any, trainer: Any = None):
        self.config = config
        self.trainer = trainer
        self.run = RunConfig.inactive() if trainer is None else preflight.validated(config)
        self.monitor: TrainingMonitor | None = None  # set by hooks.fit
        # Of the batch whose advantages the V1 trainer computes next; set by hooks.v1_compute_advantage.
        self.v1_fields: BatchFields | None = None
        self.pending: PendingUpdate | None = None  # a batch between its advantages and its update
        self.update_check = UpdateCheck.of(config)

    @cached_property
    def estimator(self) -> GTPOEstimator:
        """GTPO in this run, made at the first batch: before that a trainer does not know whether it is resumed."""
        return GTPOEstimator(self.trainer, self.run)

    def keep_with_checkpoint(self) -> None:
        """Call `GTPOEstimator.keep_with_checkpoint`, if the estimator has been made."""
        if "estimator" in vars(self):  # where the cached property is, once it has been asked for
            self.estimator.keep_with_checkpoint()

    @cached_property
    def dump(self) -> TokenDump | None:
        """The run's token dump, if it asks for one."""
        try:
            return TokenDump.of(self.trainer, self.run)
        except OSError as error:  # an earlier start's files may be another user's
            logger.warning("GTPO: the run goes on without its token dump: %s", error)
            return None

    @property
    def has_work(self) -> bool:
        """Whether there is something to do at this step."""
        return self.run.applies_gtpo or self._dump_is_due

    @property
    def reads_entropy(self) -> bool:
        """Whether the entropy of verl's old-log-prob pass is read at this step."""
        return self.has_work and not self.run.entropy_from_update

    @property
    def _dump_is_due(self) -> bool:
        return self.dump is not None and self.dump.is_due(self.trainer.global_steps)

    def begin_step(self) -> bool:
        """Begin the next step, and return whether GTPO or its dump has work in it.

        Raises:
            RuntimeError: the last step's update did not pass through the hooks that it needs.
        """
        previous = self.pending
        self.pending = None
        if previous and self.run.applies_gtpo:
            self._check_update_passed(previous)
        return self.has_work

    def _check_update_passed(self, previous: PendingUpdate) -> None:
        """Raise a RuntimeError if the actor was updated with a batch without passing through the plugin's hooks."""
        # A trainer may compute advantages twice in a step, unless the actor has to complete the first ones.
        is_due = previous.inputs is not None or previous.step < self.trainer.global_steps
        # In the steps before this one verl updates the critic alone.
        first_update = select(self.config, "trainer.critic_warmup") or 0
        if is_due and previous.step >= first_update:
            raise RuntimeError(
                f"step {previous.step} computed GTPO advantages, but no actor update passed through verl's "
                "reduce_metrics: the entropy terms may be missing from the loss, and the metrics gtpo/* from the "
                "log. Use verl's trainers, through verl.trainer.main_ppo"
            )

    def compute_advantage(self, proceed: Callable[[], Any], fields: BatchFields, data: Any) -> Any:
        """Run verl's `compute_advantage` on a batch.

        Keeps in `pending` what the estimator computes, for the update, and writes the token dump, if it is due and need
        not wait for the update.

        Args:
            proceed: calls verl's function, which returns the batch.
            fields: what the estimator needs of the batch.
            data: the batch, verl's DataProto.

        Raises:
            ValueError: a log-probability of a completion's own token is not finite, or above 0.
        """
        if self.run.applies_gtpo:
            self._check_log_probs(fields, data)
            fields = fields._replace(old_log_probs=data.batch.get("old_log_probs", None))
        pending = PendingUpdate(self.trainer.global_steps, fields)
        self.pending = pending
        data = proceed()
        # Under gtpo verl has called `estimate_gtpo_advantage`, which has set the result.
        result = pending.result

        if result and self.update_check:
            self.update_check.record(data.batch["advantages"], data.batch["response_mask"])
        if result and "old_log_probs" in data.batch.keys():
            old_log_probs = data.batch["old_log_probs"][fields.last_outputs]
            pending.metrics |= compute_log_prob_metrics(old_log_probs, result.group_advantages, result.completions)

        if result and pending.inputs:
            self._hand_to_actor(pending, pending.inputs, data)
        elif self._dump_is_due:
            self._write_dump(pending, data, fields.entropy)
        return data

    def _hand_to_actor(self, pending: PendingUpdate, inputs: update_pass.UpdateInputs, data: Any) -> None:
        """Give the actor what it needs to complete the advantages: it alone will know the entropies.

        A dump that is due then waits for them too, in `pending.batch_to_dump`.
        """
        if self._dump_is_due:
            assert pending.result
            dumped_rows = [pending.fields.last_outputs[row] for row in bounded_rows(pending.result)]
            inputs.wants_token_entropy[dumped_rows] = True
            held = BATCH_FIELDS & set(data.batch.keys())
            pending.batch_to_dump = data.select(list(held))
        for name, column in inputs.to_batch().items():
            data.batch[name] = column

    def _check_log_probs(self, fields: BatchFields, data: Any) -> None:
        """Raise a ValueError if a log-probability of an own token is not finite, or above 0."""
        uids = data.non_tensor_batch["uid"]
        for name in ("old_log_probs", "rollout_log_probs"):
            if name in data.batch.keys():
                own = torch.where(fields.response_mask.bool(), data.batch[name], 0)
                check_finite(name, own.sum(-1), uids)  # one that is not finite makes the sum so
                update_pass.check_range(name, own.amax(-1), (-torch.inf, 0.0), uids)

    def finish_update(self, pending: PendingUpdate, entropies: list[update_pass.RowEntropy]) -> None:
        """Complete a batch with the entropies of its update, and write the dump that has waited for them."""
        assert pending.inputs
        means, tokens = update_pass.gather(entropies, pending.fields.responses.shape)
        self.estimator.complete(pending, means)
        if pending.batch_to_dump is not None:
            batch = pending.batch_to_dump.batch
            mask = pending.fields.response_mask
            batch["advantages"], _ = update_pass.apply_entropy(batch["advantages"], mask, tokens, pending.inputs)
            self._write_dump(pending, pending.batch_to_dump, tokens)

    def _write_dump(self, pending: PendingUpdate, data: Any, entropy: torch.Tensor | None) -> None:
        """Write the last output of each session. If writing fails, stop dumping; the run goes on.

        Nothing is written of a batch whose entropy is unknown.
        """
        start = time.perf_counter()
        fields = pending.fields
        if entropy is None or self.dump is None:
            return
        if len(data) > len(fields.last_outputs):  # under grpo verl has dropped the other outputs already
            data = data.select_idxs(fields.last_outputs)
        # The rows of `data` are the last outputs alone by now, and so are those of its log-probs.
        fields = fields._replace(entropy=entropy, old_log_probs=None).select_last_outputs()
        fields = fields._replace(old_log_probs=data.batch.get("old_log_probs", None))
        rewards = data.batch["token_level_rewards"]
        uids = data.non_tensor_batch["uid"]
        try:
            result = pending.result or self.estimator.compute(fields, rewards, uids)
            self.dump.write(pending.step, data.batch, fields, result, self.estimator.gtpo_run.initial_entropy_value)
        except (OSError, ValueError) as error:
            logger.warning("GTPO's token dump ends at step %d, and the run goes on without it: %s", pending.step, error)
            self.dump = None  # which replaces the value of the cached property
        pending.metrics["timing_s/gtpo_dump"] = time.perf_counter() - start


_current: TrainerState | None = None


def current() -> TrainerState | None:
    """Return the state of the trainer that this process runs: at most one, in whichever thread or task."""
    return _current


def set_current(state: TrainerState | None) -> None:
    """Set the state of the trainer that this process runs, or clear it."""
    global _current
    _current = state


def activate(trainer: Any) -> TrainerState:
    """Make a trainer the one that this process runs, and return its state."""
    if _current is None or _current.trainer is not trainer:
        set_current(TrainerState(trainer.config, trainer))
    assert _current
    return _current


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute GTPO's advantages of the batch at hand; verl calls this for `algorithm.adv_estimator=gtpo`.

    Returns:
        Advantages and returns, the same tensor, (bs, response_length).

    Raises:
        RuntimeError: it is called in a trainer that GTPO does not hook.
    """
    start = time.perf_counter()
    state = current()
    if state is None or state.trainer is None:
        compat.check_loaded()
    # A pending batch that has a result was computed before: verl's function was called twice for it.
    if state is None or state.pending is None or state.pending.result or not state.run.applies_gtpo:
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    advantages = state.estimator.estimate(state.pending, token_level_rewards, response_mask, index)
    state.pending.metrics["timing_s/gtpo"] = time.perf_counter() - start
    return advantages, advantages
