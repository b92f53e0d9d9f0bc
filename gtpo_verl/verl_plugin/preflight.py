"""Checks, before workers start, that a verl config can run GTPO (arXiv:2508.03772), and whether it is the paper's."""

import logging
import os
import sys
import textwrap
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import verl
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.run_files.dumps import HEADER_NAME, STEP_FILES
from gtpo_verl.run_files.initial_entropy import PAPER_SAMPLES, InitialEntropy, changed_settings
from gtpo_verl.run_files.links import DOCS
from gtpo_verl.run_files.records import nearest_existing, read_record
from gtpo_verl.verl_plugin import compat, training_monitor
from gtpo_verl.verl_plugin.run_config import (
    ADV_ESTIMATOR,
    ALIAS,
    ALLOW_CHANGES,
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

logger = logging.getLogger("gtpo_verl")

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_BYPASS, _REJECTS, _WEIGHS = f"{_CORRECTION}.bypass_mode", f"{_CORRECTION}.rollout_rs", f"{_CORRECTION}.rollout_is"
_ENTROPY_FROM, _INITIAL_ENTROPY = "algorithm.gtpo.entropy_from", "algorithm.gtpo.initial_entropy"
_FILTER_GROUPS, _KL_IN_REWARD = "algorithm.filter_groups.enable", "algorithm.use_kl_in_reward"
_CLAMP = "algorithm.gtpo.min_correct_reward"
_TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
_CALCULATE, _FUSED = f"{_ACTOR}.calculate_entropy", "actor_rollout_ref.model.use_fused_kernels"

_MEGATRON_ENGINE = Path(verl.__file__).parent / "workers/engine/megatron/transformer_impl.py"

V1_PACKAGES = {"transfer_queue": "TransferQueue", "cachetools": "cachetools"}
"""What verl's V1 trainer imports once its workers are up, and what pip calls it; verl without extras brings neither."""

# Losses of verl under which a conflict token's gradient is not λ times what it would be.
_LOSSES_THAT_CHANGE_LAMBDA = {
    "geo_mean": "averages λ over each completion",
    "clip_cov": "chooses the tokens it drops by λ·A among others: λ = 2 can mean 0",
    **dict.fromkeys(("kl_cov", "dro"), "penalises tokens with λ = 0 too, from the second update on"),
}


class Departure(NamedTuple):
    """A setting under which the run is not the paper's GTPO, its value, and what the paper has."""

    setting: str
    value: str
    paper: str


def problems(config: DictConfig) -> list[str]:
    """Return why a run with this config, under any estimator, cannot start, or would not do what it says: all
    reasons in its settings, with key, value and remedy."""
    found = [*_read(config)[1], *_unknown(config, ADV_ESTIMATOR), *_unknown(config, LOSS_MODE)]
    return [*dict.fromkeys(found)]


_validated: list[tuple[Any, RunConfig]] = []
"""The config that this process has validated, and what it asks for."""


def start(config: DictConfig) -> None:
    """Check a config, and log what is to be known of the run; raises what `validated` raises."""
    from verl.trainer.ppo.utils import need_reference_policy

    _validated.clear()  # it may have changed since
    run = validated(config)
    if found := departures(config, run):
        table = textwrap.indent(as_table(found), "GTPO: ")
        logger.warning("GTPO: with these settings the run is not the paper's:\n%s", table)
    chosen = select(config, ADV_ESTIMATOR)
    if (other := foreign_function(chosen)) and not other.startswith("verl."):
        logger.warning("%s=%s is %s; for GTPO of arXiv:2508.03772 set it to %s", ADV_ESTIMATOR, chosen, other, ALIAS)
    if not run.applies_gtpo:
        return
    if run.from_update and not select(config, _CALCULATE):
        OmegaConf.update(config, _CALCULATE, True)
        logger.info("%s=True, since %s=update", _CALCULATE, _ENTROPY_FROM)
    if run.gtpo.allow_changed_advantages:
        logger.warning("%s=True: whether GTPO's advantages are those of the update is not checked", ALLOW_CHANGES)
    if warning := resume_warning(config, run):
        logger.warning("%s", warning)
    if not need_reference_policy(config):
        logger.info("GTPO runs without a reference policy: no KL term, no reference worker")
    if not compat.is_tested():
        advice = "Every function that it hooks exists; compare the first steps' gtpo/* metrics with what you expect"
        tested = " to ".join((compat.SUPPORTED_VERL[0], compat.SUPPORTED_VERL[-1]))
        logger.warning("GTPO was tested with verl %s; this is %s. %s", tested, verl.__version__, advice)


def validated(config: DictConfig) -> RunConfig:
    """Return what a config asks for, read and checked once after `start`.

    Raises:
        RuntimeError: GTPO cannot run in this process.
        ValueError: settings with which GTPO, its token dump or the watch for collapse cannot run, if the config asks
            for one; naming key, value and remedy of each.
    """
    if not (_validated and _validated[0][0] is config):
        if uses_gtpo(config):
            compat.raise_load_errors()
        run, found = _read(config)
        if run and run.applies_gtpo and select(config, "trainer.use_v1") and (missing := _missing_packages()):
            found.append(f"trainer.use_v1=True needs packages that are not installed: pip install {' '.join(missing)}")
        if run is None or found:
            raise ValueError("; ".join(found))
        _validated[:] = [(config, run)]
    return _validated[0][1]


def _read(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """Return what a config asks for, None if it cannot be read, and all problems with it."""
    found = [*_errors_of(training_monitor.read_mode, config), *_misspelt(config)]
    # Other names, such as TGPO, may be registered later, in another process.
    chosen = str(select(config, ADV_ESTIMATOR)).lower()
    if chosen[:1] == "g" and sorted(chosen) == sorted("gtpo"):
        found += _unknown(config, ADV_ESTIMATOR)
    try:
        run = RunConfig.read(config)
    except ValueError as error:
        return None, [*found, str(error), *_group_size(config), *_sequence_splits(config)]
    if run.applies_gtpo or run.gtpo.dump_dir:
        found += [*_group_size(config), *_sequence_splits(config), *_entropy_pass(config, run)]
        found += _errors_of(_check_dump, config, run)
    if run.applies_gtpo:
        found += _policy_loss(config)
        found += _errors_of(InitialEntropy.known_before, run.gtpo, run.resumed_from)
    return run, found


def _missing_packages() -> list[str]:
    return [pip for module, pip in V1_PACKAGES.items() if not find_spec(module)]


def _errors_of(check: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except ValueError as error:
        yield str(error)


def _misspelt(config: DictConfig) -> Iterator[str]:
    """Our keys beside their places, where nothing reads them: Hydra's `+` takes any.

    Where the run does not ask for GTPO, a section of such a name may be another team's, unless it asks for a dump.
    """
    serves = uses_gtpo(config)
    ours = {*VerlGTPOConfig.__dataclass_fields__} if serves else {"dump_dir"}
    for key, value in nested(OmegaConf.to_container(config) if OmegaConf.is_config(config) else {}):
        section, _, name = key.rpartition(".")
        # grpo, gspo and gdpo have no t; tpo and tgpo may be another team's.
        lower = name.lower()
        near = lower.startswith("gtpo") or ("t" in lower and get_close_matches(lower, ["gtpo"], 1, 0.7))
        near = near and (serves or lower[:1] == "g")
        has_ours = isinstance(value, dict) and value.keys() & ours
        if near and has_ours and key != "algorithm.gtpo" and (serves or name != "gtpo"):
            yield f"unused key {key}; did you mean algorithm.gtpo?"
        elif serves and section == "algorithm" and name in ours:
            yield f"unused key {key}={value}; did you mean algorithm.gtpo.{name}?"
        elif key == training_monitor.KEY or not get_close_matches(name, ["collapse_watch"], 1, 0.8):
            continue
        elif serves or value in training_monitor.CHOICES:
            yield f"unused key {key}={value}; did you mean {training_monitor.KEY}?"


def _unknown(config: DictConfig, key: str, misspelt_only: bool = False) -> Iterator[str]:
    if key == LOSS_MODE and select(config, "actor_rollout_ref.model.external_lib"):
        return  # which the workers alone import
    name, known = str(select(config, key)), sorted({*registry(key), *NAMES})
    near = get_close_matches(name.lower(), known, n=1)
    if name not in known and (near or not misspelt_only):
        hint = f"did you mean {near[0]}? " if near else ""
        yield f"{key}={name}: unknown: {hint}there are {', '.join(known)}"


def _policy_loss(config: DictConfig) -> Iterator[str]:
    yield from _unknown(config, LOSS_MODE, misspelt_only=True)
    name = select(config, LOSS_MODE)
    if (other := foreign_function(name, LOSS_MODE)) and not other.startswith("verl."):
        yield (
            f"{LOSS_MODE}={name} is {other}; two other papers are called GTPO (arXiv:2508.04349, arXiv:2511.14846). "
            f"For arXiv:2508.03772 set it to {ALIAS}"
        )
    if select(config, "distillation.enabled") and select(config, _TASK_REWARDS) is False:
        without = "verl leaves the policy loss out, and with it GTPO"
        yield f"{_TASK_REWARDS}=False: {without}; set it to True, or another {ADV_ESTIMATOR}"


def _entropy_pass(config: DictConfig, run: RunConfig) -> Iterator[str]:
    """Whether the pass of verl that is to give the entropy exists and sees every token that it averages over."""
    bypass, otherwise = bool(select(config, _BYPASS)), f"or set ++{_ENTROPY_FROM}=old_log_prob"
    if not run.applies_gtpo:
        if bypass:
            yield f"{_BYPASS}=True: it skips the pass that the token dump reads; set it to False, or leave out dump_dir"
        return
    if not run.from_update:
        yield from _kept_weights(config)
        if bypass:
            yield (
                f"{_BYPASS}=True: it skips verl's old-log-prob pass, from which GTPO takes the entropy of the policy; "
                f"set ++{_ENTROPY_FROM}=update, which takes it from the update's forward pass, or {_BYPASS}=False "
                "(verl's fully_async and one_step_off trainers ship True)"
            )
        return
    if run.gtpo.measures_initial_entropy and not run.resumed_from:
        yield (
            f"{_ENTROPY_FROM}=update with {_INITIAL_ENTROPY}=null: the filter needs the initial entropy before the "
            f"first update; measure it with `gtpo-verl initial-entropy` and set ++{_INITIAL_ENTROPY}=VALUE, or set "
            f"++algorithm.gtpo.completion_filter=always or =never, {otherwise}"
        )
    of_loss = f"{_ACTOR}.policy_loss.rollout_correction"
    # verl divides a token-mean by the tokens before rejection (#4852), and so shrinks the update.
    in_loss = f"{LOSS_MODE}=bypass_mode '+{of_loss}=${{{_CORRECTION}}}' {_ACTOR}.loss_agg_mode=seq-mean-token-mean"
    for setting in (_WEIGHS, _REJECTS):
        if (value := select(config, setting)) is None:
            continue
        read = select(config, LOSS_MODE) == "bypass_mode" and select(config, setting.replace(_CORRECTION, of_loss))
        if bypass and not read:
            yield (
                f"{setting}={value} with {_BYPASS}=True: verl's workers do not read it there, so it would do nothing; "
                f"hand it to the loss, {in_loss}, or set it to null"
            )
        elif not bypass and setting == _REJECTS:
            yield (
                f"{_ENTROPY_FROM}=update with {setting}={value}: ⟨H⟩ includes rejected tokens, which the actor never "
                f"sees; let the loss reject them, {_BYPASS}=True {in_loss}, {otherwise}"
            )


def _kept_weights(config: DictConfig) -> Iterator[str]:
    """Whether verl's asynchronous trainers can compute the old log-probs of a later update, for which they go back to a
    copy of the weights: of weights that are on the CPU already it is no copy, and updates would be lost."""
    fully, separate = "async_training.trigger_parameter_sync_step", "trainer.v1.separate_async.parameter_sync_step"
    is_fully, strategy = select(config, "async_training") is not None, select(config, f"{_ACTOR}.strategy")
    if select(config, _BYPASS) or not (is_fully or _v1_mode(config) == "separate_async"):
        return
    instead = f"set {_BYPASS}=True with ++{_ENTROPY_FROM}=update"
    if strategy == "torchtitan":
        yield f"{_ACTOR}.strategy=torchtitan: verl's asynchronous trainers cannot save its weights; {instead}"
    section = {"fsdp2": "fsdp_config", "veomni": "veomni"}.get(strategy)
    number = select(config, steps := fully if is_fully else separate) or 1
    for name in ("param_offload", "offload_policy") if section and number > 1 else ():
        if select(config, key := f"{_ACTOR}.{section}.{name}"):
            yield (
                f"{key}=True with {steps}={number}: verl would keep only the last update between two syncs; "
                f"set {key}=False or {steps}=1, or {instead}"
            )


def _group_size(config: DictConfig) -> Iterator[str]:
    if (n := select(config, f"{_ROLLOUT}.n") or 0) < 2:
        remedy = "set it to 2 or more (8 or 12 in the paper)"
        yield f"{_ROLLOUT}.n={n}: GTPO compares the completions of one prompt; {remedy}"


def _sequence_splits(config: DictConfig) -> Iterator[str]:
    """Splits of a sequence over ranks that change the numbers, or with which the update fails."""
    strategy, aggregation = select(config, f"{_ACTOR}.strategy"), select(config, f"{_ACTOR}.loss_agg_mode")
    parallel = f"{_ACTOR}.megatron.context_parallel_size"
    static = strategy == "megatron" and not select(config, f"{_ACTOR}.megatron.dynamic_context_parallel")
    if static and aggregation == "seq-mean-token-mean" and (size := select(config, parallel) or 1) > 1:
        # 0.9.0 and main of that time, not 0.9.1.
        if f"loss_agg_mode='{aggregation}' is incompatible" in _MEGATRON_ENGINE.read_text():
            yield (
                f"{_ACTOR}.loss_agg_mode={aggregation} with {parallel}={size}: this verl refuses it at the first "
                f"update (verl #7914); use verl 0.9.1, or set {parallel}=1"
            )
    implementation = "actor_rollout_ref.model.override_config.attn_implementation"
    attention = select(config, implementation)
    slices = strategy in ("fsdp", "fsdp2") and attention in ("sdpa", "eager", "flex_attention")
    for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        if slices and (size := select(config, f"{_ACTOR}.{key}") or 1) > 1:
            yield (
                f"{_ACTOR}.{key}={size} with attn_implementation={attention}: verl's sequence parallelism works "
                "with flash attention only; with others each rank would see only its slice of a completion: set the "
                f"size to 1, or ++{implementation}=flash_attention_2"
            )


def _check_dump(config: DictConfig, run: RunConfig) -> None:
    """Check that a dump, under any estimator, has a folder of its own, in which it can write."""
    if run.gtpo.dump_dir is None:
        return
    folder, setting = Path(run.gtpo.dump_dir), f"algorithm.gtpo.dump_dir={run.gtpo.dump_dir}"
    existing, header = nearest_existing(folder), folder / HEADER_NAME
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}: {existing} is not a folder that can be written to: give another one")
    if any(folder.glob(STEP_FILES)):
        record = read_record(header) if header.is_file() else {}
        owner, by = record.get("checkpoints"), record.get("adv_estimator")
        chosen = select(config, ADV_ESTIMATOR)
        moved = run.resumed_from and not (owner and Path(owner).exists())  # a run's folder, with its dump
        same = by in (None, chosen) or {by, chosen} <= {*NAMES}
        if not (moved or (same and owner == config.trainer.default_local_dir)):
            raise ValueError(f"{setting} holds the dump of another run: give another folder, or remove it")


_Papers = dict[str, tuple[Container[Any], str]]
PAPER_SETTINGS: _Papers = {
    f"{_ACTOR}.loss_agg_mode": (("seq-mean-token-mean",), "seq-mean-token-mean (Eq. 11)"),
    "algorithm.norm_adv_by_std_in_grpo": ((True,), "True (Sec. 3)"),
    f"{_ACTOR}.use_kl_loss": ((False,), "False (no KL term: this loads a reference model)"),
    _KL_IN_REWARD: ((False,), "False (no KL term: this loads a reference model; KL noise gives equal scores a sign)"),
    "critic.enable": ((False,), "False (no critic: GTPO takes no values)"),
    "distillation.enabled": ((False,), "False (no teacher)"),
    f"{_ACTOR}.entropy_coeff": ((0,), "0 (GTPO has its own entropy term, algorithm.gtpo.entropy_coeff)"),
    f"{_ROLLOUT}.temperature": ((1,), "1.0 (Sec. 6; entropy is measured at this temperature)"),
    f"{_ROLLOUT}.top_p": ((1,), "1.0 (completions of the policy itself; rollout_rs misreads cut ones, verl #8020)"),
    f"{_ROLLOUT}.top_k": ((-1, 0), "-1 (completions of the policy itself)"),
    _WEIGHS: ((), "null (no importance weights; they multiply λ)"),
    _REJECTS: ((), "null (no rejected tokens)"),
    f"{_ROLLOUT}.quantization": ((), "null (completions of the policy that is trained, verl #8076)"),
    _FUSED: ((False,), "False (fused kernels gave wrong entropies, verl #2656, #3723, or failed, #3730)"),
    _FILTER_GROUPS: ((False,), "False (groups without signal stay; −γ⟨H⟩ acts on them)"),
}
"""Settings, their values in the paper's GTPO (null is one everywhere), and the message for any other value."""

_ONE_UPDATE = "one update per rollout (Sec. 6: the gtpo loss does not clip; loss_mode=vanilla does)"


def departures(config: DictConfig, run: RunConfig) -> list[Departure]:
    """Return the settings of a checked config under which GTPO, or its loss alone, runs but is not the paper's."""
    if not run.applies_gtpo:
        clamp: _Papers = {_CLAMP: ((), f"read under {ADV_ESTIMATOR}=gtpo alone: for GRPO with it see {DOCS}/keys.md")}
        return _differing(config, clamp) + _unclipped_updates(config)
    gtpo, from_update, loss_mode = run.gtpo, run.from_update, select(config, LOSS_MODE)
    note = f"; {loss_mode} {change}" if (change := _LOSSES_THAT_CHANGE_LAMBDA.get(loss_mode)) else ""
    papers = {LOSS_MODE: (NAMES, f"gtpo (Eq. 11: no clipping){note}"), **PAPER_SETTINGS}
    if (least := gtpo.min_correct_reward) is not None:
        lowered = f"; it lowers the reward of a right answer, which must not fall below min_correct_reward={least:g}"
        papers[_KL_IN_REWARD] = (False,), PAPER_SETTINGS[_KL_IN_REWARD][1] + lowered
        papers["reward.reward_kwargs.overlong_buffer_cfg.enable"] = (False,), "False" + lowered
    if not select(config, "trainer.use_v1"):  # which reads no filter_groups
        del papers[_FILTER_GROUPS]
    if prompts := config.data.train_batch_size:  # fully_async has 0
        padded = f"{prompts}: verl pads the batch to whole mini-batches, and a mean over sequences counts the padding"
        papers[f"{_ACTOR}.ppo_mini_batch_size"] = [x for x in range(1, prompts + 1) if prompts % x == 0], padded
    papers[f"{_ROLLOUT}.dtype"] = _trained_in(config), "the precision of training (verl #8076)"
    if from_update and _several_updates(config):
        own = "old_log_prob (with several updates per rollout, ⟨H⟩ is that of the policy at a completion's update)"
        papers[_ENTROPY_FROM] = (), own
    if from_update and loss_mode in NAMES:
        papers[_BYPASS] = (False,), "False (the gtpo loss does not bound π/π_rollout; loss_mode=vanilla does)"
    found = _differing(config, papers)
    filters = select(config, _FILTER_GROUPS) and select(config, "trainer.use_v1")
    is_async = _is_async(config) or select(config, "async_training") is not None  # a section of verl's fully_async
    if (filters or is_async) and gtpo.measures_initial_entropy and not (from_update or run.resumed_from):
        biased = "groups with signal only" if filters else "what finished first"
        remedy = f"measure it with `gtpo-verl initial-entropy` and set {_INITIAL_ENTROPY}"
        paper = f"mean of {PAPER_SAMPLES} prompts (Sec. 5.2); this run's first batch holds {biased}: {remedy}"
        found.append(Departure(_INITIAL_ENTROPY, "null", paper))
    return found + _unclipped_updates(config)


def _unclipped_updates(config: DictConfig) -> list[Departure]:
    """Return the settings that update several times per rollout with the `gtpo` loss, which is not clipped, under any
    estimator."""
    if not uses_gtpo(config, LOSS_MODE):
        return []
    papers: _Papers = {
        f"async_training.{x}": ((1,), _ONE_UPDATE) for x in ("trigger_parameter_sync_step", "require_batches")
    }
    if _is_async(config):
        papers["trainer.v1.trainer_mode"] = (), f"sync: {_ONE_UPDATE}"
    return _several_updates(config) + _differing(config, papers)


def _several_updates(config: DictConfig) -> list[Departure]:
    papers: _Papers = {f"{_ACTOR}.ppo_epochs": ((1,), _ONE_UPDATE)}
    if _v1_mode(config) == "separate_async":
        papers["trainer.v1.separate_async.parameter_sync_step"] = (1,), f"1: {_ONE_UPDATE}"  # gives the mini-batch
    else:
        prompts = config.data.train_batch_size
        papers[f"{_ACTOR}.ppo_mini_batch_size"] = range(prompts, sys.maxsize), f"{prompts}: {_ONE_UPDATE}"
    return _differing(config, papers)


def _differing(config: DictConfig, papers: _Papers) -> list[Departure]:
    found = ((setting, select(config, setting), *paper) for setting, paper in papers.items())
    return [Departure(setting, str(x), said) for setting, x, values, said in found if x is not None and x not in values]


def _trained_in(config: DictConfig) -> tuple[str, ...]:
    """Return the rollout's `dtype`, if it is the precision of the actor's forward pass, by any of verl's names."""
    from verl.utils.torch_dtypes import PrecisionType

    strategy, rollout = select(config, f"{_ACTOR}.strategy"), select(config, f"{_ROLLOUT}.dtype")
    fsdp = "fsdp_config.mixed_precision.param_dtype"
    key = {"fsdp": fsdp, "fsdp2": fsdp, "megatron": "megatron.dtype"}.get(strategy)
    if key is None or rollout == "auto":
        return (rollout,)
    trained = select(config, f"{_ACTOR}.{key}") or "bf16"
    with suppress(RuntimeError):  # verl does not know vLLM's other names, such as half
        return (rollout,) if PrecisionType.to_dtype(rollout) == PrecisionType.to_dtype(trained) else ()
    return (rollout,)


def _v1_mode(config: DictConfig) -> str:
    return select(config, "trainer.v1.trainer_mode") if select(config, "trainer.use_v1") else "sync"


def _is_async(config: DictConfig) -> bool:
    """Whether a V1 trainer goes on with rollouts while it updates; of a mode that is not verl's, its class decides."""
    mode = _v1_mode(config)
    verls = ("colocate_async", "separate_async")
    if mode in ("sync", *verls) or _missing_packages():
        return mode in verls
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    return issubclass(TRAINER_REGISTRY.get(mode, object), tuple(TRAINER_REGISTRY[name] for name in verls))


def as_table(found: list[Departure]) -> str:
    """Return the departures as one aligned table."""
    lines = [Departure("setting", "value", "paper"), *found]
    first, second = (max(len(line[column]) for line in lines) for column in range(2))
    return "\n".join(f"  {x.setting:<{first}}  {x.value:<{second}}  {x.paper}" for x in lines)


def resume_warning(config: DictConfig, run: RunConfig) -> str:
    """Return what is odd about a run's checkpoints: other settings before, or checkpoints that verl ignores; or ""."""
    if run.resumed_from is None:
        record = InitialEntropy.path(config.trainer.default_local_dir)
        if config.trainer.resume_mode == "disable" or not record.exists():
            return ""
        return (
            f"{record} is of an earlier start, but verl finds no checkpoint there and begins at step 0. If there is "
            "one, name it: trainer.resume_mode=resume_path trainer.resume_from_path=… (verl #7952: under FSDP "
            "actor.checkpoint.async_save=True hides it)"
        )
    try:
        changed = "; ".join(changed_settings(run.resumed_from, run.gtpo))
    except ValueError as error:
        changed = f"unknown which, since {error}"
    return changed and f"GTPO resumes from {run.resumed_from} with other settings: {changed}"
