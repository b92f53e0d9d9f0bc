from dataclasses import asdict

import pytest

from gtpo_verl.cli import main
from gtpo_verl.tools import check
from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.tools.check.guard import Verdict

MAIN = ["python3", "-m", "verl.trainer.main_ppo"]
PROGRAM = ["-m", "verl.trainer.main_ppo", "--config-name=gtpo", "trainer.nnodes=2"]
WRONG = Finding("rollout.n", "verl has no such key", "remove it")
LACKING = Finding("GPUs", "0 here, 8 asked for", "run on a machine with GPUs")
LATER = Finding("updates", "several per rollout", advice="make one")


@pytest.fixture
def said(capsys, monkeypatch):
    """What `gtpo-verl check` prints if the guard has seen this, and its exit status."""

    def checked(*words, settings=(), machine=(), status=None, last_lines=(), left_out=(), without="", **more):
        found = {"program": PROGRAM, "config": "gtpo", "verl": "0.9.1"} | more
        if "other" not in more and "error" not in more:
            found |= {"settings": [*map(asdict, settings)], "machine": [*map(asdict, machine)]}
        seen = Verdict({} if status is not None else found, [*left_out], status, [*last_lines], without)
        monkeypatch.setattr(check.guard, "run", lambda *arguments: seen)
        exits = main(["check", *words])
        return exits, capsys.readouterr().out

    return checked


def test_a_command_without_problems_is_one_line_beside_what_was_judged(said):
    assert said("--", *MAIN) == (
        0,
        "judged: verl.trainer.main_ppo, config gtpo\n"
        "GTPO is installed and hooked into verl 0.9.1. This command can run here.\n",
    )
    assert said("--", *MAIN, settings=[LATER])[1].endswith("This command can run here, with the warnings above.\n")


def test_settings_come_first_and_the_machine_can_be_left_out(said):
    exits, out = said("--", *MAIN, settings=[WRONG, LATER], machine=[LACKING])
    assert exits == 1 and out.splitlines()[1:] == [
        "warning: updates: several per rollout: make one",
        "problem: rollout.n: verl has no such key: remove it",
        "1 problem with these settings: verl would stop, or GTPO would not act.",
        "problem: GPUs: 0 here, 8 asked for: run on a machine with GPUs",
        "1 problem with this machine: the command would fail here. With --settings it is left out.",
    ]
    exits, out = said("--settings", "--", *MAIN, machine=[LACKING])
    assert exits == 0 and out.endswith("hooked into verl 0.9.1. Its settings are right.\n")


def test_a_script_is_run_only_after_a_yes(said, monkeypatch):
    exits, out = said("--", "bash", "run.sh")
    assert exits == 1 and "really run" in out and "Nothing was run or judged." in out and "--run-script" in out
    assert said("--run-script", "--", "bash", "run.sh", left_out=["rm -rf x"])[1].startswith(
        "the lines of bash run.sh up to the program below were run, but for rm -rf x\njudged: "
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for answer, exits in (("", 1), ("no", 1), ("y", 0), ("YES", 0)):
        monkeypatch.setattr("builtins.input", lambda prompt, answer=answer: answer)
        assert said("--", "bash", "run.sh")[0] == exits


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ({"error": "Could not find x"}, "main_ppo, config gtpo: verl does not accept this command: Could not find x"),
        ({"other": "it is not verl's"}, "main_ppo, config gtpo is not judged: it is not verl's"),
        ({"status": 1, "last_lines": ["No module"]}, "it ended with status 1; it printed last:\n  No module\n"),
        ({"status": 1, "without": "/usr/bin/python3"}, "/usr/bin/python3 does not have gtpo_verl: install it there"),
    ],
)
def test_what_was_not_judged_is_said_with_the_reason(said, seen, expected):
    exits, out = said("--", *MAIN, **seen)
    assert exits == 1 and expected in out and out.endswith("1 problem: nothing was judged.\n")


def test_a_launcher_is_named_and_not_started(said):
    out = said("--", "ray", "job", "submit", "--no-wait", "--", *MAIN)[1]
    assert out.startswith("not started: ray job submit --no-wait --: what it starts is judged here, in ")
