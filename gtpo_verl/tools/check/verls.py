"""What verl itself refuses in a config: its dataclasses of actor, rollout and critic, its validation, its correction.

Each check is also tried on verl's own defaults of the same engine. If it refuses even those, its refusal says nothing
about a config, and is not reported. Two dataclasses are left out: that of the model asks the Hugging Face Hub, and that
of the reward refuses its own defaults.
"""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import verl
import yaml
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.verl_plugin.run_config import select

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ENGINES = ("Megatron", "VeOmni", "TorchTitan", "FSDP")

Judge = Callable[[DictConfig], Any]


def refusals(config: DictConfig) -> Iterator[Finding]:
    """Yield what verl itself refuses, the first reason of each of its checks."""
    mismatch = _other_engine(config)
    if mismatch:
        yield mismatch
        return
    if OmegaConf.is_missing(config.actor_rollout_ref.rollout, "name"):
        yield Finding(f"{_ROLLOUT}.name", "not given", f"set {_ROLLOUT}.name=vllm, or to sglang")
    for judge in _judges(config):
        reason = _reason(judge, config)
        if reason and not _reason(judge, _verls_own(config)):
            yield Finding("verl", "refuses these settings", reason)


def _other_engine(config: DictConfig) -> Finding | None:
    """Return a problem if the strategy is of one engine and the settings beside it are of another; else None."""
    strategy = str(select(config, f"{_ACTOR}.strategy"))
    engine = _engine_of(config)
    if not engine or strategy.startswith(engine.lower()):
        return None
    group = "dp" if strategy in ("fsdp", "fsdp2") else strategy
    remedy = f"write model_engine={group}, which brings its own, and no strategy"
    return Finding(f"{_ACTOR}.strategy={strategy}", f"the settings are of {engine}", remedy)


def _engine_of(config: DictConfig) -> str:
    target = str(select(config, f"{_ACTOR}._target_")).replace("Mcore", "Megatron")
    for engine in _ENGINES:
        if engine in target:
            return engine
    return ""


def _verls_own(config: DictConfig) -> DictConfig:
    """Return verl's defaults of the same engine, completed by what every run has to choose."""
    folder = Path(verl.__file__).parent / "trainer/config"
    path = folder / f"_generated_ppo_{_engine_of(config).lower()}_trainer.yaml"
    if not path.is_file():
        path = folder / "_generated_ppo_trainer.yaml"
    defaults = OmegaConf.create(yaml.load(path.read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    defaults.actor_rollout_ref.rollout.name = "vllm"
    defaults.actor_rollout_ref.actor.use_dynamic_bsz = True
    return defaults


def _reason(judge: Judge, config: DictConfig) -> str:
    """Return why verl refuses a config; empty if it does not."""
    config = config.copy()
    config.actor_rollout_ref.rollout.name = "hf"  # with LoRA, verl would import vLLM
    config.critic.model = None  # it would load the tokenizer
    try:
        judge(config)
    except Exception as error:  # assertions and errors of many classes
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def _judges(config: DictConfig) -> Iterator[Judge]:
    from verl.trainer.ppo.utils import need_critic

    yield _rollout
    correction = select(config, "algorithm.rollout_correction")
    if correction and not select(correction, "bypass_mode"):
        yield _rollout_correction
    if select(config, "async_training") is None:  # fully_async has checks of its own
        yield _validation
    else:
        yield _actor
    yield _strategy
    if need_critic(config):
        yield _critic


def _rollout(config: DictConfig) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)


def _actor(config: DictConfig) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def _validation(config: DictConfig) -> None:
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    inspect.unwrap(validate_config)(config, need_reference_policy(config), use_critic=False)


def _strategy(config: DictConfig) -> None:
    """Build FSDP's settings with the actor's strategy, so that they assert it.

    verl writes the actor's strategy into the settings after they are built, past their assertion.
    """
    from verl.utils.config import omega_conf_to_dataclass

    settings = select(config, f"{_ACTOR}.fsdp_config")
    if settings is not None:
        engine = settings.copy()
        engine.strategy = config.actor_rollout_ref.actor.strategy
        omega_conf_to_dataclass(engine)


def _critic(config: DictConfig) -> None:
    from verl.utils.config import omega_conf_to_dataclass

    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    omega_conf_to_dataclass(config.critic).validate(gpus, config.data.train_batch_size)


def _rollout_correction(config: DictConfig) -> None:
    import torch
    from verl import DataProto
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    ones = {name: torch.ones(1, 1) for name in ("old_log_probs", "rollout_log_probs", "response_mask")}
    compute_rollout_correction_and_add_to_batch(DataProto.from_dict(ones), config.algorithm.rollout_correction)
