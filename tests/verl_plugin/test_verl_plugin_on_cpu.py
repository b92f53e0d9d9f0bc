import copy
import logging
import pickle
import re
import sys
from contextvars import copy_context
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import ray.cloudpickle
import verl
from own_process import run_python
from verl.trainer.ppo import core_algos
from verl.utils import config as verl_config
from verl.utils.metric import reduce_metrics

from gtpo_verl import verl_plugin
from gtpo_verl.cli import main
from gtpo_verl.verl_plugin import hooks, names_and_versions

ROOT = Path(__file__).resolve().parents[2]
NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}


def last_line(code, **environment):
    return run_python(code, **environment).stdout.strip().splitlines()[-1]


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


def test_the_log_is_shown_once_also_where_the_root_logger_shows_errors_only():
    """vLLM imports model_hosting_container_standards, which sets the root logger and its handlers so."""
    code = """
import logging, sys, verl
for root in (logging.getLogger(), *logging.getLogger().handlers):
    root.setLevel(int(sys.argv[-1]))
logging.getLogger("gtpo_verl").info("seen")
logging.getLogger("gtpo_verl.reward").warning("seen")
"""
    for level in (logging.DEBUG, logging.ERROR):
        assert run_python(code, level).stderr.count("seen") == 2


def validate(config):
    verl_config.validate_config(config=config, use_reference_policy=False, use_critic=False)


def test_another_package_may_take_the_name_before_or_after_the_plugin_loads():
    code = """
import verl
from verl.trainer.ppo import core_algos
@core_algos.register_adv_est("gtpo")
@core_algos.register_policy_loss("gtpo")
def group_turn_policy_optimization(**kwargs): ...
from gtpo_verl.verl_plugin import names_and_versions, state
assert core_algos.get_adv_estimator_fn("gtpo") is group_turn_policy_optimization
assert core_algos.get_policy_loss_fn("gtpo") is group_turn_policy_optimization
assert core_algos.get_adv_estimator_fn("gtpo_trajectory") is state.estimate_gtpo_advantage
print(names_and_versions.load_errors())
"""
    assert last_line(code) == last_line(code, **NOT_LOADED) == "[]"


def group_turn_policy_optimization(**kwargs): ...


def test_a_run_of_another_package_of_our_name_is_left_alone_and_told_of_the_alias(compose_config, monkeypatch, caplog):
    """Two other papers are called GTPO."""
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "gtpo", group_turn_policy_optimization)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "gtpo", group_turn_policy_optimization)
    validate(compose_config("actor_rollout_ref.rollout.n=1", "+algorithm.gtpo.unknown=1", "critic.enable=true"))
    (record,) = caplog.records
    assert "group_turn_policy_optimization" in record.getMessage() and "set it to gtpo_traj" in record.getMessage()


def test_a_loss_of_another_package_of_our_name_is_an_error_under_our_estimator(compose_config, monkeypatch):
    """`register_policy_loss` overwrites silently, whoever comes first."""
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "gtpo", group_turn_policy_optimization)
    with pytest.raises(ValueError) as error:
        validate(compose_config())
    for part in ("group_turn_policy_optimization", "2508.04349", "2511.14846", "loss_mode=gtpo", "to gtpo_trajectory"):
        assert part in str(error.value)
    validate(compose_config("actor_rollout_ref.actor.policy_loss.loss_mode=gtpo_trajectory"))


KNOWN = "algorithm.gtpo.initial_entropy=0.2"


@pytest.fixture
def no_load_errors(monkeypatch):
    monkeypatch.setattr(names_and_versions, "_load_errors", [])


def test_supported_versions_are_the_same_everywhere():
    first, *_, last = versions = names_and_versions.SUPPORTED_VERL
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


@pytest.mark.parametrize("version", ["0.8.0", "0.9.0.dev"])
def test_a_verl_that_is_too_old_is_an_error_once_gtpo_is_asked_for(compose_config, install_in, version):
    install_in(version)
    assert f"needs verl 0.9.0 or later; this is {version}" in names_and_versions.load_errors()[0]
    with pytest.raises(RuntimeError, match=f"GTPO cannot run.*{version}"):
        validate(compose_config())
    validate(compose_config("algorithm.adv_estimator=grpo"))


NOT_TESTED = ["0.9.1.dev", "0.9.1+fork", "0.10.0.dev", "1.0", "main"]


@pytest.mark.parametrize("version", [*NOT_TESTED, *names_and_versions.SUPPORTED_VERL])
def test_a_verl_that_was_not_tested_gets_one_warning_and_a_tested_one_none(compose_config, install_in, caplog, version):
    install_in(version)
    validate(compose_config(KNOWN))
    assert names_and_versions.load_errors() == []
    first, *_, last = names_and_versions.SUPPORTED_VERL
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
    assert names_and_versions.load_errors() == []

    validate(compose_config("+algorithm.gtpo.unknown=1"))
    with pytest.raises(ValueError, match=r"algorithm\.gtpo\.unknown=1"):
        validate(compose_config("algorithm.adv_estimator=gtpo_trajectory", "+algorithm.gtpo.unknown=1"))
    assert main(["check", "-v"]) == 0
    assert "it serves gtpo, the plugin gtpo_trajectory" in capsys.readouterr().out


def hook_into(path, hook, **functions):
    """A module of verl with these functions, hooked when it is imported."""
    name = "verl.a_module_of_verl"
    module = ModuleType(name)
    for key, function in functions.items():
        function.__module__, function.__qualname__ = name, key
        setattr(module, key, function)
    sys.modules[name] = module
    try:
        verl_plugin._when_imported(name, partial(verl_plugin._hook_into, path, hook))
    finally:
        del sys.modules[name]
    return module


def test_a_hook_that_does_not_fit_is_a_load_error_and_the_module_is_imported(no_load_errors):
    def compute(data): ...

    def explode(): ...

    explode.__signature__ = "none"
    hook_into("missing", hooks.log)
    hook_into("compute.missing", hooks.log, compute=compute)
    module = hook_into("compute", hooks.v1_compute_advantage, compute=compute)
    hook_into("explode", hooks.log, explode=explode)
    missing, method, arguments, broken = names_and_versions.load_errors()
    assert "this plugin does not fit verl.a_module_of_verl" in missing and "missing" in missing and "missing" in method
    assert "compute takes no batch: (data)" in arguments and "TypeError" in broken
    assert module.compute is compute


def test_a_call_passes_through_with_its_arguments_and_what_verl_raises(no_load_errors):
    def compute(data, adv_estimator, extra=None, *, later=0):
        return data, adv_estimator, extra, later

    class Trainer:
        def fit(self, data): ...

    read = []

    def hook(proceed, *, data, extra):
        read.append((data, extra))
        return proceed()

    module = hook_into("compute", hook, compute=compute)
    assert module.compute(1, "gtpo", later=3) == (1, "gtpo", None, 3)
    assert module.compute(data=1, adv_estimator="gtpo", extra=2) == (1, "gtpo", 2, 0)
    assert read == [(1, None), (1, 2)] and names_and_versions.load_errors() == []
    with pytest.raises(TypeError, match="unknown"):
        module.compute(1, "gtpo", unknown=1)
    trainer = hook_into("Trainer.fit", lambda proceed, trainer, *, data: (trainer, data), Trainer=Trainer).Trainer()
    assert trainer.fit(1) == Trainer.fit(self=trainer, data=1) == (trainer, 1)


def test_a_function_is_hooked_where_verl_defines_it_and_where_it_is_found(no_load_errors):
    from verl.utils.metric import reduce_metrics, utils

    assert reduce_metrics is utils.reduce_metrics and reduce_metrics.hooked_by_gtpo


@pytest.mark.parametrize(
    ("module", "path"),
    [hook[1:3] for hook in hooks.HOOKS if find_spec(hook.module)] + [("transfer_queue", "init")],
)
def test_a_hooked_function_is_copied_and_pickled_as_a_function_is(module, path):
    """By its name, which gives the hooked function in every process of Ray."""
    hooked = attrgetter(path)(import_module(module))
    assert hooked.hooked_by_gtpo and hooked is not hooked.__wrapped__
    for copied in (
        copy.deepcopy(hooked),
        pickle.loads(pickle.dumps(hooked)),
        ray.cloudpickle.loads(ray.cloudpickle.dumps(hooked)),
        copy.deepcopy(partial(hooked, 1)).func,
        ray.cloudpickle.loads(ray.cloudpickle.dumps(partial(hooked, 1))).func,
    ):
        assert copied is hooked


def test_a_hook_adds_two_frames_to_a_stack_trace():
    with pytest.raises(TypeError) as error:
        reduce_metrics({"loss": [None]})
    assert sum(Path(verl_plugin.__file__).parent in frame.path.parents for frame in error.traceback) == 2


def test_metrics_that_are_no_dictionary_are_reduced_as_by_verl():
    class Metrics(dict):
        pop = None  # which verl's function does not call

    assert reduce_metrics(Metrics(loss=[1.0, 3.0])) == {"loss": 2.0}


@pytest.mark.parametrize("config", [{"algorithm": {"adv_estimator": "gtpo"}}, SimpleNamespace()])
def test_a_stub_of_a_trainer_whose_config_is_not_of_omegaconf_is_left_alone(config):
    def verls():
        return "verl's"

    def calls():
        trainer = SimpleNamespace(config=config, global_steps=1)
        yield hooks.validate_config(verls, config=config)
        yield hooks.fit(verls, trainer)
        yield hooks.legacy_compute_old_log_prob(verls, trainer, batch=None)
        yield hooks.separate_compute_advantage(verls, trainer)
        yield hooks.v1_compute_advantage(verls, trainer, batch=None)
        yield hooks.compute_advantage(verls, data=None)

    assert copy_context().run(lambda: {*calls()}) == {"verl's"}


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
    assert last_line(code, **NOT_LOADED | {"VERL_USE_EXTERNAL_MODULES": "gtpo_verl.verl_plugin"}) == "True"


def test_report_is_one_sentence_and_says_what_is_registered_where_if_asked_for(capsys, monkeypatch):
    assert main(["check"]) == 0
    (verdict,) = capsys.readouterr().out.splitlines()
    assert verdict.startswith("GTPO is installed and hooked into verl ") and "To check a command: " in verdict
    assert main(["check", "-v"]) == 0
    out = capsys.readouterr().out
    assert "advantage estimator gtpo: gtpo_verl.verl_plugin.state.estimate_gtpo_advantage" in out
    assert "loaded by verl: yes" in out and "hook on legacy trainer: yes" in out and "hook on V1 trainer: yes" in out
    monkeypatch.setattr(names_and_versions, "_load_errors", ["the sky has fallen"])
    assert main(["check"]) == 1
    assert "the sky has fallen" in capsys.readouterr().out


def test_report_says_what_is_not_hooked(capsys, monkeypatch):
    monkeypatch.setattr(core_algos, "get_policy_loss_fn", core_algos.get_policy_loss_fn.__wrapped__)
    assert main(["check"]) == 1
    assert "verl.trainer.ppo.core_algos.get_policy_loss_fn is not hooked" in capsys.readouterr().out


def test_report_says_that_verl_did_not_load_the_plugin():
    code = """
import contextlib, io
from gtpo_verl.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["check"]) == 1
print(said.getvalue().replace(chr(10), " "))
"""
    assert "none leaves gtpo out: unset it" in last_line(code, **NOT_LOADED)
