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
from gtpo_verl.run.initial_entropy import InitialEntropy, changed_settings_warning

SUPPORTED_OPENRLHF = ("0.10.4", "0.11.2")
"""The oldest and the newest OpenRLHF that GTPO was tested with."""

ESTIMATOR = "algo.advantage.estimator"
"""OpenRLHF's option of the advantage estimator."""
SETTINGS = "algo.gtpo"
"""The option that gives GTPO its settings, as JSON."""
KEYS_OF_VERL = ("base", "entropy_from", "dump_dir", "dump_freq", "allow_changed_advantages")
"""Settings of GTPO that only the plugin for verl has."""

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
"""Options, their values in the paper's GTPO, and these in words, which follow "in the paper" in a warning."""

logger = logging.getLogger("gtpo_verl")


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
    """Parse a command line that may choose `gtpo`, around `ArgumentParser.parse_args`.

    OpenRLHF's parser knows `gtpo` then. Where it is chosen, `algo.gtpo` becomes a `GTPOConfig`, and OpenRLHF's classes
    are changed. Settings with which GTPO cannot run, or which nothing would read, end the process with status 2.
    """
    estimator = _estimator_option(parser)
    if estimator is None:
        return wrapped(*args, **kwargs)

    estimator.choices = [*(estimator.choices or ()), "gtpo"]
    parser.add_argument(
        f"--{SETTINGS}",
        metavar="JSON",
        default="{}",
        help=f"settings of gtpo (arXiv:2508.03772), {DOCS}/keys.md",
    )
    parsed = wrapped(*args, **kwargs)
    text = vars(parsed).pop(SETTINGS)
    if getattr(parsed, ESTIMATOR) == "gtpo":
        try:
            config = check(vars(parsed), text)
        except ValueError as error:
            parser.exit(2, f"gtpo-verl openrlhf: {error}\n")
        setattr(parsed, SETTINGS, config)
        ray_actors.install()
    elif text != "{}":
        parser.exit(2, f"gtpo-verl openrlhf: --{SETTINGS} {text}: add --{ESTIMATOR} gtpo, or leave it out\n")
    return parsed


def _estimator_option(parser: argparse.ArgumentParser) -> argparse.Action | None:
    """Return the parser's choice of an estimator; None in another program, or where OpenRLHF has a GTPO of its own."""
    for action in parser._actions:
        if action.dest == ESTIMATOR and action.choices and "gtpo" not in action.choices:
            return action
    return None


def check(options: Mapping[str, Any], text: str) -> GTPOConfig:
    """Return GTPO's settings for a run with these options of OpenRLHF; warn where the run is not the paper's.

    Args:
        options: OpenRLHF's options by their names.
        text: GTPO's settings, as JSON.

    Raises:
        ValueError: GTPO cannot run so; it names option, value and remedy.
    """
    config = OpenRLHFGTPOConfig.from_config(_parse_settings(text))
    installed = Version(version("openrlhf"))
    if installed > Version(SUPPORTED_OPENRLHF[1]):
        advice = "compare the first steps' gtpo/* metrics with what you expect"
        logger.warning("GTPO was tested with OpenRLHF %s to %s; this is %s: %s", *SUPPORTED_OPENRLHF, installed, advice)
    _refuse_impossible(options, installed)
    _check_resume(options, config)
    if departures := _departures(options, config):
        logger.warning("GTPO: with these options the run is not the paper's:\n  %s", "\n  ".join(departures))
    return config


def _parse_settings(text: str) -> dict[str, Any]:
    remedy = """give it as '{"entropy_coeff": 0.1}'"""
    try:
        section = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--{SETTINGS} {text}: not a JSON object, {error}; {remedy}") from error
    if not isinstance(section, dict):
        raise ValueError(f"--{SETTINGS} {text}: not a JSON object, but another value; {remedy}")
    # `from_config` would take a section with one of these for verl's whole `algorithm`, and read nothing beside them.
    for key in ("adv_estimator", "gtpo"):
        if key in section:
            raise ValueError(f"--{SETTINGS} {text}: {key} is a key of verl's algorithm; {remedy}")
    return section


def _refuse_impossible(options: Mapping[str, Any], installed: Version) -> None:
    """Raise a ValueError, with option, value and remedy, for options with which GTPO cannot run."""
    samples = options["rollout.n_samples_per_prompt"]
    if samples < 2:
        why = "GTPO compares completions; set it to at least 2 (8 or 12 in the paper)"
        raise ValueError(f"--rollout.n_samples_per_prompt {samples}: {why}")

    kl = options["algo.kl.init_coef"]
    if kl != 0:
        why = "GTPO has no KL term, for which OpenRLHF would load a reference model; set it to 0"
        raise ValueError(f"--algo.kl.init_coef {kl}: {why}")

    temperature = options["rollout.temperature"]
    if temperature != 1 and installed < Version("0.11.1"):
        why = f"OpenRLHF {installed} gives the entropy of temperature 1; set it to 1, or upgrade openrlhf to 0.11.1"
        raise ValueError(f"--rollout.temperature {temperature}: {why}")


def _check_resume(options: Mapping[str, Any], config: GTPOConfig) -> None:
    """Warn of settings that a resumed run changes.

    Raises:
        ValueError: the checkpoint has no valid ⟨H⟩_ini, which the run's filter needs.
    """
    folder = options["ckpt.path"]
    if not options["ckpt.load_enable"] or not os.path.exists(os.path.join(folder, "_actor")):
        return
    InitialEntropy.known_before(config, folder)
    warning = changed_settings_warning(folder, config)
    if warning:
        logger.warning("%s", warning)


def _departures(options: Mapping[str, Any], config: GTPOConfig) -> list[str]:
    """Return a line for each setting, or lack of one, by which the run is not the paper's."""
    rollout = options["rollout.batch_size"] * options["rollout.n_samples_per_prompt"]
    one_update = f"{rollout}, batch_size * n_samples_per_prompt: one update per rollout (Sec. 6)"
    paper_settings = {"train.batch_size": (rollout, one_update), **PAPER_SETTINGS}
    departures = []
    for name, (value, paper) in paper_settings.items():
        if name not in options:  # another version of OpenRLHF has it
            continue
        given = options[name]
        if (given or 0) != value:
            departures.append(f"--{name} {given}: in the paper {paper}")
    if config.token_weights is not None:
        departures.append(
            f"--{SETTINGS} token_weights={config.token_weights}: in the paper null (λ of the conflict masks, Eq. 9)"
        )
    if "actor.loss_agg_mode" not in options:
        remedy = "upgrade openrlhf to 0.11.2, and set --actor.loss_agg_mode seq-mean-token-mean"
        departures.append(f"the loss is a mean over all tokens: for Eq. 11 {remedy}")
    return departures
