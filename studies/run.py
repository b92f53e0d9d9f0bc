"""Run what is missing of the study's plan, on one core, and keep its logs. Started by run.sh.

Runs with one start and one seed train side by side (see `studies.fast`). A run that is complete has its log in results/
and is not run again; what was interrupted begins anew.
"""

import functools
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gtpo_verl.cpu.tiny import Question, WarmStartConfig, build_tokenizer, prepare, split_questions
from studies.fast import Learner, build_config, hold_out, train
from studies.missing import missing_runs, write_log
from studies.plan import CONTROLS, METHODS, STEPS, Cell, Start, plan

AT_A_TIME = 12
"""Runs side by side; more gain little."""
HELD_OUT = 32
"""Questions of the final evaluation."""


def config_of(cell: Cell) -> Any:
    """verl's config of a cell's runs."""
    return build_config(
        [
            *METHODS[cell.method],
            f"actor_rollout_ref.actor.optim.lr={cell.lr}",
            f"actor_rollout_ref.rollout.temperature={cell.start.temperature}",
        ]
    )


@functools.cache
def group_size(method: str) -> int:
    """Completions of a prompt."""
    return build_config(METHODS[method]).actor_rollout_ref.rollout.n


def batches(runs: Sequence[tuple[Cell, int]]) -> Iterator[tuple[Start, int, list[Cell]]]:
    """Runs that can train side by side: of one start, one seed and one size of group, in the order of the plan."""
    together: dict[tuple[Start, int, int], list[Cell]] = {}
    for cell, seed in runs:
        together.setdefault((cell.start, seed, group_size(cell.method)), []).append(cell)
    for (start, seed, _), cells in together.items():
        number = -(-len(cells) // AT_A_TIME)
        for i in range(number):
            yield start, seed, cells[i::number]


def execute(start: Start, seed: int, cells: Sequence[Cell], outputs: Path) -> None:
    """Train and evaluate the runs, and write their logs."""
    warm = WarmStartConfig(seed=seed, task=start.task, steps=start.warm_steps)
    folder = outputs / f"{start.task}-{start.warm_steps}-seed{seed}"
    report = prepare(folder, warm)
    began = time.monotonic()
    questions, held_out = _split(warm)
    questions = random.Random(seed).sample(questions, len(questions))
    tokenizer = build_tokenizer()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    weights = {
        name: values.detach().expand(len(cells), *values.shape).contiguous()
        for name, values in model.state_dict().items()
    }
    learners = [
        Learner({name: v[i : i + 1] for name, v in weights.items()}, config_of(cell), CONTROLS.get(cell.method), seed)
        for i, cell in enumerate(cells)
    ]
    logs = train(learners, weights, questions, tokenizer, start.task, STEPS)
    results = hold_out(learners, weights, held_out[:HELD_OUT], tokenizer, start.task)
    seconds = (time.monotonic() - began) / len(cells)
    for cell, log, result in zip(cells, logs, results, strict=True):
        keep({"start": report["statistics"], "steps": log, "held_out": result, "seconds": seconds}, cell.log(seed))
    print(f"{time.strftime('%H:%M:%S')} {start.name} seed {seed}: {len(cells)} runs, {seconds:.0f} s each", flush=True)


@functools.cache
def _split(warm: WarmStartConfig) -> tuple[list[Question], list[Question]]:
    return split_questions(warm)


def keep(record: dict[str, Any], path: Path) -> None:
    """Write a run's log to four digits, compressed; the file appears when it is whole."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(item) for key, item in value.items()}
        if isinstance(value, list):
            return [short(item) for item in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    write_log(json.dumps(short(record), separators=(",", ":")), path)


def main() -> int:
    """Run what is missing."""
    torch.set_num_threads(1)
    missing, outputs = missing_runs(__doc__, plan(), Cell.log)
    for start, seed, cells in batches(missing):
        execute(start, seed, cells, outputs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
