"""`gtpo-verl view`."""

import pytest
from own_process import run_python

from gtpo_verl import cli
from gtpo_verl.tools import view


def test_the_demo_needs_no_run_and_no_verl(tmp_path):
    code = "import sys; sys.modules['verl'] = None\nfrom gtpo_verl.cli import main; sys.exit(main())"
    assert "steps 11" in run_python(code, "view", "--demo", "-o", tmp_path / "view.html").stdout
    assert (tmp_path / "view.html").stat().st_size < 1_000_000
    assert sum(path.stat().st_size for path in view.DEMO.iterdir()) < 200_000


@pytest.mark.parametrize("arguments", [[], ["--demo", "dump"]])
def test_what_cannot_be_meant_is_refused(arguments, capsys):
    assert cli.main(["view", *arguments]) == 2
    assert "--demo" in capsys.readouterr().err
