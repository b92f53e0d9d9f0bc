"""The tests of both trainers under a verl that moves `compute_advantage`, as verl #7237 would."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import verl
from verl.trainer.ppo import ray_trainer

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]


def test_gtpo_trains_in_every_trainer_of_a_verl_that_moves_compute_advantage(tmp_path):
    shutil.copytree(Path(verl.__file__).parent, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    if Path(ray_trainer.compute_advantage.__wrapped__.__code__.co_filename).name == "ray_trainer.py":
        subprocess.run([sys.executable, ROOT / "patches/apply_7237.py", tmp_path], check=True)
    tests = [
        ROOT / f"tests/verl_plugin/test_{name}_on_cpu.py"
        for name in ("batch_fields", "estimator", "state", "token_dump")
    ]
    chosen = "bare_function or from_the_update or fully_async or what_the_loss_gets or same_process"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *map(str, tests)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    where = "from verl.trainer.ppo.v1.utils import compute_advantage as f; print(f.__module__, f.hooked_by_gtpo)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-2:] == ["verl.trainer.ppo.trainer_utils", "True"]
