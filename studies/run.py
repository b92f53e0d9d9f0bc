"""Run the study, several runs at a time, and keep their logs. Started by run.sh.

A run that is complete has its log in results/ and is not run again; one that was interrupted begins anew.
"""

import argparse
import functools
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from gtpo_verl.cpu.tiny import WarmStartConfig, prepare
from gtpo_verl.paper.plots import plot_training, read_run
from studies.plan import HERE, METHODS, SELECTION_RATES, Run, plan, quick, selection

ROOT = HERE.parent
# What is kept of a run: verl logs a hundred numbers a step, most of them about throughput.
_KEPT = ("reward/", "completion/", "gtpo/", "actor/entropy", "actor/grad_norm", "actor/lr", "timing_s/step")
_STALL_S = 300
_one_at_a_time = threading.Lock()
_FINAL = 100
"""Steps at the end over which a run's final values are averaged."""


@functools.cache
def values(log: Path) -> Mapping[str, np.ndarray]:
    """Every metric of a complete run, one number per step."""
    return read_run(log).values


def final(run: Run, key: str) -> float:
    """Mean of a metric over the last steps of a complete run."""
    return float(values(run.log)[key][-_FINAL:].mean())


def chosen_rate(family: str) -> float:
    """The learning rate of the highest final reward on the selection's task, the mean of its seeds."""

    def reward(lr: float) -> float:
        runs = [run for run in selection() if run.family == family and run.lr == lr]
        return sum(final(run, "reward/score/mean") for run in runs) / len(runs)

    return max(SELECTION_RATES, key=reward)


def command(run: Run, task: Path, out: Path) -> list[str]:
    """What starts the run: verl's trainer with the CPU recipe's config."""
    lr = chosen_rate(run.family) if run.lr is None else run.lr
    overrides = [
        f"task_dir={task}",
        f"seed={run.seed}",
        "data.train_batch_size=1",
        f"actor_rollout_ref.actor.optim.lr={lr}",
        f"reward.custom_reward_function.path={HERE / 'reward.py'}",
        "reward.custom_reward_function.name=paper",
        f"trainer.total_training_steps={run.steps}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        *run.settings,
        *METHODS[run.method],
    ]
    trainer = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(ROOT / "recipes/config")]
    launcher = [sys.executable, "-m", "gtpo_verl", "run", "--out", str(out), "--stall", str(_STALL_S), "--"]
    return [*launcher, *trainer, "--config-name", "gtpo_cpu", *overrides]


def execute(run: Run, outputs: Path) -> bool:
    """Make the run's task and run it; whether its log is complete."""
    changes = "".join(f"-{key}{value:g}" for key, value in run.warm_start.items())
    task = outputs / "tasks" / f"{run.task}{changes}-seed{run.seed}"
    with _one_at_a_time:  # it draws from torch's random state
        prepare(task, WarmStartConfig(seed=run.seed, task=run.task, **run.warm_start))
    out = outputs / run.name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start = time.monotonic()
    with (out / "launcher.log").open("w") as log:
        environment = {**os.environ, "PYTHONHASHSEED": str(run.seed)}
        status = subprocess.run(command(run, task, out), stdout=log, stderr=log, env=environment).returncode
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    complete = status == 0 and len(lines) == run.steps
    if complete:
        keep(lines, run.log)
    took = f"{len(lines)}/{run.steps} steps in {time.monotonic() - start:.0f} s"
    print(f"{time.strftime('%H:%M:%S')} {run.name}: {took}{'' if complete else f'; failed, see {out}'}", flush=True)
    return complete


def keep(lines: Sequence[str], path: Path) -> None:
    """Write the numbers that tell about the method, to six digits, compressed; the file appears when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with gzip.GzipFile(part, "wb", mtime=0) as file:
        for line in lines:
            logged = json.loads(line)
            record = {k: float(f"{v:.6g}") for k, v in logged.items() if k.startswith(_KEPT)}
            file.write((json.dumps({"step": logged["step"], **record}) + "\n").encode())
    part.rename(path)


def execute_all(runs: Sequence[Run], jobs: int, outputs: Path) -> bool:
    """Execute runs, some at a time, also after one that failed; whether all are complete."""
    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(lambda run: execute(run, outputs), runs)))


def run_quick(jobs: int, outputs: Path) -> int:
    """One pair of runs and its figure; 1 if a run failed."""
    runs = quick()
    if not execute_all(runs, jobs, outputs):
        return 1
    curves = {run.method.upper(): [read_run(run.log)] for run in runs}
    print(*plot_training(curves, outputs / "quick.png"), sep="\n")
    return 0


def main() -> int:
    """Run what is missing; 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a run, or the beginning of runs' names: main/arith")
    parser.add_argument("--list", action="store_true", help="what there is, and what is done")
    parser.add_argument("--quick", action="store_true", help="GTPO and GRPO, one seed, and their figure")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time (default: one per core)")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs/study", help="folder of the runs")
    args = parser.parse_args()
    if args.quick:
        return run_quick(args.jobs, args.outputs)
    runs = [run for run in plan() if not args.names or run.name.startswith(tuple(args.names))]
    if not runs:
        parser.error(f"no run is named {' or '.join(args.names)}...; --list shows them all")
    missing = [run for run in runs if not run.log.exists()]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them done", flush=True)
    if args.list:
        print("\n".join(f"{'done' if run.log.exists() else '    '} {run.name}" for run in runs))
        return 0
    if any(run.lr is None for run in missing):  # their learning rate comes out of the selection
        chosen_by = [run for run in selection() if not run.log.exists()]
        if not execute_all(chosen_by, args.jobs, args.outputs):
            return 1
        missing = [run for run in missing if run.group != "selection"]
    return 0 if execute_all(missing, args.jobs, args.outputs) else 1


if __name__ == "__main__":
    sys.exit(main())
