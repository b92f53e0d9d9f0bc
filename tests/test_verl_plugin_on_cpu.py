import os
import subprocess
import sys
from enum import Enum
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import ray
import ray.cloudpickle
from omegaconf import open_dict
from verl.trainer.ppo import core_algos, metric_utils
from verl.utils import config as verl_config

from gtpo_verl import verl_plugin
from gtpo_verl.cli import main

NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}


def run_python(code, **environment):
    env = os.environ | environment
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()[-1]


def test_importing_verl_registers_gtpo():
    code = """
import verl
from verl.trainer.ppo import core_algos, ray_trainer
print(core_algos.get_adv_estimator_fn("gtpo").__module__, core_algos.get_policy_loss_fn("gtpo").__module__)
"""
    assert run_python(code) == "gtpo_verl.verl_plugin gtpo_verl.loss"


def test_importing_verl_does_not_import_the_trainer():
    assert run_python("import verl, sys; print('verl.trainer.ppo.core_algos' in sys.modules)") == "False"


def test_gtpo_is_registered_in_a_ray_worker():
    @ray.remote
    def loss_module():
        from verl.trainer.ppo.core_algos import get_policy_loss_fn

        return get_policy_loss_fn("gtpo").__module__

    ray.init(num_cpus=1, include_dashboard=False, ignore_reinit_error=True)
    try:
        assert ray.get(loss_module.remote(), timeout=120) == "gtpo_verl.loss"
    finally:
        ray.shutdown()


def test_a_name_that_is_taken_is_a_clear_error():
    code = """
from verl.trainer.ppo import core_algos, ray_trainer
@core_algos.register_adv_est("gtpo")
def group_turn_policy_optimization(**kwargs): ...
from gtpo_verl import verl_plugin
assert core_algos.get_adv_estimator_fn("gtpo") is group_turn_policy_optimization
try:
    verl_plugin._raise_problems()
except RuntimeError as error:
    print(error)
"""
    message = run_python(code, **NOT_LOADED)
    assert "__main__.group_turn_policy_optimization" in message and "uninstall one" in message


def validate(config):
    verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.fixture
def fresh_problems(monkeypatch):
    monkeypatch.setattr(verl_plugin, "_problems", [])


def test_unsupported_verl_is_a_clear_error_once_gtpo_is_asked_for(compose_config, monkeypatch, fresh_problems):
    monkeypatch.setattr(verl_plugin, "version", lambda name: "0.6.0")
    monkeypatch.setattr(verl_plugin.wrapt, "register_post_import_hook", lambda *args: None)
    verl_plugin._install()
    assert f"supports verl {', '.join(verl_plugin.SUPPORTED_VERL)}; this is 0.6.0" in verl_plugin.problems()[0]
    with pytest.raises(RuntimeError, match="GTPO cannot run.*0.6.0"):
        validate(compose_config())
    validate(compose_config("algorithm.adv_estimator=grpo"))


def test_plugin_steps_back_for_a_verl_that_has_gtpo(compose_config, monkeypatch, fresh_problems, capsys):
    def verls_own(**kwargs): ...

    estimators, losses = {"gtpo": verls_own}, {"gtpo": verls_own}
    members = Enum("AdvantageEstimator", {"GTPO": "gtpo"})
    patched = SimpleNamespace(
        AdvantageEstimator=members, ADV_ESTIMATOR_REGISTRY=estimators, POLICY_LOSS_REGISTRY=losses
    )
    verl_plugin._register(patched)
    assert verl_plugin.problems() == [] and estimators == losses == {"gtpo": verls_own}

    monkeypatch.setattr(core_algos, "AdvantageEstimator", members)
    validate(compose_config("+algorithm.gtpo.unknown=1"))
    assert main(["check"]) == 0
    assert "it serves gtpo, and the plugin steps back" in capsys.readouterr().out


def test_hook_that_does_not_fit_is_a_problem_and_not_a_crash(fresh_problems):
    verl_plugin._hook_v1_trainer(SimpleNamespace(__name__="verl.trainer.ppo.v1.trainer_base", PPOTrainer=object))
    assert "has no verl.trainer.ppo.v1.trainer_base.PPOTrainer._compute_advantage" in verl_plugin.problems()[0]


def test_report_says_what_is_registered_where(capsys, monkeypatch):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert "advantage estimator gtpo: gtpo_verl.verl_plugin.estimate_gtpo_advantage" in out
    v1 = "yes" if find_spec("verl.trainer.ppo.v1") else "this verl has none"
    assert "loaded by verl: yes" in out and "hook on legacy trainer: yes" in out and f"hook on V1 trainer: {v1}" in out
    monkeypatch.setattr(verl_plugin, "_problems", ["the sky has fallen"])
    assert main(["check"]) == 1
    assert "problem: the sky has fallen" in capsys.readouterr().out


def test_report_says_what_is_not_hooked(capsys, monkeypatch):
    monkeypatch.setattr(metric_utils, "compute_data_metrics", metric_utils.compute_data_metrics.__wrapped__)
    assert main(["check"]) == 1
    assert "problem: verl.trainer.ppo.metric_utils.compute_data_metrics is not hooked" in capsys.readouterr().out


def test_report_says_that_verl_did_not_load_the_plugin():
    code = "from gtpo_verl.cli import main; status = main(['check']); assert status == 1"
    assert "set VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_plugin" in run_python(code, **NOT_LOADED)


@pytest.mark.parametrize("hook", [verl_config.validate_config, metric_utils.compute_data_metrics])
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
