"""`gtpo-verl view`."""

import pytest
from own_process import run_python
from token_dump import STEPS, save_tokenizer, write_dump

from gtpo_verl import cli, view
from gtpo_verl.view.sources import find_source


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory, tokenizer):
    return write_dump(tmp_path_factory.mktemp("run") / "dump", tokenizer, STEPS)


def refusal(capsys, folder, *options):
    assert cli.main(["view", str(folder), *map(str, options), "--out", str(folder / "view.html")]) == 2
    assert not (folder / "view.html").exists()
    (line,) = capsys.readouterr().err.splitlines()
    return line


def read_rollouts(path, tokenizer):
    source = find_source(path, tokenizer)
    return [completion for file in source.paths for completion in source.read(file)]


def test_steps_are_thinned_out_evenly_to_a_size(tmp_path):
    paths = [tmp_path / str(i) for i in range(9)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    assert view.thin_out(paths, 90) == paths
    assert view.thin_out(paths, 50) == paths[::2]
    assert view.thin_out(paths, 1) == [paths[-1]]


def test_the_demo_needs_no_run_and_no_verl(tmp_path):
    code = "import sys; sys.modules['verl'] = None\nfrom gtpo_verl.cli import main; sys.exit(main())"
    assert "steps 11" in run_python(code, "view", "--demo", "-o", tmp_path / "view.html").stdout
    assert (tmp_path / "view.html").stat().st_size < 1_000_000
    assert sum(path.stat().st_size for path in view.DEMO.iterdir()) < 200_000


@pytest.mark.parametrize("arguments", [[], ["--demo", "dump"]])
def test_what_cannot_be_meant_is_refused(arguments, capsys):
    assert cli.main(["view", *arguments]) == 2
    assert "--demo" in capsys.readouterr().err
