"""What a cluster does to a run of verl's trainer: full disks, killed workers, servers, runs; and what then goes on."""

import contextlib
import re
import subprocess
import time

import psutil
import pytest

from gtpo_verl.run.initial_entropy import InitialEntropy

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def wait_for(process, happened):
    deadline = time.monotonic() + 600  # its start, on a busy machine
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.05)


def ray_worker(process, title):
    """The process of the Ray actor of this class."""
    for child in psutil.Process(process.pid).children(recursive=True):
        try:
            if child.cmdline()[0].startswith(f"ray::{title}"):
                return child
        except (IndexError, psutil.NoSuchProcess):
            continue
    raise AssertionError(f"there is no ray::{title}")


def ends(process):
    """What a run prints that cannot go on."""
    output, _ = process.communicate(timeout=900)
    assert process.returncode not in (0, None), output
    assert "the run failed: " in output
    return output


def test_each_start_after_a_fault_goes_on_from_the_last_whole_checkpoint(train):
    tracker = train.out / "checkpoints/latest_checkpointed_iteration.txt"

    def saved_step():
        return int(tracker.read_text() or 0)  # it may be just being written

    def start():
        return train("trainer.save_freq=1", steps=9, wait=False)

    process = start()
    wait_for(process, tracker.exists)
    # The optimizer's state is larger, the worker's log is smaller.
    ray_worker(process, "WorkerDict").rlimit(psutil.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    assert "inline_container.cc" in ends(process)  # of torch.save, which names no disk
    saved = saved_step()
    assert (train.out / f"checkpoints/global_step_{saved + 1}").exists()  # in part
    measured = InitialEntropy.load(train.out / "checkpoints")
    killed_at = set()

    for title in ("WorkerDict", "HFServer"):
        process = start()
        wait_for(process, lambda saved=saved: saved_step() > saved)
        ray_worker(process, title).kill()
        assert "died" in ends(process)
        saved = saved_step()
        killed_at.add(saved)

    process = train("trainer.save_freq=1", "algorithm.gtpo.initial_entropy=0.5", steps=9, wait=False)
    wait_for(process, lambda: saved_step() > saved)
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    changed_after, saved = saved, saved_step()
    killed_at.add(saved)

    command = ["bash", str(train.out / "command.sh")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"step {saved + 1}/9" in result.stdout and f"step {saved}/9" not in result.stdout
    assert "step 9/9" in result.stdout
    initial = {record["step"]: record["gtpo/entropy/initial"] for record in train.records()}
    assert set(range(1, 10)) - initial.keys() <= killed_at  # verl logs a step after its checkpoint
    assert all(value == (0.5 if step > changed_after else measured.value) for step, value in initial.items())
    assert InitialEntropy.load(train.out / "checkpoints") == InitialEntropy(0.5)


def train_own(train, mode, *overrides):
    """Train with a trainer of `own_advantages`; the result, and what it printed, each blank one space."""
    modules = "recipes.verl_cpu.plugin,own_advantages"
    result = train(f"trainer.v1.trainer_mode={mode}", *overrides, VERL_USE_EXTERNAL_MODULES=modules)
    return result, " ".join((train.out / "train.log").read_text().split())


# What the error names: the advantages of the update, which are rewards, GTPO's if they were asked for, and the remedy.
NOT_ASKED = r" 0 to [\d.]+, [^;]* super\(\)\._compute_advantage; "
WRITTEN_OVER = (
    r" 0 to [\d.]+ on its response_mask, [^;]* -[\d.]+ to [\d.]+\. [^;]* `advantages` or `response_mask` .*; "
)


@pytest.mark.parametrize(
    ("mode", "entropy_from", "advantages_and_remedy"),
    [
        ("own", "old_log_prob", NOT_ASKED),
        ("renames", "old_log_prob", NOT_ASKED),
        ("writes_over", "old_log_prob", WRITTEN_OVER),
        ("writes_over", "update", WRITTEN_OVER),
    ],
    ids=["own", "renamed", "written over", "written over, entropy from update"],
)
def test_a_trainer_whose_update_has_other_advantages_ends_at_its_first_step(
    train, mode, entropy_from, advantages_and_remedy
):
    known = "algorithm.gtpo.initial_entropy=0.15"
    result, log = train_own(train, mode, known, f"algorithm.gtpo.entropy_from={entropy_from}")
    assert result.returncode
    error = rf"RuntimeError: algorithm\.adv_estimator [^;]*{advantages_and_remedy}[^;]*allow_changed_advantages=True"
    assert re.search(error, log), log[-3000:]
    assert not train.out.joinpath("metrics.jsonl").exists() or train.records() == []


def test_a_trainer_that_changes_the_advantages_on_purpose_trains(train):
    """The remedy that the error names."""
    result, log = train_own(train, "writes_over", "++algorithm.gtpo.allow_changed_advantages=True")
    assert result.returncode == 0, log[-3000:]
    assert "allow_changed_advantages=True" in log and [record["step"] for record in train.records()] == [1, 2]


def test_a_trainer_that_updates_twice_with_the_whole_batch_trains(train):
    result, log = train_own(train, "updates_twice")
    assert result.returncode == 0, log[-3000:]
    assert [(record["step"], record["own/updates"]) for record in train.records()] == [(1, 2), (2, 2)]
