"""What a run of GTPO keeps from rollout to rollout, in any trainer: ⟨H⟩_ini, and how many rollouts gave no signal."""

import logging

import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.run.signal_check import SignalCheck

logger = logging.getLogger("gtpo_verl")


class GTPORun:
    """What a run of GTPO (arXiv:2508.03772) keeps from rollout to rollout.

    Args:
        config (GTPOConfig): the run's settings.
        folder (str): where the record of ⟨H⟩_ini is written, beside the checkpoints.
        resumed_from (str | None): the folder whose record a resumed run reads; None for a new run.
        applied (bool): False: another estimator trains, and nothing is logged of what GTPO would do.

    Attributes:
        initial_entropy (InitialEntropy | None): ⟨H⟩_ini, once it is known.

    Raises:
        ValueError: the run is resumed, its filter needs ⟨H⟩_ini, and the record is missing or damaged.
    """

    def __init__(self, config: GTPOConfig, folder: str, resumed_from: str | None, applied: bool = True):
        self.initial_entropy: InitialEntropy | None = None
        self._config = config
        self._folder = folder
        self._resumed = resumed_from is not None
        self._applied = applied
        self._signal_check = SignalCheck(config)
        if known := InitialEntropy.known_before(config, resumed_from):
            self._set_initial_entropy(known)

    @property
    def initial_entropy_value(self) -> float | None:
        """⟨H⟩_ini in nats per token; None in a resumed run that does not need it and has no record of it."""
        return self.initial_entropy.value if self.initial_entropy else None

    def measure(self, trajectory_entropy: torch.Tensor, completions: Completions) -> None:
        """Set ⟨H⟩_ini from (bs,) ⟨H⟩_i, nats per token, if this is the first rollout of a run that does not know it."""
        if self.initial_entropy is None and not self._resumed:
            self._set_initial_entropy(InitialEntropy.measure(trajectory_entropy, completions.lengths, completions.uids))

    def check(self, rewards: torch.Tensor, result: GTPOAdvantage) -> None:
        """Warn if a rollout gives no signal, and end the run after too many of them in a row.

        Args:
            rewards: (bs,).
            result: what GTPO made of the rollout, once its entropies are known.

        Raises:
            ValueError: too many rollouts in a row were emptied by the completion filter, or have groups of one.
        """
        if self._applied:
            self._signal_check.see(rewards, result)

    def _set_initial_entropy(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self._folder, self._config)
        if self._applied:
            level = logging.WARNING if initial_entropy.may_be_chance(self._config) else logging.INFO
            written = f"; written to {path}" if path else ""
            logger.log(level, "GTPO %s%s", initial_entropy.decision(self._config), written)
