"""What a run of GTPO keeps from rollout to rollout, in any trainer: ⟨H⟩_ini, and how many gave no signal."""

import logging

import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run_files.initial_entropy import InitialEntropy
from gtpo_verl.run_files.signal_check import SignalCheck

logger = logging.getLogger("gtpo_verl")


class GTPORun:
    """GTPO (arXiv:2508.03772) in one run, with checkpoints in `folder`, or in `resumed_from` those that it resumes.

    With `applied=False` another estimator trains, and what GTPO would do is computed but not logged. Raises what
    `InitialEntropy.known_before` raises.
    """

    def __init__(self, config: GTPOConfig, folder: str, resumed_from: str | None, applied: bool = True):
        self.initial_entropy: InitialEntropy | None = None
        self._config = config
        self._folder = folder
        self._resumed = resumed_from is not None
        self._applied = applied
        self._signal_check = SignalCheck(config)
        if known := InitialEntropy.known_before(config, resumed_from):
            self._fix_initial_entropy(known)

    @property
    def initial_entropy_value(self) -> float | None:
        """⟨H⟩_ini in nats per token; None in a resumed run that does not need it and has no record of it."""
        return self.initial_entropy.value if self.initial_entropy else None

    def measure(self, trajectory_entropy: torch.Tensor, completions: Completions) -> None:
        """Fix ⟨H⟩_ini, if this is the first rollout of a run that does not know it."""
        if self.initial_entropy is None and not self._resumed:
            self._fix_initial_entropy(InitialEntropy.measure(trajectory_entropy, completions.lengths, completions.uids))

    def check(self, rewards: torch.Tensor, result: GTPOAdvantage) -> None:
        """Take the (bs,) rewards of a rollout and its advantages, once ⟨H⟩_i are known; raises what `SignalCheck.see`
        raises."""
        if self._applied:
            self._signal_check.see(rewards, result)

    def _fix_initial_entropy(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self._folder, self._config)
        if self._applied:
            level = logging.WARNING if initial_entropy.may_be_chance(self._config) else logging.INFO
            written = f"; written to {path}" if path else ""
            logger.log(level, "GTPO %s%s", initial_entropy.decision(self._config), written)
