"""Settings under which GTPO (arXiv:2508.03772), or its loss alone, runs but is not the paper's."""

import sys
from collections.abc import Container
from dataclasses import fields
from typing import Any, NamedTuple

from omegaconf import DictConfig

from gtpo_verl.links import DOCS
from gtpo_verl.run.initial_entropy import PAPER_SAMPLES
from gtpo_verl.verl_plugin.problems import missing_packages, v1_mode
from gtpo_verl.verl_plugin.run_config import (
    ADV_ESTIMATOR,
    LOSS_MODE,
    NAMES,
    RunConfig,
    VerlGTPOConfig,
    select,
    uses_gtpo,
)

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CORRECTION = "algorithm.rollout_correction"
_BYPASS = f"{_CORRECTION}.bypass_mode"
_REJECTS = f"{_CORRECTION}.rollout_rs"
_WEIGHS = f"{_CORRECTION}.rollout_is"
_ENTROPY_FROM = "algorithm.gtpo.entropy_from"
_INITIAL_ENTROPY = "algorithm.gtpo.initial_entropy"
_FILTER_GROUPS = "algorithm.filter_groups.enable"
_KL_IN_REWARD = "algorithm.use_kl_in_reward"
_MINI_BATCH = f"{_ACTOR}.ppo_mini_batch_size"
_FUSED = "actor_rollout_ref.model.use_fused_kernels"
_PARAMETER_SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"

# Losses of verl under which a conflict token's gradient is not λ times what it would be.
_LOSSES_THAT_CHANGE_LAMBDA = {
    "geo_mean": "averages λ over each completion",
    "clip_cov": "chooses the tokens it drops by λ·A among others: λ = 2 can mean 0",
    "kl_cov": "penalises tokens with λ = 0 too, from the second update on",
    "dro": "penalises tokens with λ = 0 too, from the second update on",
}
_ONE_UPDATE = "one update per rollout (Sec. 6: the gtpo loss does not clip; loss_mode=vanilla does)"


class Departure(NamedTuple):
    """A setting under which the run is not the paper's GTPO, its value, and what the paper has."""

    setting: str
    value: str
    paper: str


class PaperValues(NamedTuple):
    """What a setting is in the paper."""

    values: Container[Any]  # the values under which GTPO is the paper's; null, also where this is empty
    in_words: str  # the paper's value and the reason, for a run with another value


PAPER_SETTINGS = {
    f"{_ACTOR}.loss_agg_mode": PaperValues(("seq-mean-token-mean",), "seq-mean-token-mean (Eq. 11)"),
    "algorithm.norm_adv_by_std_in_grpo": PaperValues((True,), "True (Sec. 3)"),
    f"{_ACTOR}.use_kl_loss": PaperValues((False,), "False (no KL term: this loads a reference model)"),
    _KL_IN_REWARD: PaperValues(
        (False,), "False (no KL term: this loads a reference model; KL noise gives equal scores a sign)"
    ),
    "critic.enable": PaperValues((False,), "False (no critic: GTPO takes no values)"),
    "distillation.enabled": PaperValues((False,), "False (no teacher)"),
    f"{_ACTOR}.entropy_coeff": PaperValues((0,), "0 (GTPO has its own entropy term, algorithm.gtpo.entropy_coeff)"),
    f"{_ROLLOUT}.temperature": PaperValues((1,), "1.0 (Sec. 6; entropy is measured at this temperature)"),
    f"{_ROLLOUT}.top_p": PaperValues(
        (1,), "1.0 (completions of the policy itself; rollout_rs misreads cut ones, verl #8020)"
    ),
    f"{_ROLLOUT}.top_k": PaperValues((-1, 0), "-1 (completions of the policy itself)"),
    _WEIGHS: PaperValues((), "null (no importance weights; they multiply λ)"),
    _REJECTS: PaperValues((), "null (no rejected tokens)"),
    f"{_ROLLOUT}.quantization": PaperValues((), "null (completions of the policy that is trained, verl #8076)"),
    _FUSED: PaperValues((False,), "False (fused kernels gave wrong entropies, verl #2656, #3723, or failed, #3730)"),
    "algorithm.gtpo.token_weights": PaperValues((), "null (λ of the conflict masks, Eq. 9)"),
    _FILTER_GROUPS: PaperValues((False,), "False (groups without signal stay; −γ⟨H⟩ acts on them)"),
}


def departures(config: DictConfig, run: RunConfig) -> list[Departure]:
    """Return the settings of a checked config under which GTPO, or its loss alone, is not the paper's."""
    if not run.applies_gtpo:
        return [*_differing(config, _unread_settings(config)), *_unclipped_updates(config)]
    papers = {LOSS_MODE: _papers_loss(config), **PAPER_SETTINGS}
    papers |= _settings_that_lower_rewards(run)
    papers |= _settings_that_depend_on_others(config, run)
    if not select(config, "trainer.use_v1"):  # the legacy trainer does not read it
        del papers[_FILTER_GROUPS]
    return [*_differing(config, papers), *_biased_initial_entropy(config, run), *_unclipped_updates(config)]


def _unread_settings(config: DictConfig) -> dict[str, PaperValues]:
    """Return the settings of GTPO, with their defaults, for a run under another estimator, which does not read them.

    Whoever sets one to another value may believe that the run is GTPO.
    """
    if select(config, ADV_ESTIMATOR) in NAMES:  # another package's GTPO, which may have settings of the same names
        return {}
    reason = f"not read: {ADV_ESTIMATOR}=gtpo alone reads it"
    unread = {}
    for setting in fields(VerlGTPOConfig):
        if not setting.name.startswith("dump_"):  # a dump is written under any estimator
            unread[f"algorithm.gtpo.{setting.name}"] = PaperValues((setting.default,), reason)
    of_grpo = f"{reason}; for GRPO with it see {DOCS}/keys.md"
    unread["algorithm.gtpo.min_correct_reward"] = PaperValues((), of_grpo)
    return unread


def as_table(rows: list[Departure]) -> str:
    """Return the departures as one aligned table."""
    lines = [Departure(setting="setting", value="value", paper="paper"), *rows]
    first = max(len(line.setting) for line in lines)
    second = max(len(line.value) for line in lines)
    return "\n".join(f"  {line.setting:<{first}}  {line.value:<{second}}  {line.paper}" for line in lines)


def _papers_loss(config: DictConfig) -> PaperValues:
    """Return the paper's policy loss, with what the config's loss does to λ."""
    loss_mode = str(select(config, LOSS_MODE))
    change = _LOSSES_THAT_CHANGE_LAMBDA.get(loss_mode)
    note = f"; {loss_mode} {change}" if change else ""
    return PaperValues(NAMES, f"gtpo (Eq. 11: no clipping){note}")


def _settings_that_lower_rewards(run: RunConfig) -> dict[str, PaperValues]:
    """Return the settings under which a right answer's reward may fall below `min_correct_reward`, if that is set."""
    least = run.gtpo.min_correct_reward
    if least is None:
        return {}
    effect = f"; it lowers the reward of a right answer, which must not fall below min_correct_reward={least:g}"
    return {
        _KL_IN_REWARD: PaperValues((False,), PAPER_SETTINGS[_KL_IN_REWARD].in_words + effect),
        "reward.reward_kwargs.overlong_buffer_cfg.enable": PaperValues((False,), f"False{effect}"),
    }


def _settings_that_depend_on_others(config: DictConfig, run: RunConfig) -> dict[str, PaperValues]:
    """Return the settings that are the paper's or not by what other settings are."""
    papers = {}
    if not _rollout_has_precision_of_training(config):
        papers[f"{_ROLLOUT}.dtype"] = PaperValues((), "the precision of training (verl #8076)")
    prompts = select(config, "data.train_batch_size")
    if prompts:  # fully_async has 0
        divisors = [size for size in range(1, prompts + 1) if prompts % size == 0]
        reason = "verl pads the batch to whole mini-batches, and a mean over sequences counts the padding"
        papers[_MINI_BATCH] = PaperValues(divisors, f"{prompts}: {reason}")
    if run.entropy_from_update and _several_updates(config):
        reason = "with several updates per rollout, ⟨H⟩ is that of the policy at a completion's update"
        papers[_ENTROPY_FROM] = PaperValues((), f"old_log_prob ({reason})")
    if run.entropy_from_update and select(config, LOSS_MODE) in NAMES:
        reason = "the gtpo loss does not bound π/π_rollout; loss_mode=vanilla does"
        papers[_BYPASS] = PaperValues((False,), f"False ({reason})")
    return papers


def _biased_initial_entropy(config: DictConfig, run: RunConfig) -> list[Departure]:
    """Return a departure if ⟨H⟩_ini would be measured on rows that were chosen by their reward or their length."""
    if not run.gtpo.measures_initial_entropy or run.entropy_from_update or run.resumed_from:
        return []
    is_fully_async = select(config, "async_training") is not None
    if select(config, _FILTER_GROUPS) and select(config, "trainer.use_v1"):
        rows = "groups with signal only"
    elif is_fully_async or _is_async(config):
        rows = "what finished first"
    else:
        return []
    remedy = f"measure it with `gtpo-verl initial-entropy` and set {_INITIAL_ENTROPY}"
    paper = f"mean of {PAPER_SAMPLES} prompts (Sec. 5.2); this run's first batch holds {rows}: {remedy}"
    return [Departure(setting=_INITIAL_ENTROPY, value="null", paper=paper)]


def _unclipped_updates(config: DictConfig) -> list[Departure]:
    """Return the settings with which the `gtpo` loss, which is not clipped, updates several times per rollout.

    The estimator may be another one than `gtpo`.
    """
    if not uses_gtpo(config, LOSS_MODE):
        return []
    once = PaperValues((1,), _ONE_UPDATE)
    papers = {"async_training.trigger_parameter_sync_step": once, "async_training.require_batches": once}
    if _is_async(config):
        papers["trainer.v1.trainer_mode"] = PaperValues((), f"sync: {_ONE_UPDATE}")
    return [*_several_updates(config), *_differing(config, papers)]


def _several_updates(config: DictConfig) -> list[Departure]:
    """Return the settings with which verl updates several times per rollout."""
    papers = {f"{_ACTOR}.ppo_epochs": PaperValues((1,), _ONE_UPDATE)}
    if v1_mode(config) == "separate_async":  # which takes a mini-batch for each update between two syncs
        papers[_PARAMETER_SYNC_STEP] = PaperValues((1,), f"1: {_ONE_UPDATE}")
    else:
        prompts = select(config, "data.train_batch_size") or 0
        papers[_MINI_BATCH] = PaperValues(range(prompts, sys.maxsize), f"{prompts}: {_ONE_UPDATE}")
    return _differing(config, papers)


def _differing(config: DictConfig, papers: dict[str, PaperValues]) -> list[Departure]:
    """Return a departure for each of these settings that has another value than the paper's."""
    differing = []
    for setting, paper in papers.items():
        value = select(config, setting)
        if value is not None and value not in paper.values:
            differing.append(Departure(setting=setting, value=str(value), paper=paper.in_words))
    return differing


def _rollout_has_precision_of_training(config: DictConfig) -> bool:
    """Whether the rollout's `dtype` is that of the actor's forward pass; also where it cannot be told."""
    from verl.utils.torch_dtypes import PrecisionType

    rollout = select(config, f"{_ROLLOUT}.dtype")
    keys = {
        "fsdp": "fsdp_config.mixed_precision.param_dtype",
        "fsdp2": "fsdp_config.mixed_precision.param_dtype",
        "megatron": "megatron.dtype",
    }
    key = keys.get(str(select(config, f"{_ACTOR}.strategy")))
    if key is None or rollout == "auto":
        return True
    training = select(config, f"{_ACTOR}.{key}") or "bf16"
    try:
        return PrecisionType.to_dtype(rollout) == PrecisionType.to_dtype(training)
    except RuntimeError:  # verl does not know all of vLLM's names, such as half
        return True


def _is_async(config: DictConfig) -> bool:
    """Whether a V1 trainer generates ahead of its updates, with older weights."""
    mode = v1_mode(config)
    async_modes = ("colocate_async", "separate_async")
    if mode in async_modes:
        return True
    # Of a mode that is not verl's own the trainer's class decides. Without the packages it cannot be imported.
    if mode == "sync" or missing_packages():
        return False
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    async_trainers = tuple(TRAINER_REGISTRY[name] for name in async_modes)
    return issubclass(TRAINER_REGISTRY.get(mode, object), async_trainers)
