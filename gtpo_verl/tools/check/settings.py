"""Check the config of a run: would verl start with it, would GTPO act, and what does this machine lack?"""

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check import gpus, resources, unknown_keys
from gtpo_verl.tools.check.finding import Finding, problem
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
    """Return the findings about the settings of a config, and those about this machine.

    The config is changed: values that verl cannot use become verl's defaults, so that the others can be checked.

    Raises:
        Exception: of any class, if the config is of none of verl's PPO trainers.
    """
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        findings = list(installation())
        replaced, wrong = _wrong_values(config)
        findings += wrong
        complete(config)
        # From here on each value is there, and of a kind and in a range that can be computed with.
        findings += _old_reward_keys(config)
        findings += unknown_keys.refused_by_dataclasses(config)
        unknown, wrong_names = _unknown_names(config)
        findings += wrong_names
        findings += [finding for finding in _combinations(config) if not _is_about(finding, replaced | unknown)]
        on_machine = list(resources.findings(config)) if with_machine else []
    in_settings = list(dict.fromkeys(findings))
    return in_settings, [finding for finding in on_machine if finding not in in_settings]


def _combinations(config: DictConfig) -> list[Finding]:
    """Return what is wrong with settings of which each alone could be used."""
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
    """Return the finding about a value that verl cannot use: a problem if that is certain, else a warning."""
    remedy = f"give {wrong.takes}"
    if wrong.is_certain:
        return Finding(wrong.key, wrong.says, remedy)
    return Finding(wrong.key, f"{wrong.says}, and verl has {wrong.takes} there", advice=remedy)


def _wrong_values(config: DictConfig) -> tuple[set[str], list[Finding]]:
    """Give keys verl's defaults whose values verl certainly cannot use.

    Returns:
        These keys, and the findings about all values that verl cannot use.
    """
    replaced = set()
    findings = []
    for wrong in list(wrong_values(config)):
        findings.append(as_finding(wrong))
        if wrong.is_certain:
            put_right(config, wrong)
            replaced.add(wrong.key)
    return replaced, findings


def _unknown_names(config: DictConfig) -> tuple[set[str], list[Finding]]:
    """Give keys verl's defaults whose values are names that verl certainly does not have.

    Returns:
        These keys, and the findings about all names that verl does not have.
    """
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
    """Return whether a finding names one of these keys with its value, which is not the user's any more."""
    text = f"{finding.subject} {finding.message} {finding.remedy}"
    return any(f"{key}=" in text for key in keys)


def _old_reward_keys(config: DictConfig) -> Iterator[Finding]:
    """Yield keys of the reward that verl's config still has and its `main_ppo` does not read, and move their values."""
    # Another program of verl, such as fully_async, moves them itself, by a function that it has imported.
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
    for text in problems.problems(config):
        yield problem(text)
    with suppress(ValueError):  # of algorithm.gtpo, which is among the problems
        differing = departures(config, RunConfig.read(config))
        if differing:
            yield Finding("GTPO", "differs from the paper's in", advice=f"\n{as_table(differing)}")


def _checkpoint_path(config: DictConfig) -> Iterator[Finding]:
    for text in resume.path_problems(config):
        yield problem(text)


def _asserted(get: Callable) -> Iterator[Finding]:
    """Yield values other than those that an asynchronous trainer asserts."""
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
    """Yield settings that need another one, which is missing or differs."""
    log_probs = f"{_ROLLOUT}.calculate_log_probs"
    users = [f"{_CORRECTION}.{name}" for name in ("bypass_mode", "rollout_is", "rollout_rs")]
    active = [key for key in users if get(key)]
    if active and not get(log_probs):
        yield Finding(f"{log_probs}=False", f"{' and '.join(active)} read them", f"set {log_probs}=True")

    dynamic = f"{_ROLLOUT}.log_prob_use_dynamic_bsz"
    if bool(get(_DYNAMIC)) != bool(get(dynamic)):
        message = f"verl asserts {_DYNAMIC}={get(_DYNAMIC)}"
        yield Finding(f"{dynamic}={get(dynamic)}", message, f"set {dynamic}={get(_DYNAMIC)}")

    overlong = "reward.reward_kwargs.overlong_buffer_cfg.enable"
    longest = "reward.reward_kwargs.max_resp_len"
    if get("reward.reward_manager.name") == "dapo" and get(overlong) and get(longest) is None:
        yield Finding(f"{overlong}=True", f"no {longest}", f"set ++{longest}={get('data.max_response_length')}")

    if get("algorithm.adv_estimator") == "remax" and get("trainer.use_v1"):
        yield Finding("algorithm.adv_estimator=remax", "verl's V1 trainer has no baselines", "set trainer.use_v1=False")


def _without_effect(get: Callable) -> Iterator[Finding]:
    """Yield settings that nothing reads in this run."""
    if get("trainer.val_only") and not get("trainer.val_before_train"):
        message = "verl reads it in the validation before training alone, and trains"
        yield Finding("trainer.val_only=True", message, "set trainer.val_before_train=True, or leave it out")

    path = get("trainer.resume_from_path")
    mode = get("trainer.resume_mode")
    if path is not None and mode != "resume_path":
        message = f"with trainer.resume_mode={mode} nothing reads it"
        yield Finding(f"trainer.resume_from_path={path}", message, advice="set trainer.resume_mode=resume_path")

    for section in (_ACTOR, "critic"):
        given = get(f"{section}.grad_clip")
        acting = get(f"{section}.optim.clip_grad")
        default = verls_defaults().get(f"{section}.grad_clip")
        if given is not None and given not in (default, acting):
            message = f"no engine reads it; {section}.optim.clip_grad={acting} acts"
            yield Finding(f"{section}.grad_clip={given}", message, advice=f"set {section}.optim.clip_grad={given}")


def _filter_groups(get: Callable) -> Iterator[Finding]:
    """Yield what keeps `algorithm.filter_groups` from acting."""
    key = "algorithm.filter_groups.enable"
    if not get(key):
        return
    if not get("trainer.use_v1"):
        message = "the legacy trainer does not read it: it does nothing"
        yield Finding(f"{key}=True", message, advice="set trainer.use_v1=True, or leave it out")
        return
    if not get("algorithm.filter_groups.metric"):
        yield Finding(f"{key}=True", "no metric", "set ++algorithm.filter_groups.metric=acc")
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        message = "a reward model on the trainer's GPUs scores only after groups are chosen"
        yield Finding(f"{key}=True", message, f"set reward.reward_model.enable_resource_pool=True, or {key}=False")
