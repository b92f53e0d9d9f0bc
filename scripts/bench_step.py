"""The training part of a step, old log-probs to update, with GTPO's entropy from the update, against GRPO.

    VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin python scripts/bench_step.py [--rounds 20]

Trainer, worker, FSDP engine and loss are verl's, in one process, with given rollouts
(`tests/helpers/harness/one_process.py`):
8 prompts × 8 completions of the CPU recipe's task, and its model of 0.4 M parameters with random weights.

Every round runs one step of each, the first of them in turn; two rounds go before. Prints JSON: medians of the times,
and of the rounds' ratios, of wall-clock time and of the process's CPU time, which a busy machine disturbs less.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from verl.workers.engine_workers import ActorRolloutRefWorker

from recipes.tasks import tiny

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/helpers"))
from harness import one_process  # noqa: E402

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]
BYPASS = ["algorithm.rollout_correction.bypass_mode=true"]
# Random weights are far above any threshold that a model is filtered by.
GTPO = ["algorithm.gtpo.completion_filter=always", "+algorithm.gtpo.entropy_threshold=100"]
OURS = "GTPO, entropy from the update"
STEPS = {
    OURS: [*GTPO, *BYPASS, "algorithm.gtpo.entropy_from=update"],
    "GTPO": GTPO,
    "GRPO": GRPO,
    "GRPO, bypass mode": [*GRPO, *BYPASS],
    "GRPO, KL": [*GRPO, "actor_rollout_ref.actor.use_kl_loss=true"],
}
PROMPTS, WARM_UP = 8, 2


class ReferenceWorkers(one_process.WorkerGroup):
    """The reference policy, on all rows."""

    def compute_ref_log_prob(self, batch):
        keys, data = self._own(batch)
        output = self.worker.compute_ref_log_prob(data)
        for row, key in enumerate(keys):
            self.queue.rows[key]["log_probs"] = output["log_probs"][row]
        return batch


def trainer_of(task: Path, overrides: list[str]):
    """The trainer, and its reference policy where it has a KL term."""
    trainer = one_process.make_trainer(task, task / str(len(os.listdir(task))), overrides)
    actor = trainer.config.actor_rollout_ref
    if actor.actor.use_kl_loss:
        worker = ActorRolloutRefWorker(config=actor, role="ref")
        worker.init_model()
        trainer.ref_policy_wg = ReferenceWorkers(worker, None, "ref")
        trainer.ref_in_actor = False
    return trainer


def seconds_of_step(trainer, rows: dict) -> tuple[float, float]:
    """One step: wall-clock time and CPU time."""
    queue, batch = one_process.take(trainer, rows, seed=0)
    if hasattr(trainer, "ref_policy_wg"):
        trainer.ref_policy_wg.queue = queue
    metrics: dict[str, float] = {}
    start = time.perf_counter(), time.process_time()
    one_process.train_on(trainer, batch, metrics)
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    assert metrics["actor/grad_norm"] > 0
    return seconds


def seconds_of_rounds(task: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall-clock and CPU time of each round, after the first two."""
    one_process.be_rank(0, 1, task / "store")
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    tiny.build_model(tokenizer).save_pretrained(task / "model")
    tokenizer.save_pretrained(task / "model")
    trainers = {name: trainer_of(task, overrides) for name, overrides in STEPS.items()}
    rows = one_process.rollouts(next(iter(trainers.values())).tokenizer, PROMPTS)
    for fields in rows.values():
        fields["rollout_log_probs"] = torch.full(fields["responses"].shape, -1.0)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for number in range(WARM_UP + rounds):
        names = list(trainers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(seconds_of_step(trainers[name], rows))
    dist.destroy_process_group()
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def main() -> None:
    """Print the times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = seconds_of_rounds(Path(folder), args.rounds)
    results: dict[str, dict[str, float]] = {name: {} for name in seconds}
    for at, clock in enumerate(("wall", "cpu")):
        for name, times in seconds.items():
            results[name][f"{clock}_s"] = statistics.median(x[at] for x in times)
            ratios = (a[at] / b[at] for a, b in zip(seconds[OURS], times, strict=True))
            results[name][f"{clock}_ratio"] = statistics.median(ratios)
    print(json.dumps({"rounds": args.rounds, "steps": results}, indent=1))


if __name__ == "__main__":
    main()
