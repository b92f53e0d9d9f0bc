"""The command, from its arguments to its exit status."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import run_logs
from rollout_files import LETTER_COUNTING as DEMO
from rollout_files import write_rollouts

from gtpo_verl import cli
from gtpo_verl.tools.diagnose.report import read_run, report_on
from gtpo_verl.tools.diagnose.text_report import screen

HERE = Path(__file__).resolve().parent
STUDY = HERE.parents[2] / "studies/results/verl"
HEALTHY = STUDY / "letter_counting/gtpo-lr0.0001-seed1.jsonl.gz"
NO_END = STUDY / "letter_counting/grpo-lr5e-05-seed1.jsonl.gz"
NO_ACCURACY = STUDY / "arithmetic/gtpo-lr0.0003-seed1.jsonl.gz"
TRL = HERE / "trainer_state.json"
"""Of TRL 1.16.0, as `examples/test_trl_gtpo_on_cpu.py` trains: the reward is the number of small digits, limit 16."""


def command(capsys, *arguments):
    status = cli.main(["diagnose", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("log", "status", "verdict"),
    [
        (HEALTHY, 0, r"HEALTHY: accuracy 0\."),
        (NO_END, 1, r"DEGRADED since step 271: exact format fell [^.]*0\.96\d* to "),
        (NO_ACCURACY, 2, r"FAILED since step 195: accuracy fell [^.]*0\.33\d* to "),
        (TRL, 1, r"DEGRADED since step 13: completions .*EOS fell [^.]*0\.33\d* to "),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_what_is_wrong_with_a_run_that_trained(capsys, log, status, verdict):
    found, said, _ = command(capsys, log)
    assert re.match(verdict, " ".join(said.split())) and found == status
    assert len(said.splitlines()) <= 40 and max(map(len, said.splitlines())) <= 80
    assert "GTPO" not in said


def test_the_documentation_shows_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(HERE.parents[2])
    report = report_on(read_run(NO_END.relative_to(Path.cwd())))
    assert f"```\n{screen(report)}\n```" in Path("docs/diagnose.md").read_text()


def test_json_has_what_the_screen_says(capsys):
    status, said, _ = command(capsys, NO_END, "--json")
    report = json.loads(said)
    assert status == 1 and screen(report) == screen(report_on(read_run(NO_END)))
    assert report["number"] == "exact_format" and report["since"] == 271 and report["outcome"] == "accuracy"


def test_a_compressed_log_reads_as_the_same_uncompressed(tmp_path, capsys):
    (tmp_path / "run.jsonl").write_bytes(gzip.decompress(HEALTHY.read_bytes()))
    same = [command(capsys, path, "--json")[1].replace(str(path), "") for path in (HEALTHY, tmp_path / "run.jsonl")]
    assert same[0] == same[1]


def test_the_plot_is_named(tmp_path, capsys):
    path = tmp_path / "plots/run.png"
    status, said, _ = command(capsys, TRL, "--plot", path)
    assert status == 1 and said.endswith(f"plot: {path}\n") and path.read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_one_line_with_the_file_and_a_remedy(tmp_path, capsys):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    supervised = tmp_path / "sft.jsonl"
    supervised.write_text(
        "".join(f'{{"loss": 1.5, "token_acc": 0.9, "global_step/max_steps": "{n}/9"}}\n' for n in range(9))
    )
    (tmp_path / "wandb-summary.json").write_text('{"_runtime": 9, "_step": 3, "critic/score/mean": 0.5}')
    (tmp_path / "train.ipynb").write_text('{"cells": [{"outputs": [{"data": {"text/html": ["<table>"]}}]}]}')
    others = run_logs.write_jsonl(tmp_path / "loss.jsonl", [{"training/global_step": 1, "perf/mfu": 0.1}] * 3)
    records = [*run_logs.verl(steps=40, length=lambda step: 50.0)]
    one = run_logs.write_jsonl(tmp_path / "one.jsonl", records[:1])
    long = run_logs.write_jsonl(tmp_path / "long.jsonl", records)
    folder = write_rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("13", 0.0, 0)]] * 3)
    words = write_rollouts(tmp_path / "words", [[("A word", 1.0, 1), ("Another", 0.0, 0)]] * 3)
    (tmp_path / "two").mkdir()
    (tmp_path / "two/train.log").touch()
    (tmp_path / "two/metrics.jsonl").write_text("{}\n")
    not_begun = tmp_path / "not_begun/metrics.jsonl"
    not_begun.parent.mkdir()
    not_begun.touch()
    cases = [
        ([tmp_path / "absent.jsonl"], "absent.jsonl does not exist: name a log, verl's console log"),
        ([empty], "empty.jsonl contains no training metrics: give verl's console log"),
        (
            [tmp_path / "two/train.log"],
            f"train.log contains no training metrics: give {tmp_path / 'two/metrics.jsonl'}",
        ),
        ([not_begun], "metrics.jsonl contains no training metrics: give verl's console log"),
        ([supervised], "sft.jsonl has no reward that diagnose reads; if it is of supervised training"),
        ([tmp_path / "wandb-summary.json"], "wandb-summary.json is W&B's summary, the last step alone"),
        ([tmp_path / "train.ipynb"], "train.ipynb is a notebook that printed nothing: copy its table into a .csv file"),
        ([others], "loss.jsonl contains no training metrics"),
        ([one], "one.jsonl has one step, and nothing to compare it with"),
        ([folder], "name the run's tokenizer with --tokenizer"),
        ([folder, "--tokenizer", tmp_path], "no tokenizer"),
        ([words, "--tokenizer", DEMO], "1.jsonl is not text of the tokenizer"),
        ([long, "--rollouts", folder, "--tokenizer", DEMO], "has 2 tokens a completion at step 1"),
        ([long, "--rollouts", tmp_path / "two"], "has no gtpo_dump.json, N.jsonl"),
        ([long, "--limit", "0"], "--limit and --completions must be at least 1"),
        ([long, "--plot", tmp_path / "plot.doc"], "Format 'doc' is not supported"),
    ]
    for arguments, message in cases:
        status, out, err = command(capsys, *arguments)
        assert status == 4 and out == "" and err.count("\n") == 1
        assert err.startswith("gtpo-verl diagnose: ") and message in err


def test_a_dump_counts_own_tokens_of_some_groups_and_is_not_compared_with_the_logged_length(tmp_path, capsys):
    log = run_logs.write_jsonl(tmp_path / "agent.jsonl", [*run_logs.verl(steps=40, length=lambda step: 500.0)])
    status, said, err = command(capsys, log, "--rollouts", DEMO, "--tokenizer", DEMO)
    assert status == 0 and said and err == ""


@pytest.mark.parametrize("arguments", [["--limit", "many", "log"], ["--plots", "log"], []])
def test_a_wrong_option_is_bad_input_too(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 4 and line.startswith("gtpo-verl") and "--help" in line


def test_it_needs_neither_torch_nor_verl():
    code = (
        "import sys; from gtpo_verl import cli\n"
        f"assert cli.main(['diagnose', {str(TRL)!r}]) == 1\n"
        "print(sorted({'torch', 'verl', 'numpy', 'transformers', 'matplotlib'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
