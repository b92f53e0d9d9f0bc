"""What a verl config asks of this plugin: its mode, and the keys of `algorithm.gtpo` that are verl's alone."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy

ALIAS = "gtpo_trajectory"
NAMES = ("gtpo", ALIAS)
"""Names of estimator and loss. The alias distinguishes this GTPO from those of arXiv:2508.04349 and 2511.14846."""

ADV_ESTIMATOR = "algorithm.adv_estimator"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
ALLOW_CHANGES = "algorithm.gtpo.allow_changed_advantages"

NOT_SELECTED = (OmegaConfBaseException, TypeError, ValueError)
"""What OmegaConf raises for a key whose value cannot be resolved, or whose section is a number, a text or a list."""


def select(config: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key of a verl config; the default if it has none, or is no config of OmegaConf.

    A value that cannot be resolved counts as none here: `values` reports it.
    """
    if not OmegaConf.is_config(config):
        return default
    try:
        return OmegaConf.select(config, key, default=default)
    except NOT_SELECTED:
        return default


def nested(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a section, such as `a` and `a.b`, with its value, which may be a section."""
    for name, value in section.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from nested(value, f"{prefix}{name}.")


def registry(key: str) -> dict[str, Callable]:
    """Return verl's registered functions by name, estimators for `ADV_ESTIMATOR` and losses for `LOSS_MODE`."""
    from verl.trainer.ppo import core_algos

    return core_algos.ADV_ESTIMATOR_REGISTRY if key == ADV_ESTIMATOR else core_algos.POLICY_LOSS_REGISTRY


def foreign_function(name: Any, key: str = ADV_ESTIMATOR) -> str:
    """Return which function another package, or verl, has registered under a name of ours; empty if none has."""
    if name not in NAMES:
        return ""
    function = registry(key).get(name)
    if function is None or function.__module__.partition(".")[0] == "gtpo_verl":
        return ""
    return f"{function.__module__}.{function.__qualname__}"


def uses_gtpo(config: Any, key: str = ADV_ESTIMATOR) -> bool:
    """Whether a verl config asks for the advantages of this plugin or, under `LOSS_MODE`, for its policy loss."""
    name = select(config, key)
    return name in NAMES and not foreign_function(name, key)


@dataclass(frozen=True)
class VerlGTPOConfig(GTPOConfig):
    """Settings of GTPO (arXiv:2508.03772) in verl, the section `algorithm.gtpo` of a verl config.

    Args:
        base (str): whose A_i. `gtpo`: the paper's; `rloo` or `opo`: verl's estimator of this name.
        entropy_from (str): which forward pass of verl's trainer gives ⟨H⟩_i. `old_log_prob`: the one before the
            update. `update`: the update's own, so that verl can skip the other.
        dump_dir (str | None): folder for the token dump that `gtpo-verl view` shows. None: no dump.
        dump_freq (int): dump the first step and every step that this number divides. At least 1.
        allow_changed_advantages (bool): the trainer changes GTPO's advantages on purpose, or updates with older ones.
            False: the run ends at an update with other advantages than GTPO's.
    """

    trainer: ClassVar[str] = "the plugin for verl"

    base: str = "gtpo"
    entropy_from: str = "old_log_prob"
    dump_dir: str | None = None
    dump_freq: int = 10
    allow_changed_advantages: bool = False

    def unavailable_fields(self) -> dict[str, str]:
        if self.entropy_from != "update":
            return {}
        return {
            "entropy": f"{self.section}.entropy_from=update gives it to the actor alone, after the weights: set it to "
            "old_log_prob, or use another field"
        }

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_choice("base", "gtpo", "rloo", "opo")
        self._check_choice("entropy_from", "old_log_prob", "update")
        if self.dump_dir is not None and not (isinstance(self.dump_dir, str) and self.dump_dir.strip()):
            raise ValueError(f"{self.section}.dump_dir={self.dump_dir!r}: must be the name of a folder, or null")
        self._check_number("dump_freq", "a whole number of steps of at least 1", lambda x: x >= 1 and x == int(x))
        if not isinstance(self.allow_changed_advantages, bool):
            raise ValueError(f"{ALLOW_CHANGES}={self.allow_changed_advantages!r}: must be True or False")


class RunConfig(NamedTuple):
    """What a verl config asks for."""

    applies_gtpo: bool  # whether the advantages are GTPO's
    gtpo: VerlGTPOConfig  # the defaults where the run asks for nothing; with a dump_dir it may ask for the dump alone
    # The folder with the record of ⟨H⟩_ini of the run that verl will resume: the checkpoint itself or, if it has no
    # record, the folder around it. None for a new run.
    resumed_from: str | None = None

    @property
    def entropy_from_update(self) -> bool:
        """Whether GTPO's entropy comes from the update's forward pass."""
        return self.applies_gtpo and self.gtpo.entropy_from == "update"

    @classmethod
    def inactive(cls) -> "RunConfig":
        """Return the settings of a run that asks for nothing."""
        return cls(applies_gtpo=False, gtpo=VerlGTPOConfig())

    @classmethod
    def read(cls, config: Any) -> "RunConfig":
        """Read from verl's whole config what it asks for.

        Raises:
            ValueError: a wrong setting of GTPO in a run that asks for it or for its dump.
        """
        applied = uses_gtpo(config)
        if not applied and select(config, "algorithm.gtpo.dump_dir") is None:
            return cls.inactive()
        try:
            gtpo = VerlGTPOConfig.from_config(config.algorithm)
        except OmegaConfBaseException as error:  # a value is missing, or refers to a key that does not exist
            reason = str(error).splitlines()[0]
            raise ValueError(f"algorithm.gtpo: {reason}: give that key a value") from error
        folder = select(config, "trainer.default_local_dir")
        if applied and (not folder or not isinstance(folder, str)):
            written = "null" if folder is None else folder
            raise ValueError(
                f"trainer.default_local_dir={written}: GTPO keeps its initial entropy there: name a folder"
            )
        return cls(applies_gtpo=applied, gtpo=gtpo, resumed_from=_resumed_from(config))


def _resumed_from(config: Any) -> str | None:
    """Return `RunConfig.resumed_from`.

    Raises:
        ValueError: verl's file with the last step's number cannot be read.
    """
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    mode = select(config, "trainer.resume_mode")
    path = select(config, "trainer.resume_from_path")
    folder = select(config, "trainer.default_local_dir")
    checkpoint = ""
    if mode == "resume_path" and path:
        checkpoint = str(path).rstrip("/")
    elif mode == "auto":
        try:
            with redirect_stdout(io.StringIO()):  # verl says it again when it loads the checkpoint
                checkpoint = find_latest_ckpt_path(folder) or ""
        except (OSError, ValueError) as error:
            remedy = "write that of a whole checkpoint, or remove it"
            raise ValueError(
                f"{folder}/latest_checkpointed_iteration.txt holds no number of a step ({error}): {remedy}"
            ) from error
    if not checkpoint:
        return None
    if InitialEntropy.path(checkpoint).exists():
        return checkpoint
    return os.path.dirname(checkpoint) or "."
