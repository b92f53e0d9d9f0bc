"""What a run of verl needs of a machine or a Ray cluster, where verl would say so only minutes later, or not at all."""

import os
import re
import shutil
import socket
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

from gtpo_verl.run_files.links import DOCS
from gtpo_verl.run_files.records import nearest_existing
from gtpo_verl.tools.check import Finding, module_spec

GB = 10**9
_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_REMOTE = re.compile(r"\w+://")
_MEGATRON = ("megatron.bridge", "megatron.core", "transformer_engine", "flash_attn")
_FILES = (
    *("reward.custom_reward_function.path", "data.custom_cls.path"),
    *(f"{_ROLLOUT}.multi_turn.tool_config_path", f"{_ROLLOUT}.agent.agent_loop_config_path"),
)
_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
DRIVER_REMEDY = "install a driver for that CUDA (580 or later for CUDA 13), or a torch built for an earlier one"
_TOKEN = "if the error is InvalidAuthToken, export RAY_AUTH_MODE=disabled in every shell that starts or uses Ray"


def findings(config: Any) -> Iterator[Finding]:
    """Yield what a run with this config of verl's PPO trainer lacks here."""
    from omegaconf import OmegaConf

    get = partial(OmegaConf.select, config)
    yield from (*_packages(get), *_files(get))
    nodes, gpus = int(get("trainer.nnodes")), int(get("trainer.n_gpus_per_node"))
    yield from _runtime_env(get)
    address = _address(get) or ("auto" if nodes > 1 else "local")
    if nodes > 1 and address == "local":
        yield Finding("Ray", f"of this machine alone, {nodes} nodes asked for", "leave ray_kwargs.ray_init.address out")
    yield from _this_machine(get, gpus) if address == "local" else _cluster(get, address, nodes, gpus)


def _packages(get: Callable) -> Iterator[Finding]:
    from gtpo_verl.verl_plugin.preflight import V1_PACKAGES

    strategy, rollout = get(f"{_ACTOR}.strategy"), get(f"{_ROLLOUT}.name")
    loggers = [chosen] if isinstance(chosen := get("trainer.logger"), str) else chosen or []
    reward = str(get("reward.custom_reward_function.path"))
    needed = {  # module -> what pip calls it, and whether this run needs it
        **{module: (pip, get("trainer.use_v1")) for module, pip in V1_PACKAGES.items()},
        **{engine: (engine, rollout == engine) for engine in ("vllm", "sglang")},
        "math_verify": ("math-verify", reward.startswith("pkg://gtpo_verl.reward")),
        "datasets": ("datasets", True),
        **{engine: (engine, strategy == engine) for engine in ("torchtitan", "veomni")},
        "peft": ("peft", get(f"{_MODEL}.lora_rank") or get(f"{_MODEL}.lora_adapter_path")),
        **{logger: (logger, logger in loggers) for logger in ("wandb", "swanlab", "tensorboard")},
    }
    if missing := [pip for module, (pip, is_wanted) in needed.items() if is_wanted and not module_spec(module)]:
        wanted = " ".join("'vllm<0.29'" if pip == "vllm" else pip for pip in missing)  # later ones refuse tied weights
        yield Finding("packages", f"no {', '.join(missing)}", f"pip install {wanted}")
    if strategy == "megatron" and (absent := [name for name in _MEGATRON if not module_spec(name)]):
        remedy = f"install verl with Megatron from its uv.lock, as {DOCS}/gpu.md says"
        yield Finding("Megatron", f"no {', '.join(absent)}", remedy)
    attention = f"{_MODEL}.override_config.attn_implementation"
    on_gpus = get("trainer.device", default="cuda") == "cuda" and strategy in ("fsdp", "fsdp2")
    wants_flash = on_gpus and get(attention, default="flash_attention_2") == "flash_attention_2"
    if wants_flash and not module_spec("flash_attn"):
        remedy = f"install the build that {DOCS}/gpu.md names, or do without: ++{attention}=sdpa"
        yield Finding("flash-attn", "not installed", remedy)


def _files(get: Callable) -> Iterator[Finding]:
    is_local = not _REMOTE.match(model := str(get(f"{_MODEL}.path"))) and (
        model[:1] in "/.~" or model.count("/") > 1 or Path(model).exists()
    )
    if is_local and not (_path(model) / "config.json").is_file():
        remedy = "give a folder with its config.json, or a name on the Hub"
        yield Finding(f"{_MODEL}.path={model}", "no model is there", remedy)
    for key in ("data.train_files", "data.val_files"):
        files = get(key) or []
        for file in [files] if isinstance(files, str) else files:
            path = str(_path(file))  # or a pattern, which datasets takes
            for one in () if _REMOTE.match(str(file)) else sorted(glob(path)) or [path]:
                yield from _data(get, f"{key}={file}", Path(one))
    for key in _FILES:
        if not (file := str(get(key) or "pkg://")).startswith("pkg://") and not _path(file).is_file():
            yield Finding(f"{key}={file}", "no such file", "give its path, absolute or from this folder")
    for key in _FOLDERS:
        if folder := get(key):
            yield from _write_protected(f"{key}={folder}", folder, "give another folder")


def _write_protected(subject: str, folder: str, remedy: str) -> Iterator[Finding]:
    if not os.access(existing := nearest_existing(_path(folder)), os.W_OK):
        yield Finding(subject, f"{existing} cannot be written to", remedy)


def _path(file: str) -> Path:
    return Path(str(file)).expanduser()


def _data(get: Callable, subject: str, path: Path) -> Iterator[Finding]:
    import pyarrow.parquet

    if not path.is_file() or not os.access(path, os.R_OK):
        yield Finding(subject, "cannot be read" if path.exists() else "no such file", "give a readable file")
    elif path.suffix == ".parquet" and not get("data.custom_cls.path"):
        try:
            columns = set(pyarrow.parquet.read_schema(path).names)
        except (OSError, ValueError) as error:
            yield Finding(subject, "no parquet file", f"make it anew: {error}")
            return
        read = [get("data.prompt_key", default="prompt"), get("data.reward_fn_key", default="data_source")]
        read += [] if get("reward.reward_model.enable") else ["reward_model"]
        if missing := [name for name in read if name not in columns]:
            says = f"has no column {' and no '.join(missing)}, only {', '.join(sorted(columns))}"
            yield Finding(subject, says, "make it as verl's own preprocessing does, or name its columns")


def is_separate_async(get: Callable) -> bool:
    """Whether this is verl's V1 trainer whose rollout has GPUs of its own."""
    mode = get("trainer.v1.trainer_mode") if get("trainer.use_v1") and get("async_training") is None else ""
    return mode == "separate_async"


def pools(get: Callable) -> dict[str, str]:
    """Who has GPUs beside the trainer's: its section of the config."""
    reward, hybrid = "reward.reward_model", get("actor_rollout_ref.hybrid_engine", default=True)
    asked = {
        ("teacher", "distillation"): get("distillation.enabled"),
        ("reward model", reward): get(f"{reward}.enable") and get(f"{reward}.enable_resource_pool"),
        ("rollout", "rollout"): get("rollout.n_gpus_per_node") and not hybrid,
        ("rollout", _ROLLOUT): is_separate_async(get),
    }
    return dict(pool for pool, is_asked_for in asked.items() if is_asked_for)


def unusable_gpus() -> str:
    """Return why torch cannot use the GPUs that the driver counts, such as a driver too old for it; else empty."""
    import torch

    if not torch.cuda.device_count() or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        first_line = str(error).splitlines()[0]
        return f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and cannot use the GPUs: {first_line}"
    return ""


def _scratch(get: Callable) -> Iterator[Finding]:
    """Yield folders outside the run's own in which Ray and verl's data set write, and cannot."""
    from huggingface_hub.constants import HF_HOME

    folders = {"RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"}
    if not get("data.custom_cls.path"):
        folders["HF_DATASETS_CACHE"] = os.environ.get("HF_DATASETS_CACHE") or f"{HF_HOME}/datasets"
    for variable, folder in folders.items():
        yield from _write_protected(variable, folder, f"export {variable}=ANOTHER_FOLDER")
    token = Path(os.path.expanduser("~/.ray/auth_token"))
    if os.environ.get("RAY_AUTH_MODE") != "disabled" and not os.access(nearest_existing(token), os.W_OK):
        yield Finding(str(token), "Ray may need it, and cannot write it", advice="export RAY_AUTH_MODE=disabled")


def _runtime_env(get: Callable) -> Iterator[Finding]:
    from omegaconf import OmegaConf
    from ray.runtime_env import RuntimeEnv

    given: Any = OmegaConf.to_container(get(key := "ray_kwargs.ray_init.runtime_env") or OmegaConf.create())
    try:
        RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        quote = f"quote a number: ++{key}.env_vars.NAME=\\'1\\'" if "env_vars" in str(error) else "correct it"
        yield Finding(key, f"Ray refuses it: {error}", quote)


def _address(get: Callable) -> str | None:
    """Of the Ray that `ray.init` would join, in its order; None where nothing names one."""
    from ray._private.utils import read_ray_address

    given = get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return given or read_ray_address(get("ray_kwargs.ray_init._temp_dir"))


def _this_machine(get: Callable, gpus: int) -> Iterator[Finding]:
    import torch
    from ray._private.utils import get_num_cpus

    yield from _scratch(get)
    beside = {name: int(get(f"{section}.n_gpus_per_node") or 0) for name, section in pools(get).items()}
    if get("trainer.device", default="cuda") == "cuda":
        found, wanted = torch.cuda.device_count(), gpus + sum(beside.values())
        if found < wanted:
            remedy = f"set trainer.n_gpus_per_node to at most {found}" if found else "run on a machine with GPUs"
            says = "".join(f", {number} of them for the {name}" for name, number in beside.items())
            yield Finding("GPUs", f"{found} here, {wanted} asked for{says}", remedy)
        if reason := unusable_gpus():
            yield Finding("driver", reason, DRIVER_REMEDY)
        if gpus > 1 and Path("/dev/shm").is_dir() and (size := shutil.disk_usage("/dev/shm").total) < GB:
            remedy = "give the container more, as docker run --shm-size=16g: NCCL and Ray share it between processes"
            yield Finding("shared memory", f"{size / GB:.1f} GB", remedy)
    machine, key = get_num_cpus(), "ray_kwargs.ray_init.num_cpus"
    cpus, needed = int(get(key) or machine), _cpus_needed(get, gpus)
    if cpus < needed:
        remedy = f"set {key}={needed}, a number that Ray only uses for scheduling"
        spare = int(get(_UNITS) or 0) - 1 if get("trainer.use_v1") else 0
        remedy += f", or {_UNITS}=1" if spare > 0 and needed - spare <= cpus else ""
        yield Finding("CPUs", f"Ray has {cpus} (the machine {machine}), verl asks for {needed}", remedy)


def _cpus_needed(get: Callable, gpus: int) -> int:
    """CPUs that verl asks Ray for before its first step: one for the task runner, two with each GPU of a rollout's own,
    three with each other GPU."""
    units = int(get(_UNITS) or 0) if get("trainer.use_v1") else 0
    beside = 0
    for name, section in pools(get).items():
        own = int(get(f"{section}.nnodes") or 0) * int(get(f"{section}.n_gpus_per_node") or 0)
        beside += own * (2 if name == "rollout" else 3)
    return 1 + 3 * gpus + beside + (units + 1 if units else 0)


def _cluster(get: Callable, address: str, nodes: int, gpus: int) -> Iterator[Finding]:
    """Ask the head of the cluster that the run would join, without joining it."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray.autoscaler.v2.sdk import get_cluster_status

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
        own = "" if nodes > 1 else "add ++ray_kwargs.ray_init.address=local for a Ray of its own, or "
        yield Finding("Ray cluster", says, f"{own}start Ray on every node first ({DOCS}/gpu.md); {_TOKEN}")
        return
    members = [node.total_resources() for node in (*status.active_nodes, *status.idle_nodes)]
    large_enough = sum(member.get("GPU", member.get("NPU", 0)) >= gpus for member in members)
    if large_enough < nodes:
        says = f"{large_enough} of {len(members)} nodes at {address} have {gpus} GPUs, {nodes} asked for"
        remedy = f"start Ray on every node ({DOCS}/gpu.md), or lower trainer.nnodes; {_TOKEN}"
        yield Finding("Ray cluster", says, remedy)
    cpus, needed = sum(member.get("CPU", 0) for member in members), _cpus_needed(get, nodes * gpus)
    if cpus < needed:
        remedy = "start Ray with a larger --num-cpus, a number that it only uses for scheduling"
        yield Finding("CPUs", f"Ray has {cpus:.0f}, verl asks for {needed}", remedy)
