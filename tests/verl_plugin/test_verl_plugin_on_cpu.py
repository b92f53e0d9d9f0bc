import logging
import os
import re
import subprocess
import sys
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray.cloudpickle
import verl
from omegaconf import open_dict
from verl.trainer.ppo import core_algos, metric_utils, ray_trainer
from verl.utils import config as verl_config

from gtpo_verl import verl_plugin
from gtpo_verl.cli import main
from gtpo_verl.verl_plugin import registration, trainer_hooks

ROOT = Path(__file__).resolve().parents[2]
NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}


def run_python(code, **environment):
    env = os.environ | environment
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_importing_verl_registers_gtpo_and_no_trainer():
    code = """
import sys, verl
assert "verl.trainer.ppo.core_algos" not in sys.modules
from verl.trainer.ppo import core_algos, ray_trainer
estimators = [core_algos.get_adv_estimator_fn(name) for name in ("gtpo", "gtpo_trajectory")]
losses = [core_algos.get_policy_loss_fn(name) for name in ("gtpo", "gtpo_trajectory")]
assert estimators[0] is estimators[1] and losses[0] is losses[1]
print(estimators[0].__module__, losses[0].__module__)
"""
    assert run_python(code) == "gtpo_verl.verl_plugin.estimator gtpo_verl.loss"


def test_the_log_is_shown_once_also_where_the_root_logger_shows_errors_only():
    """vLLM imports model_hosting_container_standards, which sets the root logger and its handlers so."""
    code = """
import logging, sys, verl
for root in (logging.getLogger(), *logging.getLogger().handlers):
    root.setLevel(int(sys.argv[-1]))
logging.getLogger("gtpo_verl").info("seen")
logging.getLogger("gtpo_verl.paper.reward").warning("seen")
"""
    for level in (logging.DEBUG, logging.ERROR):
        command = [sys.executable, "-c", code, str(level)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0 and result.stderr.count("seen") == 2, result.stderr


@pytest.mark.nightly  # the end-to-end runs rest on it
def test_gtpo_is_registered_in_a_ray_worker():
    code = """
import ray
@ray.remote
def loss_module():
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    return get_policy_loss_fn("gtpo").__module__
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
print(ray.get(loss_module.remote(), timeout=120))
"""
    assert run_python(code) == "gtpo_verl.loss"


def validate(config):
    verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)


def test_a_name_that_another_package_took_is_left_to_it():
    code = """
from verl.trainer.ppo import core_algos, ray_trainer
@core_algos.register_adv_est("gtpo")
def group_turn_policy_optimization(**kwargs): ...
from gtpo_verl import verl_plugin
from gtpo_verl.verl_plugin import estimator, registration
assert core_algos.get_adv_estimator_fn("gtpo") is group_turn_policy_optimization
assert core_algos.get_adv_estimator_fn("gtpo_trajectory") is estimator.estimate_gtpo_advantage
print(*registration.load_errors())
"""
    assert "__main__.group_turn_policy_optimization" in run_python(code, **NOT_LOADED)


def test_ambiguous_names_are_an_error_that_gives_the_alias(compose_config, monkeypatch):
    """Two other papers are called GTPO; `register_policy_loss` overwrites silently, whoever comes first."""

    def group_turn_policy_optimization(**kwargs): ...

    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "gtpo", group_turn_policy_optimization)
    with pytest.raises(RuntimeError) as error:
        validate(compose_config())
    for part in ("group_turn_policy_optimization", "2508.04349", "2511.14846", "algorithm.adv_estimator=gtpo_traj"):
        assert part in str(error.value)
    alias = "algorithm.adv_estimator=gtpo_trajectory"
    validate(compose_config(alias))

    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "gtpo", group_turn_policy_optimization)
    with pytest.raises(RuntimeError, match="actor.policy_loss.loss_mode=gtpo_trajectory"):
        validate(compose_config(alias))
    validate(compose_config(alias, "actor_rollout_ref.actor.policy_loss.loss_mode=gtpo_trajectory"))


def test_the_alias_is_checked_like_the_name(compose_config):
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.unknown=1"):
        validate(compose_config("algorithm.adv_estimator=gtpo_trajectory", "+algorithm.gtpo.unknown=1"))


@pytest.fixture
def no_load_errors(monkeypatch):
    monkeypatch.setattr(registration, "_load_errors", [])


def test_supported_versions_are_the_same_everywhere():
    first, *_, last = versions = registration.SUPPORTED_VERL
    assert f'verl = ["verl>={first},<={last}"]' in (ROOT / "pyproject.toml").read_text()
    assert f"|| set -- {' '.join(versions)}\n" in (ROOT / "scripts/check_verl_versions.sh").read_text()
    set_up = (ROOT / "scripts/setup_cpu.sh").read_text()
    cases = " ".join(re.findall(r"^    ([\d. |]+)\)", set_up, re.MULTILINE))
    assert set(re.findall(r"[\d.]+", cases)) == set(versions)
    assert f"verl=={last}\n" in (ROOT / "scripts/requirements-cpu.txt").read_text()


@pytest.fixture
def install_in(monkeypatch, no_load_errors):
    def install(version):
        monkeypatch.setattr(verl, "__version__", version)
        monkeypatch.setattr(verl_plugin.wrapt, "register_post_import_hook", lambda *args: None)
        verl_plugin._install()

    return install


@pytest.mark.parametrize("version", ["0.6.1", "0.7.0", "0.7.0.dev"])
def test_a_verl_that_is_too_old_is_an_error_once_gtpo_is_asked_for(compose_config, install_in, version):
    install_in(version)
    assert f"needs verl 0.7.1 or later; this is {version}" in registration.load_errors()[0]
    with pytest.raises(RuntimeError, match=f"GTPO cannot run.*{version}"):
        validate(compose_config())
    validate(compose_config("algorithm.adv_estimator=grpo"))


@pytest.mark.parametrize("version", ["0.8.0.dev", "0.9.1+fork", "0.10.0.dev", "1.0", "main"])
def test_a_verl_that_was_not_tested_gets_one_warning(compose_config, install_in, caplog, version):
    install_in(version)
    assert registration.load_errors() == []
    validate(compose_config())
    (record,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert f"tested with verl 0.7.1 to {registration.SUPPORTED_VERL[-1]}; this is {version}." in record.getMessage()


@pytest.mark.parametrize("version", [*registration.SUPPORTED_VERL, "0.8.1"])
def test_a_tested_verl_gets_none(compose_config, install_in, caplog, version):
    install_in(version)
    validate(compose_config())
    assert registration.load_errors() == [] and not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_verl_that_has_gtpo_serves_it_and_the_plugin_its_alias(compose_config, monkeypatch, no_load_errors, capsys):
    def verls_own(**kwargs): ...

    verls_own.__module__ = core_algos.__name__
    for registry in (core_algos.ADV_ESTIMATOR_REGISTRY, core_algos.POLICY_LOSS_REGISTRY):
        monkeypatch.setitem(registry, "gtpo", verls_own)
    monkeypatch.setattr(core_algos, "AdvantageEstimator", Enum("AdvantageEstimator", {"GTPO": "gtpo"}))
    verl_plugin._register(core_algos)
    assert core_algos.get_adv_estimator_fn("gtpo") is core_algos.get_policy_loss_fn("gtpo") is verls_own
    assert registration.load_errors() == []

    validate(compose_config("+algorithm.gtpo.unknown=1"))
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.unknown=1"):
        validate(compose_config("algorithm.adv_estimator=gtpo_trajectory", "+algorithm.gtpo.unknown=1"))
    assert main(["check"]) == 0
    assert "it serves gtpo, the plugin gtpo_trajectory" in capsys.readouterr().out


def test_hook_that_does_not_fit_is_a_problem_and_not_a_crash(no_load_errors):
    module = SimpleNamespace(__name__="verl.trainer.ppo.v1.trainer_base", PPOTrainer=object)
    verl_plugin._wrap("PPOTrainer._compute_advantage", trainer_hooks.v1_compute_advantage, module)
    assert "has no verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in registration.load_errors()[0]


def test_a_function_that_takes_other_arguments_is_not_hooked(no_load_errors):
    class PPOTrainer:
        def _compute_advantage(self, batch): ...

    module = SimpleNamespace(__name__="verl.trainer.ppo.v1.trainer_base", PPOTrainer=PPOTrainer)
    before = PPOTrainer._compute_advantage
    verl_plugin._wrap("PPOTrainer._compute_advantage", trainer_hooks.v1_compute_advantage, module)
    (problem,) = registration.load_errors()
    assert "PPOTrainer._compute_advantage takes no metrics: (self, batch)" in problem
    assert PPOTrainer._compute_advantage is before


def test_a_call_with_an_argument_that_no_hook_knows_passes_through(no_load_errors):
    def compute(data, adv_estimator, extra=None, *, later=0):
        return data, adv_estimator, extra, later

    module = SimpleNamespace(__name__="verl.trainer", compute=compute)
    read = []

    def hook(proceed, instance, *, data, extra):
        read.append((data, extra))
        return proceed()

    verl_plugin._wrap("compute", hook, module)
    assert module.compute(1, "gtpo", later=3) == (1, "gtpo", None, 3)
    assert module.compute(data=1, adv_estimator="gtpo", extra=2) == (1, "gtpo", 2, 0)
    assert read == [(1, None), (1, 2)] and registration.load_errors() == []
    with pytest.raises(TypeError, match="unknown"):
        module.compute(1, "gtpo", unknown=1)


def test_a_trainer_that_validates_nothing_is_checked_before_ray(compose_config):
    """verl's fully_async, which ships bypass_mode=True, goes through `run_ppo` only."""
    from verl.trainer.main_ppo import run_ppo

    config = compose_config("algorithm.rollout_correction.bypass_mode=true")
    with pytest.raises(ValueError, match=r"bypass_mode=True.*fully_async"):
        run_ppo(config, task_runner_class=None)
    assert not ray.is_initialized()


def test_what_keeps_the_plugin_from_loading_is_said_aloud():
    code = """
import contextlib, io, wrapt
def broken(*args): raise OSError("the disk is gone")
wrapt.register_post_import_hook = broken
said = io.StringIO()
with contextlib.redirect_stderr(said), contextlib.suppress(OSError):
    import verl
print("the disk is gone" in said.getvalue() and "no estimator gtpo" in said.getvalue())
"""
    assert run_python(code, **NOT_LOADED | {"VERL_USE_EXTERNAL_MODULES": "gtpo_verl.verl_plugin"}) == "True"


def test_report_says_what_is_registered_where(capsys, monkeypatch):
    assert main(["check", "-v"]) == 0
    out = capsys.readouterr().out
    assert "advantage estimator gtpo: gtpo_verl.verl_plugin.estimator.estimate_gtpo_advantage" in out
    v1 = "yes" if find_spec("verl.trainer.ppo.v1") else "not in this verl"
    assert "loaded by verl: yes" in out and "hook on legacy trainer: yes" in out and f"hook on V1 trainer: {v1}" in out
    monkeypatch.setattr(registration, "_load_errors", ["the sky has fallen"])
    assert main(["check"]) == 1
    assert "the sky has fallen" in capsys.readouterr().out


def test_report_says_what_is_not_hooked(capsys, monkeypatch):
    monkeypatch.setattr(metric_utils, "compute_data_metrics", metric_utils.compute_data_metrics.__wrapped__)
    assert main(["check"]) == 1
    assert "verl.trainer.ppo.metric_utils.compute_data_metrics is not hooked" in capsys.readouterr().out


def test_report_says_that_verl_did_not_load_the_plugin():
    code = """
import contextlib, io
from gtpo_verl.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["check"]) == 1
print(said.getvalue().replace(chr(10), " "))
"""
    reads_entry_points = find_spec("verl.plugin")
    remedy = (
        "none leaves gtpo out: unset it" if reads_entry_points else "set VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_pl"
    )
    assert remedy in run_python(code, **NOT_LOADED)


@pytest.mark.parametrize(
    "hook", [verl_config.validate_config, metric_utils.compute_data_metrics, ray_trainer.compute_advantage]
)
def test_hook_can_be_sent_to_a_ray_worker(hook):
    """Up to verl 0.8.0 `main_ppo` pickles its TaskRunner with the functions that it calls."""
    assert hasattr(hook, "__wrapped__")
    assert ray.cloudpickle.loads(ray.cloudpickle.dumps(hook)) is hook


def test_trainer_without_a_hook_is_an_error_before_verl_starts_anything(compose_config):
    config = compose_config()
    with open_dict(config):
        config.trainer.pop("use_v1", None)  # as in verl 0.8.0, whose main_ppo_sync sets the other key
        config.transfer_queue.enable = True
    with pytest.raises(ValueError, match="transfer_queue.enable=True.*start verl.trainer.main_ppo"):
        validate(config)
