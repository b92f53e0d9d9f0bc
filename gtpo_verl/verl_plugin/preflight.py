"""Checks, before workers start, that a verl config can run GTPO (arXiv:2508.03772), and whether it is the paper's."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import verl
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from gtpo_verl.initial_entropy import InitialEntropy, changed_settings
from gtpo_verl.records import read_record
from gtpo_verl.verl_plugin import collapse, registration
from gtpo_verl.verl_plugin.config import VerlGTPOConfig
from gtpo_verl.verl_plugin.registration import LOSS_MODE, NAMES
from gtpo_verl.verl_plugin.token_dump import HEADER_NAME, STEP_FILES

logger = logging.getLogger("gtpo_verl")

_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ENTROPY_FROM = "algorithm.gtpo.entropy_from"
_CALCULATE = "actor_rollout_ref.actor.calculate_entropy"

# Losses of verl under which a conflict token's gradient is not λ times what it would be (docs/compose.md).
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


def validate(config: DictConfig) -> None:
    """Raise on settings with which GTPO, its token dump or the watch for collapse cannot run.

    Args:
        config (DictConfig): verl's whole config.

    Raises:
        ValueError: naming key, value and remedy.
        RuntimeError: GTPO cannot run in this process.
    """
    collapse.read_mode(config)
    if OmegaConf.select(config, "algorithm.gtpo.dump_dir") is not None:
        _check_gtpo(config)
        _check_dump(config)
    if registration.serves(config):
        registration.raise_load_errors(config)
        _check_trainer(config)
        _check_gtpo(config)


def _check_trainer(config: DictConfig) -> None:
    if "use_v1" not in config.trainer and OmegaConf.select(config, "transfer_queue.enable"):
        raise ValueError(
            f"transfer_queue.enable=True: GTPO does not hook the TransferQueue trainer of verl {verl.__version__} "
            "(main_ppo_sync); set it to False and start verl.trainer.main_ppo, or use verl 0.9.0 or later"
        )


def _check_gtpo(config: DictConfig) -> None:
    gtpo = VerlGTPOConfig.from_config(config.algorithm)
    n = config.actor_rollout_ref.rollout.n
    if n < 2:
        raise ValueError(
            f"actor_rollout_ref.rollout.n={n}: GTPO compares the completions of one prompt; set it to at least 2 "
            "(8 or 12 in the paper)"
        )
    if gtpo.entropy_from == "update":
        _check_entropy_from_update(config, gtpo)
    elif OmegaConf.select(config, _BYPASS):
        raise ValueError(
            f"{_BYPASS}=True: it skips verl's old-log-prob pass, from which GTPO takes the entropy of the policy; set "
            f"{_ENTROPY_FROM}=update, which takes it from the update's forward pass, or "
            "bypass_mode=False (verl's fully_async trainer ships True)"
        )
    _check_sequence_parallel(config)


def _check_entropy_from_update(config: DictConfig, gtpo: VerlGTPOConfig) -> None:
    def refuse(setting: str, why: str, remedy: str) -> None:
        raise ValueError(f"{_ENTROPY_FROM}=update with {setting}: {why}; {remedy}, or set entropy_from=old_log_prob")

    found, first = registration.verl_version(), "0.8.0"
    if found is not None and found < Version(first):
        refuse(f"verl {found}", "its actors compute no entropy in the update", f"use verl {first} or later")
    if _measures_initial_entropy(config) and not resumes(config):
        refuse(
            "algorithm.gtpo.initial_entropy=null",
            "the filter needs the initial entropy before the first update",
            "measure it with `gtpo-verl initial-entropy` and set algorithm.gtpo.initial_entropy, or set "
            "completion_filter to always or never",
        )
    rejects = "algorithm.rollout_correction.rollout_rs"
    if OmegaConf.select(config, rejects) is not None and not OmegaConf.select(config, _BYPASS):
        refuse(
            f"{rejects}={OmegaConf.select(config, rejects)}",
            "⟨H⟩ is also over rejected tokens, which the actor does not see",
            f"set {_BYPASS}=True, where the loss rejects them",
        )


def ask_for_entropy(config: DictConfig) -> None:
    """Make the actor compute entropy in its update, if GTPO reads it there."""
    from_update = VerlGTPOConfig.from_config(config.algorithm).entropy_from == "update"
    if from_update and not OmegaConf.select(config, _CALCULATE):
        OmegaConf.update(config, _CALCULATE, True)
        logger.info("%s=True, since %s=update", _CALCULATE, _ENTROPY_FROM)


def _check_sequence_parallel(config: DictConfig) -> None:
    """verl's Ulysses joins a sequence in flash attention only; others silently attend to each slice alone."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return
    attention = OmegaConf.select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        size = OmegaConf.select(actor, key, default=1)
        if size > 1 and attention in ("sdpa", "eager", "flex_attention"):
            raise ValueError(
                f"actor_rollout_ref.actor.{key}={size} with attn_implementation={attention}: verl's sequence "
                "parallelism works with flash attention only; with others each rank would see only its slice of a "
                "completion: set the size to 1, or "
                "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2"
            )


def _check_dump(config: DictConfig) -> None:
    """A dump, under any estimator, needs a folder of its own."""
    folder = Path(str(config.algorithm.gtpo.dump_dir))
    if resumes(config) or not any(folder.glob(STEP_FILES)):
        return
    header = folder / HEADER_NAME
    if not header.is_file() or read_record(header).get("checkpoints") != config.trainer.default_local_dir:
        raise ValueError(
            f"algorithm.gtpo.dump_dir={folder} holds the dump of another run: give another folder, or remove it"
        )


def departures(config: DictConfig) -> list[Departure]:
    """Settings under which GTPO runs but is not the paper's GTPO.

    Args:
        config (DictConfig): verl's whole config, already checked.
    """
    found: list[Departure] = []
    expect = _expectation(config, found)
    actor = "actor_rollout_ref.actor"
    rollout = "actor_rollout_ref.rollout"
    loss_mode = OmegaConf.select(config, LOSS_MODE)
    change = _LOSSES_THAT_CHANGE_LAMBDA.get(loss_mode)
    note = f"; {loss_mode} {change}" if change else ""
    expect(LOSS_MODE, lambda x: x in NAMES, f"gtpo (Eq. 11: no clipping){note}")
    expect(f"{actor}.loss_agg_mode", lambda x: x == "seq-mean-token-mean", "seq-mean-token-mean (Eq. 11)")
    expect("algorithm.norm_adv_by_std_in_grpo", bool, "True (Sec. 3)")
    expect(f"{actor}.use_kl_loss", lambda x: not x, "False (no KL term: this loads a reference model)")
    expect(
        "algorithm.use_kl_in_reward",
        lambda x: not x,
        "False (no KL term: this loads a reference model, and KL noise gives equal scores a sign, which λ amplifies)",
    )
    expect("critic.enable", lambda x: not x, "False (no critic: GTPO takes no values)")
    expect("distillation.enabled", lambda x: not x, "False (no teacher)")
    expect(
        f"{actor}.entropy_coeff", lambda x: x == 0, "0 (GTPO has its own entropy term, algorithm.gtpo.entropy_coeff)"
    )
    expect(f"{rollout}.temperature", lambda x: x == 1, "1.0 (Sec. 6; entropy is measured at this temperature)")
    expect(f"{rollout}.top_p", lambda x: x == 1, "1.0 (completions of the policy itself)")
    expect(f"{rollout}.top_k", lambda x: x <= 0, "-1 (completions of the policy itself)")
    expect("algorithm.rollout_correction.rollout_is", lambda x: False, "null (no importance weights; they multiply λ)")
    expect("algorithm.rollout_correction.rollout_rs", lambda x: False, "null (no rejected tokens)")
    filter_groups = "algorithm.filter_groups.enable"
    expect(filter_groups, lambda x: not x, "False (groups without signal stay; −γ⟨H⟩ acts on them)")
    gtpo_config = VerlGTPOConfig.from_config(config.algorithm)
    if _measures_initial_entropy(config) and gtpo_config.entropy_from == "old_log_prob":
        biased = (
            "measured on the run's first batch, which holds {}: measure it with `gtpo-verl initial-entropy` "
            "and set algorithm.gtpo.initial_entropy"
        )
        if OmegaConf.select(config, filter_groups):
            found.append(Departure("algorithm.gtpo.initial_entropy", "null", biased.format("groups with signal only")))
        elif _is_async(config):
            found.append(Departure("algorithm.gtpo.initial_entropy", "null", biased.format("what finished first")))
    if gtpo_config.entropy_from == "update":
        own = "old_log_prob (with several updates per rollout, ⟨H⟩ of a completion is that of the policy at its update)"
        found += [Departure(_ENTROPY_FROM, "update", own)] if _several_updates(config) else []
    return found + unclipped_updates(config)


def unclipped_updates(config: DictConfig) -> list[Departure]:
    """Settings that make several updates per rollout with the `gtpo` loss, which is not clipped.

    Args:
        config (DictConfig): verl's whole config; any estimator.
    """
    found: list[Departure] = []
    if OmegaConf.select(config, LOSS_MODE) not in NAMES:
        return found
    one_update = "one update per rollout (Sec. 6; the gtpo loss is not clipped)"
    found += _several_updates(config, one_update)
    expect = _expectation(config, found)
    if OmegaConf.select(config, "trainer.use_v1"):
        expect("trainer.v1.trainer_mode", lambda x: x == "sync", f"sync: {one_update}")
    return found


def _several_updates(config: DictConfig, one_update: str = "") -> list[Departure]:
    """Settings by which verl updates several times on one batch of rollouts."""
    found: list[Departure] = []
    expect = _expectation(config, found)
    batch_size = config.data.train_batch_size
    expect("actor_rollout_ref.actor.ppo_epochs", lambda x: x == 1, one_update)
    expect("actor_rollout_ref.actor.ppo_mini_batch_size", lambda x: x >= batch_size, f"{batch_size}: {one_update}")
    return found


def _expectation(config: DictConfig, found: list[Departure]) -> Callable[[str, Callable[[Any], bool], str], None]:
    def expect(setting: str, is_paper: Callable[[Any], bool], paper: str) -> None:
        value = OmegaConf.select(config, setting)
        if value is not None and not is_paper(value):
            found.append(Departure(setting, str(value), paper))

    return expect


def _measures_initial_entropy(config: DictConfig) -> bool:
    gtpo = VerlGTPOConfig.from_config(config.algorithm)
    return gtpo.completion_filter == "auto" and gtpo.initial_entropy is None


def _is_async(config: DictConfig) -> bool:
    if OmegaConf.select(config, "async_training") is not None:  # verl's fully_async trainer
        return True
    return bool(OmegaConf.select(config, "trainer.use_v1")) and config.trainer.v1.trainer_mode != "sync"


def as_table(found: list[Departure]) -> str:
    """The departures as one aligned table."""
    lines = [Departure("setting", "value", "paper"), *found]
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    return "\n".join(f"  {x.setting:<{widths[0]}}  {x.value:<{widths[1]}}  {x.paper}" for x in lines)


def needs_reference_policy(config: DictConfig) -> bool:
    """Whether verl loads a reference policy for this config."""
    return bool(config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward)


def resume_folder(config: DictConfig) -> str:
    """The folder of the checkpoints that a resumed run comes from."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        return os.path.dirname(str(trainer.resume_from_path).rstrip("/"))
    return trainer.default_local_dir


def check_resume(config: DictConfig) -> None:
    """Raise if a resumed run needs its initial entropy and has lost it; warn if its settings have changed.

    Raises:
        ValueError: naming the missing file and the key to set.
    """
    if not resumes(config):
        return
    folder, gtpo = resume_folder(config), VerlGTPOConfig.from_config(config.algorithm)
    InitialEntropy.known_before(gtpo, folder)
    try:
        changed = changed_settings(folder, gtpo)
    except ValueError as error:
        changed = [f"unknown which, since {error}"]
    if changed:
        logger.warning("GTPO resumes from %s with other settings: %s", folder, "; ".join(changed))


def resumes(config: DictConfig) -> bool:
    """Whether the run would resume from a checkpoint."""
    return config.trainer.resume_mode != "disable" and any(Path(resume_folder(config)).glob("global_step_*"))
