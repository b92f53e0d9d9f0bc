"""A monitor of a run in training, under any advantage estimator of verl: `+trainer.collapse_watch=warn` or `stop`.

It is `gtpo-verl diagnose` step by step (`monitor.watch`): it reads what the trainer logs, and logs each verdict that
says degraded or failed once, with its numbers and what to try. `stop` ends a run whose outcome is lost or whose numbers
are not finite; `stop_format` also one that lost the share of EOS or its format, which no reward need see. What is not
logged is not monitored: verl itself logs entropy, score and length, `gtpo_verl.reward.replay_buffer` adds `reward/*`
and `completion/*`, GTPO adds `gtpo/*`.
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
    """A run that `trainer.collapse_watch` was to stop collapsed; its checkpoint is written."""


class TrainerWatch:
    """Monitors one trainer of verl by what it logs; it may end a run that collapsed, after a checkpoint.

    Args:
        trainer: verl's.
        chosen (str): one of `CHOICES`.
    """

    def __init__(self, trainer: Any, chosen: str):
        self._trainer = trainer
        self._chosen = chosen
        data = trainer.config.data
        self._limit = data.max_response_length
        n = OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.n", default=1)
        self._watch = Watch("verl", data.train_batch_size * n, self._limit)
        agg_mode = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.loss_agg_mode")
        self._sums_entropy = "sum" in str(agg_mode)
        if self._sums_entropy:
            logger.warning("%s: entropy is not watched, since verl sums it under loss_agg_mode=%s", KEY, agg_mode)
        self._step = 0
        self._collapse = ""

    @classmethod
    def of(cls, trainer: Any) -> "TrainerWatch | None":
        """Return the monitor that the trainer's config asks for; None if it asks for none."""
        chosen = read_mode(trainer.config)
        return None if chosen == "none" else cls(trainer, chosen)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Take what the trainer logged; a validation alone is of the step before it. A CollapseError ends the run."""
        trains = "training/global_step" in metrics
        self._step = metrics.get("training/global_step", self._step)
        if self._collapse and trains:
            raise CollapseError(f"{KEY}={self._chosen}, checkpoint of step {self._step} written: {self._collapse}")
        numbers = translate(metrics, "verl", self._limit)
        if self._sums_entropy:
            numbers.pop("entropy", None)
        for alarm in self._watch.observe(self._step, numbers):
            if not alarm.ends:
                logger.warning("monitor of collapse, step %d: %s", self._step, alarm.sentence)
            elif self._chosen == "stop_format" or (self._chosen == "stop" and not alarm.is_unseen):
                self._save_and_end(alarm.sentence)

    def _save_and_end(self, reason: str) -> None:
        """Have verl save at the end of the next step, where it always does; the log of that step then ends the run.

        No older checkpoint is removed any more: it may be the last good one.
        """
        trainer = self._trainer.config.trainer
        trainer.save_freq = 1
        trainer.max_actor_ckpt_to_keep = None
        trainer.max_critic_ckpt_to_keep = None
        self._collapse = self._collapse or reason


def read_mode(config: DictConfig) -> str:
    """Return `trainer.collapse_watch` of a verl config, `none` where it is not set.

    Raises:
        ValueError: it is none of `CHOICES`, or set for a trainer that it cannot monitor.
    """
    value = select(config, KEY)
    chosen = "none" if value in (None, False) else str(value)
    if chosen not in CHOICES:
        raise ValueError(f"{KEY}={value}: must be one of {', '.join(CHOICES)}")
    if chosen != "none" and select(config, "rollout") is not None:
        raise ValueError(
            f"{KEY}={value}: verl's one_step_off and fully_async trainers have loops of their own, which it does not "
            "watch; remove it, or use verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async"
        )
    return chosen
