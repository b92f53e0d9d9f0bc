"""Find what is wrong with the checkpoint that verl is to resume a run from, or what its user may not expect."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from gtpo_verl.run.initial_entropy import InitialEntropy, changed_settings_warning
from gtpo_verl.verl_plugin.run_config import RunConfig, select

_MODE = "trainer.resume_mode"
_PATH = "trainer.resume_from_path"
_FOLDER = "trainer.default_local_dir"


def path_problems(config: Any) -> list[str]:
    """Return why verl cannot take the path of a checkpoint that a config names, without looking at the disk."""
    path = select(config, _PATH)
    if select(config, _MODE) != "resume_path":
        return []
    remedy = f"name a folder …/global_step_N, or set {_MODE}=auto"
    if not isinstance(path, str):
        written = "null" if path is None else path
        return [f"{_PATH}={written} with {_MODE}=resume_path: {remedy}"]
    # verl takes everything after global_step_ as the step, so that a slash at the end breaks it.
    _, marker, step = path.rpartition("global_step_")
    if not marker or not step.isdigit():
        return [f"{_PATH}={path}: verl reads the step from its end; {remedy}"]
    return []


def missing_checkpoint(config: Any) -> list[str]:
    """Return a message if the folder of the checkpoint that a config names does not exist."""
    path = select(config, _PATH)
    if select(config, _MODE) != "resume_path" or not isinstance(path, str) or Path(path).is_dir():
        return []
    return [f"{_PATH}={path}: no checkpoint is there: name one that exists, or set {_MODE}=auto"]


def resume_warning(config: DictConfig, run: RunConfig) -> str:
    """Return a warning if a run's checkpoints were saved under other settings, or verl overlooks them; else empty."""
    if run.resumed_from is None:
        # An earlier run in this folder has written the record, and verl finds nothing to resume.
        record_path = InitialEntropy.path(select(config, _FOLDER))
        if select(config, _MODE) == "disable" or not record_path.exists():
            return ""
        return (
            f"{record_path} is of an earlier start, but verl finds no checkpoint there and begins at step 0. If there "
            "is one, name it: trainer.resume_mode=resume_path trainer.resume_from_path=… (verl #7952: under FSDP "
            "actor.checkpoint.async_save=True hides it)"
        )
    return changed_settings_warning(run.resumed_from, run.gtpo)
