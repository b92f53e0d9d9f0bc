"""Batches without signal, counted as every trainer counts them."""

import logging
import re

import pytest
import torch

from gtpo_verl import GTPOConfig, compute_gtpo
from gtpo_verl.run.signal_check import SignalCheck

EQUAL = {"rewards": [1.0, 1.0, 1.0, 1.0]}
ALONE = {"rewards": [1.0, 0.0, 1.0, 0.0], "group_ids": ["a", "b", "c", "d"]}
EMPTIED = {"rewards": [1.0, 0.0, 1.0, 0.0], "entropy": 2.0}
SOUND = {"rewards": [1.0, 0.0, 1.0, 1.0]}
PADDING = {"rewards": [0.0, 0.0, 0.0, 0.0], "lengths": [0, 0, 0, 0]}


class Run:
    """A run that filters every completion above ln 2, batch by batch; by default two completions of two prompts."""

    def __init__(self, caplog, **config):
        caplog.set_level(logging.WARNING, "gtpo_verl")
        self.caplog = caplog
        self.config = GTPOConfig(completion_filter="always", **config)
        self.check = SignalCheck(self.config)

    def see(self, batch, times=1):
        lengths = torch.tensor(batch.get("lengths", [3, 2, 3, 1]))
        mask = torch.arange(3) < lengths[:, None]
        rewards = torch.tensor(batch["rewards"])
        result = compute_gtpo(
            rewards=rewards,
            responses=torch.ones(mask.shape, dtype=torch.int64),
            response_mask=mask,
            group_ids=batch.get("group_ids", ["a", "a", "b", "b"]),
            entropy=torch.full(mask.shape, batch.get("entropy", 0.3)),
            config=self.config,
        )
        for _ in range(times):
            self.check.see(rewards, result)

    @property
    def warnings(self):
        return [record.getMessage() for record in self.caplog.records]


def test_a_batch_with_signal_is_not_told(caplog):
    run = Run(caplog)
    run.see(SOUND, times=40)
    assert run.warnings == []


@pytest.mark.parametrize(("batch", "cause"), [(ALONE, "alone in"), (EMPTIED, "filter dropped every")])
def test_groups_of_one_and_an_empty_filter_warn_once_in_a_row_and_end_the_run_at_the_20th(caplog, batch, cause):
    run = Run(caplog)
    run.see(batch, times=19)
    run.see(SOUND)  # begins the count anew
    run.see(batch, times=19)
    assert len(run.warnings) == 2 and all(cause in warning for warning in run.warnings)
    with pytest.raises(ValueError, match=cause) as error:
        run.see(batch)
    assert "20 batches" in str(error.value)


@pytest.mark.parametrize(
    ("batch", "effect_and_remedy"),
    [
        (ALONE, ["γ = 0.1", "less likely", "uid"]),
        (EMPTIED, ["algorithm.gtpo.entropy_threshold=0.6931", "algorithm.gtpo.completion_filter=never"]),
        (EQUAL, ["γ = 0.1", "reward function", "algorithm.gtpo.entropy_coeff=0"]),
    ],
    ids=["alone", "emptied", "equal"],
)
def test_effect_and_remedy_are_named(caplog, batch, effect_and_remedy):
    run = Run(caplog)
    run.see(batch)
    (warning,) = run.warnings
    assert [part for part in effect_and_remedy if part not in warning] == []


def test_equal_rewards_are_told_at_the_1st_10th_and_100th_batch_in_a_row_and_never_end_a_run(caplog):
    """A solved task looks so too."""
    run = Run(caplog)
    run.see(EQUAL, times=500)
    run.see(SOUND)  # begins the count anew
    run.see(EQUAL)
    counts = [re.search(r"(\d+) batches", warning)[1] for warning in run.warnings]
    assert counts == ["1", "10", "100", "1"]


def test_one_prompt_with_signal_is_enough(caplog):
    run = Run(caplog)
    run.see({"rewards": [1.0, 1.0, 0.0, 1.0]}, times=30)
    run.see({"rewards": [1.0, 1.0, 0.0, 1.0], "group_ids": ["a", "b", "c", "c"]}, times=30)
    assert run.warnings == []


def test_groups_of_one_beside_a_group_of_equal_rewards_are_a_matter_of_rewards(caplog):
    run = Run(caplog)
    run.see(EQUAL | {"group_ids": ["a", "b", "c", "c"]}, times=30)
    assert len(run.warnings) == 2 and all("equal rewards" in warning for warning in run.warnings)


def test_a_batch_of_padding_alone_is_no_batch(caplog):
    """It neither counts nor begins a count anew; rows without tokens are in no group."""
    run = Run(caplog)
    run.see(PADDING, times=30)
    assert run.warnings == []
    run.see(ALONE, times=19)
    run.see(PADDING)
    with pytest.raises(ValueError, match="alone in"):
        run.see(ALONE)


def test_padding_beside_groups_of_one_is_no_group(caplog):
    run = Run(caplog)
    run.see({"rewards": [1.0, 0.0, 0.0, 0.0], "group_ids": ["a", "b", "p", "p"], "lengths": [2, 2, 0, 0]})
    assert len(run.warnings) == 1 and "alone in" in run.warnings[0]


def test_without_the_entropy_term_nothing_is_left(caplog):
    run = Run(caplog, entropy_coeff=0)
    run.see(EQUAL)
    assert "nothing is learnt" in run.warnings[0] and "less likely" not in run.warnings[0]
