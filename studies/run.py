"""Run what is missing of the study's plan, on one core, and keep its logs. Started by run.sh.

Several processes, one for each core, share the runs: a start of one seed is in one process at a time, or, where runs
go one by one, each run.
Runs with one start and one seed train side by side (see `studies.model.sample`); those of the real model do so on a GPU
alone, and on the CPU one after another. A run that is complete has its log in results/ and is not run again; what was
interrupted begins anew, or, of the real model on a CPU, goes on from its last tenth step. The steps of a run that has
begun are lines of JSON in outputs/study/START-seedN/.

Block 10 on a GPU is one call, under NVIDIA's MPS: python -m studies.run --block 10-gpu --processes 6
"""

import argparse
import contextlib
import functools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import torch
from filelock import FileLock, Timeout

from gtpo_verl.run.records import atomic_write
from studies.fast import Learner, build_config, hold_out, train
from studies.model import product_dtype
from studies.plan import (
    CONTROLS,
    ENDED_EARLY,
    HERE,
    METHODS,
    ROOT,
    Cell,
    Start,
    archive,
    blocks,
    complete,
    is_stored,
    number,
    one_prompt,
    planned,
    read_log,
)
from studies.run_queue import write_log
from studies.tasks import Asked, Task, open_task

AT_A_TIME = {"cpu": 12, "cuda": 2}
"""Runs side by side: more gain little on a CPU; six processes with two each just fit a GPU of 80 GB."""
KEPT_STEPS = 15
"""Whose completions are kept, for the seeds of a start that keep some."""


def config_of(cell: Cell, initial_entropy: float) -> Any:
    """verl's config of a cell's runs."""
    start = cell.start
    return build_config(
        [
            f"data.train_batch_size={start.prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={start.prompts}",
            f"algorithm.gtpo.initial_entropy={initial_entropy}",
            *METHODS[cell.method],
            f"actor_rollout_ref.actor.optim.lr={cell.lr}",
            f"actor_rollout_ref.rollout.temperature={start.temperature}",
        ]
    )


@functools.cache
def group_size(method: str) -> int:
    """Completions of a prompt."""
    return build_config(METHODS[method]).actor_rollout_ref.rollout.n


def batches(runs: Sequence[tuple[Cell, int]]) -> Iterator[tuple[Start, int, list[Cell]]]:
    """Runs that can train side by side: of one start, one seed and one size of group, in the order of the plan."""
    together: dict[tuple[Start, int, int, Cell | None], list[Cell]] = {}
    for cell, seed in runs:
        alone = cell if cell.start.trains_alone else None
        together.setdefault((cell.start, seed, group_size(cell.method), alone), []).append(cell)
    for (start, seed, *_), cells in together.items():
        number = -(-len(cells) // AT_A_TIME[start.device])
        size = -(-len(cells) // number)
        for first in range(0, len(cells), size):
            yield start, seed, cells[first : first + size]


def begin(start: Start, seed: int, cells: Sequence[Cell], outputs: Path) -> tuple[Task, list[Asked], list[Learner]]:
    """The start, its questions in the order of the seed, and a learner for each cell."""
    with FileLock(outputs / f"{start.name}-seed{seed}-start.lock"):  # the processes of a seed share its warm start
        task = open_task(start, seed, outputs)
    order = random.Random(seed).sample(task.train, len(task.train))
    learners = [
        Learner(
            *(task.shape, task.weights, config_of(cell, task.initial_entropy)),
            *(CONTROLS.get(cell.method), seed, start.dtype),
        )
        for cell in cells
    ]
    return task, order, learners


@contextlib.contextmanager
def step_files(
    seed: int, cells: Sequence[Cell], outputs: Path, mode: Literal["w", "a"] = "w"
) -> Iterator[list[TextIO]]:
    """A file for each run, to which its steps are written as they are made."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(steps_of(cell, seed, outputs).open(mode)) for cell in cells]


def steps_of(cell: Cell, seed: int, outputs: Path) -> Path:
    """Where the steps of a run stand that has begun."""
    return outputs / f"{cell.start.name}-seed{seed}" / f"{cell.method}-lr{cell.lr:g}.jsonl"


def held_out_of(cell: Cell, seed: int, step: int, outputs: Path) -> Path:
    """Where a run's answers to the held-out questions stand that were asked after a step on the way."""
    steps = steps_of(cell, seed, outputs)
    return steps.with_name(f"{steps.stem}-held_out_{step}.json")


def execute(start: Start, seed: int, cells: Sequence[Cell], outputs: Path) -> None:
    """Train and evaluate the runs, and write their logs."""
    made_by = commit()
    task, order, learners = begin(start, seed, cells, outputs)
    kept: list[list[list[dict[str, Any]]]] = [[] for _ in cells]
    keep_steps = KEPT_STEPS if seed in start.kept_seeds else 0
    checkpoint = steps_of(cells[0], seed, outputs).with_suffix(".pt") if start.trains_alone else None
    samples, prompts = (8, 8) if start.is_real else (16, 8)

    def evaluate_on_the_way(step: int) -> None:
        if step in start.held_out_at:
            results = hold_out(learners, task, task.held_out, samples, prompts)
            for cell, result in zip(cells, results, strict=True):
                atomic_write(held_out_of(cell, seed, step, outputs), json.dumps(result).encode())

    with step_files(seed, cells, outputs, "a" if checkpoint and checkpoint.exists() else "w") as files:
        logs = train(learners, task, order, start.steps, kept, keep_steps, files, checkpoint, evaluate_on_the_way)
    began = time.monotonic()
    results = hold_out(learners, task, task.held_out, samples, prompts) if start.evaluated else [None] * len(cells)
    seconds = (sum(logs[0].pop("seconds")) + time.monotonic() - began) / len(cells)
    common = {"commit": made_by, "initial_entropy": task.initial_entropy, "seconds": seconds}
    common |= {"dtype": str(start.dtype).removeprefix("torch."), "device": start.device}
    common |= {"products": str(product_dtype(start.dtype, start.device)).removeprefix("torch.")}
    for cell, log, result, rollouts in zip(cells, logs, results, kept, strict=True):
        record = {**common, "steps": log}
        if result:
            record["held_out"] = result
        for step in start.held_out_at:
            record[f"held_out_{step}"] = json.loads(held_out_of(cell, seed, step, outputs).read_text())
        if rollouts:
            record["rollouts"] = rollouts
        keep(record, cell.log(seed))
    if checkpoint:
        checkpoint.unlink(missing_ok=True)
    print(f"{time.strftime('%H:%M:%S')} {start.name} seed {seed}: {len(cells)} runs, {seconds:.0f} s each", flush=True)


def rehearse(block: str, steps: int, outputs: Path) -> None:
    """Make some steps of a block's first two arms, of its first seed, and say what they cost; no log is kept."""
    runs = planned(block)
    first_seed = [(cell, seed) for cell, seed in runs if seed == runs[0][1]][:2]
    for start, seed, cells in batches(first_seed):
        task, order, learners = begin(start, seed, cells, outputs)
        with step_files(seed, cells, outputs) as files:
            train(learners, task, order, steps, files=files)
        for cell in cells:
            made = map(json.loads, steps_of(cell, seed, outputs).read_text().splitlines())
            seconds = ", ".join(f"{record['seconds']} s for {record['length']:.0f} tokens" for record in made)
            print(f"{start.name} seed {seed}, {cell.method}: {seconds} a completion", flush=True)


def unfit(block: str) -> str:
    """Why this machine does not make a block's runs; empty if it does."""
    device = next((cell.start.device for cell, _ in planned(block)), "cpu")
    needs_gpu = device == "cuda" and not torch.cuda.is_available()
    return f"--block {block} needs a GPU, and torch finds none" if needs_gpu else ""


@functools.cache
def commit() -> str:
    """Of the code that runs."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def keep(record: dict[str, Any], path: Path) -> None:
    """Write a run's log to four digits, compressed; the file appears when it is whole."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list):
            return [short(item) for item in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    write_log(json.dumps(short(record), separators=(",", ":")), path)


def list_runs(block: str = "") -> None:
    """Each block's runs, how many are done, the hours that they took and those that are left; of one block each run."""
    for name, runs in {"one prompt a step": one_prompt(), **blocks()}.items():
        if block not in ("", number(name)):
            continue
        if not runs:
            print(f"{name}: waits for the choice of a rate")
            continue
        done = complete(runs)
        seconds = [read_log(cell.log(seed))["seconds"] for cell, seed in done]
        missing = len(runs) - len(done)
        left = f", about {statistics.median(seconds) * missing / 3600:.1f} h left" if seconds and missing else ""
        left = ", ended early" if number(name) in ENDED_EARLY else left
        print(f"{name}: {len(done)} of {len(runs)} runs, {sum(seconds) / 3600:.1f} h{left}")
        for cell, seed in runs if block else ():
            print("    done" if (cell, seed) in done else "        ", cell.log(seed).relative_to(HERE))


def archive_finished() -> None:
    """Move the logs of each block that is complete, or ended early, into its archive."""
    for name, runs in {"one prompt": one_prompt(), **blocks()}.items():
        if len(done := complete(runs)) == len(runs) or number(name) in ENDED_EARLY:
            if loose := [log for cell, seed in done if (log := cell.log(seed)).exists()]:
                archive(loose, number(name).replace(" ", "-"))
                print(f"{name}: {len(loose)} logs archived")


def run_next(block: str, outputs: Path) -> bool:
    """Execute the first batch that is missing and that no other process has; whether there was one.

    A block that ended early gets further runs only if it is named, and one that this machine does not make gets none.
    """
    left_out = {name for name in map(number, blocks()) if unfit(name) or (name in ENDED_EARLY and not block)}
    chosen = dict.fromkeys(run for name in map(number, blocks()) if name not in left_out for run in planned(name))
    missing = [run for run in planned(block) if run in chosen and not is_stored(run[0].log(run[1]))]
    for start, seed, cells in batches(missing):
        alone = f"-{cells[0].method}-lr{cells[0].lr:g}" if start.trains_alone else ""
        lock = FileLock(outputs / f"{start.name}-seed{seed}{alone}.lock")
        with contextlib.suppress(Timeout), lock.acquire(blocking=False):
            if left := [cell for cell in cells if not is_stored(cell.log(seed))]:
                execute(start, seed, left, outputs)
            return True
    return False


def main() -> int:
    """Run what is missing, a batch at a time: a choice of rates adds runs to the plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what there is, and what is done")
    parser.add_argument("--archive", action="store_true", help="move the logs of finished blocks into archives")
    names = [number(name) for name in blocks()]
    parser.add_argument("--block", default="", choices=names, help="this one only")
    parser.add_argument("--processes", type=int, default=1, help="that share the runs; on a GPU one for each seed")
    parser.add_argument(
        "--rehearse", type=int, metavar="STEPS", help="steps of a block's first two arms; nothing is kept"
    )
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs/study", help="folder of the warm starts")
    args = parser.parse_args()
    if args.list:
        list_runs(args.block)
        return 0
    if args.archive:
        archive_finished()
        return 0
    torch.set_num_threads(1)
    args.outputs.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        rehearse(args.block, args.rehearse, args.outputs)
        return 0
    if args.block and (why := unfit(args.block)):
        parser.error(why)
    if args.processes > 1:
        command = [sys.executable, "-m", "studies.run", "--outputs", str(args.outputs)]
        command += ["--block", args.block] if args.block else []
        workers = [subprocess.Popen(command, cwd=ROOT) for _ in range(args.processes)]
        return max(worker.wait() for worker in workers)
    while run_next(args.block, args.outputs):
        pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
