"""The tests of both trainers under a verl that moves `compute_advantage`, as verl #7237 would."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import verl
from verl.trainer.ppo import ray_trainer

HERE = Path(__file__).parent
MOVED = ("compute_response_mask", "compute_advantage")


def move_compute_advantage(package):
    """From `ray_trainer`, which then imports it, to `trainer_utils`, from where `v1/utils.py` imports it."""
    old, new = package / "trainer/ppo/ray_trainer.py", package / "trainer/ppo/trainer_utils.py"
    source = old.read_text()
    lines = source.splitlines(keepends=True)
    functions = [node for node in ast.parse(source).body if getattr(node, "name", "") in MOVED]
    assert [node.name for node in functions] == [*MOVED]
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.Import | ast.ImportFrom)]
    new.write_text("".join("".join(lines[x.lineno - 1 : x.end_lineno]) for x in [*imports, *functions]))
    for node in reversed(functions):
        lines[node.lineno - 1 : node.end_lineno] = []
    after = imports[-1].end_lineno
    lines.insert(after, f"from verl.trainer.ppo.trainer_utils import {', '.join(MOVED)}  # noqa\n")
    old.write_text("".join(lines))
    utils = package / "trainer/ppo/v1/utils.py"
    before = utils.read_text()
    utils.write_text(before.replace("ppo.ray_trainer import compute_adv", "ppo.trainer_utils import compute_adv"))
    assert utils.read_text() != before


def test_gtpo_trains_in_every_trainer_of_a_verl_that_moves_compute_advantage(tmp_path):
    package = tmp_path / "verl"
    shutil.copytree(Path(verl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    if Path(ray_trainer.compute_advantage.__wrapped__.__code__.co_filename).name == "ray_trainer.py":
        move_compute_advantage(package)
    tests = [HERE / f"test_{name}_on_cpu.py" for name in ("trainers", "legacy_trainer", "token_dump")]
    chosen = "bare_function or from_the_update or fully_async or what_the_loss_gets or same_process"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{HERE.parents[1]}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *map(str, tests)]
    result = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    where = "from verl.trainer.ppo.v1.utils import compute_advantage as f; print(f.__module__, f.hooked_by_gtpo)"
    found = subprocess.run([sys.executable, "-c", where], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split()[-2:] == ["verl.trainer.ppo.trainer_utils", "True"]
