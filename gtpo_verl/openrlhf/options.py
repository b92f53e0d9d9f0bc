"""OpenRLHF's command line: the choice `gtpo`, `--algo.gtpo` with its settings, and the checks before workers start."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.links import DOCS
from gtpo_verl.openrlhf import ray_actors
from gtpo_verl.run.initial_entropy import InitialEntropy, changed_settings

SUPPORTED_OPENRLHF = ("0.10.4", "0.11.2")

ESTIMATOR = "algo.advantage.estimator"
SETTINGS = "algo.gtpo"
logger = logging.getLogger("gtpo_verl")


KEYS_OF_VERL = ("base", "entropy_from", "dump_dir", "dump_freq", "allow_changed_advantages")


class OpenRLHFGTPOConfig(GTPOConfig):
    """Settings of GTPO (arXiv:2508.03772) in OpenRLHF, `--algo.gtpo`."""

    section = SETTINGS
    trainer = "OpenRLHF"

    @classmethod
    def hint(cls, key: Any) -> str:
        if key in KEYS_OF_VERL:  # the plugin that extends them is not loaded here
            return "unknown key; only the plugin for verl has it: remove it"
        return super().hint(key)


def parse_args(wrapped: Callable, parser: argparse.ArgumentParser, args: tuple, kwargs: dict) -> argparse.Namespace:
    """Around `ArgumentParser.parse_args`: OpenRLHF's parser knows `gtpo`, whose choice changes OpenRLHF's classes and
    makes `algo.gtpo` a `GTPOConfig`."""
    estimator = next((x for x in parser._actions if x.dest == ESTIMATOR), None)
    if estimator is None or not estimator.choices or "gtpo" in estimator.choices:  # OpenRLHF may have GTPO of its own
        return wrapped(*args, **kwargs)
    estimator.choices = [*estimator.choices, "gtpo"]
    parser.add_argument(
        f"--{SETTINGS}", metavar="JSON", default="{}", help=f"settings of gtpo (arXiv:2508.03772), {DOCS}/keys.md"
    )
    parsed = wrapped(*args, **kwargs)
    text = vars(parsed).pop(SETTINGS)
    if getattr(parsed, ESTIMATOR) == "gtpo":
        try:
            setattr(parsed, SETTINGS, check(vars(parsed), text))
        except ValueError as error:
            parser.exit(2, f"gtpo-verl openrlhf: {error}\n")
        ray_actors.install()
    elif text != "{}":
        parser.exit(2, f"gtpo-verl openrlhf: --{SETTINGS} {text}: add --{ESTIMATOR} gtpo, or leave it out\n")
    return parsed


PAPER_SETTINGS: dict[str, tuple[Any, str]] = {
    "train.max_epochs": (1, "1: one update per rollout (Sec. 6)"),
    "train.async_enable": (False, "no rollouts of an earlier policy"),
    "actor.policy_loss_type": ("ppo", "ppo: a ratio per token (gspo's averages λ over each completion)"),
    "actor.loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-mean (Eq. 11)"),
    "algo.advantage.no_std_norm": (False, "A_i over the std (Sec. 3)"),
    "algo.advantage.is_correction_level": ("off", "off (no importance weights; they multiply λ)"),
    "algo.advantage.is_correction_enable": (False, "off, as above"),  # its name before 0.11.2
    "algo.dynamic_filtering_enable": (False, "groups without signal stay; −γ⟨H⟩ acts on them"),
    "rollout.temperature": (1, "1.0 (Sec. 6)"),
    "rollout.top_p": (1, "1.0 (completions of the policy itself)"),
    "actor.entropy_coef": (0, f"none beside {SETTINGS}.entropy_coeff"),
}
"""Options, their values in the paper's GTPO, and what is said of any other value."""


def check(options: Mapping[str, Any], text: str) -> GTPOConfig:
    """Return the settings of a run with these options of OpenRLHF, GTPO's as JSON; warn where it is not the paper's. A
    ValueError, with option, value and remedy, where GTPO cannot run so."""
    try:
        if not isinstance(section := json.loads(text), dict):
            raise ValueError("but another value")
    except ValueError as error:
        wrong = f"--{SETTINGS} {text}: not a JSON object, {error}; give it as '{{\"entropy_coeff\": 0.1}}'"
        raise ValueError(wrong) from error
    config = OpenRLHFGTPOConfig.from_config(section)
    installed = Version(version("openrlhf"))
    if installed > Version(SUPPORTED_OPENRLHF[1]):
        advice = "compare the first steps' gtpo/* metrics with what you expect"
        logger.warning("GTPO was tested with OpenRLHF %s to %s; this is %s: %s", *SUPPORTED_OPENRLHF, installed, advice)
    of_old = f"OpenRLHF {installed} gives the entropy of temperature 1; set it to 1, or upgrade openrlhf to 0.11.1"
    temperature, kl, samples = "rollout.temperature", "algo.kl.init_coef", "rollout.n_samples_per_prompt"
    for name, is_wrong, why in (
        (samples, options[samples] < 2, "GTPO compares completions; set it to at least 2 (8 or 12 in the paper)"),
        (kl, options[kl] != 0, "GTPO has no KL term, for which OpenRLHF would load a reference model; set it to 0"),
        (temperature, options[temperature] != 1 and installed < Version("0.11.1"), of_old),
    ):
        if is_wrong:
            raise ValueError(f"--{name} {options[name]}: {why}")
    folder = options["ckpt.path"]
    if options["ckpt.load_enable"] and os.path.exists(os.path.join(folder, "_actor")):
        InitialEntropy.known_before(config, folder)
        if changed := changed_settings(folder, config):
            logger.warning("GTPO goes on from %s with other settings: %s", folder, "; ".join(changed))
    rollout = options["rollout.batch_size"] * options["rollout.n_samples_per_prompt"]
    one_update = f"{rollout}, batch_size * n_samples_per_prompt: one update per rollout (Sec. 6)"
    papers = {"train.batch_size": (rollout, one_update), **PAPER_SETTINGS}
    found = [
        f"--{name} {options[name]}: in the paper {paper}"
        for name, (value, paper) in papers.items()
        if name in options and (options[name] or 0) != value
    ]
    if config.token_weights is not None:
        found.append(
            f"--{SETTINGS} token_weights={config.token_weights}: in the paper null (λ of the conflict masks, Eq. 9)"
        )
    if "actor.loss_agg_mode" not in options:
        remedy = "upgrade openrlhf to 0.11.2, and set --actor.loss_agg_mode seq-mean-token-mean"
        found.append(f"the loss is a mean over all tokens: for Eq. 11 {remedy}")
    if found:
        logger.warning("GTPO: with these options the run is not the paper's:\n  %s", "\n  ".join(found))
    return config
