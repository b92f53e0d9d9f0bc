import copy
import functools
import logging
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import settings
from rollout_batch import make_rows

# A busy machine is no failure.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# Hydra reads all of verl's YAML at each compose, most of whose time it takes in plain Python.
yaml.SafeLoader = yaml.CSafeLoader

ROOT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(config, items):
    """Of several workers, one takes the end-to-end tests, which come first: two runs of verl at once gain nothing on
    two cores, and would share the socket through which vLLM gets its weights."""
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(pytest.mark.xdist_group("e2e"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.get_closest_marker("e2e"))


@pytest.fixture
def caplog(caplog, monkeypatch):
    """pytest listens at the root logger, from which the plugin keeps its log apart."""
    monkeypatch.setattr(logging.getLogger("gtpo_verl"), "propagate", True)
    return caplog


@functools.cache
def cpu_config():
    """The CPU recipe's config; composing it takes eight times as long as a copy with overrides."""
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        return compose("gtpo_cpu", overrides=["task_dir=/nowhere"])


@pytest.fixture
def compose_config(tmp_path):
    """Compose the CPU recipe's config with further overrides, as `verl.trainer.main_ppo` would."""

    def composed(*overrides):
        config = copy.deepcopy(cpu_config())
        config.trainer.default_local_dir = str(tmp_path / "checkpoints")
        # Hydra's own last step of a composition.
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([*overrides]), config)
        return config

    return composed


@pytest.fixture
def rows():
    """A small batch as verl's trainers hold it after the old-log-prob pass."""
    return make_rows()
