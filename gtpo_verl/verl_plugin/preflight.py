"""Checks, before workers start, that a verl config can run GTPO (arXiv:2508.03772), and whether it is the paper's."""

import io
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from packaging.version import Version

from gtpo_verl.initial_entropy import PAPER_SAMPLES, InitialEntropy, changed_settings
from gtpo_verl.records import read_record
from gtpo_verl.verl_plugin import collapse, names_and_versions
from gtpo_verl.verl_plugin.config import VerlGTPOConfig
from gtpo_verl.verl_plugin.names_and_versions import ADV_ESTIMATOR, ALIAS, LOSS_MODE, NAMES, foreign, select
from gtpo_verl.verl_plugin.token_dump import HEADER_NAME, STEP_FILES

logger = logging.getLogger("gtpo_verl")

_BYPASS = "algorithm.rollout_correction.bypass_mode"
_ENTROPY_FROM = "algorithm.gtpo.entropy_from"
_REJECTS = "algorithm.rollout_correction.rollout_rs"
_FEW_PROMPTS = 16
"""Below this the prompts of one batch say little: of one prompt each, Llama-3.1-8B on MATH starts at 0.90 or 0.48."""

_POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
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


def problems(config: DictConfig) -> list[str]:
    """Why a run with this config cannot start, or would not do what it says: all reasons, with key, value and remedy.

    Args:
        config (DictConfig): verl's whole config, under any estimator.
    """
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    found = [*_problems(config)]
    for key, registry in ((ADV_ESTIMATOR, ADV_ESTIMATOR_REGISTRY), (LOSS_MODE, POLICY_LOSS_REGISTRY)):
        found += [problem for problem in _unknown(config, key, registry) if problem not in found]
    return found + (names_and_versions.load_errors() if names_and_versions.serves(config) else [])


def validate(config: DictConfig) -> None:
    """Raise on settings with which GTPO, its token dump or the watch for collapse cannot run, if a config asks for one.

    Args:
        config (DictConfig): verl's whole config.

    Raises:
        RuntimeError: GTPO cannot run in this process.
        ValueError: naming key, value and remedy of each.
    """
    if names_and_versions.serves(config):
        names_and_versions.raise_load_errors()
    if found := list(_problems(config)):
        raise ValueError("; ".join(found))


_validated: list[Any] = []
"""The config that this process has validated."""


def validate_once(config: DictConfig) -> bool:
    """`validate`, unless this process has done so with this very config; whether it was done now."""
    if _validated and _validated[0] is config:
        return False
    validate(config)
    _validated[:] = [config]
    return True


def _problems(config: DictConfig) -> Iterator[str]:
    yield from _said_by(collapse.read_mode, config)
    dumps = select(config, "algorithm.gtpo.dump_dir") is not None
    serves = names_and_versions.serves(config)
    if not (serves or dumps):
        return
    invalid = [*_said_by(VerlGTPOConfig.from_config, config.algorithm)]
    yield from invalid
    n = config.actor_rollout_ref.rollout.n
    if n < 2:
        yield (
            f"actor_rollout_ref.rollout.n={n}: GTPO compares the completions of one prompt; set it to at least 2 "
            "(8 or 12 in the paper)"
        )
    yield from _sequence_parallel(config)
    if invalid:
        return
    yield from _entropy(config)
    if dumps:
        yield from _said_by(_check_dump, config)
    if serves:
        yield from _loss(config)
        yield from _said_by(_check_resume, config)


def _said_by(check: Callable[[Any], Any], config: Any) -> Iterator[str]:
    try:
        check(config)
    except ValueError as error:
        yield str(error)


def _unknown(config: DictConfig, key: str, registry: Mapping[str, Any], misspelt_only: bool = False) -> Iterator[str]:
    name, known = str(select(config, key)), sorted({*registry, *NAMES})
    near = get_close_matches(name, known, n=1)
    if name not in known and (near or not misspelt_only):
        yield f"{key}={name}: unknown: " + (f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")


def _loss(config: DictConfig) -> Iterator[str]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    # Another may be of a package that the workers alone import.
    yield from _unknown(config, LOSS_MODE, POLICY_LOSS_REGISTRY, misspelt_only=True)
    name = select(config, LOSS_MODE)
    other = foreign(POLICY_LOSS_REGISTRY, name) if name in NAMES else ""
    if other and not other.startswith("verl."):
        yield (
            f"{LOSS_MODE}={name} is {other}; two other papers are called GTPO (arXiv:2508.04349, arXiv:2511.14846). "
            f"For arXiv:2508.03772 set it to {ALIAS}"
        )


def _entropy(config: DictConfig) -> Iterator[str]:
    """Whether the pass of verl that is to give the entropy exists and sees every token that it averages over."""
    gtpo, bypass = VerlGTPOConfig.from_config(config.algorithm), bool(select(config, _BYPASS))
    if gtpo.entropy_from == "old_log_prob":
        if bypass:
            yield (
                f"{_BYPASS}=True: it skips verl's old-log-prob pass, from which GTPO takes the entropy of the policy; "
                f"set {_ENTROPY_FROM}=update, which takes it from the update's forward pass, or bypass_mode=False "
                "(verl's fully_async trainer ships True)"
            )
        return
    otherwise = "or set entropy_from=old_log_prob"
    if _measures_initial_entropy(config) and not resumes(config):
        yield (
            f"{_ENTROPY_FROM}=update with algorithm.gtpo.initial_entropy=null: the filter needs the initial entropy "
            "before the first update; measure it with `gtpo-verl initial-entropy` and set "
            f"algorithm.gtpo.initial_entropy, or set completion_filter to always or never, {otherwise}"
        )
    in_loss = f"{LOSS_MODE}=bypass_mode '+{_POLICY_LOSS}.rollout_correction=${{algorithm.rollout_correction}}'"
    for name in ("rollout_is", "rollout_rs"):
        setting, value = f"algorithm.rollout_correction.{name}", select(config, f"algorithm.rollout_correction.{name}")
        if value is None:
            continue
        read = select(config, LOSS_MODE) == "bypass_mode" and select(
            config, f"{_POLICY_LOSS}.rollout_correction.{name}"
        )
        if bypass and not read:
            yield (
                f"{setting}={value} with {_BYPASS}=True: verl's workers do not read it there, so it would do nothing; "
                f"hand it to the loss, {in_loss}, or set it to null"
            )
        elif not bypass and name == "rollout_rs":
            yield (
                f"{_ENTROPY_FROM}=update with {setting}={value}: ⟨H⟩ includes rejected tokens, which the actor never "
                f"sees; let the loss reject them, {_BYPASS}=True {in_loss}, {otherwise}"
            )


def ask_for_entropy(config: DictConfig) -> None:
    """Make the actor compute entropy in its update, if GTPO reads it there."""
    if VerlGTPOConfig.from_config(config.algorithm).entropy_from == "update" and not select(config, _CALCULATE):
        OmegaConf.update(config, _CALCULATE, True)
        logger.info("%s=True, since %s=update", _CALCULATE, _ENTROPY_FROM)


def _sequence_parallel(config: DictConfig) -> Iterator[str]:
    """Where verl splits a sequence over ranks in a way that changes the numbers, or refuses to at the first update."""
    actor = config.actor_rollout_ref.actor
    if actor.strategy == "megatron":
        parallel, mode = "actor_rollout_ref.actor.megatron.context_parallel_size", actor.loss_agg_mode
        size, found = select(config, parallel), names_and_versions.verl_version()
        if size > 1 and mode == "seq-mean-token-mean" and found is not None and found < Version("0.9.1"):
            yield (
                f"actor_rollout_ref.actor.loss_agg_mode={mode} with {parallel}={size}: verl {found} refuses this at "
                f"the first update (verl #7914); use verl 0.9.1 or later, or set {parallel}=1"
            )
    if actor.strategy not in ("fsdp", "fsdp2"):
        return
    attention = select(config, "actor_rollout_ref.model.override_config.attn_implementation")
    for key in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        size = OmegaConf.select(actor, key, default=1)
        if size > 1 and attention in ("sdpa", "eager", "flex_attention"):
            yield (
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
    loss_mode = select(config, LOSS_MODE)
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
    cut = (
        ""
        if select(config, _REJECTS) is None
        else "; rollout_rs would compare cut with uncut probabilities, verl #8020"
    )
    expect(f"{rollout}.top_p", lambda x: x == 1, f"1.0 (completions of the policy itself{cut})")
    expect(f"{rollout}.top_k", lambda x: x <= 0, "-1 (completions of the policy itself)")
    expect("algorithm.rollout_correction.rollout_is", lambda x: False, "null (no importance weights; they multiply λ)")
    expect(_REJECTS, lambda x: False, "null (no rejected tokens)")
    expect(f"{rollout}.quantization", lambda x: False, "null (completions of the policy that is trained, verl #8076)")
    expect(f"{rollout}.dtype", _is_trained_in(config), "the precision of training (verl #8076)")
    filter_groups = "algorithm.filter_groups.enable"
    expect(filter_groups, lambda x: not x, "False (groups without signal stay; −γ⟨H⟩ acts on them)")
    gtpo_config = VerlGTPOConfig.from_config(config.algorithm)
    if _measures_initial_entropy(config) and gtpo_config.entropy_from == "old_log_prob":
        measured_on = ""
        if select(config, filter_groups):
            measured_on = "groups with signal only"
        elif _is_async(config):
            measured_on = "what finished first"
        elif config.data.train_batch_size < _FEW_PROMPTS:
            measured_on = f"{config.data.train_batch_size} prompts"
        if measured_on:
            paper = (
                f"mean of {PAPER_SAMPLES} prompts (Sec. 5.2); this run's first batch holds {measured_on}: measure it "
                "with `gtpo-verl initial-entropy` and set algorithm.gtpo.initial_entropy"
            )
            found.append(Departure("algorithm.gtpo.initial_entropy", "null", paper))
    if gtpo_config.entropy_from == "update":
        own = "old_log_prob (with several updates per rollout, ⟨H⟩ of a completion is that of the policy at its update)"
        found += [Departure(_ENTROPY_FROM, "update", own)] if _several_updates(config) else []
        if loss_mode in NAMES:
            unbounded = "False (the gtpo loss does not bound π/π_rollout; loss_mode=vanilla does)"
            expect(_BYPASS, lambda x: not x, unbounded)
    return found + unclipped_updates(config)


def unclipped_updates(config: DictConfig) -> list[Departure]:
    """Settings that make several updates per rollout with the `gtpo` loss, which is not clipped.

    Args:
        config (DictConfig): verl's whole config; any estimator.
    """
    found: list[Departure] = []
    if not names_and_versions.serves_loss(config):
        return found
    one_update = "one update per rollout (Sec. 6; the gtpo loss is not clipped)"
    found += _several_updates(config, one_update)
    expect = _expectation(config, found)
    if select(config, "trainer.use_v1"):
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
        value = select(config, setting)
        if value is not None and not is_paper(value):
            found.append(Departure(setting, str(value), paper))

    return expect


def _is_trained_in(config: DictConfig) -> Callable[[str], bool]:
    """Whether the actor's forward pass in training computes in a precision, by any of the names that verl knows."""
    from verl.utils.torch_dtypes import PrecisionType

    actor = "actor_rollout_ref.actor"
    trained = select(config, f"{actor}.fsdp_config.mixed_precision.param_dtype") or "bf16"
    if config.actor_rollout_ref.actor.strategy == "megatron":
        trained = select(config, f"{actor}.megatron.dtype")
    known = config.actor_rollout_ref.actor.strategy in ("fsdp", "fsdp2", "megatron")
    return lambda x: not known or x == "auto" or PrecisionType.to_dtype(x) == PrecisionType.to_dtype(trained)


def _measures_initial_entropy(config: DictConfig) -> bool:
    gtpo = VerlGTPOConfig.from_config(config.algorithm)
    return gtpo.completion_filter == "auto" and gtpo.initial_entropy is None


def _is_async(config: DictConfig) -> bool:
    if select(config, "async_training") is not None:  # verl's fully_async trainer
        return True
    return bool(select(config, "trainer.use_v1")) and config.trainer.v1.trainer_mode != "sync"


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


def _check_resume(config: DictConfig) -> None:
    if resumes(config):
        InitialEntropy.known_before(VerlGTPOConfig.from_config(config.algorithm), resume_folder(config))


def resume_warnings(config: DictConfig) -> list[str]:
    """What is odd about the folder of a run's checkpoints: other settings before, or checkpoints that verl passes over.

    Args:
        config (DictConfig): verl's whole config, already checked.
    """
    folder, gtpo = resume_folder(config), VerlGTPOConfig.from_config(config.algorithm)
    if not resumes(config):
        if config.trainer.resume_mode == "disable" or not InitialEntropy.path(folder).exists():
            return []
        return [
            f"{InitialEntropy.path(folder)} is of an earlier start, but verl finds no checkpoint there and begins at "
            "step 0. If there is one, name it: trainer.resume_mode=resume_path trainer.resume_from_path=… (verl #7952: "
            "under FSDP actor.checkpoint.async_save=True hides it)"
        ]
    try:
        changed = changed_settings(folder, gtpo)
    except ValueError as error:
        changed = [f"unknown which, since {error}"]
    return [f"GTPO resumes from {folder} with other settings: {'; '.join(changed)}"] if changed else []


def resumes(config: DictConfig) -> bool:
    """Whether verl will resume from a checkpoint."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    trainer = config.trainer
    if trainer.resume_mode == "auto":
        with redirect_stdout(io.StringIO()):  # verl says it again when it loads the checkpoint
            return find_latest_ckpt_path(trainer.default_local_dir) is not None
    return trainer.resume_mode == "resume_path" and bool(trainer.resume_from_path)
