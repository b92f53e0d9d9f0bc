import re

import pytest
from omegaconf import OmegaConf
from verl_config import COMPLETE, verl_config

from gtpo_verl.tools.check import unknown_keys
from gtpo_verl.verl_plugin import values


def remedy(word):
    (finding,) = unknown_keys.unknown([word], verl_config())
    assert finding.message == "verl has no such key"
    return finding.remedy


@pytest.mark.parametrize(
    ("word", "last"),
    [
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=True", r"verl 0\.2\.0"),
        ("actor_rollout_ref.actor.megatron.grad_offload=True", r"verl 0\.9\.0"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", r"verl 0\.\d+\.\d+"),
        ("trainer.use_legacy_worker_impl=disable", r"verl 0\.\d+\.\d+"),
    ],
)
def test_a_key_that_verl_has_dropped_is_removed(word, last):
    assert re.fullmatch(rf".*{last} was the last .*: remove it", remedy(word))


@pytest.mark.parametrize(
    "word",
    [
        "reward_model.enable=False",
        "reward_model.overlong_buffer.enable=True",
        "custom_reward_function.path=mine.py",
        "actor_rollout_ref.actor.checkpoint.contents=[model]",
    ],
)
def test_a_key_that_has_moved_is_written_anew_and_verl_takes_it(word):
    key, _, value = word.partition("=")
    said = remedy(word)
    now = said.partition("write ")[2] or f"{said.removeprefix('did you mean ').removesuffix('?')}={value}"
    assert now.endswith(f"={value}") and key != now.lstrip("+").partition("=")[0]
    verl_config(now)


@pytest.mark.parametrize(
    ("word", "now"),
    [
        ("algorithm.gtpo.entropy_coeff=0.1", "+algorithm.gtpo.entropy_coeff=0.1"),
        ("algorithm.gtpo.entrpy_coeff=0.1", "+algorithm.gtpo.entropy_coeff=0.1"),
        ("trainer.collapse_watch=warn", "+trainer.collapse_watch=warn"),
    ],
)
def test_a_key_of_this_plugin_wants_a_plus(word, now):
    reason, _, command = remedy(word).partition(": write ")
    assert "this plugin" in reason and command == now


OTHERS = ["actor_rollout_ref.actor.gvpo_beta", "actor_rollout_ref.rollout.n_agent", "data.max_obs_length"]
OTHERS += [
    "actor_rollout_ref.actor.state_masking",
    "trainer.dyn_sampling_x",
    "actor_rollout_ref.rollout.agent.max_turns",
]


@pytest.mark.parametrize(
    ("word", "is_wrong"),
    [
        ("actor_rollout_ref.actor.optim.lr=5e-7x", True),
        ("actor_rollout_ref.actor.optim.lr=5e-7", False),
        ("actor_rollout_ref.rollout.n=", True),
        ("algorithm.rollout_correction.rollout_is_threshold=0.5_2.0", False),
    ],
)
def test_text_for_a_number_is_named(word, is_wrong):
    key = word.partition("=")[0]
    assert [wrong.key for wrong in values.wrong_values(verl_config(*COMPLETE, word))] == ([key] if is_wrong else [])


def test_misspelt_keys_and_text_for_numbers_in_a_yaml_file_are_found():
    config = verl_config(*COMPLETE)
    assert [*unknown_keys.added_in_yaml(config)] == [*values.wrong_values(config)] == []
    OmegaConf.set_struct(config, False)
    sound = {"mine": {"own": 1}, "data": {"my_own": 1}, "ray_kwargs": {"ray_init": {"num_gpus": 1}}}
    wrong = {"data": {"max_respone_length": 4096, "train_batch_size": "32"}, "trainer": {"save_frequency": 3}}
    config = OmegaConf.merge(config, sound, wrong)
    assert {x.subject: x.remedy for x in unknown_keys.added_in_yaml(config)} == {
        "data.max_respone_length": "did you mean data.max_response_length?",
        "trainer.save_frequency": "did you mean trainer.save_freq?",
    }
    (text,) = values.wrong_values(config)
    assert text.key == "data.train_batch_size" and text.takes.endswith("at least 1")


def test_keys_of_another_trainer_have_no_likeness_and_one_line():
    (finding,) = unknown_keys.unknown([f"{key}=1" for key in OTHERS], verl_config())
    assert finding.subject == ", ".join(OTHERS) and "did you mean" not in finding.remedy and "=1" not in str(finding)


@pytest.mark.parametrize(
    ("word", "write"),
    [
        ("actor_rollout_ref.actor.model_engine=megatron", "write model_engine=megatron,"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "with model_engine=megatron"),
    ],
)
def test_keys_of_an_engine_that_is_not_chosen_name_the_engine(word, write):
    assert write in remedy(word)


def test_a_chat_scheduler_is_an_agent_loop_now():
    said = remedy("actor_rollout_ref.rollout.chat_scheduler=pkg.Class")
    assert "remove it" in said and "actor_rollout_ref.rollout.agent.agent_loop_config_path" in said
    assert "pkg.Class" not in said


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rollout.n=8", "did you mean actor_rollout_ref.rollout.n?"),
        ("rolout.n=8", "did you mean actor_rollout_ref.rollout.n?"),
        ("total_epochs=1", "did you mean trainer.total_epochs?"),
        ("actor_rollout_ref.actor.ppo_mini_batchsize=8", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("trainer.totl_epochs=1", "did you mean trainer.total_epochs?"),
        ("trainer.save_frequency=3", "did you mean trainer.save_freq?"),
    ],
)
def test_a_key_of_a_letter_or_a_section_less_is_named_in_full(word, meant):
    assert remedy(word).startswith(meant)
