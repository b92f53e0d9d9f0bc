import pytest
from harness.stages import STAGES
from verl.trainer.ppo.v1 import trainer_base

from gtpo_verl.verl_plugin import compat
from gtpo_verl.verl_plugin.state import set_current


@pytest.fixture(autouse=True)
def no_trainer():
    """A process that has run no trainer yet."""
    set_current(None)
    yield
    set_current(None)


@pytest.fixture
def make_stage(compose_config, rows, monkeypatch):
    """A trainer of verl by its name, with further overrides, on the rows of `rollout_batch` or on others."""
    monkeypatch.setattr(trainer_base, "tq", None)

    def made(name, *overrides, rows=rows, **kwargs):
        return STAGES[name](compose_config("data.max_response_length=6", *overrides), rows, **kwargs)

    return made


@pytest.fixture(params=STAGES)
def stage(make_stage, request):
    """`make_stage` of each trainer."""
    return lambda *overrides, **kwargs: make_stage(request.param, *overrides, **kwargs)


@pytest.fixture
def no_load_errors(monkeypatch):
    monkeypatch.setattr(compat, "load_errors", {})
