"""What GTPO does at each function of verl that it hooks.

A hook gets `proceed`, which calls verl's function with its arguments; for a method its instance; and by name those
arguments that the hook reads.
"""

import logging
import textwrap
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import torch
import verl
from tensordict import TensorDict

from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.metrics import compute_log_prob_metrics
from gtpo_verl.verl_plugin import (
    batch_fields,
    names_and_versions,
    one_run_per_cluster,
    preflight,
    update_pass,
    weight_transfer,
)
from gtpo_verl.verl_plugin.collapse import TrainerWatch
from gtpo_verl.verl_plugin.estimator import Step, check_log_probs, current_step, estimate_gtpo_advantage
from gtpo_verl.verl_plugin.token_dump import bounded_rows

logger = logging.getLogger("gtpo_verl")

_watch: ContextVar[TrainerWatch | None] = ContextVar("gtpo_collapse_watch", default=None)
_looping: ContextVar[Any] = ContextVar("gtpo_looping_trainer", default=None)


class Hook(NamedTuple):
    """A function of verl and what is called in its place.

    Args:
        subject: what it is for, in the report of `gtpo-verl check`.
        module: of verl.
        path: of the function in it.
        hook: called as this module says.
    """

    subject: str
    module: str
    path: str
    hook: Callable


def validate_config(proceed: Callable, *, config: Any) -> Any:
    """verl's own trainers call this in their driver, before any worker is up, and some again in their task runner."""
    _start(config)
    return proceed()


def get_adv_estimator_fn(proceed: Callable, *, name_or_enum: Any) -> Callable:
    """verl looks an estimator up when a config asks for it; then `gtpo` is this one, if nobody has taken the name."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if name_or_enum == "gtpo":
        ADV_ESTIMATOR_REGISTRY.setdefault("gtpo", estimate_gtpo_advantage)
    return proceed()


def get_policy_loss_fn(proceed: Callable, *, name: Any) -> Callable:
    """As `get_adv_estimator_fn`, in the workers."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    if name == "gtpo":
        POLICY_LOSS_REGISTRY.setdefault("gtpo", compute_policy_loss_gtpo)
    return proceed()


def run_ppo(proceed: Callable, *, config: Any) -> Any:
    """verl's experimental trainers call this before they start Ray; fully_async calls no other check."""
    _start(config)
    return proceed()


_started: list[Any] = []
"""The config of the run that this process has checked."""


def _start(config: Any) -> None:
    if _started and _started[0] is config:
        return
    preflight.validate(config)
    _started[:] = [config]
    serves = names_and_versions.serves(config)
    found = preflight.departures(config) if serves else preflight.unclipped_updates(config)
    if found:
        table = textwrap.indent(preflight.as_table(found), "GTPO: ")
        logger.warning("GTPO: with these settings the run is not the paper's:\n%s", table)
    other = names_and_versions.foreign_estimator(config)
    if other and not other.startswith("verl."):
        logger.warning(
            "algorithm.adv_estimator=%s is %s; for GTPO of arXiv:2508.03772 set it to %s",
            *(config.algorithm.adv_estimator, other, names_and_versions.ALIAS),
        )
    if not serves:
        return
    preflight.ask_for_entropy(config)
    for warning in preflight.resume_warnings(config):
        logger.warning("%s", warning)
    if not preflight.needs_reference_policy(config):
        logger.info("GTPO runs without a reference policy: no KL term, no reference worker")
    if not names_and_versions.is_tested():
        logger.warning(
            "GTPO was tested with verl %s to %s; this is %s. Every function that it hooks exists; "
            "compare the first steps' gtpo/* metrics with what you expect",
            *(names_and_versions.SUPPORTED_VERL[0], names_and_versions.SUPPORTED_VERL[-1], verl.__version__),
        )


def v1_compute_advantage(proceed: Callable, trainer: Any, *, batch: Any, metrics: dict[str, Any]) -> Any:
    """The V1 trainer's advantages: its rows are in TransferQueue."""
    step = Step.of(trainer)
    if step is None:
        return proceed()
    from verl.trainer.ppo.v1 import trainer_base

    waits = step.estimator.entropy_from_update
    step.fields = batch_fields.from_transfer_queue(trainer_base.tq, batch, with_entropy=not waits)
    try:
        result = proceed()
    finally:
        current_step.set(None)
    if waits:
        fields = TensorDict({update_pass.ROWS: step.rows}, batch_size=len(batch.keys))
        result = trainer_base.tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        current_step.set(step)
    else:
        metrics.update(step.metrics)
    return result


def legacy_compute_old_log_prob(proceed: Callable, trainer: Any, *, batch: Any) -> Any:
    """The legacy trainer has entropies only here, and may move its rows before it computes advantages."""
    result = proceed()
    step = Step.of(trainer)
    if step and not step.estimator.entropy_from_update:
        batch_fields.keep_in_batch(result[0].batch, batch.batch)
    return result


def separate_compute_advantage(proceed: Callable, trainer: Any) -> Any:
    """fully_async and one_step_off have loops of their own; see `compute_advantage`."""
    token = _looping.set(trainer)
    try:
        return proceed()
    finally:
        _looping.reset(token)


def compute_advantage(proceed: Callable, *, data: Any) -> Any:
    """Both trainers call this, with padded rows."""
    step = current_step.get()
    if step is None and (trainer := _looping.get()):
        step = Step.of(trainer)  # a legacy trainer that made no old-log-prob pass
    if step is None:
        return proceed()
    waits = step.estimator.entropy_from_update
    fields = step.fields = step.fields or batch_fields.take_from_batch(data.batch, with_entropy=not waits)
    if fields and step.estimator.applied:
        check_log_probs(data.batch, fields.response_mask, data.non_tensor_batch["uid"])
    try:
        data = proceed()
    finally:
        step.fields = None  # they serve once
    if fields and step.result and "old_log_probs" in data.batch.keys():
        of_sessions = slice(None) if len(fields.final) == len(data) else fields.final
        old_log_probs = data.batch["old_log_probs"][of_sessions]
        step.metrics |= compute_log_prob_metrics(old_log_probs, step.result.group_advantages, step.result.completions)
    if fields and step.dump and not waits:
        _dump(step, fields, data)
    elif fields and step.dump:
        assert step.rows is not None and step.result is not None
        step.rows[[fields.final[row] for row in bounded_rows(step.result)], -1] = 1
        step.write_dump = partial(_dump_after_update, step, fields, data.select([*_DUMPED & set(data.batch.keys())]))
    if waits:
        data.batch[update_pass.ROWS] = step.rows
    return data


_DUMPED = {"old_log_probs", "token_level_rewards", "advantages", "rollout_log_probs", "response_mask"}


def _dump_after_update(
    step: Step, fields: batch_fields.BatchFields, data: Any, entropies: update_pass.Entropies
) -> None:
    """Hand the step to the token dump with the entropies of its update, and the advantages that it used."""
    assert step.rows is not None
    entropy = update_pass.gather_tokens(entropies, fields.responses.shape)
    before = data.batch["advantages"]
    data.batch["advantages"], _ = update_pass.apply_entropy(before, fields.response_mask, entropy, step.rows)
    _dump(step, fields._replace(entropy=entropy), data)


def _dump(step: Step, fields: batch_fields.BatchFields, data: Any) -> None:
    """Hand the step to the token dump, one output per session."""
    assert step.dump is not None
    start = time.perf_counter()
    if len(data) > len(fields.final):  # verl's grpo comes with the last outputs alone
        data = data.select_idxs(fields.final)
    fields = fields.of_sessions()
    uids = data.non_tensor_batch["uid"]
    result = step.result or step.estimator.weigh(fields, data.batch["token_level_rewards"], uids)
    columns: dict[str, torch.Tensor] = {name: data.batch[name] for name in _DUMPED & set(data.batch.keys())}
    columns |= {"loss_mask": data.batch["response_mask"], "response_mask": fields.response_mask}
    assert fields.entropy is not None
    columns |= {"responses": fields.responses, "entropy": fields.entropy}
    initial_entropy = step.estimator.initial_entropy_value
    step.dump.write(step.number, columns, uids, fields.prompts, fields.response_len, result, initial_entropy)
    step.metrics["timing_s/gtpo_dump"] = time.perf_counter() - start


def ppo_loss(proceed: Callable, *, config: Any, model_output: Any, data: Any) -> Any:
    """The actor's loss, in a worker: of the whole rows of a micro-batch, with their entropy."""
    if update_pass.ROWS not in data.keys():
        return proceed()
    before = data["advantages"]
    data["advantages"], entropies = update_pass.apply_in_actor(config, model_output, data)
    try:
        loss, metrics = proceed()
    finally:
        data["advantages"] = before  # of which the next epoch makes its own
    return loss, metrics | {update_pass.ENTROPIES: entropies}


def reduce_metrics(proceed: Callable, *, metrics: dict[str, Any]) -> dict[str, Any]:
    """Every trainer calls this on what its actor's update returns, and on what its critic's does."""
    key = f"actor/{update_pass.ENTROPIES}"
    entropies = metrics.pop(key) if key in metrics else None
    reduced = proceed()
    step = current_step.get()
    if step is None or step.rows is None or "actor/pg_loss" not in reduced:
        return reduced
    if entropies is None:
        raise RuntimeError(
            "algorithm.gtpo.entropy_from=update, but the actor's loss did not apply the entropy: its worker is not "
            "verl's own (verl.workers.engine_workers), or has not loaded gtpo_verl; set entropy_from=old_log_prob"
        )
    step.estimator.complete(step, entropies)
    if step.write_dump:
        step.write_dump(entropies)
    current_step.set(None)
    return reduced | step.metrics


def compute_data_metrics(proceed: Callable) -> dict[str, Any]:
    """The legacy trainer logs what this returns."""
    step = current_step.get()
    current_step.set(None)
    return proceed() | (step.metrics if step else {})


def fit(proceed: Callable, trainer: Any) -> Any:
    """The watch for collapse lives as long as the trainer's loop."""
    tokens = _looping.set(trainer), _watch.set(TrainerWatch.of(trainer))
    try:
        return proceed()
    finally:
        _looping.reset(tokens[0])
        _watch.reset(tokens[1])


def log(proceed: Callable, tracking: Any, *, data: dict[str, Any]) -> Any:
    """What the trainer logs, under any estimator."""
    result = proceed()
    watch = _watch.get()
    if watch:
        watch.logged(data)
    return result


HOOKS = (
    Hook("settings", "verl.utils.config", "validate_config", validate_config),
    Hook("settings of experimental trainers", "verl.trainer.main_ppo", "run_ppo", run_ppo),
    Hook("estimator by its name", "verl.trainer.ppo.core_algos", "get_adv_estimator_fn", get_adv_estimator_fn),
    Hook("loss by its name", "verl.trainer.ppo.core_algos", "get_policy_loss_fn", get_policy_loss_fn),
    Hook("V1 trainer", "verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_advantage", v1_compute_advantage),
    Hook("V1 trainer's loop", "verl.trainer.ppo.v1.trainer_base", "PPOTrainer.fit", fit),
    Hook(
        "legacy trainer",
        "verl.trainer.ppo.ray_trainer",
        "RayPPOTrainer._compute_old_log_prob",
        legacy_compute_old_log_prob,
    ),
    Hook("legacy trainer's loop", "verl.trainer.ppo.ray_trainer", "RayPPOTrainer.fit", fit),
    Hook(
        "separate trainers",
        "verl.experimental.separation.ray_trainer",
        "SeparateRayPPOTrainer._fit_compute_advantage",
        separate_compute_advantage,
    ),
    Hook("advantages", "verl.trainer.ppo.ray_trainer", "compute_advantage", compute_advantage),
    Hook("actor's loss", "verl.workers.utils.losses", "ppo_loss", ppo_loss),
    Hook("update's metrics", "verl.utils.metric", "reduce_metrics", reduce_metrics),
    Hook("metrics", "verl.trainer.ppo.metric_utils", "compute_data_metrics", compute_data_metrics),
    Hook("logger", "verl.utils.tracking", "Tracking.log", log),
)

_TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
# Modules that `gtpo-verl check` does not import: their packages import a rollout engine.
WORKER_HOOKS = (
    Hook("second run in a Ray cluster", "transfer_queue", "init", one_run_per_cluster.refuse_second_run),
    Hook("weights sent", _TRANSFER, "BucketedWeightSender.__init__", weight_transfer.use_own_socket),
    Hook("weights received", _TRANSFER, "BucketedWeightReceiver.__init__", weight_transfer.use_own_socket),
)
