"""verl's own configs, composed as its programs compose them."""

import copy
import functools
from pathlib import Path

import verl.trainer
from hydra import compose, initialize_config_dir

# What verl's defaults lack for any run.
COMPLETE = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=True")


@functools.cache
def _composed(name, folder, words):
    with initialize_config_dir(folder or str(Path(verl.trainer.__path__[0], "config")), version_base=None):
        return compose(name, overrides=list(words))


def validate(config):
    """As verl's trainers do, before any worker is up."""
    from verl.utils.config import validate_config

    validate_config(config=config, use_reference_policy=False, use_critic=False)


def verl_config(*words, name="ppo_trainer", folder=""):
    """The config that a program of verl gets with these overrides."""
    return copy.deepcopy(_composed(name, str(folder), words))
