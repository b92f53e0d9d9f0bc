import re
import sys

import pytest
from verl_config import verl_config

from gtpo_verl.tools.check import settings
from gtpo_verl.verl_plugin import compat
from gtpo_verl.verl_plugin import problems as preflight_problems

GTPO = ("algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8", "actor_rollout_ref.rollout.name=vllm")
GTPO += ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.rollout.tensor_model_parallel_size=1")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS_MODE, GRPO = f"{ACTOR}.policy_loss.loss_mode", "algorithm.adv_estimator=grpo"


def checked(*overrides):
    """What is said of the settings, as (problem or warning) by what it is about."""
    found, _ = settings.check(verl_config(*GTPO, *overrides), with_machine=False)
    return {x.subject or x.remedy: x.remedy or x.advice for x in found if x.remedy or x.advice}


def problems(found):
    return {key: remedy for key, remedy in found.items() if key != "GTPO"}


def test_a_sound_command_has_no_problem():
    assert problems(checked()) == {}


def test_what_is_missing_here_is_said_once_and_not_of_the_settings(monkeypatch):
    monkeypatch.setattr(compat, "load_errors", {"broken": None})
    for name in ("transfer_queue", "cachetools"):
        monkeypatch.setitem(sys.modules, name, None)
    assert problems(checked("trainer.use_v1=True")) == {"registration": "broken"}


def test_all_problems_are_said_at_once():
    wrong = [f"{ROLLOUT}.n=1", f"{LOSS_MODE}=gtop", "algorithm.rollout_correction.bypass_mode=True"]
    found = checked(*wrong, f"{ACTOR}.use_dynamic_bsz=False")
    assert [override for override in wrong if not any(key.startswith(f"{override}: ") for key in found)] == []
    assert "ppo_micro_batch_size_per_gpu" in found["verl"]


def test_a_strategy_without_its_engine_names_the_engine():
    found = checked(f"{ACTOR}.strategy=megatron")
    assert "write model_engine=megatron" in found[f"{ACTOR}.strategy=megatron"]
    assert problems(checked("model_engine=megatron", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")) == {}


MISSPELT = {
    f"{ROLLOUT}.name=vlm": "vllm",
    f"{ACTOR}.loss_agg_mode=token_mean": "token-mean",
    f"{ACTOR}.kl_loss_type=lowvar": "low_var_kl",
    f"{ACTOR}.optim.lr_scheduler_type=cosin": "cosine",
    "trainer.logger=[console,wanbd]": "wandb",
    "trainer.resume_mode=atuo": "auto",
    "data.truncation=lef": "left",
    "trainer.v1.trainer_mode=snyc": "sync",
    "reward.reward_manager.name=dappo": "dapo",
    "algorithm.kl_ctrl.type=fixd": "fixed",
}
NO_TEXT = ("trainer.resume_mode=True", "trainer.resume_mode=False", "data.truncation=1", "trainer.logger=1")


@pytest.fixture(scope="module")
def misspelt():
    """What is said of all misspelt values together."""
    return checked(*MISSPELT, f"{ACTOR}.use_kl_loss=True")


@pytest.mark.parametrize(("word", "right"), MISSPELT.items())
def test_every_misspelt_value_is_named_with_those_that_exist(misspelt, word, right):
    remedy = misspelt[word.replace("[console,", "").rstrip("]")]
    near, _, existing = remedy.partition("? ")
    assert near == f"did you mean {right}" and right in existing


def test_what_verl_itself_would_say_of_a_misspelt_value_is_left_out(misspelt):
    assert "verl" not in misspelt


@pytest.mark.parametrize("word", NO_TEXT)
def test_a_value_that_is_no_text_is_named_too(word):
    assert checked(word)[word].startswith("verl has ")


@pytest.mark.parametrize(
    "word", ["trainer.logger=tracking", f"{ACTOR}.kl_loss_type=low_var_kl+", f"{ROLLOUT}.name=sglang"]
)
def test_values_that_verl_has_are_no_problem(word):
    assert problems(checked(word, f"{ACTOR}.use_kl_loss=True")) == {}


def test_a_plus_belongs_to_the_name_of_a_kl_penalty_alone():
    word = "algorithm.kl_ctrl.type=fixed+"
    assert "did you mean fixed?" in checked(word, "algorithm.use_kl_in_reward=True")[word]


def test_a_value_that_the_run_does_not_read_is_a_warning():
    found, _ = settings.check(verl_config(*GTPO, f"{ACTOR}.kl_loss_type=lowvar"), with_machine=False)
    assert [x.advice[:12] for x in found if "lowvar" in x.subject] == ["did you mean"]
    assert not any(x.remedy for x in found)


@pytest.mark.parametrize("name", ["batch", "prime"])
def test_a_reward_manager_that_verl_no_longer_has_is_named_with_the_five_that_it_has(name):
    found = checked(f"reward_model.reward_manager={name}")
    assert f"write reward.reward_manager.name={name}" in found[f"reward_model.reward_manager={name}"]
    said = found[f"reward.reward_manager.name={name}"]
    assert all(x in said for x in ("naive", "dapo", "gdpo", "remote", "rate_limited"))


def test_a_reward_function_under_its_old_key_is_not_read_by_main_ppo(monkeypatch):
    old = "custom_reward_function.path=mine.py"
    assert f"write reward.{old}" in checked(old)[old]
    assert problems(checked("reward_model.enable=False", f"reward.{old}")) == {}  # as it is anyway
    monkeypatch.setattr(sys.modules["__main__"], "migrate_legacy_reward_impl", None, raising=False)
    assert problems(checked(old)) == {}


@pytest.mark.parametrize(
    ("words", "is_wrong"),
    [
        ("n=5 ppo_mini_batch_size=4 n_gpus_per_node=8", True),  # as verl asserts at the first update
        ("n=2 train_batch_size=12 ppo_mini_batch_size=8 n_gpus_per_node=16", False),  # V1 pads the batch
        ("n=2 train_batch_size=12 ppo_mini_batch_size=8 n_gpus_per_node=16 use_v1=False", True),
    ],
)
def test_batches_split_as_verl_splits_them(words, is_wrong):
    sections = {"n": ROLLOUT, "train_batch_size": "data", "ppo_mini_batch_size": ACTOR}
    found = checked(*(f"{sections.get(word.partition('=')[0], 'trainer')}.{word}" for word in words.split()))
    assert any("batch_size=" in key for key in problems(found)) == is_wrong


def test_the_legacy_trainer_reads_no_filter_groups():
    on = "algorithm.filter_groups.enable=True"
    found = checked("trainer.use_v1=False", on)
    assert "trainer.use_v1=True" in found[on] and "groups" not in found["GTPO"]


CORRECTION, OVERLONG = "algorithm.rollout_correction", "reward.reward_kwargs.overlong_buffer_cfg"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("rollout_is=tokens", "Invalid rollout_is: tokens"),
        ("rollout_rs=geometric rollout_rs_threshold=2", "Invalid rollout_rs option: geometric"),
        ("rollout_rs=token_k1", "rollout_rs_threshold must be"),
    ],
)
def test_what_verl_refuses_of_its_rollout_correction_at_the_first_batch_is_said_before(wrong, said):
    assert said in checked(*(f"{CORRECTION}.{word}" for word in wrong.split()))["verl"]
    right = ("rollout_is=token", "rollout_rs=token_k1", "rollout_rs_threshold='0.5_2.0'")
    assert "verl" not in checked(*(f"{CORRECTION}.{word}" for word in right))


def test_a_correction_needs_the_rollouts_log_probs():
    off, update = f"{ROLLOUT}.calculate_log_probs=False", "++algorithm.gtpo.entropy_from=update"
    assert f"{CORRECTION}.rollout_is" in said_of(off, off, f"{CORRECTION}.rollout_is=token")
    assert off not in checked(off)
    bypass = (off, f"{CORRECTION}.bypass_mode=True", "++algorithm.gtpo.initial_entropy=0.3")
    assert off in checked(*bypass) and off in checked(*bypass, update)  # which turns on the update's entropy alone


def said_of(subject, *overrides):
    found, _ = settings.check(verl_config(*GTPO, *overrides), with_machine=False)
    return next(x.message for x in found if x.subject == subject)


def test_daposs_penalty_for_length_needs_the_longest_response():
    wrong = ("reward.reward_manager.name=dapo", f"++{OVERLONG}.enable=True")
    longest = checked(*wrong)[f"{OVERLONG}.enable=True"].removeprefix("set ")
    assert longest.startswith("++reward.reward_kwargs.max_resp_len=")
    assert f"{OVERLONG}.enable=True" not in checked(*wrong, longest)


FULLY_ASYNC = (
    "+async_training.staleness_threshold=0",
    "+rollout.nnodes=1",
    "+rollout.n_gpus_per_node=1",
    f"{ACTOR}.use_dynamic_bsz=False",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    GRPO,
)
ASSERTED = ["data.train_batch_size=0", "++data.gen_batch_size=1", "actor_rollout_ref.hybrid_engine=False"]


def test_fully_async_with_all_that_it_asserts_has_no_problem():
    assert problems(checked(*FULLY_ASYNC, *ASSERTED)) == {}


@pytest.mark.parametrize("missing", ASSERTED)
def test_fully_async_is_judged_by_its_own_assertions(missing):
    key, value = missing.lstrip("+").split("=")
    found = checked(*FULLY_ASYNC, *(override for override in ASSERTED if override != missing))
    assert [remedy for subject, remedy in found.items() if subject.startswith(key)] == [f"set {key}={value}"]


@pytest.mark.parametrize("key", [f"{ROLLOUT}.n", f"{ACTOR}.ppo_mini_batch_size"])
def test_null_for_a_number_is_a_problem_and_no_crash(key):
    assert problems(checked(f"{key}=null"))


def test_a_critic_is_judged():
    critic = ["critic.enable=True", "critic.use_dynamic_bsz=False", "critic.ppo_mini_batch_size=32"]
    assert "[critic]" in checked(*critic)["verl"]
    right = ["critic.ppo_micro_batch_size_per_gpu=1", "data.train_batch_size=32", f"{ACTOR}.ppo_mini_batch_size=32"]
    assert "verl" not in checked(*critic, *right)


ULYSSES, TP = f"{ACTOR}.ulysses_sequence_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"
OTHER_ULYSSES, CP = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", f"{ACTOR}.megatron.context_parallel_size"
TOKENS, FILTER = f"{ACTOR}.ppo_max_token_len_per_gpu", "algorithm.filter_groups"
LOG_PROB_TOKENS, MEGATRON_TP = (
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{ACTOR}.megatron.tensor_model_parallel_size",
)
SEPARATE = "trainer.v1.trainer_mode=separate_async"
LOG_PROB_DYNAMIC = f"{ROLLOUT}.log_prob_use_dynamic_bsz"
DYNAMIC, MICRO = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu"
VEOMNI = f"{ACTOR}.veomni.ulysses_parallel_size"
POOL = "reward.reward_model.enable=True reward.reward_model.enable_resource_pool=True"


@pytest.mark.parametrize(
    ("wrong", "subject", "way_out"),
    [
        (f"{ULYSSES}=4", f"{ULYSSES}=4", "trainer.n_gpus_per_node=4"),
        (f"{OTHER_ULYSSES}=4", f"{OTHER_ULYSSES}=4", "trainer.n_gpus_per_node=4"),
        (f"model_engine=megatron {CP}=4", f"{CP}=4", f"{CP}=2"),
        (f"{TP}=4", f"{TP}=4", f"{TP}=1"),
        (
            f"{ROLLOUT}.n=3 {ACTOR}.ppo_mini_batch_size=255",
            f"{ACTOR}.ppo_mini_batch_size=255",
            f"{ACTOR}.ppo_mini_batch_size=256",
        ),
        (f"{TOKENS}=512", f"{TOKENS}=512", f"{TOKENS}=1024"),
        (f"{DYNAMIC}=False {LOG_PROB_DYNAMIC}=True", f"{LOG_PROB_DYNAMIC}=True", f"{LOG_PROB_DYNAMIC}=False"),
        (f"{DYNAMIC}=False {MICRO}=768", f"{MICRO}=768", f"{MICRO}=256"),
        (f"model_engine=veomni {VEOMNI}=4", f"{VEOMNI}=4", "trainer.n_gpus_per_node=4"),
        (f"{LOG_PROB_TOKENS}=512", f"{LOG_PROB_TOKENS}=512", f"{LOG_PROB_TOKENS}=1024"),
        (f"model_engine=megatron {MEGATRON_TP}=2 {TOKENS}=512", f"{TOKENS}=512", f"{TOKENS}=1024"),
        (SEPARATE, "rollout", f"{ROLLOUT}.nnodes=1"),
        (f"{SEPARATE} data.train_batch_size=512", "data.train_batch_size=512", "data.train_batch_size=1024"),
        (SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=naive", f"{ROLLOUT}.checkpoint_engine.backend=nccl"),
        ("distillation.enabled=True distillation.nnodes=0", "teacher", "distillation.nnodes=1"),
        (POOL, "reward model", "reward.reward_model.nnodes=1"),
        (f"{FILTER}.enable=True {FILTER}.metric=null", f"{FILTER}.enable=True", f"++{FILTER}.metric=acc"),
        (f"{FILTER}.enable=True reward.reward_model.enable=True", f"{FILTER}.enable=True", f"{FILTER}.enable=False"),
    ],
)
def test_what_does_not_fit_the_gpus_is_a_problem_with_a_way_out(wrong, subject, way_out):
    wrong = ["trainer.n_gpus_per_node=2", *wrong.split()]
    assert subject in checked(*wrong)
    assert subject not in checked(*wrong, way_out)


@pytest.mark.parametrize("key", ["distillation.nnodes", "distillation.n_gpus_per_node"])
def test_a_pool_without_gpus_names_the_key_that_is_0(key):
    teacher = ["distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"]
    assert checked(*teacher, f"{key}=0")["teacher"] == f"set {key}=1"
    assert "teacher" not in checked(*teacher)


DYNAMIC_CONTEXT = f"{ACTOR}.megatron.dynamic_context_parallel=True {ACTOR}.megatron.max_seqlen_per_dp_cp_rank=512"
ONE_PROMPT = f"{ACTOR}.ppo_mini_batch_size=1"


@pytest.mark.parametrize(
    "words",
    [
        f"model_engine=veomni {VEOMNI}=4",
        f"model_engine=torchtitan {ACTOR}.torchtitan.tensor_parallel_size=4",
        f"model_engine=megatron {CP}=4 {ONE_PROMPT} {DYNAMIC_CONTEXT}",
    ],
    ids=["veomni", "torchtitan", "megatron"],
)
def test_verls_own_ways_over_long_sequences_are_no_problem(words):
    tokens = f"{ACTOR}.ppo_max_token_len_per_gpu=512"
    assert not {tokens, ONE_PROMPT} & checked("trainer.n_gpus_per_node=4", tokens, *words.split()).keys()


@pytest.mark.parametrize(
    "lengths",
    [
        f"data.max_response_length=8192 {ROLLOUT}.max_model_len=8192",
        f"data.max_response_length=16384 {ROLLOUT}.response_length=1024",
    ],
)
def test_the_longest_sequence_is_what_the_rollout_makes(lengths):
    words = ["data.max_prompt_length=1024", *lengths.split()]
    assert f"{TOKENS}=8192" not in checked(*words, f"{TOKENS}=8192")
    found = checked(*words, f"{TOKENS}=1024")
    needed = found[f"{TOKENS}=1024"].split()[1].partition("=")[2]
    assert f"{TOKENS}={needed}" not in checked(*words, f"{TOKENS}={needed}")


def test_a_longer_response_of_the_rollout_counts():
    words = ["data.max_response_length=1024", f"{ROLLOUT}.response_length=16384", f"{TOKENS}=4096"]
    assert f"{TOKENS}=4096" in checked(*words)


OWN_POOL = [SEPARATE, f"{ROLLOUT}.checkpoint_engine.backend=nccl", f"{ROLLOUT}.nnodes=1", "data.train_batch_size=1024"]


@pytest.mark.parametrize(("gpus", "fits"), [(1, False), (2, True), (3, False), (4, True)])
def test_copies_of_the_model_fill_a_pool_of_the_rollouts_own(gpus, fits):
    words = [*OWN_POOL, f"{ROLLOUT}.n_gpus_per_node={gpus}", f"{TP}=2", "trainer.n_gpus_per_node=2"]
    found = problems(checked(*words))
    assert (f"{TP}=2" not in found) == fits
    if not fits:
        assert f"{TP}=2" not in checked(*words, f"{TP}=1")
        assert f"{TP}=2" not in checked(*words, f"{ROLLOUT}.n_gpus_per_node=2")


@pytest.mark.parametrize(("value", "cuts"), [("1023", True), ("1024", False), ("null", False), ("long", False)])
def test_a_context_that_is_shorter_than_a_sequence_is_warned_of(value, cuts):
    word = f"{ROLLOUT}.max_model_len={value}"
    advice = checked(word).get(word)
    assert advice is None if not cuts else "rollout cuts longer" in advice


@pytest.mark.parametrize("wrong", ["trainer.n_gpus_per_node=0", "trainer.nnodes=null"])
def test_a_run_without_a_gpu_is_a_problem_beside_the_others(wrong):
    found = checked(wrong, f"{LOSS_MODE}=gtop")
    assert found[wrong.partition("=")[0]].endswith("at least 1") and any("gtop" in key for key in found)


def test_a_wrong_key_of_gtpo_is_a_problem_beside_the_others():
    found = checked("+algorithm.gtpo.gama=1", f"{ROLLOUT}.name=???")
    assert any(key.startswith("algorithm.gtpo.gama=1: ") for key in found)
    assert found[f"{ROLLOUT}.name"].startswith(f"set {ROLLOUT}.name=vllm")


def test_a_verl_that_does_not_load_the_plugin_is_a_problem(monkeypatch):
    monkeypatch.delitem(sys.modules, "gtpo_verl.verl_plugin")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "gtpo_check")
    assert " gtpo,gtpo_check" in checked()["plugin gtpo"]


MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu=1"
FEW_TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu=512"
STAGES = f"{ACTOR}.megatron.pipeline_model_parallel_size=4"


@pytest.mark.parametrize(
    "words",
    [
        f"{FEW_TOKENS} {ACTOR}.ulysses_sequence_parallel_size=2 trainer.n_gpus_per_node=2",
        f"{FEW_TOKENS} {ACTOR}.use_dynamic_bsz=False {MICRO} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
        f"{ROLLOUT}.tensor_model_parallel_size=4 actor_rollout_ref.hybrid_engine=False trainer.n_gpus_per_node=2",
        "trainer.val_only=True trainer.val_before_train=True trainer.n_gpus_per_node=0",
        "algorithm.adv_estimator=remax trainer.use_v1=False",
    ],
    ids=["tokens of two GPUs", "no limit of tokens", "a rollout of its own", "no training", "remax"],
)
def test_what_fits_has_no_problem(words):
    assert problems(checked(*words.split())) == {}


@pytest.mark.parametrize("word", ["trainer.val_only=True", "algorithm.adv_estimator=remax"])
def test_what_verl_does_not_do_where_it_is_asked_for_is_a_problem(word):
    words = [word, "trainer.val_before_train=False", "trainer.use_v1=True"]
    (remedy,) = re.findall(r"set ([\w.]+=\w+)", checked(*words)[word])
    assert word not in checked(*words, remedy)


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        (f"{MICRO} {STAGES}", STAGES),
        (f"{MICRO} {ROLLOUT}.n=3 {ACTOR}.ppo_mini_batch_size=255", f"{ACTOR}.ppo_mini_batch_size=255"),
        (f"{ROLLOUT}.data_parallel_size=4", f"{ROLLOUT}.tensor_model_parallel_size=1"),
    ],
)
def test_what_two_gpus_cannot_be_split_over_is_named(words, subject):
    engine = ["model_engine=megatron"] if MICRO in words else []
    assert subject in checked(*engine, "trainer.n_gpus_per_node=2", *words.split())


def test_what_the_run_itself_would_say_is_said(monkeypatch):
    assert "loss_agg_mode" in checked()["GTPO"] and "GTPO" not in checked(GRPO)
    monkeypatch.setattr(preflight_problems, "problems", lambda config: ["a=1: no"])
    assert "a=1: no" in checked()
