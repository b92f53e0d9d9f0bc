"""What a check says of public commands, each judged by hand first: no sound one is refused."""

from pathlib import Path

import pytest
import verl
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from verl_config import verl_config

from gtpo_verl.tools.check import intercept, settings

COMMANDS = yaml.safe_load((Path(__file__).parent / "public_commands.yaml").read_text())
VERL = Path(verl.__file__).parent
PROGRAMS = {
    "main_ppo": ("ppo_trainer", VERL / "trainer/config"),
    "fully_async": ("fully_async_ppo_trainer", VERL / "experimental/fully_async_policy/config"),
    "one_step_off": ("one_step_off_ppo_trainer", VERL / "experimental/one_step_off_policy/config"),
}


def checked(command, monkeypatch, *further):
    """The keys of the problems and of the warnings that a check finds."""
    monkeypatch.chdir(VERL.parent)  # the programs beside main_ppo look for verl's configs from where they start
    monkeypatch.setattr(intercept, "_command_findings", {})
    name, folder = PROGRAMS[command.get("program", "main_ppo")]
    words = [*command["settings"].split(), *further]
    groups = [word for word in words if word.startswith("model_engine=")]
    config = verl_config(*groups, name=command.get("config", name), folder=folder)
    others = OverridesParser.create().parse_overrides([word for word in words if word not in groups])
    intercept.gather(ConfigLoaderImpl._apply_overrides_to_config, others, config)
    in_settings, _ = settings.check(config, with_machine=False)
    found = [*intercept._command_findings, *in_settings]
    keys = [(finding.subject or finding.remedy).partition("=")[0].partition(":")[0] for finding in found]
    problems = {key for key, finding in zip(keys, found, strict=True) if finding.remedy}
    return problems, set(keys) - problems - {"GTPO"}


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command["script"])
def test_a_public_command_has_the_problems_that_it_has_by_hand(command, monkeypatch):
    problems, warnings = checked(command, monkeypatch)
    assert problems == set(command.get("problems", []))
    assert warnings >= set(command.get("warnings", []))


def test_forty_commands_are_judged_and_most_of_them_are_sound():
    assert len(COMMANDS) >= 40
    assert sum(1 for command in COMMANDS if "problems" not in command) > len(COMMANDS) / 2


GTPO = "algorithm.adv_estimator=gtpo"
ROLLOUT_N, BYPASS = "actor_rollout_ref.rollout.n", "algorithm.rollout_correction.bypass_mode"
WITHOUT_ENTROPY_OR_GROUPS = {
    "examples/ppo_trainer/run_qwen3_8b_fsdp.sh": {ROLLOUT_N},
    "examples/on_policy_distillation_trainer/run_qwen3_8b_mopd_fsdp.sh": {
        ROLLOUT_N,
        "distillation.distillation_loss.use_task_rewards",
    },
    "examples/gpg_trainer/run_qwen3_8b_fsdp.sh": set(),
    "examples/grpo_trainer/run_qwen2_5_vl_7b_megatron.sh": set(),
    "examples/tuning/lora/run_qwen3_8b_fsdp.sh": set(),
    "verl/experimental/fully_async_policy/shell/dapo_7b_math_fsdp2_8_8.sh": {BYPASS},
}


@pytest.mark.process
@pytest.mark.parametrize("script", WITHOUT_ENTROPY_OR_GROUPS)
def test_with_gtpo_a_public_command_lacks_what_gtpo_needs(script, monkeypatch):
    (command,) = (command for command in COMMANDS if command["script"] == script)
    problems, _ = checked(command, monkeypatch, GTPO)
    assert problems == WITHOUT_ENTROPY_OR_GROUPS[script]
