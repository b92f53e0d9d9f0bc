"""Checks, before workers start, that a verl config can run GTPO (arXiv:2508.03772), and whether it is the paper's."""

import logging
import os
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import fields
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from gtpo_verl.run_files.dumps import HEADER_NAME, STEP_FILES
from gtpo_verl.run_files.initial_entropy import PAPER_SAMPLES, InitialEntropy, changed_settings
from gtpo_verl.run_files.records import nearest_existing, read_record
from gtpo_verl.verl_plugin import compat, training_monitor
from gtpo_verl.verl_plugin.run_config import (
    ADV_ESTIMATOR,
    ALIAS,
    LOSS_MODE,
    NAMES,
    Mode,
    RunConfig,
    VerlGTPOConfig,
    foreign_function,
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
_LENGTH_PENALTY = "reward.reward_kwargs.overlong_buffer_cfg.enable"
_CALCULATE = f"{_ACTOR}.calculate_entropy"

V1_PACKAGES = {"transfer_queue": "TransferQueue", "cachetools": "cachetools"}
"""What verl's V1 trainer imports, and what pip calls it."""

# Losses of verl under which a conflict token's gradient is not λ times what it would be.
_LOSSES_THAT_CHANGE_LAMBDA = {
    "geo_mean": "averages λ over each completion",
    "clip_cov": "chooses the tokens it drops by λ·A among others: λ = 2 can mean 0",
    "kl_cov": "penalises tokens with λ = 0 too, from the second update on",
    "dro": "penalises tokens with λ = 0 too, from the second update on",
}


class Departure(NamedTuple):
    """A setting under which the run is not the paper's GTPO."""

    setting: str
    value: str
    paper: str


def problems(config: DictConfig) -> list[str]:
    """Why a run with this config, under any estimator, cannot start, or would not do what it says: all reasons, with
    key, value and remedy."""
    _, found = _read(config)
    for key in (ADV_ESTIMATOR, LOSS_MODE):
        found += [problem for problem in _unknown(config, key) if problem not in found]
    return found + (compat.load_errors() if uses_gtpo(config) else [])


_validated: list[tuple[Any, RunConfig]] = []
"""The config that this process has validated, and what it asks for."""


def is_validated(config: DictConfig) -> bool:
    """Whether this process has validated this very config."""
    return bool(_validated) and _validated[0][0] is config


def validated(config: DictConfig) -> RunConfig:
    """What a config asks for, read and checked once in a process.

    Raises:
        RuntimeError: GTPO cannot run in this process.
        ValueError: settings with which GTPO, its token dump or the watch for collapse cannot run, if the config asks
            for one; naming key, value and remedy of each.
    """
    if not is_validated(config):
        if uses_gtpo(config):
            compat.raise_load_errors()
        run, found = _read(config)
        if run is None or found:
            raise ValueError("; ".join(found))
        _validated[:] = [(config, run)]
    return _validated[0][1]


def _read(config: DictConfig) -> tuple[RunConfig | None, list[str]]:
    """What a config asks for, None if it cannot be read, and all problems with it."""
    found = [*_said_by(training_monitor.read_mode, config), *_misspelt(config)]
    try:
        run = RunConfig.read(config)
    except ValueError as error:
        return None, [*found, str(error), *_of_rollout(config)]
    if run.mode is not Mode.NOTHING:
        found += [*_of_rollout(config), *_entropy(config, run)]
    if run.gtpo.dump_dir is not None:
        found += _said_by(_check_dump, config, run, Path(run.gtpo.dump_dir))
    if run.mode.applies_gtpo:
        found += [*_loss(config), *_packages(config)]
        if run.resumed_from:
            found += _said_by(InitialEntropy.known_before, run.gtpo, run.resumed_from)
    return run, found


def _packages(config: DictConfig) -> Iterator[str]:
    """What verl's V1 trainer imports once its workers are up, and `pip install verl` without extras does not bring."""
    missing = [pip for module, pip in V1_PACKAGES.items() if not find_spec(module)]
    if missing and select(config, "trainer.use_v1"):
        yield f"trainer.use_v1=True needs packages that are not installed: pip install {' '.join(missing)}"


def _misspelt(config: DictConfig) -> Iterator[str]:
    """Our keys beside their places, where nothing reads them: Hydra's `+` takes any.

    A section that is called `gtpo` may be another team's where the run does not ask for GTPO.
    """
    ours, serves = {field.name for field in fields(VerlGTPOConfig)}, uses_gtpo(config)
    sections: list[tuple[str, Any]] = [("", OmegaConf.to_container(config))] if OmegaConf.is_config(config) else []
    for prefix, section in sections:
        for name, value in section.items():
            key, is_section = f"{prefix}{name}", isinstance(value, dict)
            sections += [(f"{key}.", value)] if is_section else []
            like_gtpo = is_section and get_close_matches(str(name), ["gtpo"], cutoff=0.7) and value.keys() & ours
            if like_gtpo and key != "algorithm.gtpo" and (serves or name != "gtpo"):
                yield f"{key}: nothing reads it; did you mean algorithm.gtpo?"
            elif get_close_matches(str(name), ["collapse_watch"], cutoff=0.8) and key != training_monitor.KEY:
                yield f"{key}={value}: nothing reads it; did you mean {training_monitor.KEY}?"


def _of_rollout(config: DictConfig) -> Iterator[str]:
    if (n := select(config, f"{_ROLLOUT}.n")) < 2:
        yield (
            f"{_ROLLOUT}.n={n}: GTPO compares the completions of one prompt; set it to 2 or more (8 or 12 in the paper)"
        )
    yield from _sequence_parallel(config)


def _said_by(check: Callable[..., Any], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except ValueError as error:
        yield str(error)


def _unknown(config: DictConfig, key: str, misspelt_only: bool = False) -> Iterator[str]:
    name, known = str(select(config, key)), sorted({*registry(key), *NAMES})
    near = get_close_matches(name, known, n=1)
    if name not in known and (near or not misspelt_only):
        yield f"{key}={name}: unknown: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def _loss(config: DictConfig) -> Iterator[str]:
    # Another may be of a package that the workers alone import.
    yield from _unknown(config, LOSS_MODE, misspelt_only=True)
    name, other = select(config, LOSS_MODE), foreign_function(config, LOSS_MODE)
    if other and not other.startswith("verl."):
        yield (
            f"{LOSS_MODE}={name} is {other}; two other papers are called GTPO (arXiv:2508.04349, arXiv:2511.14846). "
            f"For arXiv:2508.03772 set it to {ALIAS}"
        )


def _entropy(config: DictConfig, run: RunConfig) -> Iterator[str]:
    """Whether the pass of verl that is to give the entropy exists and sees every token that it averages over."""
    bypass = bool(select(config, _BYPASS))
    if run.gtpo.entropy_from == "old_log_prob":
        if bypass:
            yield (
                f"{_BYPASS}=True: it skips verl's old-log-prob pass, from which GTPO takes the entropy of the policy; "
                f"set ++{_ENTROPY_FROM}=update, which takes it from the update's forward pass, or {_BYPASS}=False "
                "(verl's fully_async trainer ships True)"
            )
        return
    otherwise = f"or set ++{_ENTROPY_FROM}=old_log_prob"
    if _measures_initial_entropy(run.gtpo) and not run.resumed_from:
        yield (
            f"{_ENTROPY_FROM}=update with {_INITIAL_ENTROPY}=null: the filter needs the initial entropy before the "
            f"first update; measure it with `gtpo-verl initial-entropy` and set ++{_INITIAL_ENTROPY}=VALUE, or set "
            f"++algorithm.gtpo.completion_filter=always or =never, {otherwise}"
        )
    of_loss = f"{_ACTOR}.policy_loss.rollout_correction"
    # verl divides a token-mean by the tokens before rejection (#4852), and so shrinks the update.
    in_loss = f"{LOSS_MODE}=bypass_mode '+{of_loss}=${{{_CORRECTION}}}' {_ACTOR}.loss_agg_mode=seq-mean-token-mean"
    for setting in (_WEIGHS, _REJECTS):
        name, value = setting.rpartition(".")[2], select(config, setting)
        if value is None:
            continue
        read = select(config, LOSS_MODE) == "bypass_mode" and select(config, f"{of_loss}.{name}")
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


def ask_for_entropy(config: DictConfig, mode: Mode) -> None:
    """Make the actor compute entropy in its update, if GTPO reads it there."""
    if mode is Mode.GTPO_FROM_UPDATE and not select(config, _CALCULATE):
        OmegaConf.update(config, _CALCULATE, True)
        logger.info("%s=True, since %s=update", _CALCULATE, _ENTROPY_FROM)


def _sequence_parallel(config: DictConfig) -> Iterator[str]:
    """Where verl splits a sequence over ranks in a way that changes the numbers, or refuses to at the first update."""
    strategy = select(config, f"{_ACTOR}.strategy")
    if strategy == "megatron":
        parallel, mode = f"{_ACTOR}.megatron.context_parallel_size", select(config, f"{_ACTOR}.loss_agg_mode")
        size, found = select(config, parallel) or 1, compat.verl_version()
        if size > 1 and mode == "seq-mean-token-mean" and found is not None and found < Version("0.9.1"):
            yield (
                f"{_ACTOR}.loss_agg_mode={mode} with {parallel}={size}: verl {found} refuses this at the first update "
                f"(verl #7914); use verl 0.9.1 or later, or set {parallel}=1"
            )
    implementation = "actor_rollout_ref.model.override_config.attn_implementation"
    attention = select(config, implementation)
    if strategy not in ("fsdp", "fsdp2") or attention not in ("sdpa", "eager", "flex_attention"):
        return
    for parallel in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        size = select(config, f"{_ACTOR}.{parallel}") or 1
        if size > 1:
            yield (
                f"{_ACTOR}.{parallel}={size} with attn_implementation={attention}: verl's sequence parallelism works "
                "with flash attention only; with others each rank would see only its slice of a completion: set the "
                f"size to 1, or {implementation}=flash_attention_2"
            )


def _check_dump(config: DictConfig, run: RunConfig, folder: Path) -> None:
    """A dump, under any estimator, needs a folder of its own, in which it can write."""
    existing = nearest_existing(folder)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"algorithm.gtpo.dump_dir={folder}: {existing} is not a folder that can be written to: give another one"
        )
    if run.resumed_from or not any(folder.glob(STEP_FILES)):
        return
    header = folder / HEADER_NAME
    if not header.is_file() or read_record(header).get("checkpoints") != config.trainer.default_local_dir:
        raise ValueError(
            f"algorithm.gtpo.dump_dir={folder} holds the dump of another run: give another folder, or remove it"
        )


_Papers = dict[str, tuple[Container[Any], str]]
"""Settings, their values in the paper's GTPO (null is one everywhere), and the message for any other value."""

_PAPERS: _Papers = {
    f"{_ACTOR}.loss_agg_mode": (("seq-mean-token-mean",), "seq-mean-token-mean (Eq. 11)"),
    "algorithm.norm_adv_by_std_in_grpo": ((True,), "True (Sec. 3)"),
    f"{_ACTOR}.use_kl_loss": ((False,), "False (no KL term: this loads a reference model)"),
    _KL_IN_REWARD: (
        (False,),
        "False (no KL term: this loads a reference model, and KL noise gives equal scores a sign, which λ amplifies)",
    ),
    "critic.enable": ((False,), "False (no critic: GTPO takes no values)"),
    "distillation.enabled": ((False,), "False (no teacher)"),
    f"{_ACTOR}.entropy_coeff": ((0,), "0 (GTPO has its own entropy term, algorithm.gtpo.entropy_coeff)"),
    f"{_ROLLOUT}.temperature": ((1,), "1.0 (Sec. 6; entropy is measured at this temperature)"),
    f"{_ROLLOUT}.top_p": ((1,), "1.0 (completions of the policy itself; rollout_rs misreads cut ones, verl #8020)"),
    f"{_ROLLOUT}.top_k": ((-1, 0), "-1 (completions of the policy itself)"),
    _WEIGHS: ((), "null (no importance weights; they multiply λ)"),
    _REJECTS: ((), "null (no rejected tokens)"),
    f"{_ROLLOUT}.quantization": ((), "null (completions of the policy that is trained, verl #8076)"),
    "actor_rollout_ref.model.use_fused_kernels": (
        (False,),
        "False (fused kernels gave wrong entropies and log-probabilities, verl #2656, #3723, or failed, #3730)",
    ),
    _FILTER_GROUPS: ((False,), "False (groups without signal stay; −γ⟨H⟩ acts on them)"),
}
_ONE_UPDATE = "one update per rollout (Sec. 6; the gtpo loss is not clipped)"


def departures(config: DictConfig, gtpo: VerlGTPOConfig) -> list[Departure]:
    """Settings of a checked config under which GTPO runs but is not the paper's GTPO."""
    loss_mode = select(config, LOSS_MODE)
    note = f"; {loss_mode} {change}" if (change := _LOSSES_THAT_CHANGE_LAMBDA.get(loss_mode)) else ""
    papers = {LOSS_MODE: (NAMES, f"gtpo (Eq. 11: no clipping){note}"), **_PAPERS}
    if (least := gtpo.min_correct_reward) is not None:
        lowered = f"; it lowers the reward of a right answer, which must not fall below min_correct_reward={least:g}"
        papers[_KL_IN_REWARD] = (False,), _PAPERS[_KL_IN_REWARD][1] + lowered
        papers[_LENGTH_PENALTY] = (False,), "False" + lowered
    if not select(config, "trainer.use_v1"):  # which reads no filter_groups
        del papers[_FILTER_GROUPS]
    papers[f"{_ROLLOUT}.dtype"] = _trained_in(config), "the precision of training (verl #8076)"
    from_update = gtpo.entropy_from == "update"
    if from_update:
        if _differing(config, _updates(config)):
            own = "old_log_prob (with several updates per rollout, ⟨H⟩ is that of the policy at a completion's update)"
            papers[_ENTROPY_FROM] = (), own
        if loss_mode in NAMES:
            papers[_BYPASS] = (False,), "False (the gtpo loss does not bound π/π_rollout; loss_mode=vanilla does)"
    found = _differing(config, papers)
    if _measures_initial_entropy(gtpo) and not from_update and (biased := _first_batch(config)):
        paper = (
            f"mean of {PAPER_SAMPLES} prompts (Sec. 5.2); this run's first batch holds {biased}: measure it with "
            f"`gtpo-verl initial-entropy` and set {_INITIAL_ENTROPY}"
        )
        found.append(Departure(_INITIAL_ENTROPY, "null", paper))
    return found + unclipped_updates(config)


def unclipped_updates(config: DictConfig) -> list[Departure]:
    """Settings that make several updates per rollout with the `gtpo` loss, which is not clipped; any estimator."""
    if not uses_gtpo(config, LOSS_MODE):
        return []
    papers = _updates(config)
    if _is_async(config):
        papers["trainer.v1.trainer_mode"] = (), f"sync: {_ONE_UPDATE}"
    return _differing(config, papers)


def _updates(config: DictConfig) -> _Papers:
    """The settings by which verl updates several times on one batch of rollouts."""
    prompts = config.data.train_batch_size
    return {
        f"{_ACTOR}.ppo_epochs": ((1,), _ONE_UPDATE),
        f"{_ACTOR}.ppo_mini_batch_size": (range(prompts, sys.maxsize), f"{prompts}: {_ONE_UPDATE}"),
    }


def _differing(config: DictConfig, papers: _Papers) -> list[Departure]:
    found = ((setting, select(config, setting), *paper) for setting, paper in papers.items())
    return [Departure(setting, str(x), said) for setting, x, values, said in found if x is not None and x not in values]


def _trained_in(config: DictConfig) -> tuple[str, ...]:
    """The rollout's `dtype`, if it is the precision of the actor's forward pass in training, by any of verl's names."""
    from verl.utils.torch_dtypes import PrecisionType

    strategy, rollout = select(config, f"{_ACTOR}.strategy"), select(config, f"{_ROLLOUT}.dtype")
    trained = select(config, f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype") or "bf16"
    if strategy == "megatron":
        trained = select(config, f"{_ACTOR}.megatron.dtype") or "bf16"
    known = strategy in ("fsdp", "fsdp2", "megatron") and rollout != "auto"
    same = not known or PrecisionType.to_dtype(rollout) == PrecisionType.to_dtype(trained)
    return (rollout,) * same


def _measures_initial_entropy(gtpo: VerlGTPOConfig) -> bool:
    return gtpo.completion_filter == "auto" and gtpo.initial_entropy is None


def _first_batch(config: DictConfig) -> str:
    """What a run's first batch holds, if not simply its first prompts."""
    if select(config, _FILTER_GROUPS) and select(config, "trainer.use_v1"):
        return "groups with signal only"
    # verl's fully_async trainer has a section of its own.
    return "what finished first" if _is_async(config) or select(config, "async_training") is not None else ""


def _is_async(config: DictConfig) -> bool:
    """Whether a V1 trainer goes on with rollouts while it updates; of a mode that is not verl's, its class decides."""
    mode = select(config, "trainer.v1.trainer_mode") if select(config, "trainer.use_v1") else "sync"
    verls = ("colocate_async", "separate_async")
    if mode in ("sync", *verls) or [*_packages(config)]:
        return mode in verls
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    return issubclass(TRAINER_REGISTRY.get(mode, object), tuple(TRAINER_REGISTRY[name] for name in verls))


def as_table(found: list[Departure]) -> str:
    """The departures as one aligned table."""
    lines = [Departure("setting", "value", "paper"), *found]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"  {x.setting:<{widths[0]}}  {x.value:<{widths[1]}}  {x.paper}" for x in lines)


def resume_warnings(config: DictConfig, run: RunConfig) -> list[str]:
    """What is odd about the folder of a run's checkpoints: other settings before, or checkpoints that verl ignores."""
    folder = run.resumed_from or config.trainer.default_local_dir
    if not run.resumed_from:
        if config.trainer.resume_mode == "disable" or not InitialEntropy.path(folder).exists():
            return []
        return [
            f"{InitialEntropy.path(folder)} is of an earlier start, but verl finds no checkpoint there and begins at "
            "step 0. If there is one, name it: trainer.resume_mode=resume_path trainer.resume_from_path=… (verl #7952: "
            "under FSDP actor.checkpoint.async_save=True hides it)"
        ]
    try:
        changed = changed_settings(folder, run.gtpo)
    except ValueError as error:
        changed = [f"unknown which, since {error}"]
    return [f"GTPO resumes from {folder} with other settings: {'; '.join(changed)}"] if changed else []
