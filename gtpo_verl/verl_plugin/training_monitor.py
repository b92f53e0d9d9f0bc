"""A watch over a run in training, under any advantage estimator of verl: `+trainer.collapse_watch=warn` or `stop`.

It is `gtpo-verl diagnose` step by step: it reads what the trainer logs, and logs each sign of a fault once, with its
numbers and what to try. `stop` ends a run whose outcome is lost or whose numbers are not finite; `stop_format` also one
that stopped terminating cleanly or lost its format, which no reward need see. What is not logged is not watched: verl
itself logs entropy, score and length, `gtpo_verl.reward.replay_buffer` adds `reward/*` and `completion/*`, GTPO adds
`gtpo/*`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.monitor.frameworks import translate
from gtpo_verl.monitor.signs import FAILED, NUMBERS, VALIDATIONS, Watch, window
from gtpo_verl.verl_plugin.run_config import select

logger = logging.getLogger("gtpo_verl")

KEY = "trainer.collapse_watch"
CHOICES = ("none", "warn", "stop", "stop_format")


class CollapseError(RuntimeError):
    """A run that `trainer.collapse_watch` was to stop collapsed; its checkpoint is written."""


class TrainerWatch:
    """The watch of one trainer of verl, fed with what it logs; it may end a run that collapsed, after a checkpoint.

    Args:
        trainer: verl's.
        chosen (str): one of `CHOICES`.
    """

    def __init__(self, trainer: Any, chosen: str):
        self._trainer, self._chosen = trainer, chosen
        data = trainer.config.data
        self._limit = data.max_response_length
        n = OmegaConf.select(trainer.config, "actor_rollout_ref.rollout.n", default=1)
        windows = dict.fromkeys(NUMBERS, window(data.train_batch_size * n)) | {"validation": VALIDATIONS}
        agg_mode = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.loss_agg_mode")
        if "sum" in str(agg_mode):
            logger.warning("%s: entropy is not watched, since verl sums it under loss_agg_mode=%s", KEY, agg_mode)
            del windows["entropy"]
        self._watch = Watch(windows, "verl", self._limit)
        self._step, self._collapse = 0, ""

    @classmethod
    def of(cls, trainer: Any) -> "TrainerWatch | None":
        """Return the watch that the trainer's config asks for."""
        chosen = read_mode(trainer.config)
        return None if chosen == "none" else cls(trainer, chosen)

    def logged(self, metrics: Mapping[str, Any]) -> None:
        """Take what the trainer logged; a validation alone is of the step before it. A CollapseError ends the run."""
        trains = "training/global_step" in metrics
        self._step = metrics.get("training/global_step", self._step)
        if self._collapse and trains:
            raise CollapseError(f"{KEY}={self._chosen}, checkpoint of step {self._step} written: {self._collapse}")
        alarms = self._watch.observe(self._step, translate(metrics, "verl", self._limit))
        for alarm in (alarm for alarm in alarms if not alarm.grave):  # one that is was told before
            logger.warning("watch for collapse, step %d: %s", self._step, alarm.sentence)
        ends = [x.sentence for x in alarms if x.grave and (x.sign.level == FAILED or self._chosen == "stop_format")]
        if ends and self._chosen.startswith("stop"):
            # verl saves where it always does, at the end of the next step, whose log then ends the run, and removes no
            # older checkpoint, which may be the last good one.
            trainer = self._trainer.config.trainer
            trainer.save_freq, trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep = 1, None, None
            self._collapse = "; ".join(ends)


def read_mode(config: DictConfig) -> str:
    """`trainer.collapse_watch` of a verl config, `none` where it is not set; a ValueError if it is none of `CHOICES` or
    set for a trainer that it cannot watch."""
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
