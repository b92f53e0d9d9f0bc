"""A watch over a run in training, under any advantage estimator of verl: `+trainer.collapse_watch=warn` or `stop`.

It is `gtpo-verl diagnose` step by step: it reads what the trainer logs, and logs each sign of a fault once, with its
numbers and what to try; `stop` ends the run at a sign whose limit is calibrated. What is not logged is not watched:
verl itself logs entropy, score and length, `reward_metrics` adds `reward/*` and `completion/*`, and GTPO adds `gtpo/*`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.monitor.frameworks import PART, translate
from gtpo_verl.monitor.signs import NUMBERS, Watch, window
from gtpo_verl.verl_plugin.run_config import select

logger = logging.getLogger("gtpo_verl")

KEY = "trainer.collapse_watch"
CHOICES = ("none", "warn", "stop")


class CollapseError(RuntimeError):
    """A run with `trainer.collapse_watch=stop` collapsed; its checkpoint is written."""


class TrainerWatch:
    """The watch of one trainer of verl, fed with what it logs; `stop` ends a run that collapsed, after a checkpoint."""

    def __init__(self, trainer: Any, stop: bool):
        self._trainer, self._stop = trainer, stop
        data = trainer.config.data
        self._limit = data.max_response_length
        steps = window(
            data.train_batch_size * OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.n", default=1)
        )
        self._windows = dict.fromkeys(NUMBERS, steps)
        agg_mode = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.loss_agg_mode")
        if "sum" in str(agg_mode):
            logger.warning("%s: entropy is not watched, since verl sums it under loss_agg_mode=%s", KEY, agg_mode)
            del self._windows["entropy"]
        self._watch: Watch | None = None
        self._collapse = ""

    @classmethod
    def of(cls, trainer: Any) -> "TrainerWatch | None":
        """The watch that the trainer's config asks for."""
        chosen = read_mode(trainer.config)
        return None if chosen == "none" else cls(trainer, chosen == "stop")

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Take what the trainer logged.

        Raises:
            CollapseError: the run is to stop, and its checkpoint is written.
        """
        if "training/global_step" not in metrics:  # a validation
            return
        step = metrics["training/global_step"]
        if self._collapse:
            raise CollapseError(f"{KEY}=stop, checkpoint of step {step} written: {self._collapse}")
        numbers = translate(metrics, "verl", self._limit)
        if self._watch is None:
            steps = self._windows["reward"]
            parts = {name: steps for name in numbers if name.startswith(PART)}
            self._watch = Watch(self._windows | parts, "verl", self._limit)
        alarms = self._watch.observe(step, numbers)
        for said, _ in alarms:
            logger.warning("watch for collapse, step %d: %s", step, said)
        grave = [said for said, stops in alarms if stops]
        if grave and self._stop:
            # verl saves where it always does, at the end of the next step, whose log then ends the run.
            self._trainer.config.trainer.save_freq = 1
            self._collapse = "; ".join(grave)


def read_mode(config: DictConfig) -> str:
    """`trainer.collapse_watch` of a verl config; `none` where it is not set.

    Raises:
        ValueError: it is none of `CHOICES`, or it is set for a trainer that it cannot watch.
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
