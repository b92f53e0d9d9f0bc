"""OpenRLHF's command line: the choice `gtpo`, `--algo.gtpo` with its settings, and the checks before workers start."""

import argparse
import json
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

from packaging.version import Version

from gtpo_verl.config import GTPOConfig
from gtpo_verl.initial_entropy import InitialEntropy, changed_settings
from gtpo_verl.openrlhf import hooks

SUPPORTED_OPENRLHF = ("0.9.10", "0.11.2")

ESTIMATOR = "algo.advantage.estimator"
SETTINGS = "algo.gtpo"
# The names of options before OpenRLHF 0.10.2.
_OLD_NAMES = {
    ESTIMATOR: "advantage_estimator",
    "algo.advantage.no_std_norm": "no_advantage_std_norm",
    "algo.dynamic_filtering_enable": "dynamic_filtering",
    "algo.kl.init_coef": "init_kl_coef",
    "actor.entropy_coef": "entropy_loss_coef",
    "ckpt.load_enable": "load_checkpoint",
    "ckpt.path": "ckpt_path",
    "ds.packing_samples": "packing_samples",
    "ds.ring_attn_size": "ring_attn_size",
    "ds.tensor_parallel_size": "ds_tensor_parallel_size",
    "rollout.batch_size": "rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt",
    "rollout.temperature": "temperature",
    "rollout.top_p": "top_p",
    "train.async_enable": "async_train",
    "train.batch_size": "train_batch_size",
    "train.dynamic_batch_enable": "use_dynamic_batch",
    "train.max_epochs": "max_epochs",
}
# Each of them packs samples, unless it has this value.
_PACKING = {"ds.packing_samples": False, "ds.ring_attn_size": 1, "train.dynamic_batch_enable": False}

logger = logging.getLogger("gtpo_verl")


class Settings(NamedTuple):
    """What GTPO takes from the command line; it travels in OpenRLHF's own arguments, as `algo.gtpo`.

    Args:
        config (GTPOConfig): of `--algo.gtpo`.
        n_samples_per_prompt (int): completions of a group.
        norm_by_std (bool): A_i is over the group's standard deviation; False with `--algo.advantage.no_std_norm`.
        duplicates (int): ranks that compute the same micro-batch.
        checkpoints (str): folder of the checkpoints, which the initial entropy is kept in.
    """

    config: GTPOConfig
    n_samples_per_prompt: int
    norm_by_std: bool
    duplicates: int
    checkpoints: str


def settings_of(args: Any) -> Settings:
    """The settings in OpenRLHF's arguments, nested or (before 0.10.2) flat."""
    return args.algo.gtpo if hasattr(args, "algo") else getattr(args, SETTINGS)


def parse_args(wrapped: Callable, parser: argparse.ArgumentParser, args: tuple, kwargs: dict) -> argparse.Namespace:
    """Around `ArgumentParser.parse_args`: OpenRLHF's parser knows `gtpo`."""
    estimator = next((x for x in parser._actions if x.dest in (ESTIMATOR, _OLD_NAMES[ESTIMATOR])), None)
    if estimator is None or not estimator.choices or "gtpo" in estimator.choices:  # OpenRLHF may have GTPO of its own
        return wrapped(*args, **kwargs)
    estimator.choices = [*estimator.choices, "gtpo"]
    parser.add_argument(
        f"--{SETTINGS}", metavar="JSON", default="{}", help="settings of gtpo (arXiv:2508.03772), see docs/keys.md"
    )
    parsed = wrapped(*args, **kwargs)
    text = vars(parsed).pop(SETTINGS)
    if getattr(parsed, estimator.dest) == "gtpo":
        try:
            setattr(parsed, SETTINGS, check(parsed, text))
        except ValueError as error:
            parser.exit(2, f"gtpo-verl openrlhf: {in_openrlhf(error)}\n")
        hooks.install()
    return parsed


def in_openrlhf(text: object) -> str:
    """A message of this package with OpenRLHF's name of the settings."""
    return str(text).replace("algorithm.gtpo", SETTINGS)


def check(args: argparse.Namespace, text: str) -> Settings:
    """The settings of a run with GTPO; warns where it is not the paper's.

    Args:
        args (argparse.Namespace): OpenRLHF's arguments, flat.
        text (str): the settings as JSON.

    Raises:
        ValueError: GTPO cannot run so; the message names option, value and remedy.
    """
    installed = Version(version("openrlhf"))
    if installed < Version(SUPPORTED_OPENRLHF[0]):
        raise ValueError(f"GTPO needs OpenRLHF {SUPPORTED_OPENRLHF[0]} or later; this is {installed}: upgrade openrlhf")
    if installed > Version(SUPPORTED_OPENRLHF[1]):
        logger.warning(
            "GTPO was tested with OpenRLHF %s to %s; this is %s: compare the first steps' gtpo/* metrics with what you "
            "expect",
            *(*SUPPORTED_OPENRLHF, installed),
        )
    config = _config(text)
    samples = option(args, "rollout.n_samples_per_prompt")
    if samples < 2:
        raise ValueError(
            f"{_named(args, 'rollout.n_samples_per_prompt')}: GTPO compares the completions of one prompt; set it to "
            "at least 2 (8 or 12 in the paper)"
        )
    if option(args, "algo.kl.init_coef") != 0:
        raise ValueError(
            f"{_named(args, 'algo.kl.init_coef')}: GTPO has no KL term, and OpenRLHF would load a reference model for "
            "it; set it to 0"
        )
    packing = next((name for name, off in _PACKING.items() if option(args, name) != off), None)
    if packing and option(args, "rollout.temperature") != 1 and installed < Version("0.11.1"):
        raise ValueError(
            f"{_named(args, packing)} with {_named(args, 'rollout.temperature')}: before OpenRLHF 0.11.1 the entropy "
            "of packed samples is that of temperature 1; upgrade openrlhf, leave out packing or sample at 1"
        )
    folder = option(args, "ckpt.path")
    if option(args, "ckpt.load_enable") and os.path.exists(os.path.join(folder, "_actor")):
        _check_resume(folder, config)
    found = _departures(args)
    if found:
        logger.warning("GTPO: with these options the run is not the paper's:\n  %s", "\n  ".join(found))
    return Settings(
        config,
        samples,
        norm_by_std=not option(args, "algo.advantage.no_std_norm"),
        duplicates=option(args, "ds.ring_attn_size") * option(args, "ds.tensor_parallel_size"),
        checkpoints=folder,
    )


def option(args: argparse.Namespace, name: str) -> Any:
    """The value of one of OpenRLHF's options by its newest name; None where this OpenRLHF does not have it."""
    return getattr(args, _name(args, name), None)


def _name(args: argparse.Namespace, name: str) -> str:
    return name if hasattr(args, name) else _OLD_NAMES.get(name, name)


def _named(args: argparse.Namespace, name: str) -> str:
    return f"--{_name(args, name)} {option(args, name)}"


def _config(text: str) -> GTPOConfig:
    try:
        section = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--{SETTINGS} {text}: not JSON, {error}; give it as '{{\"entropy_coeff\": 0.1}}'") from error
    if not isinstance(section, dict):
        raise ValueError(f"--{SETTINGS} {text}: must be a JSON object, such as '{{\"entropy_coeff\": 0.1}}'")
    return GTPOConfig.from_config(section)


def _check_resume(folder: str, config: GTPOConfig) -> None:
    InitialEntropy.known_before(config, folder)
    changed = changed_settings(folder, config)
    if changed:
        logger.warning("GTPO goes on from %s with other settings: %s", folder, in_openrlhf("; ".join(changed)))


def _departures(args: argparse.Namespace) -> list[str]:
    """Options under which GTPO runs but is not the paper's GTPO, one line each."""
    found = []

    def expect(name: str, is_paper: bool, paper: str) -> None:
        if not is_paper:
            found.append(f"{_named(args, name)}: in the paper {paper}")

    rollout = option(args, "rollout.batch_size") * option(args, "rollout.n_samples_per_prompt")
    one_update = "one update per rollout (Sec. 6)"
    batch_size = option(args, "train.batch_size")
    expect("train.batch_size", batch_size == rollout, f"{rollout}, batch_size * n_samples_per_prompt: {one_update}")
    expect("train.max_epochs", option(args, "train.max_epochs") == 1, f"1: {one_update}")
    expect("train.async_enable", not option(args, "train.async_enable"), "no rollouts of an earlier policy")
    aggregation = option(args, "actor.loss_agg_mode")
    if aggregation is None:
        found.append("the loss is a mean over all tokens; Eq. 11 is --actor.loss_agg_mode seq-mean-token-mean, which "
                     "OpenRLHF has from 0.11.2 on")  # fmt: skip
    else:
        expect("actor.loss_agg_mode", aggregation == "seq-mean-token-mean", "seq-mean-token-mean (Eq. 11)")
    expect("algo.advantage.no_std_norm", not option(args, "algo.advantage.no_std_norm"), "A_i over the std (Sec. 3)")
    expect(
        "algo.dynamic_filtering_enable",
        not option(args, "algo.dynamic_filtering_enable"),
        "groups without signal stay; −γ⟨H⟩ acts on them",
    )
    expect("actor.entropy_coef", not option(args, "actor.entropy_coef"), f"none beside {SETTINGS}.entropy_coeff")
    expect("rollout.temperature", option(args, "rollout.temperature") == 1, "1.0 (Sec. 6)")
    expect("rollout.top_p", option(args, "rollout.top_p") == 1, "1.0 (completions of the policy itself)")
    return found
