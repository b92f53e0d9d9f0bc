"""Batches of rollouts that give GTPO no signal: what a run says of them, and when they end it, in any trainer.

GRPO does nothing with a batch without signal. GTPO (arXiv:2508.03772) does: where A_i = 0 for every completion,
−γ⟨H⟩_i is left, which makes all of them less likely, the unsure ones most.
"""

import logging

import torch

from gtpo_verl.algorithm.advantage import GTPOAdvantage
from gtpo_verl.algorithm.config import GTPOConfig

logger = logging.getLogger("gtpo_verl")

_LIMIT = 20
"""Batches in a row after which a run ends. With one prompt a batch, as in the paper, the filter empties some by chance,
and a prompt of which all completions but one have failed is a group of one."""

_EQUAL_REWARDS_WARNINGS = (1, 10, 100)
"""Batches of equal rewards in a row after which a warning is given: a solved task looks the same."""

_FIRST_ROLLOUTS = 10
"""Rollouts with whose rewards `min_correct_reward` is compared."""


class SignalCheck:
    """Counts the batches of a run, in their order, that give no signal.

    Args:
        config (GTPOConfig): the run's settings.
    """

    def __init__(self, config: GTPOConfig):
        self._config = config
        self._rewards: list[torch.Tensor] = []  # of the first rollouts
        self._emptied = 0  # batches in a row that lost every completion to the filter
        self._alone = 0  # batches in a row that have groups of one completion only
        self._equal = 0  # batches in a row that have a larger group, and equal rewards in each group

    def see(self, rewards: torch.Tensor, result: GTPOAdvantage) -> None:
        """Take the (bs,) rewards of the next batch, and what GTPO made of it, once the filter has judged it.

        Rows without tokens do not count; a batch without any other does not either.

        Raises:
            ValueError: too many batches in a row were emptied by the completion filter, or have groups of one.
        """
        real = result.completions.lengths > 0
        if not real.any():
            return
        self._compare_with_min_correct_reward(rewards[real].float())

        is_emptied = not result.keep[real].any()
        self._emptied = self._emptied + 1 if is_emptied else 0
        if is_emptied:
            self._warn_or_raise(self._emptied, self._filter_message())

        group_sizes = result.completions.groups[real].bincount()
        is_alone = int(group_sizes.max()) == 1
        self._alone = self._alone + 1 if is_alone else 0
        if is_alone:
            self._warn_or_raise(self._alone, self._groups_of_one_message())

        is_equal = not is_alone and not result.group_advantages[real].any()
        self._equal = self._equal + 1 if is_equal else 0
        if is_equal and self._equal in _EQUAL_REWARDS_WARNINGS:
            logger.warning("GTPO: %s", self._equal_rewards_message())

    def _warn_or_raise(self, batches: int, message: str) -> None:
        if batches >= _LIMIT:
            raise ValueError(message)
        if batches == 1:
            logger.warning("GTPO: %s. After %d such batches in a row the run ends", message, _LIMIT)

    def _filter_message(self) -> str:
        section = self._config.section
        return (
            f"the completion filter dropped every completion of {self._emptied} batches in a row, whose mean entropies "
            f"are above {section}.entropy_threshold={self._config.entropy_threshold:.4g}: nothing is learnt; raise it, "
            f"or set {section}.completion_filter=never"
        )

    def _groups_of_one_message(self) -> str:
        return (
            f"every completion of {self._alone} batches in a row is alone in its group, where A = 0, and "
            f"{self._effect()}: give all completions of one prompt the same id (in verl its uid)"
        )

    def _equal_rewards_message(self) -> str:
        return (
            f"in {self._equal} batches in a row all completions of a prompt have equal rewards: A = 0, and "
            f"{self._effect()}. Look at the reward function, unless the task is solved or too hard; "
            f"{self._config.section}.entropy_coeff=0 leaves such batches alone, as GRPO does"
        )

    def _effect(self) -> str:
        coeff = self._config.entropy_coeff
        if not coeff:
            return "nothing is learnt"
        return f"only −γ⟨H⟩ is left (γ = {coeff:g}), which makes every completion less likely"

    def _compare_with_min_correct_reward(self, rewards: torch.Tensor) -> None:
        """Warn once of a `min_correct_reward` that all of the first rewards reach or, though they differ, none."""
        least = self._config.min_correct_reward
        if least is None or len(self._rewards) == _FIRST_ROLLOUTS:
            return
        self._rewards.append(rewards)
        if len(self._rewards) < _FIRST_ROLLOUTS:
            return
        seen = torch.cat(self._rewards)
        lowest, highest = seen.min().item(), seen.max().item()
        if lowest >= least:
            finding = "all reach it: it changes nothing"
        elif lowest < highest < least:
            finding = "none reaches it: no A_i is positive"
        else:
            return
        logger.warning(
            "%s.min_correct_reward=%g: of the first %d rewards, %g to %g, %s. Set it to the least reward of a right "
            "answer, with all that is added to rewards or taken from them",
            self._config.section,
            least,
            len(seen),
            lowest,
            highest,
            finding,
        )
