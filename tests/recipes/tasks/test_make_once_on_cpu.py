"""What the tasks share: each is made once, for one set of settings, and never half."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from recipes.tasks.make_once import make_once


@pytest.fixture
def made(tmp_path):
    """Calls `make_once` with a seed, a source and a `make` that writes the seed; keeps the seeds that were made."""

    class Made(list):
        out = tmp_path / "task" / "out"
        source = tmp_path / "source.py"

        def __call__(self, seed, fail=None):
            def make(folder):
                (folder / "model").write_text(str(seed))
                time.sleep(0.05)
                if fail:
                    raise fail
                self.append(seed)

            make_once(self.out, {"seed": seed}, [str(self.source)], make, "task.json", ("model", "warm_start"))

        def files(self):
            return sorted(path for path in self.out.parent.rglob("*") if path.suffix != ".lock")

    Made.source.write_text("first")
    return Made()


def test_a_second_call_with_the_same_settings_makes_nothing(made):
    made(1)
    assert json.loads((made.out / "task.json").read_text())["seed"] == 1
    (made.out.parent / ".out.lock").unlink(missing_ok=True)
    made(1)
    assert made == [1] and not list(made.out.parent.glob("*.lock"))  # its parent may be read-only


def test_of_two_calls_at_the_same_time_one_makes_it_and_the_other_waits(made):
    with ThreadPoolExecutor() as pool:
        list(pool.map(made, [1, 1]))
    assert made == [1] and (made.out / "model").read_text() == "1"


def test_changed_settings_or_sources_make_all_anew_and_drop_what_was_built_on_the_old(made):
    made(1)
    (made.out / "warm_start").mkdir()
    made(2)
    assert sorted(path.name for path in made.out.iterdir()) == ["model", "task.json"]
    assert (made.out / "model").read_text() == "2"
    made.source.write_text("second")
    made(2)
    assert made == [1, 2, 2]


@pytest.mark.parametrize("earlier", [False, True])
def test_an_interrupted_call_leaves_what_was_there(made, earlier):
    if earlier:
        made(1)
    before = made.files()
    with pytest.raises(KeyboardInterrupt):
        made(2, fail=KeyboardInterrupt())
    assert made.files() == before
    assert not earlier or (made.out / "model").read_text() == "1"


def test_a_folder_with_other_content_is_refused(made):
    made.out.mkdir(parents=True)
    (made.out / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="thesis.tex"):
        made(1)
    assert (made.out / "thesis.tex").exists() and made == []
    assert [path.name for path in made.out.parent.iterdir()] == ["out"]  # and nothing is left beside it


MAKES_SLOWLY = """
import argparse, pathlib, sys, time
from recipes.tasks import make_task, tiny
from recipes.tasks.make_once import make_once
def slow(folder):
    (folder / "model").touch()
    time.sleep(900)
tiny.prepare = lambda out, config: make_once(out, {}, [], slow, "task.json", ("model",))
make_task.run(argparse.Namespace(task="arithmetic", out=sys.argv[1], seed=0))
"""


def test_a_task_that_is_ended_leaves_nothing_half_made(tmp_path):
    out = tmp_path / "tasks/out"
    process = subprocess.Popen([sys.executable, "-c", MAKES_SLOWLY, str(out)])
    while not list(tmp_path.rglob("model")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert [path.name for path in out.parent.iterdir()] == [".out.lock"]
