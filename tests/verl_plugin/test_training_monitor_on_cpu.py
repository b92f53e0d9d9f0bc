"""The watch in training: what it takes of verl's config and log, and what it does; its rules are in tests/monitor."""

import re
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from gtpo_verl.verl_plugin import hooking, hooks, training_monitor
from gtpo_verl.verl_plugin.training_monitor import CollapseError, TrainingMonitor

STEPS = 12
HEALTHY = {
    "actor/entropy": 0.1,
    "actor/lr": 1e-4,
    "critic/score/mean": 15.0,
    "reward/strict/mean": 0.95,
    "completion/eos_rate": 1.0,
    "response_length/mean": 30.0,
    "gtpo/group/zero_std_frac": 0.3,
}


LOST = {"critic__score__mean": 0.0}


def run(**changed):
    """A run that is healthy for a while, then changed for longer."""
    after = HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()}
    return [{"training/global_step": step, **(HEALTHY if step < 2 * STEPS else after)} for step in range(5 * STEPS)]


def trainer(choice, batch_size=8, loss_agg_mode="token-mean"):
    config = {
        "trainer": {"collapse_watch": choice, "save_freq": -1, "max_actor_ckpt_to_keep": 2},
        "data": {"max_response_length": 64, "train_batch_size": batch_size},
        "actor_rollout_ref": {"rollout": {"n": 8}, "actor": {"loss_agg_mode": loss_agg_mode}},
    }
    return SimpleNamespace(config=OmegaConf.create(config))


def watch(watched, records):
    """The records up to the one at which the trainer's run ends."""
    watch = TrainingMonitor.of(watched)
    for record in records:
        yield record
        watch.on_log(record)


def test_an_entropy_that_verl_sums_is_not_watched(caplog):
    assert [*watch(trainer("warn", loss_agg_mode="seq-mean-token-sum"), run(actor__entropy=90.0))]
    (message,) = caplog.messages
    assert message.startswith("trainer.collapse_watch: entropy ") and "loss_agg_mode=seq-mean-token-sum" in message


def test_a_lost_reward_ends_a_run_with_its_numbers_and_what_to_do():
    with pytest.raises(CollapseError) as raised:
        [*watch(trainer("stop"), run(**LOST))]
    message = str(raised.value)
    assert re.match(r"trainer\.collapse_watch=stop, .* step \d+ written: FAILED ", message)
    assert re.search(r"step 24: reward fell .*15 .*0\. ", message) and "before step 24" in message
    assert "Try actor_rollout_ref.actor.optim.lr=5e-05." in message


def test_a_run_of_few_completions_a_step_is_not_ended_so_soon():
    assert len([*watch(trainer("stop", batch_size=1), run(**LOST))]) == 5 * STEPS


def test_a_reward_that_falls_to_0_ends_a_run_that_logs_verls_own_metrics_alone():
    """Which have no accuracy."""
    records = [{"critic/score/mean": 0.6 if n < 60 else 0.0, "training/global_step": n} for n in range(100)]
    with pytest.raises(CollapseError, match="reward fell from"):
        [*watch(trainer("stop"), records)]


@pytest.mark.parametrize("metric", ["completion__eos_rate", "reward__strict__mean"])
def test_lost_endings_or_format_end_a_run_only_if_that_was_asked_for(caplog, metric):
    assert len([*watch(trainer("stop"), run(**{metric: 0.2}))]) == 5 * STEPS
    assert "before step 24" in caplog.text
    with pytest.raises(CollapseError, match=r"collapse_watch=stop_format, .* step \d+ written"):
        [*watch(trainer("stop_format"), run(**{metric: 0.2}))]


def longer(step):
    """A step of a run whose reasoning grows until it reaches the limit, as in a public run."""
    return {
        "training/global_step": step,
        "critic/score/mean": -0.57 + 0.001 * step,
        "critic/score/min": -1.0,
        "critic/score/max": 1.0,
        "response_length/mean": 15 + 0.15 * step,
        "response_length/max": 64 if step > 60 else 50,
        "response_length/clip_ratio": 0.0009 * step,
        "actor/entropy": 0.25 + 0.003 * step,
    }


def shorter(step):
    """A step of a run whose agent needs fewer and fewer turns, as in another public run."""
    return {
        "training/global_step": step,
        "critic/score/mean": min(0.52 + 0.004 * step, 0.98),
        "critic/score/max": 1.0,
        "response_length/mean": max(50 - 0.4 * step, 6),
        "actor/entropy": max(0.08 - 0.0006 * step, 0.005),
    }


@pytest.mark.parametrize("record", [longer, shorter])
def test_a_run_whose_score_is_at_its_best_is_not_ended_by_its_lengths_endings_or_entropy(caplog, record):
    records = [record(step) for step in range(240)]
    assert len([*watch(trainer("stop_format"), records)]) == 240
    assert caplog.text == ""


def test_stop_saves_at_the_next_step_and_then_ends_the_run():
    stopped, saved = trainer("stop"), []
    with pytest.raises(CollapseError, match=r"collapse_watch=stop, .* written: .*reward fell"):
        for _ in watch(stopped, run(**LOST)):
            saved.append((stopped.config.trainer.save_freq, stopped.config.trainer.max_actor_ckpt_to_keep))
    assert saved[-2:] == [(-1, 2), (1, None)] and len(saved) < 4 * STEPS


def test_it_follows_what_a_trainer_of_verl_logs_under_grpo():
    """Through the hooks, with verl's own `Tracking`; verl's trainers differ in nothing that the hooks touch."""

    class RayPPOTrainer:
        config = OmegaConf.merge(trainer("stop").config, {"algorithm": {"adv_estimator": "grpo"}})

        def fit(self):
            tracking = Tracking("project", "experiment", [])
            for record in run(**LOST):
                tracking.log(data=record, step=record["training/global_step"])

    hooking.hook_into("RayPPOTrainer.fit", hooks.fit, SimpleNamespace(__name__="verl", RayPPOTrainer=RayPPOTrainer))
    with pytest.raises(CollapseError, match="reward fell from"):
        RayPPOTrainer().fit()
    Tracking("project", "experiment", []).log({"training/global_step": 1}, step=1)  # outside of a trainer


def test_warn_only_warns(caplog):
    watched = trainer("warn")
    assert len([*watch(watched, run(**LOST))]) == 5 * STEPS
    (message,) = caplog.messages
    assert message.startswith("monitor of collapse") and "FAILED" in message and "step 24: reward fell" in message
    assert watched.config.trainer.save_freq == -1


def test_completions_that_verl_cuts_off_are_seen_without_any_metric_of_ours(caplog):
    records = []
    for step in range(60):
        longest = 64 if step > 20 else 50
        record = {"response_length/max": longest, "response_length/clip_ratio": 0.6, "training/global_step": step}
        records.append(record)
    assert [*watch(trainer("warn"), records)]
    assert re.search(r"EOS fell .*1 to 0\.4", caplog.text)


def test_what_a_validation_or_a_reward_function_logs_ends_no_run():
    odd = {"val-core/a/acc/mean@1": None, "reward/pred/mean": "a text", "critic/score/mean": 10**400}
    assert len([*watch(trainer("stop"), [odd, *(x | {"reward/tag/mean": [1]} for x in run())])]) == 5 * STEPS + 1


@pytest.mark.parametrize("choice", [None, "none", False])
def test_nothing_is_watched_unless_it_is_asked_for(choice):
    assert TrainingMonitor.of(trainer(choice)) is None


def test_a_choice_that_is_none_is_an_error():
    with pytest.raises(ValueError, match=r"trainer\.collapse_watch=off: .* none, warn, stop, stop_format"):
        training_monitor.read_mode(trainer("off").config)


def test_a_trainer_with_a_loop_of_its_own_is_not_watched_in_silence(compose_config):
    """verl's one_step_off and fully_async, whose configs have a section `rollout`."""
    with pytest.raises(ValueError, match=r"trainer\.collapse_watch=warn: .*trainer\.v1\.trainer_mode=separate_async"):
        training_monitor.read_mode(compose_config("+trainer.collapse_watch=warn", "+rollout.nnodes=1"))
    assert training_monitor.read_mode(compose_config("+rollout.nnodes=1")) == "none"


def test_a_validation_alone_does_not_end_a_run_that_verl_has_yet_to_save():
    watch, step = TrainingMonitor.of(stopped := trainer("stop")), 0
    while stopped.config.trainer.save_freq != 1:
        watch.on_log({"training/global_step": step, "critic/score/mean": 15.0 if step < 2 * STEPS else 0.0})
        step += 1
    watch.on_log({"val-core/acc/mean@1": 0.1})
    with pytest.raises(CollapseError, match=f"step {step} written"):
        watch.on_log({"training/global_step": step, "critic/score/mean": 0.0})
