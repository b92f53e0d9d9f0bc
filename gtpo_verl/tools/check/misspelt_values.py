"""Values that verl does not have, each with those that it has."""

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pkgutil import resolve_name

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check import Finding

_ACTOR = "actor_rollout_ref.actor"
_KL = tuple(f"{name}{plus}" for name in ("low_var_kl", "kl", "k1", "k2", "k3", "mse", "abs") for plus in ("", "+"))
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_REGISTRIES = {
    "actor_rollout_ref.rollout.name": "verl.workers.rollout.replica:RolloutReplicaRegistry._registry",
    "reward.reward_manager.name": "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER",
    "trainer.v1.trainer_mode": "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY",
    "trainer.logger": "verl.utils.tracking:Tracking.supported_backend",
}
"""Where others may register more; read only if a value is not verl's own, since the imports take their time."""


def _choices(get: Callable) -> Iterator[tuple[str, bool, tuple[str, ...]]]:
    """Yield a key, whether this run reads it, and the values that verl 0.9 has."""
    has_critic = get("critic.enable") or (get("critic.enable") is None and get("algorithm.adv_estimator") == "gae")
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
    for section, is_read in ((_ACTOR, True), ("critic", has_critic)):
        yield f"{section}.loss_agg_mode", is_read, _MODES
        if str(get(f"{section}.optim._target_")).endswith(".FSDPOptimizerConfig"):
            yield f"{section}.optim.lr_scheduler_type", is_read, ("constant", "cosine")
            yield f"{section}.optim.warmup_style", is_read, ("constant", "cosine")


def put_right(config: DictConfig) -> Iterator[Finding]:
    """Yield a finding on each value that verl does not have, a problem if this run reads it. The config gets verl's,
    since what else is wrong shows only then."""
    for key, is_read, choices in _choices(lambda key: OmegaConf.select(config, key)):
        value = OmegaConf.select(config, key)
        for one in [value] if isinstance(value, str) else value or ():
            if one not in choices and key in _REGISTRIES:
                choices = tuple(dict.fromkeys([*choices, *resolve_name(_REGISTRIES[key])]))
            if one not in choices:
                near = get_close_matches(str(one), choices, n=1)
                what = (f"did you mean {near[0]}? " if near else "") + f"verl has {', '.join(choices)}"
                says = "no such value" if is_read else "no such value, which this run does not read"
                yield Finding(f"{key}={one}", says, *([what] if is_read else ["", what]))
                OmegaConf.update(config, key, choices[0])
