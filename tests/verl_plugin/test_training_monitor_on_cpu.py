"""The watch in training: what it takes of verl's config and log, and what it does; its rules are in tests/monitor."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from gtpo_verl import verl_plugin
from gtpo_verl.monitor.signs import STEPS
from gtpo_verl.verl_plugin import hooks, training_monitor
from gtpo_verl.verl_plugin.training_monitor import CollapseError, TrainerWatch

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


def trainer(choice, batch_size=8, loss_agg_mode="token-mean"):
    config = {
        "trainer": {"collapse_watch": choice, "save_freq": -1},
        "data": {"max_response_length": 64, "train_batch_size": batch_size},
        "actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"loss_agg_mode": loss_agg_mode}},
    }
    return SimpleNamespace(config=OmegaConf.create(config))


def watch(watched, records):
    """The records up to the one at which the trainer's run ends."""
    watch = TrainerWatch.of(watched)
    for record in records:
        yield record
        watch.logged(record)


def test_an_entropy_that_verl_sums_is_not_watched(caplog):
    assert [*watch(trainer("warn", loss_agg_mode="seq-mean-token-sum"), run(actor__entropy=90.0))]
    (said,) = caplog.messages
    assert "entropy is not watched, since verl sums it under loss_agg_mode=seq-mean-token-sum" in said


def test_signs_that_show_in_one_step_are_all_said():
    records = run()
    records[25] |= {"reward/strict/mean": -9.0, "completion/eos_rate": -9.0}
    with pytest.raises(CollapseError) as raised:
        [*watch(trainer("stop"), records)]
    assert str(raised.value) == (
        "trainer.collapse_watch=stop, checkpoint of step 26 written: some completions no longer end: completions that "
        "end 0 (first 1, best 1), means over 10 steps. Try: actor_rollout_ref.actor.optim.lr=5e-05; completions are no "
        "longer the format alone, which the format reward does not see: format and nothing else -0.045 (first 0.95, "
        "best 0.95), means over 10 steps. Try: actor_rollout_ref.actor.optim.lr=5e-05"
    )


def test_it_averages_over_more_steps_where_these_have_few_completions(caplog):
    assert [*watch(trainer("warn", batch_size=4), run(completion__eos_rate=0.5))]
    assert "best 1), means over 20 steps" in caplog.text


def test_stop_saves_at_the_next_step_and_then_ends_the_run():
    stopped, saved = trainer("stop"), []
    with pytest.raises(CollapseError, match="collapse_watch=stop, checkpoint of step .*no longer end"):
        for _ in watch(stopped, run(completion__eos_rate=0.5)):
            saved.append(stopped.config.trainer.save_freq == 1)
    assert saved[-2:] == [False, True] and len(saved) < 3 * STEPS


def test_it_follows_what_a_trainer_of_verl_logs_under_grpo():
    """Through the hooks, with verl's own `Tracking`; verl's trainers differ in nothing that the hooks touch."""

    class RayPPOTrainer:
        config = OmegaConf.merge(trainer("stop").config, {"algorithm": {"adv_estimator": "grpo"}})

        def fit(self):
            tracking = Tracking("project", "experiment", [])
            for record in run(completion__eos_rate=0.5):
                tracking.log(data=record, step=record["training/global_step"])

    verl_plugin._hook_into(
        "RayPPOTrainer.fit", hooks.fit, SimpleNamespace(__name__="verl", RayPPOTrainer=RayPPOTrainer)
    )
    with pytest.raises(CollapseError, match="no longer end"):
        RayPPOTrainer().fit()
    Tracking("project", "experiment", []).log({"training/global_step": 1}, step=1)  # outside of a trainer


def test_warn_only_warns(caplog):
    watched, records = trainer("warn"), run(response_length__mean=63.0)
    assert [*watch(watched, [x for record in records for x in ({"val-core/acc": 0.1}, record)])]  # with validations
    (said,) = caplog.messages
    assert said == (
        "watch for collapse, step 28: completions grow to the limit: length, tokens 59.7 (first 30, best 59.7), "
        "means over 10 steps. Try: data.max_response_length=128"
    )
    assert watched.config.trainer.save_freq == -1


def test_a_sign_whose_limit_is_not_calibrated_stops_no_run(caplog):
    assert len([*watch(trainer("stop"), run(actor__entropy=0.9))]) == 4 * STEPS
    assert "drifts towards noise (uncalibrated)" in caplog.text


def test_completions_that_verl_cuts_off_are_seen_without_any_metric_of_ours(caplog):
    records = [{"response_length/max": 64 if step > 20 else 50, "training/global_step": step} for step in range(40)]
    assert [*watch(trainer("warn"), [record | {"response_length/clip_ratio": 0.5} for record in records])]
    assert "some completions no longer end: completions that end 0.85 (first 1, best 1)" in caplog.text


@pytest.mark.parametrize("choice", [None, "none", False])
def test_nothing_is_watched_unless_it_is_asked_for(choice):
    assert TrainerWatch.of(trainer(choice)) is None


def test_a_choice_that_is_none_is_an_error():
    with pytest.raises(ValueError, match="trainer.collapse_watch=off: must be one of none, warn, stop"):
        training_monitor.read_mode(trainer("off").config)


def test_a_trainer_with_a_loop_of_its_own_is_not_watched_in_silence(compose_config):
    """verl's one_step_off and fully_async, whose configs have a section `rollout`."""
    with pytest.raises(ValueError, match="trainer.collapse_watch=warn: .* which it does not watch; remove it"):
        training_monitor.read_mode(compose_config("+trainer.collapse_watch=warn", "+rollout.nnodes=1"))
    assert training_monitor.read_mode(compose_config("+rollout.nnodes=1")) == "none"
