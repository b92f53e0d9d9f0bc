"""The training part of a step, old log-probs to update, with GTPO's entropy from the update, against GRPO.

    VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin python scripts/bench_step.py [--rounds 20]

Trainer, worker, FSDP engine and loss are verl's, in one process, with given rollouts
(`tests/helpers/harness/one_process.py`): 8 prompts × 8 completions of the CPU recipe's task, and its model of 0.4 M
parameters with random weights.

Every round takes one step with each setting, and each round begins with another one; the first two rounds do not count.
Prints JSON: medians of the times, and of the rounds' ratios, of wall-clock time and of the process's CPU time, which a
busy machine disturbs less.
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
    """Stands for the workers of the reference policy; this process has all rows."""

    def compute_ref_log_prob(self, batch):
        keys, data = self._own(batch)
        output = self.worker.compute_ref_log_prob(data)
        for row, key in enumerate(keys):
            self.queue.rows[key]["log_probs"] = output["log_probs"][row]
        return batch


def make_trainer(task: Path, overrides: list[str]):
    """Make verl's trainer, with a reference policy where it has a KL term."""
    trainer = one_process.make_trainer(task, task / str(len(os.listdir(task))), overrides)
    config = trainer.config.actor_rollout_ref
    if config.actor.use_kl_loss:
        worker = ActorRolloutRefWorker(config=config, role="ref")
        worker.init_model()
        trainer.ref_policy_wg = ReferenceWorkers(worker, None, "ref")
        trainer.ref_in_actor = False
    return trainer


def seconds_of_step(trainer, rows: dict) -> tuple[float, float]:
    """Take one step, and return its wall-clock time and its CPU time."""
    queue, batch = one_process.take(trainer, rows, seed=0)
    if hasattr(trainer, "ref_policy_wg"):
        trainer.ref_policy_wg.queue = queue
    metrics: dict[str, float] = {}
    wall = time.perf_counter()
    cpu = time.process_time()
    one_process.train_on(trainer, batch, metrics)
    seconds = (time.perf_counter() - wall, time.process_time() - cpu)
    assert metrics["actor/grad_norm"] > 0
    return seconds


def seconds_of_rounds(task: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return, for each setting, the wall-clock and the CPU time of every round after the first two."""
    one_process.be_rank(0, 1, task / "store")
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    tiny.build_model(tokenizer).save_pretrained(task / "model")
    tokenizer.save_pretrained(task / "model")
    trainers = {name: make_trainer(task, overrides) for name, overrides in STEPS.items()}
    rows = one_process.rollouts(next(iter(trainers.values())).tokenizer, PROMPTS)
    for fields in rows.values():
        fields["rollout_log_probs"] = torch.full(fields["responses"].shape, -1.0)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in trainers}
    for number in range(WARM_UP + rounds):
        names = list(trainers)
        first = number % len(names)
        for name in names[first:] + names[:first]:
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
    for index, clock in enumerate(("wall", "cpu")):
        ours = [round_[index] for round_ in seconds[OURS]]
        for name, rounds in seconds.items():
            theirs = [round_[index] for round_ in rounds]
            ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
            results[name][f"{clock}_s"] = statistics.median(theirs)
            results[name][f"{clock}_ratio"] = statistics.median(ratios)
    print(json.dumps({"rounds": args.rounds, "steps": results}, indent=1))


if __name__ == "__main__":
    main()
