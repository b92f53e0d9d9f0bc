import logging
import os
from pathlib import Path

import pytest
import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import Phase, settings
from rollout_batch import make_rows

# No deadlines: a busy machine is no failure. pytest's --hypothesis-profile is stronger than the environment variable.
settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("nightly", deadline=None, max_examples=2000)
_BY_MUTATION = {"database": None, "derandomize": True, "phases": [Phase.explicit, Phase.generate]}
settings.register_profile("mutation", deadline=None, max_examples=30, **_BY_MUTATION)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Hydra reads all of verl's YAML at each compose, most of whose time it takes in plain Python.
yaml.SafeLoader = yaml.CSafeLoader

ROOT = Path(__file__).resolve().parents[1]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of several workers, one takes the runs of verl, and takes them first: two at once gain nothing on two cores, and
    would share the socket through which vLLM gets its weights."""
    from xdist.scheduler import LoadScopeScheduling

    class OneWorkerRunsVerl(LoadScopeScheduling):  # which begins with the largest scope
        def _split_scope(self, nodeid):
            return "e2e" if "e2e/" in nodeid else nodeid

    return OneWorkerRunsVerl(config, log)


@pytest.fixture
def caplog(caplog, monkeypatch):
    """pytest listens at the root logger, from which the plugin keeps its log apart."""
    monkeypatch.setattr(logging.getLogger("gtpo_verl"), "propagate", True)
    return caplog


@pytest.fixture
def compose_config(tmp_path):
    """Compose the CPU recipe's config with further overrides, as `verl.trainer.main_ppo` would."""
    from verl_config import verl_config

    def composed(*overrides):
        config = verl_config("task_dir=/nowhere", name="gtpo_cpu", folder=ROOT / "recipes/config")
        config.trainer.default_local_dir = str(tmp_path / "checkpoints")
        # Hydra's own last step of a composition, which takes eight times as long from the start.
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides([*overrides]), config)
        return config

    return composed


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Folder of the tokenizer that spells the completions of `dump`."""
    from token_dump import save_tokenizer

    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def dump(tmp_path_factory, tokenizer):
    """Folder of a token dump of `token_dump.STEPS`, which tests read and do not change."""
    from token_dump import STEPS, write_dump

    return write_dump(tmp_path_factory.mktemp("run") / "dump", tokenizer, STEPS)


@pytest.fixture
def rows():
    """A small batch as verl's trainers hold it after the old-log-prob pass."""
    return make_rows()
