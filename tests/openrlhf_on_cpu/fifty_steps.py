"""Fifty steps of GTPO and of GRPO in OpenRLHF on the CPU (tests/openrlhf_on_cpu/README.md).

    .venv-openrlhf/bin/python tests/openrlhf_on_cpu/fifty_steps.py OUT

Says how far the advantages in the loss are from those expected. OUT then holds `gtpo.jsonl` and `grpo.jsonl`, all that
OpenRLHF logged.
"""

import json
import sys
from pathlib import Path

import tiny
from compare import compare
from runs import PROMPTS, train

from gtpo_verl import GTPOConfig

STEPS = 50

out = Path(sys.argv[1]).resolve()
tiny.write(out / "task", prompts=PROMPTS * STEPS)
for name, estimator, settings in (("gtpo", "gtpo", GTPOConfig()), ("grpo", "group_norm", None)):
    run = train(out / "task", out / name, estimator, steps=STEPS, actor__adam__lr=3e-4)
    found, *_ = compare(run, out / "task/model", settings)
    rewards = [metrics["rollout/reward_mean"] for metrics in run.metrics.values()]
    print(f"{name}: {found}; reward {sum(rewards[:5]) / 5:.2f} in the first five, {sum(rewards[-5:]) / 5:.2f} the last")
    lines = [json.dumps({"step": step} | metrics) + "\n" for step, metrics in run.metrics.items()]
    (out / f"{name}.jsonl").write_text("".join(lines))
