import os
import sys
from pathlib import Path

from own_process import run_python

from gtpo_verl.tools.check import guard

PROGRAM = """
import sys
import hydra

@hydra.main(config_path=None, config_name=None, version_base=None)
def main(config):
    open({reached!r}, "w")

main()
"""
ENOUGH = 600


def program(tmp_path):
    """A program with a config of its own, and the file that it makes if nothing stops it."""
    reached = tmp_path / "reached"
    (tmp_path / "train.py").write_text(PROGRAM.format(reached=str(reached)))
    return str(tmp_path / "train.py"), reached


def test_a_program_ends_where_its_config_is_composed(tmp_path):
    path, reached = program(tmp_path)
    seen = guard.run([sys.executable, path, "+x=1"], {}, False, ENOUGH)
    assert seen.said["program"] == [path, "+x=1"] and "not one of verl's" in seen.said["other"]
    assert seen.left_out == [] and not reached.exists()
    assert run_python(f"import runpy; runpy.run_path({path!r}, run_name='__main__')") and reached.exists()


def test_what_hydra_refuses_is_told(tmp_path):
    path, _ = program(tmp_path)
    seen = guard.run([sys.executable, path, "x=[1"], {}, False, ENOUGH)
    assert "no viable alternative" in seen.said["error"]


def test_the_lines_of_a_script_are_run_but_for_what_would_remove_stop_or_install(tmp_path):
    path, reached = program(tmp_path)
    (tmp_path / "precious").write_text("")
    script = tmp_path / "run.sh"
    script.write_text(
        f"cd {tmp_path}\nrm -rf precious\nray stop --force\nPATH=/usr/bin:/bin\npkill -9 python\nkill -9 1\n"
        f"{sys.executable} -m pip install nothing\nexport N=2\nmkdir -p made\n"
        f"ray job submit --no-wait -- {sys.executable} {path} +n=$N 2>&1 | tee made/log\n"
    )
    seen = guard.run(["bash", str(script)], {}, True, ENOUGH)
    assert seen.said["program"] == [path, "+n=2"] and not reached.exists()
    assert not any("sitecustomize" in line for line in seen.last_lines)
    assert (tmp_path / "precious").exists() and (tmp_path / "made").is_dir()
    stood_in = ["rm -rf precious", "ray stop --force", "pkill -9 python", "kill -9 1"]
    assert seen.left_out[:4] == stood_in and "pip install nothing" in seen.left_out[4]


def test_our_own_commands_in_a_script_do_nothing_but_start_what_is_behind_them(tmp_path):
    path, _ = program(tmp_path)
    ours = f"{sys.executable} -m gtpo_verl"
    script = f"{ours} initial-entropy --model nowhere && {ours} check -- {sys.executable} {path} +a=1"
    seen = guard.run(["bash", "-c", script], {}, True, ENOUGH)
    assert seen.said["program"] == [path, "+a=1"]
    (left_out,) = seen.left_out
    assert left_out.endswith("initial-entropy --model nowhere")


def test_a_program_that_starts_ray_by_itself_starts_none():
    seen = guard.run([sys.executable, "-c", "import ray; ray.init(); print('started')"], {}, False, ENOUGH)
    assert seen.said == {} and seen.left_out == ["ray.init"] and "started" not in seen.last_lines


def test_a_program_that_ends_before_says_what_it_printed():
    seen = guard.run([sys.executable, "-m", "verl.trainer.main_ppo_sync"], {}, False, ENOUGH)
    assert seen.said == {} and seen.status == 1
    assert seen.last_lines[-1].endswith("No module named verl.trainer.main_ppo_sync")


def test_a_program_that_takes_too_long_is_ended(tmp_path):
    seen = guard.run([sys.executable, "-c", "import time; time.sleep(900)"], {}, False, 0)
    assert seen.status is None and seen.said == {}


def test_a_python_without_this_package_runs_nothing(tmp_path):
    (tmp_path / "gtpo_verl").mkdir()
    (tmp_path / "gtpo_verl/__init__.py").write_text("raise ImportError")
    reached = tmp_path / "reached"
    seen = guard.run(
        [sys.executable, "-c", f"open({str(reached)!r}, 'w')"], {"PYTHONPATH": str(tmp_path)}, False, ENOUGH
    )
    assert seen.without == sys.executable and not reached.exists()


def test_a_sitecustomize_of_the_user_is_kept(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')")
    seen = guard.run([sys.executable, "-c", "print('ran')"], {"PYTHONPATH": str(tmp_path)}, False, ENOUGH)
    assert seen.last_lines == ["mine", "ran"]


def test_nothing_of_a_check_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    Path(tmp_path / "temporary").mkdir()
    path, _ = program(tmp_path)
    before = dict(os.environ)
    guard.run([sys.executable, path], {"MINE": "1"}, False, ENOUGH)
    assert os.environ == before and not any((tmp_path / "temporary").iterdir())
    assert sorted(x.name for x in tmp_path.iterdir()) == ["temporary", "train.py"]
