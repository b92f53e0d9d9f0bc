"""A run that does not ask for GTPO, with the plugin and without it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]

# The functions that the plugin hooks, as a GRPO run of each trainer calls them.
GRPO = """
import hashlib, logging, sys
import torch
sys.path[:0] = ["tests/helpers", "scripts"]
import same_numbers
from harness.stages import STAGES
from verl.utils.config import validate_config
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking

config = same_numbers.trainer_config({}, sys.argv[1])
config.algorithm.adv_estimator = "grpo"
config.actor_rollout_ref.rollout.name = "hf"
config.actor_rollout_ref.actor.use_dynamic_bsz = True
digest, attributes = hashlib.sha256(), []
for stage in STAGES.values():
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        batch = same_numbers.random_batch(generator, number)
        digest.update(stage(config, batch).advantages().numpy().tobytes())
        digest.update(repr(sorted(reduce_metrics({"actor/pg_loss": [0.1, 0.7], "x_max": [1, 3]}).items())).encode())
        Tracking("p", "e", ["console"]).log({"training/global_step": number}, step=number)
print("gtpo_verl.verl_plugin" in sys.modules, digest.hexdigest())
"""


def run(tmp_path, plugins):
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": plugins, "VERL_LOGGING_LEVEL": "DEBUG"}
    command = [sys.executable, "-c", GRPO, str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loaded, digest = result.stdout.splitlines()[-1].split()
    lines = [*result.stdout.splitlines()[:-1], *result.stderr.splitlines()]
    # The folder of a clone may be called gtpo_verl.
    return loaded, digest, [line.replace(str(ROOT), "").replace(sys.prefix, "") for line in lines]


def test_a_grpo_run_has_the_same_bits_and_the_same_log_with_the_plugin_and_without(tmp_path):
    (on, with_plugin, log), (off, without, verls_log) = run(tmp_path, "auto"), run(tmp_path, "none")
    assert (on, off) == ("True", "False") and with_plugin == without
    assert not [line for line in log if "gtpo" in line.lower()]
    assert len(log) == len(verls_log)
