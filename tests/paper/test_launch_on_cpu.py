import json
import sys
import time

import pytest

from gtpo_verl.paper import launch


@pytest.fixture
def run(monkeypatch, tmp_path):
    """`launch.train` with a script of ours in verl's place, which logs steps as verl's file logger does."""

    def trained(script, overrides=("trainer.total_training_steps=3",), stall_s=60.0):
        path = tmp_path / "trainer.py"
        header = "import json, os, sys, time\nfile = open(os.environ['VERL_FILE_LOGGER_PATH'], 'w', buffering=1)\n"
        header += (
            "def step(n):\n    data = {'reward/score/mean': 10.0 + n, 'timing_s/step': 2.0, 'timing_s/gtpo': 0.5}\n"
        )
        header += "    file.write(json.dumps({'step': n, 'data': data}) + '\\n')\n"
        path.write_text(header + script)
        popen = launch.subprocess.Popen
        monkeypatch.setattr(
            launch.subprocess, "Popen", lambda command, **kwargs: popen([sys.executable, str(path)], **kwargs)
        )
        try:
            return launch.train(list(overrides), tmp_path / "out", stall_s, stall_s)
        finally:
            monkeypatch.setattr(launch.subprocess, "Popen", popen)

    run_out = tmp_path / "out"
    trained.records = lambda: [json.loads(line) for line in (run_out / "metrics.jsonl").read_text().splitlines()]
    return trained


def test_metrics_are_flat_with_gtpos_share_of_the_step(run, capsys):
    assert run("for n in (1, 2, 3): step(n)") == 0
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert run.records()[0]["timing_share/gtpo"] == 0.25
    out = capsys.readouterr().out
    assert "step 3/3  reward 13" in out and "| 1 to 3 | 12.000 | 2.000 |" in out


def test_resumed_run_keeps_the_steps_before_it(run):
    run("step(1); step(2)")
    run("step(2); step(3)")
    assert [record["step"] for record in run.records()] == [1, 2, 3]


def test_failing_trainer_shows_its_error(run, capsys):
    assert run("step(1)\nraise ValueError('the disk is full')") == 1
    assert "ValueError: the disk is full" in capsys.readouterr().err


def test_trainer_that_makes_no_step_is_ended(run, capsys):
    start = time.monotonic()
    assert run("step(1)\ntime.sleep(300)", stall_s=2.0) == 1
    assert time.monotonic() - start < 60
    assert "no step for 2 s" in capsys.readouterr().err


def test_lost_completion_ends_a_run_that_would_go_on_without_it(run, capsys, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    script = (
        "step(1)\nprint('ERROR: Error in _run_prompt for uid=7', flush=True)\nprint('KeyError: gone', flush=True)\n"
    )
    assert run(script + "time.sleep(300)\nstep(2)") == 1
    err = capsys.readouterr().err
    assert "the run failed: Error in _run_prompt" in err and "KeyError: gone" in err


def test_what_workers_say_after_the_last_step_is_no_failure(run):
    script = "for n in (1, 2, 3): step(n)\ntime.sleep(1)\n"
    assert run(script + "print('A worker died or was killed while executing a task', flush=True)") == 0


def test_a_folder_goes_on_with_the_same_settings_only(tmp_path):
    launch.keep_settings(["seed=1", "trainer.total_training_steps=3"], tmp_path / "out")
    launch.keep_settings(["seed=1", "trainer.total_training_steps=9"], tmp_path / "out")
    with pytest.raises(ValueError, match=r"holds a run with other settings \(seed=1, seed=2\): set OUT"):
        launch.keep_settings(["seed=2", "trainer.total_training_steps=3"], tmp_path / "out")
