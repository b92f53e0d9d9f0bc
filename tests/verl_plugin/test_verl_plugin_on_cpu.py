import logging

import pytest
from own_process import NOT_LOADED, run_python

pytestmark = pytest.mark.process


@pytest.mark.parametrize("level", [logging.DEBUG, logging.ERROR], ids=logging.getLevelName)
def test_the_log_is_shown_once_also_where_the_root_logger_shows_errors_only(level):
    """vLLM imports model_hosting_container_standards, which sets the root logger and its handlers so."""
    code = """
import logging, sys, verl
for root in (logging.getLogger(), *logging.getLogger().handlers):
    root.setLevel(int(sys.argv[-1]))
logging.getLogger("gtpo_verl").info("seen")
logging.getLogger("gtpo_verl.reward.score").warning("seen")
"""
    assert run_python(code, level).stderr.count("seen") == 2


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
    variables = NOT_LOADED | {"VERL_USE_EXTERNAL_MODULES": "gtpo_verl.verl_plugin"}
    assert run_python(code, **variables).stdout.split()[-1] == "True"


def test_what_an_external_module_imported_before_the_plugin_is_hooked_too(tmp_path):
    """verl loads those modules first: a trainer and an agent loop of somebody's own."""
    (tmp_path / "own.py").write_text("""
from verl.experimental.agent_loop.agent_loop import AgentLoopBase
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
""")
    code = """
import own, sys
from gtpo_verl.verl_plugin.hooks import HOOKS
for hook in HOOKS:
    if hook.module in sys.modules and "." not in hook.path:
        verls = getattr(sys.modules[hook.module], hook.path).__wrapped__
        print([name for name, module in [*sys.modules.items()] if vars(module).get(hook.path) is verls])
print(own.compute_advantage.hooked_by_gtpo)
"""
    *left, own = run_python(code, VERL_USE_EXTERNAL_MODULES="own", PYTHONPATH=tmp_path).stdout.splitlines()
    assert left == ["[]"] * len(left) and len(left) > 4 and own == "True"
