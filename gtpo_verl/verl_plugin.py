"""GTPO inside verl: registration and hooks. The only room that knows verl's insides.

verl loads this module in every process (entry point `verl.plugins`; before 0.9.0, `VERL_USE_EXTERNAL_MODULES`).
Loading it only leaves post-import hooks, so a process that never trains pays next to nothing:

- `core_algos`: registers the advantage estimator and the policy loss `gtpo`.
- `verl.utils.config`: `validate_config`, which verl calls before any worker is up, runs GTPO's preflight.
- the trainers: verl hands an estimator neither token ids nor entropy and takes no metrics from it. `GTPOStage`, the
  data-proto stage, collects the former on the driver just before the estimator is called, and the latter after it.

A verl that has GTPO of its own serves `gtpo` itself, and all of this steps back.

verl swallows what a plugin raises while it loads. So a hook that does not fit, a name that is taken or a verl that is
not supported is kept in `problems()`, shown by `gtpo-verl check`, and raised once a config asks for GTPO.
"""

import logging
import os
import time
from collections.abc import Callable
from contextvars import ContextVar
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import wrapt
from omegaconf import OmegaConf

from gtpo_verl import preflight
from gtpo_verl.advantage import compute_gtpo_advantage
from gtpo_verl.entropy import compute_trajectory_entropy
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.metrics import compute_gtpo_metrics

SUPPORTED_VERL = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")

logger = logging.getLogger("gtpo_verl")
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

_problems: list[str] = []
_stage: ContextVar["GTPOStage | None"] = ContextVar("gtpo_stage", default=None)


def problems() -> list[str]:
    """What keeps GTPO from running in this process; empty if nothing does."""
    return list(_problems)


def steps_back() -> bool:
    """Whether this verl has GTPO of its own (`patches/`), which then serves `gtpo` without this plugin."""
    from verl.trainer.ppo import core_algos

    return _has_gtpo(core_algos)


def _has_gtpo(core_algos: ModuleType) -> bool:
    return "GTPO" in core_algos.AdvantageEstimator.__members__


def _serves(config: Any) -> bool:
    return preflight.uses_gtpo(config) and not steps_back()


# ---------------------------------------------------------------- the data-proto stage


class GTPOStage:
    """The data-proto stage of one trainer: initial entropy, advantages and metrics of each batch.

    Args:
        config: verl's whole config.
        global_steps (int): the trainer's step at its first batch; above 1 in a resumed run.

    Raises:
        RuntimeError: GTPO cannot run in this process, see `problems()`.
        ValueError: a setting with which it cannot run, or a resumed run without its initial entropy.
    """

    def __init__(self, config: Any, global_steps: int):
        _raise_problems()
        self.config = preflight.check(config)
        self.norm_adv_by_std_in_grpo = config.algorithm.get("norm_adv_by_std_in_grpo", True)
        self.max_response_length = config.data.max_response_length
        self.checkpoints = config.trainer.default_local_dir
        self.initial_entropy: InitialEntropy | None = None
        self._resumed = global_steps > 1
        self._batch: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, float] = {}
        if self.config.initial_entropy is not None:
            self._settle(InitialEntropy(self.config.initial_entropy))
        elif self._resumed:
            folder = preflight.resume_folder(config)
            if self.config.completion_filter == "auto" or InitialEntropy.path(folder).exists():
                self._settle(InitialEntropy.load(folder))
        if not preflight.needs_reference_policy(config):
            logger.info("GTPO runs without a reference policy: no KL term, no reference worker")

    @classmethod
    def of(cls, trainer: Any) -> "GTPOStage":
        """The stage of a trainer, made at its first batch."""
        if not hasattr(trainer, "_gtpo_stage"):
            trainer._gtpo_stage = cls(trainer.config, trainer.global_steps)
        return trainer._gtpo_stage

    def collect(
        self, responses: torch.Tensor, entropy: torch.Tensor, response_mask: torch.Tensor, row_len: torch.Tensor
    ) -> None:
        """Take what the next call of the estimator needs, rows in the order in which it will get them.

        Args:
            responses, entropy, response_mask: (bs, response_length), as for `compute_gtpo_outcome_advantage`.
            row_len (torch.Tensor): (bs,), length of each response, tool output included.
        """
        self._batch = {"responses": responses, "entropy": entropy, "response_mask": response_mask, "row_len": row_len}
        _stage.set(self)

    def estimate(
        self, token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Advantages of the collected batch; its metrics are then in `take_metrics`.

        Raises:
            RuntimeError: these are not the collected rows.
        """
        start = time.perf_counter()
        batch, self._batch = self._batch, {}
        if response_mask.shape != batch["response_mask"].shape or (response_mask > batch["response_mask"]).any():
            raise RuntimeError("the trainer changed the rows of the batch after its old-log-prob pass")
        if self.initial_entropy is None and not self._resumed:
            entropy = compute_trajectory_entropy(batch["entropy"], batch["response_mask"])
            self._settle(InitialEntropy.measure(entropy, batch["response_mask"].sum(-1), index))
        initial_entropy = self.initial_entropy.value if self.initial_entropy else None
        result = compute_gtpo_advantage(
            token_level_rewards,
            batch["response_mask"],
            index,
            batch["responses"],
            batch["entropy"],
            self.config,
            initial_entropy,
            self.norm_adv_by_std_in_grpo,
        )
        truncated = batch["row_len"] >= self.max_response_length
        self._metrics = compute_gtpo_metrics(result, self.config, initial_entropy, truncated)
        advantages = result.advantages
        # verl's rollout correction may have rejected tokens: they get no advantage, but keep their position and group.
        if not torch.equal(response_mask, batch["response_mask"]):
            advantages = advantages * response_mask
        self._metrics["timing_s/gtpo"] = time.perf_counter() - start
        return advantages, advantages

    def take_metrics(self) -> dict[str, float]:
        """The metrics of the last batch, once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    @property
    def has_batch(self) -> bool:
        """Whether a batch was collected that no estimate was made of yet."""
        return bool(self._batch)

    def _settle(self, initial_entropy: InitialEntropy) -> None:
        self.initial_entropy = initial_entropy
        path = initial_entropy.save(self.checkpoints)
        logger.info("GTPO %s; written to %s", initial_entropy.decision(self.config), path)


def estimate_gtpo_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, index: Any = None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """verl's advantage estimator `gtpo`: `compute_gtpo_outcome_advantage` on what the data-proto stage collected.

    Raises:
        RuntimeError: it was called by a trainer of which GTPO has no hook.
    """
    _raise_problems()
    stage = _stage.get()
    if stage is None or not stage.has_batch:
        raise RuntimeError(
            "algorithm.adv_estimator=gtpo was called without token ids and entropy, by a trainer that gtpo_verl does "
            "not know; use verl's own trainers, through verl.trainer.main_ppo"
        )
    return stage.estimate(token_level_rewards, response_mask, index)


# ---------------------------------------------------------------- hooks


def _register(core_algos: ModuleType) -> None:
    if _has_gtpo(core_algos):
        return
    taken = [
        f"{kind} 'gtpo' is already registered as {registry['gtpo'].__module__}.{registry['gtpo'].__qualname__}; "
        "uninstall one of the two packages"
        for kind, registry in (
            ("advantage estimator", core_algos.ADV_ESTIMATOR_REGISTRY),
            ("policy loss", core_algos.POLICY_LOSS_REGISTRY),
        )
        if "gtpo" in registry
    ]
    _problems.extend(taken)
    if not taken:
        core_algos.register_adv_est("gtpo")(estimate_gtpo_advantage)
        core_algos.register_policy_loss("gtpo")(compute_policy_loss_gtpo)


def _hook_validate_config(module: ModuleType) -> None:
    def validate_config(wrapped: Callable, instance: None, args: tuple, kwargs: dict) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        if _serves(config):
            _raise_problems()
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
        stage = GTPOStage.of(trainer)
        start = time.perf_counter()
        data = module.tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        missing = set(fields) - set(data.keys())
        if missing:
            raise RuntimeError(
                f"GTPO needs {', '.join(sorted(missing))} of every row, which TransferQueue does not hold"
            )
        row_len = data["responses"].offsets().diff()
        padded = data.select(*fields).to_padded_tensor()
        stage.collect(padded["responses"], padded["entropy"], padded["response_mask"], row_len)
        fetched = time.perf_counter() - start
        batch = wrapped(*args, **kwargs)
        metrics.update(stage.take_metrics())
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
        stage = _stage.get()
        return wrapped(*args, **kwargs) | (stage.take_metrics() if stage else {})

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
        _problems.append(f"verl {version('verl')} has no {module.__name__}.{name}: {error}")


def _raise_problems() -> None:
    if _problems:
        raise RuntimeError("GTPO cannot run: " + "; ".join(_problems))


def _install() -> None:
    verl_version = version("verl")
    if verl_version not in SUPPORTED_VERL:
        _problems.append(
            f"gtpo_verl {version('gtpo-verl')} supports verl {', '.join(SUPPORTED_VERL)}; this is {verl_version}"
        )
    wrapt.register_post_import_hook(_register, "verl.trainer.ppo.core_algos")
    wrapt.register_post_import_hook(_hook_validate_config, "verl.utils.config")
    wrapt.register_post_import_hook(_hook_v1_trainer, "verl.trainer.ppo.v1.trainer_base")
    wrapt.register_post_import_hook(_hook_legacy_trainer, "verl.trainer.ppo.ray_trainer")
    wrapt.register_post_import_hook(_hook_data_metrics, "verl.trainer.ppo.metric_utils")


_install()
