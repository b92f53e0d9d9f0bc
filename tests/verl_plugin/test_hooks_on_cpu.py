"""How functions of verl are hooked, and what passes through a hook."""

import copy
import pickle
import sys
from contextvars import copy_context
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import ModuleType, SimpleNamespace

import pytest
import ray.cloudpickle
from omegaconf import OmegaConf
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking

from gtpo_verl.verl_plugin import compat, hooking, hooks
from gtpo_verl.verl_plugin.state import current
from gtpo_verl.verl_plugin.training_monitor import CollapseError

KNOWN = "algorithm.gtpo.initial_entropy=0.3"


def hook_into(path, hook, **functions):
    """A module of verl with these functions, hooked when it is imported."""
    name = "verl.a_module_of_verl"
    module = ModuleType(name)
    for key, function in functions.items():
        function.__module__, function.__qualname__ = name, key
        setattr(module, key, function)
    sys.modules[name] = module
    try:
        hooking.when_imported(name, partial(hooking.hook_into, path, hook))
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
    missing, method, arguments, broken = compat.load_errors
    assert "verl.a_module_of_verl" in missing and "missing" in missing and "missing" in method
    assert "no batch: (data)" in arguments and "TypeError" in broken
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
    assert read == [(1, None), (1, 2)] and not compat.load_errors
    with pytest.raises(TypeError, match="unknown"):
        module.compute(1, "gtpo", unknown=1)
    trainer = hook_into("Trainer.fit", lambda proceed, trainer, *, data: (trainer, data), Trainer=Trainer).Trainer()
    assert trainer.fit(1) == Trainer.fit(self=trainer, data=1) == (trainer, 1)


def test_a_function_is_hooked_where_verl_defines_it_and_where_it_is_found(no_load_errors):
    from verl.utils.metric import reduce_metrics, utils

    assert reduce_metrics is utils.reduce_metrics and reduce_metrics.hooked_by_gtpo


HOOKED = [hook[1:3] for hook in hooks.HOOKS if find_spec(hook.module)] + [("transfer_queue", "init")]


@pytest.mark.parametrize(("module", "path"), HOOKED)
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda hooked: pickle.loads(pickle.dumps(hooked)),
        lambda hooked: ray.cloudpickle.loads(ray.cloudpickle.dumps(hooked)),
        lambda hooked: copy.deepcopy(partial(hooked, 1)).func,
        lambda hooked: ray.cloudpickle.loads(ray.cloudpickle.dumps(partial(hooked, 1))).func,
    ],
    ids=["deepcopy", "pickle", "cloudpickle", "deepcopy of a partial", "cloudpickle of a partial"],
)
def test_a_hooked_function_is_copied_and_pickled_as_a_function_is(module, path, copied):
    """By its name, which gives the hooked function in every process of Ray."""
    hooked = attrgetter(path)(import_module(module))
    assert hooked.hooked_by_gtpo and hooked is not hooked.__wrapped__
    assert copied(hooked) is hooked


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


def log_with(stage):
    return Tracking("project", "experiment", "console", OmegaConf.to_container(stage.config, resolve=True))


def test_the_step_that_ends_a_run_is_logged_first(make_stage, capsys):
    def end(metrics):
        raise CollapseError("collapsed")

    stage = make_stage("v1", KNOWN, "+trainer.collapse_watch=stop")
    log = log_with(stage)

    def loop():
        current().monitor = SimpleNamespace(on_log=end)
        log.log({"training/global_step": 1.0}, step=7)

    with pytest.raises(CollapseError):
        hooks.fit(loop, stage.trainer)
    assert "step:7 - training/global_step:1.0" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[KNOWN], ["algorithm.adv_estimator=grpo"]])
def test_a_trainer_that_the_watch_does_not_reach_ends_at_its_first_update(stage, words):
    log = log_with(stage(*words, "+trainer.collapse_watch=warn"))
    log.log({"val-core/acc/mean@1": 1.0}, step=0)
    with pytest.raises(RuntimeError, match=r"trainer\.collapse_watch .* of its own"):
        log.log({"actor/pg_loss": 1.0}, step=1)


@pytest.mark.parametrize("words", [[KNOWN], ["algorithm.adv_estimator=grpo"]])
def test_a_watch_of_none_needs_no_loop_of_verls(stage, words):
    log_with(stage(*words, "+trainer.collapse_watch=none")).log({"actor/pg_loss": 1.0}, step=1)


@pytest.mark.parametrize("config", [None, {}, {"algorithm": None}, SimpleNamespace(algorithm="gtpo")])
def test_a_logger_without_a_config_of_verls_logs(config):
    Tracking("project", "experiment", "console", config).log({"actor/pg_loss": 1.0}, step=1)
