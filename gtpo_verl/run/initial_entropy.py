"""⟨H⟩_ini, the policy's mean entropy before training (arXiv:2508.03772, Sec. 5.2), and what it decides.

It is one number for a whole run: measured once, written beside the checkpoints, read back on resume. By default a run
measures it on its first rollouts; `gtpo-verl initial-entropy` follows the paper's stricter procedure.
"""

import json
import logging
import math
from collections.abc import Hashable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run.records import atomic_write, differences, read_record

logger = logging.getLogger("gtpo_verl")

_FILE_NAME = "gtpo_initial_entropy.json"
_SETTINGS_KEY = "gtpo"
PAPER_SAMPLES = 100
"""Training prompts on which the paper measures ⟨H⟩_ini (Sec. 6)."""


@dataclass(frozen=True)
class InitialEntropy:
    """⟨H⟩_ini and how it was measured."""

    value: float  # mean over completions of each completion's mean entropy ⟨H⟩_i, nats per token
    std: float = 0.0  # standard deviation of ⟨H⟩_i over the completions, nats per token
    completions: int = 0  # 0 if the config gave the value
    prompts: int = 0  # different prompts of these completions; 0 if the config gave the value

    @classmethod
    def measure(
        cls, trajectory_entropy: torch.Tensor, lengths: torch.Tensor, index: Iterable[Hashable]
    ) -> "InitialEntropy":
        """Measure it on rollouts of the untrained policy, from their (bs,) ⟨H⟩_i, lengths and uids.

        Rows of length 0 do not count.

        Raises:
            ValueError: every row has length 0.
        """
        values = trajectory_entropy[lengths > 0].double()
        if len(values) == 0:
            raise ValueError("the initial entropy cannot be measured: no completion has a token")
        prompts = {uid for uid, length in zip(index, lengths.tolist(), strict=True) if length}
        return cls(
            value=values.mean().item(),
            std=values.std(correction=0).item(),
            completions=len(values),
            prompts=len(prompts),
        )

    def may_be_chance(self, config: GTPOConfig) -> bool:
        """Return whether other prompts might decide otherwise: there are few, and the value is near the threshold.

        Measured on a single prompt of MATH, Llama-3.1-8B has 0.90 nats on one and 0.48 on another.
        """
        is_near = config.entropy_threshold / 2 < self.value < 2 * config.entropy_threshold
        has_few_prompts = 0 < self.prompts < 16  # 0 where the value was set
        return config.completion_filter == "auto" and has_few_prompts and is_near

    def decision(self, config: GTPOConfig) -> str:
        """Return whether completions are filtered, and the numbers by which that is decided, in one line."""
        key = f"{config.section}.initial_entropy"
        state = "on" if config.filter_is_active(self.value) else "off"
        relation = "<" if self.value < config.entropy_threshold else ">="
        numbers = f"{self.value:.3f} {relation} {config.entropy_threshold:.3f} nats"
        if self.completions:
            source = f"{self.completions} completions of {self.prompts} prompts"
        else:
            source = f"set as {key}"
        line = f"completion filter {state}: {numbers}, {source}, completion_filter={config.completion_filter}"
        if self.may_be_chance(config):
            line += f". Other prompts might decide otherwise: set {key} to what `gtpo-verl initial-entropy` measures"
        return line

    @staticmethod
    def path(folder: str | Path) -> Path:
        """Return the path of the record in a folder of checkpoints."""
        return Path(folder) / _FILE_NAME

    def save(self, folder: str | Path, config: GTPOConfig) -> Path | None:
        """Write the record, and the settings that it is used with, into the folder of the checkpoints.

        Returns:
            The file; None where writing fails, with a warning that says what a resumed run then needs.
        """
        path = self.path(folder)
        record = asdict(self) | {_SETTINGS_KEY: asdict(config)}
        try:
            atomic_write(path, json.dumps(record, indent=2) + "\n")
        except OSError as error:
            remedy = f"to resume the run, set {config.section}.initial_entropy={self.value}"
            logger.warning("GTPO: the initial entropy is not recorded (%s); %s", error, remedy)
            return None
        return path

    @classmethod
    def known_before(cls, config: GTPOConfig, resumed_from: str | Path | None) -> "InitialEntropy | None":
        """Return the initial entropy that is known before the first batch; None if it is to be measured, or not needed.

        Args:
            config: the run's GTPO settings.
            resumed_from: the folder of the record, if the run is resumed; None if it is new.

        Raises:
            ValueError: the run is resumed, the filter needs the initial entropy, and its record is missing or damaged.
        """
        if config.initial_entropy is not None:
            return cls(config.initial_entropy)
        if resumed_from is None:
            return None
        if not config.measures_initial_entropy and not cls.path(resumed_from).exists():
            return None
        try:
            return cls.load(resumed_from, config.section)
        except ValueError as error:
            if config.measures_initial_entropy:
                raise
            logger.warning("GTPO: %s", error)
            return None

    @classmethod
    def load(cls, folder: str | Path, section: str = GTPOConfig.section) -> "InitialEntropy":
        """Read the record of a run that is resumed.

        Args:
            folder: of the checkpoints.
            section: where the run's config has GTPO's keys, for messages.

        Raises:
            ValueError: the record is missing or damaged.
        """
        path = cls.path(folder)
        remedy = (
            f"set {section}.initial_entropy (nats per token) to the value that the run logged at its first step or, "
            "if that run did not use GTPO, to what `gtpo-verl initial-entropy` measures of the model it started from; "
            f"or {section}.completion_filter to always or never"
        )
        if not path.is_file():
            raise ValueError(f"this run is resumed, but {path} with its initial entropy is missing; {remedy}")
        try:
            fields = read_record(path)
            fields.pop(_SETTINGS_KEY, None)
            record = cls(**fields)
            for name, number in asdict(record).items():
                if not (math.isfinite(number) and number >= 0):
                    raise ValueError(f"{name}={number}")
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"this run is resumed, but {path} is not a valid record ({error}); {remedy}") from error
        return record


def changed_settings(folder: str | Path, config: GTPOConfig) -> list[str]:
    """Return the GTPO settings that differ from those recorded with these checkpoints, one line each.

    Raises:
        ValueError: the record of that run is damaged.
    """
    path = InitialEntropy.path(folder)
    before = read_record(path).get(_SETTINGS_KEY, {}) if path.exists() else {}
    if not isinstance(before, dict):
        raise ValueError(f"{path} must have an object {_SETTINGS_KEY}: restore or remove it")

    # Keys that the record lacks, of an older version, are no change; `dump_*` does not affect training.
    present = asdict(config)
    keys = [key for key in present if key in before and not key.startswith("dump_")]
    changes = differences({key: before[key] for key in keys}, {key: present[key] for key in keys})
    return [f"{config.section}.{change}" for change in changes]


def changed_settings_warning(folder: str | Path, config: GTPOConfig) -> str:
    """Return a warning for a run resumed from these checkpoints with other settings, or with settings that cannot be
    compared; empty if they are the same."""
    try:
        changed = changed_settings(folder, config)
    except ValueError as error:
        return f"GTPO resumes from {folder}; whether its settings changed is unknown, since {error}"
    if not changed:
        return ""
    return f"GTPO resumes from {folder} with other settings: {'; '.join(changed)}"
