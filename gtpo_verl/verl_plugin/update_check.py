"""Check that the actor was updated with GTPO's advantages.

A trainer can have advantages of its own: it may never ask verl for them, or write over them afterwards. Such a run
logs `gtpo/*` metrics of advantages that nobody used. So the highest and the lowest advantage are compared where verl's
trainers hand over the batch that they have updated with: `compute_data_metrics`, which all of them call before they
aggregate metrics. By then rows have another order and padding is gone, but these two are the same to the bit. A change
that leaves both as they are is not noticed.
"""

import logging
import math
from typing import Any, NamedTuple

import torch

from gtpo_verl.verl_plugin.run_config import ALLOW_CHANGES, select, uses_gtpo

logger = logging.getLogger("gtpo_verl")

_LOGGED_STEPS = 3
"""After this many logged steps without a comparison a warning is logged. It is more than one, since verl's fully_async
logs a validation and the time of its first weight transfer before it hands over its first batch."""

_REMEDY = (
    f"if the advantages are changed on purpose (shaping, replay of older steps), set ++{ALLOW_CHANGES}=True; for a "
    "run without GTPO set algorithm.adv_estimator=grpo"
)


class Extremes(NamedTuple):
    """The highest and the lowest advantage among the tokens of a response mask; both are nan if it has none."""

    highest: float
    lowest: float

    @classmethod
    def of(cls, advantages: torch.Tensor, response_mask: torch.Tensor) -> "Extremes":
        """Return the extremes of (bs, response_length) advantages on the response mask of their batch."""
        masked = advantages.masked_select(response_mask.bool())
        if not masked.numel():
            return cls(math.nan, math.nan)
        return cls(masked.max().item(), masked.min().item())

    def join(self, other: "Extremes") -> "Extremes":
        """Return the extremes of two batches together."""
        if math.isnan(self.highest):
            return other
        if math.isnan(other.highest):
            return self
        return Extremes(max(self.highest, other.highest), min(self.lowest, other.lowest))

    def equals(self, other: "Extremes") -> bool:
        """Return whether both numbers are the same; nan equals nan here."""
        if math.isnan(self.highest):  # then the lowest is nan too
            return math.isnan(other.highest)
        return self.highest == other.highest and self.lowest == other.lowest

    def __str__(self) -> str:
        # Nine digits tell one float32 from the next.
        return f"{self.lowest:.9g} to {self.highest:.9g}"


class UpdateCheck:
    """Checks that the batches with which a trainer updates carry the advantages that GTPO estimated for them."""

    def __init__(self) -> None:
        self._estimated: Extremes | None = None  # of all batches since the last comparison
        # GTPO's at the last comparison, for a trainer that updates with that batch again
        self._last_expected: Extremes | None = None
        # Steps logged without a comparison; None once there was one, or once the warning was logged.
        self._uncompared_steps: set[Any] | None = set()

    @classmethod
    def of(cls, config: Any) -> "UpdateCheck | None":
        """Return the check for a run with this config of verl.

        None if it does not ask for GTPO, or if it allows changed advantages.
        """
        if not uses_gtpo(config) or select(config, ALLOW_CHANGES):
            return None
        return cls()

    def record(self, advantages: torch.Tensor, response_mask: torch.Tensor) -> None:
        """Keep the extremes of the (bs, response_length) advantages that GTPO has given the trainer for a batch."""
        extremes = Extremes.of(advantages, response_mask)
        if self._estimated is not None:  # several mini-batches are handed over as one batch
            extremes = extremes.join(self._estimated)
        self._estimated = extremes

    def compare(self, advantages: torch.Tensor, response_mask: torch.Tensor) -> None:
        """Compare the (bs, response_length) advantages of the batch that the trainer has updated with to GTPO's.

        The batch holds all batches that were estimated since the last comparison. If none was estimated, the trainer
        has updated with the last one again.

        Raises:
            RuntimeError: the batch has other advantages than GTPO's, or GTPO's were never estimated.
        """
        self._uncompared_steps = None
        used = Extremes.of(advantages, response_mask)
        expected = self._last_expected if self._estimated is None else self._estimated
        self._last_expected = expected
        self._estimated = None
        if expected is None:
            raise RuntimeError(
                f"algorithm.adv_estimator asks for GTPO, but the trainer updated the actor with advantages of its own, "
                f"{used}, and has not asked for GTPO's: let its _compute_advantage call verl's, "
                f"super()._compute_advantage; {_REMEDY}"
            )
        if not used.equals(expected):
            raise RuntimeError(
                f"algorithm.adv_estimator asks for GTPO, but the trainer updated the actor with other advantages: "
                f"{used} on its response_mask, where GTPO's were {expected}. Let nothing write over `advantages` or "
                f"`response_mask` after verl's _compute_advantage; {_REMEDY}"
            )

    def on_log(self, step: Any) -> None:
        """Count a step that the trainer logs, and warn once if none of the first ones had a comparison."""
        if self._uncompared_steps is None:
            return
        self._uncompared_steps.add(step)
        if len(self._uncompared_steps) < _LOGGED_STEPS:
            return
        self._uncompared_steps = None
        asked = "has not asked for them, and" if self._estimated is None else "has asked for them, but"
        logger.warning(
            "GTPO: it is not verified that the actor is updated with GTPO's advantages: the trainer %s in %d logged "
            "steps it has not called verl's compute_data_metrics (verl.trainer.ppo.metric_utils), where they are "
            "compared: let it do so with each batch that it has updated with",
            asked,
            _LOGGED_STEPS,
        )
