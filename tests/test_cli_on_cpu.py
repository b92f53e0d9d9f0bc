import subprocess
import sys
from importlib import import_module

import pytest

from gtpo_verl.cli import COMMANDS, main


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_has_an_example_that_its_parser_knows(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"example: gtpo-verl {name}" in capsys.readouterr().out


def test_the_help_is_a_map_that_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} {summary}" in out for name, (_, summary) in COMMANDS.items())


def test_help_needs_neither_torch_nor_verl():
    code = (
        "import sys; sys.modules.update(torch=None, verl=None, transformers=None)\n"
        "from gtpo_verl.cli import main; main(['--help'])"
    )
    finished = python(code)
    assert finished.returncode == 0, finished.stderr
    assert "initial-entropy" in finished.stdout


@pytest.mark.parametrize("module", [module for module, _ in COMMANDS.values()])
def test_a_commands_module_has_its_two_functions(module):
    loaded = import_module(module)
    assert callable(loaded.add_arguments) and callable(loaded.run)


def test_an_unknown_command_is_named_with_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluation"])
    assert stopped.value.code == 2
    assert "invalid choice: 'evaluation' (choose from" in capsys.readouterr().err


def test_what_a_user_gave_wrongly_is_one_line_and_status_2(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "missing.jsonl")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gtpo-verl evaluate: ") and "missing.jsonl" in line
