"""What the first rollouts of a run fix and show, in any trainer: ⟨H⟩_ini, and rewards that do not fit the settings."""

import logging

import torch

from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run_files.initial_entropy import InitialEntropy

_FIRST_ROLLOUTS = 10  # with whose rewards min_correct_reward is compared
logger = logging.getLogger("gtpo_verl")


class GTPORun:
    """GTPO (arXiv:2508.03772) in one run, with checkpoints in `folder`, or in `resumed_from` those that it resumes.

    With `applied=False` another estimator trains, and what GTPO would do is computed but not logged. Raises what
    `InitialEntropy.known_before` raises.
    """

    def __init__(self, config: GTPOConfig, folder: str, resumed_from: str | None, applied: bool = True):
        self.initial_entropy: InitialEntropy | None = None
        self._config, self._folder, self._resumed = config, folder, resumed_from is not None
        self._applied = applied
        self._rewards: list[torch.Tensor] = []
        if known := InitialEntropy.known_before(config, resumed_from):
            self._fix_initial_entropy(known)

    @property
    def initial_entropy_value(self) -> float | None:
        """⟨H⟩_ini in nats per token; None in a resumed run that does not need it and has no record of it."""
        return self.initial_entropy.value if self.initial_entropy else None

    def observe(self, rewards: torch.Tensor, completions: Completions, trajectory_entropy: torch.Tensor | None) -> None:
        """Take the next rollout, before its advantages are computed: (bs,) rewards, and ⟨H⟩_i in nats per token where
        they are known before the update."""
        if trajectory_entropy is not None:
            self.measure(trajectory_entropy, completions)
        self._compare(rewards[completions.lengths > 0].float())

    def measure(self, trajectory_entropy: torch.Tensor, completions: Completions) -> None:
        """Fix ⟨H⟩_ini, if this is the first rollout of a run that does not know it."""
        if self.initial_entropy is None and not self._resumed:
            self._fix_initial_entropy(InitialEntropy.measure(trajectory_entropy, completions.lengths, completions.uids))

    def _fix_initial_entropy(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self._folder, self._config)
        if self._applied:
            level = logging.WARNING if initial_entropy.may_be_chance(self._config) else logging.INFO
            written = f"; written to {path}" if path else ""
            logger.log(level, "GTPO %s%s", initial_entropy.decision(self._config), written)

    def _compare(self, rewards: torch.Tensor) -> None:
        """Warn of a `min_correct_reward` that all rewards of the first rollouts reach or, though they differ, none."""
        least = self._config.min_correct_reward
        if least is None or not self._applied or len(self._rewards) == _FIRST_ROLLOUTS:
            return
        self._rewards.append(rewards)
        if len(self._rewards) < _FIRST_ROLLOUTS or not len(seen := torch.cat(self._rewards)):
            return
        low, high = seen.min().item(), seen.max().item()
        if low >= least or low < high < least:
            said = "all reach it: it changes nothing" if low >= least else "none reaches it: no A_i is positive"
            logger.warning(
                "%s.min_correct_reward=%g: of the first %d rewards, %g to %g, %s. Set it to the least reward of a "
                "right answer, with all that is added to rewards or taken from them",
                *(self._config.section, least, len(seen), low, high, said),
            )
