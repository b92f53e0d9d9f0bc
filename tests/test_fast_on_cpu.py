"""The study's fast loop: its model, its sampling and its controls. Its step: tests/e2e/test_fast_study_on_cpu.py."""

import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from gtpo_verl.cpu import tiny
from studies import fast
from studies.plan import METHODS

EOS = 1


@pytest.fixture(scope="module")
def models():
    """Three models of random weights that differ."""
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    return [tiny.build_model(tokenizer).eval() for _ in range(3)]


@pytest.fixture(scope="module")
def weights(models):
    states = [model.state_dict() for model in models]
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


PROMPT = torch.tensor([2, 9, 8, 7, 3])


def draw(weights, runs, n=8, limit=12):
    generators = [torch.Generator().manual_seed(run) for run in runs]
    own = {name: values[list(runs)] for name, values in weights.items()}
    return fast.sample(own, PROMPT, n, limit, 1.0, EOS, generators)


def test_the_forward_pass_is_that_of_transformers_for_every_run(models, weights):
    ids = torch.randint(71, (3, 4, 20), generator=torch.Generator().manual_seed(1))
    logits = fast.forward(fast.fuse(weights), ids)
    for model, own, expected_of in zip(models, logits, ids, strict=True):
        torch.testing.assert_close(own, model(expected_of).logits, rtol=0, atol=2e-5)


def test_sampling_draws_from_the_model(weights):
    rollout = draw(weights, [0], n=20_000, limit=2)[0]
    weights = {name: values[:1] for name, values in weights.items()}
    probabilities = fast.forward(fast.fuse(weights), PROMPT.view(1, 1, -1))[0, 0, -1].softmax(-1)
    counts = torch.bincount(rollout.responses[:, 0], minlength=71) / 20_000
    assert (counts - probabilities).abs().max() < 0.02
    first = int(probabilities.argmax())
    second = fast.forward(fast.fuse(weights), torch.cat([PROMPT, torch.tensor([first])]).view(1, 1, -1))[0, 0, -1]
    followed = rollout.responses[rollout.responses[:, 0] == first, 1]
    shares = torch.bincount(followed, minlength=71) / len(followed)
    if first != EOS:
        assert (shares - second.softmax(-1)).abs().max() < 0.05


def test_a_run_draws_the_same_whatever_runs_are_beside_it(weights):
    together = draw(weights, [0, 1, 2])
    for run in range(3):
        (alone,) = draw(weights, [run])
        assert torch.equal(alone.responses, together[run].responses)
        assert torch.equal(alone.response_mask, together[run].response_mask)


def test_nothing_stands_behind_the_end_of_a_completion(weights):
    for rollout in draw(weights, [0, 1, 2], n=200, limit=40):
        ended = rollout.response_mask == 0
        assert ended.any() and (rollout.responses[ended] == EOS).all()
        before_last = rollout.response_mask.cumsum(-1) < rollout.response_mask.sum(-1, keepdim=True)
        assert (rollout.responses[before_last] != EOS).all()


def group():
    """Four completions: two tokens shared by all at the start, three at the end, the second and the fourth bad."""
    rows = [[5, 6, 7, 8, 9, EOS], [5, 6, 3, 4, 8, 9, EOS], [5, 6, 2, 2, 2, 8, 9, EOS], [5, 6, 8, 9, EOS]]
    mask = torch.tensor([[1] * len(row) + [0] * (8 - len(row)) for row in rows])
    responses = torch.tensor([row + [EOS] * (8 - len(row)) for row in rows])
    rewards = torch.zeros(4, 8)
    rewards[:, 0] = torch.tensor([20.0, 10.0, 20.0, 0.0])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, [0] * 4)
    return fast.Rollout(PROMPT, responses, mask), advantages


def test_the_weight_left_on_shared_tokens_by_hand():
    rollout, advantages = group()
    a = advantages[:, 0]
    left = fast.shared_weight(rollout, a, "seq-mean-token-mean")
    assert (left["shared_first"], left["shared_last"]) == (2, 3)
    assert left["net_weight"] == pytest.approx(float((a / torch.tensor([6, 7, 8, 5])).sum() / 4), abs=1e-7)
    assert fast.shared_weight(rollout, a, "token-mean")["net_weight"] == pytest.approx(0, abs=1e-7)


def test_controls_take_away_negative_updates_and_nothing_else():
    rollout, advantages = group()
    generator = torch.Generator().manual_seed(0)
    only_positive = fast.drop_negative(advantages, rollout, generator)
    assert torch.equal(only_positive, torch.where(advantages > 0, advantages, 0))
    skipped = fast.skip_at_random(advantages, rollout, generator)
    positive = advantages[:, 0] > 0
    assert torch.equal(skipped[positive], advantages[positive])
    # Of the second completion two tokens are on the forward and three on the backward mask, of the fourth all.
    zeroed = ((skipped == 0) & (rollout.response_mask == 1)).sum(-1)
    assert zeroed.tolist() == [0, 5, 0, 5]


@pytest.mark.parametrize("method", ["grpo_kl", "gtpo", "grpo_betas"])
def test_a_config_holds_what_its_method_says(method):
    config = fast.build_config(METHODS[method])
    assert config.algorithm.adv_estimator == method.partition("_")[0]
    assert config.actor_rollout_ref.actor.use_kl_loss == (method == "grpo_kl")
    assert list(config.actor_rollout_ref.actor.optim.betas) == ([0.999999] * 2 if "betas" in method else [0.9, 0.95])


def test_learning_side_by_side_is_learning_alone(weights):
    rewards = [20.0, 10.0, 20.0, 0.0]
    rollout, _ = group()
    config = fast.build_config(METHODS["masks"])
    shared = {name: values.clone() for name, values in weights.items()}
    for run in range(3):
        fast.Learner({name: values[run : run + 1] for name, values in shared.items()}, config).step(rollout, rewards)
        alone = fast.Learner({name: values[run : run + 1].clone() for name, values in weights.items()}, config)
        alone.step(rollout, rewards)
        for name, values in alone.weights.items():
            assert torch.equal(values[0], shared[name][run])
    assert not torch.equal(shared["lm_head.weight"], weights["lm_head.weight"])
