import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.utils.tracking import Tracking

from gtpo_verl import verl_plugin
from gtpo_verl.verl_plugin import collapse, trainer_hooks
from gtpo_verl.verl_plugin.collapse import WINDOW, CollapseError, TrainerWatch, alarms

LOGS = sorted((Path(__file__).resolve().parents[2] / "docs/results/cpu").glob("*.jsonl"))
HEALTHY = {
    "actor/entropy": 0.1,
    "critic/score/mean": 15.0,
    "reward/format/mean": 9.5,
    "reward/acc/mean": 0.7,
    "reward/strict/mean": 0.95,
    "completion/eos_rate": 1.0,
    "response_length/mean": 30.0,
    "gtpo/filter/dropped_frac": 0.0,
    "gtpo/group/zero_std_frac": 0.3,
}


def run(**changed):
    """A run that is healthy for two windows, then changed for two."""
    after = HEALTHY | {name.replace("__", "/"): value for name, value in changed.items()}
    return [{"step": step, **(HEALTHY if step < 2 * WINDOW else after)} for step in range(4 * WINDOW)]


@pytest.mark.parametrize(
    ("changed", "meaning"),
    [
        ({"actor__entropy": 0.9}, "drifts towards noise"),
        ({"critic__score__mean": 5.0}, "reward fell below half"),
        ({"reward__format__mean": 4.0}, "lose their format"),
        ({"reward__acc__mean": 0.1}, "accuracy is lost while the format stays"),
        ({"completion__eos_rate": 0.5}, "lose their end"),
        ({"reward__strict__mean": 0.6}, "text stands beside the answer"),
        ({"response_length__mean": 63.0}, "grow to the limit"),
        ({"gtpo__filter__dropped_frac": 0.8}, "filtered out"),
        ({"gtpo__group__zero_std_frac": 1.0, "critic__score__mean": 12.0}, "nothing to learn from"),
    ],
)
def test_each_sign_is_named_once_with_its_numbers_and_a_remedy(changed, meaning):
    ((step, said),) = alarms(run(**changed), max_response_length=64, prompts_per_step=8)
    assert 2 * WINDOW <= step < 3 * WINDOW
    for name, value in changed.items():
        name = name.replace("__", "/")
        assert name in said and f"(first {HEALTHY[name]:.3g}" in said, value
    assert meaning in said and "Try: " in said
    assert "response_length/limit" not in said  # the user's own setting, no metric


def test_a_healthy_run_and_a_metric_that_is_not_logged_are_silent():
    assert alarms(run(), 64, 8) == []
    assert alarms([{"step": step, "actor/entropy": 0.2} for step in range(50)], 64, 8) == []


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ({"actor__entropy": 0.69}, {"actor__entropy": 0.70}),
        ({"critic__score__mean": 7.51}, {"critic__score__mean": 7.49}),
        ({"reward__format__mean": 4.76}, {"reward__format__mean": 4.74}),
        ({"reward__acc__mean": 0.351}, {"reward__acc__mean": 0.349}),
        ({"completion__eos_rate": 0.901}, {"completion__eos_rate": 0.899}),
        ({"reward__strict__mean": 0.851}, {"reward__strict__mean": 0.849}),
        ({"response_length__mean": 57.5}, {"response_length__mean": 57.7}),
        ({"gtpo__filter__dropped_frac": 0.5}, {"gtpo__filter__dropped_frac": 0.501}),
        (
            {"gtpo__group__zero_std_frac": 0.949, "critic__score__mean": 12.0},
            {"gtpo__group__zero_std_frac": 0.951, "critic__score__mean": 12.0},
        ),
        (
            {"gtpo__group__zero_std_frac": 1.0, "critic__score__mean": 13.51},
            {"gtpo__group__zero_std_frac": 1.0, "critic__score__mean": 13.49},
        ),
    ],
)
def test_where_each_sign_begins(within, beyond):
    assert alarms(run(**within), 64, 8) == []
    assert len(alarms(run(**beyond), 64, 8)) == 1


def test_a_run_that_begins_so_has_not_collapsed():
    """High entropy, long completions, low accuracy from the start on."""
    start = {"actor/entropy": 0.8, "response_length/mean": 60.0, "reward/acc/mean": 0.1}
    later = {"actor/entropy": 1.5, "response_length/mean": 63.0, "reward/acc/mean": 0.01}
    records = [{"step": n, **HEALTHY, **(start if n < 2 * WINDOW else later)} for n in range(4 * WINDOW)]
    assert alarms(records, 64, 8) == []


def test_one_bad_step_is_no_collapse():
    records = run()
    records[25] |= {"reward/acc/mean": 0.0, "critic/score/mean": 0.0, "completion/eos_rate": 0.1}
    assert alarms(records, 64, 8) == []


def test_a_value_that_is_not_finite_is_named_once():
    ((step, said),) = alarms(run(actor__entropy=float("nan")), 64, 8)
    assert step == 2 * WINDOW and said.startswith("actor/entropy is nan")


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_no_false_alarm_on_healthy_runs(log):
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert alarms(records, max_response_length=64, prompts_per_step=8) == []


STUDY = Path(__file__).resolve().parents[2] / "studies/results/verl"
BESIDE = "text stands beside the answer, which the format reward does not see"
LOST_END = "completions lose their end"
LOST_ACCURACY = "accuracy is lost while the format stays, which entropy and reward hide"
LOST_FORMAT = "completions lose their format"
GROWN = "completions grow to the limit"
HALVED = "the reward fell below half of its best"
ALIKE = "nearly all groups have equal rewards, below the best"
SICK = {
    "letter_counting/grpo-lr5e-05-seed1": [BESIDE, LOST_END, GROWN],
    "letter_counting/grpo-lr5e-05-seed3": [BESIDE],
    "letter_counting/grpo-lr5e-05-seed4": [BESIDE],
    "arithmetic-100-T1/grpo-lr0.0002-seed1": [BESIDE, LOST_END, GROWN],
    "letter_counting/double-lr0.0001-seed1": [BESIDE],
    "letter_counting/entropy-lr0.0001-seed1": [BESIDE, LOST_END],
    "letter_counting/forward-lr0.0001-seed1": [BESIDE, LOST_END, GROWN],
    "letter_counting/grpo_coin-lr5e-05-seed1": [BESIDE, LOST_FORMAT, LOST_END],
    "arithmetic/grpo-lr0.0001-seed1": [BESIDE, LOST_END],
    "arithmetic/grpo-lr0.0003-seed1": [BESIDE, LOST_END, LOST_ACCURACY, GROWN],
    "arithmetic/grpo-lr0.001-seed1": [HALVED, LOST_FORMAT, LOST_END, BESIDE],
    "arithmetic/gtpo-lr0.0003-seed1": [LOST_ACCURACY],
    "arithmetic/gtpo-lr0.001-seed1": [LOST_END, BESIDE, HALVED, LOST_FORMAT, ALIKE],
}
"""What ails the study's runs of one prompt a step, as their curves show it. docs/reliability.md says what is missed."""


@pytest.mark.parametrize("log", sorted(STUDY.rglob("*.jsonl.gz")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_watch_names_the_sick_runs_of_the_study_and_no_other(log):
    records = [json.loads(line) for line in gzip.open(log, "rt")]
    for record in records:
        record["critic/score/mean"] = record["reward/score/mean"]
        record["response_length/mean"] = record["completion/length/mean"]
    named = [said for _, said in alarms(records, max_response_length=64, prompts_per_step=1)]
    expected = SICK.get(str(log.relative_to(STUDY)).removesuffix(".jsonl.gz"), [])
    assert [said.partition(":")[0] for said in named] == expected


def trainer(choice):
    trainer = {"collapse_watch": choice, "save_freq": -1} if choice else {"save_freq": -1}
    return SimpleNamespace(
        config=OmegaConf.create({"trainer": trainer, "data": {"max_response_length": 64, "train_batch_size": 8}})
    )


def test_an_entropy_that_verl_sums_is_not_watched(caplog):
    summed = trainer("warn")
    summed.config.actor_rollout_ref = {"actor": {"loss_agg_mode": "seq-mean-token-sum"}}
    watch = TrainerWatch.of(summed)
    assert "entropy is not watched, since verl sums it under loss_agg_mode=seq-mean-token-sum" in caplog.text
    caplog.clear()
    for step in range(60):
        watch.logged({"training/global_step": step, "actor/entropy": 30.0 + 2 * step})
    assert not caplog.text


def test_signs_that_show_in_one_step_are_all_said():
    records = run()
    records[25] |= {"reward/format/mean": -90.0, "completion/eos_rate": -9.0}
    (_, first), (_, second) = alarms(records, 64, 8)
    watch = TrainerWatch.of(trainer("stop"))
    with pytest.raises(CollapseError) as raised:
        for record in records:
            watch.logged(record | {"training/global_step": record["step"]})
    assert str(raised.value) == f"trainer.collapse_watch=stop, checkpoint of step 26 written: {first}; {second}"


def test_a_sign_of_two_metrics_gives_both():
    ((_, said),) = alarms(run(gtpo__group__zero_std_frac=1.0, critic__score__mean=12.0), 64, 8)
    numbers = "gtpo/group/zero_std_frac 1 (first 0.3, best 1), critic/score/mean 12 (first 15, best 15)"
    assert f": {numbers}, means over 10 steps. Try: " in said


def test_stop_saves_at_the_next_step_and_then_ends_the_run():
    stopped = trainer("stop")
    watch = TrainerWatch.of(stopped)
    with pytest.raises(CollapseError, match="collapse_watch=stop, checkpoint of step .*lose their end"):
        for record in run(completion__eos_rate=0.5):
            saves = stopped.config.trainer.save_freq == 1
            watch.logged(record | {"training/global_step": record["step"]})
    assert saves
    assert record["step"] < 3 * WINDOW


def test_it_follows_what_a_trainer_of_verl_logs_under_grpo():
    """Through the hooks, with verl's own `Tracking`; verl's trainers differ in nothing that the hooks touch."""

    class RayPPOTrainer:
        config = OmegaConf.merge(trainer("stop").config, {"algorithm": {"adv_estimator": "grpo"}})

        def fit(self):
            tracking = Tracking("project", "experiment", [])
            for record in run(completion__eos_rate=0.5):
                tracking.log(data=record | {"training/global_step": record["step"]}, step=record["step"])

    verl_plugin._wrap(
        "RayPPOTrainer.fit", trainer_hooks.fit, SimpleNamespace(__name__="verl", RayPPOTrainer=RayPPOTrainer)
    )
    with pytest.raises(CollapseError, match="lose their end"):
        RayPPOTrainer().fit()
    Tracking("project", "experiment", []).log({"training/global_step": 1}, step=1)  # outside of a trainer


def test_warn_only_warns(caplog):
    watched = trainer("warn")
    watch = TrainerWatch.of(watched)
    for record in run(response_length__mean=63.0):
        watch.logged({"val-core/acc": 0.1})  # a validation
        watch.logged(record | {"training/global_step": record["step"]})
    (said,) = caplog.messages
    assert said == (
        "watch for collapse, step 28: completions grow to the limit: response_length/mean 59.7 (first 30, best 59.7), "
        "means over 10 steps. Try: raise data.max_response_length if they are sound; else lower the learning rate, go "
        "back to an earlier checkpoint"
    )
    assert watched.config.trainer.save_freq == -1


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
