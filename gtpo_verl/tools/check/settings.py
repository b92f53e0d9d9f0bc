"""What the config of a run says: whether verl would start with it, whether GTPO would act, what this machine lacks."""

import inspect
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from difflib import get_close_matches
from functools import partial
from pkgutil import resolve_name
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check import Finding, installation, resources, unknown_keys
from gtpo_verl.verl_plugin.run_config import nested

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TOKENS, _TP = f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ROLLOUT}.tensor_model_parallel_size"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_OLD_REWARD = ("reward_model.", "custom_reward_function.", "sandbox_fusion.")
_KL = tuple(f"{name}{plus}" for name in ("low_var_kl", "kl", "k1", "k2", "k3", "mse", "abs") for plus in ("", "+"))
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_REGISTRIES = {
    "actor_rollout_ref.rollout.name": "verl.workers.rollout.replica:RolloutReplicaRegistry._registry",
    "reward.reward_manager.name": "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER",
    "trainer.v1.trainer_mode": "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY",
    "trainer.logger": "verl.utils.tracking:Tracking.supported_backend",
}
"""Where others may register more; read only if a value is not verl's own, since the imports take their time."""


def judge(config: DictConfig, with_machine: bool) -> tuple[list[Finding], list[Finding]]:
    """Return what there is to say of the settings of a config, which it changes, and of this machine; an exception of
    any class if the config is of none of verl's PPO trainers."""
    OmegaConf.set_readonly(config, False)
    OmegaConf.set_struct(config, False)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [*installation(), *_old_reward_keys(config), *_put_right(config)]
        get = partial(OmegaConf.select, config)
        found += [*_verls(config), *_gtpos(config), *_missing_inputs(get), *_gpus(get)]
        return found, list(resources.findings(config)) if with_machine else []


def _old_reward_keys(config: DictConfig) -> Iterator[Finding]:
    """Keys of the reward that verl's config still has and its `main_ppo` does not read; put where they are read."""
    moves_them = hasattr(sys.modules["__main__"], "migrate_legacy_reward_impl")
    for key in [key for key, _ in nested(OmegaConf.to_container(config)) if key.startswith(_OLD_REWARD)]:
        value, (_, now) = OmegaConf.select(config, key), unknown_keys.place_now(key)
        is_set = value is not None and not isinstance(value, DictConfig)
        if is_set and now and value != OmegaConf.select(config, now):
            if not moves_them:
                yield Finding(f"{key}={value}", "main_ppo does not read it", unknown_keys.moved(key, value, config))
            OmegaConf.update(config, now, value, force_add=True)


def _choices(config: DictConfig) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Yield a key, whether this run reads it, and the values that verl 0.9 has."""
    from verl.trainer.ppo.utils import need_critic

    get = partial(OmegaConf.select, config)
    yield "actor_rollout_ref.rollout.name", True, ("vllm", "sglang", "trtllm")
    if get("reward.reward_manager.source") == "register":
        yield "reward.reward_manager.name", True, ("naive", "dapo", "gdpo")
    if get("trainer.use_v1") and get("async_training") is None:
        yield "trainer.v1.trainer_mode", True, ("sync", "colocate_async", "separate_async")
    yield "trainer.logger", True, ("console", "wandb", "tensorboard", "swanlab", "file", "tracking")
    yield "trainer.resume_mode", True, ("auto", "disable", "resume_path")
    yield "data.truncation", True, ("error", "left", "right", "middle")
    yield f"{_ACTOR}.kl_loss_type", get(f"{_ACTOR}.use_kl_loss"), _KL
    yield "algorithm.kl_penalty", get("algorithm.use_kl_in_reward"), _KL
    yield "algorithm.kl_ctrl.type", get("algorithm.use_kl_in_reward"), ("fixed", "adaptive")
    for section, is_read in ((_ACTOR, True), ("critic", need_critic(config))):
        yield f"{section}.loss_agg_mode", is_read, _MODES
        if str(get(f"{section}.optim._target_")).endswith(".FSDPOptimizerConfig"):
            yield f"{section}.optim.lr_scheduler_type", is_read, ("constant", "cosine")
            yield f"{section}.optim.warmup_style", is_read, ("constant", "cosine")


def _put_right(config: DictConfig) -> Iterator[Finding]:
    """Yield a finding on each value that verl does not have, and replace it: what else is wrong shows only then."""
    for key, is_read, choices in _choices(config):
        value = OmegaConf.select(config, key)
        if value is None:
            continue
        for one in value if OmegaConf.is_list(value) else [value]:
            if one not in choices and key in _REGISTRIES:
                choices = tuple(dict.fromkeys([*choices, *resolve_name(_REGISTRIES[key])]))
            if one not in choices:
                near = get_close_matches(str(one), choices, n=1)
                what = (f"did you mean {near[0]}? " if near else "") + f"verl has {', '.join(choices)}"
                says = "no such value" if is_read else "no such value, which this run does not read"
                yield Finding(f"{key}={one}", says, *([what] if is_read else ["", what]))
                OmegaConf.update(config, key, choices[0])


def _verls(config: DictConfig) -> Iterator[Finding]:
    """Yield what verl itself refuses, each check's first reason."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    target = str(actor.get("_target_")).replace("Mcore", "Megatron")
    engine = next((x for x in ("Megatron", "VeOmni", "TorchTitan", "FSDP") if x in target), "")
    if engine and not str(actor.strategy).startswith(engine.lower()):
        group = "dp" if actor.strategy in ("fsdp", "fsdp2") else actor.strategy
        remedy = f"write model_engine={group}, which brings its own, and no strategy"
        yield Finding(f"{_ACTOR}.strategy={actor.strategy}", f"the settings are of {engine}", remedy)
        return
    if OmegaConf.is_missing(rollout, "name"):
        yield Finding(f"{_ROLLOUT}.name", "not given", f"set {_ROLLOUT}.name=vllm, or to sglang")
    verls = config.copy()
    verls.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl would import vLLM
    checks: list[Callable] = [lambda: omega_conf_to_dataclass(verls.actor_rollout_ref.rollout)]
    correction = config.algorithm.get("rollout_correction")
    if correction and not correction.get("bypass_mode"):
        compared = ("old_log_probs", "rollout_log_probs", "response_mask")
        ones = DataProto.from_dict(dict.fromkeys(compared, torch.ones(1, 1)))
        checks.append(lambda: compute_rollout_correction_and_add_to_batch(ones, correction))
    if config.get("async_training") is None:  # fully_async has checks of its own
        checks.append(lambda: inspect.unwrap(validate_config)(verls, need_reference_policy(config), use_critic=False))
    if need_critic(config):
        verls.critic.model = None  # it would load the tokenizer
        gpus, prompts = config.trainer.nnodes * config.trainer.n_gpus_per_node, config.data.train_batch_size
        checks.append(lambda: omega_conf_to_dataclass(verls.critic).validate(gpus, prompts))
    for check in checks:
        try:
            check()
        except Exception as error:  # assertions and errors of many classes
            yield Finding("verl", "refuses these settings", " ".join(str(error).split()) or type(error).__name__)


def _gtpos(config: DictConfig) -> Iterator[Finding]:
    """Yield settings with which GTPO cannot act, or which are not the paper's."""
    from gtpo_verl.verl_plugin import preflight
    from gtpo_verl.verl_plugin.run_config import RunConfig

    for problem in preflight.problems(config):
        yield Finding("", "", problem)
    with suppress(ValueError):  # of algorithm.gtpo, which is among the problems
        run = RunConfig.read(config)
        if found := preflight.departures(config, run):
            yield Finding("GTPO", "differs from the paper's in", advice=f"\n{preflight.as_table(found)}")


def _missing_inputs(get: Callable) -> Iterator[Finding]:
    """Yield what an asynchronous trainer asserts, and settings that read what is not there."""
    correction, log_probs = "algorithm.rollout_correction", f"{_ROLLOUT}.calculate_log_probs"
    asserted: dict[str, Any] = {}
    if get("async_training") is not None:
        asserted = {"data.train_batch_size": 0, "data.gen_batch_size": 1}
        asserted |= {"actor_rollout_ref.hybrid_engine": False, log_probs: True}
    elif resources.is_separate_async(get):
        steps, backend = get("trainer.v1.separate_async.parameter_sync_step"), f"{_ROLLOUT}.checkpoint_engine.backend"
        asserted = {"data.train_batch_size": steps * (get(f"{_ACTOR}.ppo_mini_batch_size") or 0)}
        asserted |= {backend: "nccl"} if get(backend) == "naive" else {}
    for key, value in asserted.items():
        if (found := get(key)) != value:
            yield Finding(f"{key}={found}", "this asynchronous trainer asserts another value", f"set {key}={value}")
    using = [key for name in ("bypass_mode", "rollout_is", "rollout_rs") if get(key := f"{correction}.{name}")]
    if using and not get(log_probs):
        yield Finding(f"{log_probs}=False", f"{' and '.join(using)} read them", f"set {log_probs}=True")
    if bool(get(_DYNAMIC)) != bool(get(key := f"{_ROLLOUT}.log_prob_use_dynamic_bsz")):
        yield Finding(f"{key}={get(key)}", f"verl asserts {_DYNAMIC}={get(_DYNAMIC)}", f"set {key}={get(_DYNAMIC)}")
    overlong, longest = "reward.reward_kwargs.overlong_buffer_cfg.enable", "reward.reward_kwargs.max_resp_len"
    if get("reward.reward_manager.name") == "dapo" and get(overlong) and get(longest) is None:
        yield Finding(f"{overlong}=True", f"no {longest}", f"set ++{longest}={get('data.max_response_length')}")
    if get("algorithm.adv_estimator") == "remax" and get("trainer.use_v1"):
        yield Finding("algorithm.adv_estimator=remax", "verl's V1 trainer has no baselines", "set trainer.use_v1=False")
    if get("trainer.val_only") and not get("trainer.val_before_train"):
        says = "verl reads it in the validation before training alone, and trains"
        yield Finding("trainer.val_only=True", says, "set trainer.val_before_train=True, or leave it out")


def _gpus(get: Callable) -> Iterator[Finding]:
    """Yield settings that do not fit the GPUs that the command asks for."""
    nodes, per_node = (int(get(f"trainer.{key}") or 0) for key in ("nnodes", "n_gpus_per_node"))
    if get("trainer.val_only") and get("trainer.val_before_train"):
        return
    if not (gpus := nodes * per_node):
        subject = f"trainer.nnodes={nodes} trainer.n_gpus_per_node={per_node}"
        yield Finding(subject, "no GPU to train on", "ask for at least 1 of both")
        return
    strategy, (shared, names) = get(f"{_ACTOR}.strategy"), _model_parallel(get)
    dynamic = strategy == "megatron" and get(f"{_ACTOR}.megatron.dynamic_context_parallel")
    if gpus % shared:
        says = f"{shared} GPUs to a copy of the model, of {gpus} in all (trainer.nnodes x trainer.n_gpus_per_node)"
        yield Finding(names, says, "lower it, or ask for a multiple of it")
    elif strategy in ("fsdp", "fsdp2", "veomni", "megatron"):
        yield from _batch_splits(get, 1 if dynamic else gpus // shared)
    kinds = ("tensor_model", "data", "pipeline_model")
    served = math.prod(int(get(f"{_ROLLOUT}.{kind}_parallel_size") or 1) for kind in kinds)
    if get("actor_rollout_ref.hybrid_engine", default=True) and gpus % served:
        says = f"{served} GPUs to a copy of the model in the rollout, of {gpus} in all"
        yield Finding(f"{_TP}={get(_TP)}", says, f"set {_TP}=1, or ask for a multiple of {served}")
    longest, split = get("data.max_prompt_length") + get("data.max_response_length"), shared
    splits = {"megatron": "megatron.context_parallel_size", "torchtitan": "torchtitan.tensor_parallel_size"}
    if key := splits.get(strategy):
        split = int(get(f"{_ACTOR}.{key}") or 1)
    bypasses = get("algorithm.rollout_correction.bypass_mode")
    keys = [_TOKENS] if bypasses else [f"{_ROLLOUT}.log_prob_max_token_len_per_gpu", _TOKENS]
    budgets = {get(key): key for key in keys}  # one key a value: by default the first has the second's
    says = f"a sequence has up to {longest} tokens (data.max_prompt_length + data.max_response_length)"
    for tokens, key in budgets.items() if get(_DYNAMIC) and not dynamic else ():
        if tokens and tokens * split < longest:
            yield Finding(f"{key}={tokens}", says, f"set {key}={math.ceil(longest / split)} or more")
    if isinstance(limit := get(key := f"{_ROLLOUT}.max_model_len"), int) and limit < longest:
        yield Finding(f"{key}={limit}", says, advice="the rollout cuts longer ones")
    for name, pool in resources.pools(get).items():
        if not int(get(f"{pool}.nnodes") or 0) * int(get(f"{pool}.n_gpus_per_node") or 0):
            yield Finding(name, f"{pool}.nnodes={get(f'{pool}.nnodes')}: no GPUs of its own", f"set {pool}.nnodes=1")
    if get("algorithm.filter_groups.enable"):
        yield from _filter_groups(get)


def _batch_splits(get: Callable, copies: int) -> Iterator[Finding]:
    """Whether batches split over the copies of the model, as verl asserts at the first update; V1 pads whole ones."""
    micro = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    legacy = not get("trainer.use_v1") and get("async_training") is None
    for key in (f"{_ACTOR}.ppo_mini_batch_size", *(["data.train_batch_size"] if legacy else [])):
        size, n = int(get(key) or 0), int(get(f"{_ROLLOUT}.n") or 0)
        if not size:
            yield Finding(f"{key}={get(key)}", "no number of prompts", f"set {key}")
        elif size * n % copies:
            says = f"{size} prompts x {n} completions do not split over {copies} copies of the model"
            yield Finding(f"{key}={size}", says, f"make {key} x {_ROLLOUT}.n a multiple of {copies}")
        elif key.startswith(_ACTOR) and not get(_DYNAMIC) and size * n // copies % (rows := int(get(micro) or 1)):
            says = f"does not divide the {size * n // copies} completions of a GPU in an update"
            yield Finding(f"{micro}={rows}", says, f"set {micro}=1, or another divisor")


def _filter_groups(get: Callable) -> Iterator[Finding]:
    key = "algorithm.filter_groups.enable"
    if not get("trainer.use_v1"):
        says = "the legacy trainer does not read it: it does nothing"
        yield Finding(f"{key}=True", says, advice="set trainer.use_v1=True, or leave it out")
        return
    if not get("algorithm.filter_groups.metric"):
        yield Finding(f"{key}=True", "no metric", "set ++algorithm.filter_groups.metric=acc")
    if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
        says = "a reward model on the trainer's GPUs scores only after groups are chosen"
        yield Finding(f"{key}=True", says, f"set reward.reward_model.enable_resource_pool=True, or {key}=False")


def _model_parallel(get: Callable) -> tuple[int, str]:
    """How many GPUs hold one copy of the trained model, and the keys that say so."""
    engines = {
        "megatron": ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"),
        "torchtitan": ("tensor_parallel", "pipeline_parallel", "context_parallel"),
        "veomni": ("ulysses_parallel",),
    }
    if (strategy := get(f"{_ACTOR}.strategy")) in engines:
        kinds = [f"{_ACTOR}.{strategy}.{kind}_size" for kind in engines[strategy]]
    else:
        kinds = [f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"]
        kinds = [max(kinds, key=lambda key: int(get(key) or 1))]
    asked = {key: size for key in kinds if (size := int(get(key) or 1)) > 1}
    return math.prod(asked.values()), " x ".join(f"{key}={size}" for key, size in asked.items())
