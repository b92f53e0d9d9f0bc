import logging

import pytest
import torch

from gtpo_verl import GTPOConfig, compute_gtpo
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.run.gtpo_run import GTPORun


def warnings_of(rollouts, folder, caplog, applied=True, **config):
    """Of `min_correct_reward`, in a run with these rewards in each rollout; the last row is padding."""
    caplog.set_level(logging.WARNING, "gtpo_verl")
    settings = GTPOConfig(completion_filter="never", **config)
    run = GTPORun(settings, folder, None, applied=applied)
    for rewards in rollouts:
        mask = torch.ones(len(rewards) + 1, 2)
        mask[-1] = 0
        completions = Completions(mask, [*"p" * len(rewards), "pad"])
        rewards = torch.tensor([*rewards, 0.0])
        run.measure(torch.zeros(len(mask)), completions)
        result = compute_gtpo(
            rewards=rewards,
            responses=torch.ones(mask.shape, dtype=torch.int64),
            response_mask=mask,
            group_ids=completions,
            entropy=torch.zeros(mask.shape),
            config=settings,
        )
        run.check(rewards, result)
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "min_correct_reward" in message]


@pytest.mark.parametrize(
    ("rewards", "least", "finding"),
    [([0.0, 1.0], 11, "20 rewards, 0 to 1, none "), ([11.0, 20.0], 5, "20 rewards, 11 to 20, all ")],
)
def test_a_threshold_that_every_reward_or_none_reaches_is_named_once(rewards, least, finding, tmp_path, caplog):
    (warning,) = warnings_of([rewards] * 25, tmp_path, caplog, min_correct_reward=least)
    assert warning.startswith(f"algorithm.gtpo.min_correct_reward={least}: ") and finding in warning
    assert "right answer" in warning


@pytest.mark.parametrize(
    ("rollouts", "least"),
    [
        ([[0.0, 1.0]] * 9 + [[0.0, 20.0]] * 9, 11),  # the tenth has a right answer
        ([[0.0, 1.0]] * 9, 11),  # which are too few
        ([[0.0, 0.0]] * 20, 11),  # nothing to learn from
        ([[11.0, 20.0]] * 9 + [[10.0, 20.0]], 11),
        ([[0.0, 1.0]] * 20, None),
    ],
)
def test_no_word_of_a_threshold_between_the_rewards(rollouts, least, tmp_path, caplog):
    assert warnings_of(rollouts, tmp_path, caplog, min_correct_reward=least) == []


def test_of_what_gtpo_would_do_under_another_estimator_nothing_is_said(tmp_path, caplog):
    assert warnings_of([[0.0, 1.0]] * 25, tmp_path, caplog, applied=False, min_correct_reward=11) == []
