"""Fifty steps of GTPO and of GRPO in OpenRLHF on the CPU, and their figure (docs/openrlhf.md).

    .venv-openrlhf/bin/python tests/openrlhf_on_cpu/fifty_steps.py OUT

OUT then holds `training.png`, `gtpo.jsonl` and `grpo.jsonl`, all that OpenRLHF logged. Says how far the advantages in
the loss are from those expected.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import tiny
from compare import compare
from runs import PROMPTS, Run, train

from gtpo_verl import GTPOConfig

STEPS = 50
CURVES = {
    "rollout/reward_mean": "reward: different digits",
    "rollout/response_length_mean": "completion length (tokens)",
    "gtpo/entropy/mean": "entropy (nats per token)",
    "gtpo/conflict/token_frac": "share of tokens in conflict",
    "gtpo/filter/dropped_frac": "share of completions dropped",
}


def main(out):
    tiny.write(out / "task", prompts=PROMPTS * STEPS)
    runs = {}
    for name, estimator, settings in (("GTPO", "gtpo", GTPOConfig()), ("GRPO", "group_norm", None)):
        folder = out / name.lower()
        if not (folder / "model").exists():
            train(out / "task", folder, estimator, steps=STEPS, actor__adam__lr=3e-4)
        runs[name] = Run(folder)
        found, *_ = compare(runs[name], out / "task/model", settings)
        print(f"{name}: {found}")
        lines = [json.dumps({"step": step} | metrics) + "\n" for step, metrics in runs[name].metrics.items()]
        (out / f"{name.lower()}.jsonl").write_text("".join(lines))
        rewards = [metrics["rollout/reward_mean"] for metrics in runs[name].metrics.values()]
        print(f"{name}: reward {sum(rewards[:5]) / 5:.2f} in the first five, {sum(rewards[-5:]) / 5:.2f} the last")
    figure, axes = plt.subplots(1, len(CURVES), figsize=(4 * len(CURVES), 3), layout="constrained")
    for axis, (metric, title) in zip(axes, CURVES.items(), strict=True):
        for name, run in runs.items():
            points = [(step, metrics[metric]) for step, metrics in run.metrics.items() if metric in metrics]
            if points:
                axis.plot(*zip(*points, strict=True), label=name)
        axis.set(title=title, xlabel="step")
        axis.legend()
    figure.savefig(out / "training.png", dpi=100)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
