"""The names that the plugin serves, beside other packages of that name, and the verls that it is for."""

import logging
import re
from enum import Enum
from pathlib import Path

import pytest
import verl
from own_process import NOT_LOADED, run_python
from verl.trainer.ppo import core_algos
from verl_config import validate

from gtpo_verl import verl_plugin
from gtpo_verl.cli import main
from gtpo_verl.verl_plugin import compat, hooking

ROOT = Path(__file__).resolve().parents[2]


def last_line(code, **environment):
    return run_python(code, **environment).stdout.strip().splitlines()[-1]


def group_turn_policy_optimization(**kwargs): ...


KNOWN = "algorithm.gtpo.initial_entropy=0.2"


@pytest.fixture
def install_in(monkeypatch, no_load_errors):
    def install(version):
        monkeypatch.setattr(verl, "__version__", version)
        monkeypatch.setattr(hooking.wrapt, "register_post_import_hook", lambda *args: None)
        verl_plugin._install()

    return install


NOT_TESTED = ["0.9.0.dev", "0.9.1.dev", "0.9.0+fork", "0.9.1+fork", "0.10.0.dev", "1.0", "main"]


@pytest.mark.process
def test_importing_verl_takes_no_name_but_our_own_and_imports_no_trainer():
    code = """
import sys, verl
assert "verl.trainer.ppo.core_algos" not in sys.modules
from verl.trainer.ppo import core_algos, ray_trainer
for registry in (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
    assert [name for name in registry if "gtpo" in name] == ["gtpo_trajectory"]
estimators = [core_algos.get_adv_estimator_fn(name) for name in ("gtpo", "gtpo_trajectory")]
losses = [core_algos.get_policy_loss_fn(name) for name in ("gtpo", "gtpo_trajectory")]
assert estimators[0] is estimators[1] and losses[0] is losses[1]
print(estimators[0].__module__, losses[0].__module__)
"""
    assert last_line(code) == "gtpo_verl.verl_plugin.state gtpo_verl.verl_plugin.loss"


@pytest.mark.process
def test_another_package_may_take_the_name_before_or_after_the_plugin_loads():
    code = """
import verl
from verl.trainer.ppo import core_algos
@core_algos.register_adv_est("gtpo")
@core_algos.register_policy_loss("gtpo")
def group_turn_policy_optimization(**kwargs): ...
from gtpo_verl.verl_plugin import compat, state
assert core_algos.get_adv_estimator_fn("gtpo") is group_turn_policy_optimization
assert core_algos.get_policy_loss_fn("gtpo") is group_turn_policy_optimization
assert core_algos.get_adv_estimator_fn("gtpo_trajectory") is state.estimate_gtpo_advantage
print(list(compat.load_errors))
"""
    assert last_line(code) == last_line(code, **NOT_LOADED) == "[]"


def test_a_run_of_another_package_of_our_name_is_left_alone_and_told_of_the_alias(compose_config, monkeypatch, caplog):
    """Two other papers are called GTPO."""
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "gtpo", group_turn_policy_optimization)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "gtpo", group_turn_policy_optimization)
    validate(compose_config("actor_rollout_ref.rollout.n=1", "+algorithm.gtpo.unknown=1", "critic.enable=true"))
    (record,) = caplog.records
    assert "group_turn_policy_optimization" in record.getMessage() and " gtpo_trajectory" in record.getMessage()


def test_a_loss_of_another_package_of_our_name_is_an_error_under_our_estimator(compose_config, monkeypatch):
    """`register_policy_loss` overwrites silently, whoever comes first."""
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "gtpo", group_turn_policy_optimization)
    with pytest.raises(ValueError) as error:
        validate(compose_config())
    parts = ("loss_mode=gtpo", "group_turn_policy_optimization", "2508.04349", "2511.14846", "gtpo_trajectory")
    assert [part for part in parts if part not in str(error.value)] == []
    validate(compose_config("actor_rollout_ref.actor.policy_loss.loss_mode=gtpo_trajectory"))


def test_supported_versions_are_the_same_everywhere():
    first, *_, last = versions = compat.SUPPORTED_VERL
    assert f'verl = ["verl>={first},<={last}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"|| set -- {' '.join(versions)}\n" in (ROOT / "scripts/check_verl_versions.sh").read_text()
    set_up = (ROOT / "scripts/setup_cpu.sh").read_text()
    cases = " ".join(re.findall(r"^    ([\d. |]+)\)", set_up, re.MULTILINE))
    assert set(re.findall(r"[\d.]+", cases)) == set(versions)
    assert f"verl=={last}\n" in (ROOT / "scripts/requirements-cpu.txt").read_text()


@pytest.mark.parametrize("version", ["0.8.0", "0.8.1.dev"])
def test_a_verl_that_is_too_old_is_an_error_once_gtpo_is_asked_for(compose_config, install_in, version):
    install_in(version)
    reason = next(iter(compat.load_errors))
    assert "verl 0.9.0 or later" in reason and f" {version}: upgrade" in reason
    with pytest.raises(RuntimeError, match=f"GTPO cannot run.*{version}"):
        validate(compose_config())
    validate(compose_config("algorithm.adv_estimator=grpo"))


@pytest.mark.parametrize("version", [*NOT_TESTED, *compat.SUPPORTED_VERL])
def test_a_verl_that_was_not_tested_gets_one_warning_and_a_tested_one_none(compose_config, install_in, caplog, version):
    install_in(version)
    validate(compose_config(KNOWN))
    assert not compat.load_errors
    first, *_, last = compat.SUPPORTED_VERL
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    told = [f"tested with verl {first} to {last}; this is {version}." in warning for warning in warnings]
    assert told == [True] * (version in NOT_TESTED)


def test_a_verl_that_has_gtpo_serves_it_and_the_plugin_its_alias(compose_config, monkeypatch, no_load_errors, capsys):
    def verls_own(**kwargs): ...

    verls_own.__module__ = core_algos.__name__
    for registry in (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
        monkeypatch.setitem(registry, "gtpo", verls_own)
    monkeypatch.setattr(core_algos, "AdvantageEstimator", Enum("AdvantageEstimator", {"GTPO": "gtpo"}))
    verl_plugin._register(core_algos)
    assert core_algos.get_adv_estimator_fn("gtpo") is core_algos.get_policy_loss_fn("gtpo") is verls_own
    assert not compat.load_errors

    validate(compose_config("+algorithm.gtpo.unknown=1"))
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.unknown=1"):
        validate(compose_config("algorithm.adv_estimator=gtpo_trajectory", "+algorithm.gtpo.unknown=1"))
    assert main(["check"]) == 0
    (registration,) = [line for line in capsys.readouterr().out.splitlines() if "gtpo_trajectory" in line]
    assert registration.startswith("warning: ") and "gtpo is verl's" in registration
