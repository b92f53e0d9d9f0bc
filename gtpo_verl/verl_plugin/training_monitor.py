"""A monitor of a run in training, under any advantage estimator of verl: `+trainer.collapse_watch=warn` or `stop`.

It is `gtpo-verl diagnose` step by step (`monitor.watch`): it reads what the trainer logs and logs, once each, the
verdicts `degraded` and `failed`, with their numbers and what to try. `stop` ends a run whose outcome is lost or whose
numbers are not finite. `stop_format` also ends a run whose completions stop ending with EOS or lose the format, which
the reward need not show. What is not logged is not monitored: verl itself logs entropy, score and length,
`gtpo_verl.reward.replay_buffer` adds `reward/*` and `completion/*`, and GTPO adds `gtpo/*`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.watch import Watch
from gtpo_verl.verl_plugin.run_config import select

logger = logging.getLogger("gtpo_verl")

KEY = "trainer.collapse_watch"
CHOICES = ("none", "warn", "stop", "stop_format")


class CollapseError(RuntimeError):
    """Ends a run that collapsed, as `trainer.collapse_watch` asks; its last checkpoint is written already."""


class TrainingMonitor:
    """Monitors one trainer of verl by what it logs; it may end a run that collapsed, after a checkpoint.

    Args:
        trainer: verl's trainer.
        mode (str): one of `CHOICES`.
    """

    def __init__(self, trainer: Any, mode: str):
        self._trainer = trainer
        self._mode = mode
        data = trainer.config.data
        self._max_response_length = data.max_response_length
        n = OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.n", default=1)
        self._watch = Watch("verl", data.train_batch_size * n, self._max_response_length)
        agg_mode = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.loss_agg_mode")
        self._sums_entropy = "sum" in str(agg_mode)
        if self._sums_entropy:
            logger.warning("%s: entropy is not watched, since verl sums it under loss_agg_mode=%s", KEY, agg_mode)
        self._step = 0
        self._end_reason = ""

    @classmethod
    def of(cls, trainer: Any) -> "TrainingMonitor | None":
        """Return the monitor that the trainer's config asks for; None if it asks for none."""
        mode = read_mode(trainer.config)
        return None if mode == "none" else cls(trainer, mode)

    def on_log(self, metrics: Mapping[str, Any]) -> None:
        """Judge the run with what the trainer has logged.

        Metrics without `training/global_step` are of a validation that is logged on its own. They count as metrics of
        the step before it.

        Raises:
            CollapseError: in the step after the verdict, once its checkpoint is saved.
        """
        is_training_step = "training/global_step" in metrics
        self._step = metrics.get("training/global_step", self._step)
        if self._end_reason and is_training_step:
            raise CollapseError(f"{KEY}={self._mode}, checkpoint of step {self._step} written: {self._end_reason}")
        numbers = translate(metrics, "verl", self._max_response_length)
        if self._sums_entropy:
            numbers.pop("entropy", None)
        for alarm in self._watch.observe(self._step, numbers):
            if not alarm.ends:
                logger.warning("monitor of collapse, step %d: %s", self._step, alarm.text)
            elif self._mode == "stop_format" or (self._mode == "stop" and not alarm.is_unseen):
                self._schedule_end(alarm.text)

    def _schedule_end(self, reason: str) -> None:
        """Have verl save a checkpoint in the next step. verl logs that step afterwards, and that call ends the run.

        No older checkpoint is removed any more: it may be the last good one.
        """
        trainer_config = self._trainer.config.trainer
        trainer_config.save_freq = 1
        trainer_config.max_actor_ckpt_to_keep = None
        trainer_config.max_critic_ckpt_to_keep = None
        self._end_reason = self._end_reason or reason


def read_mode(config: DictConfig) -> str:
    """Return `trainer.collapse_watch` of a verl config, `none` where it is not set.

    Raises:
        ValueError: it is none of `CHOICES`, or is set for a trainer that it cannot monitor.
    """
    value = select(config, KEY)
    mode = "none" if value in (None, False) else str(value)
    if mode not in CHOICES:
        raise ValueError(f"{KEY}={value}: must be one of {', '.join(CHOICES)}")
    # Only the configs of these two trainers have a section `rollout` at the top level.
    if mode != "none" and select(config, "rollout") is not None:
        raise ValueError(
            f"{KEY}={value}: verl's one_step_off and fully_async trainers have loops of their own, which it does not "
            "watch; remove it, or use verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async"
        )
    return mode
