"""What the config of a run says: whether verl would start with it, whether GTPO would act, what this machine lacks."""

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check import gpus, resources, unknown_keys
from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.tools.check.installation import installation
from gtpo_verl.tools.check.names import unknown_names
from gtpo_verl.tools.check.verls import refusals
from gtpo_verl.verl_plugin import problems, resume
from gtpo_verl.verl_plugin.departures import as_table, departures
from gtpo_verl.verl_plugin.run_config import RunConfig, nested, select
from gtpo_verl.verl_plugin.values import WrongValue, complete, put_right, verls_defaults, wrong_values

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_CORRECTION = "algorithm.rollout_correction"
_OLD_REWARD = ("reward_model.", "custom_reward_function.", "sandbox_fusion.")


def check(config: DictConfig, with_machine: bool) -> tuple[list[Finding], list[Finding]]:
    """Return what there is to say of the settings of a config, which it changes, and of this machine.

    Raises:
        Exception: of any class, if the config is of none of verl's PPO trainers.
    """
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = list(installation())
        # From here on each value is there, and of a kind and in a range that can be computed with.
        replaced, wrong = _wrong_values(config)
        findings += wrong
        complete(config)
        findings += _old_reward_keys(config)
        findings += unknown_keys.refused_by_dataclasses(config)
        unknown, wrong_names = _unknown_names(config)
        findings += wrong_names
        findings += [finding for finding in _further(config) if not _is_about(finding, replaced | unknown)]
        on_machine = list(resources.findings(config)) if with_machine else []
    said = dict.fromkeys(findings)
    return list(said), [finding for finding in on_machine if finding not in said]


def _further(config: DictConfig) -> list[Finding]:
    """Return what there is to say of values that each can be used."""
    get = partial(select, config)
    findings = [*refusals(config)]
    findings += _gtpos(config)
    findings += _checkpoint_path(config)
    findings += _asserted(get)
    findings += _missing_inputs(get)
    findings += gpus.misfits(get)
    findings += _filter_groups(get)
    findings += _without_effect(get)
    return findings


def certainly_wrong(config: DictConfig) -> list[WrongValue]:
    """Return the values with which verl breaks."""
    return [wrong for wrong in wrong_values(config) if wrong.is_certain]


def as_finding(wrong: WrongValue) -> Finding:
    """Return what to say of a value that verl cannot use: a problem if that is certain, else a warning."""
    remedy = f"give {wrong.takes}"
    if wrong.is_certain:
        return Finding(wrong.key, wrong.says, remedy)
    return Finding(wrong.key, f"{wrong.says}, and verl has {wrong.takes} there", advice=remedy)


def _wrong_values(config: DictConfig) -> tuple[set[str], list[Finding]]:
    """Return the keys whose values verl cannot use, and what to say of them; gives them verl's defaults."""
    found = list(wrong_values(config))
    replaced = {wrong.key for wrong in found if wrong.is_certain}
    for wrong in found:
        if wrong.is_certain:
            put_right(config, wrong)
    return replaced, [as_finding(wrong) for wrong in found]


def _unknown_names(config: DictConfig) -> tuple[set[str], list[Finding]]:
    """Return the keys with names that verl does not have, and what to say of them; gives them verl's defaults."""
    replaced = set()
    findings = []
    for key, finding in list(unknown_names(config)):
        findings.append(finding)
        if finding.remedy:
            OmegaConf.update(config, key, verls_defaults().get(key), merge=False)
            replaced.add(key)
    if f"{_ROLLOUT}.name" in replaced:  # for which verl has no default
        config.actor_rollout_ref.rollout.name = "vllm"
    return replaced, findings


def _is_about(finding: Finding, keys: set[str]) -> bool:
    """Whether a finding names one of these keys with its value, which is not the user's any more."""
    text = f"{finding.subject} {finding.says} {finding.remedy}"
    return any(f"{key}=" in text for key in keys)


def _old_reward_keys(config: DictConfig) -> Iterator[Finding]:
    """Keys of the reward that verl's config still has and its `main_ppo` does not read; put where they are read."""
    moves_them = hasattr(sys.modules["__main__"], "migrate_legacy_reward_impl")
    keys = [key for key, _ in nested(OmegaConf.to_container(config)) if key.startswith(_OLD_REWARD)]
    for key in keys:
        value = select(config, key)
        now = unknown_keys.place_now(key)[1]
        if value is None or isinstance(value, DictConfig) or not now or value == select(config, now):
            continue
        if not moves_them:
            yield Finding(f"{key}={value}", "main_ppo does not read it", unknown_keys.moved(key, value, config))
        OmegaConf.update(config, now, value, force_add=True)


def _gtpos(config: DictConfig) -> Iterator[Finding]:
    """Yield settings with which GTPO cannot act, or which are not the paper's."""
    for problem in problems.problems(config):
        yield Finding("", "", problem)
    with suppress(ValueError):  # of algorithm.gtpo, which is among the problems
        differing = departures(config, RunConfig.read(config))
        if differing:
            yield Finding("GTPO", "differs from the paper's in", advice=f"\n{as_table(differing)}")


def _checkpoint_path(config: DictConfig) -> Iterator[Finding]:
    for message in resume.path_problems(config):
        yield Finding("", "", message)


def _asserted(get: Callable) -> Iterator[Finding]:
    """Yield values that an asynchronous trainer asserts to be others."""
    asserted: dict[str, Any] = {}
    if get("async_training") is not None:
        asserted["data.train_batch_size"] = 0
        asserted["data.gen_batch_size"] = 1
        asserted["actor_rollout_ref.hybrid_engine"] = False
        asserted[f"{_ROLLOUT}.calculate_log_probs"] = True
    elif resources.is_separate_async(get):
        backend = f"{_ROLLOUT}.checkpoint_engine.backend"
        steps = get("trainer.v1.separate_async.parameter_sync_step") or 1
        asserted["data.train_batch_size"] = steps * get(f"{_ACTOR}.ppo_mini_batch_size")
        if get(backend) == "naive":
            asserted[backend] = "nccl"
    for key, value in asserted.items():
        given = get(key)
        if given != value:
            yield Finding(f"{key}={given}", "this asynchronous trainer asserts another value", f"set {key}={value}")


def _missing_inputs(get: Callable) -> Iterator[Finding]:
    """Yield settings that read what is not there."""
    log_probs = f"{_ROLLOUT}.calculate_log_probs"
    readers = [f"{_CORRECTION}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs")]
    readers = [key for key in readers if get(key)]
    if readers and not get(log_probs):
        yield Finding(f"{log_probs}=False", f"{' and '.join(readers)} read them", f"set {log_probs}=True")
    key = f"{_ROLLOUT}.log_prob_use_dynamic_bsz"
    if bool(get(_DYNAMIC)) != bool(get(key)):
        yield Finding(f"{key}={get(key)}", f"verl asserts {_DYNAMIC}={get(_DYNAMIC)}", f"set {key}={get(_DYNAMIC)}")
    overlong, longest = "reward.reward_kwargs.overlong_buffer_cfg.enable", "reward.reward_kwargs.max_resp_len"
    if get("reward.reward_manager.name") == "dapo" and get(overlong) and get(longest) is None:
        yield Finding(f"{overlong}=True", f"no {longest}", f"set ++{longest}={get('data.max_response_length')}")
    if get("algorithm.adv_estimator") == "remax" and get("trainer.use_v1"):
        yield Finding("algorithm.adv_estimator=remax", "verl's V1 trainer has no baselines", "set trainer.use_v1=False")


def _without_effect(get: Callable) -> Iterator[Finding]:
    """Yield settings that nothing reads in this run."""
    if get("trainer.val_only") and not get("trainer.val_before_train"):
        says = "verl reads it in the validation before training alone, and trains"
        yield Finding("trainer.val_only=True", says, "set trainer.val_before_train=True, or leave it out")
    path, mode = get("trainer.resume_from_path"), get("trainer.resume_mode")
    if path is not None and mode != "resume_path":
        says = f"with trainer.resume_mode={mode} nothing reads it"
        yield Finding(f"trainer.resume_from_path={path}", says, advice="set trainer.resume_mode=resume_path")
    for section in (_ACTOR, "critic"):
        clip, read = get(f"{section}.grad_clip"), get(f"{section}.optim.clip_grad")
        default = verls_defaults().get(f"{section}.grad_clip")
        if clip is not None and clip != default and clip != read:
            says = f"no engine reads it; {section}.optim.clip_grad={read} acts"
            yield Finding(f"{section}.grad_clip={clip}", says, advice=f"set {section}.optim.clip_grad={clip}")


def _filter_groups(get: Callable) -> Iterator[Finding]:
    key = "algorithm.filter_groups.enable"
    if not get(key):
        return
    if not get("trainer.use_v1"):
        says = "the legacy trainer does not read it: it does nothing"
        yield Finding(f"{key}=True", says, advice="set trainer.use_v1=True, or leave it out")
        return
    if not get("algorithm.filter_groups.metric"):
        yield Finding(f"{key}=True", "no metric", "set ++algorithm.filter_groups.metric=acc")
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        says = "a reward model on the trainer's GPUs scores only after groups are chosen"
        yield Finding(f"{key}=True", says, f"set reward.reward_model.enable_resource_pool=True, or {key}=False")
