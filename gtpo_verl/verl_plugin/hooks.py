"""What GTPO does at each function of verl that it hooks.

A hook gets `proceed`, which calls verl's function with its arguments; for a method its instance; and by name those
arguments that the hook reads.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import verl
from omegaconf import OmegaConf
from tensordict import TensorDict

from gtpo_verl.verl_plugin import batch_fields, compat, preflight, update_pass
from gtpo_verl.verl_plugin.loss import compute_policy_loss_gtpo
from gtpo_verl.verl_plugin.one_run_per_cluster import refuse_second_run
from gtpo_verl.verl_plugin.run_config import ADV_ESTIMATOR, LOSS_MODE, registry, select
from gtpo_verl.verl_plugin.state import TrainerState, activate, current, estimate_gtpo_advantage, set_current
from gtpo_verl.verl_plugin.training_monitor import KEY, TrainingMonitor
from gtpo_verl.verl_plugin.weight_transfer import use_own_socket


class Hook(NamedTuple):
    """A function of verl and the hook that is called in its place."""

    subject: str  # what the function is, in the report of `gtpo-verl check`
    module: str
    path: str  # of the function in the module, such as `PPOTrainer.fit`
    hook: Callable


def validate_config(proceed: Callable, *, config: Any) -> Any:
    """Check the config before any worker is up.

    verl's own trainers call `validate_config` in their driver, some again in their task runner; the experimental ones
    call `run_ppo` before they start Ray, and fully_async calls nothing else.
    """
    preflight.check_and_log(config)
    return proceed()


def get_adv_estimator_fn(proceed: Callable, *, name_or_enum: Any) -> Callable:
    """Serve `gtpo` when verl looks the estimator up, if nobody has taken the name."""
    if name_or_enum == "gtpo":
        registry(ADV_ESTIMATOR).setdefault("gtpo", estimate_gtpo_advantage)
    return proceed()


def get_policy_loss_fn(proceed: Callable, *, name: Any) -> Callable:
    """Serve the loss `gtpo` when verl looks it up, in its workers, if nobody has taken the name."""
    if name == "gtpo":
        registry(LOSS_MODE).setdefault("gtpo", compute_policy_loss_gtpo)
    return proceed()


def v1_compute_advantage(proceed: Callable, trainer: Any, *, batch: Any) -> Any:
    """Give the V1 trainer GTPO's advantages; its rows are in TransferQueue.

    Raises:
        RuntimeError: verl has computed the advantages without the function `compute_advantage` that is hooked.
    """
    state = activate(trainer)
    if not state.begin_step():
        return proceed()
    from verl.trainer.ppo.v1 import trainer_base

    state.v1_fields = batch_fields.from_transfer_queue(trainer_base.tq, batch, state.reads_entropy)
    try:
        result = proceed()
    finally:
        state.v1_fields = None
    if state.pending is None:
        raise RuntimeError(
            f"verl {verl.__version__} computed the advantages without the function compute_advantage that gtpo_verl "
            f"hooks: use verl {compat.SUPPORTED_VERL[-1]}, or trainer.use_v1=False"
        )
    if state.pending.inputs:
        fields = TensorDict(state.pending.inputs.to_batch(), batch_size=len(batch.keys))
        result = trainer_base.tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
    return result


def legacy_compute_old_log_prob(proceed: Callable, trainer: Any, *, batch: Any) -> Any:
    """Keep the legacy trainer's entropies in its batch: it has them only here, and may move its rows afterwards."""
    result = proceed()
    if activate(trainer).reads_entropy:
        old_log_prob = result[0]  # beside verl's measurement of speed
        batch_fields.add_to_old_log_prob(old_log_prob.batch, batch.batch)
    return result


def separate_compute_advantage(proceed: Callable, trainer: Any) -> Any:
    """Learn of the trainers fully_async and one_step_off, whose loops are their own.

    Under bypass mode they have no old-log-prob pass, where the legacy trainer is met otherwise.
    """
    activate(trainer)
    return proceed()


def compute_advantage(proceed: Callable, *, data: Any) -> Any:
    """Compute the advantages of a batch of padded rows, of either trainer."""
    state = current()
    if state is None:
        return proceed()
    fields = state.v1_fields
    state.v1_fields = None  # they serve once: the estimator refuses a second call for the same rows
    # The legacy trainer begins its step here, and has the fields in its batch.
    if fields is None and state.begin_step():
        fields = batch_fields.take_from_batch(data.batch, state.reads_entropy)
    if fields is None:
        return proceed()
    return state.compute_advantage(proceed, fields, data)


def ppo_loss(proceed: Callable, *, config: Any, model_output: Any, data: Any) -> Any:
    """Complete the advantages of a micro-batch with the entropy terms, in a worker, before its loss is computed.

    Its rows must be whole, since ⟨H⟩_i is a mean over all tokens of one.
    """
    inputs = update_pass.UpdateInputs.from_batch(data)
    if inputs is None:
        return proceed()
    before = data["advantages"]
    data["advantages"], entropies = update_pass.apply_in_actor(config, model_output, data, inputs)
    try:
        loss, metrics = proceed()
    finally:
        data["advantages"] = before  # the next epoch recomputes them
    return loss, metrics | {update_pass.ENTROPIES: entropies}


def reduce_metrics(proceed: Callable, *, metrics: dict[str, Any]) -> dict[str, Any]:
    """Add GTPO's metrics to those of the update.

    The metrics of the critic's update pass through here before the actor's. GTPO's join those of the first update or,
    with `entropy_from=update`, the actor's, which bring back the entropies.

    Raises:
        RuntimeError: the actor's update was to bring back its entropies, and has not.
    """
    entropies = _take_entropies(metrics)
    reduced = proceed()
    state = current()
    if state is None or state.pending is None:
        return reduced
    pending = state.pending
    if pending.inputs:
        is_of_actor = entropies is not None or any(name.startswith("actor/") for name in reduced)
        if not is_of_actor:
            return reduced
        if entropies is None:
            raise RuntimeError(
                "algorithm.gtpo.entropy_from=update, but the actor's loss did not apply the entropy: its worker is not "
                "verl's own (verl.workers.engine_workers), or has not loaded gtpo_verl; set entropy_from=old_log_prob"
            )
        state.finish_update(pending, entropies)
    state.pending = None
    return reduced | pending.metrics


def _take_entropies(metrics: dict[str, Any]) -> list[update_pass.RowEntropy] | None:
    """Take the metric `ENTROPIES` out of an update's metrics, under whichever prefix; None if it is not there."""
    for name in metrics:
        if str(name).endswith(f"/{update_pass.ENTROPIES}"):
            return metrics.pop(name)
    return None


def compute_data_metrics(proceed: Callable, *, batch: Any) -> dict[str, Any]:
    """Compare the batch with GTPO's advantages: verl's trainers call this with what they have updated with.

    Raises what `UpdateCheck.compare` raises.
    """
    metrics = proceed()
    state = current()
    if state and state.update_check:
        state.update_check.compare(batch.batch["advantages"], batch.batch["response_mask"])
    return metrics


def fit(proceed: Callable, trainer: Any) -> Any:
    """Watch the trainer for collapse, if its config asks for that, as long as its loop runs."""
    before = current()
    state = activate(trainer)
    state.monitor = TrainingMonitor.of(trainer)
    try:
        return proceed()
    finally:
        state.monitor = None
        set_current(before)


def track(proceed: Callable, tracking: Any, *, config: Any) -> None:
    """Learn of a trainer by its logger: it gets the whole config, whichever of verl's methods the trainer overrides."""
    proceed()
    if current() or not isinstance(config, Mapping):
        return
    # The config may be anybody's, so that only the sections are taken that the plugin reads.
    sections = {name: config[name] for name in ("algorithm", "trainer") if isinstance(config.get(name), Mapping)}
    set_current(TrainerState(OmegaConf.create(sections, flags={"allow_objects": True})))


_METRICS_OF_UPDATE = {"actor/pg_loss", "actor/grad_norm"}
"""Metrics that verl logs for an update of the actor, and for nothing else."""


def log(proceed: Callable, tracking: Any, *, data: dict[str, Any], step: Any) -> Any:
    """Read what a trainer has logged, under any estimator.

    Raises:
        RuntimeError: the run is to be watched for collapse, but its trainer's loop is not verl's.
    """
    result = proceed()
    state = current()
    if state is None:
        return result
    is_unwatched_update = state.monitor is None and not _METRICS_OF_UPDATE.isdisjoint(data)
    if is_unwatched_update and select(state.config, KEY) not in (None, False, "none"):
        raise RuntimeError(f"{KEY} does not watch a trainer with a fit of its own, as this one: remove it")
    if state.update_check:
        state.update_check.on_log(step)
    state.keep_with_checkpoint()  # verl saves a step's checkpoint before it logs the step
    if state.monitor:
        state.monitor.on_log(data)
    return result


_V1 = "verl.trainer.ppo.v1.trainer_base"
_LEGACY = "verl.trainer.ppo.ray_trainer"
_SEPARATE = "verl.experimental.separation.ray_trainer"
HOOKS = (
    Hook("settings", "verl.utils.config", "validate_config", validate_config),
    Hook("settings of experimental trainers", "verl.trainer.main_ppo", "run_ppo", validate_config),
    Hook("estimator by its name", "verl.trainer.ppo.core_algos", "get_adv_estimator_fn", get_adv_estimator_fn),
    Hook("loss by its name", "verl.trainer.ppo.core_algos", "get_policy_loss_fn", get_policy_loss_fn),
    Hook("V1 trainer", _V1, "PPOTrainer._compute_advantage", v1_compute_advantage),
    Hook("V1 trainer's loop", _V1, "PPOTrainer.fit", fit),
    Hook("legacy trainer", _LEGACY, "RayPPOTrainer._compute_old_log_prob", legacy_compute_old_log_prob),
    Hook("legacy trainer's loop", _LEGACY, "RayPPOTrainer.fit", fit),
    Hook("separate trainers", _SEPARATE, "SeparateRayPPOTrainer._fit_compute_advantage", separate_compute_advantage),
    # Where verl #7237 moves it, and where it was.
    Hook("advantages", "verl.trainer.ppo.trainer_utils", "compute_advantage", compute_advantage),
    Hook("advantages", _LEGACY, "compute_advantage", compute_advantage),
    Hook("actor's loss", "verl.workers.utils.losses", "ppo_loss", ppo_loss),
    Hook("update's metrics", "verl.utils.metric", "reduce_metrics", reduce_metrics),
    Hook("update's batch", "verl.trainer.ppo.metric_utils", "compute_data_metrics", compute_data_metrics),
    Hook("logger's config", "verl.utils.tracking", "Tracking.__init__", track),
    Hook("logger", "verl.utils.tracking", "Tracking.log", log),
)

_TRANSFER = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
# Modules that `gtpo-verl check` does not import: their packages import a rollout engine.
WORKER_HOOKS = (
    Hook("second run in a Ray cluster", "transfer_queue", "init", refuse_second_run),
    Hook("weights sent", _TRANSFER, "BucketedWeightSender.__init__", use_own_socket),
    Hook("weights received", _TRANSFER, "BucketedWeightReceiver.__init__", use_own_socket),
)
