import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recipes.runs.launch import end_process
from recipes.tasks import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def environment():
    """The variables of a run without an accelerator."""
    variables = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "recipes.verl_cpu.plugin",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    variables |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where the recipes find python3
    # For calculator, which Ray's workers import, and for the study's fast loop.
    path = [
        str(ROOT / "tests/e2e"),
        str(ROOT / "tests/helpers"),
        str(ROOT),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return os.environ | variables | {"PYTHONPATH": os.pathsep.join(path)}


@pytest.fixture(scope="session")
def run_script(environment):
    """Run a script of this folder on a task; it writes to a folder."""

    def run(script, task, out):
        command = [sys.executable, str(ROOT / "tests/e2e" / script), str(task), str(out)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
        assert result.returncode == 0, result.stderr[-6000:]

    return run


@pytest.fixture
def run_recipe(environment, tmp_path):
    """Run a recipe until it ends, or may be killed; its status, None of one that was killed, and what it printed."""

    def run(script, *arguments, may_be_killed=lambda: False, **variables):
        command = ["bash", str(ROOT / "recipes" / f"{script}.sh"), *arguments]
        with (tmp_path / f"{script}.log").open("w+") as log:
            process = subprocess.Popen(command, env=environment | variables, stdout=log, stderr=subprocess.STDOUT)
            deadline = time.monotonic() + 1800
            try:
                while (status := process.poll()) is None and not may_be_killed():
                    assert time.monotonic() < deadline, "it hangs"
                    time.sleep(0.1)
            finally:
                end_process(process, grace_s=0)  # verl can wait for ever for a worker that has failed
            log.seek(0)
            return status, log.read()

    return run


@pytest.fixture(scope="session")
def task():
    """The CPU recipe's task and warm-started model; its cache is shared with the recipe."""
    path = ROOT / ".cache/arithmetic-seed1"
    tiny.prepare(path, tiny.WarmStartConfig(seed=1))
    return path


@pytest.fixture
def train(task, environment, tmp_path):
    """Run verl's trainer through the launcher, two prompts a step; returns the process, or its result."""
    out = tmp_path / "run"

    def launch(
        *overrides,
        steps=2,
        wait=True,
        options=("--stall", "400"),  # fully_async takes minutes to start
        module="verl.trainer.main_ppo",
        out=out,
        **variables,
    ):
        command = [sys.executable, "-m", "recipes", "run", "--out", str(out), *options, "--"]
        command += [sys.executable, "-m", module, "--config-path", str(ROOT / "recipes/config")]
        command += ["--config-name", "gtpo_cpu", f"task_dir={task}", "data.train_batch_size=2"]
        command += [f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={out / 'checkpoints'}"]
        command += overrides
        env = environment | variables
        if wait:
            return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    launch.out = out
    launch.records = lambda: [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return launch
