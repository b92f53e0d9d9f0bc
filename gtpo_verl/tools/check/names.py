"""Names in a config, such as that of a loss, that this verl does not have.

verl's own names are read from verl: from its registries, or from the function that compares a name with them.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.verl_plugin.run_config import select
from gtpo_verl.verl_plugin.values import verls_defaults, verls_engines

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_ATTENTION = f"{_MODEL}.override_config.attn_implementation"
_KL = "verl.trainer.ppo.core_algos:kl_penalty_forward"
_LOSS = "verl.trainer.ppo.core_algos:agg_loss"


class Name(NamedTuple):
    """A key whose value is a name, and how to look up the names that there are."""

    key: str
    look_up: Callable[[], Sequence[str]]
    # Whether this run reads the key.
    is_read: bool = True
    # Whether workers may know more names than this process, such as those of a file of the user's.
    is_open: bool = False


def unknown_names(config: DictConfig) -> Iterator[tuple[str, Finding]]:
    """Yield the key of each name that verl does not have, or that cannot be checked here, with what to say of it."""
    for name in _names(config):
        value = select(config, name.key)
        if value is None or value == verls_defaults().get(name.key):
            continue
        values = value if OmegaConf.is_list(value) else [value]
        for listed in values:
            finding = _check(name, listed)
            if finding:
                yield name.key, finding


def _check(name: Name, value: Any) -> Finding | None:
    subject = f"{name.key}={value}"
    try:
        known = name.look_up()
    except (ImportError, AttributeError, OSError, SyntaxError, OmegaConfBaseException) as error:
        return Finding(subject, "not checked", advice=" ".join(str(error).split()))
    given = str(value)
    if name.look_up is _kl_penalties:
        given = given.removesuffix("+")  # which asks for the straight-through estimator of the same penalty
    if not known or given in known:
        return None
    near = get_close_matches(str(value), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    choices = f"{hint}verl has {', '.join(known)}"
    if name.is_open:
        return Finding(subject, "not checked: no such name here", advice=choices)
    if not name.is_read:
        return Finding(subject, "no such value, which this run does not read", advice=choices)
    return Finding(subject, "no such value", remedy=choices)


def _names(config: DictConfig) -> Iterator[Name]:
    get = partial(select, config)
    yield Name("trainer.logger", _loggers)
    resume = "verl.trainer.ppo.ray_trainer:RayPPOTrainer._load_checkpoint"
    yield Name("trainer.resume_mode", partial(compared, resume, "resume_mode"))
    if get("trainer.use_v1") and get("async_training") is None:
        registry = "verl.trainer.ppo.v1.trainer_base:TRAINER_REGISTRY"
        yield Name("trainer.v1.trainer_mode", partial(_registered, registry))
    yield Name("data.truncation", partial(compared, "verl.utils.torch_functional:postprocess_data", "truncation"))
    if get("reward.reward_manager.source") == "register":
        registry = "verl.experimental.reward_loop.reward_manager.registry:REWARD_MANAGER"
        yield Name("reward.reward_manager.name", partial(_registered, registry))
    yield from _names_of_losses(config)
    yield from _names_of_engines(config)
    yield from _names_of_the_rollout(config)


def _names_of_losses(config: DictConfig) -> Iterator[Name]:
    from verl.trainer.ppo.utils import need_critic

    get = partial(select, config)
    has_critic = need_critic(config)
    penalises_reward = bool(get("algorithm.use_kl_in_reward"))
    yield Name(f"{_ACTOR}.kl_loss_type", _kl_penalties, is_read=bool(get(f"{_ACTOR}.use_kl_loss")))
    yield Name("algorithm.kl_penalty", _kl_penalties, is_read=penalises_reward)
    controllers = partial(compared, "verl.trainer.ppo.core_algos:get_kl_controller", "type")
    yield Name("algorithm.kl_ctrl.type", controllers, is_read=penalises_reward)
    yield Name(f"{_ACTOR}.loss_agg_mode", partial(compared, _LOSS, "loss_agg_mode"))
    yield Name("critic.loss_agg_mode", partial(compared, _LOSS, "loss_agg_mode"), is_read=has_critic)


def _names_of_engines(config: DictConfig) -> Iterator[Name]:
    from verl.trainer.ppo.utils import need_critic

    get = partial(select, config)
    if get(f"{_ACTOR}.fsdp_config") is not None:
        engine = "verl.workers.config.engine:FSDPEngineConfig.__post_init__"
        # If it is another engine, `verls.refusals` says that the settings are FSDP's.
        if get(f"{_ACTOR}.strategy") not in verls_engines():
            yield Name(f"{_ACTOR}.strategy", partial(compared, engine, "strategy"))
        yield Name(_ATTENTION, _attentions, is_open="/" in str(get(_ATTENTION)))
    for section, is_read in ((_ACTOR, True), ("critic", need_critic(config))):
        optimizer = str(get(f"{section}.optim._target_"))
        if not optimizer.startswith("verl."):
            continue
        for name in ("lr_scheduler_type", "warmup_style"):
            look_up = partial(compared, f"{optimizer}.__post_init__", name)
            yield Name(f"{section}.optim.{name}", look_up, is_read=is_read)


def _names_of_the_rollout(config: DictConfig) -> Iterator[Name]:
    get = partial(select, config)
    registry = "verl.workers.rollout.replica:RolloutReplicaRegistry._registry"
    yield Name(f"{_ROLLOUT}.name", partial(_registered, registry))
    yield Name(f"{_ROLLOUT}.dtype", _dtypes)
    # An engine has formats of its own, of which some come with packages.
    yield Name(f"{_ROLLOUT}.load_format", lambda: ["auto", "dummy", "hf", "pt", "safetensors"], is_open=True)
    # A file or a class of the user's may register more of them in the workers.
    file = get(f"{_ROLLOUT}.agent.agent_loop_config_path")
    manager = get(f"{_ROLLOUT}.agent.agent_loop_manager_class")
    may_have_more = bool(file or manager)
    loops = partial(_registered, "verl.experimental.agent_loop.agent_loop:_agent_loop_registry")
    yield Name(f"{_ROLLOUT}.agent.default_agent_loop", loops, is_open=may_have_more)
    parsers = partial(_registered, "verl.experimental.agent_loop.tool_parser:ToolParser._registry")
    calls_tools = get(f"{_ROLLOUT}.agent.default_agent_loop") == "tool_agent"
    yield Name(f"{_ROLLOUT}.multi_turn.format", parsers, is_read=calls_tools, is_open=may_have_more)


def _registered(place: str) -> list[str]:
    return [str(name) for name in resolve_name(place)]


def compared(place: str, name: str) -> list[str]:
    """Return the texts with which a function of verl compares a variable or an attribute of this name."""
    function = inspect.unwrap(resolve_name(place))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    texts: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left).rpartition(".")[2] == name:
            for constant in ast.walk(node):
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                    texts[constant.value] = None
    return list(texts)


def _loggers() -> list[str]:
    """Return verl's loggers, with the former name that it still takes."""
    tracking = "verl.utils.tracking:Tracking"
    return [*_registered(f"{tracking}.supported_backend"), *compared(f"{tracking}.__init__", "backend")]


def _kl_penalties() -> list[str]:
    """Return the KL penalties that verl can compute; it also compares with one that it cannot."""
    import torch

    compute = resolve_name(_KL)
    names = []
    for name in compared(_KL, "kl_penalty"):
        with suppress(NotImplementedError):
            compute(torch.zeros(1), torch.zeros(1), name)
            names.append(name)
    return names


def _dtypes() -> list[str]:
    """Return verl's names of precisions, and those that the engines of its rollout have beside them."""
    from verl.utils import torch_dtypes

    lists = [torch_dtypes.BFLOAT_LIST, torch_dtypes.HALF_LIST, torch_dtypes.FLOAT_LIST]
    names = [name for precisions in lists for name in precisions if isinstance(name, str)]
    return ["auto", "half", "float", *names]


def _attentions() -> list[str]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
