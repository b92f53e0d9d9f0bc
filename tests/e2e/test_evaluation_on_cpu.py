"""recipes/evaluate.sh on CPU, killed between two batches and started again."""

import contextlib
import json
import subprocess
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def evaluate(task, environment, tmp_path):
    """Start the evaluation of the warm-started model: 6 questions, 4 completions of each, 2 questions a batch."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/arithmetic").symlink_to(task)
    env = environment | {
        "INFER_BACKEND": "hf",
        "DATASETS": "arithmetic",
        "DATA_ROOT": str(tmp_path / "data"),
        "SAMPLES": "4",
        "BATCH": "2",
        "MAX_PROMPT_LENGTH": "16",
        "MAX_RESPONSE_LENGTH": "64",
        "OUT": str(tmp_path / "out"),
        "LABEL": "tiny/sums/start",
    }
    command = ["bash", str(ROOT / "recipes/evaluate.sh"), str(task / "model"), "data.val_max_samples=6"]

    def start(log):
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)

    return start


def kill(process):
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def test_a_killed_evaluation_keeps_its_batches_and_loses_no_completion(evaluate, tmp_path):
    parts, log = tmp_path / "out/arithmetic.parts", tmp_path / "log"
    with log.open("w") as stream:
        process, deadline = evaluate(stream), time.monotonic() + 300
        try:
            while not list(parts.glob("*.jsonl")):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.05)
        finally:
            kill(process)
    kept = {path.name: path.read_text() for path in parts.glob("*.jsonl")}
    assert not (tmp_path / "out/arithmetic.jsonl").exists()

    with log.open("w") as stream:
        process = evaluate(stream)
        try:
            assert process.wait(timeout=1800) == 0, log.read_text()[-4000:]
        finally:
            if process.poll() is None:
                kill(process)
    dump = (tmp_path / "out/arithmetic.jsonl").read_text()
    assert kept and all(part in dump for part in kept.values())
    rows = [json.loads(line) for line in dump.splitlines()]
    assert len({row["uid"] for row in rows}) == 24 and len({row["input"] for row in rows}) == 6
    records = json.loads((tmp_path / "out/evaluation.json").read_text())["records"]
    assert {(record["questions"], record["completions"]) for record in records} == {(6, 4)}
    assert {(record["metric"], record["k"]) for record in records} >= {("pass", 1), ("maj", 4)}
    assert "| tiny | sums | start | arithmetic maj@4 |" in log.read_text()
