"""`algorithm.gtpo.base`: masks, filter and entropy term on A_i of another estimator of verl, in both trainers."""

from fractions import Fraction

import pytest
import torch
from harness.stages import STAGES
from hypothesis import given
from hypothesis import strategies as st
from rollout_batch import make_rows, padded
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn

from gtpo_verl import GTPOConfig, compute_gtpo_token_advantages
from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.verl_plugin.estimator import compute_base_advantages

FIXED = "++algorithm.gtpo.initial_entropy=0.3"
BASES = ["rloo", "opo"]


def base_advantages(base, rewards, lengths, uids):
    """Lists in, fractions out: a reward less the mean of the group's others, or less their mean by length."""
    a = []
    for uid, reward in zip(uids, rewards, strict=True):
        group = [i for i, other in enumerate(uids) if other == uid]
        if base == "opo":
            a.append(reward - sum(lengths[i] * rewards[i] for i in group) / sum(lengths[i] for i in group))
        else:
            a.append((reward - sum(rewards[i] for i in group) / len(group)) * len(group) / (len(group) - 1))
    return a


@pytest.mark.parametrize("base", BASES)
def test_a_batch_without_a_token_has_no_advantages(base):
    advantages = compute_base_advantages(base, torch.zeros(4, 0), Completions(torch.zeros(4, 0), list("aabb")))
    torch.testing.assert_close(advantages, torch.zeros(4, dtype=torch.float64), rtol=0, atol=0)


def expected(rows, a, **config):
    mask = padded(rows, "response_mask")
    others = {name: padded(rows, name) for name in ("responses", "entropy")}
    config = GTPOConfig(initial_entropy=0.3, **config)
    return compute_gtpo_token_advantages(torch.tensor(a), rows["uid"], response_mask=mask, **others, config=config)


def real(rows, base):
    """A_i of the rows, 0 where one is padding."""
    tokens = [int(mask.sum()) for mask in rows["response_mask"]]
    own = [i for i, length in enumerate(tokens) if length]
    scores = [Fraction(float(row.sum())) for row in rows["rm_scores"]]
    found = base_advantages(base, *([values[i] for i in own] for values in (scores, tokens, rows["uid"])))
    a = dict(zip(own, map(float, found), strict=True))
    return [a.get(i, 0.0) for i in range(len(tokens))]


@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
@pytest.mark.parametrize("base", BASES)
def test_masks_filter_and_entropy_term_act_on_its_advantages(stage, rows, base, entropy_from):
    rows["entropy"][3] += 1  # which the filter drops
    for ids in rows["responses"]:
        ids[0] = 7
    a = real(rows, base)
    result = expected(rows, a)
    assert (result.conflicts.conflict_len > 0).any() and not result.keep.all()
    gtpo = stage(FIXED, f"++algorithm.gtpo.base={base}", f"algorithm.gtpo.entropy_from={entropy_from}")
    metrics, advantages = gtpo.step()
    used = advantages if entropy_from == "old_log_prob" else gtpo.in_own_order(gtpo.used)
    torch.testing.assert_close(used, result.advantages)
    assert metrics["gtpo/filter/dropped_frac"] == pytest.approx(1 / 5)
    assert metrics["gtpo/conflict/token_frac"] > 0 and metrics["gtpo/group/positive_frac"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("base", BASES)
def test_it_is_verls_own_function_less_the_rounding(stage, rows, base):
    plain = ["entropy_coeff=0", "completion_filter=never", "+conflict_span=none"]
    overrides = [word.replace("+", "++algorithm.gtpo.") if "+" in word else f"algorithm.gtpo.{word}" for word in plain]
    _, advantages = stage(*overrides, f"++algorithm.gtpo.base={base}").step()
    mask, index = padded(rows, "response_mask"), [str(uid) for uid in rows["uid"]]
    verls, _ = get_adv_estimator_fn(base)(padded(rows, "rm_scores"), mask, index=index)
    torch.testing.assert_close(advantages, verls)


@pytest.mark.parametrize("base", BASES)
def test_a_wrong_answer_gets_no_positive_advantage(stage, rows, base):
    rows["rm_scores"][1][-1], rows["rm_scores"][3][-1] = 15, 1  # above the group's baseline, and still wrong
    scores = [20, 15, 1, 1, 0, 20]
    a = [value if score >= 16 else min(value, 0.0) for value, score in zip(real(rows, base), scores, strict=True)]
    _, advantages = stage(FIXED, f"++algorithm.gtpo.base={base}", "++algorithm.gtpo.min_correct_reward=16").step()
    assert real(rows, base)[1] > 0 == a[1]
    torch.testing.assert_close(advantages, expected(rows, a).advantages)


@given(
    st.lists(st.tuples(st.integers(-60, 60), st.integers(1, 4)), min_size=2, max_size=8),
    st.integers(-6, 3),
    st.sampled_from(BASES),
)
def test_a_reward_has_the_sign_of_its_decimal_deviation_from_the_baseline(rows, exponent, base):
    """So it is 0 exactly there, as GTPO's own is at the mean."""
    numbers, lengths = zip(*rows, strict=True)
    rewards, uids = torch.zeros(len(rows), 4), "p" * len(rows)
    completions = Completions((torch.arange(4) < torch.tensor(lengths)[:, None]).long(), uids)
    rewards[:, 0] = torch.tensor([float(f"{number}e{exponent}") for number in numbers])
    found = compute_base_advantages(base, rewards, completions)
    a = compute_group_advantages(rewards.sum(-1), completions, base=found)
    exact = base_advantages(base, [Fraction(number) for number in numbers], lengths, uids)
    assert a.double().sign().tolist() == [(x > 0) - (x < 0) for x in exact]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("trainer", STAGES)
def test_a_group_of_one_has_no_baseline_and_equal_rewards_no_signal(make_stage, trainer, base):
    rows = make_rows(["p", "q", "q", "q"], [2, 3, 4, 5], [20.0, 0.7, 0.7, 0.7])
    metrics, _ = make_stage(trainer, FIXED, f"++algorithm.gtpo.base={base}", rows=rows).step()
    assert metrics["gtpo/group/zero_std_frac"] == 1 and metrics["gtpo/conflict/token_frac"] == 0


def falling(token_level_rewards, response_mask, index, **kwargs):
    """An A that differs from token to token."""
    advantages = token_level_rewards.flip(-1).cumsum(-1).flip(-1) - torch.arange(response_mask.shape[1])
    return advantages * response_mask, advantages


def test_an_advantage_that_differs_between_tokens_is_refused(stage, monkeypatch):
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "rloo", falling)
    with pytest.raises(ValueError, match=rf"algorithm\.gtpo\.base=rloo: {__name__}\.falling .* to gtpo"):
        stage(FIXED, "++algorithm.gtpo.base=rloo").step()


@pytest.mark.parametrize("base", BASES)
def test_a_reward_that_is_not_finite_is_named(stage, rows, base):
    rows["rm_scores"][2][1] = torch.nan
    with pytest.raises(ValueError, match=r"reward .*row 2 \(uid q\) .*nan"):
        stage(FIXED, f"++algorithm.gtpo.base={base}").step()
