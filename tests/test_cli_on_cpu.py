import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from own_process import run_python
from rollout_files import write_rollouts

from gtpo_verl import cli
from recipes import __main__ as clones

PROGRAMS = {"gtpo-verl": (cli.main, cli.COMMANDS), "python3 -m recipes": (clones.main, clones.COMMANDS)}
COMMANDS = {name: (prog, main) for prog, (main, commands) in PROGRAMS.items() for name in commands}
LOG = Path(__file__).resolve().parent / "tools/diagnose/trainer_state.json"
DEMO = Path(cli.__file__).parent / "tools/view/demo"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_commands_help_has_an_example_that_its_parser_knows(name, capsys):
    prog, main = COMMANDS[name]
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    assert f"example: {prog} {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], []])
@pytest.mark.parametrize(("main", "commands"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_help_is_a_map_that_names_every_command(main, commands, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} {summary}" in out for name, (_, summary) in commands.items())


@pytest.mark.parametrize("word", ["diagnos", "\x1bzzz"])
def test_a_mistyped_command_is_one_line_with_those_that_exist(word, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([word, "--help"])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gtpo-verl: ") and "'diagnose'" in line and line.isprintable()


@pytest.mark.parametrize(
    ("word", "meant"), [("chek", "'check'"), ("Diagnose", "'diagnose'"), ("--foo", "'openrlhf'"), ("viwe", "'view'")]
)
def test_what_was_meant_by_a_mistyped_command_is_said(word, meant, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([word])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and f"no command {word}" in line and meant in line


STEERING = "\x1b]52;c;cm0=\x07 \x1b[31m \x9b1m \u202e \u2028 \r \x7f \x00"


def test_nothing_that_a_command_prints_steers_the_terminal(capsys, monkeypatch):
    def run(args):
        print(f"a log: {STEERING}\nλ\tend")
        print(f"a name: {STEERING}", file=sys.stderr)
        sys.stdout.writelines([STEERING])
        return 0

    command = ModuleType("printing_command")
    command.add_arguments, command.run = lambda parser: None, run
    monkeypatch.setitem(sys.modules, command.__name__, command)
    assert cli.main(["print"], commands={"print": (command.__name__, "prints")}) == 0
    captured = capsys.readouterr()
    assert "λ\tend" in captured.out and r"\x1b]52;c;cm0=\x07" in captured.out
    printed = captured.out + captured.err.replace("\r", "")
    assert all(character.isprintable() or character in "\n\t" for character in printed)


def test_a_logs_name_is_spelt_out(tmp_path, capsys):
    log = tmp_path / "a\x1b]0;PWN\x07b.json"
    log.write_bytes(LOG.read_bytes())
    assert cli.main(["diagnose", str(log)]) in (0, 1)
    out = capsys.readouterr().out
    assert r"a\x1b]0;PWN\x07b.json" in out and "\x1b" not in out


@pytest.mark.parametrize("arguments", [["view", "/nope"], ["view", "--demo", "-o", "."], ["diagnose", "/nope"]])
def test_a_path_that_does_not_do_is_one_line_with_what_to_give(arguments, capsys):
    assert cli.main(arguments) > 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search("give|name|there", line)


def test_an_unknown_option_leads_to_its_commands_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "train.log", "--rollout", "x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gtpo-verl diagnose: ") and "--rollout x; " in line
    assert line.endswith(" gtpo-verl diagnose --help")


def test_an_option_before_the_command_leads_to_the_help_of_all(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--rollout", "diagnose", "train.log"])
    assert capsys.readouterr().err.endswith(" gtpo-verl --help\n")


def test_the_versions_are_those_that_a_bug_report_wants(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert all(f"{name} {version(name)}" in said for name in ("gtpo-verl", "verl", "torch")) and "Python 3." in said


# Nothing but the standard library and what an installation without extras has is found.
LIGHT = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import requires

own = {"gtpo_verl"} | {name for name in requires("gtpo-verl") if "extra ==" not in name}
class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in own | sys.stdlib_module_names:
            return super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Light

from gtpo_verl import cli
"""


@pytest.mark.process
def test_help_needs_neither_torch_nor_verl():
    assert "initial-entropy" in run_python(LIGHT + "cli.main(['--help'])").stdout


@pytest.mark.process
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_needs_what_an_installation_without_extras_has(name):
    code = LIGHT + "sys.exit(cli.main([sys.argv[1], '--help']))"
    assert f"example: gtpo-verl {name}" in run_python(code, name).stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("view --demo -o -", "view"),
        (f"diagnose {LOG} --rollouts {DEMO}", "view"),
        ("view {text} --tokenizer MODEL -o -", "rollouts"),
        (f"diagnose {LOG} --rollouts {{text}} --tokenizer MODEL", "rollouts"),
    ],
    ids=["view a dump", "diagnose a dump", "view text", "diagnose text"],
)
def test_what_is_missing_names_the_extra_that_has_all_of_it(arguments, extra, tmp_path):
    text = write_rollouts(tmp_path / "rollouts", [[("2", 1.0, 1.0), ("3", 0.0, 0.0)]])
    code = LIGHT + "sys.exit(cli.main(sys.argv[1:]))"
    words = arguments.format(text=text).split()
    failed = run_python(code, *words, status=4 if words[0] == "diagnose" else 2)
    assert f"pip install '.[{extra}]'" in failed.stderr


@pytest.fixture
def left():
    """The writing end of a pipe whose reader has left, as `head -1` does after a line."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        yield stream


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_ends_quietly_when_its_reader_leaves(name, left, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", left)
    assert COMMANDS[name][1]([name, "--help"]) == 141
    left.flush()  # as Python does when it exits
    assert not capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_process_ends_quietly_when_its_reader_leaves(unbuffered, left):
    command = [sys.executable, "-m", "gtpo_verl", "diagnose", LOG]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    finished = subprocess.run(command, stdout=left, stderr=subprocess.PIPE, env=env, text=True)
    assert (finished.returncode, finished.stderr) == (141, "")


@pytest.mark.parametrize(("arguments", "sign"), [("view --demo -o -", "λ"), ("check --help", "…")])
def test_a_locale_without_the_signs_gets_them_in_utf_8(arguments, sign):
    env = os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}
    finished = subprocess.run([sys.executable, "-m", "gtpo_verl", *arguments.split()], capture_output=True, env=env)
    assert finished.returncode == 0 and sign in finished.stdout.decode(), finished.stderr


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A folder of files that are none of what the commands read."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.jsonl").write_text('{"a": 1}\n{"b')
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "list.jsonl").write_text('{"step": 1, "data": [1]}\n')
    (tmp_path / "text.parquet").write_text("no parquet")
    pq.write_table(pa.table({"prompt": ["plain text"] * 3}), tmp_path / "plain.parquet")
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures/kept").touch()
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "data --dataset gsm8k --out figures --split train --source half.jsonl",
        "data --dataset gsm8k --out figures --split train --source bytes.jsonl",
        "data --dataset gsm8k --out figures --split train --source empty.jsonl",
        "data --dataset gsm8k --out figures --split train --source text.parquet",
        "data --dataset gsm8k --out figures --source none",
        "initial-entropy --model none --data plain.parquet --samples 3",
        "initial-entropy --model none --data text.parquet",
        "initial-entropy --model none --data plain.parquet --samples 0",
        "initial-entropy --model none --data plain.parquet --batch-size 0",
        "evaluate half.jsonl --out figures",
        "evaluate bytes.jsonl --out figures",
        "evaluate empty.jsonl --out figures",
        "evaluate text.parquet --out figures",
        "plot half.jsonl --out figures",
        "plot bytes.jsonl --out figures",
        "plot list.jsonl --out figures",
        "export none figures",
        "export plain.parquet figures",
        "view half.jsonl --out figures/view.html",
        "view figures --out figures/view.html",
        "make-task arithmetic --out figures",
        "make-task arithmetic --out half.jsonl",
        "make-task arithmetic --out half.jsonl/task",
        "run --out half.jsonl -- true",
        "run --out figures --stall 0 -- true",
    ],
)
def test_hostile_input_is_one_line_and_writes_nothing(broken, command, capsys):
    prog, main = COMMANDS[command.split()[0]]
    assert main(command.split()) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(prog)]
    assert len(lines) == 1 and lines[0].startswith(f"{prog} {command.split()[0]}: ")
    assert [path.name for path in (broken / "figures").iterdir()] == ["kept"]


@pytest.mark.parametrize("file", ["none", "figures", "empty.jsonl", "bytes.jsonl", "utf16.jsonl", "null.jsonl"])
@pytest.mark.parametrize(
    "command",
    [
        "view {}",
        "view {} --tokenizer ./none",
        "diagnose {}",
        "diagnose half.jsonl --rollouts {} --tokenizer ./none",
        "initial-entropy --model ./none --data {}",
        "smoke {}",
        "plot {} --out out",
        "evaluate {} --out out",
        "export {} out",
        "data --dataset gsm8k --split train --out out --source {}",
    ],
)
def test_a_file_that_is_none_of_what_a_command_reads_is_one_line(broken, command, file, capsys):
    (broken / "utf16.jsonl").write_text('{"step": 1}', encoding="utf-16")
    (broken / "null.jsonl").write_text("null\n")
    words = command.format(file).split()
    prog, main = COMMANDS[words[0]]
    assert main(words) == (4 if words[0] == "diagnose" else 2)
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines() if line.startswith(prog))
    assert line.startswith(f"{prog} {words[0]}: ") and out == "" and "Traceback" not in err
    assert not (broken / "out").exists() and not (broken / "view.html").exists()


RECORDS = {
    "make-task": ("make-task arithmetic --out held", "warm_start.json"),
    "run": ("run --out held -- true", "settings.json"),
    "export": ("export held out", "fsdp_config.json"),
    "export again": ("export global_step_1 held", "export.json"),
    "view": ("view held --out figures/view.html", "gtpo_dump.json"),
}


@pytest.mark.parametrize("text", ["", "[]", '{"a', "\0", "1e999", "[" * 100_000], ids=lambda text: repr(text[:9]))
@pytest.mark.parametrize(("command", "record"), RECORDS.values(), ids=RECORDS)
def test_a_record_that_is_none_is_named_and_kept(broken, command, record, text, capsys):
    """Of an earlier start, cut off or edited."""
    (broken / "held/checkpoints/global_step_1/actor").mkdir(parents=True)
    (broken / "held/checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    (broken / "global_step_1").mkdir()
    (broken / "global_step_1/fsdp_config.json").write_text('{"world_size": 1}')
    (broken / "global_step_1/model_world_size_1_rank_0.pt").touch()
    (broken / "held" / record).write_text(text)
    prog, main = COMMANDS[command.split()[0]]
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{prog} {command.split()[0]}: ") and record in line
    assert "restore or remove" in line
    assert (broken / "held" / record).read_text() == text
    assert not (broken / "out").exists() and [path.name for path in (broken / "figures").iterdir()] == ["kept"]


def test_what_a_file_is_called_does_not_steer_the_terminal(broken, capsys):
    assert clones.main(["evaluate", "\x1b[31m\x9bred ⟨H⟩\u202e"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert r"\x1b[31m\x9bred ⟨H⟩\u202e" in line and line.isprintable()


def test_a_data_source_that_would_break_the_table_is_an_error(broken, capsys):
    (broken / "dump.jsonl").write_text('{"input": "q", "output": "a", "acc": 1, "data_source": "a\\n| b |"}\n')
    assert clones.main(["evaluate", "dump.jsonl"]) == 2
    err = capsys.readouterr().err
    assert "dump.jsonl:1 is not" in err and r"(data_source is 'a\n| b |'" in err


def test_a_wrong_model_is_named(broken, capsys):
    pq.write_table(pa.table({"prompt": [[{"role": "user", "content": "1+1="}]]}), broken / "prompts.parquet")
    assert cli.main(["initial-entropy", "--model", "./none", "--data", "prompts.parquet", "--samples", "1"]) == 2
    assert " --model ./none cannot " in capsys.readouterr().err
