"""Two runs side by side on one host, each with a Ray and a vLLM of its own."""

import importlib.util
import json

import pytest

from recipes.runs.launch import end_process

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="bash scripts/setup_cpu.sh vllm installs vLLM")
def test_each_run_rolls_out_its_own_weights(train, tmp_path):
    # At this learning rate weights of another run, or of the step before, give other probabilities at once.
    settings = ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.optim.lr=0.01"]
    outs = [tmp_path / "a", tmp_path / "b"]
    runs = [
        train(*settings, f"seed={seed}", steps=3, wait=False, options=("--stall", "300"), out=out)
        for seed, out in enumerate(outs, start=1)
    ]
    try:
        said = [run.communicate(timeout=1200)[0] for run in runs]
    finally:
        for run in runs:
            end_process(run)
    assert [run.returncode for run in runs] == [0, 0], said
    logs = [[json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] for out in outs]
    assert [len(log) for log in logs] == [3, 3]
    assert all(step["training/rollout_probs_diff_max"] < 0.01 for log in logs for step in log)
