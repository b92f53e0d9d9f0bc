"""GTPO's advantages under every policy loss of verl, through the worker's own `ppo_loss` (docs/compose.md).

Two completions of one prompt share their first and their last token (5 and 2); tokens 7, 8 and 9 are their own:

    good (reward 1)  5 7 8 2    λ = 2 1 1 2
    bad  (reward 0)  5 9 2      λ = 0 1 0
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from rollout_batch import make_rows
from verl.trainer.config import RolloutCorrectionConfig
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage
from gtpo_verl.verl_plugin.update_pass import UpdateInputs

PROMPT = torch.tensor([3, 4])
RESPONSES = torch.tensor([[5, 7, 8, 2], [5, 9, 2, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
LENGTHS = MASK.sum(-1)
WEIGHT = MASK / LENGTHS.unsqueeze(-1) / len(MASK)  # of a token in seq-mean-token-mean
LAMBDA = torch.tensor([[2.0, 1.0, 1.0, 2.0], [0.0, 1.0, 0.0, 0.0]])
ENTROPY = torch.tensor([[0.1, 0.2, 0.1, 0.4], [0.0, 0.2, 0.4, 9.0]])
OLD_LOG_PROB = torch.tensor([[-0.1, -1.0, -2.0, -0.2], [-0.1, -1.5, -0.2, 0.0]])
# Of the policy after some updates: below, inside and above the clipping range of 0.2.
LOG_RATIO = torch.tensor([[0.3, -0.1, -0.5, 0.1], [0.05, -0.4, -0.1, 0.0]])

# The gradient of a token is λ times what it would be at λ = 1, whatever the ratio.
TOKEN_LEVEL = {
    "gtpo",
    "gtpo_trajectory",
    "vanilla",
    "gspo",
    "cispo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "bypass_mode",
}
# That holds at ratio 1 only, the first update on a batch of rollouts.
FIRST_UPDATE_ONLY = {"kl_cov", "dro"}
# λ also chooses the tokens that are dropped, at any ratio.
CHOOSES_TOKENS = {"clip_cov"}
SEQUENCE_LEVEL = {"geo_mean"}


def advantages(**gtpo):
    rewards = torch.zeros(RESPONSES.shape)
    rewards[0, 3] = 1.0
    return compute_gtpo_outcome_advantage(
        rewards, MASK, ["uid", "uid"], RESPONSES, ENTROPY, {"gtpo": gtpo}, initial_entropy=0.2
    )[0]


def jagged(padded):
    return torch.nested.as_nested_tensor([row[:n] for row, n in zip(padded, LENGTHS, strict=True)], layout=torch.jagged)


def worker_arguments(
    log_prob,
    loss_mode,
    advantages,
    old_log_prob=OLD_LOG_PROB,
    ref_log_prob=None,
    weights=None,
    loss_agg_mode="seq-mean-token-mean",
    inputs=None,
    entropy_coeff=0,
    **policy,
):
    """What verl's actor hands to `ppo_loss`, from (bs, response_length) log-probabilities; with `inputs`, GTPO's
    fields of the batch, the model's output has ENTROPY too.
    """
    if loss_mode == "dro":
        policy.setdefault("dro_beta", 0.5)
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=2,
        loss_agg_mode=loss_agg_mode,
        entropy_coeff=entropy_coeff,
        use_kl_loss=ref_log_prob is not None,
        policy_loss=PolicyLossConfig(loss_mode=loss_mode, **policy),
    )
    # The model's output covers prompt and response; a token's log-probability stands one position before the token.
    offsets = F.pad((LENGTHS + len(PROMPT)).cumsum(0), (1, 0))

    def output_of(values):
        output = [F.pad(row[:n], (len(PROMPT) - 1, 1)) for row, n in zip(values, LENGTHS, strict=True)]
        return torch.nested.nested_tensor_from_jagged(torch.cat(output), offsets)

    tensors = {
        "prompts": jagged(PROMPT.expand(2, -1)),
        "responses": jagged(RESPONSES),
        "response_mask": jagged(MASK),
        "old_log_probs": jagged(old_log_prob),
        "advantages": jagged(advantages),
        "attention_mask": F.pad(MASK, (len(PROMPT), 0), value=1),
    }
    if weights is not None:
        tensors["rollout_is_weights"] = jagged(weights)
    if ref_log_prob is not None:
        tensors["ref_log_prob"] = jagged(ref_log_prob)
    batch_info = {"dp_size": 1, "batch_num_tokens": int(MASK.sum()), "global_batch_size": len(MASK)}
    output = {"log_probs": output_of(log_prob)}
    if inputs is not None:
        tensors |= inputs.to_batch()
        output["entropy"] = output_of(ENTROPY - log_prob + log_prob.detach())  # has a gradient, as the model's
    return config, output, tu.get_tensordict(tensors, batch_info)


def worker_loss(*args, **kwargs):
    """The loss as verl's actor computes it; arguments as of `worker_arguments`."""
    return ppo_loss(*worker_arguments(*args, **kwargs))[0]


def gradient(loss_mode, advantages, log_ratio=0.0, old_log_prob=OLD_LOG_PROB, **kwargs):
    """Gradient of the loss with respect to each token's log-probability."""
    log_prob = (old_log_prob + log_ratio).requires_grad_()
    worker_loss(log_prob, loss_mode, advantages, old_log_prob, **kwargs).backward()
    return log_prob.grad


def test_every_policy_loss_of_verl_is_covered():
    covered = sorted([*TOKEN_LEVEL, *FIRST_UPDATE_ONLY, *CHOOSES_TOKENS, *SEQUENCE_LEVEL])
    assert covered == sorted({*POLICY_LOSS_REGISTRY, "gtpo"})  # which verl knows once a config asks for it


@pytest.mark.parametrize("loss_mode", sorted(TOKEN_LEVEL | FIRST_UPDATE_ONLY | CHOOSES_TOKENS))
def test_first_update_is_gtpos_own(loss_mode):
    """At ratio 1 the gradient of a token is −Â/(G |o_i|), the paper's, under any token-level loss."""
    grad = gradient(loss_mode, advantages())
    assert grad[1, 0] == grad[1, 2] == 0
    assert grad[1, 1] > 0
    assert (grad[0] < 0).all()
    torch.testing.assert_close(grad[0], grad[0, 1] * LAMBDA[0])
    torch.testing.assert_close(grad, -advantages() * WEIGHT)


@pytest.mark.parametrize("loss_mode", sorted(TOKEN_LEVEL))
def test_conflict_weight_scales_the_gradient_of_its_token_in_later_updates_too(loss_mode):
    grad = gradient(loss_mode, advantages(), LOG_RATIO)
    assert grad[1, 0] == grad[1, 2] == 0 and grad[0, 3] < 0
    torch.testing.assert_close(grad, LAMBDA * gradient(loss_mode, advantages(conflict_span="none"), LOG_RATIO))


@pytest.mark.parametrize("loss_mode", ["sapo", "geo_mean"])
def test_losses_that_always_average_over_a_completion_first(loss_mode):
    grad = gradient(loss_mode, advantages(), loss_agg_mode="token-mean")
    torch.testing.assert_close(grad, gradient(loss_mode, advantages()))


@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSS_REGISTRY))
def test_filtered_completion_gets_no_gradient_in_the_first_update(loss_mode):
    filtered = advantages(entropy_threshold=0.1, completion_filter="always")
    assert not gradient(loss_mode, filtered).any()


WEIGHTS = torch.tensor([[0.5, 1.0, 2.0, 1.5], [1.2, 0.4, 0.7, 0.0]])
FILTERED = {"entropy_coeff": 0.5, "entropy_threshold": 0.198}
CORRECTED = [RolloutCorrectionConfig(rollout_is="token", loss_type=loss) for loss in ("reinforce", "ppo_clip")]


@pytest.mark.parametrize(
    ("loss_mode", "gtpo", "settings"),
    [
        *((loss_mode, gtpo, {}) for loss_mode in sorted(POLICY_LOSS_REGISTRY) for gtpo in ({}, FILTERED)),
        ("gtpo", {"filter_scope": "negative"}, {}),
        *((loss_mode, {}, {"weights": WEIGHTS}) for loss_mode in ("gtpo", "vanilla")),
        *(("bypass_mode", {}, {"rollout_correction": correction}) for correction in CORRECTED),
    ],
)
def test_entropy_from_the_update_gives_the_same_gradient(loss_mode, gtpo, settings):
    """λA before the update, δ and −γ⟨H⟩ in the actor: as if the advantages had come whole, at any ratio."""
    gtpo = {"completion_filter": "always", "entropy_threshold": 0.201} | gtpo  # ⟨H⟩ is 0.2 in both
    without = advantages(entropy_coeff=0, completion_filter="never")
    inputs = UpdateInputs.make(without[:, 1], GTPOConfig(**gtpo), None)
    from_update = gradient(loss_mode, without, LOG_RATIO, inputs=inputs, **settings)
    torch.testing.assert_close(from_update, gradient(loss_mode, advantages(**gtpo), LOG_RATIO, **settings))


def test_with_the_entropy_from_the_update_a_second_epoch_starts_from_the_same_advantages():
    without = advantages(entropy_coeff=0, completion_filter="never")
    inputs = UpdateInputs.make(without[:, 1], GTPOConfig(), 0.9)
    arguments = worker_arguments(OLD_LOG_PROB, "gtpo", without, inputs=inputs)
    before = arguments[-1]["advantages"].values().clone()
    first, second = (ppo_loss(*arguments)[0] for _ in range(2))
    assert first == second and torch.equal(arguments[-1]["advantages"].values(), before)


@pytest.mark.parametrize(("entropy", "sound"), [(-3.0, False), (-0.2, True), (3.0, True), (40.0, False)])
def test_an_entropy_that_no_distribution_has_is_an_error_before_the_loss(entropy, sound):
    without = advantages(entropy_coeff=0, completion_filter="never")
    inputs = UpdateInputs.make(without[:, 1], GTPOConfig(), 0.9)._replace(row=torch.tensor([4, 9]))
    config, output, data = worker_arguments(OLD_LOG_PROB, "gtpo", without, inputs=inputs)
    output["entropy"] = output["entropy"] * 0 + entropy
    if sound:
        ppo_loss(config, output, data)
    config.model_config = SimpleNamespace(tokenizer=range(8))
    if sound:
        ppo_loss(config, output, data)
    else:
        with pytest.raises(ValueError, match=rf"row 0 \(.* batch 4\) .*{entropy:.4g} nats.* 0 to 2\.773"):
            ppo_loss(config, output, data)


def test_verls_own_entropy_bonus_keeps_its_gradient_beside_gtpos():
    """The entropy here is −log_prob and a constant: the bonus pushes each log-probability down by its weight."""
    without = advantages(entropy_coeff=0, completion_filter="never")
    inputs = UpdateInputs.make(without[:, 1], GTPOConfig(), 0.9)
    plain, with_bonus = (gradient("gtpo", without, inputs=inputs, entropy_coeff=x) for x in (0, 0.3))
    torch.testing.assert_close(with_bonus - plain, 0.3 * WEIGHT)


def test_under_bypass_mode_the_loss_rejects_what_its_own_section_says(compose_config):
    """The remedy of `preflight`, from the command line to the gradient; ratios above 1.2 and below 1/1.2 go."""
    config = compose_config(
        "algorithm.rollout_correction.bypass_mode=true",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.2",
        "actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode",
        "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
    )
    OmegaConf.resolve(config)
    policy_loss = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    unclipped = torch.ones(RESPONSES.shape) * MASK
    grad = gradient(policy_loss.loss_mode, unclipped, LOG_RATIO, rollout_correction=policy_loss.rollout_correction)
    assert torch.equal(grad != 0, (LOG_RATIO.exp() < 1.2) & (LOG_RATIO.exp() > 1 / 1.2) & MASK.bool())


@pytest.mark.parametrize(("loss_agg_mode", "loss"), [("token-mean", 3 / 8), ("seq-mean-token-mean", 1.0)])
def test_bypass_mode_divides_a_token_mean_by_tokens_that_it_has_rejected(loss_agg_mode, loss):
    """verl #4852: of 8 tokens, all with the advantage −1, it keeps 3, and their mean is 1."""
    response_mask = torch.ones(2, 4)
    log_ratio = torch.full((2, 4), 2.0)
    log_ratio[0, :2] = log_ratio[1, 0] = 0.0
    correction = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="0.5_2.0")
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=2,
        ppo_micro_batch_size_per_gpu=2,
        policy_loss=PolicyLossConfig(loss_mode="bypass_mode", rollout_correction=correction),
    )
    config.global_batch_info.update(dp_size=1, batch_num_tokens=8, global_batch_size=2)
    zeros = torch.zeros(2, 4)
    found, _ = get_policy_loss_fn("bypass_mode")(
        zeros, log_ratio, -response_mask, response_mask, loss_agg_mode=loss_agg_mode, config=config
    )
    assert found.item() == pytest.approx(loss)


def test_reinforce_of_bypass_mode_keeps_the_conflict_weights():
    """`loss_mode=bypass_mode` has two losses; here it stands without bypass, from which its weights would come."""
    reinforce = RolloutCorrectionConfig(rollout_is="token", loss_type="reinforce")
    grad = gradient("bypass_mode", advantages(), LOG_RATIO, rollout_correction=reinforce)
    torch.testing.assert_close(grad, -advantages() * LOG_RATIO.exp() * WEIGHT)


def test_sequence_ratio_of_gspo_counts_conflict_tokens():
    """λ = 0 takes the gradient from a token, not the token from the ratio that decides whether a completion clips."""
    drifted = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-0.6, 0.0, -0.6, 0.0]])
    assert gradient("vanilla", advantages(), drifted)[1, 1] > 0
    assert not gradient("gspo", advantages(), drifted)[1].any()
    raised = gradient("gspo", advantages(), -drifted)[1]
    torch.testing.assert_close(raised, -(advantages() * WEIGHT)[1] * torch.tensor(0.4).exp())


def test_geo_mean_averages_the_conflict_weights_over_the_completion():
    """Every token of the good one gets mean λ = 6/4, the token of the bad one mean λ = 1/3."""
    grad = gradient("geo_mean", advantages())
    plain = gradient("geo_mean", advantages(conflict_span="none"))
    torch.testing.assert_close(plain, -advantages(conflict_span="none") * WEIGHT)
    torch.testing.assert_close(grad[0], plain[0] * 6 / 4)
    torch.testing.assert_close(grad[1], plain[1] * torch.tensor([0, 1 / 3, 0, 0]))


def test_geo_mean_leaves_tokens_of_weight_0_out_of_its_ratio():
    drifted = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.0, 0.1, 0.0]])
    torch.testing.assert_close(gradient("geo_mean", advantages(), drifted), gradient("geo_mean", advantages()))
    plain = advantages(conflict_span="none")
    assert (gradient("geo_mean", plain, drifted)[1, :3] > gradient("geo_mean", plain)[1, :3]).all()


def test_clip_cov_drops_conflict_tokens_because_of_their_weight():
    """λ = 2 lifts the covariance of advantage and log-probability from 0.9 to 1.3, above verl's bound of 1."""
    log_prob = torch.tensor([[-0.01, -3.5, -3.5, -0.01], [-0.01, -3.5, -0.01, 0.0]])
    plain = advantages(conflict_span="none")
    kept = gradient("clip_cov", plain, old_log_prob=log_prob, clip_cov_ratio=1.0, clip_cov_ub=1.5)
    assert (kept[0] < 0).all()
    grad = gradient("clip_cov", advantages(), old_log_prob=log_prob, clip_cov_ratio=1.0, clip_cov_ub=1.5)
    assert grad[0, 0] == grad[0, 3] == 0
    torch.testing.assert_close(grad[0, 1:3], kept[0, 1:3])


def test_kl_cov_penalises_tokens_of_weight_0_in_later_updates():
    """The penalty is |log ratio|, not scaled by λ: a conflict token that has become likelier is pushed down."""
    raised = torch.full(OLD_LOG_PROB.shape, 0.1)
    grad = gradient("kl_cov", advantages(), raised, kl_cov_ratio=1.0, ppo_kl_coef=0.3)
    torch.testing.assert_close(grad, (0.3 - advantages() * torch.tensor(0.1).exp()) * WEIGHT)
    assert grad[1, 0] > 0


def test_kl_cov_chooses_tokens_by_their_conflict_weight():
    """The one token of highest covariance is penalised: λ moves the penalty from bad's last token to good's first."""
    log_prob = torch.tensor([[-0.3, -0.94, -0.94, -0.94], [-0.94, -0.94, -2.0, 0.0]])

    def penalised(advantages):
        kwargs = {"log_ratio": 1e-3, "old_log_prob": log_prob}
        with_penalty = gradient("kl_cov", advantages, **kwargs, ppo_kl_coef=0.3)
        return (with_penalty != gradient("kl_cov", advantages, **kwargs, ppo_kl_coef=0.0)).nonzero().tolist()

    assert penalised(advantages(conflict_span="none")) == [[1, 2]]
    assert penalised(advantages()) == [[0, 0]]


def test_dro_pulls_tokens_of_weight_0_back_in_later_updates():
    grad = gradient("dro", advantages(), LOG_RATIO, dro_beta=0.5)
    torch.testing.assert_close(grad, (0.5 * LOG_RATIO - advantages()) * WEIGHT)
    assert grad[1, 0] > 0


def test_kl_loss_reaches_tokens_of_weight_0():
    grad = gradient("gtpo", advantages(), ref_log_prob=OLD_LOG_PROB - 0.5)
    assert grad[1, 0] > 0 and grad[1, 2] > 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_mode", sorted(POLICY_LOSS_REGISTRY))
def test_rollout_importance_weights_multiply_after_the_conflict_weights(loss_mode, level):
    """Truncated importance sampling: a token's gradient times min(π_old / π_rollout, 2), λ = 0 stays 0."""
    mismatch = torch.tensor([[0.2, -0.3, 1.0, 0.0], [0.5, -0.1, 0.1, 0.0]])
    protocol, _, _ = compute_rollout_correction_and_rejection_mask(
        OLD_LOG_PROB, OLD_LOG_PROB - mismatch, MASK, rollout_is=level, rollout_is_threshold=2.0
    )
    weights = protocol.batch["rollout_is_weights"]
    log_weight = mismatch if level == "token" else (mismatch * MASK).sum(-1, keepdim=True).expand_as(mismatch)
    torch.testing.assert_close(weights, log_weight.exp().clamp(max=2.0) * MASK)

    grad = gradient(loss_mode, advantages(), weights=weights)
    assert grad[1, 0] == grad[1, 2] == 0
    if loss_mode == "geo_mean":  # one weight per completion, conflict tokens included
        weights = ((weights.log() * MASK).nan_to_num().sum(-1, keepdim=True) / LENGTHS.unsqueeze(-1)).exp()
    elif loss_mode == "bypass_mode":  # makes its own weights
        weights = torch.ones(())
    torch.testing.assert_close(grad, weights * gradient(loss_mode, advantages()))


def test_a_copied_row_counts_in_its_group_as_in_grpo(stage):
    """A trainer may fill a batch with copies of its rows."""
    once = make_rows(uids=["p", "p", "p"], lengths=[3, 3, 3], scores=[20.0, 10.0, 0.0])
    copied = {name: [*column, column[0]] for name, column in once.items()}
    off = [f"++algorithm.gtpo.{word}" for word in ("entropy_coeff=0", "completion_filter=never", "conflict_span=none")]
    found = {}
    for name, rows in {"once": once, "copied": copied}.items():
        _, gtpo = stage(*off, rows=rows).step()
        _, grpo = stage("algorithm.adv_estimator=grpo", rows=rows).step()
        torch.testing.assert_close(gtpo, grpo)
        found[name] = gtpo[0, 0].item()
    assert 0 < found["copied"] < found["once"]
