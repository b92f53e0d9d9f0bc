"""A parser with the options of OpenRLHF that GTPO reads."""

import argparse

from gtpo_verl.openrlhf import options

ESTIMATORS = ["gae", "group_norm", "dr_grpo"]
# As of OpenRLHF 0.11.2, with its defaults; is_correction_enable is of those before.
DEFAULTS = {
    "actor.entropy_coef": None,
    "actor.loss_agg_mode": "token-mean",
    "actor.policy_loss_type": "ppo",
    "algo.advantage.is_correction_enable": False,
    "algo.advantage.is_correction_level": "off",
    "algo.advantage.no_std_norm": False,
    "algo.dynamic_filtering_enable": False,
    "algo.kl.init_coef": 0.01,
    "ckpt.load_enable": False,
    "ckpt.path": "./ckpt/checkpoints_ppo_ray",
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "train.async_enable": False,
    "train.batch_size": 128,
    "train.max_epochs": 1,
}


def make_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{options.ESTIMATOR}", choices=ESTIMATORS, default="gae")
    for name, default in DEFAULTS.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default or 0.0), "default": default}
        parser.add_argument(f"--{name}", **kind)
    return parser
