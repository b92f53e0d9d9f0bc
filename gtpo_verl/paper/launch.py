"""Run verl's trainer and watch it: progress, `metrics.jsonl`, a closing table, a figure, and an end in bounded time.

    python -m gtpo_verl.paper.launch --out outputs/gtpo_cpu -- OVERRIDE…

starts `python -m verl.trainer.main_ppo` with the overrides, follows what verl's file logger writes, and leaves in --out
`metrics.jsonl` (one flat object per step), `training.png` and `.svg`, and `train.log` (all that verl printed). verl can
wait for ever for a rollout worker that has failed, or go on without the completions that it lost. So a run is ended
when its log tells of a dead worker or a failed completion, or when it makes no step for too long: with the error lines
of the log in sight and a non-zero exit status.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import psutil

# Column of the closing table -> metric; in the order in which it is printed.
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
    "s/step": "timing_s/step",
}
_WINDOW = 5
_POLL_S = 0.2
# verl goes on after these, without the completions that failed, or waits for a worker that is gone.
_FATAL = re.compile(r"Error in _run_prompt|A worker died or was killed while executing a task|EngineDeadError")
_GRACE_S = 5.0
# Words of a failure from which verl does not always return.
_FAILURE = re.compile(r"Traceback \(most recent call last\)|\bERROR\b|RayTaskError|ActorDiedError")
_WORKER = r"^(\([\w ]+pid=\d+[^)]*\) )?"
_EXCEPTION = re.compile(_WORKER + r"\s*[\w.]+(Error|Exception)(\(\w+\))?: ")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_SAID_BY_GTPO = re.compile(r"GTPO[: ].*|^ +\S+  +\S+  +\S.*")


class Tail:
    """The complete lines that a file has gained since the last look; none while it does not exist."""

    def __init__(self, path: Path):
        self._path, self._rest = path, ""
        self._file: TextIO | None = None

    def lines(self) -> list[str]:
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open(encoding="utf-8", errors="replace")
        *complete, self._rest = (self._rest + self._file.read()).split("\n")
        return complete


class MetricsFile:
    """`metrics.jsonl`: verl's file log as it grows, flattened; steps that a resumed run repeats are replaced.

    Args:
        source (Path): what verl's file logger writes.
        target (Path): one object per step, all keys at the top level.
    """

    def __init__(self, source: Path, target: Path):
        self.target, self._tail = target, Tail(source)
        self.records = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else []
        source.unlink(missing_ok=True)

    def poll(self) -> Iterator[dict[str, Any]]:
        """The steps logged since the last call."""
        for line in self._tail.lines():
            logged = json.loads(line)
            record = {"step": logged["step"], **logged["data"]}
            if "timing_s/gtpo" in record:
                record["timing_share/gtpo"] = record["timing_s/gtpo"] / record["timing_s/step"]
            kept = [earlier for earlier in self.records if earlier["step"] < record["step"]]
            repeats = len(kept) < len(self.records)
            self.records = [*kept, record]
            with self.target.open("w" if repeats else "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in (self.records if repeats else [record]))
            yield record


def progress_line(record: dict[str, Any], total: str) -> str:
    """One step in one line; a metric that the run does not log is left out."""
    values = [f"{name} {record[key]:.3g}" for name, key in COLUMNS.items() if key in record]
    return f"step {record['step']}/{total}  " + "  ".join(values)


def closing_table(records: list[dict[str, Any]]) -> str:
    """Means over the first and the last steps, as Markdown."""
    ends = (records[:_WINDOW], records[-_WINDOW:])
    names = [name for name, key in COLUMNS.items() if all(key in record for end in ends for record in end)]
    lines = [f"| steps | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for end in ends:
        means = (sum(record[COLUMNS[name]] for record in end) / len(end) for name in names)
        lines.append(f"| {end[0]['step']} to {end[-1]['step']} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def failure_lines(log: Path, most: int = 30) -> str:
    """Every error that the log names, each once, and the lines that lead to the last one (or to the log's end)."""
    lines = [_COLOUR.sub("", line)[:300] for line in log.read_text(errors="replace").splitlines()]
    errors = [i for i, line in enumerate(lines) if _EXCEPTION.search(line)]
    end = errors[-1] + 1 if errors else len(lines)
    named = dict.fromkeys(re.sub(_WORKER, "", lines[i]).strip() for i in errors)
    return "\n".join([*lines[max(0, end - most) : end], "", *list(named)[:most]])


def end_process(process: subprocess.Popen, grace_s: float = 10.0) -> None:
    """End the process and every process that it started, Ray's included."""
    try:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    family[0].terminate()
    _, alive = psutil.wait_procs(family, timeout=grace_s)
    for member in alive:
        if member.is_running():
            member.kill()


def finished(records: list[dict[str, Any]], total: str) -> bool:
    """Whether the last step is made; what workers say while they are shut down is no failure."""
    return bool(records) and str(records[-1]["step"]) == total


def keep_settings(overrides: list[str], out: Path) -> None:
    """A folder holds one run, which goes on with the same settings; those of the trainer section may change.

    Raises:
        ValueError: `out` holds a run with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    settings = [override for override in overrides if not override.startswith("trainer.")]
    record = out / "settings.json"
    if record.exists() and (other := sorted(set(settings) ^ set(json.loads(record.read_text())))):
        raise ValueError(f"{out} holds a run with other settings ({', '.join(other)}): set OUT to another folder")
    record.write_text(json.dumps(settings, indent=1) + "\n")


def train(overrides: list[str], out: Path, stall_s: float, start_s: float) -> int:
    """Train with these Hydra overrides and watch; returns the exit status.

    Args:
        overrides: arguments of `verl.trainer.main_ppo`.
        out (Path): folder for what the run leaves.
        stall_s (float): seconds without a step after which the run is ended; a quarter of it once a failure is logged.
        start_s (float): the same for the time until the first step.
    """
    out.mkdir(parents=True, exist_ok=True)
    log = out / "train.log"
    verl_metrics = out.absolute() / "verl_metrics.jsonl"
    metrics = MetricsFile(verl_metrics, out / "metrics.jsonl")
    total = next((x.split("=")[1] for x in reversed(overrides) if x.startswith("trainer.total_training_steps=")), "?")
    env = {**os.environ, "VERL_FILE_LOGGER_PATH": str(verl_metrics), "HYDRA_FULL_ERROR": "1"}
    with log.open("w") as stream:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
        process = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    print(f"training; everything verl prints is in {log}", flush=True)
    tail, last, limit, reason = Tail(log), time.monotonic(), start_s, ""
    steps, fatal = 0, ""
    try:
        while True:
            exited = process.poll() is not None
            for record in metrics.poll():
                print(progress_line(record, total), flush=True)
                steps += 1
                if not fatal:
                    last, limit = time.monotonic(), stall_s
            for line in tail.lines():
                if said := _SAID_BY_GTPO.search(line):
                    print(said[0], flush=True)
                if _FAILURE.search(line):
                    limit = min(limit, stall_s / 4)
                if not fatal and (found := _FATAL.search(line)) and not finished(metrics.records, total):
                    # The error that follows has a moment to reach the log.
                    fatal, last, limit = found[0], time.monotonic(), _GRACE_S
            if exited:
                break
            if time.monotonic() - last > limit:
                reason = fatal or f"no step for {limit:.0f} s"
                break
            time.sleep(_POLL_S)
    finally:
        end_process(process)
    status = process.wait()
    reason = reason or fatal
    if reason or status:
        print(f"\n--- from {log}\n{failure_lines(log)}\n---", file=sys.stderr)
        print(f"the run failed: {reason or f'verl ended with status {status}'}; its log is {log}", file=sys.stderr)
        return status if status > 0 else 1
    if not steps:
        print(f"verl made no step: the run was complete already, or its data is too small; see {log}", file=sys.stderr)
        return 0 if metrics.records else 1
    report(metrics.records, out)
    return 0


def report(records: list[dict[str, Any]], out: Path) -> None:
    """Print the closing table and draw the figure."""
    from gtpo_verl.paper.plots import plot_training, read_run

    print(f"\n{closing_table(records)}\n")
    figures = plot_training({out.name: [read_run(out / "metrics.jsonl")]}, out / "training.png")
    print("written:", *(str(path) for path in (out / "metrics.jsonl", *figures)))


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="Run verl's trainer and watch it.")
    parser.add_argument("--out", type=Path, required=True, help="folder for metrics.jsonl, training.png, train.log")
    parser.add_argument("--stall", type=float, default=120, help="seconds without a step before the run is ended")
    parser.add_argument("--start", type=float, default=240, help="the same until the first step")
    parser.add_argument("overrides", nargs="+", help="after --: arguments of verl.trainer.main_ppo")
    args = parser.parse_args()
    try:
        keep_settings(args.overrides, args.out)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return train(args.overrides, args.out, args.stall, args.start)


if __name__ == "__main__":
    sys.exit(main())
