"""Which verls this plugin serves, under which names, and load errors."""

from collections.abc import Callable
from typing import Any

import verl
from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

SUPPORTED_VERL = ("0.9.0", "0.9.1")

ALIAS = "gtpo_trajectory"
NAMES = ("gtpo", ALIAS)
"""Names of estimator and loss. The alias distinguishes this GTPO from those of arXiv:2508.04349 and 2511.14846."""

ADV_ESTIMATOR = "algorithm.adv_estimator"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"

_load_errors: list[str] = []


def select(config: Any, key: str) -> Any:
    """The value of a key of a verl config; None if there is none, or if the config is no config of OmegaConf."""
    return OmegaConf.select(config, key) if OmegaConf.is_config(config) else None


def registry(key: str) -> dict[str, Callable]:
    """verl's functions by the names that a key, `ADV_ESTIMATOR` or `LOSS_MODE`, may have."""
    from verl.trainer.ppo import core_algos

    return {ADV_ESTIMATOR: core_algos.ADV_ESTIMATOR_REGISTRY, LOSS_MODE: core_algos.POLICY_LOSS_REGISTRY}[key]


def foreign(config: Any, key: str = ADV_ESTIMATOR) -> str:
    """The function of another package that serves one of our names in a verl config; empty if none does."""
    name = select(config, key)
    function = registry(key).get(name) if name in NAMES else None
    if function is None or function.__module__.partition(".")[0] == "gtpo_verl":
        return ""
    return f"{function.__module__}.{function.__qualname__}"


def serves(config: Any, key: str = ADV_ESTIMATOR) -> bool:
    """Whether a verl config asks for the advantages of this plugin or, under `LOSS_MODE`, for its policy loss."""
    return select(config, key) in NAMES and not foreign(config, key)


def verl_version() -> Version | None:
    """The version of the imported verl, which may not be an installed package; None if it cannot be parsed."""
    try:
        return Version(verl.__version__)
    except InvalidVersion:
        return None


def is_tested() -> bool:
    """Whether this verl is a release from the first to the last of `SUPPORTED_VERL`, not a checkout or a fork."""
    found = verl_version()
    return (
        found is not None
        and not (found.is_prerelease or found.local)
        and Version(SUPPORTED_VERL[0]) <= found <= Version(SUPPORTED_VERL[-1])
    )


def add_load_error(text: str) -> None:
    """Keep a reason why GTPO cannot run in this process: verl swallows exceptions while it loads plugins."""
    if text not in _load_errors:  # two hooks on one function find the same
        _load_errors.append(text)


def load_errors() -> list[str]:
    """Why GTPO cannot run in this process."""
    return list(_load_errors)


def raise_load_errors() -> None:
    """Raise if GTPO cannot run in this process.

    Raises:
        RuntimeError: naming each cause and its remedy.
    """
    if _load_errors:
        raise RuntimeError("GTPO cannot run: " + "; ".join(_load_errors))
