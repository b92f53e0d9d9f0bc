import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import verl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict
from verl_config import COMPLETE, validate, verl_config

from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import compat, preflight, problems, ranges, resume, values
from gtpo_verl.verl_plugin import departures as paper
from gtpo_verl.verl_plugin.run_config import NOT_SELECTED, RunConfig, VerlGTPOConfig

KNOWN = "algorithm.gtpo.initial_entropy=0.2"
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
CLIPPED = f"{LOSS_MODE}=vanilla"
FROM_UPDATE = "algorithm.gtpo.entropy_from=update"
REJECT = "algorithm.rollout_correction.rollout_rs=token_k1"
WEIGH = "algorithm.rollout_correction.rollout_is=token"


def departures(config):
    return paper.departures(config, RunConfig.read(config))


def resume_warning(config):
    return resume.resume_warning(config, RunConfig.read(config))


@pytest.mark.parametrize("initial_entropy", ["null", "0.2"])
def test_cpu_recipe_is_the_papers_gtpo(compose_config, initial_entropy):
    config = compose_config(f"algorithm.gtpo.initial_entropy={initial_entropy}")
    assert problems.problems(config) == departures(config) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor_rollout_ref.rollout.n=1"], r"actor_rollout_ref\.rollout\.n=1.*2 or more"),
        ([BYPASS], r"bypass_mode=True.*set \+\+algorithm\.gtpo\.entropy_from=update.*or algorithm.*bypass_mode=False"),
        (
            ["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"],
            r"actor\.ulysses.*size=2 with attn_implementation=sdpa.*set the",
        ),
        (
            ["++actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"],
            r"fsdp_config\.ulysses.*size=2 with attn_implementation=sdpa",
        ),
        (["+algorithm.gtpo.gamma=0.1"], r"algorithm\.gtpo\.gamma=0\.1: unknown key"),
        (["algorithm.gtpo.entropy_coeff=-1"], r"algorithm\.gtpo\.entropy_coeff=-1: must be"),
        ([FROM_UPDATE], r"entropy_from=update with algorithm\.gtpo\.initial_entropy=null.*`gtpo-verl initial-entropy`"),
        (
            [FROM_UPDATE, KNOWN, REJECT],
            rf"entropy_from=update with {REJECT}: .*{BYPASS} {LOSS_MODE}=bypass_mode ",
        ),
    ],
)
def test_what_cannot_run_is_an_error_before_verl_starts_anything(compose_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        validate(compose_config(*overrides))


@pytest.mark.parametrize("way_out", range(2))
def test_the_ways_out_of_bypass_mode_can_be_typed(compose_config, way_out):
    (problem,) = problems.problems(compose_config(KNOWN, BYPASS))
    typed = re.findall(r"(?:set|or) ([+\w]+\.[\w.]+=\w+)", problem)[way_out]
    assert problems.problems(compose_config(KNOWN, BYPASS, typed)) == []


@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
@pytest.mark.parametrize(
    ("override", "unused", "meant"),
    [
        ("algorithm.gpto.dump_dir=x", "algorithm.gpto", "algorithm.gtpo"),
        ("actor_rollout_ref.actor.gtpoo.dump_dir=x", "actor_rollout_ref.actor.gtpoo", "algorithm.gtpo"),
        ("trainer.colapse_watch=stop", "trainer.colapse_watch=stop", "trainer.collapse_watch"),
        ("algorithm.collapse_watch=stop", "algorithm.collapse_watch=stop", "trainer.collapse_watch"),
    ],
)
def test_a_key_of_ours_that_nothing_reads_is_an_error(compose_config, override, unused, meant, estimator):
    with pytest.raises(ValueError, match=rf"unused key {unused}; .* {meant}\?"):
        validate(compose_config(f"algorithm.adv_estimator={estimator}", CLIPPED, f"+{override}"))


@pytest.mark.parametrize(
    ("override", "unused", "meant"),
    [
        (
            "algorithm.min_correct_reward=11",
            "algorithm.min_correct_reward=11",
            "algorithm.gtpo.min_correct_reward",
        ),
        ("algorithm.GTPO.min_correct_reward=11", "algorithm.GTPO", "algorithm.gtpo"),
        ("algorithm.gtpo_trajectory.entropy_coeff=0", "algorithm.gtpo_trajectory", "algorithm.gtpo"),
        ("algorithm.tgpo.entropy_coeff=0", "algorithm.tgpo", "algorithm.gtpo"),
        ("trainer.collapse_watcher=True", "trainer.collapse_watcher=True", "trainer.collapse_watch"),
        ("gtpo.entropy_coeff=1", "gtpo", "algorithm.gtpo"),
    ],
)
def test_a_key_of_gtpos_under_another_name_is_an_error_of_gtpos_runs_alone(compose_config, override, unused, meant):
    with pytest.raises(ValueError, match=rf"unused key {unused}; .* {meant}\?"):
        validate(compose_config(f"+{override}"))
    validate(compose_config("algorithm.adv_estimator=grpo", CLIPPED, f"+{override}"))


def test_packages_that_a_plain_verl_lacks_are_named_before_ray_starts(compose_config, monkeypatch):
    for name in ("transfer_queue", "cachetools"):
        monkeypatch.setitem(sys.modules, name, None)
    legacy = compose_config("trainer.use_v1=false")
    validate(legacy)
    assert problems.problems(legacy) == []
    needs = "trainer.use_v1=True needs packages that are not installed: pip install TransferQueue cachetools"
    with pytest.raises(ValueError, match=f"^{needs}$"):
        validate(compose_config("trainer.use_v1=true"))


@pytest.mark.parametrize("section", ["algorithm.grpo", "algorithm.gspo", "my.gdpo", "gpo"])
def test_a_section_of_another_algorithm_is_left_alone(compose_config, section):
    validate(compose_config(f"+{section}.entropy_coeff=1", f"+{section}.base=x"))


@pytest.mark.parametrize(
    "override",
    [
        "my.tgpo.entropy_coeff=1",
        "algorithm.tpo.dump_dir=x",
        "my.collapse_watch=0.2",
        "trainer.collapse_watcher=True",
        "trainer.collapse_match=1",
    ],
)
def test_a_key_like_ours_is_left_alone_under_another_estimator(compose_config, override):
    validate(compose_config("algorithm.adv_estimator=grpo", CLIPPED, f"+{override}"))


def test_an_estimator_of_a_name_like_gtpo_is_left_alone(compose_config):
    validate(compose_config("algorithm.adv_estimator=TGPO", CLIPPED))


@pytest.mark.parametrize("more", [[], [FROM_UPDATE], [FROM_UPDATE, KNOWN]], ids=["alone", "update", "update, known"])
def test_a_dump_of_another_estimator_needs_the_old_log_prob_pass(compose_config, tmp_path, more):
    dump = ("algorithm.adv_estimator=grpo", CLIPPED, f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}")
    (problem,) = problems.problems(compose_config(*dump, BYPASS, *more))
    assert problem.startswith("algorithm.rollout_correction.bypass_mode=True: ")
    assert "token dump" in problem and "False" in problem and "dump_dir" in problem
    assert problems.problems(compose_config(*dump, *more)) == []


def test_a_loss_that_the_workers_alone_know_is_left_to_them(compose_config):
    with pytest.raises(ValueError, match=rf"{LOSS_MODE}=cispo_v2: .* cispo\?"):
        validate(compose_config(f"{LOSS_MODE}=cispo_v2"))
    validate(compose_config(f"{LOSS_MODE}=cispo_v2", "actor_rollout_ref.model.external_lib=my_losses"))
    validate(compose_config(f"{LOSS_MODE}=of_my_own"))


@pytest.mark.parametrize("dtype", ["half", "float", "null"])
def test_a_dtype_of_the_rollout_that_verl_has_no_name_for_is_no_error(compose_config, dtype):
    validate(compose_config(f"actor_rollout_ref.rollout.dtype={dtype}"))


def test_a_config_that_changed_is_checked_again(compose_config):
    config = compose_config()
    validate(config)
    config.actor_rollout_ref.rollout.n = 1
    with pytest.raises(ValueError, match="rollout.n=1"):
        validate(config)


def test_all_problems_are_told_at_once(compose_config):
    wrong = compose_config("actor_rollout_ref.rollout.n=1", BYPASS, "+trainer.collapse_watch=stp", f"{LOSS_MODE}=gtop")
    found = problems.problems(wrong)
    assert len(found) == 4
    overrides = ("collapse_watch=stp", "rollout.n=1", "bypass_mode=True", f"{LOSS_MODE}=gtop: ")
    assert all(override in problem for override, problem in zip(overrides, found, strict=True))
    with pytest.raises(ValueError) as error:
        preflight.validated(wrong)
    assert all(problem in str(error.value) for problem in found)


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("algorithm.adv_estimator=gtp", "gtpo"),
        ("algorithm.adv_estimator=grop", "grpo"),
        (f"{LOSS_MODE}=gtop", "gtpo"),
        (f"{LOSS_MODE}=vanila", "vanilla"),
    ],
)
@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
def test_a_misspelt_name_is_a_problem_with_the_near_one_and_all_that_there_are(
    compose_config, override, meant, estimator
):
    (problem,) = problems.problems(compose_config(f"algorithm.adv_estimator={estimator}", override))
    near, _, known = problem.partition("? ")
    assert near.startswith(f"{override}: unknown: ") and near.endswith(f" {meant}")
    assert {"gtpo", meant} <= {*known.removeprefix("there are ").split(", ")}


def test_a_loss_that_the_workers_alone_may_know_stops_a_check_and_not_a_run(compose_config):
    config = compose_config(KNOWN, f"{LOSS_MODE}=somebody_elses")
    (problem,) = problems.problems(config)
    assert problem.startswith(f"{LOSS_MODE}=somebody_elses: unknown: ")
    assert " bypass_mode, cispo, " in problem and "?" not in problem
    preflight.validated(config)


IN_LOSS = [
    f"{LOSS_MODE}=bypass_mode",
    "+actor_rollout_ref.actor.policy_loss.rollout_correction=${algorithm.rollout_correction}",
]


@pytest.mark.parametrize("correction", [REJECT, WEIGH])
def test_a_rollout_correction_that_bypass_mode_would_disable_in_silence_is_an_error(compose_config, correction):
    """verl's workers do not read it; test_compose_on_cpu.py shows that with the remedy they reject."""
    (problem,) = problems.problems(compose_config(FROM_UPDATE, BYPASS, KNOWN, correction))
    assert f"{correction} with algorithm.rollout_correction.bypass_mode=True" in problem
    assert all(override in problem for override in IN_LOSS)
    assert "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean" in problem  # verl #4852
    assert problems.problems(compose_config(FROM_UPDATE, BYPASS, KNOWN, correction, f"{LOSS_MODE}=bypass_mode"))
    assert not problems.problems(compose_config(FROM_UPDATE, BYPASS, KNOWN, correction, *IN_LOSS))


def test_entropy_from_the_update_lifts_the_ban_on_bypass_mode_and_asks_the_actor_for_entropy(compose_config, caplog):
    config = compose_config(FROM_UPDATE, BYPASS, KNOWN)
    validate(config)
    assert config.actor_rollout_ref.actor.calculate_entropy
    assert f"actor_rollout_ref.actor.calculate_entropy=True, since {FROM_UPDATE}" in caplog.text


def checkpoint(folder, step=5):
    """As verl leaves it."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))


def test_a_config_without_gtpo_is_not_looked_at(compose_config):
    validate(compose_config("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=1", "+algorithm.gtpo.gamma=1"))


@pytest.mark.parametrize(
    ("override", "paper"),
    [
        ("actor_rollout_ref.actor.loss_agg_mode=token-mean", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.use_kl_loss=true", "reference model"),
        ("algorithm.use_kl_in_reward=true", "reference model"),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "own entropy term"),
        ("actor_rollout_ref.rollout.temperature=0.9", "1.0"),
        ("actor_rollout_ref.rollout.top_p=0.9", "#8020"),
        ("actor_rollout_ref.rollout.top_k=50", "-1"),
        ("actor_rollout_ref.rollout.dtype=bfloat16", "#8076"),
        ("actor_rollout_ref.rollout.quantization=fp8", "#8076"),
        ("actor_rollout_ref.actor.ppo_epochs=2", "one update"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "one update"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=256", "counts the padding"),
        ("trainer.v1.trainer_mode=colocate_async", "one update"),
        (WEIGH, "they multiply λ"),
        (REJECT, "rejected tokens"),
        ("algorithm.filter_groups.enable=true", "without signal"),
        ("critic.enable=true", "no critic"),
        ("actor_rollout_ref.model.use_fused_kernels=true", "#2656"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "Sec. 3"),
        (f"{LOSS_MODE}=vanilla", "gtpo (Eq. 11"),
        (f"{LOSS_MODE}=geo_mean", "geo_mean averages λ"),
        (f"{LOSS_MODE}=clip_cov", "λ = 2 can mean 0"),
        (f"{LOSS_MODE}=kl_cov", "tokens with λ = 0 too"),
        (f"{LOSS_MODE}=dro", "tokens with λ = 0 too"),
    ],
)
def test_departure_from_the_paper_is_named_once(compose_config, override, paper):
    (found,) = departures(compose_config(override, KNOWN))
    key, value = override.split("=")
    assert found.setting == key and found.value.lower() == value and paper in found.paper


@pytest.mark.parametrize(
    "key", ["algorithm.use_kl_in_reward", "reward.reward_kwargs.overlong_buffer_cfg.enable"], ids=["KL", "length"]
)
def test_what_lowers_rewards_is_named_beside_a_least_reward_of_right_answers(compose_config, key):
    (found,) = departures(compose_config(f"++{key}=true", "+algorithm.gtpo.min_correct_reward=11", KNOWN))
    assert found.setting == key and "right answer" in found.paper and "min_correct_reward=11" in found.paper
    assert all("right answer" not in x.paper for x in departures(compose_config(f"++{key}=true", KNOWN)))


def test_a_mini_batch_that_does_not_divide_the_batch_is_named_under_a_clipped_loss_too(compose_config):
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    assert size in [x.setting for x in departures(compose_config(KNOWN, CLIPPED, f"{size}=3"))]
    assert size not in [x.setting for x in departures(compose_config(KNOWN, CLIPPED, f"{size}=4"))]


@pytest.mark.parametrize("name", ["GTPO", "gpto"])
def test_a_misspelt_gtpo_does_not_start(compose_config, name):
    with pytest.raises(ValueError, match=rf"adv_estimator={name}: unknown: .* gtpo\? .*grpo"):
        preflight.check_and_log(compose_config(f"algorithm.adv_estimator={name}"))
    preflight.check_and_log(compose_config("algorithm.adv_estimator=registered_elsewhere"))


def test_several_updates_per_rollout_of_fully_async_are_named(compose_config):
    steps = ("trigger_parameter_sync_step", "require_batches")
    found = departures(compose_config(KNOWN, *(f"+async_training.{step}=2" for step in steps)))
    assert [x.setting for x in found] == [f"async_training.{step}" for step in steps]
    assert not departures(compose_config(KNOWN, *(f"+async_training.{step}=1" for step in steps)))


def test_several_updates_per_rollout_of_separate_async_are_named_by_the_key_that_sets_their_number(compose_config):
    words, key = (KNOWN, "trainer.v1.trainer_mode=separate_async"), "trainer.v1.separate_async.parameter_sync_step"
    batch = "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8"  # as verl asserts for 2
    assert [x.setting for x in departures(compose_config(*words, *batch, f"{key}=2"))] == [
        key,
        "trainer.v1.trainer_mode",
    ]
    assert [x.setting for x in departures(compose_config(*words, f"{key}=1"))] == ["trainer.v1.trainer_mode"]


def test_a_rule_of_ones_own_that_cannot_be_imported_is_a_problem(compose_config):
    (problem,) = problems.problems(compose_config("++algorithm.gtpo.token_weights=pkg://no_such_module.rule", KNOWN))
    assert "No module named 'no_such_module'" in problem and "PYTHONPATH" in problem


def of_entropy(entropy):
    return entropy


def test_a_rule_of_ones_own_is_a_departure_and_a_field_that_the_mode_cannot_give_a_problem(compose_config):
    key, name = "algorithm.gtpo.token_weights", f"pkg://{__name__}.of_entropy"
    (found,) = departures(compose_config(KNOWN, f"++{key}='{name}'"))
    assert (found.setting, found.value) == (key, name)
    overrides = [KNOWN, f"++{key}='{name}'", "algorithm.gtpo.entropy_from=update"]
    (problem,) = problems.problems(compose_config(*overrides))
    assert f"{key}={name} asks for entropy" in problem and " old_log_prob" in problem


def test_the_rollouts_precision_is_compared_with_that_of_training(compose_config):
    (found,) = departures(compose_config(KNOWN, "~actor_rollout_ref.actor.fsdp_config.mixed_precision"))
    assert found.setting == "actor_rollout_ref.rollout.dtype" and found.value == "float32"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # It does not bound π/π_rollout.
        ([FROM_UPDATE, BYPASS], [BYPASS]),
        ([FROM_UPDATE, BYPASS, CLIPPED], [CLIPPED]),
        # Whose entropy is it?
        ([FROM_UPDATE, CLIPPED, "actor_rollout_ref.actor.ppo_epochs=2"], [CLIPPED, FROM_UPDATE]),
        ([CLIPPED, "actor_rollout_ref.actor.ppo_epochs=2"], [CLIPPED]),
    ],
)
def test_what_departs_from_the_paper_together_only(compose_config, overrides, expected):
    found = departures(compose_config(KNOWN, *overrides))
    assert [x.setting for x in found] == [setting.partition("=")[0] for setting in expected]


@pytest.mark.parametrize(
    ("override", "rows"),
    [
        ("trainer.v1.trainer_mode=colocate_async", "what finished first"),
        ("trainer.v1.trainer_mode=separate_async", "what finished first"),
        ("algorithm.filter_groups.enable=true", "groups with signal"),
        ("+async_training.staleness_threshold=0", "what finished first"),
    ],
)
def test_an_initial_entropy_measured_on_biased_rows_is_named(compose_config, tmp_path, override, rows):
    def found(*more):
        return [x for x in departures(compose_config(override, *more)) if x.setting == "algorithm.gtpo.initial_entropy"]

    (departure,) = found()
    assert rows in departure.paper and "gtpo-verl initial-entropy" in departure.paper
    assert not found(KNOWN) and not found("algorithm.gtpo.completion_filter=never")
    checkpoint(tmp_path / "checkpoints")
    assert not found()  # the record has it


@pytest.mark.parametrize(("base", "is_async"), [("sync", False), ("colocate_async", True), ("separate_async", True)])
def test_a_trainers_class_and_not_its_name_says_whether_it_is_asynchronous(compose_config, base, is_async):
    from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    register_trainer("own")(type("Own", (get_trainer_cls(base),), {}))
    try:
        found = [x.setting for x in departures(compose_config("trainer.v1.trainer_mode=own"))]
        expected = ["algorithm.gtpo.initial_entropy", "trainer.v1.trainer_mode"]
        assert found == (expected if is_async else [])
    finally:
        del TRAINER_REGISTRY["own"]
    assert departures(compose_config("trainer.v1.trainer_mode=unknown_here", KNOWN)) == []


def test_megatrons_refusal_of_the_papers_loss_under_context_parallelism_is_named(compose_config, monkeypatch):
    config = compose_config(KNOWN)
    with open_dict(config):
        config.actor_rollout_ref.actor.strategy = "megatron"
        config.actor_rollout_ref.actor.megatron = {"context_parallel_size": 2, "dtype": "float32"}
    assert problems.problems(config) == [] or verl.__version__ != "0.9.1"
    monkeypatch.setattr(Path, "read_text", lambda path: "loss_agg_mode='seq-mean-token-mean' is incompatible")
    (problem,) = problems.problems(config)
    assert "loss_agg_mode=seq-mean-token-mean with actor_rollout_ref.actor.megatron.context_parallel_size=2" in problem
    with open_dict(config):
        config.actor_rollout_ref.actor.megatron.dynamic_context_parallel = True
    assert problems.problems(config) == []


OFFLOAD = "actor_rollout_ref.actor.fsdp_config.param_offload"
LOSES_UPDATES = pytest.mark.parametrize(
    ("trainer", "steps"),
    [
        ("trainer.use_v1=True trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step"),
        ("+async_training.require_batches=1", "async_training.trigger_parameter_sync_step"),
    ],
    ids=["separate_async", "fully_async"],
)


def losing_updates(trainer, steps):
    """Overrides with which verl would keep only the last update between two syncs."""
    strategy = "actor_rollout_ref.actor.strategy=fsdp2"
    return [*trainer.split(), f"++{steps}=4", strategy, f"{OFFLOAD}=True", KNOWN]


@LOSES_UPDATES
def test_updates_that_verl_would_lose_are_an_error(compose_config, trainer, steps):
    (problem,) = problems.problems(compose_config(*losing_updates(trainer, steps)))
    assert problem.startswith(f"{OFFLOAD}=True with {steps}=4: ")
    assert f"set {OFFLOAD}=False or {steps}=1, or " in problem
    assert f"{BYPASS} with ++{FROM_UPDATE}" in problem


@LOSES_UPDATES
def test_updates_are_lost_wherever_the_entropy_comes_from(compose_config, trainer, steps):
    """verl computes old log-probs of earlier weights unless it bypasses that pass."""
    (problem,) = problems.problems(compose_config(*losing_updates(trainer, steps), FROM_UPDATE))
    assert problem.startswith(f"{OFFLOAD}=True with {steps}=4: ")


@LOSES_UPDATES
@pytest.mark.parametrize(
    "way_out",
    [[f"{OFFLOAD}=False"], ["++{steps}=1"], [BYPASS, FROM_UPDATE], ["actor_rollout_ref.actor.strategy=fsdp"]],
    ids=["no offload", "one update", "bypass", "fsdp"],
)
def test_each_way_out_of_lost_updates_has_no_problem(compose_config, trainer, steps, way_out):
    right = [override.format(steps=steps) for override in way_out]
    assert problems.problems(compose_config(*losing_updates(trainer, steps), *right)) == []


def test_the_unclipped_loss_with_several_updates_is_named_under_any_estimator(compose_config, caplog):
    grpo = "algorithm.adv_estimator=grpo"
    config = compose_config(grpo, "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.rollout.temperature=0.9")
    validate(config)
    assert re.search("ppo_epochs +2 +one update", caplog.text) and "temperature" not in caplog.text


def test_departures_are_shown_as_one_table(compose_config, caplog):
    changed = "actor_rollout_ref.rollout.temperature=0.9", "algorithm.norm_adv_by_std_in_grpo=false"
    config = compose_config(KNOWN, *changed)
    validate(config)
    (record,) = [r for r in caplog.records if "not the paper's" in r.getMessage()]
    lines = record.getMessage().splitlines()[1:]
    assert all(line.startswith("GTPO: ") for line in lines)  # by which the launcher knows what to show
    header, *rows = (line.removeprefix("GTPO: ") for line in lines)
    assert header.split() == ["setting", "value", "paper"] and len(rows) == 2
    assert len({row.index(value) for row, value in zip(rows, ("False", "0.9"), strict=True)}) == 1


def test_resuming_without_the_initial_entropy_is_an_error_at_the_start(compose_config, tmp_path):
    checkpoint(tmp_path / "checkpoints")
    (problem,) = problems.problems(compose_config())
    assert "gtpo_initial_entropy.json" in problem and "algorithm.gtpo.initial_entropy" in problem
    for override in (KNOWN, "algorithm.gtpo.completion_filter=always", "trainer.resume_mode=disable"):
        preflight.validated(compose_config(override))
    InitialEntropy(0.2).save(tmp_path / "checkpoints", VerlGTPOConfig())
    for overrides in ((), (FROM_UPDATE,)):  # which may take the rest from the update
        preflight.validated(compose_config(*overrides))


def test_without_a_folder_for_its_record_gtpo_does_not_start(compose_config):
    words = "trainer.default_local_dir=null", "trainer.resume_mode=disable"
    (problem,) = problems.problems(compose_config(*words))
    assert problem.startswith("trainer.default_local_dir=null: ") and problem.endswith("name a folder")
    assert not problems.problems(compose_config(*words, "algorithm.adv_estimator=grpo"))


def test_a_tracker_without_a_number_is_named(compose_config, tmp_path):
    checkpoint(tmp_path / "checkpoints")
    (tracker := tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("")
    (problem,) = problems.problems(compose_config())
    assert problem.startswith(f"{tracker} holds no number") and problem.endswith("or remove it")
    tracker.unlink()
    assert not problems.problems(compose_config())


def test_resuming_with_other_settings_is_told(compose_config, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    checkpoint(checkpoints)
    InitialEntropy(0.2).save(checkpoints, VerlGTPOConfig())
    assert not resume_warning(compose_config())
    changed = compose_config("+algorithm.gtpo.conflict_span=all", "algorithm.gtpo.initial_entropy=0.5")
    folder, settings = resume_warning(changed).split(" with other settings: ")
    assert folder.endswith(f" {checkpoints}")
    assert settings.split("; ") == [
        "algorithm.gtpo.initial_entropy=0.5, was None",
        "algorithm.gtpo.conflict_span=all, was leading",
    ]
    InitialEntropy.path(checkpoints).write_text("{")
    warning = resume_warning(compose_config("algorithm.gtpo.initial_entropy=0.5"))
    assert f" {checkpoints}; " in warning and "unknown" in warning and "gtpo_initial_entropy.json" in warning


def test_a_record_without_the_checkpoint_that_verl_would_resume_from_is_told(compose_config, tmp_path, caplog):
    """verl #7952: with async_save under FSDP nobody writes the file that names the checkpoint."""
    checkpoints = tmp_path / "checkpoints"
    checkpoint(checkpoints)
    InitialEntropy(0.2).save(checkpoints, VerlGTPOConfig())
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    config = compose_config(KNOWN)
    validate(config)
    (warning,) = (record.getMessage() for record in caplog.records if "verl #7952" in record.getMessage())
    assert warning.startswith(f"{InitialEntropy.path(checkpoints)} ")
    assert "trainer.resume_mode=resume_path trainer.resume_from_path=" in warning
    assert not resume_warning(compose_config(KNOWN, "trainer.resume_mode=disable"))


def test_checkpoint_of_another_folder_brings_its_own_record(compose_config, tmp_path):
    other = tmp_path / "other/global_step_7"
    other.mkdir(parents=True)
    config = compose_config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={other}")
    assert "other/gtpo_initial_entropy.json" in problems.problems(config)[0]


def test_importance_weights_go_with_the_entropy_from_the_update(compose_config):
    assert problems.problems(compose_config(FROM_UPDATE, KNOWN, WEIGH)) == []


@pytest.mark.parametrize(("size", "aggregation"), [(1, "seq-mean-token-mean"), (2, "token-mean")])
def test_megatron_of_0_9_0_is_refused_only_where_its_loss_is_wrong(compose_config, monkeypatch, size, aggregation):
    config = compose_config(KNOWN, f"actor_rollout_ref.actor.loss_agg_mode={aggregation}")
    with open_dict(config):
        config.actor_rollout_ref.actor.strategy = "megatron"
        config.actor_rollout_ref.actor.megatron = {"context_parallel_size": size, "dtype": "float32"}
    monkeypatch.setattr(verl, "__version__", "0.9.0")
    assert problems.problems(config) == []


@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_an_attention_that_cannot_be_sliced_is_named(compose_config, attention):
    words = [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        f"++actor_rollout_ref.model.override_config.attn_implementation={attention}",
    ]
    (problem,) = problems.problems(compose_config(KNOWN, *words))
    assert f"attn_implementation={attention}" in problem


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("distillation.enabled=true", ["distillation.enabled"]),
        ("actor_rollout_ref.rollout.top_k=0", []),
        ("trainer.v1.trainer_mode=colocate_async", []),  # the legacy trainer does not read it
    ],
)
def test_only_what_departs_from_the_paper_is_listed(compose_config, override, expected):
    found = departures(compose_config(KNOWN, "trainer.use_v1=false", override))
    assert [departure.setting for departure in found] == expected


def test_a_key_of_gtpo_and_one_of_the_rollout_are_named_at_once(compose_config):
    found = problems.problems(compose_config("+algorithm.gtpo.gamma=1", "actor_rollout_ref.rollout.n=1"))
    assert len(found) == 2 and "rollout.n=1" in found[1]


def test_a_run_says_that_it_has_no_reference_policy_if_it_has_none(compose_config, caplog):
    validate(compose_config(KNOWN))
    assert "reference policy" in caplog.text
    caplog.clear()
    validate(compose_config(KNOWN, "actor_rollout_ref.actor.use_kl_loss=true"))
    assert "reference policy" not in caplog.text


def test_why_gtpo_cannot_run_is_no_problem_of_grpo(compose_config, monkeypatch):
    monkeypatch.setattr(compat, "load_errors", {"broken": None})
    with pytest.raises(RuntimeError, match="broken"):
        validate(compose_config())
    grpo = compose_config("algorithm.adv_estimator=grpo", CLIPPED)
    validate(grpo)
    assert problems.problems(grpo) == []


def test_steps_between_dumps_are_whole(compose_config, tmp_path):
    words = f"+algorithm.gtpo.dump_dir={tmp_path}", "+algorithm.gtpo.dump_freq=2.5"
    (problem,) = problems.problems(compose_config(*words))
    assert "dump_freq=2.5" in problem


READ = sorted(problems._READ)
KINDS = [8.5, -1, 0, None, [8], {"a": 1}, "abc", "", "???", "${no.such.key}", True, float("nan"), float("inf")]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(words=st.dictionaries(st.sampled_from(READ), st.sampled_from(KINDS), min_size=1, max_size=3), gtpo=st.booleans())
def test_no_value_of_any_kind_is_more_than_an_error_with_its_key(compose_config, words, gtpo):
    config = compose_config(KNOWN, *([] if gtpo else ["algorithm.adv_estimator=grpo", CLIPPED]))
    OmegaConf.set_struct(config, False)
    for key, value in words.items():
        with suppress(*NOT_SELECTED):  # its section is none any more
            OmegaConf.update(config, key, value, merge=False)
    problems.problems(config)
    with suppress(ValueError):
        preflight.validated(config)


@pytest.mark.parametrize("key", [key for key in READ if key not in values.SECTIONS])
@pytest.mark.parametrize("value", [8.5, [8], "abc", "???"])
def test_a_number_of_the_wrong_kind_is_named_before_it_is_used(compose_config, key, value):
    config = compose_config(KNOWN)
    OmegaConf.update(config, key, value, force_add=True)
    found = problems.problems(config)
    assert any(problem.startswith(f"{key} is ") and "whole number" in problem for problem in found)
    for problem in found:
        takes = problem.partition("give ")[2]
        OmegaConf.update(config, key, int(takes.split()[-1]))
    assert not any(problem.startswith(f"{key} is ") for problem in problems.problems(config))


def test_a_run_without_gtpo_is_not_told_of_verls_values(compose_config):
    config = compose_config("algorithm.adv_estimator=grpo", CLIPPED, "actor_rollout_ref.rollout.n=8.5")
    assert problems.problems(config) == []


@pytest.mark.parametrize(
    ("path", "says"),
    [("null", "=null with"), ("/run/step_7", "from its end"), ("/run/global_step_7/", "from its end")],
)
def test_a_path_that_verl_cannot_resume_from_is_named(compose_config, path, says):
    config = compose_config(KNOWN, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    (problem,) = problems.problems(config)
    assert problem.startswith(f"trainer.resume_from_path={path}") and says in problem
    assert problems.problems(compose_config(KNOWN, "trainer.resume_mode=auto")) == []


def test_a_checkpoint_that_is_not_there_is_named_and_not_its_record(compose_config, tmp_path):
    path = tmp_path / "global_step_7"
    config = compose_config("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}")
    (problem,) = problems.problems(config)
    assert problem.startswith(f"trainer.resume_from_path={path}: ") and "trainer.resume_mode=auto" in problem
    assert "gtpo_initial_entropy.json" not in problem
    path.mkdir()
    (problem,) = problems.problems(config)
    assert "gtpo_initial_entropy.json" in problem


newest_only = pytest.mark.skipif(
    verl.__version__ != compat.SUPPORTED_VERL[-1], reason="the places are the newest verl's"
)


@newest_only
@pytest.mark.parametrize("row", ranges.RANGES, ids=lambda row: row.key)
def test_the_place_in_verl_that_reads_a_key_exists(row):
    file, _, name = row.place.partition(":")
    assert name in (Path(verl.__file__).parent / file).read_text()


@newest_only
@pytest.mark.parametrize("place", [*values.SECTIONS.values(), *values.FILES.values()])
def test_the_place_in_verl_that_reads_a_section_or_a_name_exists(place):
    file, _, name = place.partition(":")
    assert name in (Path(verl.__file__).parent / file).read_text()


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_own_defaults_are_no_wrong_values(name):
    assert list(values.wrong_values(verl_config(*COMPLETE, name=name))) == []


OF_VERL = (*COMPLETE, "algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8")
WITHOUT_REWARDS = "distillation.distillation_loss.use_task_rewards=False"
TEACHER = ("distillation.enabled=True", "distillation.nnodes=1", "distillation.n_gpus_per_node=1")


@pytest.mark.parametrize("more", [(), ("distillation.distillation_loss.use_policy_gradient=True",)])
def test_a_distillation_without_task_rewards_leaves_gtpo_without_effect(more):
    (problem,) = problems.problems(verl_config(*OF_VERL, *TEACHER, WITHOUT_REWARDS, *more))
    assert problem.startswith(f"{WITHOUT_REWARDS}: ")
    assert " True" in problem and "algorithm.adv_estimator" in problem
    assert problems.problems(verl_config(*OF_VERL, *TEACHER)) == []


@pytest.mark.parametrize(("estimator", "is_read"), [("gtpo", True), ("grpo", False)])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_correct_reward", "11"),
        ("token_weights", "pkg://examples.token_weights.lambda_grpo"),
        ("entropy_coeff", "0.01"),
        ("conflict_span", "none"),
        ("base", "rloo"),
    ],
)
def test_a_setting_of_gtpo_that_nothing_reads_is_named(name, value, estimator, is_read):
    overrides = [f"++algorithm.gtpo.{name}={value}", f"algorithm.adv_estimator={estimator}"]
    found = departures(verl_config(*OF_VERL, *overrides))
    unread = [departure.setting for departure in found if "gtpo alone" in departure.paper]
    assert unread == ([] if is_read else [f"algorithm.gtpo.{name}"])


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_the_defaults_of_gtpo_and_its_dump_are_nothing_that_another_estimator_leaves_unread(compose_config, estimator):
    settings = ("++algorithm.gtpo.dump_dir=d", "++algorithm.gtpo.dump_freq=1", "++algorithm.gtpo.entropy_coeff=0.1")
    assert departures(compose_config(f"algorithm.adv_estimator={estimator}", f"{LOSS_MODE}=vanilla", *settings)) == []


@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
@pytest.mark.parametrize("way_out", ["actor_rollout_ref.actor.ppo_mini_batch_size=1024", f"{LOSS_MODE}=vanilla"])
def test_several_updates_without_clipping_have_both_ways_out(estimator, way_out):
    words = [*OF_VERL, f"{LOSS_MODE}=gtpo", f"algorithm.adv_estimator={estimator}"]
    (found,) = (departure for departure in departures(verl_config(*words)) if "one update" in departure.paper)
    assert (found.setting, found.value) == ("actor_rollout_ref.actor.ppo_mini_batch_size", "256")
    assert found.paper.startswith("1024: one update") and "loss_mode=vanilla" in found.paper
    assert not any("one update" in departure.paper for departure in departures(verl_config(*words, way_out)))


def test_a_grpo_run_is_not_compared_with_the_papers_gtpo():
    assert departures(verl_config(*OF_VERL, "algorithm.adv_estimator=grpo")) == []
