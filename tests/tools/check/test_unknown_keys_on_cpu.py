import pytest
from verl_config import verl_config

from gtpo_verl.tools.check import unknown_keys


def remedy(word):
    (finding,) = unknown_keys.unknown([word], verl_config())
    assert finding.says == "verl has no such key"
    return finding.remedy


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=True", "verl 0.2.0 was the last to read it: remove it"),
        ("actor_rollout_ref.actor.megatron.grad_offload=True", "verl 0.9.0 was the last to read it: remove it"),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", "was the last to read it: remove it"),
        ("trainer.use_legacy_worker_impl=disable", "was the last to read it: remove it"),
    ],
)
def test_a_key_that_verl_has_dropped_is_removed(word, says):
    assert says in remedy(word)


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
    "word",
    [
        "actor_rollout_ref.actor.gvpo_beta=1",
        "actor_rollout_ref.rollout.n_agent=5",
        "data.max_obs_length=500",
        "actor_rollout_ref.actor.state_masking=True",
    ],
)
def test_a_key_of_another_trainer_has_no_likeness(word):
    assert remedy(word) == f"if your own code reads it, write ++{word}; if not, remove it"
    verl_config(f"++{word}")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("rollout.n=8", "did you mean actor_rollout_ref.rollout.n? (or "),
        ("actor_rollout_ref.actor.ppo_mini_batchsize=8", "did you mean actor_rollout_ref.actor.ppo_mini_batch_size?"),
        ("trainer.totl_epochs=1", "did you mean trainer.total_epochs?"),
    ],
)
def test_a_key_of_a_letter_or_a_section_less_is_named_in_full(word, meant):
    assert remedy(word).startswith(meant)


def warned(*words, base=()):
    return {x.subject: x.advice for x in unknown_keys.unread(words, verl_config(*base), verl_config(*base, *words))}


def test_an_addition_that_nothing_reads_is_named():
    watch = "collapse_" + "wach"  # whole in this file, the program would read it
    wrong = ["+algorithm.gpto.entropy_coeff=1", f"+trainer.{watch}=stop", "++reward_model.overlong_buffer.len=9"]
    found = warned(*wrong)
    assert list(found) == [word.lstrip("+").partition("=")[0] for word in wrong]
    assert "is it spelt right?" in found[f"trainer.{watch}"]
    assert "write ++reward.reward_kwargs.overlong_buffer_cfg.len=9" in found["reward_model.overlong_buffer.len"]


def test_additions_that_verl_gtpo_or_another_library_reads_are_not():
    read = ["+algorithm.gtpo.entropy_coeff=1", "+trainer.collapse_watch=stop", "++trainer.nnodes=1"]
    handed_on = ["+actor_rollout_ref.rollout.engine_kwargs.vllm.made_up=1"]
    handed_on += ["+actor_rollout_ref.model.override_config.made_up=1", "+ray_kwargs.ray_init.made_up=1"]
    assert warned(*read, *handed_on) == {}


def test_an_addition_that_the_users_reward_reads_is_not(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(config): return config.trainer['margin']\n")
    base = (f"reward.custom_reward_function.path={tmp_path}/mine.py",)
    assert warned("+trainer.margin=1", base=base) == {}
    misspelt = "+trainer.mar" + "gni=1"
    assert len(warned(misspelt, base=base)) == 1
