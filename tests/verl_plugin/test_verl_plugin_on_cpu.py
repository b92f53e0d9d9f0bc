import logging
from pathlib import Path

import pytest
import verl
from own_process import run_python
from verl.utils import config as verl_config

from gtpo_verl import verl_plugin
from gtpo_verl.verl_plugin import names_and_versions

ROOT = Path(__file__).resolve().parents[2]


NOT_LOADED = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "", "VERL_PLATFORM": ""}


def last_line(code, **environment):
    return run_python(code, **environment).stdout.strip().splitlines()[-1]


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


def group_turn_policy_optimization(**kwargs): ...


KNOWN = "algorithm.gtpo.initial_entropy=0.2"


@pytest.fixture
def no_load_errors(monkeypatch):
    monkeypatch.setattr(names_and_versions, "_load_errors", [])


@pytest.fixture
def install_in(monkeypatch, no_load_errors):
    def install(version):
        monkeypatch.setattr(verl, "__version__", version)
        monkeypatch.setattr(verl_plugin.wrapt, "register_post_import_hook", lambda *args: None)
        verl_plugin._install()

    return install


NOT_TESTED = ["0.9.1.dev", "0.9.1+fork", "0.10.0.dev", "1.0", "main"]


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
