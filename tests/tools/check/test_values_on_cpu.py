"""Values that verl or its engines refuse minutes later, or that do nothing, and what to write instead."""

import re
from contextlib import suppress
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl_config import COMPLETE, verl_config

from gtpo_verl.tools.check import names
from gtpo_verl.tools.check import settings as settings_check
from gtpo_verl.verl_plugin import values
from gtpo_verl.verl_plugin.ranges import RANGES
from gtpo_verl.verl_plugin.run_config import NOT_SELECTED

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
GTPO = [*COMPLETE, "algorithm.adv_estimator=gtpo", f"{ROLLOUT}.n=8", f"{ROLLOUT}.tensor_model_parallel_size=1"]
GRPO = "algorithm.adv_estimator=grpo"
ATTENTION = f"{MODEL}.override_config.attn_implementation"


@cache
def findings(*words):
    """What a check of the settings says of a command, by the key that it is about."""
    in_settings, _ = settings_check.check(verl_config(*GTPO, *words), with_machine=False)
    return {finding.subject.partition("=")[0] or finding.remedy.partition("=")[0]: finding for finding in in_settings}


def written(finding):
    """The overrides that the remedy or the advice of a finding gives; of a value alone, of the finding's own key."""
    key = finding.subject.partition("=")[0]
    text = finding.remedy or finding.advice
    overrides = re.findall(r"(?:set|write) (\+*[\w.]+=[^\s,;]+)", text)
    meant = re.match(r"did you mean ([\w-]+)\?", text)
    if meant:
        overrides.append(f"{key}={meant[1]}")
    takes = re.match(
        r"give (a whole number|a number|True or False|a text|the name)(?: (?:of at least|above) (\d+))?", text
    )
    if takes:
        smallest = {"True or False": "True", "a text": "x", "the name": "x"}.get(takes[1], takes[2] or "1")
        is_open = takes[1] == "a number" and " above 0" in text
        overrides.append(f"{key}={0.5 if is_open else smallest}")
    return overrides


TOGETHER = [
    "trainer.nnodes=1.0",
    "trainer.n_gpus_per_node=-1",
    "trainer.total_training_steps=abc",
    "trainer.total_epochs=inf",
    "trainer.max_actor_ckpt_to_keep=abc",
    "data.train_batch_size=0",
    "data.max_response_length=-5",
    "data.train_files=null",
    f"{MODEL}.path=???",
    f"{MODEL}.lora_rank=-3",
    f"{ACTOR}.ppo_mini_batch_size=16.0",
    f"{ACTOR}.ppo_max_token_len_per_gpu=0",
    f"{ACTOR}.optim.lr=nan",
    f"{ACTOR}.strategy=fsdp3",
    f"{ROLLOUT}.n=8.5",
    f"{ROLLOUT}.gpu_memory_utilization=60",
    f"{ROLLOUT}.dtype=bflot16",
    f"{ROLLOUT}.agent.default_agent_loop=tool_agnet",
    f"++{ATTENTION}=flash_attn_2",
]
LIKEWISE = [
    "trainer.nnodes=0",
    "trainer.total_epochs=0",
    "trainer.total_training_steps=0",
    "data.train_batch_size=null",
    "data.max_prompt_length=null",
    "data.max_response_length=0",
    f"{MODEL}.path=null",
    f"{MODEL}.lora_rank=1.5",
    f"{ACTOR}.ppo_mini_batch_size=-4",
    f"{ACTOR}.optim.lr=-1e-6",
    f"{ACTOR}.optim.weight_decay=-1",
    f"{ROLLOUT}.n=[8]",
    f"{ROLLOUT}.temperature=-1",
    f"{ROLLOUT}.top_p=1.5",
    f"{ROLLOUT}.max_num_seqs=null",
    "trainer.save_freq=null",
    "trainer.use_v1=maybe",
    "trainer.project_name=???",
]


def key_of(word):
    return word.lstrip("+").partition("=")[0]


@pytest.mark.parametrize(
    ("commands", "word"),
    [(commands, word) for commands in (TOGETHER, LIKEWISE) for word in commands],
    ids=[*TOGETHER, *LIKEWISE],
)
def test_each_value_that_verl_cannot_use_is_a_problem_beside_the_others(commands, word):
    assert findings(*commands)[key_of(word)].remedy


@pytest.mark.parametrize("commands", [TOGETHER, LIKEWISE], ids=["together", "likewise"])
def test_the_remedies_of_values_that_verl_cannot_use_leave_no_problem(commands):
    found = findings(*commands)
    remedies = [override for word in commands for override in written(found[key_of(word)])]
    assert len(remedies) == len(commands)
    # A number in its range may still be too small beside others, which is another finding.
    after = findings(*commands, *remedies).values()
    assert not [finding for finding in after if finding.message.startswith(("is ", "no such value")) and finding.remedy]


@pytest.mark.parametrize("modules", ["all-linear", "[q_proj,v_proj]"])
def test_a_value_for_which_verl_takes_any_kind_is_no_finding(modules):
    assert f"{MODEL}.target_modules" not in findings(f"{MODEL}.target_modules={modules}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [(f"{ROLLOUT}.load_format=safetensor", "safetensors"), (f"{ROLLOUT}.multi_turn.format=hermess", "hermes")],
)
def test_a_name_that_others_may_know_is_not_judged_and_the_near_one_is_named(word, meant):
    finding = findings(word)[word.partition("=")[0]]
    assert not finding.remedy and f"did you mean {meant}?" in finding.advice
    key = word.partition("=")[0]
    assert key not in findings(*written(finding))


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/a/step_5"], "trainer.resume_from_path"),
        ([f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.use_kl_loss=True"], f"{ACTOR}.kl_loss_type"),
    ],
)
def test_what_verl_asserts_of_a_name_or_a_path_is_a_problem(words, key):
    assert findings(*words)[key].remedy


@pytest.mark.parametrize(
    "word",
    ["trainer.resume_from_path=/a/global_step_5", f"{ACTOR}.grad_clip=0.2"],
)
def test_a_setting_that_nothing_reads_is_warned_of_with_the_one_that_acts(word):
    key = word.partition("=")[0]
    finding = findings(GRPO, word)[key]
    assert not finding.remedy and "read" in finding.message
    (instead,) = written(finding)
    assert key not in findings(GRPO, word, instead)


@pytest.mark.parametrize("key", ["data.max_prompt_length", f"{ROLLOUT}.n", "data", "critic", ROLLOUT])
def test_what_is_left_out_is_named(key):
    config = verl_config(*GTPO)
    OmegaConf.set_struct(config, False)
    section, _, name = key.rpartition(".")
    del (OmegaConf.select(config, section) if section else config)[name]
    found, _ = settings_check.check(config, with_machine=False)
    assert [finding.remedy for finding in found if finding.subject == key and finding.message == "is not there"]


@pytest.mark.parametrize(
    ("key", "value"),
    [("algorithm", None), (ROLLOUT, None), ("actor_rollout_ref", [8]), ("algorithm.adv_estimator", "???")],
)
def test_nothing_in_place_of_what_verl_reads_first_is_named(key, value):
    config = verl_config(*GTPO)
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, key, value, merge=False)
    found, _ = settings_check.check(config, with_machine=False)
    assert key in [finding.subject for finding in found]


def test_what_follows_from_a_replaced_value_is_not_said():
    subjects = findings(f"{ROLLOUT}.n=8.5", "data.train_batch_size=abc")
    assert set(subjects) - {"GTPO"} == {f"{ROLLOUT}.n", "data.train_batch_size"}


KEYS = [row.key for row in RANGES]
KEYS += [*values.SECTIONS, *values.FILES]
KEYS += ["trainer.logger", "trainer.resume_mode", "trainer.resume_from_path", "trainer.v1.trainer_mode"]
KEYS += ["trainer.use_v1", "trainer.val_only", "algorithm.gtpo", "algorithm.rollout_correction", "async_training"]
KEYS += ["algorithm.adv_estimator", "algorithm.filter_groups", f"{ACTOR}.strategy", f"{ACTOR}.use_dynamic_bsz"]
KEYS += [f"{ACTOR}.policy_loss.loss_mode", f"{ROLLOUT}.name", f"{ROLLOUT}.dtype", f"{ROLLOUT}.agent", ATTENTION]
KEYS += ["transfer_queue.backend.SimpleStorage.num_data_storage_units", "ray_kwargs.ray_init", "distillation"]
KEYS += ["reward.reward_manager.name", "reward.reward_model.enable", "ray_kwargs.ray_init.num_cpus", "data.truncation"]
KINDS = [8.5, -1, 0, None, [8], {"a": 1}, "abc", "", "???", "${no.such.key}", True, float("nan"), float("inf")]


@settings(max_examples=25)
@given(words=st.dictionaries(st.sampled_from(KEYS), st.sampled_from(KINDS), min_size=1, max_size=3))
def test_no_value_of_any_kind_ends_the_check_itself(words):
    config = verl_config(*GTPO)
    OmegaConf.set_struct(config, False)
    OmegaConf.update(config, "ray_kwargs.ray_init.address", "local")
    for key, value in words.items():
        with suppress(*NOT_SELECTED):  # its section is none any more
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    found, _ = settings_check.check(config, with_machine=True)
    assert all(finding.message or finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("place", "name", "some"),
    [
        ("verl.trainer.ppo.core_algos:agg_loss", "loss_agg_mode", {"token-mean", "seq-mean-token-mean"}),
        ("verl.trainer.ppo.core_algos:get_kl_controller", "type", {"fixed", "adaptive"}),
        ("verl.utils.torch_functional:postprocess_data", "truncation", {"left", "right", "middle", "error"}),
        ("verl.workers.config:FSDPOptimizerConfig.__post_init__", "lr_scheduler_type", {"constant", "cosine"}),
    ],
)
def test_verls_names_are_read_from_the_function_that_compares_them(place, name, some):
    assert some <= set(names.compared(place, name))
