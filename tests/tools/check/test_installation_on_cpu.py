from pkgutil import resolve_name

import pytest
import verl
from own_process import NOT_LOADED, run_python
from verl.trainer.ppo import core_algos

from gtpo_verl.cli import main
from gtpo_verl.tools.check.installation import installation
from gtpo_verl.verl_plugin import compat, hooks
from gtpo_verl.verl_plugin.state import estimate_gtpo_advantage


def test_without_verl_or_torch_there_is_a_sentence_and_no_traceback():
    absent = "import sys; sys.modules.update(torch=None, verl=None)\n"
    code = absent + "from gtpo_verl.cli import main; exit(main(['check']))"
    finished = run_python(code, status=1)
    assert "no torch" in finished.stdout and "no verl" in finished.stdout
    assert "Traceback" not in finished.stderr


def test_report_is_one_sentence_with_two_commands(capsys):
    assert main(["check"]) == 0
    verdict, *commands = capsys.readouterr().out.splitlines()
    assert verdict.startswith("GTPO is installed") and f"verl {verl.__version__}" in verdict
    assert [command.split()[0] for command in commands] == ["GTPO_CHECK=1", "gtpo-verl"]
    assert [*installation()] == []
    assert core_algos.get_adv_estimator_fn("gtpo") is estimate_gtpo_advantage


@pytest.mark.parametrize("subject", ["legacy trainer", "V1 trainer"])
def test_both_trainers_are_hooked(subject):
    (place,) = [f"{module}:{path}" for hooked, module, path, _ in hooks.HOOKS if hooked == subject]
    assert resolve_name(place).hooked_by_gtpo


def test_report_says_why_gtpo_cannot_run(capsys, monkeypatch):
    monkeypatch.setattr(compat, "load_errors", {"verl is broken": None})
    assert main(["check"]) == 1
    assert "verl is broken" in capsys.readouterr().out


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
    stdout = run_python(code, **NOT_LOADED).stdout
    assert "VERL_USE_EXTERNAL_PLUGINS" in stdout and "gtpo,gtpo_check" in stdout
