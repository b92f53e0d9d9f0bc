"""What a run of verl needs of a machine or a Ray cluster, where verl would say so only minutes later, or not at all."""

import json
import os
import re
import shutil
import socket
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

from gtpo_verl.links import DOCS
from gtpo_verl.run.records import nearest_existing
from gtpo_verl.tools.check.finding import Finding, module_spec, problem
from gtpo_verl.verl_plugin.problems import V1_PACKAGES
from gtpo_verl.verl_plugin.resume import missing_checkpoint
from gtpo_verl.verl_plugin.run_config import select

GB = 10**9
_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_REMOTE = re.compile(r"\w+://")
_MEGATRON = ("megatron.bridge", "megatron.core", "transformer_engine", "flash_attn")
_REWARD_FILE = "reward.custom_reward_function.path"
_FILES = (
    _REWARD_FILE,
    "data.custom_cls.path",
    f"{_ROLLOUT}.multi_turn.tool_config_path",
    f"{_ROLLOUT}.agent.agent_loop_config_path",
)
_FOLDERS = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir")
DRIVER_REMEDY = "install a driver for that CUDA (580 or later for CUDA 13), or a torch built for an earlier one"
_TOKEN = "if the error is InvalidAuthToken, export RAY_AUTH_MODE=disabled in every shell that starts or uses Ray"
# From this version on vLLM refuses the weights of models that tie their embeddings.
_FIRST_VLLM_WITHOUT_TIED = "0.29"


def findings(config: Any) -> Iterator[Finding]:
    """Yield what a run with this config of verl's PPO trainer lacks here."""
    get = partial(select, config)
    yield from _packages(get)
    yield from _engine_packages(get)
    yield from _tied_embeddings(get)
    yield from _model(get)
    yield from _files(get)
    for text in missing_checkpoint(config):
        yield problem(text)
    yield from _runtime_env(get)
    nodes = get("trainer.nnodes")
    gpus = get("trainer.n_gpus_per_node")
    address = _address(get) or ("auto" if nodes > 1 else "local")
    if nodes > 1 and address == "local":
        yield Finding("Ray", f"of this machine alone, {nodes} nodes asked for", "leave ray_kwargs.ray_init.address out")
    if address == "local":
        yield from _this_machine(get, gpus)
    else:
        yield from _cluster(get, address, nodes, gpus)


def _packages(get: Callable) -> Iterator[Finding]:
    """Yield the packages that a run imports and that are not installed, with the one line that installs them."""
    rollout = get(f"{_ROLLOUT}.name")
    strategy = get(f"{_ACTOR}.strategy")
    loggers = get("trainer.logger") or []
    if isinstance(loggers, str):
        loggers = [loggers]
    # Which module, what pip calls it, and whether this run needs it.
    needed = [(module, pip, get("trainer.use_v1")) for module, pip in V1_PACKAGES.items()]
    needed += [(engine, engine, rollout == engine) for engine in ("vllm", "sglang")]
    needed.append(("math_verify", "math-verify", str(get(_REWARD_FILE)).startswith("pkg://gtpo_verl.reward")))
    needed.append(("datasets", "datasets", True))
    needed += [(engine, engine, strategy == engine) for engine in ("torchtitan", "veomni")]
    needed.append(("peft", "peft", get(f"{_MODEL}.lora_rank") or get(f"{_MODEL}.lora_adapter_path")))
    needed += [(logger, logger, logger in loggers) for logger in ("wandb", "swanlab", "tensorboard")]
    missing = [pip for module, pip, is_needed in needed if is_needed and not module_spec(module)]
    if missing:
        requirements = {"vllm": f"'vllm<{_FIRST_VLLM_WITHOUT_TIED}'"}
        wanted = [requirements.get(pip, pip) for pip in missing]
        yield Finding("packages", f"no {', '.join(missing)}", f"pip install {' '.join(wanted)}")


def _engine_packages(get: Callable) -> Iterator[Finding]:
    """Yield what an engine of training needs that pip alone does not install."""
    strategy = get(f"{_ACTOR}.strategy")
    if strategy == "megatron":
        absent = [name for name in _MEGATRON if not module_spec(name)]
        if absent:
            remedy = f"install verl with Megatron from its uv.lock, as {DOCS}/gpu.md says"
            yield Finding("Megatron", f"no {', '.join(absent)}", remedy)
    attention = f"{_MODEL}.override_config.attn_implementation"
    is_on_gpus = get("trainer.device", default="cuda") == "cuda" and strategy in ("fsdp", "fsdp2")
    wants_flash = is_on_gpus and get(attention, default="flash_attention_2") == "flash_attention_2"
    if wants_flash and not module_spec("flash_attn"):
        remedy = f"install the build that {DOCS}/gpu.md names, or do without: ++{attention}=sdpa"
        yield Finding("flash-attn", "not installed", remedy)


def _tied_embeddings(get: Callable) -> Iterator[Finding]:
    """Yield a vLLM that refuses the weights of the model, which ties its embeddings (verl #8014).

    It refuses whole and merged weights. Adapters have no embeddings.
    """
    if get(f"{_ROLLOUT}.name") != "vllm" or not _ties_embeddings(get):
        return
    has_adapters = get(f"{_MODEL}.lora_rank") or get(f"{_MODEL}.lora.rank")
    if has_adapters and not get(f"{_MODEL}.lora.merge"):
        return
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return
    if Version(installed) >= Version(_FIRST_VLLM_WITHOUT_TIED):
        message = f"{installed} refuses the weights of a model that ties its embeddings (verl #8014)"
        yield Finding("vllm", message, f"pip install 'vllm<{_FIRST_VLLM_WITHOUT_TIED}'")


def _ties_embeddings(get: Callable) -> bool:
    """Return whether the config.json of a model in a folder here says so, for the whole model or its text model."""
    file = _path(get(f"{_MODEL}.path")) / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    text_config = config.get("text_config")
    parts = [config]
    if isinstance(text_config, dict):
        parts.append(text_config)
    return any(part.get("tie_word_embeddings") is True for part in parts)


def _model(get: Callable) -> Iterator[Finding]:
    model = str(get(f"{_MODEL}.path"))
    is_folder = model[:1] in "/.~" or model.count("/") > 1 or Path(model).exists()
    if is_folder and not _REMOTE.match(model) and not (_path(model) / "config.json").is_file():
        remedy = "give a folder with its config.json, or a name on the Hub"
        yield Finding(f"{_MODEL}.path={model}", "no model is there", remedy)


def _files(get: Callable) -> Iterator[Finding]:
    for key in ("data.train_files", "data.val_files"):
        files = get(key) or []
        if isinstance(files, str):
            files = [files]
        for file in files:
            if _REMOTE.match(str(file)):
                continue
            pattern = str(_path(file))  # which the library datasets takes for a path too
            for path in sorted(glob(pattern)) or [pattern]:
                yield from _data_file(get, f"{key}={file}", Path(path))
    for key in _FILES:
        file = get(key)
        if file and not str(file).startswith("pkg://") and not _path(file).is_file():
            yield Finding(f"{key}={file}", "no such file", "give its path, absolute or from this folder")
    for key in _FOLDERS:
        folder = get(key)
        if folder:
            yield from _write_protected(f"{key}={folder}", folder, "give another folder")


def _write_protected(subject: str, folder: Any, remedy: str) -> Iterator[Finding]:
    existing = nearest_existing(_path(folder))
    if not os.access(existing, os.W_OK):
        yield Finding(subject, f"{existing} cannot be written to", remedy)


def _path(file: Any) -> Path:
    return Path(str(file)).expanduser()


def _data_file(get: Callable, subject: str, path: Path) -> Iterator[Finding]:
    import pyarrow.parquet

    if not path.exists():
        yield Finding(subject, "no such file", "give a readable file")
        return
    if not path.is_file() or not os.access(path, os.R_OK):
        yield Finding(subject, "cannot be read", "give a readable file")
        return
    if path.suffix != ".parquet" or get("data.custom_cls.path"):
        return
    try:
        columns = set(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        yield Finding(subject, "no parquet file", f"make it anew: {error}")
        return
    needed = [get("data.prompt_key", default="prompt"), get("data.reward_fn_key", default="data_source")]
    if not get("reward.reward_model.enable"):
        needed.append("reward_model")
    missing = [str(name) for name in needed if name not in columns]
    if missing:
        message = f"has no column {' and no '.join(missing)}, only {', '.join(sorted(columns))}"
        yield Finding(subject, message, "make it as verl's own preprocessing does, or name its columns")


def is_separate_async(get: Callable) -> bool:
    """Return whether this is verl's V1 trainer whose rollout has GPUs of its own."""
    is_v1 = get("trainer.use_v1") and get("async_training") is None
    return bool(is_v1) and get("trainer.v1.trainer_mode") == "separate_async"


def pools(get: Callable) -> dict[str, str]:
    """Return what has GPUs of its own beside the trainer's, each with its section of the config."""
    sections = {}
    if get("distillation.enabled"):
        sections["teacher"] = "distillation"
    reward = "reward.reward_model"
    if get(f"{reward}.enable") and get(f"{reward}.enable_resource_pool"):
        sections["reward model"] = reward
    # fully_async and one_step_off have a section `rollout` for it, V1's separate_async has keys in the rollout's own.
    if get("rollout.n_gpus_per_node") and not get("actor_rollout_ref.hybrid_engine", default=True):
        sections["rollout"] = "rollout"
    if is_separate_async(get):
        sections["rollout"] = _ROLLOUT
    return sections


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
    """Yield folders outside the run's own that Ray and verl's data set have to write to, and cannot."""
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
    """Yield why Ray refuses the environment that the run gives its workers."""
    from omegaconf import OmegaConf
    from ray.runtime_env import RuntimeEnv

    key = "ray_kwargs.ray_init.runtime_env"
    section = get(key)
    if not OmegaConf.is_dict(section):
        return
    given: Any = OmegaConf.to_container(section)
    try:
        RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        quote = f"quote a number: ++{key}.env_vars.NAME=\\'1\\'" if "env_vars" in str(error) else "correct it"
        yield Finding(key, f"Ray refuses it: {error}", quote)


def _address(get: Callable) -> str | None:
    """Return the address of the Ray that `ray.init` would join; None if nothing names one.

    `ray.init` looks for it in this order: its argument, the environment, the record of a Ray that runs here.
    """
    from ray._private.utils import read_ray_address

    given = get("ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return str(given) if given else read_ray_address(get("ray_kwargs.ray_init._temp_dir"))


def _this_machine(get: Callable, gpus: int) -> Iterator[Finding]:
    yield from _scratch(get)
    if get("trainer.device", default="cuda") == "cuda":
        yield from _missing_gpus(get, gpus)
    yield from _missing_cpus(get, gpus)


def _missing_gpus(get: Callable, gpus: int) -> Iterator[Finding]:
    """Yield that this machine has fewer GPUs than the trainer's `gpus` and those of others, or cannot use them."""
    import torch

    of_others = {name: get(f"{section}.n_gpus_per_node") or 0 for name, section in pools(get).items()}
    available = torch.cuda.device_count()
    wanted = gpus + sum(of_others.values())
    if available < wanted:
        message = f"{available} here, {wanted} asked for"
        for name, number in of_others.items():
            message += f", {number} of them for the {name}"
        remedy = f"set trainer.n_gpus_per_node to at most {available}" if available else "run on a machine with GPUs"
        yield Finding("GPUs", message, remedy)
    reason = unusable_gpus()
    if reason:
        yield Finding("driver", reason, DRIVER_REMEDY)
    if gpus > 1 and Path("/dev/shm").is_dir():
        size = shutil.disk_usage("/dev/shm").total
        if size < GB:
            remedy = "give the container more, as docker run --shm-size=16g: NCCL and Ray share it between processes"
            yield Finding("shared memory", f"{size / GB:.1f} GB", remedy)


def _missing_cpus(get: Callable, gpus: int) -> Iterator[Finding]:
    """Yield that Ray has fewer CPUs to schedule on this machine than verl asks for."""
    from ray._private.utils import get_num_cpus

    key = "ray_kwargs.ray_init.num_cpus"
    machine = get_num_cpus()
    given = get(key)
    cpus = given if isinstance(given, int | float) else machine
    needed = _cpus_needed(get, gpus)
    if cpus >= needed:
        return
    remedy = f"set {key}={needed}, a number that Ray only uses for scheduling"
    # Storage units beyond the first can be spared.
    spare = _storage_units(get) - 1
    if spare > 0 and needed - spare <= cpus:
        remedy += f", or {_UNITS}=1"
    yield Finding("CPUs", f"Ray has {cpus} (the machine {machine}), verl asks for {needed}", remedy)


def _storage_units(get: Callable) -> int:
    """Return in how many processes TransferQueue, which only the V1 trainer starts, keeps the completions."""
    units = get(_UNITS) if get("trainer.use_v1") else 0
    return units if isinstance(units, int) else 0


def _cpus_needed(get: Callable, gpus: int) -> int:
    """Return how many CPUs verl asks Ray for before its first step.

    One for the task runner, two with each GPU of a rollout's own, three with each other GPU, and one for each storage
    unit of TransferQueue and for its controller.
    """
    cpus = 1 + 3 * gpus
    for name, section in pools(get).items():
        gpus_of_pool = (get(f"{section}.nnodes") or 0) * (get(f"{section}.n_gpus_per_node") or 0)
        cpus += gpus_of_pool * (2 if name == "rollout" else 3)
    units = _storage_units(get)
    if units:
        cpus += units + 1
    return cpus


def _cluster(get: Callable, address: str, nodes: int, gpus: int) -> Iterator[Finding]:
    """Yield what the Ray cluster that the run would join lacks; its head is asked, and the cluster is not joined."""
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
        message = f"not reached at {address}: {textwrap.shorten(str(error), 120)}"
        remedy = f"start Ray on every node first ({DOCS}/gpu.md); {_TOKEN}"
        if nodes <= 1:
            remedy = f"add ++ray_kwargs.ray_init.address=local for a Ray of its own, or {remedy}"
        yield Finding("Ray cluster", message, remedy)
        return
    members = [node.total_resources() for node in (*status.active_nodes, *status.idle_nodes)]
    large_enough = sum(1 for member in members if member.get("GPU", member.get("NPU", 0)) >= gpus)
    if large_enough < nodes:
        message = f"{large_enough} of {len(members)} nodes at {address} have {gpus} GPUs, {nodes} asked for"
        remedy = f"start Ray on every node ({DOCS}/gpu.md), or lower trainer.nnodes; {_TOKEN}"
        yield Finding("Ray cluster", message, remedy)
    cpus = sum(member.get("CPU", 0) for member in members)
    needed = _cpus_needed(get, nodes * gpus)
    if cpus < needed:
        remedy = "start Ray with a larger --num-cpus, a number that it only uses for scheduling"
        yield Finding("CPUs", f"Ray has {cpus:.0f}, verl asks for {needed}", remedy)
