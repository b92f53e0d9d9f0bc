"""Values that verl does not have, each with those that it has."""

from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from gtpo_verl.tools.check.finding import Finding

_ACTOR = "actor_rollout_ref.actor"
_KL = [f"{name}{plus}" for name in ("low_var_kl", "kl", "k1", "k2", "k3", "mse", "abs") for plus in ("", "+")]
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_SCHEDULES = ("constant", "cosine")


def _choices(get: Callable) -> Iterator[tuple[str, bool, Iterable[str]]]:
    """A key, whether this run reads it, and its values: verl's registries, and what the code of verl 0.9 asks for."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.utils.tracking import Tracking
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    has_critic = get("critic.enable") or (get("critic.enable") is None and get("algorithm.adv_estimator") == "gae")
    yield "trainer.logger", True, (*Tracking.supported_backend, "tracking")
    yield "trainer.resume_mode", True, ("auto", "disable", "resume_path")
    if get("trainer.use_v1") and get("async_training") is None and find_spec("transfer_queue"):
        from verl.trainer.ppo.v1 import trainer_base

        yield "trainer.v1.trainer_mode", True, trainer_base.TRAINER_REGISTRY
    yield "data.truncation", True, ("error", "left", "right", "middle")
    yield "actor_rollout_ref.rollout.name", True, RolloutReplicaRegistry._registry
    if get("reward.reward_manager.source") == "register":
        yield "reward.reward_manager.name", True, REWARD_MANAGER
    yield f"{_ACTOR}.kl_loss_type", get(f"{_ACTOR}.use_kl_loss"), _KL
    yield "algorithm.kl_penalty", get("algorithm.use_kl_in_reward"), _KL
    yield "algorithm.kl_ctrl.type", get("algorithm.use_kl_in_reward"), ("fixed", "adaptive")
    for section, is_read in ((_ACTOR, True), ("critic", has_critic)):
        yield f"{section}.loss_agg_mode", is_read, _MODES
        if str(get(f"{section}.optim._target_")).endswith(".FSDPOptimizerConfig"):
            yield f"{section}.optim.lr_scheduler_type", is_read, _SCHEDULES
            yield f"{section}.optim.warmup_style", is_read, _SCHEDULES


def put_right(config: DictConfig) -> Iterator[Finding]:
    """A finding on each value that verl does not have, a problem if this run reads it; verl's own goes into the config,
    since what else is wrong shows only then."""
    for key, is_read, choices in _choices(lambda key: OmegaConf.select(config, key)):
        value = OmegaConf.select(config, key)
        for one in [value] if isinstance(value, str) else value or ():
            if one not in choices:
                near = get_close_matches(str(one), choices, n=1)
                what = (f"did you mean {near[0]}? " if near else "") + f"verl has {', '.join(choices)}"
                says = "no such value" if is_read else "no such value, which this run does not read"
                yield Finding(f"{key}={one}", says, *([what] if is_read else ["", what]))
                OmegaConf.update(config, key, next(iter(choices)))
