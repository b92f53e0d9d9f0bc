"""GTPO's names in verl: which configs ask for them, and what stops this plugin from serving them."""

from typing import Any

import verl
from omegaconf import OmegaConf
from packaging.version import InvalidVersion, Version

SUPPORTED_VERL = ("0.7.1", "0.8.0", "0.9.0", "0.9.1")

ALIAS = "gtpo_trajectory"
NAMES = ("gtpo", ALIAS)
"""Names of estimator and loss. The alias distinguishes this GTPO from those of arXiv:2508.04349 and 2511.14846."""

ADV_ESTIMATOR = "algorithm.adv_estimator"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"

_load_errors: list[str] = []


def adv_estimator(config: Any) -> str:
    """The name of the advantage estimator that a verl config asks for."""
    return str(OmegaConf.select(config, ADV_ESTIMATOR))


def verl_has_gtpo() -> bool:
    """Whether this verl has GTPO of its own (`patches/`), which then serves `gtpo` without this plugin."""
    from verl.trainer.ppo.core_algos import AdvantageEstimator

    return "GTPO" in AdvantageEstimator.__members__


def serves(config: Any) -> bool:
    """Whether a verl config asks for the advantages of this plugin."""
    name = adv_estimator(config)
    return name == ALIAS or (name in NAMES and not verl_has_gtpo())


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


def load_errors(config: Any = None) -> list[str]:
    """Why GTPO cannot run in this process, under the names in a verl config, or under `gtpo` if there is none."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    found = list(_load_errors)
    for key, registry in ((ADV_ESTIMATOR, ADV_ESTIMATOR_REGISTRY), (LOSS_MODE, POLICY_LOSS_REGISTRY)):
        name = "gtpo" if config is None else str(OmegaConf.select(config, key))
        function = registry.get(name) if name in NAMES else None
        # verl may have GTPO of its own.
        if function is not None and function.__module__.partition(".")[0] not in ("gtpo_verl", "verl"):
            found.append(
                f"{key}={name} is {function.__module__}.{function.__qualname__} of another package; two other papers "
                f"are called GTPO (arXiv:2508.04349, arXiv:2511.14846). For arXiv:2508.03772 set {key}={ALIAS}"
            )
    return found


def raise_load_errors(config: Any = None) -> None:
    """Raise if GTPO cannot run in this process.

    Raises:
        RuntimeError: naming each cause and its remedy.
    """
    if found := load_errors(config):
        raise RuntimeError("GTPO cannot run: " + "; ".join(found))
