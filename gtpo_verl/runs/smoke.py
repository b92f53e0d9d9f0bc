"""`SMOKE=1 bash recipes/….sh`: does all of a recipe work on this machine, and how long will the run take?

The recipe itself runs, in a folder of its own and with a small model: three steps, a checkpoint, a resumed fourth step,
an evaluation and an export of the checkpoint. The model is Qwen2.5-0.5B-Instruct if the Hugging Face Hub can be
reached, else SmolLM2-135M-Instruct (`gtpo-verl task smollm2`); SMOKE_MODEL names another, such as the recipe's own.
Without an accelerator it runs on the CPU, with vLLM's CPU build and short completions.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gtpo_verl.runs.check import DRIVER_REMEDY, unusable_gpus
from gtpo_verl.runs.launch import end_process

SMALL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_LIMIT_S = 1800
# The alarm for rollouts from other weights than are trained; bfloat16 alone gives about a tenth of this.
_PROBS_DIFF, _MOST_PROBS_DIFF = "training/rollout_probs_diff_mean", 0.02
_FAILED = "**failed**"
# Where the environment does not say otherwise.
_CPU = {
    "VERL_PLATFORM": "cpu",
    "INFER_BACKEND": "vllm",
    "TRAIN_BATCH_SIZE": "1",
    "MAX_PROMPT_LENGTH": "512",
    "MAX_RESPONSE_LENGTH": "64",
    "PPO_MAX_TOKEN_LEN_PER_GPU": "2048",
    "OFFLOAD": "False",
    "RAY_worker_niceness": "0",
}


@dataclass
class Smoke:
    """One smoke run and its results.

    Args:
        recipe (Path): the script.
        overrides: of verl's config, for the training.
        out (Path): the run's folder.
        environment: of every command.
    """

    recipe: Path
    overrides: list[str]
    out: Path
    environment: dict[str, str]
    results: list[tuple[str, str]] = field(default_factory=list)
    peak_memory_mib: int = 0

    def check(self, name: str, remedy: str, passes: Callable[[], bool | str]) -> None:
        """Record whether it passes, or a text that says why nobody knows; after a failure nothing more is tried."""
        found = passes() if self.passed else "not tried"
        self.results.append((name, found if isinstance(found, str) else "ok" if found else f"{_FAILED}: {remedy}"))

    @property
    def passed(self) -> bool:
        """Whether nothing has failed so far."""
        return not any(result.startswith(_FAILED) for _, result in self.results)

    def command(self, *command: str, **variables: str) -> bool:
        """Run a command with more variables; returns whether it succeeds in time."""
        print(f"\nsmoke: {' '.join(command)}", flush=True)
        process = subprocess.Popen(command, env={**self.environment, **variables}, start_new_session=True)
        deadline = time.monotonic() + _LIMIT_S
        try:
            while process.poll() is None and time.monotonic() < deadline:
                self.peak_memory_mib = max(self.peak_memory_mib, used_gpu_memory_mib())
                time.sleep(1)
        finally:
            end_process(process)
        return process.wait() == 0

    def train(self, steps: int) -> bool:
        """Run the recipe until this step."""
        overrides = (*self.overrides, f"trainer.total_training_steps={steps}", "trainer.save_freq=1")
        return self.command("bash", str(self.recipe), *overrides, EXTEND="1")

    def records(self) -> list[dict[str, Any]]:
        """What the run logged, by step."""
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def last_step_saved(self) -> int:
        """The step of the last complete checkpoint."""
        tracker = self.out / "checkpoints/latest_checkpointed_iteration.txt"
        return int(tracker.read_text()) if tracker.exists() else 0

    def rollout_agrees(self) -> bool | str:
        """Whether rollout and actor gave the sampled tokens the same probabilities, or why that was not measured."""
        differences = [x[_PROBS_DIFF] for x in self.records() if _PROBS_DIFF in x]
        if not differences:
            return f"not measured: verl logs no {_PROBS_DIFF} in this run, as under bypass_mode"
        return all(difference < _MOST_PROBS_DIFF for difference in differences)

    def run(self) -> bool:
        """Run all checks in order; returns whether all pass."""
        log, metrics = self.out / "train.log", self.out / "metrics.jsonl"
        data = Path(self.environment["DATA_DIR"])
        checkpoint = self.out / "checkpoints/global_step_4"
        self.check(
            "three steps of training", f"the error is above, all of verl's output in {log}", lambda: self.train(3)
        )
        self.check(
            "the rollout has the trained weights",
            f"{_PROBS_DIFF} in {metrics} is large: the rollout does not have the trained weights",
            self.rollout_agrees,
        )
        self.check(
            "a checkpoint", f"no space left in {self.out}, or it is not writable", lambda: self.last_step_saved() == 3
        )
        self.check(
            "a fourth step, resumed",
            f"the error is above, all of verl's output in {log}",
            lambda: (
                self.train(4)
                and [x["step"] for x in self.records()] == [1, 2, 3, 4]
                and self.rollout_agrees() is not False
            ),
        )
        self.check(
            "an evaluation of the checkpoint",
            "the error is above",
            lambda: self.command(
                "bash",
                "recipes/evaluate.sh",
                str(checkpoint),
                "data.val_max_samples=4",
                DATA_ROOT=str(data.parent),
                DATASETS=data.name,
                SAMPLES="2",
                LABEL="smoke/smoke/smoke",
                OUT=str(self.out / "evaluation"),
            ),
        )
        self.check(
            "an export of the checkpoint",
            "the error is above",
            lambda: self.command(
                sys.executable, "-m", "gtpo_verl", "export", str(checkpoint), str(self.out / "exported")
            ),
        )
        return self.passed

    def report(self) -> str:
        """The checks as a Markdown table; seconds per step, peak memory, and the time of the whole run."""
        lines = ["| checked | result |", "|---|---|", *(f"| {name} | {result} |" for name, result in self.results), ""]
        # The first step of each start, 1 and 4, compiles and fills caches.
        seconds = [x["timing_s/step"] for x in self.records()[1:3] if "timing_s/step" in x]
        if seconds:
            rate = sum(seconds) / len(seconds)
            steps = real_steps(json.loads((self.out / "settings.json").read_text()))
            lines.append(
                f"{rate:.1f} s per step with {self.environment['MODEL_PATH']} after the first: at this rate the whole "
                f"run of {steps} steps takes {steps * rate / 3600:.1f} hours. A larger model and longer completions "
                "take more; SMOKE_MODEL=… measures with another model."
            )
        if self.peak_memory_mib:
            lines.append(f"Peak memory of the fullest GPU: {self.peak_memory_mib / 1024:.1f} GiB.")
        return "\n".join(lines)


def real_steps(settings: dict[str, str]) -> int:
    """Steps of the recipe's whole run, from its noted settings."""
    import pyarrow.parquet as pq

    rows = pq.read_metadata(settings["data.train_files"]).num_rows
    return rows // int(settings["data.train_batch_size"]) * int(settings["trainer.total_epochs"])


def used_gpu_memory_mib() -> int:
    """Memory in use on the fullest GPU; 0 without NVIDIA's tool."""
    if not shutil.which("nvidia-smi"):
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return max((int(value) for value in used if value.isdigit()), default=0)


def reaches_hub() -> bool:
    """Whether the Hugging Face Hub has the small model, and can be reached."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", ""):
        return False
    url = f"{os.environ.get('HF_ENDPOINT', 'https://huggingface.co')}/api/models/{SMALL_MODEL}"
    try:
        with urllib.request.urlopen(url, timeout=10):
            return True
    except OSError:
        return False


def environment_of(recipe: Path, out: Path, has_gpu: bool) -> dict[str, str]:
    """The variables with which the recipe runs: small model, its data, and on a CPU short completions.

    Raises:
        ValueError: no small model is available.
    """
    given = {**({} if has_gpu else _CPU), **os.environ}
    given.pop("SMOKE", None)
    model = os.environ.get("SMOKE_MODEL")
    data = os.environ.get("DATA_DIR") or f"data/{os.environ.get('DATASET', 'gsm8k')}"
    if not model and reaches_hub():
        model = SMALL_MODEL
    elif not model:
        task = Path(".cache/smollm2-seed1").absolute()  # that of recipes/run_gtpo_cpu.sh
        make = [sys.executable, "-m", "gtpo_verl", "task", "smollm2", "--out", str(task), "--seed", "1"]
        if subprocess.run(make, check=False).returncode:
            raise ValueError(
                "cannot reach the Hugging Face Hub, and could not make SmolLM2 (see above): set SMOKE_MODEL to "
                "the folder of a small model, and DATA_DIR to a folder with train.parquet and test.parquet"
            )
        model, data = str(task / "model"), str(task)
        given["HF_HUB_OFFLINE"] = "1"
    # Few heads: a model of this size cannot be split over four GPUs.
    small = {"NNODES": "1", "ROLLOUT_TP": "1", "ACTOR_TP": "1", "TEST_FREQ": "-1"}
    return {**given, **small, "MODEL_PATH": model, "DATA_DIR": data, "OUT": str(out)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gtpo-verl smoke`."""
    parser.description = (
        "Run a few steps of a recipe with a small model, and print a table of what works on this machine."
    )
    parser.epilog = "example: gtpo-verl smoke recipes/run_gtpo_qwen.sh"
    parser.add_argument("recipe", type=Path, help="a script of recipes/; SMOKE=1 bash RECIPE does the same")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of verl's config")


def run(args: argparse.Namespace) -> int:
    """Train, resume, evaluate, export; exit status 1 where something has failed.

    Raises:
        ValueError: the recipe needs GPUs, and there are none; or there are, and torch cannot use them.
    """
    import torch

    if reason := unusable_gpus():
        raise ValueError(f"{reason}: {DRIVER_REMEDY}")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and os.environ.get("STRATEGY") == "megatron":
        raise ValueError(f"{args.recipe}: Megatron trains on GPUs only, and this machine has none")
    out = Path(os.environ.get("OUT", f"outputs/{args.recipe.stem}")).absolute()
    out = out.with_name(f"{out.name}_smoke")
    shutil.rmtree(out, ignore_errors=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends with it
    smoke = Smoke(args.recipe, args.overrides, out, environment_of(args.recipe, out, has_gpu))
    passed = smoke.run()
    print(f"\n{smoke.report()}")
    return 0 if passed else 1
