"""GTPO in one trainer of verl: its estimator, its dump, its watch, the batch at hand and the update that is pending."""

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
from gtpo_verl.verl_plugin.training_monitor import TrainerWatch
from gtpo_verl.verl_plugin.update_check import UpdateCheck

logger = logging.getLogger("gtpo_verl")


class TrainerState:
    """What the plugin knows of one trainer of verl, whether or not its config asks for GTPO.

    Args:
        config: the trainer's.
        trainer: None, if only its logger has been seen: a trainer may replace every method that the plugin hooks.

    Raises what `preflight.validated` raises, if there is a trainer.
    """

    def __init__(self, config: Any, trainer: Any = None):
        self.config = config
        self.trainer = trainer
        self.run = RunConfig.of_nothing() if trainer is None else preflight.validated(config)
        self.watch: TrainerWatch | None = None
        self.batch: BatchFields | None = None  # at hand, while verl computes its advantages
        self.pending: PendingUpdate | None = None
        self.update_check = UpdateCheck.of(config)

    @cached_property
    def estimator(self) -> GTPOEstimator:
        """Made at the first batch: before that a trainer does not know whether it is resumed."""
        return GTPOEstimator(self.trainer, self.run)

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
        return self.has_work and not self.run.from_update

    @property
    def _dump_is_due(self) -> bool:
        return self.dump is not None and self.dump.is_due(self.trainer.global_steps)

    def begin_step(self) -> bool:
        """Begin the next step, and return whether GTPO or its dump has work in it.

        Raises:
            RuntimeError: the last step's update did not pass through the hooks that it needs.
        """
        left = self.pending
        self.pending = None
        if left and self.run.applies_gtpo and (left.inputs or left.step < self.trainer.global_steps):
            if left.step >= (select(self.config, "trainer.critic_warmup") or 0):
                raise RuntimeError(
                    f"step {left.step} computed GTPO advantages, but no actor update passed through verl's "
                    "reduce_metrics: the entropy terms may be missing from the loss, and the metrics gtpo/* from the "
                    "log. Use verl's trainers, through verl.trainer.main_ppo"
                )
        return self.has_work

    def compute_advantage(self, compute: Callable[[], Any], fields: BatchFields, data: Any) -> Any:
        """Return what verl's `compute_advantage` makes of the batch with these fields, and record it.

        Raises:
            ValueError: a log-probability of a completion's own token is not finite, or above 0.
        """
        if self.run.applies_gtpo:
            self._check_log_probs(fields, data)
            fields = fields._replace(old_log_probs=data.batch.get("old_log_probs", None))
        pending = PendingUpdate(self.trainer.global_steps, fields)
        self.pending = pending
        data = compute()
        result = pending.result

        if result and self.update_check:
            self.update_check.estimated(data.batch["advantages"], data.batch["response_mask"])
        if result and "old_log_probs" in data.batch.keys():
            old_log_probs = data.batch["old_log_probs"][fields.last_outputs]
            pending.metrics |= compute_log_prob_metrics(old_log_probs, result.group_advantages, result.completions)

        if result and pending.inputs:
            # The actor completes these advantages: it gets what it needs, and the dump waits for its entropies.
            if self._dump_is_due:
                dumped_rows = [fields.last_outputs[row] for row in bounded_rows(result)]
                pending.inputs.dumped[dumped_rows] = True
                pending.dumped = data.select([*BATCH_FIELDS & set(data.batch.keys())])
            for name, column in pending.inputs.to_batch().items():
                data.batch[name] = column
        elif self._dump_is_due:
            self._write_dump(pending, data, fields.entropy)
        return data

    def _check_log_probs(self, fields: BatchFields, data: Any) -> None:
        uids = data.non_tensor_batch["uid"]
        for name in ("old_log_probs", "rollout_log_probs"):
            if name in data.batch.keys():
                own = torch.where(fields.response_mask.bool(), data.batch[name], 0)
                check_finite(name, own.sum(-1), uids)
                update_pass.check_range(name, own.amax(-1), (-torch.inf, 0.0), uids)

    def complete(self, pending: PendingUpdate, entropies: list[update_pass.RowEntropy]) -> None:
        """Give a batch the entropies of its update, and the dump the advantages that the update used."""
        fields, inputs = pending.fields, pending.inputs
        assert inputs
        means, tokens = update_pass.gather(entropies, fields.responses.shape)
        self.estimator.complete(pending, means)
        if pending.dumped is not None:
            batch = pending.dumped.batch
            mask = fields.response_mask
            batch["advantages"], _ = update_pass.apply_entropy(batch["advantages"], mask, tokens, inputs)
            self._write_dump(pending, pending.dumped, tokens)

    def _write_dump(self, pending: PendingUpdate, data: Any, entropy: torch.Tensor | None) -> None:
        """Write one output per session; a dump that fails ends, and the run goes on."""
        start = time.perf_counter()
        fields = pending.fields
        if entropy is None or self.dump is None:
            return
        if len(data) > len(fields.last_outputs):  # verl's grpo comes with the last outputs alone
            data = data.select_idxs(fields.last_outputs)
        fields = fields._replace(entropy=entropy, old_log_probs=None).of_sessions()
        fields = fields._replace(old_log_probs=data.batch.get("old_log_probs", None))
        rewards = data.batch["token_level_rewards"]
        uids = data.non_tensor_batch["uid"]
        try:
            result = pending.result or self.estimator.compute(fields, rewards, uids)
            self.dump.write(pending.step, data.batch, fields, result, self.estimator.gtpo_run.initial_entropy_value)
        except (OSError, ValueError) as error:
            logger.warning("GTPO's token dump ends at step %d, and the run goes on without it: %s", pending.step, error)
            self.dump = None
        pending.metrics["timing_s/gtpo_dump"] = time.perf_counter() - start


_current: TrainerState | None = None


def current() -> TrainerState | None:
    """Return the state of the trainer that this process runs, in whichever thread or task: it runs one at a time."""
    return _current


def set_current(state: TrainerState | None) -> None:
    """Make this state, or none, that of the process."""
    global _current
    _current = state


def enter(trainer: Any) -> TrainerState:
    """Return the state of a trainer, from now on that of this process."""
    if _current is None or _current.trainer is not trainer:
        set_current(TrainerState(trainer.config, trainer))
    assert _current
    return _current


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on the trainer's batch.

    Raises:
        RuntimeError: it is called in a trainer that GTPO does not hook.
    """
    start = time.perf_counter()
    state = current()
    if state is None or state.trainer is None:
        compat.raise_load_errors()
    if state is None or state.pending is None or state.pending.result or not state.run.applies_gtpo:
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    advantages = state.estimator.estimate(state.pending, token_level_rewards, response_mask, index)
    state.pending.metrics["timing_s/gtpo"] = time.perf_counter() - start
    return advantages, advantages
