"""GTPO in one trainer of verl: its estimator, its dump, its watch, the batch at hand and the update that is pending."""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gtpo_verl.advantage import check_finite
from gtpo_verl.metrics import compute_log_prob_metrics
from gtpo_verl.verl_plugin import names_and_versions, preflight, update_pass
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.collapse import TrainerWatch
from gtpo_verl.verl_plugin.estimator import Estimate, GTPOEstimator
from gtpo_verl.verl_plugin.token_dump import TokenDump, bounded_rows

_DUMPED = {"old_log_probs", "token_level_rewards", "advantages", "rollout_log_probs", "response_mask"}


@dataclass
class Update:
    """What a step has left for the update that follows.

    Args:
        step (int): verl's `global_steps`.
        metrics (dict): to be logged with those of the update.
        columns (update_pass.Columns | None): what the actor needs, if its update is to give the entropy.
        complete (Callable | None): what is left to do with the entropies then; it adds to the metrics.
    """

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    columns: update_pass.Columns | None = None
    complete: Callable[[list[update_pass.RowEntropy]], None] | None = None


class TrainerState:
    """What this plugin keeps of one trainer, whose config may ask for nothing of it.

    Args:
        trainer: verl's.

    Raises:
        RuntimeError: GTPO cannot run in this process.
        ValueError: a setting with which it cannot run.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.applied = names_and_versions.serves(trainer.config)
        self.watch: TrainerWatch | None = None
        self.fields: BatchFields | None = None
        """Of the batch at hand, while verl computes its advantages."""
        self.update: Update | None = None
        self._estimate: Estimate | None = None
        self._asked = self.applied or names_and_versions.select(trainer.config, "algorithm.gtpo.dump_dir") is not None
        if self._asked:
            preflight.validate_once(trainer.config)

    @cached_property
    def estimator(self) -> GTPOEstimator:
        """Made at the first batch: before that a trainer does not know whether it is resumed."""
        return GTPOEstimator.of(self._trainer)

    @cached_property
    def _dump(self) -> TokenDump | None:
        return TokenDump.of(self._trainer)

    @classmethod
    def enter(cls, trainer: Any) -> "TrainerState":
        """The state of a trainer, from now on that of this process."""
        if not hasattr(trainer, "_gtpo_state"):
            trainer._gtpo_state = cls(trainer)
        current.set(trainer._gtpo_state)
        return trainer._gtpo_state

    @property
    def needs_entropy(self) -> bool:
        """Whether GTPO reads the entropy of verl's old-log-prob pass at this step."""
        return (self.applied or self._dump_is_due) and not self.entropy_from_update

    @property
    def entropy_from_update(self) -> bool:
        """Whether the entropy comes from the update."""
        return self.applied and self.estimator.entropy_from_update

    @property
    def _dump_is_due(self) -> bool:
        return self._asked and self._dump is not None and self._dump.is_due(self._trainer.global_steps)

    def begin_step(self) -> bool:
        """Begin the next step; whether there is something to do for GTPO.

        Raises:
            RuntimeError: the last step's update did not pass through the hooks that it needs.
        """
        left, self.update = self.update, None
        step = self._trainer.global_steps
        if left and self.applied and (left.columns or left.step < step):
            if left.step >= (names_and_versions.select(self._trainer.config, "trainer.critic_warmup") or 0):
                raise RuntimeError(
                    f"GTPO's advantages of step {left.step} were not followed by an update that verl's reduce_metrics "
                    "sums up, as in verl's own trainers: so the entropy terms may be missing from the loss, and the "
                    "metrics gtpo/* from the log. Use verl's trainers, through verl.trainer.main_ppo"
                )
        return self.applied or self._dump_is_due

    def estimate(self, rewards: torch.Tensor, response_mask: torch.Tensor, index: Any) -> torch.Tensor:
        """What verl's call of the estimator `gtpo` returns."""
        start = time.perf_counter()
        assert self.fields is not None
        self._estimate = self.estimator.estimate(self.fields, rewards, response_mask, index)
        self._estimate.metrics["timing_s/gtpo"] = time.perf_counter() - start
        return self._estimate.advantages

    def compute_advantage(self, compute: Callable[[], Any], data: Any) -> Any:
        """verl's `compute_advantage` on the batch at hand, and what is then known of it."""
        fields, step = self.fields, self._trainer.global_steps
        assert fields is not None
        if self.applied:
            _check_log_probs(data.batch, fields.response_mask, data.non_tensor_batch["uid"])
        try:
            data = compute()
        finally:
            self.fields = None  # they serve once
            estimate, self._estimate = self._estimate, None
        update = self.update = Update(step)
        if estimate:
            update.metrics, update.columns = estimate.metrics, estimate.columns
            if "old_log_probs" in data.batch.keys():
                old_log_probs = data.batch["old_log_probs"][fields.final]
                result = estimate.result
                update.metrics |= compute_log_prob_metrics(old_log_probs, result.group_advantages, result.completions)
        if not update.columns:
            if self._dump_is_due:
                self._write_dump(fields, data, estimate, update)
            return data
        assert estimate is not None
        columns, dumped = update.columns, None
        if self._dump_is_due:
            columns.dumped[[fields.final[row] for row in bounded_rows(estimate.result)]] = True
            dumped = data.select([*_DUMPED & set(data.batch.keys())])
        update.complete = lambda entropies: self._complete(estimate, entropies, fields, dumped, update)
        for name, column in columns.fields().items():
            data.batch[name] = column
        return data

    def _complete(
        self,
        estimate: Estimate,
        entropies: list[update_pass.RowEntropy],
        fields: BatchFields,
        dumped: Any,
        update: Update,
    ) -> None:
        """Once the update has given the entropies; the dump gets the advantages that it used."""
        self.estimator.complete(estimate, entropies)
        if dumped is not None:
            assert estimate.columns is not None
            entropy = update_pass.gather_tokens(entropies, fields.responses.shape)
            dumped.batch["advantages"], _ = update_pass.apply_entropy(
                dumped.batch["advantages"], fields.response_mask, entropy, estimate.columns
            )
            self._write_dump(fields._replace(entropy=entropy), dumped, estimate, update)

    def _write_dump(self, fields: BatchFields, data: Any, estimate: Estimate | None, update: Update) -> None:
        """One output per session."""
        start = time.perf_counter()
        if len(data) > len(fields.final):  # verl's grpo comes with the last outputs alone
            data = data.select_idxs(fields.final)
        fields = fields.of_sessions()
        uids = data.non_tensor_batch["uid"]
        result = estimate.result if estimate else None
        if result is None:
            result = self.estimator.weigh(fields, data.batch["token_level_rewards"], uids)
        columns: dict[str, torch.Tensor] = {name: data.batch[name] for name in _DUMPED & set(data.batch.keys())}
        columns |= {"loss_mask": data.batch["response_mask"], "response_mask": fields.response_mask}
        assert fields.entropy is not None and self._dump is not None
        columns |= {"responses": fields.responses, "entropy": fields.entropy}
        initial_entropy = self.estimator.initial_entropy_value
        self._dump.write(update.step, columns, uids, fields.prompts, fields.response_len, result, initial_entropy)
        update.metrics["timing_s/gtpo_dump"] = time.perf_counter() - start


current: ContextVar[TrainerState | None] = ContextVar("gtpo_trainer", default=None)
"""The trainer that runs now in this process."""


def _check_log_probs(batch: Any, response_mask: torch.Tensor, index: Any) -> None:
    """Raise on a log-probability of a completion's own token that is not finite."""
    for name in ("old_log_probs", "rollout_log_probs"):
        if name in batch.keys() and not batch[name].sum().isfinite():
            check_finite(name, torch.where(response_mask.bool(), batch[name], 0).sum(-1), index)


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on the trainer's batch.

    Raises:
        RuntimeError: a trainer called it that GTPO does not hook.
    """
    state = current.get()
    if state is None or not state.applied or state.fields is None:
        names_and_versions.raise_load_errors()
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    advantages = state.estimate(token_level_rewards, response_mask, index)
    return advantages, advantages
