"""What a verl config asks of the plugin."""

import pytest
from verl_config import validate

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.verl_plugin.run_config import RunConfig

GRPO, DUMP = "algorithm.adv_estimator=grpo", "+algorithm.gtpo.dump_dir=/nowhere"
FROM_UPDATE = "algorithm.gtpo.entropy_from=update"


@pytest.mark.parametrize(
    ("overrides", "applies_gtpo", "from_update"),
    [
        ([GRPO, "algorithm.gtpo.entropy_coeff=-1"], False, False),
        ([GRPO, DUMP], False, False),
        ([GRPO, DUMP, FROM_UPDATE], False, False),
        ([], True, False),
        ([DUMP, FROM_UPDATE], True, True),
        (["algorithm.adv_estimator=gtpo_trajectory"], True, False),
    ],
)
def test_a_config_asks_for_gtpo_and_for_a_dump(compose_config, overrides, applies_gtpo, from_update):
    run = RunConfig.read(compose_config(*overrides))
    assert (run.applies_gtpo, run.entropy_from_update, run.resumed_from) == (applies_gtpo, from_update, None)
    assert (run.gtpo.dump_dir is not None) == (DUMP in overrides)


@pytest.mark.parametrize("overrides", [[], [DUMP], [FROM_UPDATE, "algorithm.gtpo.initial_entropy=0.3"], [GRPO, DUMP]])
def test_a_process_reads_the_settings_at_its_start_and_for_its_trainer(stage, rows, monkeypatch, tmp_path, overrides):
    """And not at a step."""
    overrides = [override.replace("/nowhere", str(tmp_path / "dump")) for override in overrides]
    read, from_config = [], GTPOConfig.from_config.__func__

    def counting(cls, config):
        if not isinstance(config, GTPOConfig):  # which is read already
            read.append(cls.__name__)
        return from_config(cls, config)

    monkeypatch.setattr(GTPOConfig, "from_config", classmethod(counting))
    of_trainer = stage(*overrides, "+algorithm.gtpo.dump_freq=1")
    validate(of_trainer.config)
    for of_trainer.trainer.global_steps in (1, 2):
        of_trainer.step()
    assert read == ["VerlGTPOConfig"] * 2


def test_a_checkpoint_given_by_its_bare_name_is_resumed_from_the_working_directory(compose_config):
    config = compose_config("trainer.resume_mode=resume_path", "trainer.resume_from_path=global_step_7")
    assert RunConfig.read(config).resumed_from == "."


@pytest.mark.parametrize(
    ("mode", "path", "resumed"),
    [
        ("resume_path", "/run/global_step_7/", "/run"),
        ("disable", "/run/global_step_7", None),
        ("auto", "/run/global_step_7", None),
    ],
)
def test_a_path_is_resumed_only_where_the_mode_says_so(compose_config, mode, path, resumed):
    config = compose_config(f"trainer.resume_mode={mode}", f"trainer.resume_from_path={path}")
    assert RunConfig.read(config).resumed_from == resumed
