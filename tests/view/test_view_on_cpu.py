"""`gtpo-verl view`."""

import pytest
from own_process import run_python
from token_dump import STEPS, save_tokenizer, write_dump

from gtpo_verl import cli, view


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory, tokenizer):
    return write_dump(tmp_path_factory.mktemp("run") / "dump", tokenizer, STEPS)


def test_the_demo_needs_no_run_and_no_verl(tmp_path):
    code = "import sys; sys.modules['verl'] = None\nfrom gtpo_verl.cli import main; sys.exit(main())"
    assert "steps 11" in run_python(code, "view", "--demo", "-o", tmp_path / "view.html").stdout
    assert (tmp_path / "view.html").stat().st_size < 1_000_000
    assert sum(path.stat().st_size for path in view.DEMO.iterdir()) < 200_000


@pytest.mark.parametrize("arguments", [[], ["--demo", "dump"]])
def test_what_cannot_be_meant_is_refused(arguments, capsys):
    assert cli.main(["view", *arguments]) == 2
    assert "--demo" in capsys.readouterr().err
