"""GTPO inside verl: registration and hooks.

verl loads this module in every process (entry point `verl.plugins`; before 0.9.0, `VERL_USE_EXTERNAL_MODULES`).
Loading it only leaves post-import hooks, so a process that never trains pays next to nothing:

- `core_algos`: registers the advantage estimator and the policy loss, as `gtpo` and as `gtpo_trajectory`.
- `verl.utils.config`: `validate_config`, which verl calls before any worker is up, runs GTPO's preflight.
- the trainers: what the estimator needs is collected on the driver just before verl calls it (`gtpo_verl.stage`), and
  its metrics are logged after that.

A verl that has GTPO of its own serves `gtpo` itself; this plugin then serves `gtpo_trajectory` only.

verl swallows what a plugin raises while it loads. So a hook that does not fit, a name that is taken or a verl that is
not supported is kept in `problems()`, shown by `gtpo-verl check`, and raised once a config asks for GTPO.
"""

import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

import wrapt
from omegaconf import OmegaConf

from gtpo_verl import preflight, stage
from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.stage import GTPOStage, estimate_gtpo_advantage

SUPPORTED_VERL = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")

logger = logging.getLogger("gtpo_verl")


def problems() -> list[str]:
    """What keeps GTPO from running in this process; empty if nothing does."""
    return stage.problems + stage.name_problems((key, "gtpo") for key in preflight.NAMED_BY)


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
    def validate_config(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        if _serves(config):
            stage.raise_problems(config)
            _check_trainer(config)
            preflight.check(config)
            preflight.check_resume(config)
            found = preflight.departures(config)
            if found:
                logger.warning("GTPO: with these settings the run is not the paper's:\n%s", preflight.as_table(found))
        return wrapped(*args, **kwargs)

    _wrap(module, "validate_config", validate_config)


def _check_trainer(config: Any) -> None:
    if "use_v1" not in config.trainer and OmegaConf.select(config, "transfer_queue.enable"):
        raise ValueError(
            f"transfer_queue.enable=True: in verl {version('verl')} GTPO has no hook in a trainer on TransferQueue "
            "(0.8.0's main_ppo_sync); set it to False and start verl.trainer.main_ppo, or use verl 0.9.0 or later"
        )


def _hook_v1_trainer(module: ModuleType) -> None:
    fields = ["responses", "entropy", "response_mask"]

    def compute_advantage(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        if not _serves(trainer.config):
            return wrapped(*args, **kwargs)
        batch, metrics = _batch_and_metrics(*args, **kwargs)
        gtpo = GTPOStage.of(trainer)
        start = time.perf_counter()
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        missing = set(fields) - set(data.keys())
        if missing:
            raise RuntimeError(
                f"GTPO needs {', '.join(sorted(missing))} of every row, which TransferQueue does not hold"
            )
        row_len = data["responses"].offsets().diff()
        padded = data.select(*fields).to_padded_tensor()
        gtpo.collect(padded["responses"], padded["entropy"], padded["response_mask"], row_len)
        fetched = time.perf_counter() - start
        batch = wrapped(*args, **kwargs)
        metrics.update(gtpo.take_metrics())
        metrics["timing_s/gtpo"] += fetched
        return batch

    _wrap(module, "PPOTrainer._compute_advantage", compute_advantage)


def _hook_legacy_trainer(module: ModuleType) -> None:
    def compute_old_log_prob(wrapped: Callable, trainer: Any, args: tuple, kwargs: dict) -> Any:
        result = wrapped(*args, **kwargs)
        if _serves(trainer.config):
            batch = (kwargs["batch"] if "batch" in kwargs else args[0]).batch
            responses, response_mask = batch["responses"], batch["response_mask"]
            row_len = batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
            GTPOStage.of(trainer).collect(responses, result[0].batch["entropys"], response_mask, row_len)
        return result

    _wrap(module, "RayPPOTrainer._compute_old_log_prob", compute_old_log_prob)


def _hook_data_metrics(module: ModuleType) -> None:
    def compute_data_metrics(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> dict[str, Any]:
        return wrapped(*args, **kwargs) | GTPOStage.take_current_metrics()

    _wrap(module, "compute_data_metrics", compute_data_metrics)


def _batch_and_metrics(batch: Any, metrics: dict) -> tuple[Any, dict]:
    return batch, metrics


class _Hook(wrapt.FunctionWrapper):
    """A hook that is pickled by name: up to verl 0.8.0, `main_ppo` sends Ray a TaskRunner with all that it calls."""

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__


def _wrap(module: ModuleType, name: str, wrapper: Callable) -> None:
    try:
        wrapt.wrap_object(module, name, _Hook, (wrapper,))
    except AttributeError as error:
        stage.problems.append(f"verl {version('verl')} has no {module.__name__}.{name}: {error}")


def _install() -> None:
    verl_version = version("verl")
    if verl_version not in SUPPORTED_VERL:
        stage.problems.append(
            f"gtpo_verl {version('gtpo-verl')} supports verl {', '.join(SUPPORTED_VERL)}; this is {verl_version}"
        )
    wrapt.register_post_import_hook(_register, "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook(_hook_validate_config, "verl.utils.config")
    wrapt.register_post_import_hook(_hook_v1_trainer, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(_hook_legacy_trainer, "verl.trainer.ppo.ray_trainer")
    wrapt.register_post_import_hook(_hook_data_metrics, "verl.trainer.ppo.metric_utils")


_install()
