import re
import sys

import pytest
from omegaconf import OmegaConf
from verl_config import COMPLETE, verl_config

from gtpo_verl.tools.check import resources, settings

GTPO = ("algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.name=vllm")
GTPO += ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"


@pytest.fixture
def judged(monkeypatch):
    """What is said of the settings, as (problem or warning) by what it is about."""
    monkeypatch.setattr(resources, "findings", lambda config: [])

    def found(*overrides, complete=GTPO, unknown=()):
        groups = [word for word in overrides if word.startswith("model_engine=")]
        said = settings.judge(
            verl_config(*complete, *overrides), verl_config(*groups), [*complete, *overrides], unknown
        )
        return {
            x["subject"] or x["remedy"]: x["remedy"] or x["advice"]
            for x in said["settings"]
            if x["remedy"] or x["advice"]
        }

    return found


def problems(found):
    return {key: remedy for key, remedy in found.items() if key not in ("GTPO", "updates")}


def test_a_sound_command_has_no_problem(judged):
    assert problems(judged()) == {}


def test_all_problems_are_said_at_once(judged):
    wrong = [f"{ROLLOUT}.n=1", f"{LOSS_MODE}=gtop", "algorithm.rollout_correction.bypass_mode=True"]
    found = judged(*wrong, f"{ACTOR}.use_dynamic_bsz=False", unknown=["rollout.n=8"])
    said = "\n".join(f"{key}: {remedy}" for key, remedy in found.items())
    for expected in (
        "rollout.n: did you mean",
        f"{LOSS_MODE}=gtop: unknown",
        "verl: ",
        f"{ROLLOUT}.n=1: GTPO compares",
    ):
        assert expected in said
    assert "bypass_mode=True: it skips" in said and "ppo_micro_batch_size_per_gpu" in said


@pytest.mark.parametrize("way_out", range(2))
def test_the_ways_out_of_bypass_mode_can_be_typed(judged, way_out):
    wrong = ("algorithm.rollout_correction.bypass_mode=True", "++algorithm.gtpo.initial_entropy=0.3")
    (remedy,) = [key for key in judged(*wrong) if "bypass_mode=True: it skips" in key]
    typed = re.findall(r"(?:set|or) ([+\w]+\.[\w.]+=\w+)", remedy)[way_out]
    assert not any("bypass_mode" in key for key in problems(judged(*wrong, typed)))


def test_an_empty_variable_of_the_shell_is_named_with_the_other_two(judged):
    wrong = ["trainer.nnodes=", "trainer.n_gpus_per_node=eight", f"{ACTOR}.use_dynamic_bsz=maybe"]
    found = judged(*wrong)
    assert [*found] == [word.partition("=")[0] for word in wrong]
    assert found["trainer.nnodes"] == "give one, as verl's own trainer.nnodes=1"
    assert problems(judged("algorithm.rollout_correction.rollout_is_threshold=0.5_4.0")) == {}


def test_a_strategy_without_its_engine_names_the_engine(judged):
    found = judged(f"{ACTOR}.strategy=megatron")
    assert "write model_engine=megatron" in found[f"{ACTOR}.strategy=megatron"]
    assert problems(judged("model_engine=megatron", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")) == {}


def test_a_distillation_without_task_rewards_leaves_gtpo_without_effect(judged):
    off = "distillation.distillation_loss.use_task_rewards=False"
    teacher = ("distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1")
    assert f"set {off.replace('False', 'True')}" in judged(*teacher, off)[off]
    assert off not in judged(*teacher)


def test_a_trainer_with_advantages_of_its_own_is_warned_of(judged):
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    mine = type("Mine", (PPOTrainer,), {"_compute_advantage": lambda self, batch: batch, "__module__": "mine"})
    assert "let it call verl's" in judged()["mine.Mine"]
    del mine


ULYSSES, TP = f"{ACTOR}.ulysses_sequence_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"
OTHER_ULYSSES, CP = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.megatron.context_parallel_size"
TOKENS, FILTER = f"{ACTOR}.ppo_max_token_len_per_gpu", "algorithm.filter_groups"
POOL = "reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True"


@pytest.mark.parametrize(
    ("wrong", "subject", "way_out"),
    [
        (f"{ULYSSES}=4", f"{ULYSSES}=4", "trainer.n_gpus_per_node=4"),
        (f"{OTHER_ULYSSES}=4", f"{OTHER_ULYSSES}=4", "trainer.n_gpus_per_node=4"),
        (f"model_engine=megatron {CP}=4", f"{CP}=4", f"{CP}=2"),
        (f"{TP}=4", f"{TP}=4", f"{TP}=1"),
        (f"{ROLLOUT}.n=3 data.train_batch_size=255", "batch", "data.train_batch_size=256"),
        (f"{TOKENS}=512", f"{TOKENS}=512", f"{TOKENS}=1024"),
        ("distillation.enabled=True distillation.nnodes=0", "teacher", "distillation.nnodes=1"),
        (POOL, "reward model", "reward.reward_model.nnodes=1"),
        (f"{FILTER}.enable=True {FILTER}.metric=null", f"{FILTER}.enable=True", f"++{FILTER}.metric=acc"),
        (f"{FILTER}.enable=True reward.reward_model.enable=True", f"{FILTER}.enable=True", f"{FILTER}.enable=False"),
    ],
)
def test_what_does_not_fit_the_gpus_is_a_problem_with_a_way_out(judged, wrong, subject, way_out):
    wrong = ["trainer.n_gpus_per_node=2", *wrong.split()]
    assert subject in judged(*wrong)
    assert subject not in judged(*wrong, way_out)


def test_several_updates_without_clipping_are_warned_of_with_both_ways_out(judged):
    mini_batch, gtpo = f"{ACTOR}.ppo_mini_batch_size", f"{LOSS_MODE}=gtpo"
    found = judged(gtpo)
    assert re.search(rf"{mini_batch} +256 +1024:", found["GTPO"])
    assert found["updates"] == f"make one ({mini_batch}=1024), or clip ({LOSS_MODE}=vanilla)"
    for way_out in (f"{mini_batch}=1024", f"{LOSS_MODE}=vanilla"):
        assert "updates" not in judged(gtpo, way_out)


def test_a_wrong_key_of_gtpo_is_a_problem_beside_the_others(judged):
    found = judged("+algorithm.gtpo.gama=1", f"{ROLLOUT}.name=???")
    assert any(key.startswith("algorithm.gtpo.gama=1: ") for key in found)
    assert found[f"{ROLLOUT}.name"].startswith(f"set {ROLLOUT}.name=vllm")


def test_a_config_that_is_no_trainers_is_not_judged():
    assert "not one of verl's trainers" in settings.judge(OmegaConf.create({"data": 1}), None, [], [])["other"]


def test_a_verl_that_does_not_load_the_plugin_is_not_judged(monkeypatch):
    monkeypatch.delitem(sys.modules, "gtpo_verl.verl_plugin")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    other = settings.judge(verl_config(*COMPLETE), verl_config(), COMPLETE, [])["other"]
    assert "does not load this plugin: VERL_USE_EXTERNAL_PLUGINS=none leaves gtpo out" in other
