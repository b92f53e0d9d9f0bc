"""`gtpo-verl check`: whether GTPO is registered and hooked in this verl, and whether this machine can do a run.

The run is given as its command. The check reads what it needs from the config that verl would get, before Ray starts:
Ray silently waits for CPUs that a machine does not have, and verl imports much minutes into a run.
"""

import argparse
import json
import netrc
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

GB = 10**9
_TASK_RUNNER_CPUS = 1
_CPUS_PER_GPU = 3  # of the placement group that verl makes for a training worker
_SMALLEST_SHARED_MEMORY = GB
_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
_MEGATRON = ("megatron.bridge", "megatron.core", "transformer_engine", "flash_attn")
# The build that verl's uv.lock names: CUDA 13, torch 2.11.
_INSTALL_FLASH = (
    "with Python 3.12 and torch 2.11 pip install https://github.com/verl-project/verl-wheelhouse/releases/download/"
    "flash-attention-v2.8.3/flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl"
)
DRIVER_REMEDY = "install a driver for that CUDA (580 or later for CUDA 13), or a torch built for an earlier one"
_TOKEN = (
    "A node that cannot join (InvalidAuthToken) found the token that an earlier Ray left in ~/.ray: export "
    "RAY_AUTH_MODE=disabled in every shell that starts or uses Ray, or RAY_AUTH_MODE=token with one token on all nodes"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report; `remedy` is empty where all is well, `advice` where nothing could be better."""

    subject: str
    says: str
    remedy: str = ""
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `gtpo-verl check`."""
    parser.description = "Say whether GTPO can run here and, given a command of verl, whether this machine can run it."
    parser.epilog = (
        "example: gtpo-verl check\n"
        "         gtpo-verl check -- python3 -m verl.trainer.main_ppo --config-path DIR --config-name NAME …\n\n"
        "The exit status is 1 if not, and each problem names its remedy. The recipes check their command first."
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.add_argument("command", nargs="*", help="after --: a command of verl's trainer, or its overrides alone")


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit status 1 if one is a problem."""
    with redirect_stdout(sys.stderr):  # what libraries print is no finding
        findings = list(check(args.command))
    problems = [finding for finding in findings if finding.remedy]
    if args.json:
        print(json.dumps({"ok": not problems, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return 1 if problems else 0
    for finding in findings:
        print(f"{finding.subject}: {finding.says}")
    for finding in findings:
        if finding.advice:
            print(f"warning: {finding.subject}: {finding.says}: {finding.advice}")
    for problem in problems:
        print(f"problem: {problem.subject}: {problem.says}: {problem.remedy}")
    return 1 if problems else 0


def check(command: Sequence[str] = ()) -> Iterator[Finding]:
    """The findings about this environment, and about this machine if a command of verl is given.

    Raises:
        ValueError: the command's config cannot be composed, or GTPO cannot run with it.
    """
    if missing := [name for name in ("torch", "verl") if find_spec(name) is None]:
        yield Finding(
            "installed", f"no {' and no '.join(missing)}", "install verl as its documentation says, then run this again"
        )
        return
    yield from _registration()
    if command:
        from gtpo_verl.verl_plugin import preflight, registration

        config = compose(command)
        if not registration.load_errors():
            preflight.validate(config)
        yield from _packages(config)
        yield from _machine(config)


def compose(command: Sequence[str]) -> Any:
    """The config that verl's trainer gets from this command.

    Raises:
        ValueError: an override does not fit verl.
    """
    import verl.trainer
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException

    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--config-path", "-cp", default="config")
    options.add_argument("--config-name", "-cn", default="ppo_trainer")
    options.add_argument("--config-dir", "-cd")
    given, words = options.parse_known_args(command)
    if given.config_dir:
        raise ValueError(f"--config-dir {given.config_dir} is not read here: use --config-path and --config-name")
    folder = Path(verl.trainer.__path__[0], given.config_path)  # as for Hydra, which starts from verl's module
    overrides = [word for word in words if word.startswith("~") or ("=" in word and not word.startswith("-"))]
    try:
        with initialize_config_dir(str(folder), version_base=None):
            return hydra_compose(given.config_name, overrides=overrides)
    except HydraException as error:
        raise ValueError(f"verl does not accept this command: {error}") from error


def _registration() -> Iterator[Finding]:
    import verl

    loaded = "gtpo_verl.verl_plugin" in sys.modules
    from verl.trainer.ppo import core_algos

    from gtpo_verl import verl_plugin
    from gtpo_verl.verl_plugin import registration, trainer_hooks

    yield Finding("gtpo_verl", f"{version('gtpo-verl')} at {verl_plugin.__file__}")
    tested = f"tested: {', '.join(registration.SUPPORTED_VERL)}"
    yield Finding("verl", f"{verl.__version__} at {verl.__file__} ({tested})")
    yield Finding("loaded by verl", "yes" if loaded else "no", "" if loaded else _how_to_load())
    for kind, registry in (
        ("advantage estimator gtpo", core_algos.ADV_ESTIMATOR_REGISTRY),
        ("policy loss gtpo", core_algos.POLICY_LOSS_REGISTRY),
    ):
        function = registry.get("gtpo")
        yield Finding(kind, f"{function.__module__}.{function.__qualname__}" if function else "not registered")
    for subject, module, path, _ in trainer_hooks.HOOKS:
        hooked = _hooked(module, path)
        yield Finding(f"hook on {subject}", hooked, f"{module}.{path} is not hooked" if hooked == "no" else "")
    if registration.verl_has_gtpo():
        yield Finding("gtpo", "this verl has GTPO of its own: it serves gtpo, the plugin gtpo_trajectory")
    for problem in registration.load_errors():
        yield Finding("registration", "failed", problem)


def _how_to_load() -> str:
    chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
    if find_spec("verl.plugin") and chosen != "auto":
        return f"VERL_USE_EXTERNAL_PLUGINS={chosen} leaves gtpo out: unset it, or add gtpo to the list"
    return (
        "before 0.9.0 verl reads no entry points: set VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_plugin; "
        "docs/versions.md says how, for a running Ray cluster too"
    )


def _hooked(module: str, path: str) -> str:
    package = module.rpartition(".")[0]
    if not (find_spec(package) and find_spec(module)):
        return "not in this verl"
    return "yes" if hasattr(resolve_name(f"{module}:{path}"), "__wrapped__") else "no"


def _select(config: Any) -> Callable[..., Any]:
    from omegaconf import OmegaConf

    return lambda key, default=None: OmegaConf.select(config, key, default=default, throw_on_missing=False)


def _packages(config: Any) -> Iterator[Finding]:
    """The packages that verl imports in a run with this config, minutes after its start."""
    get = _select(config)
    ppo = get("actor_rollout_ref") is not None
    on_cpu = get("trainer.device") == "cpu"
    megatron = get("actor_rollout_ref.actor.strategy") == "megatron"
    model = "actor_rollout_ref.model" if ppo else "model"
    loggers = get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    reward = str(get("reward.custom_reward_function.path", ""))
    rollout = get("actor_rollout_ref.rollout.name")
    needed = {  # module -> (what pip calls it, whether this run needs it)
        "transfer_queue": ("TransferQueue", ppo and bool(get("trainer.use_v1"))),
        "vllm": ("vllm", rollout == "vllm"),
        "sglang": ("sglang", rollout == "sglang"),
        "math_verify": ("math-verify", reward.startswith("pkg://gtpo_verl.paper.reward")),
        "datasets": ("datasets", True),
        "peft": ("peft", bool(get(f"{model}.lora_rank") or get(f"{model}.lora_adapter_path"))),
        **{logger: (logger, logger in loggers) for logger in ("wandb", "swanlab", "tensorboard")},
    }
    missing = [pip for module, (pip, wanted) in needed.items() if wanted and not _has(module)]
    remedies = [f"pip install {' '.join(missing)}"] if missing else []
    if megatron and (absent := [name for name in _MEGATRON if not _has(name)]):
        missing += absent
        remedies.append("install verl with Megatron from its uv.lock, as docs/gpu.md says")
    attention = get(f"{model}.override_config.attn_implementation", "flash_attention_2")
    without_flash = not (on_cpu or _has("flash_attn"))
    if without_flash and not megatron and attention == "flash_attention_2":
        missing.append("flash-attn")
        remedies.append(f"{_INSTALL_FLASH}, or do without: +{model}.override_config.attn_implementation=sdpa")
    yield Finding("packages", f"no {', '.join(missing)}" if missing else "all there", "; ".join(remedies))
    if without_flash and not megatron and attention != "flash_attention_2":
        says = (
            "not installed: verl computes log-probs in a Python loop over the tokens, and attention compares every "
            "pair of tokens of a packed batch"
        )
        yield Finding("flash-attn", says, advice=f"slower steps that take more memory; {_INSTALL_FLASH}")
    if "wandb" in loggers and not _logged_in_to_wandb():
        remedy = "wandb login, or set WANDB_API_KEY, or WANDB_MODE=offline"
        yield Finding("wandb", "no login found", remedy)
    if not on_cpu:
        yield _compiler()


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it would be in is missing
        return False


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    return False


def _compiler() -> Finding:
    """Triton, which vLLM and torch.compile use, compiles a C extension of Python at the first kernel."""
    compilers = [os.environ.get("CC"), "gcc", "clang", "cc"]
    found = next((path for name in compilers if name and (path := shutil.which(name))), None)
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    missing = [] if found else ["no C compiler"]
    missing += [] if header.exists() else [f"no {header}"]
    remedy = "Triton compiles kernels: apt install gcc python3-dev, or take an image that has them (docs/gpu.md)"
    return Finding("C compiler", ", ".join(missing) or str(found), remedy if missing else "")


def _machine(config: Any) -> Iterator[Finding]:
    get = _select(config)
    nodes, gpus = int(get("trainer.nnodes", 1)), int(get("trainer.n_gpus_per_node", 1))
    yield from _split(get, nodes * gpus)
    if nodes > 1 or os.environ.get("RAY_ADDRESS"):
        yield from _cluster(get, nodes, gpus)
    else:
        yield from _gpus(get, gpus)
        yield from _cpus(get, gpus)
    yield from _disk(get)


def _split(get: Callable, workers: int) -> Iterator[Finding]:
    """Whether the GPUs divide among copies of the model, and the batch among the GPUs."""
    tp = int(get("actor_rollout_ref.rollout.tensor_model_parallel_size", 1))
    if workers % tp:
        key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        yield Finding("tensor parallel", f"{workers} GPUs, {key}={tp}", f"set {key} to a divisor of {workers}")
    if get("actor_rollout_ref") is None or get("trainer.val_only"):
        return
    shared = 1
    if get("actor_rollout_ref.actor.strategy") == "megatron":
        for kind in ("tensor", "pipeline", "context"):
            shared *= int(get(f"actor_rollout_ref.actor.megatron.{kind}_model_parallel_size", 1))
    else:
        shared = int(get("actor_rollout_ref.actor.ulysses_sequence_parallel_size", 1))
    prompts, n = int(get("data.train_batch_size")), int(get("actor_rollout_ref.rollout.n"))
    says = f"{prompts} prompts x {n} completions over {workers} GPUs, {shared} to a copy of the model"
    fits = workers % shared == 0 and prompts * n % (workers // shared) == 0
    remedy = "make data.train_batch_size x actor_rollout_ref.rollout.n a multiple of the copies, or use fewer GPUs"
    yield Finding("batch", says, "" if fits else remedy)


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


def _gpus(get: Callable, gpus: int) -> Iterator[Finding]:
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
            yield Finding("shared memory", f"{size / GB:.1f} GB", remedy if size < _SMALLEST_SHARED_MEMORY else "")


def _cluster(get: Callable, nodes: int, gpus: int) -> Iterator[Finding]:
    """Ask Ray about the cluster that the run would join, as a driver."""
    import ray

    from gtpo_verl.verl_plugin import one_run_per_cluster

    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except Exception as error:  # of several classes, none of them Ray's own base class
        says = f"not reached at {address}: {str(error).splitlines()[0]}"
        yield Finding("Ray cluster", says, f"start Ray on every node first (docs/clusters.md). {_TOKEN}")
        return
    try:
        members = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        large_enough = sum(member.get("GPU", 0) >= gpus for member in members)
        cpus, needed = sum(member.get("CPU", 0) for member in members), _cpus_needed(get, nodes * gpus)
        other = one_run_per_cluster.other_run()
    finally:
        ray.shutdown()
    says = f"{large_enough} of {len(members)} nodes at {address} have {gpus} GPUs, {nodes} asked for"
    remedy = f"start Ray on every node (docs/clusters.md), or set trainer.nnodes and trainer.n_gpus_per_node. {_TOKEN}"
    yield Finding("Ray cluster", says, remedy if large_enough < nodes else "")
    says = f"Ray has {cpus:.0f}, verl asks for {needed}"
    remedy = "start Ray with a larger --num-cpus, a number that it only uses for counting"
    yield Finding("CPUs", says, remedy if cpus < needed else "")
    if get("trainer.use_v1"):
        remedy = one_run_per_cluster.refusal(other) if other else ""
        yield Finding("TransferQueue", "in use by another run" if other else "free", remedy)


def _cpus_needed(get: Callable, gpus: int) -> int:
    """CPUs that verl asks Ray for before its first step, and silently waits for."""
    units = int(get(_UNITS) or 0) if get("trainer.use_v1") else 0
    return _TASK_RUNNER_CPUS + _CPUS_PER_GPU * gpus + (units + 1 if units else 0)


def _cpus(get: Callable, gpus: int) -> Iterator[Finding]:
    if get("actor_rollout_ref") is None:
        return
    machine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    key = "ray_kwargs.ray_init.num_cpus"
    cpus, needed = int(get(key) or machine), _cpus_needed(get, gpus)
    says = f"Ray has {cpus} (the machine {machine}), verl asks for {needed}"
    remedy = f"set {key}={needed}, a number that Ray only uses for counting"
    remedy += f", or {_UNITS}=1" if get("trainer.use_v1") and int(get(_UNITS) or 0) > 1 else ""
    yield Finding("CPUs", says, remedy if cpus < needed else "")


def _disk(get: Callable) -> Iterator[Finding]:
    """Compare free space with the size of the checkpoints that exist at one time."""
    save_freq, folder = get("trainer.save_freq"), get("trainer.default_local_dir")
    if not isinstance(save_freq, int) or save_freq < 1 or not folder or get("trainer.val_only"):
        return
    kept = get("trainer.max_actor_ckpt_to_keep")
    steps = get("trainer.total_training_steps")
    count = kept + 1 if kept else max(1, int(steps) // save_freq) if steps else 2
    model = "actor_rollout_ref.model" if get("actor_rollout_ref") is not None else "model"
    size = count * _checkpoint_bytes(str(get(f"{model}.path")), bool(get(f"{model}.lora_rank")))
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    says = f"{free / GB:.1f} GB free at {existing}, {count} checkpoints take {size / GB:.1f} GB"
    remedy = "give another trainer.default_local_dir, remove old ones, or set trainer.max_actor_ckpt_to_keep lower"
    yield Finding("disk", says, remedy if free < size else "")


def _checkpoint_bytes(model_path: str, lora: bool) -> int:
    """Bytes of one checkpoint: float32 weights, and Adam's two moments of those that are trained."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_path)
    with torch.device("meta"):
        parameters = AutoModelForCausalLM.from_config(config).num_parameters()
    return parameters * (4 if lora else 12)
