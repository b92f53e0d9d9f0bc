"""What a command's config says: whether verl would start with it, whether GTPO would act, what this machine lacks."""

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from typing import Any

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check import installation, resources, unknown_keys
from gtpo_verl.tools.check.finding import Finding

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ACTS_IN = (
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", "_compute_advantage"),
    ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", "fit"),
)
_MODEL_ENGINES = {"fsdp": "dp", "fsdp2": "dp"}
"""The config group `model_engine` of a strategy, where it has another name."""


def judge(config: DictConfig, base: DictConfig, overrides: Sequence[str], unknown: Sequence[str]) -> dict[str, Any]:
    """The findings on the settings and on this machine, each as a dict.

    Args:
        config: as Hydra composed it.
        base: the same without the keys that the command sets.
        overrides: of the command, but for the `unknown` ones, whose keys the config does not have.
    """
    if other := _of_another_program(config):
        return {"other": other}
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = [
            *installation.findings(),
            *unknown_keys.unknown(unknown, config),
            *unknown_keys.unread(overrides, base, config),
        ]
        wrong = list(_not_numbers(overrides, base))
        if OmegaConf.select(config, "actor_rollout_ref") is not None and not wrong:
            settings += [*_verls(config), *_gtpos(config), *_of_resources(config)]
        found = [] if wrong else list(resources.findings(config))
    import verl

    said = {"settings": [asdict(x) for x in (*wrong, *settings)], "machine": [asdict(x) for x in found]}
    return {**said, "verl": verl.__version__}


def _of_another_program(config: DictConfig) -> str:
    """Why this program's config is not judged; empty if verl reads it and has loaded this plugin."""
    if "verl" not in sys.modules or not config.keys() & {"actor_rollout_ref", "trainer"}:
        return "it composes a config that is not one of verl's trainers"
    import verl

    if "gtpo_verl.verl_plugin" in sys.modules:
        return ""
    version, only = getattr(verl, "__version__", "of unknown version"), os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
    set_apart = f": VERL_USE_EXTERNAL_PLUGINS={only} leaves gtpo out, unset it or add gtpo" if only else ""
    return f"its verl, {version} at {verl.__file__}, does not load this plugin{set_apart}"


def _not_numbers(overrides: Sequence[str], base: DictConfig) -> Iterator[Finding]:
    """Words where verl's default is a number or a truth value, such as an empty variable of the shell."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for word in overrides:
        key, _, _ = word.lstrip("+").partition("=")
        with suppress(Exception):
            default, value = OmegaConf.select(base, key), parser.parse_override(word).value()
            number = isinstance(default, int) or (isinstance(default, float) and value == "")  # some also take a range
            if number and isinstance(value, str) and "${" not in value:
                kind = "True or False" if isinstance(default, bool) else "a number"
                yield Finding(key, f"is {value!r}, and must be {kind}", f"give one, as verl's own {key}={default}")


def _verls(config: DictConfig) -> Iterator[Finding]:
    """What verl itself refuses: its first reason, as it stops there."""
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    strategy, target = str(config.actor_rollout_ref.actor.strategy), str(config.actor_rollout_ref.actor.get("_target_"))
    engine = next(
        (x for x in ("Megatron", "VeOmni", "TorchTitan", "FSDP") if x in target.replace("Mcore", "Megatron")), ""
    )
    if engine and not strategy.startswith(engine.lower()):
        yield Finding(
            f"{_ACTOR}.strategy={strategy}",
            f"the settings are of {engine}",
            f"write model_engine={_MODEL_ENGINES.get(strategy, strategy)}, which brings its own, and no strategy",
        )
        return
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        yield Finding(f"{_ROLLOUT}.name", "not given", f"set {_ROLLOUT}.name=vllm, or to sglang")
    verls = config.copy()
    verls.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl would import vLLM
    try:
        inspect.unwrap(validate_config)(verls, need_reference_policy(config), use_critic=False)
    except Exception as error:  # assertions and errors of many classes
        yield Finding("verl", "refuses these settings", " ".join(str(error).split()))


def _gtpos(config: DictConfig) -> Iterator[Finding]:
    """Settings with which GTPO cannot act, or which are not the paper's."""
    from gtpo_verl.verl_plugin import preflight
    from gtpo_verl.verl_plugin.run_config import LOSS_MODE, RunConfig

    for problem in preflight.problems(config):
        yield Finding("", "", problem)
    with suppress(ValueError):  # of algorithm.gtpo, which is among the problems
        run = RunConfig.read(config)
        if run.mode.applies_gtpo:
            yield from _without_effect(config)
            if departures := preflight.departures(config, run.gtpo):
                yield Finding("GTPO", "differs from the paper's in", advice=f"\n{preflight.as_table(departures)}")
    if unclipped := preflight.unclipped_updates(config):
        paper = {"trainer.v1.trainer_mode": "sync", f"{_ACTOR}.ppo_epochs": 1}
        one = " ".join(f"{x.setting}={paper.get(x.setting, config.data.train_batch_size)}" for x in unclipped)
        says = "several per rollout with the gtpo loss, which does not clip"
        yield Finding("updates", says, advice=f"make one ({one}), or clip ({LOSS_MODE}=vanilla)")


def _without_effect(config: DictConfig) -> Iterator[Finding]:
    """Where a run that asks for GTPO would not get it."""
    get = resources.getter(config)
    loss = "distillation.distillation_loss"
    rewarded = get(f"{loss}.use_task_rewards", True) or get(f"{loss}.use_policy_gradient")
    if get("distillation.enabled") and not rewarded:
        yield Finding(
            f"{loss}.use_task_rewards=False",
            "the policy loss is left out, and with it GTPO",
            f"set {loss}.use_task_rewards=True, or another algorithm.adv_estimator",
        )
    for trainer, method in _own_advantages():
        yield Finding(
            trainer,
            f"has a {method} of its own: GTPO may not act",
            advice="it would end at its first update; let it call verl's",
        )


def _own_advantages() -> Iterator[tuple[str, str]]:
    """Trainers of the program that override the method in which GTPO acts."""
    for module, name, method in _ACTS_IN:
        trainers = [getattr(sys.modules.get(module), name, object)]
        for trainer in trainers if trainers != [object] else ():
            trainers += trainer.__subclasses__()
            if method in vars(trainer) and not trainer.__module__.startswith("verl."):
                yield f"{trainer.__module__}.{trainer.__qualname__}", method


def _of_resources(config: DictConfig) -> Iterator[Finding]:
    """Settings that do not fit the GPUs that the command asks for."""
    get = resources.getter(config)
    gpus = int(get("trainer.nnodes")) * int(get("trainer.n_gpus_per_node"))
    if get("trainer.val_only"):
        return
    shared, names = _model_parallel(get)
    if gpus % shared:
        yield Finding(
            names,
            f"{shared} GPUs to a copy of the model, of {gpus} in all (trainer.nnodes x trainer.n_gpus_per_node)",
            "lower it, or ask for a multiple of it",
        )
    else:
        prompts, n = int(get("data.train_batch_size")), int(get(f"{_ROLLOUT}.n"))
        says = f"{prompts} prompts x {n} completions over {gpus // shared} copies of the model"
        remedy = f"make data.train_batch_size x {_ROLLOUT}.n a multiple of the copies, or use fewer GPUs"
        yield Finding("batch", says, remedy if prompts * n % (gpus // shared) else "")
    served = math.prod(
        int(get(f"{_ROLLOUT}.{kind}_parallel_size", 1)) for kind in ("tensor_model", "data", "pipeline_model")
    )
    if get("actor_rollout_ref.hybrid_engine", True) and gpus % served:
        key = f"{_ROLLOUT}.tensor_model_parallel_size"
        yield Finding(
            f"{key}={get(key)}",
            f"{served} GPUs to a copy of the model in the rollout, of {gpus} in all",
            f"set {key}=1, or ask for a multiple of {served}",
        )
    tokens, longest = (
        get(f"{_ACTOR}.ppo_max_token_len_per_gpu"),
        get("data.max_prompt_length") + get("data.max_response_length"),
    )
    if get(f"{_ACTOR}.use_dynamic_bsz") and tokens and tokens * shared < longest:
        yield Finding(
            f"{_ACTOR}.ppo_max_token_len_per_gpu={tokens}",
            f"a sequence has up to {longest} tokens (data.max_prompt_length + data.max_response_length)",
            f"set {_ACTOR}.ppo_max_token_len_per_gpu={math.ceil(longest / shared)} or more",
        )
    for name, pool in resources.pools(get).items():
        if not int(get(f"{pool}.nnodes") or 0) * int(get(f"{pool}.n_gpus_per_node") or 0):
            yield Finding(name, f"{pool}.nnodes={get(f'{pool}.nnodes')}: no GPUs of its own", f"set {pool}.nnodes=1")
    groups = get("algorithm.filter_groups") or {}
    if groups.get("enable") and get("trainer.use_v1"):
        if not groups.get("metric"):
            yield Finding(
                "algorithm.filter_groups.enable=True", "no metric", "set ++algorithm.filter_groups.metric=acc"
            )
        if get("reward.reward_model.enable") and not get("reward.reward_model.enable_resource_pool"):
            yield Finding(
                "algorithm.filter_groups.enable=True",
                "a reward model on the trainer's GPUs scores only after groups are chosen",
                "set reward.reward_model.enable_resource_pool=True, or algorithm.filter_groups.enable=False",
            )


def _model_parallel(get: Callable) -> tuple[int, str]:
    """How many GPUs hold one copy of the trained model, and the keys that say so."""
    if get(f"{_ACTOR}.strategy") == "megatron":
        kinds = [f"{_ACTOR}.megatron.{kind}_model_parallel_size" for kind in ("tensor", "pipeline")]
        kinds.append(f"{_ACTOR}.megatron.context_parallel_size")
    else:
        kinds = [f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size"]
        sizes = {key: int(get(key) or 1) for key in kinds}
        kinds = [max(kinds, key=lambda key: sizes[key])]
    asked = {key: size for key in kinds if (size := int(get(key) or 1)) > 1}
    return math.prod(asked.values()), " x ".join(f"{key}={size}" for key, size in asked.items())
