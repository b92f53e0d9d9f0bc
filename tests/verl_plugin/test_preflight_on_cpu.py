from importlib.util import find_spec

import pytest
import verl.utils.config
from rollout_batch import needs_update

from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import preflight
from gtpo_verl.verl_plugin.config import VerlGTPOConfig


def test_cpu_recipe_is_the_papers_gtpo(compose_config):
    config = compose_config()
    preflight.validate(config)
    assert preflight.departures(config) == []
    assert not preflight.needs_reference_policy(config)


needs_v1 = pytest.mark.skipif(not find_spec("verl.trainer.ppo.v1"), reason="V1 came with verl 0.9.0")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.rollout.n=1", r"actor_rollout_ref\.rollout\.n=1.*at least 2"),
        (
            "algorithm.rollout_correction.bypass_mode=true",
            r"rollout_correction\.bypass_mode=True.*set algorithm\.gtpo\.entropy_from=update.*or bypass_mode=False",
        ),
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", r"size=2 with attn_implementation=sdpa.*set the"),
        (
            "++actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
            r"fsdp_config\.ulysses.*size=2 with attn_implementation=sdpa",
        ),
        ("+algorithm.gtpo.gamma=0.1", r"algorithm\.gtpo\.gamma=0\.1: there is no such key"),
        ("algorithm.gtpo.entropy_coeff=-1", r"algorithm\.gtpo\.entropy_coeff=-1: must be"),
    ],
)
def test_what_cannot_run_is_an_error_before_verl_starts_anything(compose_config, override, message):
    config = compose_config(override)
    with pytest.raises(ValueError, match=message):
        verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)


FROM_UPDATE = "algorithm.gtpo.entropy_from=update"


@needs_update
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"entropy_from=update with algorithm\.gtpo\.initial_entropy=null.*`gtpo-verl initial-entropy`"),
        (
            ["algorithm.gtpo.completion_filter=always", "algorithm.rollout_correction.rollout_rs=token_k1"],
            r"entropy_from=update with algorithm\.rollout_correction\.rollout_rs=token_k1.*set .*bypass_mode=True",
        ),
    ],
)
def test_what_cannot_take_its_entropy_from_the_update_is_an_error(compose_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        preflight.validate(compose_config(FROM_UPDATE, *overrides))


def test_an_old_verl_whose_actors_have_no_entropy_in_the_update_is_named(compose_config, monkeypatch):
    monkeypatch.setattr(verl, "__version__", "0.7.1")
    with pytest.raises(ValueError, match=r"entropy_from=update with verl 0\.7\.1: .*use verl 0\.8\.0 or later"):
        preflight.validate(compose_config(FROM_UPDATE, "algorithm.gtpo.initial_entropy=0.2"))


@needs_update
def test_entropy_from_the_update_lifts_the_ban_on_bypass_mode_and_asks_the_actor_for_entropy(compose_config, caplog):
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    rejects = "algorithm.rollout_correction.rollout_rs=token_k1"
    config = compose_config(FROM_UPDATE, bypass, rejects, "algorithm.gtpo.initial_entropy=0.2")
    verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert config.actor_rollout_ref.actor.calculate_entropy
    assert f"actor_rollout_ref.actor.calculate_entropy=True, since {FROM_UPDATE}" in caplog.text


@needs_update
def test_a_resumed_run_has_its_initial_entropy_and_may_take_the_rest_from_the_update(compose_config, tmp_path):
    (tmp_path / "checkpoints/global_step_5").mkdir(parents=True)
    preflight.validate(compose_config(FROM_UPDATE))


def test_with_several_updates_it_is_said_whose_entropy_the_update_gives(compose_config):
    vanilla = "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"
    config = compose_config(FROM_UPDATE, vanilla, "algorithm.gtpo.initial_entropy=0.2")
    assert [x.setting for x in preflight.departures(config)] == [vanilla.partition("=")[0]]
    config.actor_rollout_ref.actor.ppo_epochs = 2
    found = preflight.departures(config)[-1]
    assert found.setting == "algorithm.gtpo.entropy_from" and "the policy at its update" in found.paper


def test_a_config_without_gtpo_is_not_looked_at(compose_config):
    config = compose_config("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1", "+algorithm.gtpo.gamma=1")
    verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize(
    ("override", "paper"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "gtpo"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "reference model"),
        ("algorithm.use_kl_in_reward=true", "reference model"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "own entropy term"),
        ("actor_rollout_ref.rollout.temperature=0.9", "1.0"),
        ("actor_rollout_ref.rollout.top_p=0.9", "1.0"),
        ("actor_rollout_ref.rollout.top_k=50", "-1"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "one update per rollout"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "one update per rollout"),
        pytest.param("trainer.v1.trainer_mode=colocate_async", "one update per rollout", marks=needs_v1),
        ("algorithm.rollout_correction.rollout_is=token", "they multiply λ"),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "rejected tokens"),
        pytest.param("algorithm.filter_groups.enable=true", "groups without signal stay", marks=needs_v1),
        ("critic.enable=true", "no critic"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "Sec. 3"),
    ],
)
def test_departure_from_the_paper_is_named_once(compose_config, override, paper):
    (found,) = preflight.departures(compose_config(override, "algorithm.gtpo.initial_entropy=0.2"))
    key, value = override.split("=")
    assert found.setting == key and found.value.lower() == value and paper in found.paper


@pytest.mark.parametrize(
    ("override", "rows"),
    [
        pytest.param("trainer.v1.trainer_mode=colocate_async", "what finished first", marks=needs_v1),
        pytest.param("trainer.v1.trainer_mode=separate_async", "what finished first", marks=needs_v1),
        pytest.param("algorithm.filter_groups.enable=true", "groups with signal only", marks=needs_v1),
        ("+async_training.staleness_threshold=0", "what finished first"),
    ],
)
def test_an_initial_entropy_measured_on_a_biased_sample_is_named(compose_config, override, rows):
    def found(*more):
        departures = preflight.departures(compose_config(override, *more))
        return [x for x in departures if x.setting == "algorithm.gtpo.initial_entropy"]

    (departure,) = found()
    assert rows in departure.paper and "gtpo-verl initial-entropy" in departure.paper
    assert not found("algorithm.gtpo.initial_entropy=0.2")
    assert not found("algorithm.gtpo.completion_filter=never")


def test_the_unclipped_loss_with_several_updates_is_named_under_any_estimator(compose_config, caplog):
    grpo = "algorithm.adv_estimator=grpo"
    config = compose_config(grpo, "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.rollout.temperature=0.9")
    verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)
    assert "ppo_epochs  2      one update per rollout" in caplog.text and "temperature" not in caplog.text


def test_several_updates_with_a_clipped_loss_depart_in_the_loss_only(compose_config):
    config = compose_config(
        "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "actor_rollout_ref.actor.ppo_epochs=2"
    )
    assert [x.setting for x in preflight.departures(config)] == ["actor_rollout_ref.actor.policy_loss.loss_mode"]


@pytest.mark.parametrize(
    ("loss_mode", "change"),
    [
        ("geo_mean", "averages λ"),
        ("clip_cov", "λ = 2 can mean 0"),
        ("kl_cov", "tokens with λ = 0 too"),
        ("dro", "tokens with λ = 0 too"),
    ],
)
def test_a_loss_that_changes_what_a_conflict_weight_means_is_named(compose_config, loss_mode, change):
    (found,) = preflight.departures(compose_config(f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"))
    assert found.paper.startswith("gtpo (Eq. 11") and f"; {loss_mode} " in found.paper and change in found.paper


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "cispo", "sapo", "dppo_tv", "dppo_kl", "gpg"])
def test_a_loss_that_keeps_the_conflict_weights_is_named_without_more(compose_config, loss_mode):
    (found,) = preflight.departures(compose_config(f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}"))
    assert found.paper == "gtpo (Eq. 11: no clipping)"


def test_departures_are_shown_as_one_table(compose_config, caplog):
    config = compose_config("actor_rollout_ref.rollout.temperature=0.9", "algorithm.norm_adv_by_std_in_grpo=false")
    verl.utils.config.validate_config(config=config, use_reference_policy=False, use_critic=False)
    (record,) = [r for r in caplog.records if "not the paper's" in r.getMessage()]
    lines = record.getMessage().splitlines()[1:]
    assert all(line.startswith("GTPO: ") for line in lines)  # by which the launcher knows what to show
    header, *rows = (line.removeprefix("GTPO: ") for line in lines)
    assert header.split() == ["setting", "value", "paper"] and len(rows) == 2
    assert len({row.index(value) for row, value in zip(rows, ("False", "0.9"), strict=True)}) == 1


def test_resuming_without_the_initial_entropy_is_an_error_at_the_start(compose_config, tmp_path):
    (tmp_path / "checkpoints/global_step_5").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"gtpo_initial_entropy\.json.*algorithm\.gtpo\.initial_entropy"):
        preflight.check_resume(compose_config())
    preflight.check_resume(compose_config("algorithm.gtpo.initial_entropy=0.2"))
    preflight.check_resume(compose_config("algorithm.gtpo.completion_filter=always"))
    preflight.check_resume(compose_config("trainer.resume_mode=disable"))
    InitialEntropy(0.2).save(tmp_path / "checkpoints", VerlGTPOConfig())
    preflight.check_resume(compose_config())


def test_resuming_with_other_settings_is_told(compose_config, tmp_path, caplog):
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "global_step_5").mkdir(parents=True)
    InitialEntropy(0.2).save(checkpoints, VerlGTPOConfig(dump_freq=3))
    preflight.check_resume(compose_config())
    assert not caplog.records
    preflight.check_resume(compose_config("+algorithm.gtpo.conflict_span=all", "algorithm.gtpo.initial_entropy=0.5"))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"GTPO resumes from {checkpoints} with other settings: algorithm.gtpo.initial_entropy=0.5, was None; "
        "algorithm.gtpo.conflict_span=all, was leading"
    )
    caplog.clear()
    InitialEntropy.path(checkpoints).write_text("{")
    preflight.check_resume(compose_config("algorithm.gtpo.initial_entropy=0.5"))
    (record,) = caplog.records
    assert "unknown which, since" in record.getMessage() and "gtpo_initial_entropy.json" in record.getMessage()


def test_checkpoint_of_another_folder_brings_its_own_record(compose_config, tmp_path):
    other = tmp_path / "other/global_step_7"
    other.mkdir(parents=True)
    config = compose_config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}")
    assert preflight.resume_folder(config) == str(tmp_path / "other")
    with pytest.raises(ValueError, match="other/gtpo_initial_entropy.json"):
        preflight.check_resume(config)
