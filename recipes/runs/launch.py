"""`python3 -m recipes run`: start one of verl's trainers in a folder of its own, and watch it.

The recipes that train with verl start through it. It follows verl's file logger, prints a line per step, and at the end
a table. The folder then has the files that `recipes.runs.run_folder` lists, `train.log` (all that verl printed) and, if
rewards were logged and matplotlib is installed, `training.png` and `.svg`.

If a rollout worker fails, verl can wait for it for ever, or go on without the lost completions. With --stall
`python3 -m recipes run` ends such a run, prints the error lines of its log, and returns a non-zero status.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any, TextIO, TypeGuard

import psutil

from recipes.runs import run_folder
from recipes.runs.run_folder import say

# Name in a step's line and in the closing table -> metric, in the order in which they are printed; one that is not
# logged is left out.
COLUMNS = {
    "reward": "reward/score/mean",
    "format": "reward/format/mean",
    "accuracy": "reward/acc/mean",
    "strict": "reward/strict/mean",
    "eos": "completion/eos_rate",
    "length": "completion/length/mean",
    "entropy": "actor/entropy",
    "conflict": "gtpo/conflict/token_frac",
    "filtered": "gtpo/filter/dropped_frac",
    "loss": "train/loss",
    "val loss": "val/loss",
    "s/step": "timing_s/step",
}
_VERLS_LOG = "verl_metrics.jsonl"  # of verl's file logger, which empties it at each start
_WINDOW = 5
_MOST_LINES = 30
_MOST_SECONDS = 1e6  # a step that took longer is left out of the estimate of the time left
_POLL_S = 0.2
_STEPS = re.compile(r"Total training steps: (\d+)")
# verl goes on after these, without the completions that failed, or waits for a worker that is gone.
_FATAL = re.compile(r"Error in _run_prompt|A worker died or was killed while executing a task|EngineDeadError")
_GRACE_S = 5.0
# Ray gives its agents 15 s to start, which a busy machine may not (ray-project/ray#65983); no setting changes that.
_RAY_TOO_SLOW = "The current node timed out during startup"
_LITTLE_BYTES = 1 << 30  # of free disk: with less, a failure may be one of a full disk
# Words of a failure from which verl does not always return.
_FAILURE = re.compile(r"Traceback \(most recent call last\)|\bERROR\b|RayTaskError|ActorDiedError")
_WORKER = r"^(\([\w ]*pid=\d+[^)]*\) )*"
_EXCEPTION = re.compile(_WORKER + r"\s*[\w.]+(Error|Exception)(\(\w+\))?(: |$)")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_GTPO_MESSAGE = re.compile(r"GTPO[: ].*")


class StallDetector:
    """Decides whether a run should be ended, and says why.

    Args:
        stall_s (float, optional): seconds without a step after which a run is ended; a quarter of it once its log tells
            of a failure. Its start, with all imports and the loading of models, may take three times as long. None ends
            no run.
    """

    def __init__(self, stall_s: float | None):
        self._ends_runs = stall_s is not None
        self._stall_s = stall_s or float("inf")
        self._last_sign = time.monotonic()  # of life
        self._limit_s = 3 * self._stall_s
        self._fatal = ""  # what verl said after which it may hang

    def on_step(self) -> None:
        """Take note of a step."""
        if not self._fatal:
            self._last_sign = time.monotonic()
            self._limit_s = self._stall_s

    def on_log_line(self, line: str) -> None:
        """Take note of a line of the log."""
        if _FAILURE.search(line):
            self._limit_s = min(self._limit_s, self._stall_s / 4)
        fatal = _FATAL.search(line)
        if self._fatal or fatal is None:
            return
        self._fatal = fatal[0]
        if self._ends_runs:
            # A grace period for the traceback.
            self._last_sign = time.monotonic()
            self._limit_s = _GRACE_S
        else:
            say(f"verl says {self._fatal!r}: it may hang, or go on with fewer completions")

    def failure(self, exited: bool) -> str:
        """Return why the run should be ended, or has ended; empty while all is well."""
        if not self._ends_runs:
            return ""
        if exited:
            return self._fatal
        if time.monotonic() - self._last_sign > self._limit_s:
            return self._fatal or f"no step for {self._limit_s:.0f} s"
        return ""


def progress_line(records: list[dict[str, Any]], total: str) -> str:
    """Return the last step in one line, with the time that the rest takes at the rate of the last few."""
    record = records[-1]
    values = [f"{name} {record[key]:.3g}" for name, key in COLUMNS.items() if _is_number(record.get(key))]
    rates = []
    for recent in records[-_WINDOW:]:
        seconds = recent.get("timing_s/step")
        if _is_number(seconds) and 0 <= seconds < _MOST_SECONDS:  # not where verl logged null
            rates.append(seconds)
    if rates and total.isdigit():
        seconds_left = median(rates) * (int(total) - record["step"])
        values.append(f"left {timedelta(seconds=round(seconds_left))}")
    return f"step {record['step']}/{total}  " + "  ".join(values)


def closing_table(records: list[dict[str, Any]]) -> str:
    """Return means over the first and the last steps, as Markdown, without step 0, verl's validation before training.

    A mean is over the steps of the window that logged the number; "–" stands where none did. A run of no more steps
    than one window has one row. For a run that only validates a sentence is returned instead.
    """
    trained = [record for record in records if record["step"] > 0]
    if not trained:
        return "validation only: no training step"
    ends = [trained[:_WINDOW], trained[-_WINDOW:]] if len(trained) > _WINDOW else [trained]
    shown = [record for end in ends for record in end]
    names = [name for name, key in COLUMNS.items() if any(_is_number(record.get(key)) for record in shown)]
    lines = [f"| steps | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for end in ends:
        cells = [f"{end[0]['step']} to {end[-1]['step']}"]
        for name in names:
            values = [record[COLUMNS[name]] for record in end if _is_number(record.get(COLUMNS[name]))]
            cells.append(f"{fmean(values):.3f}" if values else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float)


def failure_lines(log: str) -> str:
    """Return the lines of a log up to its last error, or to its end, and below them its errors, each once.

    There are at most 30 of both: the last lines and the first errors.
    """
    lines = [_COLOUR.sub("", line)[:300] for line in log.splitlines()]
    end = len(lines)
    errors = {}  # in their order, each once
    for number, line in enumerate(lines):
        if _EXCEPTION.search(line):
            end = number + 1
            error = re.sub(_WORKER, "", line).strip()
            errors[error] = True
    before = lines[max(0, end - _MOST_LINES) : end]
    first_errors = list(errors)[:_MOST_LINES]
    return "\n".join([*before, "", *first_errors])


def end_process(process: subprocess.Popen, grace_s: float = 10.0) -> None:
    """End the process, if it still runs, and every process that it started, Ray's included."""
    try:
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    parent.terminate()
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for member in alive:
        with suppress(psutil.NoSuchProcess):  # it may end by itself just now
            member.kill()
    psutil.wait_procs(alive, timeout=grace_s)


def exit_once() -> None:
    """Exit at the first signal: another, as `timeout` and a second Ctrl-C send it, must not cut `end_process` short."""

    def leave(number: int, _: Any) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        sys.exit(128 + number)

    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in ends if signal.getsignal(number) is not signal.SIG_IGN]  # as under nohup
    for number in numbers:
        signal.signal(number, leave)


def disk_note(out: Path) -> str:
    """Return how little disk is free, which verl's error does not say; empty if there is enough."""
    free = shutil.disk_usage(out).free
    return f"; only {free >> 20} MiB of disk are free there" if free < _LITTLE_BYTES else ""


def start_trainer(command: list[str], out: Path, log: Path, keep_open: Sequence[int] = ()) -> subprocess.Popen:
    """Start the command in a session of its own, its loggers writing into `out`, its output added to `log`.

    The file descriptors in `keep_open` stay open in it.

    Raises:
        ValueError: an override, or the Ray job that this process belongs to, sets the file of verl's logger.
    """
    variables = {"VERL_FILE_LOGGER_PATH": str(out.absolute() / _VERLS_LOG), **run_folder.logger_variables(out)}
    if "verl.trainer.main_ppo" in command:
        # The trainer runs in a worker of Ray, and a cluster that runs already has an environment of its own. So the
        # variables go to Ray, but for those of the Ray job that this process belongs to: Ray refuses to get them again.
        prefix = "ray_kwargs.ray_init.runtime_env.env_vars."
        job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}"))
        already_set = set(job.get("runtime_env", {}).get("env_vars", {}))
        already_set.update(key.removeprefix(prefix) for key in run_folder.overrides(command))
        if "VERL_FILE_LOGGER_PATH" in already_set:
            raise ValueError("the runtime_env sets VERL_FILE_LOGGER_PATH, which this command reads: remove it")
        command = list(command)
        for name, value in variables.items():
            if name not in already_set:
                command.append(f"++{prefix}{name}={run_folder.quoted(value)}")
    env = {**os.environ, "HYDRA_FULL_ERROR": "1", **variables}
    with log.open("a") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True, pass_fds=keep_open
        )


def refuse_stale_ray(command: list[str]) -> None:
    """Refuse a run that would join a Ray that is gone.

    `ray start` leaves the address of its Ray in a file, and a Ray that was killed leaves the file behind.

    Raises:
        ValueError: nothing listens at the address in that file.
    """
    starts_its_own = not {"gtpo_cpu", "+machine=cpu"}.isdisjoint(command)
    overrides = run_folder.overrides(command)
    init = "ray_kwargs.ray_init"
    given_address = overrides.get(f"{init}.address") or os.environ.get("RAY_ADDRESS")
    if given_address or starts_its_own or "verl.trainer.main_ppo" not in command:
        return
    from ray._private.utils import get_ray_address_file, read_ray_address

    temp_dir = overrides.get(f"{init}._temp_dir")
    if temp_dir is not None:
        temp_dir = run_folder.unquoted(temp_dir)
    address = read_ray_address(temp_dir)
    if not address:
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{get_ray_address_file(temp_dir)} names a Ray at {address}, which does not answer ({error}): remove the "
            "file, start that Ray again, or add ++ray_kwargs.ray_init.address=local"
        ) from error


def train(command: list[str], out: Path, stall_s: float | None, lock: TextIO, starts: int = 3) -> int:
    """Run a trainer of verl and watch it; returns the exit status.

    Args:
        stall_s (float, optional): see `StallDetector`.
        lock (TextIO): see `run_folder.lock`; the trainer holds it too, and its process number is written there.
        starts: how many more starts there may be, this one included, if Ray is too slow to start.
    """
    log = out / "train.log"
    log_start = log.stat().st_size if log.exists() else 0  # bytes of earlier starts
    tail = run_folder.Tail(log, log_start)
    overrides = run_folder.overrides(command)
    goes_back = overrides.get("trainer.resume_mode") == "resume_path"
    metrics = run_folder.MetricsFile(out / _VERLS_LOG, out / "metrics.jsonl", goes_back)
    total = overrides.get("trainer.total_training_steps", "?")
    process = start_trainer(command, out, log, keep_open=[lock.fileno()])
    try:
        lock.truncate(0)
        print(process.pid, "on", socket.gethostname(), file=lock, flush=True)
        say(f"training; everything verl prints is in {log}")
        steps, reason = follow(process, tail, metrics, StallDetector(stall_s), total)
    finally:
        end_process(process)
    status = process.wait()
    if reason or status:
        with log.open(errors="replace") as file:
            file.seek(log_start)
            printed = file.read()
        if starts > 1 and not steps and _RAY_TOO_SLOW in printed:
            say("Ray was too slow to start, as happens on a busy machine: trying again")
            return train(command, out, stall_s, lock, starts - 1)
        say(f"\n--- from {log}\n{failure_lines(printed)}\n---", sys.stderr)
        if not reason:
            reason = f"verl ended with status {status}" if status > 0 else f"verl was ended by signal {-status}"
        notes = disk_note(out) + run_folder.unreadable_note(command, out, printed)
        say(f"the run failed: {reason}; its log is {log}{notes}", sys.stderr)
        return status if status > 0 else 1
    if not steps:
        say(f"verl ran no training step: the run was complete already, or its data is too small; see {log}", sys.stderr)
        return 0 if metrics.records else 1
    report(metrics.records, out)
    return 0


def follow(
    process: subprocess.Popen, log: run_folder.Tail, metrics: run_folder.MetricsFile, watch: StallDetector, total: str
) -> tuple[int, str]:
    """Print progress until the process ends or should be ended.

    Returns:
        The number of steps that were logged, and why the run should be ended: empty where it has ended by itself.
    """
    steps = 0
    while True:
        exited = process.poll() is not None  # looked at first: what it wrote before is then read below
        for _ in metrics.poll():
            say(progress_line(metrics.records, total))
            steps += 1
            watch.on_step()
        finished = bool(steps) and str(metrics.records[-1]["step"]) == total
        for line in log.lines():
            announced = _STEPS.search(line)
            if announced:
                total = announced[1]
            message = _GTPO_MESSAGE.search(line)
            if message:
                say(message[0])
            if not finished:  # what workers say while they are shut down is no failure
                watch.on_log_line(line)
        reason = watch.failure(exited)
        if reason or exited:
            return steps, reason
        time.sleep(_POLL_S)


def report(records: list[dict[str, Any]], out: Path) -> None:
    """Print the closing table, and draw the figure if rewards were logged."""
    say(f"\n{closing_table(records)}\n")
    written = [out / "metrics.jsonl"]
    if "reward/score/mean" in records[-1]:
        if find_spec("matplotlib"):
            from recipes.paper.plots import read_run, save, training_figure

            written += save(training_figure({out.name: [read_run(out / "metrics.jsonl")]}), out / "training")
        else:
            say("no figure, since matplotlib is not installed: pip install matplotlib, then python3 -m recipes plot")
    say(f"written: {' '.join(map(str, written))}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python3 -m recipes run`."""
    parser.description = "Start one of verl's trainers in a folder of its own, and watch it."
    parser.epilog = (
        "example: python3 -m recipes run --out outputs/mine -- python3 -m verl.trainer.main_ppo OVERRIDES "
        "'trainer.logger=[console,file]' trainer.default_local_dir=outputs/mine/checkpoints"
    )
    parser.add_argument("--out", type=Path, required=True, help="the run's folder; if it has a run, resume it")
    parser.add_argument("--stall", type=float, metavar="S", help="end the run if it makes no step for S seconds")
    parser.add_argument("--extend", action="store_true", help="let a run take more steps than it was started for")
    parser.add_argument("command", nargs="+", help="after --: the trainer and its overrides")


def run(args: argparse.Namespace) -> int:
    """Hold the folder, note the command, train; returns the exit status.

    Raises:
        ValueError: a run is active in the folder, the folder has a checkpoint of other settings, a damaged one or a
            damaged record, or the Ray to join is gone.
    """
    if args.stall is not None and not args.stall > 0:
        raise ValueError(f"--stall {args.stall}: must be seconds, above 0")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file: give the folder of a run (the recipes: OUT)")
    args.out.mkdir(parents=True, exist_ok=True)
    with run_folder.lock(args.out) as lock:
        refuse_stale_ray(args.command)
        run_folder.hold_settings(args.command, args.out, args.extend)
        run_folder.write_command(args.command, args.out, ["--stall", str(args.stall)] if args.stall else [])
        exit_once()
        return train(args.command, args.out, args.stall, lock)
