from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from gtpo_verl import verl_plugin
from gtpo_verl.diagnose.signs import STEPS
from gtpo_verl.verl_plugin import collapse, trainer_hooks
from gtpo_verl.verl_plugin.collapse import CollapseError, TrainerWatch

HEALTHY = {
    "actor/entropy": 0.1,
    "actor/lr": 1e-4,
    "critic/score/mean": 15.0,
    "reward/strict/mean": 0.95,
    "completion/eos_rate": 1.0,
    "response_length/mean": 30.0,
    "gtpo/group/zero_std_frac": 0.3,
}


def run(**changed):
    """A run that is healthy for two windows, then changed for two."""
    after = HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()}
    return [{"training/global_step": step, **(HEALTHY if step < 2 * STEPS else after)} for step in range(4 * STEPS)]


def trainer(choice):
    trainer = {"collapse_watch": choice, "save_freq": -1} if choice else {"save_freq": -1}
    return SimpleNamespace(
        config=OmegaConf.create(
            {
                "trainer": trainer,
                "data": {"max_response_length": 64, "train_batch_size": 8},
                "actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"loss_agg_mode": "token-mean"}},
            }
        )
    )


def test_an_entropy_that_verl_sums_is_not_watched(caplog):
    summed = trainer("warn")
    summed.config.actor_rollout_ref.actor.loss_agg_mode = "seq-mean-token-sum"
    watch = TrainerWatch.of(summed)
    assert "entropy is not watched, since verl sums it under loss_agg_mode=seq-mean-token-sum" in caplog.text
    caplog.clear()
    for step in range(60):
        watch.logged({"training/global_step": step, "actor/entropy": 30.0 + 2 * step})
    assert not caplog.text


def test_signs_that_show_in_one_step_are_all_said():
    records = run()
    records[25] |= {"reward/strict/mean": -9.0, "completion/eos_rate": -9.0}
    watch = TrainerWatch.of(trainer("stop"))
    with pytest.raises(CollapseError) as raised:
        for record in records:
            watch.logged(record)
    assert str(raised.value) == (
        "trainer.collapse_watch=stop, checkpoint of step 26 written: some completions no longer end: completions that "
        "end 0 (first 1, best 1), means over 10 steps. Try: actor_rollout_ref.actor.optim.lr=5e-05; text appears "
        "outside the format, which the format reward does not see: format and nothing else -0.045 (first 0.95, best "
        "0.95), means over 10 steps. Try: actor_rollout_ref.actor.optim.lr=5e-05"
    )


def test_a_sign_of_two_metrics_gives_both(caplog):
    watch = TrainerWatch.of(trainer("warn"))
    for record in run(gtpo__group__zero_std_frac=1.0, critic__score__mean=12.0):
        watch.logged(record)
    numbers = "groups with equal rewards 1 (first 0.3, best 1), reward 12 (first 15, best 15)"
    assert f": {numbers}, means over 10 steps. Try: " in caplog.text


def test_it_averages_over_more_steps_where_these_have_few_completions(caplog):
    few = trainer("warn")
    few.config.data.train_batch_size = 4
    watch = TrainerWatch.of(few)
    for record in run(completion__eos_rate=0.5):
        watch.logged(record)
    assert "best 1), means over 20 steps" in caplog.text


def test_stop_saves_at_the_next_step_and_then_ends_the_run():
    stopped = trainer("stop")
    watch = TrainerWatch.of(stopped)
    with pytest.raises(CollapseError, match="collapse_watch=stop, checkpoint of step .*no longer end"):
        for record in run(completion__eos_rate=0.5):
            saves = stopped.config.trainer.save_freq == 1
            watch.logged(record)
    assert saves
    assert record["training/global_step"] < 3 * STEPS


def test_it_follows_what_a_trainer_of_verl_logs_under_grpo():
    """Through the hooks, with verl's own `Tracking`; verl's trainers differ in nothing that the hooks touch."""

    class RayPPOTrainer:
        config = OmegaConf.merge(trainer("stop").config, {"algorithm": {"adv_estimator": "grpo"}})

        def fit(self):
            tracking = Tracking("project", "experiment", [])
            for record in run(completion__eos_rate=0.5):
                tracking.log(data=record, step=record["training/global_step"])

    verl_plugin._hook_into(
        "RayPPOTrainer.fit", trainer_hooks.fit, SimpleNamespace(__name__="verl", RayPPOTrainer=RayPPOTrainer)
    )
    with pytest.raises(CollapseError, match="no longer end"):
        RayPPOTrainer().fit()
    Tracking("project", "experiment", []).log({"training/global_step": 1}, step=1)  # outside of a trainer


def test_warn_only_warns(caplog):
    watched = trainer("warn")
    watch = TrainerWatch.of(watched)
    for record in run(response_length__mean=63.0):
        watch.logged({"val-core/acc": 0.1})  # a validation
        watch.logged(record)
    (said,) = caplog.messages
    assert said == (
        "watch for collapse, step 28: completions grow to the limit: length, tokens 59.7 (first 30, best 59.7), "
        "means over 10 steps. Try: data.max_response_length=128"
    )
    assert watched.config.trainer.save_freq == -1


def test_a_sign_whose_limit_is_not_calibrated_stops_no_run(caplog):
    watched = trainer("stop")
    watch = TrainerWatch.of(watched)
    for record in run(actor__entropy=0.9):
        watch.logged(record)
    assert "drifts towards noise (uncalibrated)" in caplog.text and watched.config.trainer.save_freq == -1


def test_completions_that_verl_cuts_off_are_seen_without_any_metric_of_ours(caplog):
    watch = TrainerWatch.of(trainer("warn"))
    for step in range(4 * STEPS):
        cut = {"response_length/max": 64 if step > 20 else 50, "response_length/clip_ratio": 0.5}
        watch.logged(cut | {"training/global_step": step})
    assert "some completions no longer end: completions that end 0.85 (first 1, best 1)" in caplog.text


def test_nothing_is_watched_unless_it_is_asked_for():
    assert TrainerWatch.of(trainer(None)) is None
    assert TrainerWatch.of(trainer("none")) is None
    off = trainer("none")
    off.config.trainer.collapse_watch = False
    assert TrainerWatch.of(off) is None
    with pytest.raises(ValueError, match="trainer.collapse_watch=off: must be one of none, warn, stop"):
        collapse.read_mode(trainer("off").config)


def test_a_trainer_with_a_loop_of_its_own_is_not_watched_in_silence(compose_config):
    """verl's one_step_off and fully_async, whose configs have a section `rollout`."""
    with pytest.raises(ValueError, match="trainer.collapse_watch=warn: .* which it does not watch; remove it"):
        collapse.read_mode(compose_config("+trainer.collapse_watch=warn", "+rollout.nnodes=1"))
    assert collapse.read_mode(compose_config("+rollout.nnodes=1")) == "none"
