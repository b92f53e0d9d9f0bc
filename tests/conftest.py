import os
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from rollout_batch import make_rows

ROOT = Path(__file__).resolve().parents[1]


_exit_status = pytest.StashKey[int]()


def pytest_sessionfinish(session, exitstatus):
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """End the process with pytest's own status.

    With Ray, Arrow, torch and ZeroMQ in one process, Python crashed in native code while it was shutting down, after
    the last test had passed and been reported.
    """
    if _exit_status in config.stash:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_exit_status])


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
