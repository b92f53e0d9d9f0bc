"""What the benchmarks time is what users get."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import torch

from gtpo_verl import compute_gtpo_outcome_advantage

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def test_bench_advantage_times_the_advantages_of_gtpo():
    spec = importlib.util.spec_from_file_location("bench_advantage", SCRIPTS / "bench_advantage.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    batch = bench.make_batch(prompts=4, group_size=8, response_length=32)
    advantages = compute_gtpo_outcome_advantage(**batch, initial_entropy=bench.INITIAL_ENTROPY)[0]
    torch.testing.assert_close(bench.gtpo(batch), advantages, rtol=0, atol=0)


PYTHON_THAT_ONLY_NOTES = """#!/bin/sh
# Of an environment: what pip is asked to install takes a while.
case "$*" in
    -c*) exit 0 ;;
    *venv*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; touch "$4/bin/activate" ;;
    *pip*) echo begins >>"$NOTES"; sleep 0.3; echo ends >>"$NOTES" ;;
esac
"""


def test_two_starts_at_once_install_into_the_environment_one_after_the_other(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "clone/scripts")
    shutil.copy(SCRIPTS.parent / "pyproject.toml", tmp_path / "clone")
    python = tmp_path / "python"
    python.write_text(PYTHON_THAT_ONLY_NOTES)
    python.chmod(0o755)
    notes = tmp_path / "notes"
    env = os.environ | {"PYTHON": str(python), "NOTES": str(notes)}
    command = ["bash", str(tmp_path / "clone/scripts/setup_cpu.sh"), "hf"]
    starts = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [start.wait(60) for start in starts] == [0, 0, 0]
    once = ["begins", "ends"] * 3  # torch, the other requirements, this package
    assert notes.read_text().split() == once
