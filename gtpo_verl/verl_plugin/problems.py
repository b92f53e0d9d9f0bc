"""Settings with which GTPO (arXiv:2508.03772), its token dump or the monitor cannot run, or would not do what they say.

Each check is a function that returns messages, which name key, value and remedy. It returns none where all is well.
"""

import os
from collections.abc import Callable
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import verl
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.run.dumps import HEADER_NAME, STEP_FILES
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.run.records import nearest_existing, read_record
from gtpo_verl.verl_plugin import training_monitor
from gtpo_verl.verl_plugin.resume import missing_checkpoint, path_problems
from gtpo_verl.verl_plugin.run_config import (
    ADV_ESTIMATOR,
    ALIAS,
    LOSS_MODE,
    NAMES,
    RunConfig,
    VerlGTPOConfig,
    foreign_function,
    nested,
    registry,
    select,
    uses_gtpo,
)
from gtpo_verl.verl_plugin.values import SECTIONS, WrongValue, put_right, wrong_values

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_BYPASS = f"{_CORRECTION}.bypass_mode"
_REJECTS = f"{_CORRECTION}.rollout_rs"
_WEIGHS = f"{_CORRECTION}.rollout_is"
_CORRECTION_OF_LOSS = f"{_ACTOR}.policy_loss.rollout_correction"
_ENTROPY_FROM = "algorithm.gtpo.entropy_from"
_INITIAL_ENTROPY = "algorithm.gtpo.initial_entropy"
_TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
_MEGATRON_ENGINE = Path(verl.__file__).parent / "workers/engine/megatron/transformer_impl.py"

V1_PACKAGES = {"transfer_queue": "TransferQueue", "cachetools": "cachetools"}
"""What verl's V1 trainer imports once its workers are up, and what pip calls it; verl without extras brings neither."""

_READ = {
    *SECTIONS,
    "async_training.require_batches",
    "async_training.trigger_parameter_sync_step",
    "data.max_response_length",
    "data.train_batch_size",
    "trainer.v1.separate_async.parameter_sync_step",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    f"{_ACTOR}.megatron.context_parallel_size",
    f"{_ACTOR}.ppo_epochs",
    f"{_ACTOR}.ppo_mini_batch_size",
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    f"{_ROLLOUT}.n",
}
"""Keys of verl whose values the plugin computes with."""


def problems(config: DictConfig) -> list[str]:
    """Return all problems with the settings of a run, under any estimator, each once."""
    _, messages = read(config)
    messages += unknown_name(config, ADV_ESTIMATOR)
    messages += unknown_name(config, LOSS_MODE)
    return list(dict.fromkeys(messages))


def read(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """Return what a config asks for, or None if it cannot be read; and all problems with it."""
    messages = _message_of(training_monitor.read_mode, config)
    messages += _sections_elsewhere(config)
    messages += _keys_elsewhere(config)
    messages += _misspelt_estimator(config)
    if uses_gtpo(config) or select(config, "algorithm.gtpo.dump_dir") is not None:
        wrong = [value for value in wrong_values(config, _READ) if value.is_certain]
        if wrong:
            messages += [f"{value.key} {value.says}: give {value.takes}" for value in wrong]
            messages += _independent_problems(config, wrong)
            return None, messages
    run, further = _read_usable(config)
    return run, messages + further


def _independent_problems(config: DictConfig, wrong: list[WrongValue]) -> list[str]:
    """Return the problems of a config that do not depend on its wrong values."""
    config = config.copy()
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    for value in wrong:
        put_right(config, value)
    _, messages = _read_usable(config)
    for value in wrong:
        messages = [message for message in messages if f"{value.key}=" not in message]
    return messages


def _read_usable(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """Return what `read` returns of a config with values that the plugin can compute with."""
    try:
        run = RunConfig.read(config)
    except ValueError as error:
        return None, [str(error), *_group_size(config), *_sequence_splits(config)]

    messages: list[str] = []
    if run.applies_gtpo or run.gtpo.dump_dir:
        messages += _group_size(config)
        messages += _sequence_splits(config)
    if run.applies_gtpo:
        messages += _bypass_without_entropy(config, run)
        messages += _asynchronous_weights(config)
        messages += _entropy_of_the_update(config, run)
    elif run.gtpo.dump_dir and select(config, _BYPASS):
        remedy = "set it to False, or leave out dump_dir"
        messages.append(f"{_BYPASS}=True: it skips the pass that the token dump reads; {remedy}")
    if run.gtpo.dump_dir is not None:
        messages += _dump_folder(config, run)
    if run.applies_gtpo:
        messages += _policy_loss(config)
        messages += _distillation(config)
        messages += _checkpoint(config, run)
    return run, messages


def missing_packages() -> list[str]:
    """Return the packages of verl's V1 trainer that are not installed, by the names that pip has for them."""
    return [pip for module, pip in V1_PACKAGES.items() if not find_spec(module)]


def _message_of(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the message of the ValueError that a function raises; none if it raises none."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def _sections_elsewhere(config: DictConfig) -> list[str]:
    """Find our section under another name or in another place, where nothing reads it: Hydra's `+` takes any.

    Where the run does not ask for GTPO, a section of such a name may be another team's, unless it asks for a dump.
    """
    asks_for_gtpo = uses_gtpo(config)
    our_keys = set(VerlGTPOConfig.__dataclass_fields__) if asks_for_gtpo else {"dump_dir"}
    messages = []
    for key, value in _nested(config):
        if not isinstance(value, dict) or our_keys.isdisjoint(value) or key == "algorithm.gtpo":
            continue
        name = key.rpartition(".")[2]
        lower = name.lower()
        if not asks_for_gtpo and (name == "gtpo" or not lower.startswith("g")):
            continue
        # grpo, gspo and gdpo are like it too, but other algorithms; they have no t.
        is_like_gtpo = "t" in lower and bool(get_close_matches(lower, ["gtpo"], 1, 0.7))
        if lower.startswith("gtpo") or is_like_gtpo:
            messages.append(f"unused key {key}; did you mean algorithm.gtpo?")
    return messages


def _keys_elsewhere(config: DictConfig) -> list[str]:
    """Find our keys under another name or in another place, where nothing reads them."""
    asks_for_gtpo = uses_gtpo(config)
    messages = []
    for key, value in _nested(config):
        section, _, name = key.rpartition(".")
        if asks_for_gtpo and section == "algorithm" and name in VerlGTPOConfig.__dataclass_fields__:
            messages.append(f"unused key {key}={value}; did you mean algorithm.gtpo.{name}?")
            continue
        if key == training_monitor.KEY or not get_close_matches(name, ["collapse_watch"], 1, 0.8):
            continue
        # Under another estimator a key of such a name may be another team's, unless its value is one of ours.
        if asks_for_gtpo or value in training_monitor.CHOICES:
            messages.append(f"unused key {key}={value}; did you mean {training_monitor.KEY}?")
    return messages


def _nested(config: DictConfig) -> list[tuple[str, Any]]:
    """Return each key of a config with its value, which may be a section; none if it is no config of OmegaConf."""
    if not OmegaConf.is_config(config):
        return []
    return list(nested(OmegaConf.to_container(config)))


def _misspelt_estimator(config: DictConfig) -> list[str]:
    """Find a misspelt gtpo, such as gpto. Other names, such as TGPO, may be registered later, in another process."""
    chosen = str(select(config, ADV_ESTIMATOR)).lower()
    if chosen.startswith("g") and sorted(chosen) == sorted("gtpo"):
        return unknown_name(config, ADV_ESTIMATOR)
    return []


def unknown_name(config: DictConfig, key: str, misspelt_only: bool = False) -> list[str]:
    """Return a message if verl has no estimator, or no loss, of the name that a key has.

    With `misspelt_only` it has to be like a name that verl has.
    """
    if key == LOSS_MODE and select(config, "actor_rollout_ref.model.external_lib"):
        return []  # a module that only the workers import, and that may register losses
    name = str(select(config, key))
    known = sorted({*registry(key), *NAMES})
    near = get_close_matches(name.lower(), known, n=1)
    if name in known or (misspelt_only and not near):
        return []
    hint = f"did you mean {near[0]}? " if near else ""
    return [f"{key}={name}: unknown: {hint}there are {', '.join(known)}"]


def _policy_loss(config: DictConfig) -> list[str]:
    """Check that the policy loss is known, and no other paper's GTPO."""
    name = select(config, LOSS_MODE)
    function = foreign_function(name, LOSS_MODE)
    messages = unknown_name(config, LOSS_MODE, misspelt_only=True)
    if function and not function.startswith("verl."):
        messages.append(
            f"{LOSS_MODE}={name} is {function}; two other papers are called GTPO (arXiv:2508.04349, arXiv:2511.14846). "
            f"For arXiv:2508.03772 set it to {ALIAS}"
        )
    return messages


def _distillation(config: DictConfig) -> list[str]:
    """Check that distillation, if it is on, leaves the policy loss in."""
    if not select(config, "distillation.enabled") or select(config, _TASK_REWARDS) is not False:
        return []
    effect = "verl leaves the policy loss out, and with it GTPO"
    return [f"{_TASK_REWARDS}=False: {effect}; set it to True, or another {ADV_ESTIMATOR}"]


def _bypass_without_entropy(config: DictConfig, run: RunConfig) -> list[str]:
    """Check that the old-log-prob pass takes place, if the entropy is to come from it."""
    if run.entropy_from_update or not select(config, _BYPASS):
        return []
    return [
        f"{_BYPASS}=True: it skips verl's old-log-prob pass, from which GTPO takes the entropy of the policy; "
        f"set ++{_ENTROPY_FROM}=update, which takes it from the update's forward pass, or {_BYPASS}=False "
        "(verl's fully_async and one_step_off trainers ship True)"
    ]


def _asynchronous_weights(config: DictConfig) -> list[str]:
    """Check that verl's asynchronous trainers can compute the old log-probs of a later update.

    They go back to a copy of the weights that they have made on the CPU. If the weights are on the CPU themselves, that
    is no copy, and updates would be lost.
    """
    if select(config, _BYPASS):  # then they compute none, wherever the entropy comes from
        return []
    is_fully_async = select(config, "async_training") is not None
    if not is_fully_async and v1_mode(config) != "separate_async":
        return []
    instead = f"set {_BYPASS}=True with ++{_ENTROPY_FROM}=update"
    strategy = select(config, f"{_ACTOR}.strategy")
    if strategy == "torchtitan":
        return [f"{_ACTOR}.strategy=torchtitan: verl's asynchronous trainers cannot save its weights; {instead}"]
    if strategy not in ("fsdp2", "veomni"):
        return []
    steps_key = "trainer.v1.separate_async.parameter_sync_step"
    if is_fully_async:
        steps_key = "async_training.trigger_parameter_sync_step"
    steps = select(config, steps_key) or 1
    if steps <= 1:
        return []
    section = "fsdp_config" if strategy == "fsdp2" else "veomni"
    messages = []
    for key in (f"{_ACTOR}.{section}.param_offload", f"{_ACTOR}.{section}.offload_policy"):
        if select(config, key):
            messages.append(
                f"{key}=True with {steps_key}={steps}: verl would keep only the last update between two syncs; "
                f"set {key}=False or {steps_key}=1, or {instead}"
            )
    return messages


def _entropy_of_the_update(config: DictConfig, run: RunConfig) -> list[str]:
    """Check that the update's own pass can give the entropy, that of each token over which ⟨H⟩ is a mean."""
    if not run.entropy_from_update:
        return []
    messages = []
    otherwise = f"or set ++{_ENTROPY_FROM}=old_log_prob"
    if run.gtpo.measures_initial_entropy and not run.resumed_from:
        messages.append(
            f"{_ENTROPY_FROM}=update with {_INITIAL_ENTROPY}=null: the filter needs the initial entropy before the "
            f"first update; measure it with `gtpo-verl initial-entropy` and set ++{_INITIAL_ENTROPY}=VALUE, or set "
            f"++algorithm.gtpo.completion_filter=always or =never, {otherwise}"
        )
    # Under bypass mode verl's loss can do what the trainer does otherwise, if it is told so in a section of its own.
    # The aggregation belongs to it: verl divides a token-mean by the tokens before rejection (#4852), and so shrinks
    # the update.
    in_loss = (
        f"{LOSS_MODE}=bypass_mode '+{_CORRECTION_OF_LOSS}=${{{_CORRECTION}}}' "
        f"{_ACTOR}.loss_agg_mode=seq-mean-token-mean"
    )
    bypasses = bool(select(config, _BYPASS))
    for setting in (_WEIGHS, _REJECTS):
        value = select(config, setting)
        if value is None:
            continue
        value_of_loss = select(config, setting.replace(_CORRECTION, _CORRECTION_OF_LOSS))
        is_read_by_loss = select(config, LOSS_MODE) == "bypass_mode" and value_of_loss
        if bypasses and not is_read_by_loss:
            messages.append(
                f"{setting}={value} with {_BYPASS}=True: verl's workers do not read it there, so it would do nothing; "
                f"hand it to the loss, {in_loss}, or set it to null"
            )
        elif not bypasses and setting == _REJECTS:
            messages.append(
                f"{_ENTROPY_FROM}=update with {setting}={value}: ⟨H⟩ includes rejected tokens, which the actor never "
                f"sees; let the loss reject them, {_BYPASS}=True {in_loss}, {otherwise}"
            )
    return messages


def _group_size(config: DictConfig) -> list[str]:
    """Check that a group has several completions."""
    n = select(config, f"{_ROLLOUT}.n") or 0
    if n >= 2:
        return []
    remedy = "set it to 2 or more (8 or 12 in the paper)"
    return [f"{_ROLLOUT}.n={n}: GTPO compares the completions of one prompt; {remedy}"]


def _sequence_splits(config: DictConfig) -> list[str]:
    """Find splits of a sequence over ranks that change the numbers, or with which the update fails."""
    return [*_megatron_split(config), *_ulysses_split(config)]


def _megatron_split(config: DictConfig) -> list[str]:
    """Check that this verl can aggregate the loss of a sequence that Megatron splits over ranks."""
    key = f"{_ACTOR}.megatron.context_parallel_size"
    size = select(config, key) or 1
    aggregation = select(config, f"{_ACTOR}.loss_agg_mode")
    if select(config, f"{_ACTOR}.strategy") != "megatron" or size <= 1 or aggregation != "seq-mean-token-mean":
        return []
    if select(config, f"{_ACTOR}.megatron.dynamic_context_parallel"):
        return []
    # Its source tells, since checkouts have no version of their own: 0.9.0 refuses, 0.9.1 does not.
    if f"loss_agg_mode='{aggregation}' is incompatible" not in _MEGATRON_ENGINE.read_text():
        return []
    return [
        f"{_ACTOR}.loss_agg_mode={aggregation} with {key}={size}: this verl refuses it at the first update (verl "
        f"#7914); use verl 0.9.1, or set {key}=1"
    ]


def _ulysses_split(config: DictConfig) -> list[str]:
    """Check that verl's sequence parallelism goes with the model's attention."""
    implementation = "actor_rollout_ref.model.override_config.attn_implementation"
    attention = select(config, implementation)
    if select(config, f"{_ACTOR}.strategy") not in ("fsdp", "fsdp2"):
        return []
    if attention not in ("sdpa", "eager", "flex_attention"):
        return []
    messages = []
    for name in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        size = select(config, f"{_ACTOR}.{name}") or 1
        if size > 1:
            messages.append(
                f"{_ACTOR}.{name}={size} with attn_implementation={attention}: verl's sequence parallelism works "
                "with flash attention only; with others each rank would see only its slice of a completion: set the "
                f"size to 1, or ++{implementation}=flash_attention_2"
            )
    return messages


def _dump_folder(config: DictConfig, run: RunConfig) -> list[str]:
    """Check that a dump, under any estimator, has a folder of its own, in which it can write."""
    assert run.gtpo.dump_dir is not None
    folder = Path(run.gtpo.dump_dir)
    setting = f"algorithm.gtpo.dump_dir={run.gtpo.dump_dir}"
    existing = nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [f"{setting}: {existing} is not a folder that can be written to: give another one"]
    if not any(folder.glob(STEP_FILES)):
        return []

    header = folder / HEADER_NAME
    try:
        record = read_record(header) if header.is_file() else {}
    except ValueError as error:
        return [str(error)]
    checkpoints = record.get("checkpoints")
    # The dump of a resumed run is its own too if it was moved with the run's folder, and the old one is gone.
    has_checkpoints = isinstance(checkpoints, str) and checkpoints != "" and Path(checkpoints).exists()
    if run.resumed_from and not has_checkpoints:
        return []
    estimators = [record.get("adv_estimator"), select(config, ADV_ESTIMATOR)]
    is_unknown = None in estimators
    is_same = estimators[0] == estimators[1]
    are_ours = all(estimator in NAMES for estimator in estimators)
    is_of_same_folder = checkpoints == select(config, "trainer.default_local_dir")
    if is_of_same_folder and (is_unknown or is_same or are_ours):
        return []
    return [f"{setting} holds the dump of another run: give another folder, or remove it"]


def _checkpoint(config: DictConfig, run: RunConfig) -> list[str]:
    """Check that the checkpoint to be resumed is there, with its record of the initial entropy."""
    messages = path_problems(config) or missing_checkpoint(config)
    return messages or _message_of(InitialEntropy.known_before, run.gtpo, run.resumed_from)


def v1_mode(config: DictConfig) -> str:
    """Return the mode of verl's V1 trainer; of the legacy trainer, which behaves like it, `sync`."""
    if not select(config, "trainer.use_v1"):
        return "sync"
    return str(select(config, "trainer.v1.trainer_mode"))
