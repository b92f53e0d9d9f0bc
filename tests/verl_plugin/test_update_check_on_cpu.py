"""Whether the batch that a trainer updated with has GTPO's advantages, through verl's own trainers and metrics."""

import math
import re

import pytest
import torch
from omegaconf import OmegaConf
from rollout_batch import make_rows
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo import core_algos, metric_utils
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking

from gtpo_verl.verl_plugin import hooks, preflight
from gtpo_verl.verl_plugin.state import current, set_current
from gtpo_verl.verl_plugin.update_check import Extremes
from gtpo_verl.verl_plugin.update_pass import ENTROPIES, RowEntropy

KNOWN = "algorithm.gtpo.initial_entropy=0.3"
UPDATE = "algorithm.gtpo.entropy_from=update"
ALLOWED = "++algorithm.gtpo.allow_changed_advantages=True"
ORDER = [4, 2, 0, 5, 1, 3]


def hand_over(*batches):
    """As verl's trainers do with what they updated with, mini-batches in one, and what verl makes of it."""

    def joined(name):
        width = max(batch[name].shape[1] for batch in batches)
        rows = [torch.nn.functional.pad(batch[name], (0, width - batch[name].shape[1])) for batch in batches]
        return torch.cat(rows)

    names = ("advantages", "returns", "response_mask", "responses", "prompts")
    tensors = {name: joined(name) for name in names}
    tensors["token_level_scores"] = tensors["token_level_rewards"] = torch.zeros(tensors["advantages"].shape)
    tensors["response_length"] = tensors["response_mask"].sum(-1).float()
    tensors["prompt_length"] = torch.ones(len(tensors["prompts"]))
    data = DataProto(batch=TensorDict(tensors, batch_size=len(tensors["prompts"])))
    return metric_utils.compute_data_metrics(batch=data, use_critic=False)


def log_with(stage):
    return Tracking("project", "experiment", "console", OmegaConf.to_container(stage.config, resolve=True))


@pytest.mark.parametrize("overrides", [(), (UPDATE,)])
def test_the_batch_that_verl_updated_with_passes_step_by_step(stage, overrides):
    gtpo = stage(KNOWN, *overrides)
    for gtpo.trainer.global_steps in (1, 2):
        gtpo.step(ORDER)
        metrics = hand_over(gtpo.batch)
        assert metrics["critic/advantages/max"] > 0 > metrics["critic/advantages/min"]


def test_padding_and_the_order_of_rows_make_no_difference(stage):
    gtpo = stage(KNOWN)
    gtpo.step()
    hand_over(gtpo.batch[[5, 3, 2, 1, 0]])  # without the fourth, which is padding


@pytest.mark.parametrize("overrides", [(), (UPDATE,)])
def test_advantages_written_over_afterwards_end_the_run_which_names_both_pairs_of_numbers(stage, overrides):
    gtpo = stage(KNOWN, *overrides)
    gtpo.step()
    own = gtpo.batch["advantages"][gtpo.batch["response_mask"].bool()]
    gtpo.batch["advantages"] = torch.full_like(gtpo.batch["advantages"], 0.25)
    with pytest.raises(RuntimeError, match="algorithm.adv_estimator asks for GTPO") as error:
        hand_over(gtpo.batch)
    assert f"{own.min():.9g} to {own.max():.9g}" in str(error.value) and "0.25 to 0.25" in str(error.value)
    assert ALLOWED in str(error.value) and "algorithm.adv_estimator=grpo" in str(error.value)


@pytest.mark.parametrize("which", ["amax", "amin"])
def test_the_last_bit_of_the_highest_and_of_the_lowest_counts(stage, which):
    gtpo = stage(KNOWN)
    gtpo.step()
    advantages = gtpo.batch["advantages"]
    extreme = getattr(advantages, which)()
    advantages[advantages == extreme] = torch.nextafter(extreme, 2 * extreme)
    with pytest.raises(RuntimeError, match="other advantages") as error:
        hand_over(gtpo.batch)
    used, estimated = re.findall(
        r"(\S+ to \S+) on its response_mask, where GTPO's were (\S+ to \S+)\. ", str(error.value)
    )[0]
    assert used != estimated


def test_a_mask_that_was_changed_afterwards_is_noticed(stage):
    gtpo = stage(KNOWN)
    gtpo.step()
    highest = gtpo.batch["advantages"] == gtpo.batch["advantages"].amax()
    gtpo.batch["response_mask"][highest] = 0
    with pytest.raises(RuntimeError, match="response_mask"):
        hand_over(gtpo.batch)


def test_a_trainer_that_never_asks_for_gtpos_advantages_ends_whatever_it_logs(make_stage):
    """Its methods are its own, so that its logger alone tells what the run asks for; it logs `policy/*`."""
    grpo = make_stage("v1", "algorithm.adv_estimator=grpo")
    grpo.step()
    set_current(None)
    log_with(make_stage("v1", KNOWN)).log({"policy/pg_loss": 1.0}, step=1)
    with pytest.raises(RuntimeError, match=r"has not asked .*super\(\)\._compute_advantage"):
        hand_over(grpo.batch)


def test_a_trainer_of_ours_that_never_asks_ends_too(stage):
    """verl's loop is known, its advantages are replaced."""
    gtpo = stage(KNOWN)
    gtpo.step()
    batch = gtpo.batch
    other = stage(KNOWN).trainer
    with pytest.raises(RuntimeError, match="has not asked"):
        hooks.fit(lambda: hand_over(batch), other)


def test_advantages_of_a_trainers_own_that_call_verls_are_gtpos(make_stage):
    """The remedy that the error names."""
    gtpo = make_stage("v1", KNOWN)

    class Own(type(gtpo.trainer)):
        def _compute_advantage(self, batch, metrics):
            return super()._compute_advantage(batch, metrics)

    gtpo.trainer.__class__ = Own
    for gtpo.trainer.global_steps in (1, 2):
        gtpo.step()
        hand_over(gtpo.batch)


def test_a_batch_may_be_updated_with_again_but_no_older_one(stage, rows):
    gtpo = stage(KNOWN)
    gtpo.step()
    first = gtpo.batch
    hand_over(first)
    hand_over(first)
    gtpo.rows = make_rows(scores=[0.0, 3.0, 1.0, 10.0, 0.0, 5.0])
    gtpo.trainer.global_steps = 2
    gtpo.step()
    hand_over(gtpo.batch)
    hand_over(gtpo.batch)
    with pytest.raises(RuntimeError, match="other advantages"):
        hand_over(first)


def test_mini_batches_between_two_weight_syncs_are_handed_over_together(stage):
    """As in verl's separate_async, whose padded batch is as wide as its longest response."""
    gtpo = stage(KNOWN)
    gtpo.step()
    first = gtpo.batch
    gtpo.rows = make_rows(lengths=[3, 2, 3, 2, 1, 3], scores=[0.0, 3.0, 1.0, 10.0, 0.0, 5.0])
    gtpo.step()
    hand_over(first, gtpo.batch)
    hand_over(first, gtpo.batch)
    gtpo.trainer.global_steps = 2
    gtpo.step()
    with pytest.raises(RuntimeError, match="other advantages"):
        hand_over(first, gtpo.batch)


def test_tokens_that_verl_rejects_count_neither_there_nor_here(stage, rows):
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    for row in rows["rollout_log_probs"][:4]:
        row[0] -= 5
    correction = "algorithm.rollout_correction.rollout_rs"
    gtpo = stage(KNOWN, f"{correction}=token_k2", f"{correction}_threshold=2.0")
    gtpo.step()
    hand_over(gtpo.batch)


def test_all_outputs_of_a_session_count(make_stage):
    lengths = [5, 4, 3, 5, 2, 6]
    rows = make_rows(uids=["p", "p", "p", "p", "p", "p"], lengths=lengths, scores=[20.0, 20.0, 1.0, 10.0, 10.0, 7.0])
    keys = ["p_0_0", "p_0_1", "p_1_0", "p_2_0", "p_2_1", "p_3_0"]
    gtpo = make_stage("v1", KNOWN, rows=rows, keys=keys)
    gtpo.step()
    hand_over(gtpo.batch)
    gtpo.step()
    gtpo.batch["advantages"][0] *= 3  # an output that is no session's last
    with pytest.raises(RuntimeError, match="other advantages"):
        hand_over(gtpo.batch)


def test_a_batch_without_a_token_is_equal_to_itself():
    no_token = Extremes.of(torch.ones(2, 3), torch.zeros(2, 3))
    assert math.isnan(no_token.highest) and no_token.equals(no_token)
    some = Extremes.of(torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[1, 1, 0]]))
    assert some == Extremes(2.0, 1.0) and no_token.join(some) == some == some.join(no_token)
    assert not no_token.equals(some)
    assert some.join(Extremes(1.5, -1.0)) == Extremes(2.0, -1.0)


def test_advantages_that_are_nan_are_not_gtpos(stage):
    gtpo = stage(KNOWN)
    gtpo.step()
    gtpo.batch["advantages"][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="nan to nan"):
        hand_over(gtpo.batch)


def test_what_is_changed_on_purpose_is_said_at_the_start_and_not_compared(stage, caplog):
    gtpo = stage(KNOWN, ALLOWED)
    preflight.check_and_log(gtpo.config)
    (told,) = [r.getMessage() for r in caplog.records if "allow_changed_advantages=True" in r.getMessage()]
    assert "not checked" in told
    gtpo.step()
    gtpo.batch["advantages"] *= 0.5
    hand_over(gtpo.batch)
    log = log_with(gtpo)
    for step in range(5):
        log.log({"actor/pg_loss": 1.0}, step=step)
    assert "compute_data_metrics" not in caplog.text


@pytest.mark.parametrize(("override", "value"), [("yes", "yes"), ("1", 1), ("null", None)])
def test_the_key_is_true_or_false(stage, override, value):
    gtpo = stage(KNOWN, f"++algorithm.gtpo.allow_changed_advantages={override}")
    with pytest.raises(ValueError, match=rf"algorithm\.gtpo\.allow_changed_advantages={value!r}: .*True or False"):
        preflight.check_and_log(gtpo.config)


def test_another_estimators_advantages_are_its_own_business(stage, monkeypatch):
    grpo = stage("algorithm.adv_estimator=grpo")
    grpo.step()
    grpo.batch["advantages"] *= 0.5
    hand_over(grpo.batch)

    def group_turn_policy_optimization(**kwargs): ...

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "gtpo", group_turn_policy_optimization)
    set_current(None)
    log_with(stage())
    assert current().update_check is None


def test_that_nothing_can_be_compared_is_said_once(stage, caplog):
    gtpo = stage(KNOWN)
    log = log_with(gtpo)
    for gtpo.trainer.global_steps in (1, 2, 3, 4):
        gtpo.step()
        log.log({"policy/pg_loss": 1.0}, step=gtpo.trainer.global_steps)
        log.log({"timing_s/step": 1.0}, step=gtpo.trainer.global_steps)
    (warning,) = [r.getMessage() for r in caplog.records if "compute_data_metrics" in r.getMessage()]
    assert "not verified" in warning and "3 logged steps" in warning and "has asked" in warning


def test_that_nobody_asked_for_gtpo_is_said_too(stage, caplog):
    log = log_with(stage(KNOWN))
    for step in range(9):
        log.log({"policy/pg_loss": 1.0}, step=step)
    (warning,) = [r.getMessage() for r in caplog.records if "compute_data_metrics" in r.getMessage()]
    assert "not verified" in warning and "has not asked" in warning


def test_what_verls_trainers_log_around_a_batch_is_not_told(stage, caplog):
    """fully_async logs a validation and the time of a weight sync before it hands over its first batch."""
    gtpo = stage(KNOWN)
    log = log_with(gtpo)
    log.log({"val-core/acc/mean@1": 1.0}, step=0)
    gtpo.step()
    log.log({"timing_s/param_sync": 1.0}, step=1)
    hand_over(gtpo.batch)
    for step in range(1, 9):
        log.log({"actor/pg_loss": 1.0}, step=step)
    assert "compute_data_metrics" not in caplog.text


def test_an_update_under_another_name_still_brings_its_entropies(stage):
    """A trainer may log `policy/*` where verl's logs `actor/*`."""
    gtpo = stage(KNOWN, UPDATE)
    gtpo.advantages()
    entropies = [RowEntropy(row, 0.2, None) for row in range(6)]
    logged = reduce_metrics({"policy/pg_loss": [1.0], f"policy/{ENTROPIES}": entropies})
    assert logged["policy/pg_loss"] == 1.0 and "gtpo/entropy/mean" in logged
    assert f"policy/{ENTROPIES}" not in logged
