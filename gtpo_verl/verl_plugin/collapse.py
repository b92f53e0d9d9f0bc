"""A watch for the collapse of a run, under any advantage estimator of verl: `+trainer.collapse_watch=warn` or `stop`.

It reads what the trainer logs, compares means over the last steps with the run's first and best ones, and logs each
sign of collapse once, with its numbers and what to try. Unlogged metrics are not watched: verl itself logs entropy,
score and length; `gtpo_verl.paper.replay_buffer` adds `reward/*` and `completion/*`, GTPO adds `gtpo/*`. After a resume
the first steps count as healthy.
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.config import LN2

logger = logging.getLogger("gtpo_verl")

KEY = "trainer.collapse_watch"
CHOICES = ("none", "warn", "stop")
WINDOW, PROMPTS = 10, 80
"""A metric is averaged over `WINDOW` steps, and over more where these have fewer than `PROMPTS` prompts: with one
prompt a step, ten hard questions in a row would look like a collapse."""


class CollapseError(RuntimeError):
    """A run with `trainer.collapse_watch=stop` collapsed; its checkpoint is written."""


class Trend:
    """Mean of a metric over the last `window` steps: now, in the first window, and the highest so far."""

    def __init__(self, window: int) -> None:
        self._last: deque[float] = deque(maxlen=window)
        self.first: float | None = None
        self.best = float("-inf")
        self.now = float("nan")

    def add(self, value: float) -> None:
        """Take the value of one more step."""
        self._last.append(value)
        if len(self._last) == self._last.maxlen:
            self.now = sum(self._last) / len(self._last)
            self.best = max(self.best, self.now)
            if self.first is None:
                self.first = self.now


class Sign(NamedTuple):
    """A sign of collapse, which shows when `measure` of its metrics' trends exceeds `limit`.

    Args:
        metrics: names of the metrics, in the order of `measure`'s arguments.
        measure: how far it has gone; 0 if it cannot show.
        limit (float): `scripts/calibrate_watch.py` tests limits on stored runs.
        meaning (str): what has happened.
        remedy (str): what to try.
    """

    metrics: tuple[str, ...]
    measure: Callable[..., float]
    limit: float
    meaning: str
    remedy: str

    def value(self, trends: Mapping[str, Trend]) -> float:
        """The measure, 0 as long as a metric has no trend."""
        mine = [trends[name] for name in self.metrics]
        return 0.0 if any(trend.first is None for trend in mine) else self.measure(*mine)


def share_lost(trend: Trend) -> float:
    """How much of its best a metric has lost, from 0 to 1; 0 for one that was never above 0."""
    return 1 - trend.now / trend.best if trend.best > 0 else 0.0


_LOWER_LR = "lower the learning rate, go back to an earlier checkpoint"
_PROTECT_END = "reward the whole format and the end of sequence, or use GTPO, whose backward mask protects the end"

SIGNS = (
    Sign(
        ("actor/entropy",),
        lambda entropy: entropy.now / max(LN2 / 2, entropy.first),
        2,
        "the policy drifts towards noise",
        f"{_LOWER_LR}; GTPO filters and penalises such completions (completion_filter=always, entropy_coeff)",
    ),
    Sign(
        ("critic/score/mean",),
        share_lost,
        0.5,
        "the reward fell below half of its best",
        _LOWER_LR,
    ),
    Sign(
        ("reward/format/mean",),
        share_lost,
        0.5,
        "completions lose their format",
        f"{_LOWER_LR}; GTPO protects the tokens that good and bad completions share",
    ),
    Sign(
        ("reward/format/mean", "reward/acc/mean"),
        lambda form, acc: share_lost(acc) if acc.best > 0.1 and form.now > 0.9 * form.best else 0,
        0.5,
        "accuracy is lost while the format stays, which entropy and reward hide",
        f"{_LOWER_LR}; under GTPO lower algorithm.gtpo.entropy_coeff",
    ),
    Sign(
        ("completion/eos_rate",),
        lambda eos: eos.best - eos.now,
        0.1,
        "completions lose their end",
        _PROTECT_END,
    ),
    Sign(
        ("reward/strict/mean",),
        lambda strict: strict.best - strict.now,
        0.1,
        "text stands beside the answer, which the format reward does not see",
        _PROTECT_END,
    ),
    Sign(
        ("response_length/mean", "response_length/limit"),
        lambda length, limit: length.now / limit.now if length.first < 0.7 * limit.now else 0,
        0.9,
        "completions grow to the limit",
        f"raise data.max_response_length if they are sound; else {_LOWER_LR}",
    ),
    Sign(
        ("gtpo/filter/dropped_frac",),
        lambda dropped: dropped.now,
        0.5,
        "more than half of the completions are filtered out",
        f"{_LOWER_LR}; if they are sound, raise algorithm.gtpo.entropy_threshold",
    ),
    Sign(
        ("gtpo/group/zero_std_frac", "critic/score/mean"),
        lambda alike, score: alike.now if score.now < 0.9 * score.best else 0,
        0.95,
        "nearly all groups have equal rewards, below the best: there is nothing to learn from",
        f"{_LOWER_LR}; take other prompts (algorithm.filter_groups), or more completions per prompt",
    ),
)


class CollapseWatch:
    """Signs of collapse in the metrics of one run.

    Args:
        max_response_length (int): the limit of a completion, in tokens.
        prompts_per_step (int): `data.train_batch_size`.
        signs: what to look for.
    """

    def __init__(self, max_response_length: int, prompts_per_step: int, signs: Sequence[Sign] = SIGNS):
        self._signs = signs
        self._limit = max_response_length
        self._window = max(WINDOW, math.ceil(PROMPTS / prompts_per_step))
        self._trends = {name: Trend(self._window) for sign in signs for name in sign.metrics}
        self._named: set[Sign] = set()
        self._not_finite: set[str] = set()

    def observe(self, metrics: Mapping[str, Any]) -> list[str]:
        """Take the metrics of one more step; returns one sentence for each new sign."""
        said = []
        for name, trend in self._trends.items():
            value = self._limit if name == "response_length/limit" else metrics.get(name)
            if value is not None and math.isfinite(value):
                trend.add(float(value))
            elif value is not None and name not in self._not_finite:
                self._not_finite.add(name)
                said.append(f"{name} is {value}. Try: {_LOWER_LR}, look at the first batch with such a value")
        values = self.values()
        found = [sign for sign in self._signs if sign not in self._named and values[sign] > sign.limit]
        self._named.update(found)
        return said + [self._sentence(sign) for sign in found]

    def values(self) -> dict[Sign, float]:
        """Where each sign's measure stands."""
        return {sign: sign.value(self._trends) for sign in self._signs}

    def _sentence(self, sign: Sign) -> str:
        trends = ((name, self._trends[name]) for name in sign.metrics if name != "response_length/limit")
        numbers = ", ".join(f"{name} {x.now:.3g} (first {x.first:.3g}, best {x.best:.3g})" for name, x in trends)
        return f"{sign.meaning}: {numbers}, means over {self._window} steps. Try: {sign.remedy}"


def alarms(
    records: Iterable[Mapping[str, Any]], max_response_length: int, prompts_per_step: int
) -> list[tuple[int, str]]:
    """Each sign of collapse of a run that was logged, with its step."""
    watch = CollapseWatch(max_response_length, prompts_per_step)
    return [(record["step"], alarm) for record in records for alarm in watch.observe(record)]


class TrainerWatch:
    """The watch of one trainer of verl, fed with what it logs.

    Args:
        trainer: verl's trainer.
        stop (bool): end the run when it has collapsed, after a checkpoint.
    """

    def __init__(self, trainer: Any, stop: bool):
        self._trainer, self._stop = trainer, stop
        data = trainer.config.data
        self._watch = CollapseWatch(data.max_response_length, data.train_batch_size)
        self._collapse = ""
        agg_mode = OmegaConf.select(trainer.config, "actor_rollout_ref.actor.loss_agg_mode")
        self._entropy_is_a_mean = "sum" not in str(agg_mode)
        if not self._entropy_is_a_mean:
            logger.warning("%s: entropy is not watched, since verl sums it under loss_agg_mode=%s", KEY, agg_mode)

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
        if "actor/entropy" not in metrics and "actor/entropy_loss" in metrics:  # no old-log-prob pass
            metrics = {**metrics, "actor/entropy": metrics["actor/entropy_loss"]}
        if not self._entropy_is_a_mean:
            metrics = {name: value for name, value in metrics.items() if name != "actor/entropy"}
        found = self._watch.observe(metrics)
        for sentence in found:
            logger.warning("watch for collapse, step %d: %s", step, sentence)
        if found and self._stop:
            # verl saves where it always does, at the end of the next step, whose log then ends the run.
            self._trainer.config.trainer.save_freq = 1
            self._collapse = "; ".join(found)


def read_mode(config: DictConfig) -> str:
    """`trainer.collapse_watch` of a verl config; `none` where it is not set.

    Raises:
        ValueError: it is none of `CHOICES`, or it is set for a trainer that it cannot watch.
    """
    value = OmegaConf.select(config, KEY)
    chosen = "none" if value in (None, False) else str(value)
    if chosen not in CHOICES:
        raise ValueError(f"{KEY}={value}: must be one of {', '.join(CHOICES)}")
    if chosen != "none" and OmegaConf.select(config, "rollout") is not None:
        raise ValueError(
            f"{KEY}={value}: verl's one_step_off and fully_async trainers have loops of their own, which it does not "
            "watch; remove it, or use verl.trainer.main_ppo with trainer.v1.trainer_mode=separate_async"
        )
    return chosen
