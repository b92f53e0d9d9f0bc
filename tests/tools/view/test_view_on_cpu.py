"""`gtpo-verl view`."""

import json

import pytest
from own_process import run_python

from gtpo_verl import cli
from gtpo_verl.tools import view


def test_the_demo_needs_numpy_and_nothing_else(tmp_path):
    code = "import sys; sys.modules.update(dict.fromkeys(('verl', 'torch', 'transformers', 'tokenizers')))\n"
    code += "from gtpo_verl.cli import main; sys.exit(main())"
    assert str(tmp_path / "view.html") in run_python(code, "view", "--demo", "-o", tmp_path / "view.html").stdout
    assert (tmp_path / "view.html").stat().st_size < 1_000_000


def test_the_demo_is_small_and_has_a_step_with_a_conflict_and_a_completion_that_runs_on():
    assert sum(path.stat().st_size for path in view.DEMO.iterdir()) < 300_000
    header = json.loads((view.DEMO / "gtpo_dump.json").read_text())
    assert header["adv_estimator"] == "grpo" and header["tokenizer"] == "SmolLM2-135M-Instruct"
    steps = [[json.loads(line) for line in path.open()] for path in sorted(view.DEMO.glob("step_*.jsonl"))]
    assert any(
        {x["reward"] for x in step} >= {20.0, 10.0}
        and any(x["prefix_len"] > 4 for x in step)
        and not all(x["ended"] for x in step)
        for step in steps
    )


@pytest.mark.parametrize("arguments", [[], ["--demo", "dump"]])
def test_what_cannot_be_meant_is_refused(arguments, capsys):
    assert cli.main(["view", *arguments]) == 2
    assert "--demo" in capsys.readouterr().err
