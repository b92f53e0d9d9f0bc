"""GTPO inside verl: registration and hooks.

verl loads this module in every process (entry point `verl.plugins`; before 0.9.0, `VERL_USE_EXTERNAL_MODULES`).
Loading it only leaves post-import hooks, so a process that never trains pays next to nothing:

- `core_algos`: registers the advantage estimator and the policy loss, as `gtpo` and as `gtpo_trajectory`.
- `verl.utils.config`: `validate_config`, which verl calls before any worker is up, runs GTPO's preflight.
- `tracking` and the trainers' `fit`: the watch for collapse, under any estimator that asks for it.
- the trainers: each row of the batch gets the fields that the estimator needs (`batch_fields`), and the metrics are
  logged. Where a token dump is asked for, the step's batch is handed to `token_dump`.

A verl that has GTPO of its own serves `gtpo` itself; this plugin then serves `gtpo_trajectory` only.

verl swallows what a plugin raises while it loads. So a hook that does not fit, a name that is taken or a verl that is
too old is kept in `problems()`, shown by `gtpo-verl check`, and raised once a config asks for GTPO. A verl that was not
tested gets a warning and the same checks: that what is hooked is there and takes the arguments that the hooks read.
"""

import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from operator import attrgetter
from types import ModuleType
from typing import Any

import verl
import wrapt
from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.verl_plugin import batch_fields, collapse, estimator, preflight
from gtpo_verl.verl_plugin.collapse import TrainerWatch
from gtpo_verl.verl_plugin.estimator import GTPOEstimator, estimate_gtpo_advantage
from gtpo_verl.verl_plugin.token_dump import TokenDump, check_dump

SUPPORTED_VERL = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")

logger = logging.getLogger("gtpo_verl")

_watch: ContextVar[TrainerWatch | None] = ContextVar("gtpo_collapse_watch", default=None)


def problems() -> list[str]:
    """What keeps GTPO from running in this process; empty if nothing does."""
    found = estimator.problems + estimator.name_problems((key, "gtpo") for key in preflight.NAMED_BY)
    return list(dict.fromkeys(found))  # two hooks on one function find the same


def is_tested() -> bool:
    """Whether this verl is a release from the first to the last of `SUPPORTED_VERL`, not a checkout or a fork."""
    found = _verl_version()
    return (
        found is not None
        and not (found.is_prerelease or found.local)
        and Version(SUPPORTED_VERL[0]) <= found <= Version(SUPPORTED_VERL[-1])
    )


def _verl_version() -> Version | None:
    try:
        return Version(verl.__version__)
    except InvalidVersion:
        return None


def verl_has_gtpo() -> bool:
    """Whether this verl has GTPO of its own (`patches/`), which then serves `gtpo` without this plugin."""
    from verl.trainer.ppo import core_algos

    return _has_gtpo(core_algos)


def _has_gtpo(core_algos: ModuleType) -> bool:
    return "GTPO" in core_algos.AdvantageEstimator.__members__


def _serves(config: Any) -> bool:
    name = preflight.adv_estimator(config)
    return name == preflight.ALIAS or (name in preflight.NAMES and not verl_has_gtpo())


def _register(core_algos: ModuleType) -> None:
    for name in preflight.NAMES:
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(estimate_gtpo_advantage)
        if name not in core_algos.POLICY_LOSS_REGISTRY:
            core_algos.register_policy_loss(name)(compute_policy_loss_gtpo)


def _hook_validate_config(module: ModuleType) -> None:
    """verl's own trainers call this in their task runner, before any worker is up."""

    def validate_config(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        _check(config)
        found = preflight.departures(config) if _serves(config) else preflight.unclipped_updates(config)
        if found:
            logger.warning("GTPO: with these settings the run is not the paper's:\n%s", preflight.as_table(found))
        if _serves(config) and not is_tested():
            logger.warning(
                "GTPO was tested with verl %s to %s; this is %s. What it hooks is there; compare the first steps' "
                "gtpo/* metrics with what you expect",
                *(SUPPORTED_VERL[0], SUPPORTED_VERL[-1], verl.__version__),
            )
        return wrapped(*args, **kwargs)

    _wrap(module, "validate_config", validate_config, "config")


def _hook_run_ppo(module: ModuleType) -> None:
    """The way of verl's experimental trainers into Ray; fully_async takes no other check."""

    def run_ppo(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> Any:
        _check(kwargs["config"] if "config" in kwargs else args[0])
        return wrapped(*args, **kwargs)

    _wrap(module, "run_ppo", run_ppo, "config")


def _check(config: Any) -> None:
    check_config(config)
    if _serves(config):
        preflight.check_resume(config)


def check_config(config: Any) -> None:
    """What is asked of a verl config, whatever its folder holds.

    Raises:
        ValueError: GTPO, its dump or the watch cannot run so; the message names key, value and remedy.
    """
    collapse.read_mode(config)
    check_dump(config)
    if _serves(config):
        estimator.raise_problems(config)
        _check_trainer(config)
        preflight.check(config)


def _check_trainer(config: Any) -> None:
    if "use_v1" not in config.trainer and OmegaConf.select(config, "transfer_queue.enable"):
        raise ValueError(
            f"transfer_queue.enable=True: in verl {verl.__version__} GTPO has no hook in a trainer on TransferQueue "
            "(0.8.0's main_ppo_sync); set it to False and start verl.trainer.main_ppo, or use verl 0.9.0 or later"
        )


def _hook_v1_trainer(module: Any) -> None:
    def compute_advantage(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        if not _serves(trainer.config):
            return wrapped(*args, **kwargs)
        batch, metrics = _batch_and_metrics(*args, **kwargs)
        gtpo = GTPOEstimator.of(trainer)
        tq, module.tq = module.tq, batch_fields.QueueWithGTPO(module.tq, batch.keys, _rejects(trainer.config))
        try:
            batch = wrapped(*args, **kwargs)
        finally:
            module.tq = tq
        metrics.update(gtpo.take_metrics())
        return batch

    _wrap(module, "PPOTrainer._compute_advantage", compute_advantage, "batch", "metrics")
    _hook_v1_dump(module)
    _hook_fit(module, "PPOTrainer")


def _rejects(config: Any) -> bool:
    """Whether verl may take tokens out of `response_mask` before it computes advantages."""
    return OmegaConf.select(config, "algorithm.rollout_correction.rollout_rs") is not None


def _hook_v1_dump(module: ModuleType) -> None:
    fields = ["responses", "entropy", "response_mask", "old_log_probs", "advantages"]

    def compute_advantage(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        dump = TokenDump.if_due(trainer)
        if dump is None:
            return wrapped(*args, **kwargs)
        batch, metrics = _batch_and_metrics(*args, **kwargs)
        where = {"keys": _last_outputs(batch.keys), "partition_id": batch.partition_id}
        own_tokens = _fetch(module.tq, ["response_mask"], **where).to_padded_tensor()["response_mask"]
        batch = wrapped(*args, **kwargs)
        start = time.perf_counter()
        rewards = "token_level_rewards" if trainer.config.algorithm.use_kl_in_reward else "rm_scores"
        data = _fetch(module.tq, [*fields, rewards, "prompts", "uid"], **where)
        padded = data.select(*fields, rewards).to_padded_tensor()
        tokens = {name: padded[name] for name in fields} | {"token_level_rewards": padded[rewards]}
        tokens |= {"response_mask": own_tokens, "loss_mask": padded["response_mask"]}
        row_len = data["responses"].offsets().diff()
        uids, prompts = data.pop("uid").tolist(), data["prompts"].unbind()
        dump.write(trainer.global_steps, tokens, uids, prompts, row_len, _initial_entropy(trainer))
        metrics["timing_s/gtpo_dump"] = time.perf_counter() - start
        return batch

    _wrap(module, "PPOTrainer._compute_advantage", compute_advantage, "batch", "metrics")


def _last_outputs(keys: list[str]) -> list[str]:
    """Of keys `{uid}_{session}_{output}` those of the last outputs, which stand for their sessions."""
    in_order = sorted(keys, key=lambda key: int(key.rsplit("_", 1)[1]))
    return list({key.rsplit("_", 1)[0]: key for key in in_order}.values())


def _fetch(tq: Any, fields: list[str], **where: Any) -> Any:
    data = tq.kv_batch_get(select_fields=fields, **where)
    batch_fields.check_fields(data, fields)
    return data


def _hook_legacy_trainer(module: ModuleType) -> None:
    def compute_old_log_prob(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        if _serves(trainer.config):
            GTPOEstimator.of(trainer)
            data = kwargs["batch"] if "batch" in kwargs else args[0]
            batch_fields.add_to(result[0].batch, data, _rejects(trainer.config))
        return result

    def compute_advantage(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> Any:
        with estimator.estimating((kwargs["data"] if "data" in kwargs else args[0]).batch):
            return wrapped(*args, **kwargs)

    _wrap(module, "RayPPOTrainer._compute_old_log_prob", compute_old_log_prob, "batch")
    _wrap(module, "compute_advantage", compute_advantage, "data")
    _hook_legacy_dump(module)
    _hook_fit(module, "RayPPOTrainer")


def _hook_legacy_dump(module: ModuleType) -> None:
    def compute_old_log_prob(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        dump = TokenDump.if_due(trainer)
        if dump is not None:
            batch = (kwargs["batch"] if "batch" in kwargs else args[0]).batch
            dump.collected = {"entropy": result[0].batch["entropys"], "response_mask": batch["response_mask"].clone()}
        return result

    def update_actor(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        dump = TokenDump.if_due(trainer)
        if dump is not None:
            data = kwargs["batch"] if "batch" in kwargs else args[0]
            names = ("responses", "old_log_probs", "advantages", "token_level_rewards")
            tokens = {name: data.batch[name] for name in names} | dump.collected
            tokens["loss_mask"] = data.batch["response_mask"]
            prompt_mask, row_mask = data.batch["attention_mask"].bool().tensor_split([-tokens["responses"].shape[1]], 1)
            prompts = [row[mask] for row, mask in zip(data.batch["prompts"], prompt_mask, strict=True)]
            uids, row_len = data.non_tensor_batch["uid"], row_mask.sum(-1)
            dump.write(trainer.global_steps, tokens, uids, prompts, row_len, _initial_entropy(trainer))
        return wrapped(*args, **kwargs)

    _wrap(module, "RayPPOTrainer._compute_old_log_prob", compute_old_log_prob, "batch")
    _wrap(module, "RayPPOTrainer._update_actor", update_actor, "batch")


def _initial_entropy(trainer: Any) -> float | None:
    record = GTPOEstimator.of(trainer).initial_entropy if _serves(trainer.config) else None
    return record.value if record else None


def _hook_fit(module: ModuleType, trainer_class: str) -> None:
    def fit(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        token = _watch.set(TrainerWatch.of(trainer))
        try:
            return wrapped(*args, **kwargs)
        finally:
            _watch.reset(token)

    _wrap(module, f"{trainer_class}.fit", fit)


def _hook_tracking(module: ModuleType) -> None:
    def log(wrapped: Callable, tracking: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        watch = _watch.get()
        if watch:
            watch.logged(kwargs["data"] if "data" in kwargs else args[0])
        return result

    _wrap(module, "Tracking.log", log, "data")


def _hook_data_metrics(module: ModuleType) -> None:
    def compute_data_metrics(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> dict[str, Any]:
        return wrapped(*args, **kwargs) | GTPOEstimator.take_current_metrics()

    _wrap(module, "compute_data_metrics", compute_data_metrics)


def _batch_and_metrics(batch: Any, metrics: dict) -> tuple[Any, dict]:
    return batch, metrics


class _Hook(wrapt.FunctionWrapper):
    """A hook that is pickled by name: up to verl 0.8.0, `main_ppo` sends Ray a TaskRunner with all that it calls."""

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__


def _wrap(module: ModuleType, path: str, wrapper: Callable, *parameters: str) -> None:
    """Hook `path` of a module of verl, if it is there and takes the `parameters` that the hook reads."""
    name = f"{module.__name__}.{path}"
    try:
        taken = inspect.signature(attrgetter(path)(module)).parameters
    except AttributeError as error:
        estimator.problems.append(f"verl {verl.__version__} has no {name}: {error}")
        return
    missing = [parameter for parameter in parameters if parameter not in taken]
    if missing:
        estimator.problems.append(
            f"in verl {verl.__version__} {name} takes no {', '.join(missing)}: ({', '.join(taken)})"
        )
        return
    wrapt.wrap_object(module, path, _Hook, (wrapper,))


def _configure_logging() -> None:
    """Keep this package's log apart from the root logger, as verl keeps its own: importing vLLM raises it to ERROR."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
    logger.propagate = False


def _install() -> None:
    found = _verl_version()
    if found is not None and found < Version(SUPPORTED_VERL[0]):
        estimator.problems.append(
            f"GTPO needs verl {SUPPORTED_VERL[0]} or later; this is {verl.__version__}: upgrade verl"
        )
    wrapt.register_post_import_hook(_register, "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook(_hook_validate_config, "verl.utils.config")
    wrapt.register_post_import_hook(_hook_run_ppo, "verl.trainer.main_ppo")
    wrapt.register_post_import_hook(_hook_tracking, "verl.utils.tracking")
    wrapt.register_post_import_hook(_hook_v1_trainer, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(_hook_legacy_trainer, "verl.trainer.ppo.ray_trainer")
    wrapt.register_post_import_hook(_hook_data_metrics, "verl.trainer.ppo.metric_utils")


try:
    _configure_logging()
    _install()
except Exception:
    # verl logs a plugin's exception at DEBUG level only and goes on without the plugin.
    traceback.print_exc()
    print("gtpo_verl: verl could not load the plugin, see above: gtpo is not there", file=sys.stderr, flush=True)
    raise
