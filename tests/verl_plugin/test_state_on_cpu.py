"""A step of verl's trainers from the batch to the metrics of its update."""

from contextvars import Context

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle
from rollout_batch import UIDS, expected, padded, real_mean_entropy
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.ppo import core_algos
from verl.utils.metric import reduce_metrics

from gtpo_verl import GTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import compat, hooks
from gtpo_verl.verl_plugin.state import current, estimate_gtpo_advantage
from gtpo_verl.verl_plugin.update_pass import ENTROPIES, RowEntropy, UpdateInputs

KNOWN = "algorithm.gtpo.initial_entropy=0.3"
ORDER = [4, 2, 0, 5, 1, 3]


def test_with_the_entropy_from_the_update_metrics_and_advantages_are_the_same(stage, rows, tmp_path):
    """The trainer's rows have λA and ⟨H⟩ is asked of the update, whose metrics then bring what is logged otherwise."""
    gtpo = ["algorithm.gtpo.completion_filter=always", "+algorithm.gtpo.entropy_threshold=0.5"]
    before, whole = stage(*gtpo).step(ORDER)
    record = InitialEntropy.path(tmp_path / "checkpoints")
    value = InitialEntropy.load(record.parent).value
    record.unlink()

    from_update = stage(*gtpo, "algorithm.gtpo.entropy_from=update")
    metrics, advantages = from_update.step(ORDER)
    assert (advantages != whole).any()
    torch.testing.assert_close(from_update.in_own_order(from_update.used), whole)
    assert metrics.pop("timing_s/gtpo") > 0 and before.pop("timing_s/gtpo") > 0
    assert metrics == pytest.approx(before)
    assert InitialEntropy.load(record.parent).value == pytest.approx(value)


@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
def test_a_step_that_no_update_followed_is_an_error_at_the_next(stage, entropy_from):
    gtpo = stage(KNOWN, f"algorithm.gtpo.entropy_from={entropy_from}")
    gtpo.advantages()
    gtpo.trainer.global_steps = 2
    with pytest.raises(RuntimeError, match="step 1 .*no actor update"):
        gtpo.advantages()


def test_a_batch_may_be_estimated_twice_in_a_step(stage):
    gtpo = stage(KNOWN)
    gtpo.advantages()
    gtpo.advantages()
    assert "gtpo/entropy/mean" in gtpo.update()


def test_the_update_of_the_step_that_ends_the_warm_up_is_missed(stage):
    gtpo = stage(KNOWN, "trainer.critic_warmup=3")
    for gtpo.trainer.global_steps in (2, 3):
        gtpo.advantages()
    gtpo.trainer.global_steps = 4
    with pytest.raises(RuntimeError, match="step 3 .*no actor update"):
        gtpo.advantages()


def test_after_its_loop_a_trainer_leaves_the_process_as_it_was(make_stage):
    trainer, before = make_stage("v1", KNOWN, "+trainer.collapse_watch=warn").trainer, current()
    inside, monitor = hooks.fit(lambda: (current(), current().monitor), trainer)
    assert inside.trainer is trainer and monitor is not None
    assert current() is before and inside.monitor is None


def test_a_critic_may_be_warmed_up_first(stage):
    gtpo = stage(KNOWN, "algorithm.gtpo.entropy_from=update", "trainer.critic_warmup=3")
    for step in (1, 2):
        gtpo.trainer.global_steps = step
        gtpo.advantages()
        assert reduce_metrics({"critic/vf_loss": [1.0]}) == {"critic/vf_loss": 1.0}
    gtpo.trainer.global_steps = 3
    assert "gtpo/entropy/mean" in gtpo.step()[0]


def test_an_actor_whose_loss_did_not_apply_the_entropy_is_an_error(stage):
    gtpo = stage(KNOWN, "algorithm.gtpo.entropy_from=update")
    gtpo.advantages()
    assert UpdateInputs.from_batch(gtpo.batch) is not None
    with pytest.raises(RuntimeError, match=r"algorithm\.gtpo\.entropy_from=update, .*loss .*entropy"):
        reduce_metrics({"actor/my_loss": [1.0]})


def test_grpo_in_the_same_process_is_verls(stage, rows):
    stage(KNOWN).step()
    grpo = stage("algorithm.adv_estimator=grpo")
    metrics, advantages = grpo.step()
    verls, _ = core_algos.compute_grpo_outcome_advantage(
        padded(rows, "rm_scores"), padded(rows, "response_mask"), np.array(UIDS)
    )
    assert torch.equal(advantages, verls) and metrics == {}
    assert not any("gtpo" in name for name in grpo.batch.keys())


def test_fully_async_under_bypass_mode_completes_its_advantages_in_the_actor(make_stage, rows):
    """Its trainer is an actor of Ray, and makes no old-log-prob pass: no other hook comes before the advantages'."""
    stage = make_stage(
        "legacy",
        *(KNOWN, "algorithm.gtpo.entropy_from=update", "+algorithm.gtpo.entropy_threshold=0.5"),
        "algorithm.rollout_correction.bypass_mode=True",
    )
    trainer = stage.trainer
    actor = ray.remote(type("Trainer", (SeparateRayPPOTrainer,), {}))
    trainer.__class__ = cloudpickle.loads(cloudpickle.dumps(actor.__ray_metadata__.modified_class))
    trainer.metrics, trainer.timing_raw, trainer.reward_extra_infos_dict = {}, {}, {}
    trainer.reward_tensor = padded(rows, "rm_scores")
    stage.batch = trainer._fit_compute_advantage(stage.data()).batch
    metrics = stage.update()
    config = GTPOConfig(entropy_threshold=0.5, initial_entropy=0.3)
    torch.testing.assert_close(stage.used, expected(rows, config=config))
    assert metrics["gtpo/entropy/mean"] == pytest.approx(real_mean_entropy(rows))
    assert metrics["gtpo/entropy/initial"] == 0.3 and 0 < metrics["gtpo/filter/dropped_frac"] < 1


def test_a_row_of_which_the_update_said_nothing_is_named(stage):
    gtpo = stage(KNOWN, "algorithm.gtpo.entropy_from=update")
    gtpo.advantages()
    said = [RowEntropy(row, 0.2, None) for row in range(6) if row != 2]
    with pytest.raises(ValueError, match=r"entropy .*row 2 \(uid q\) .*nan"):
        reduce_metrics({"actor/pg_loss": [1.0], f"actor/{ENTROPIES}": said})


def test_a_second_batch_before_the_update_of_the_first_is_an_error(stage):
    gtpo = stage(KNOWN, "algorithm.gtpo.entropy_from=update")
    gtpo.advantages()
    with pytest.raises(RuntimeError, match="no actor update"):
        gtpo.advantages()


def test_advantages_of_a_batch_that_were_asked_for_already_are_an_error(stage):
    gtpo = stage(KNOWN)
    gtpo.advantages()
    with pytest.raises(RuntimeError, match=r"algorithm\.adv_estimator=gtpo .*without token ids"):
        estimate_gtpo_advantage(torch.zeros(6, 6), torch.ones(6, 6), index=np.array(UIDS))


def test_why_gtpo_cannot_run_is_said_where_no_trainer_was_hooked(monkeypatch):
    monkeypatch.setattr(compat, "load_errors", {"verl is broken": None})
    with pytest.raises(RuntimeError, match="verl is broken"):
        Context().run(estimate_gtpo_advantage, torch.zeros(1, 1), torch.ones(1, 1))
