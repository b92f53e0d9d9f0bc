import json
import math
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from types import SimpleNamespace

import psutil
import pytest

from recipes.__main__ import main
from recipes.runs import launch, run_folder

TRAINER = """
import json, os, sys, time
file = open(os.environ['VERL_FILE_LOGGER_PATH'], 'w', buffering=1)
def step(n, **data):
    data = data or {'reward/score/mean': 10.0 + n, 'timing_s/step': 2.0}
    file.write(json.dumps({'step': n, 'data': data}) + '\\n')
def wait_for(name, content=''):
    path = os.path.join(os.path.dirname(file.name), name)
    for _ in range(6000):
        if os.path.exists(path) and content in open(path).read():
            return
        time.sleep(0.05)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`python3 -m recipes run` with a script of ours in verl's place, which logs steps as verl's file logger does."""
    monkeypatch.setattr(launch, "find_spec", lambda name: None)  # a figure takes longer than the run

    def arguments(script, *options, overrides=("trainer.total_training_steps=3",)):
        path = tmp_path / "trainer.py"
        path.write_text(TRAINER + script)
        return ["run", "--out", str(trained.out), *options, "--", sys.executable, str(path), *overrides]

    def trained(*args, **kwargs):
        return main(arguments(*args, **kwargs))

    trained.start = lambda script, **streams: subprocess.Popen(
        [sys.executable, "-m", "recipes", *arguments(script)],
        **streams,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # which the tests' own nohup ignores
    )
    trained.out = tmp_path / "out"
    trained.records = lambda: [json.loads(line) for line in (trained.out / "metrics.jsonl").read_text().splitlines()]
    return trained


def wait_until(condition):
    deadline = time.monotonic() + 900  # of a hang: a busy machine takes long
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_metrics_are_flat_and_a_step_is_a_line_that_ends_with_the_time_that_is_left(run, capsys):
    assert run("for n in (1, 2, 3): step(n)", overrides=["trainer.total_training_steps=5000"]) == 0
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert run.records()[0] == {"step": 1, "reward/score/mean": 11.0, "timing_s/step": 2.0}
    out = capsys.readouterr().out
    assert "step 3/5000  reward 13  s/step 2  left 2:46:34\n" in out and "| 1 to 3 | 12.000 | 2.000 |" in out


def test_the_time_that_is_left_is_not_that_of_a_slow_first_step():
    records = [{"step": step, "timing_s/step": 300.0 if step == 1 else 60.0} for step in range(1, 5)]
    assert launch.progress_line(records, "10").endswith("left 0:06:00")
    assert "left" not in launch.progress_line(records, "?")


def test_a_run_leaves_its_figure(run, monkeypatch, capsys):
    monkeypatch.setattr(launch, "find_spec", find_spec)
    assert run("step(1); step(2)") == 0
    assert (run.out / "training.png").stat().st_size > 10_000
    assert str(run.out / "training.png") in capsys.readouterr().out


def test_a_step_that_verl_logs_in_two_parts_is_one_record(run):
    run("step(1)\nstep(2, **{'train/loss': 2.0})\nstep(2, **{'val/loss': 3.0})\nstep(3)")
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert run.records()[1] == {"step": 2, "train/loss": 2.0, "val/loss": 3.0}


def test_a_resumed_run_keeps_what_a_killed_one_has_written_whole(run):
    run("step(1); step(2)")
    metrics = run.out / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3, "rewa')
    run("step(3); step(4)")
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]
    assert not list(run.out.glob("*.partial"))


def test_a_validation_before_a_resumed_run_leaves_the_step_that_it_goes_on_from(run):
    run("step(1); step(2); step(3)")
    run("step(2, **{'val-core/acc': 0.5}); step(3)")
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert run.records()[1]["reward/score/mean"] == 12 and run.records()[1]["val-core/acc"] == 0.5
    assert run("step(3, **{'val-core/acc': 0.7})") == 0  # a run that was complete
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert run.records()[2]["reward/score/mean"] == 13 and run.records()[2]["val-core/acc"] == 0.7


def test_a_metric_that_is_nan_is_shown_as_such(run, capsys):
    """verl's logger writes null for it."""
    assert run("step(1, **{'train/loss': 1.0}); step(2, **{'train/loss': None}); step(3, **{'train/loss': 1.0})") == 0
    assert "step 2/3  loss nan" in (out := capsys.readouterr().out) and "| 1 to 3 | nan |" in out
    assert math.isnan(run.records()[1]["train/loss"])  # which diagnose reads


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_killed_loses_no_step_and_its_trainer_holds_the_folder(run, capsys, monkeypatch, number):
    process = run.start("step(1)\nwait_for('killed')\nstep(2)\nwait_for('never')")
    metrics = run.out / "verl_metrics.jsonl"
    wait_until(lambda: (run.out / "metrics.jsonl").exists())
    trainer = psutil.Process(int((run.out / "lock").read_text().split()[0]))
    process.send_signal(number)
    process.wait(900)
    (run.out / "killed").touch()
    if number == signal.SIGKILL:
        wait_until(lambda: len(metrics.read_text().splitlines()) == 2)
        with monkeypatch.context() as patched:
            patched.setattr(run_folder, "_DYING_S", 0.1)
            assert run("step(3)") == 2
        assert f" {run.out} (process {trainer.pid} on {socket.gethostname()})" in capsys.readouterr().err
        trainer.kill()
        assert run("step(3)") == 0
        assert [record["step"] for record in run.records()] == [1, 2, 3]
    else:
        assert process.returncode == 128 + number and not trainer.is_running()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_terminal_that_is_gone_does_not_end_the_training(run, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    trains = "step(1); file.write('cut off\\n'); step(2); step(3); open(file.name + '.whole', 'w')"
    with open("/dev/full", "w") as full:
        assert run.start(trains, stdout=full, stderr=full).wait(900) == 0
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    assert (run.out / "verl_metrics.jsonl.whole").exists() and (run.out / "training.png").exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_terminal_that_is_gone_hides_no_status(run, monkeypatch, unbuffered):
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    with open("/dev/full", "w") as full:
        assert run.start("step(1); sys.exit(3)", stdout=full, stderr=full).wait(900) == 3


def test_a_line_that_a_full_disk_cut_off_is_left_out(run, capsys):
    assert run("""step(1); file.write('{"step": 2, "da'); step(2); step(3)""") == 0
    assert [record["step"] for record in run.records()] == [1, 3]
    assert f"{run.out / 'metrics.jsonl'}: left out" in capsys.readouterr().err
    assert run("step(4)") == 0


@pytest.mark.parametrize(
    "line", ["[1]", "5", '{"step": 2}', '{"step": 2, "data": 1}', '{"step": "2", "data": {}}', "[" * 100_000]
)
def test_a_line_that_is_no_step_does_not_end_the_run(run, capsys, line):
    assert run(f"step(1); file.write({line!r} + '\\n'); step(3)") == 0
    assert [record["step"] for record in run.records()] == [1, 3]
    assert f"{run.out / 'metrics.jsonl'}: left out" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [None, float("inf"), "slow", -1])
def test_a_step_without_a_time_does_not_end_the_run(run, capsys, seconds):
    assert run(f"inf = float('inf'); step(1, **{{'timing_s/step': {seconds!r}}}); step(2)") == 0
    assert "step 1/3" in (out := capsys.readouterr().out) and "left 0:00:02" in out


def test_a_file_is_no_folder_of_a_run(tmp_path, capsys):
    (tmp_path / "README.md").touch()
    assert main(["run", "--out", str(tmp_path / "README.md"), "--", "true"]) == 2
    assert f"--out {tmp_path / 'README.md'} is a file" in capsys.readouterr().err


@pytest.mark.parametrize("validation", ["", "step(0, **{'val-core/acc': 0.5}); "])
@pytest.mark.parametrize("first, mode", [(1, "disable"), (3, "resume_path")])
def test_a_run_that_goes_back_keeps_what_was_logged(run, capsys, first, mode, validation):
    run(f"{validation}step(1); step(2); step(3); step(4)")
    before = (run.out / "metrics.jsonl").read_text()
    run(
        f"{validation if first == 1 else ''}step({first})",
        overrides=["trainer.total_training_steps=3", f"trainer.resume_mode={mode}"],
    )
    assert [record["step"] for record in run.records()] == [*range(0 if validation else 1, first + 1)]
    (kept,) = run.out.glob("metrics.jsonl.*")
    assert kept.read_text() == before and str(kept) in capsys.readouterr().out


def test_a_second_signal_does_not_leave_the_trainer_alive(run):
    ignores = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: open('told', 'w'))\n"
    process = run.start(f"{ignores}os.chdir(os.path.dirname(file.name))\nstep(1)\nwhile True: time.sleep(1)")
    wait_until(lambda: (run.out / "metrics.jsonl").exists())
    trainer = psutil.Process(int((run.out / "lock").read_text().split()[0]))
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: (run.out / "told").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(900) == 128 + signal.SIGTERM and not trainer.is_running()


@pytest.mark.parametrize("line", ["[1]", '{"step": "one"}', "\0", "[" * 100_000], ids=["list", "text", "nul", "deep"])
def test_a_log_that_is_none_is_named_and_kept(run, capsys, line):
    run("step(1)")
    metrics = run.out / "metrics.jsonl"
    metrics.write_text(line + "\n")
    assert run("step(2)") == 2
    assert f"{metrics} has a line" in capsys.readouterr().err
    assert metrics.read_text() == line + "\n"


RAY_IS_SLOW = """
starts = int(open("starts").read()) + 1 if os.path.exists("starts") else 1
open("starts", "w").write(str(starts))
if starts < {needed}:
    raise Exception("The current node timed out during startup. This could happen because ...")
step(1)
"""


@pytest.mark.parametrize(("needed", "status", "starts"), [(1, 0, 1), (3, 0, 3), (9, 1, 3)])
def test_a_run_for_which_ray_comes_up_too_late_is_started_again(
    run, capsys, tmp_path, monkeypatch, needed, status, starts
):
    monkeypatch.chdir(tmp_path)
    assert run(RAY_IS_SLOW.format(needed=needed)) == status
    assert int((tmp_path / "starts").read_text()) == starts
    printed = capsys.readouterr()
    assert printed.out.count("trying again") == starts - 1
    assert ("timed out during" in printed.err) is (status == 1)


def test_a_run_that_fails_on_a_full_disk_says_so(run, capsys, monkeypatch):
    monkeypatch.setattr(launch.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    assert run("step(1)\nraise RuntimeError('unexpected pos')") == 1
    assert "train.log; only 5 MiB" in capsys.readouterr().err


@pytest.mark.parametrize("stall", ["-1", "nan"])
def test_a_stall_of_no_time_is_an_error(run, capsys, stall):
    assert run("step(1)", "--stall", stall) == 2
    assert f"--stall {float(stall)}: " in capsys.readouterr().err


def test_trainer_that_makes_no_step_is_ended(run, capsys, monkeypatch):
    clock, on_step = SimpleNamespace(now=0.0), launch.StallDetector.on_step

    def on_step_after_which_nothing_comes(watch):
        on_step(watch)
        clock.now += 601

    monkeypatch.setattr(launch.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(launch.StallDetector, "on_step", on_step_after_which_nothing_comes)
    assert run("step(1)\nwait_for('never')", "--stall", "600") == 1
    assert "no step for 600" in capsys.readouterr().err


LOST = "step(1)\nprint('ERROR: Error in _run_prompt for uid=7\\nKeyError: gone', flush=True)\n"


def test_lost_completion_ends_a_run_that_would_go_on_without_it(run, capsys, monkeypatch):
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    assert run(LOST + "wait_for('never')", "--stall", "600") == 1
    err = capsys.readouterr().err
    assert "failed: Error in _run_prompt" in err and "KeyError: gone" in err


def test_without_the_watch_the_run_goes_on_and_the_failure_is_told(run, capsys):
    assert run(LOST + "step(2)") == 0
    assert "'Error in _run_prompt'" in capsys.readouterr().out


def test_what_workers_say_after_the_last_step_is_no_failure(run):
    script = "for n in (1, 2, 3): step(n)\nwait_for('metrics.jsonl', '\"step\": 3')\n"
    assert run(script + "print('A worker died or was killed while executing a task')", "--stall", "600") == 0


def test_the_log_of_an_earlier_start_is_kept_and_its_failure_is_not_told_again(run, capsys):
    assert run("step(1)\nraise ValueError('full')") == 1
    assert run("raise ValueError('gone')") == 1
    err = capsys.readouterr().err
    assert "ValueError: gone" in err and "MiB" not in err
    assert err.count("ValueError: full") == 2  # its last lines, and among the errors, of the first start
    assert "full" in (run.out / "train.log").read_text()


def test_loggers_write_into_the_folder_and_go_on_with_one_run(run, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    names = ("TENSORBOARD_DIR", "WANDB_DIR", "WANDB_RESUME", "WANDB_RUN_ID", "SWANLAB_RUN_ID", "SWANLAB_RESUME")
    script = f"step(1)\nprint('seen', [os.environ[name] for name in {names}])"
    run(script)
    run(script)
    first, second = [x for x in (run.out / "train.log").read_text().splitlines() if x.startswith("seen")]
    assert first == second and str(run.out / "tensorboard") in first and "'allow'" in first


ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars."


@pytest.fixture
def started_command(tmp_path, monkeypatch):
    """Return the command that a trainer of verl is started with, by its overrides and the variables of a Ray job."""
    started = {}
    monkeypatch.setattr(launch.subprocess, "Popen", lambda command, **kwargs: started.update(command=command))
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)

    def start(*overrides, job_variables=None):
        if job_variables is not None:
            job = {"runtime_env": {"env_vars": job_variables}}
            monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
        command = ["python3", "-m", "verl.trainer.main_ppo", *overrides]
        launch.start_trainer(command, tmp_path, tmp_path / "train.log")
        return started["command"]

    return start


def test_rays_workers_get_the_loggers_variables(started_command, tmp_path):
    assert f"++{ENV_VARS}VERL_FILE_LOGGER_PATH='{tmp_path}/verl_metrics.jsonl'" in started_command()


def test_rays_workers_get_the_loggers_variables_but_those_of_their_ray_job(started_command):
    from ray.runtime_env.runtime_env import _merge_runtime_env

    of_job = {"WANDB_DIR": "/shared", "NCCL_SOCKET_IFNAME": "eth0"}
    overrides = run_folder.overrides(started_command(job_variables=of_job))
    given = {key.removeprefix(ENV_VARS): value for key, value in overrides.items()}
    assert "WANDB_RUN_ID" in given
    assert _merge_runtime_env({"env_vars": of_job}, {"env_vars": given}) is not None


def test_a_ray_job_that_sets_the_file_of_verls_logger_is_refused(started_command):
    with pytest.raises(ValueError, match="sets VERL_FILE_LOGGER_PATH"):
        started_command(job_variables={"VERL_FILE_LOGGER_PATH": "/shared/log"})


def test_a_loggers_variable_of_ones_own_is_kept(started_command):
    own = f"++{ENV_VARS}WANDB_DIR=/mine"
    assert [word for word in started_command(own) if "WANDB_DIR" in word] == [own]


def test_a_checkpoint_that_torch_cannot_read_is_named_with_the_others(run, capsys):
    for step in (10, 20):
        (run.out / f"checkpoints/global_step_{step}/actor").mkdir(parents=True)
    (run.out / "checkpoints/latest_checkpointed_iteration.txt").write_text("20")
    assert run("sys.exit('RuntimeError: PytorchStreamReader failed reading zip archive')") == 1
    err = capsys.readouterr().err
    assert f" {run.out}/checkpoints/global_step_20 is damaged" in err and "global_step_10)" in err


JOINS_RAY = ["python3", "-m", "verl.trainer.main_ppo", "--config-name", "gtpo"]


@pytest.fixture
def ray_address(tmp_path, monkeypatch):
    """The file in which `ray start` leaves the address of its Ray; there is none yet."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray/ray_current_cluster"


@pytest.fixture
def stale_address(ray_address):
    """The file of a `ray start` that was killed, which leaves its address behind."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ray_address.write_text(f"127.0.0.1:{server.getsockname()[1]}")
    return ray_address


@pytest.mark.usefixtures("ray_address")
def test_without_a_ray_to_join_a_run_starts_its_own():
    launch.refuse_stale_ray(JOINS_RAY)


def test_a_ray_that_answers_is_joined(ray_address):
    with socket.create_server(("127.0.0.1", 0)) as running:
        ray_address.write_text(f"127.0.0.1:{running.getsockname()[1]}")
        launch.refuse_stale_ray(JOINS_RAY)


def test_a_ray_that_is_gone_is_named_before_it_is_joined(stale_address):
    with pytest.raises(ValueError, match=str(stale_address)):
        launch.refuse_stale_ray(JOINS_RAY)


def test_the_file_that_names_a_ray_that_is_gone_is_that_of_the_folder_that_ray_is_given(stale_address, tmp_path):
    folder = tmp_path / "ray, of mine"
    folder.mkdir()
    address = stale_address.rename(folder / "ray_current_cluster")
    with pytest.raises(ValueError, match=f"^{address} "):
        launch.refuse_stale_ray([*JOINS_RAY, f"+ray_kwargs.ray_init._temp_dir={run_folder.quoted(str(folder))}"])


@pytest.mark.usefixtures("stale_address")
@pytest.mark.parametrize("own", ["++ray_kwargs.ray_init.address=local", "+machine=cpu", "gtpo_cpu"])
def test_a_run_with_a_ray_of_its_own_does_not_look_for_another(own):
    launch.refuse_stale_ray([*JOINS_RAY, own])


@pytest.mark.usefixtures("stale_address")
def test_the_environments_address_of_a_ray_counts_before_that_of_the_file(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    launch.refuse_stale_ray(JOINS_RAY)


@pytest.mark.parametrize(("steps", "rows"), [(5, ["| 1 to 5 |"]), (6, ["| 1 to 5 |", "| 2 to 6 |"])])
def test_a_short_run_has_one_row_of_the_closing_table_and_step_0_none(steps, rows):
    trained = [{"step": step, "timing_s/step": 1.0} for step in range(1, steps + 1)]
    table = launch.closing_table([{"step": 0, "val-core/acc": 0.5}, *trained])  # which verl validates before
    assert [line[: len("| 1 to 5 |")] for line in table.splitlines()[2:]] == rows


def test_what_only_the_last_step_logs_is_in_the_closing_table():
    """As verl's SFT trainer logs its validation loss."""
    records = [{"step": step, "timing_s/step": 1.0} for step in range(1, 8)]
    records[-1]["val/loss"] = 0.25
    header, _, first, last = launch.closing_table(records).splitlines()
    column = header.split("|").index(" val loss ")
    assert [row.split("|")[column] for row in (first, last)] == [" – ", " 0.250 "]


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError",
        "(TaskRunner pid=1) NotImplementedError",
        "(pid=12) ValueError: x",
        "(A pid=1) (EngineCore_DP0 pid=2) ValueError: x",
    ],
)
def test_an_error_is_found_without_a_message_and_behind_any_name_of_a_worker(error):
    log = "\n".join(["ImportError: no plugin", *["a line"] * 50, error])
    assert launch.failure_lines(log).splitlines()[-1] == error.rpartition(") ")[2]


def test_a_run_that_only_validates_has_no_closing_table():
    table = launch.closing_table([{"step": 0, "val-core/acc": 0.5}])
    assert table.startswith("validation only") and "|" not in table


@pytest.fixture
def stall(monkeypatch):
    """A detector of stalls after 600 s, and its clock."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(launch.time, "monotonic", lambda: clock.now)
    return launch.StallDetector(600), clock


def test_the_first_step_may_take_longer_and_one_after_a_traceback_may_not(stall):
    watch, clock = stall
    clock.now = 1799
    assert not watch.failure(False)
    watch.on_step()
    watch.on_log_line("Traceback (most recent call last)")
    clock.now += 151
    assert "150 s" in watch.failure(False)


def test_a_step_does_not_clear_the_error_of_a_lost_rollout(stall):
    watch, clock = stall
    watch.on_log_line("Error in _run_prompt")
    clock.now = 4.0
    watch.on_step()
    clock.now = 6.0
    assert watch.failure(False) == "Error in _run_prompt"
