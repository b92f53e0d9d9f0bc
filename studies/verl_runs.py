"""Runs under verl's own trainer that confirm the study: which there are, and how to run one that is missing.

    export VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin OMP_NUM_THREADS=1 RAY_worker_niceness=0 HF_HUB_OFFLINE=1
    python -m studies.verl_runs [--list]

They were made before the design: one prompt × 8 completions a step as there, but mostly 600 steps, and GRPO at 5e-5,
GTPO at 1e-4 (each the best of three rates on subtraction, two seeds of 200 steps).
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.tasks.tiny import WarmStartConfig, prepare
from studies import questions
from studies.plan import ADDITION, COUNTING, HERE, METHODS, ROOT, SPELLING, Cell, Start, cells, read_text
from studies.run_queue import missing_runs, write_log

SUBTRACTION, NOISY = Start("subtraction"), Start("arithmetic", 100)
# What is kept of a run: verl logs a hundred numbers a step, most of them about throughput.
_KEPT = ("reward/", "completion/", "gtpo/", "actor/entropy", "actor/grad_norm", "actor/lr", "timing_s/step")


def runs() -> list[tuple[Cell, int]]:
    """Every (cell, seed)."""
    first = range(1, 2)
    tables = [
        (cells([SUBTRACTION], ["grpo", "gtpo"], [5e-5, 1e-4, 2e-4]), range(1, 3)),
        (cells([COUNTING, SPELLING], ["grpo"], [5e-5]), range(1, 6)),
        (cells([COUNTING], ["gtpo"]), range(1, 6)),
        (cells([SPELLING], ["gtpo"]), range(1, 5)),
        (cells([ADDITION], ["grpo"], [5e-5]) + cells([ADDITION], ["gtpo"]), range(1, 4)),
        (cells([ADDITION], ["grpo"]), range(1, 3)),
        (cells([ADDITION], ["grpo", "gtpo"], [3e-4, 1e-3]), first),
        (cells([COUNTING], ["backward", "forward", "masks", "skip", "double", "entropy"]), first),
        (cells([COUNTING], ["grpo_strict", "grpo_coin"], [5e-5]), first),
        (cells([ADDITION], ["backward", "forward", "span_first", "span_all", "threshold_0.2"]), first),
        (cells([ADDITION], ["gamma_0.01", "gamma_1", "gtpo_G12", "gtpo_betas"]), first),
        (cells([ADDITION], ["grpo_G12", "grpo_betas"], [5e-5]), first),
        (cells([NOISY], ["grpo", "gtpo"], [2e-4]), first),
    ]
    return [(cell, seed) for table, seeds in tables for seed in seeds for cell in table]


def log_of(cell: Cell, seed: int) -> Path:
    """Where a run's metrics lie once it is complete: verl's log, a line per step."""
    return HERE / "results/verl" / cell.start.name / f"{cell.method}-lr{cell.lr:g}-seed{seed}.jsonl.gz"


def read_steps(cell: Cell, seed: int) -> dict[int, dict[str, float]]:
    """The metrics of each step of a run."""
    records = map(json.loads, read_text(log_of(cell, seed)).splitlines())
    return {record.pop("step"): record for record in records}


def steps_of(cell: Cell) -> int:
    """Training steps of a cell's runs."""
    return 200 if cell.start == SUBTRACTION else 600


def command(cell: Cell, seed: int, task: Path, out: Path) -> list[str]:
    """What starts the run: verl's trainer with the CPU recipe's config."""
    overrides = [
        f"task_dir={task}",
        f"seed={seed}",
        "data.train_batch_size=1",
        f"actor_rollout_ref.actor.optim.lr={cell.lr}",
        f"actor_rollout_ref.rollout.temperature={cell.start.temperature}",
        f"reward.custom_reward_function.path={HERE / 'rewards.py'}",
        "reward.custom_reward_function.name=paper",
        f"trainer.total_training_steps={steps_of(cell)}",
        f"trainer.default_local_dir={out / 'checkpoints'}",
        *METHODS[cell.method],
    ]
    trainer = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-path", str(ROOT / "recipes/config")]
    launcher = [sys.executable, "-m", "recipes", "run", "--out", str(out), "--stall", "300", "--"]
    return [*launcher, *trainer, "--config-name", "gtpo_cpu", *overrides]


def execute(cell: Cell, seed: int, outputs: Path) -> bool:
    """Make the run's task and run it; whether its log is complete."""
    start = cell.start
    task = outputs / f"{start.task}-{start.warm_steps}-seed{seed}"
    prepare(
        task,
        WarmStartConfig(seed=seed, task=start.task, steps=start.warm_steps),
        questions.TASKS[start.task],
        [questions.__file__],
    )
    out = outputs / "verl" / start.name / log_of(cell, seed).name.removesuffix(".jsonl.gz")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    began = time.monotonic()
    with (out / "launcher.log").open("w") as log:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        status = subprocess.run(command(cell, seed, task, out), stdout=log, stderr=log, env=environment).returncode
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    complete = status == 0 and len(lines) == steps_of(cell)
    if complete:
        keep(lines, log_of(cell, seed))
    took = f"{len(lines)}/{steps_of(cell)} steps in {time.monotonic() - began:.0f} s"
    print(f"{time.strftime('%H:%M:%S')} {out.name}: {took}{'' if complete else f'; failed, see {out}'}", flush=True)
    return complete


def keep(lines: Sequence[str], path: Path) -> None:
    """Write the numbers that tell about the method, to six digits, compressed; the file appears when it is whole."""

    def short(line: str) -> str:
        logged = json.loads(line)
        record = {k: float(f"{v:.6g}") for k, v in logged.items() if k.startswith(_KEPT)}
        return json.dumps({"step": logged["step"], **record}) + "\n"

    write_log("".join(map(short, lines)), path)


def main() -> int:
    """Run what is missing; 1 if a run failed."""
    missing, outputs = missing_runs(__doc__, runs(), log_of)
    return 0 if all([execute(cell, seed, outputs) for cell, seed in missing]) else 1


if __name__ == "__main__":
    sys.exit(main())
