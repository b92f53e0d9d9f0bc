"""Starts OpenRLHF's trainer on the CPU and reads back what it computed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GROUP, PROMPTS = 12, 4
"""Completions of a prompt, and prompts of a rollout."""

OPENRLHF = Version(version("openrlhf"))


def command(task, out, estimator, steps=3, ranks=1, **changes):
    """`python` and its arguments for a run; changes have `__` for a dot, and True for an option without a value."""
    options = {
        "actor.model_name_or_path": task / "model",
        "data.prompt_dataset": task / "train.jsonl",
        "data.input_key": "input",
        "data.max_samples": PROMPTS * steps,
        "data.max_len": 96,
        "reward.remote_url": task / "reward.py",
        "actor.num_gpus_per_node": ranks,
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.1,
        "vllm.enforce_eager": True,
        "ds.attn_implementation": "sdpa",
        "algo.advantage.estimator": estimator,
        "algo.kl.init_coef": 0,
        # High, for vLLM's weights to differ from step to step by more than rounding.
        "actor.adam.lr": 3e-3,
        "actor.lr_scheduler": "constant",
        "actor.lr_warmup_ratio": 0,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": GROUP,
        "rollout.micro_batch_size": 4,
        "rollout.max_new_tokens": 24,
        "train.batch_size": PROMPTS * GROUP,
        "train.micro_batch_size": 4,
        "ckpt.output_dir": out / "model",
        "ckpt.path": out / "checkpoints",
        "logger.tensorboard_dir": out / "tensorboard",
    }
    options |= {name.replace("__", "."): value for name, value in changes.items()}
    # vLLM returns its log-probs with these.
    if OPENRLHF >= Version("0.11.2"):
        log_probs = ["--algo.advantage.is_correction_level", "token"]
    else:
        log_probs = ["--algo.advantage.is_correction_enable"]
    words = [sys.executable, "-m", "openrlhf_cpu", "gtpo_verl.openrlhf", *log_probs]
    for name, value in options.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(str(value))
    return words


def environment(**more):
    path = os.pathsep.join(map(str, [HERE / "standins", HERE, ROOT]))
    settings = {
        "PYTHONPATH": path,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".cache/openrlhf/torch_extensions"),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # to one core otherwise, whoever has it
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_worker_niceness": "0",  # 15 otherwise: starved on a busy machine
    }
    return os.environ | settings | more


@dataclass
class Run:
    """A finished run in a folder of its own."""

    out: Path

    def recorded(self, name):
        """(time, process, content) of all that the recorder wrote under a name, in order of time."""
        paths = (self.out / "record").glob(f"{name}-*.pt")
        keyed = sorted((*map(int, path.stem.split("-")[1:]), path) for path in paths)
        return [(time, pid, torch.load(path)) for time, pid, path in keyed]

    @cached_property
    def metrics(self):
        """Of each step, by its number, what OpenRLHF's TensorBoard logger holds."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        steps = {}
        for path in (self.out / "tensorboard").glob("*/events.*"):
            events = EventAccumulator(str(path)).Reload()
            for tag in events.Tags()["scalars"]:
                for event in events.Scalars(tag):
                    steps.setdefault(event.step, {})[tag.removeprefix("train/")] = event.value
        return dict(sorted(steps.items()))


def train(task, out, estimator, broken="", **kwargs):
    """Run to the end.

    Raises:
        AssertionError: with the end of the log, if the run failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    variables = environment(OPENRLHF_CPU_RECORD=str(out / "record"), OPENRLHF_CPU_BREAK=broken)
    with open(out / "log", "w") as log:
        words = command(task, out, estimator, **kwargs)
        # The first run also compiles extensions of DeepSpeed, which took 15 minutes beside other processes.
        done = subprocess.run(words, env=variables, cwd=out, stdout=log, stderr=subprocess.STDOUT, timeout=3600)
    assert done.returncode == 0, "".join(open(out / "log").readlines()[-60:])
    return Run(out)
