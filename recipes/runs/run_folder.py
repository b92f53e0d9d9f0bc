"""The files in the folder of a run of verl, and whether another start may resume it.

settings.json   the settings that determine what is learned; a start with others may not resume its checkpoints
command.sh      the resolved command with its environment variables; can be run again
metrics.jsonl   one flat object per step, from verl's file logger, over all starts of the run
run_id          the id with which wandb and SwanLab continue the run's curves
lock            held while the run is active, even if its launcher was killed
"""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
import uuid
import zipfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

from gtpo_verl.cli import discard
from gtpo_verl.run.records import atomic_write, differences, read_record
from recipes.claim import claim

# Of the trainer section only these decide what is learned, or whether the files of a checkpoint can be read.
_HELD_OF_TRAINER = (
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.v1.*",
)
_EXTENDED = {"trainer.total_epochs", "trainer.total_training_steps"}
# Memory, speed and what is logged: what one changes after a run that ran out of memory or time.
_FREE = (
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "algorithm.gtpo.dump_*",
    "algorithm.gtpo.initial_entropy",
    "data.val_files",
    "global_profiler.*",
    "hydra.*",
    "ray_kwargs.*",
    "transfer_queue.*",
    "*.attn_implementation",
    "*.disable_log_stats",
    "*.enable_gradient_checkpointing",
    "*.enforce_eager",
    "*.entropy_checkpointing",
    "*.free_cache_engine",
    "*.gpu_memory_utilization",
    "*.layered_summon",
    "*.max_num_batched_tokens",
    "*.max_num_seqs",
    "*.recompute_*",
    "*.save_lora_only",
    "*.update_weights_bucket_megabytes",
    "*.use_fused_kernels",
    "*.use_shm",
    "*.use_torch_compile",
    "*max_token_len_per_gpu",
    "*micro_batch_size_per_gpu",
    "*num_workers",
    "*offload",
    "*offload_policy",
)
_TRACKER = "latest_checkpointed_iteration.txt"  # verl's, with the number of the last checkpoint
_DYING_S = 15.0  # how long a process that was just killed may hold a folder
# Variables that a run reads; its command is written without those that `_SECRET` matches.
_VARIABLE = re.compile(
    r"(VERL|RAY(?!_JOB|_RAYLET)|HF|MODELSCOPE|NCCL|GLOO|CUDA|HIP|VLLM|SGLANG|WANDB|SWANLAB|TORCH|PYTORCH|TRITON|OMP"
    r"|TOKENIZERS)_\w+|PYTHON(PATH|HASHSEED)"
)
# What a cluster gives to one job, and gives anew to the next.
_OF_AN_ALLOCATION = re.compile(r"RAY_ADDRESS|\w+_VISIBLE_DEVICES")
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


def overrides(command: list[str]) -> dict[str, str]:
    """Return the values that the Hydra overrides in a command give: the last one of each key, as it is written."""
    values: dict[str, str] = {}
    for word in command:
        key, equals, value = word.partition("=")
        if key.startswith("~"):  # Hydra deletes this key; a value behind it says what it must have been
            values.pop(key[1:], None)
        elif equals and not key.startswith("-"):
            values[key.lstrip("+")] = value
    return values


def quoted(value: str) -> str:
    """Return a text as a value of a Hydra override, whatever its characters."""
    return QuotedString(value, Quote.single).with_quotes()


def unquoted(value: str) -> str:
    """Return what Hydra reads of a value, if that is one text in single quotes; any other as it is."""
    is_quoted = re.fullmatch(r"'([^'\\]|\\.)*'", value, re.DOTALL)
    if not is_quoted:
        return value
    return str(OverridesParser.create().parse_override(f"key={value}").value())


def settings(command: list[str]) -> dict[str, str]:
    """Return the overrides that a resumed run must have in common with the run of its checkpoint, `~key` for a key that
    is deleted."""
    held = {key: value for key, value in overrides(command).items() if _is_held(key)}
    for word in command:
        deleted = word.partition("=")[0]
        if deleted.startswith("~") and _is_held(deleted[1:]):
            held[deleted] = "deleted"
    return held


def _is_held(key: str) -> bool:
    if key.startswith("trainer."):
        return any(fnmatchcase(key, pattern) for pattern in _HELD_OF_TRAINER)
    return not any(fnmatchcase(key, pattern) for pattern in _FREE)


def lock(out: Path) -> TextIO:
    """Keep other starts out of the folder, until the file returned is closed here and in the processes that got it.

    Raises:
        ValueError: a run is active there.
    """
    file = (out / "lock").open("a+")
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                file.seek(0)
                raise ValueError(
                    f"another run is active in {out} (process {file.read().strip() or '?'}): stop it, or give another "
                    "folder (--out; the recipes: OUT)"
                ) from error
            time.sleep(0.1)
        except OSError as error:
            print(f"{file.name} cannot be locked ({error}): do not start a second run in this folder", flush=True)
            return file


def hold_settings(command: list[str], out: Path, extend: bool = False) -> None:
    """Record the run's settings, which must be those of the run whose checkpoint it resumes.

    Without a checkpoint other settings begin another run, and the metrics and the run id of the earlier one are kept
    under other names.

    Args:
        extend: allow another number of epochs and steps.

    Raises:
        ValueError: the folder has a checkpoint of a run with other settings, or had one that is gone; or the record is
            damaged.
    """
    record = out / "settings.json"
    present = settings(command)
    remedy = (
        "give another folder (--out; the recipes: OUT); for other numbers of steps --extend (the recipes: EXTEND=1); "
        f"or remove {record} to resume its checkpoint anyway"
    )
    if not has_checkpoint(command, out):
        if record.exists() and differences(read_record(record), present):
            suffix = record.stat().st_mtime_ns  # when the earlier run was recorded
            metrics = out / "metrics.jsonl"
            if metrics.exists():
                print(f"what an earlier run with other settings logged is in {metrics}.{suffix} now", flush=True)
            for path in (*out.glob("*metrics.jsonl"), *out.glob("run_id")):
                path.replace(out / f"{path.name}.{suffix}")
        record.unlink(missing_ok=True)
    elif extend and record.exists():
        # But for its length the run must be the recorded one; the record is then written anew, with the new length.
        as_recorded = {key: value for key, value in present.items() if key not in _EXTENDED}
        as_recorded |= {key: value for key, value in read_record(record).items() if key in _EXTENDED}
        claim(record, as_recorded, remedy)
        record.unlink()
    claim(record, present, remedy)


def has_checkpoint(command: list[str], out: Path) -> bool:
    """Return whether verl would resume from a checkpoint: a file names the last whole one.

    True under `trainer.resume_mode=disable` too: until the new run saves, a later start would resume the old one's.

    Raises:
        ValueError: that checkpoint is missing, and verl would silently start from the beginning; or one of its files
            was cut off, which verl's error would not name.
    """
    last = _last_checkpoint(command, out)
    if last and overrides(command).get("trainer.resume_mode", "auto") == "auto":
        if not _has_weights(last):
            tracker = last.with_name(_TRACKER)
            raise ValueError(f"{tracker} names {last.name}, whose weights are missing {_other_checkpoints(last)}")
        damaged = _cut_off(last)
        if damaged:
            raise ValueError(f"{damaged} is cut off {_other_checkpoints(last)}")
    return last is not None


def unreadable_note(command: list[str], out: Path, printed: str) -> str:
    """Return which checkpoint torch could not read, since its error does not name it; empty where it could.

    Args:
        printed: what the run printed.
    """
    last = _last_checkpoint(command, out)
    if "PytorchStreamReader failed" not in printed or last is None:
        return ""
    return f"; a file of {last} is damaged {_other_checkpoints(last)}"


def _other_checkpoints(last: Path) -> str:
    """Return the end of a message: which other checkpoints are whole than the one verl would resume, and what to do."""
    others = set(last.parent.glob("global_step_*")) - {last}
    by_time = sorted(others, key=lambda path: path.stat().st_mtime)
    names = [path.name for path in by_time if _has_weights(path) and not _cut_off(path)]
    whole = ", ".join(names) or "none"
    return (
        f"(whole checkpoints besides: {whole}): write the number of a whole one into {last.with_name(_TRACKER)}, or "
        "remove that file to start from the beginning"
    )


def _last_checkpoint(command: list[str], out: Path) -> Path | None:
    """Return the checkpoint that verl's file names, whether or not it is there; None if there is no such file.

    Raises:
        ValueError: the file holds something else than a number.
    """
    folder = overrides(command).get("trainer.default_local_dir", str(out / "checkpoints"))
    tracker = Path(unquoted(folder), _TRACKER)
    if not tracker.exists():
        return None
    number = tracker.read_bytes().decode(errors="replace").strip()
    if not re.fullmatch(r"[0-9]*", number):
        raise ValueError(
            f"{tracker} must hold the number of a checkpoint, not {number[:60]!r}: write that of a whole one into it, "
            "or remove that file to start from the beginning"
        )
    return tracker.with_name(f"global_step_{number}")


def _has_weights(checkpoint: Path) -> bool:
    """Return whether a checkpoint has weights: of an old one verl leaves `data.pt` and our `exported` only."""
    # PPO's, and SFT's under Megatron and FSDP
    return any((checkpoint / name).is_dir() for name in ("actor", "model", "huggingface"))


def _cut_off(checkpoint: Path) -> Path | None:
    """Return a file of torch.save that lacks its end, where a zip archive has its table of contents."""
    for path in sorted(checkpoint.rglob("*.pt")):
        if not zipfile.is_zipfile(path):
            return path
    return None


def write_command(command: list[str], out: Path, options: list[str]) -> None:
    """Write `command.sh`, which starts this command again as it was, in this directory, with these variables.

    It runs on the cluster or the GPUs that are given to it, if any are.
    """
    lines = [
        "#!/usr/bin/env bash",
        "# The resolved command of this run; resumes from its last checkpoint.",
        "set -euo pipefail",
        f"cd {shlex.quote(os.getcwd())}",
    ]
    for name in sorted(os.environ):
        if _VARIABLE.fullmatch(name) and not _SECRET.search(name):
            lines.append(f"export {name}={_value(name)}")

    run = [sys.executable, "-m", "recipes", "run", "--out", str(out.absolute()), *options, "--"]
    program = shutil.which(command[0]) or command[0]
    words = [shlex.quote(word) for word in [program, *command[1:]]]
    lines.append(" \\\n    ".join([shlex.join(run), *words]))
    atomic_write(out / "command.sh", "\n".join(lines) + "\n")  # a shell that reads the old one goes on reading it


def _value(name: str) -> str:
    """Return the value of a variable for the shell; one of an allocation is the default of what the shell has."""
    value = shlex.quote(os.environ[name])
    if _OF_AN_ALLOCATION.fullmatch(name):
        return f"${{{name}-{value}}}"
    return value


def logger_variables(out: Path) -> dict[str, str]:
    """Return the variables by which verl's loggers know where to write, and which run to continue.

    Variables that are set already keep their values.

    Raises:
        ValueError: `run_id` holds no id.
    """
    record = out / "run_id"
    if not record.exists() or not record.stat().st_size:  # of a start on a full disk
        atomic_write(record, uuid.uuid4().hex[:21] + "\n")  # SwanLab takes exactly 21 characters
    run_id = record.read_bytes().decode(errors="replace").strip()
    if not re.fullmatch(r"[!-~]+", run_id):
        raise ValueError(f"{record} holds no id of a run, but {run_id[:60]!r}: restore it, or remove it for a new id")
    variables = {
        "TENSORBOARD_DIR": str(out.absolute() / "tensorboard"),
        "SWANLAB_LOG_DIR": str(out.absolute() / "swanlab"),
        "SWANLAB_RESUME": "allow",
        "SWANLAB_RUN_ID": run_id,
        "WANDB_DIR": str(out.absolute()),
        "WANDB_RESUME": "allow",
        "WANDB_RUN_ID": run_id,
    }
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line of progress; where a terminal is gone, or a disk full, nothing more is said, and the run goes on."""
    try:
        print(line, file=file, flush=True)
    except OSError:
        discard(file or sys.stdout)


class Tail:
    """Reads a file that grows, from byte `start` on."""

    def __init__(self, path: Path, start: int = 0):
        self._path = path
        self._at = start

    def lines(self) -> list[str]:
        """Return the complete lines since the last look.

        There are none while the file does not exist. The last line, which a killed run has left half written, is not
        complete.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:  # opened anew: only then NFS shows what others wrote
            file.seek(self._at)
            data = file.read()
        complete = data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1]
        self._at += len(complete)
        return re.split(r"\r\n?|\n", complete.decode(errors="replace"))[:-1]


class MetricsFile:
    """Writes `metrics.jsonl`: verl's file log as it grows, flattened; steps that a resumed run repeats are replaced.

    The log of a run that begins anew, or goes back, stays as `metrics.jsonl.N`.

    Args:
        source (Path): what verl's file logger writes anew at each start. What a launcher that was killed has not read
            of an earlier one comes first.
        target (Path): one object per step, all keys at the top level.
        goes_back (bool): whether the run was told from where to go on.
    """

    def __init__(self, source: Path, target: Path, goes_back: bool = False):
        self.target = target
        self._goes_back = goes_back
        self.records = [_read_step(line, target) for line in Tail(target).lines()]

        # What is left of an earlier start, and then this start's.
        self._is_new = False  # whether this start's log is read
        self._begun = False  # whether a step of the log has been read
        self._tail = Tail(source)
        list(self.poll())
        source.unlink(missing_ok=True)
        self._is_new = True
        self._begun = False
        self._tail = Tail(source)

    def poll(self) -> Iterator[dict[str, Any]]:
        """Yield the steps logged since the last call; one that verl logs in two parts comes again, then whole."""
        for line in self._tail.lines():
            record = _logged_step(line)
            if record is None:  # a full disk cuts a line off, and the next one is joined to it
                say(f"{self.target}: left out a line of verl's log that was cut off, or is no step", sys.stderr)
                continue
            writes_anew = not self._begun
            if not self._begun:
                self._drop_repeated(record)
            if self.records and self.records[-1]["step"] == record["step"]:
                record = self.records.pop() | record
                writes_anew = True
            self.records.append(record)
            self._begun = True
            if writes_anew:  # a run that is killed meanwhile keeps its log
                atomic_write(self.target, "".join(json.dumps(step) + "\n" for step in self.records))
            else:
                with self.target.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            yield record

    def _drop_repeated(self, first: dict[str, Any]) -> None:
        """Drop the records of the steps that are logged again, of which the log's `first` is one."""
        # verl validates before it goes on, under the number of the step that it goes on from.
        is_validation = all(key == "step" or key.startswith("val") for key in first)
        next_step = first["step"] + 1 if is_validation else first["step"]
        kept = [record for record in self.records if record["step"] < next_step]
        begins_anew = not any(record["step"] for record in kept)  # 0 is a validation before training
        if self._is_new and len(kept) < len(self.records) and (self._goes_back or begins_anew):
            before = shutil.copy(self.target, f"{self.target}.{time.time_ns()}")
            say(f"what was logged before is in {before} now")
        self.records = [] if begins_anew else kept


def _logged_step(line: str) -> dict[str, Any] | None:
    """Return a line of verl's file logger as a flat record; None if it is not a step."""
    try:
        logged = json.loads(line)
    except (RecursionError, ValueError):
        return None
    if not isinstance(logged, dict) or type(logged.get("step")) is not int or not isinstance(logged.get("data"), dict):
        return None
    record = {"step": logged["step"]}
    for key, value in logged["data"].items():
        record[key] = math.nan if value is None else value  # verl writes null for NaN
    return record


def _read_step(line: str, path: Path) -> dict[str, Any]:
    """Return the step in a line of `metrics.jsonl`, which is `path`.

    Raises:
        ValueError: the line holds no step.
    """
    try:
        record = json.loads(line)
    except (RecursionError, ValueError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError(f"{path} has a line that is not a step of a run ({line[:60]!r}): restore or remove it")
    return record
