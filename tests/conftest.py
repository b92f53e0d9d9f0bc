import logging
import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import Phase, settings
from rollout_batch import make_rows

# No deadlines: a busy machine is no failure. pytest's --hypothesis-profile is stronger than the environment variable.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=2000)
_BY_MUTATION = {"database": None, "derandomize": True, "phases": [Phase.explicit, Phase.generate]}
settings.register_profile("mutation", deadline=None, max_examples=30, **_BY_MUTATION)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def caplog(caplog, monkeypatch):
    """pytest listens at the root logger, from which the plugin keeps its log apart."""
    monkeypatch.setattr(logging.getLogger("gtpo_verl"), "propagate", True)
    return caplog


@pytest.fixture
def compose_config(tmp_path):
    """Compose the CPU recipe's config with further overrides, as `verl.trainer.main_ppo` would."""

    def composed(*overrides):
        with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
            checkpoints = f"trainer.default_local_dir={tmp_path / 'checkpoints'}"
            return compose("gtpo_cpu", overrides=["task_dir=/nowhere", checkpoints, *overrides])

    return composed


@pytest.fixture
def rows():
    """A small batch as verl's trainers hold it after the old-log-prob pass."""
    return make_rows()
