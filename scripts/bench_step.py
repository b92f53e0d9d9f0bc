"""The training part of a step, old log-probs to update, with GTPO's entropy from the update, against GRPO.

    VERL_PLATFORM=cpu python scripts/bench_step.py [--model recipe|wide] [--rounds 20] [--json]
    VERL_PLATFORM=cpu python scripts/bench_step.py --whole TASK [--rounds 20] [--json]

Trainer, worker, FSDP engine and loss are verl's, in one process, with rollouts that are given (tests/one_step.py): 8
prompts × 8 completions of the CPU recipe's task. `recipe` is the recipe's model of 0.4 M parameters with random
weights; `wide` has a vocabulary of 8,192, twice the layers and four times the width.

Every round runs one step of each, the first of them in turn; two rounds go before. Times are medians, ratios the
medians of the rounds' ratios, of wall-clock time and of the process's CPU time, which a busy machine disturbs less.

`--whole` takes `timing_s/step` of the CPU recipe instead, rollouts and weight sync included: one run after another,
with a learning rate of 0, so that all sample from the policy of TASK (`gtpo-verl make-task arithmetic --out TASK`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen2ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import one_step
from verl.workers.engine_workers import ActorRolloutRefWorker

from gtpo_verl.cpu import tiny

GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla"]
BYPASS = ["algorithm.rollout_correction.bypass_mode=true"]
# Random weights are far above any threshold that a model is filtered by.
GTPO = ["algorithm.gtpo.completion_filter=always", "+algorithm.gtpo.entropy_threshold=100"]
STEPS = {
    "GTPO, entropy from the update": [*GTPO, *BYPASS, "algorithm.gtpo.entropy_from=update"],
    "GTPO": GTPO,
    "GRPO": GRPO,
    "GRPO, bypass mode": [*GRPO, *BYPASS],
    "GRPO, KL": [*GRPO, "actor_rollout_ref.actor.use_kl_loss=true"],
}
WARM_UP = 2


def save_model(kind: str, folder: Path) -> None:
    """A model with random weights, and its tokenizer, as a task has them."""
    torch.manual_seed(0)
    tokenizer = tiny.build_tokenizer()
    model = tiny.build_model(tokenizer)
    if kind == "wide":
        config = model.config
        config.update({"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4})
        config.layer_types = None
        model = Qwen2ForCausalLM(type(config)(**{k: v for k, v in config.to_dict().items() if k != "layer_types"}))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


class ReferenceWorkers(one_step.WorkerGroup):
    """The reference policy, on all rows."""

    def compute_ref_log_prob(self, batch):
        keys, data = self._own(batch)
        output = self.worker.compute_ref_log_prob(data)
        for row, key in enumerate(keys):
            self.queue.rows[key]["log_probs"] = output["log_probs"][row]
        return batch


def trainer_of(task: Path, overrides: list[str]):
    """The trainer, and its reference policy where it has a KL term."""
    trainer = one_step.make_trainer(task, task / str(len(os.listdir(task))), overrides)
    actor = trainer.config.actor_rollout_ref
    if actor.actor.use_kl_loss:
        worker = ActorRolloutRefWorker(config=actor, role="ref")
        worker.init_model()
        trainer.ref_policy_wg = ReferenceWorkers(worker, None, "ref")
        trainer.ref_in_actor = False
    return trainer


def seconds_of_step(trainer, rows: dict) -> tuple[float, float]:
    """One step from the rollouts on, all but reward and weight sync: wall-clock time and CPU time."""
    queue, batch = one_step.take(trainer, rows, seed=0)
    extra_info, metrics = batch.extra_info, {}
    start = time.perf_counter(), time.process_time()
    batch = trainer._compute_old_log_prob(batch, metrics)
    batch.extra_info = extra_info
    if trainer.config.actor_rollout_ref.actor.use_kl_loss:
        trainer.ref_policy_wg.queue = queue
        trainer._compute_ref_log_prob(batch, metrics)
    batch = trainer._compute_advantage(batch, metrics)
    batch.extra_info = extra_info
    trainer._update_actor(batch, metrics)
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    assert metrics["actor/grad_norm"] > 0
    return seconds


def seconds_of_whole_steps(task: Path, folder: Path, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """`timing_s/step` of the steps of one run of each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    seconds: dict[str, list[tuple[float, ...]]] = {}
    for name, overrides in STEPS.items():
        out = folder / str(len(seconds))
        command = [sys.executable, "-m", "gtpo_verl", "run", "--out", str(out), "--", sys.executable]
        command += ["-m", "verl.trainer.main_ppo", "--config-path", str(one_step.ROOT / "recipes/config")]
        command += ["--config-name", "gtpo_cpu", f"task_dir={task.absolute()}", *overrides]
        command += ["actor_rollout_ref.actor.optim.lr=0", f"trainer.default_local_dir={out / 'checkpoints'}"]
        command += [f"trainer.total_training_steps={WARM_UP + rounds}"]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        seconds[name] = [(record["timing_s/step"],) for record in records]
    return seconds


def seconds_of_training_parts(model: str, task: Path, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """Wall-clock and CPU time of each round."""
    one_step.PROMPTS = 8
    one_step.be_rank(0, 1, task / "store")
    save_model(model, task)
    trainers = {name: trainer_of(task, overrides) for name, overrides in STEPS.items()}
    rows = one_step.rollouts(next(iter(trainers.values())).tokenizer)
    for fields in rows.values():
        fields["rollout_log_probs"] = torch.full(fields["responses"].shape, -1.0)
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in trainers}
    for number in range(WARM_UP + rounds):
        names = list(trainers)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds[name].append(seconds_of_step(trainers[name], rows))
    dist.destroy_process_group()
    return seconds


def main() -> None:
    """Print the times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["recipe", "wide"], default="recipe")
    parser.add_argument("--whole", type=Path, metavar="TASK")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.whole:
            seconds = seconds_of_whole_steps(args.whole, Path(folder), args.rounds)
        else:
            seconds = seconds_of_training_parts(args.model, Path(folder), args.rounds)
    seconds = {name: times[WARM_UP:] for name, times in seconds.items()}

    ours, *others = seconds
    results: dict[str, dict[str, float]] = {name: {} for name in seconds}
    for at, clock in enumerate(("wall", "cpu")[: 1 if args.whole else 2]):
        for name, times in seconds.items():
            results[name][f"{clock}_s"] = statistics.median(x[at] for x in times)
            ratios = (a[at] / b[at] for a, b in zip(seconds[ours], times, strict=True))
            results[name][f"{clock}_ratio"] = statistics.median(ratios)
    if args.json:
        of = "whole step" if args.whole else args.model
        print(json.dumps({"of": of, "rounds": args.rounds, "steps": results}, indent=1))
        return
    print(f"{ours} against", *(f"{name:<18}" for name in ("", *results[ours])))
    for name in others:
        print(f"{name:<44}", *(f"{value:<18.3f}" for value in results[name].values()))


if __name__ == "__main__":
    main()
