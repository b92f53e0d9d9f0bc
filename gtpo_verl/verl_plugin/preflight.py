"""Check a run's config before verl starts a worker, and log how it differs from the paper's GTPO (arXiv:2508.03772)."""

import logging
import textwrap

import verl
from omegaconf import DictConfig, OmegaConf

from gtpo_verl.verl_plugin import compat
from gtpo_verl.verl_plugin.departures import as_table, departures
from gtpo_verl.verl_plugin.problems import missing_packages, read
from gtpo_verl.verl_plugin.resume import resume_warning
from gtpo_verl.verl_plugin.run_config import (
    ADV_ESTIMATOR,
    ALIAS,
    ALLOW_CHANGES,
    RunConfig,
    foreign_function,
    select,
    uses_gtpo,
)

logger = logging.getLogger("gtpo_verl")

_CALCULATE_ENTROPY = "actor_rollout_ref.actor.calculate_entropy"


def check_and_log(config: DictConfig) -> None:
    """Check the config of a run, and log what its user has to know about it.

    Turns on `actor.calculate_entropy` in the config if `entropy_from=update` needs it. Raises what `validated` raises.
    """
    from verl.trainer.ppo.utils import need_reference_policy

    run = validated(config)
    differing = departures(config, run)
    if differing:
        table = textwrap.indent(as_table(differing), "GTPO: ")
        logger.warning("GTPO: with these settings the run is not the paper's:\n%s", table)

    # An estimator that another package registered as `gtpo` may be another paper's. If a later verl has one of its own,
    # it is taken to be this paper's.
    name = select(config, ADV_ESTIMATOR)
    function = foreign_function(name)
    if function and not function.startswith("verl."):
        logger.warning("%s=%s is %s; for GTPO of arXiv:2508.03772 set it to %s", ADV_ESTIMATOR, name, function, ALIAS)
    if not run.applies_gtpo:
        return

    if run.entropy_from_update and not select(config, _CALCULATE_ENTROPY):
        OmegaConf.update(config, _CALCULATE_ENTROPY, True)
        logger.info("%s=True, since algorithm.gtpo.entropy_from=update", _CALCULATE_ENTROPY)
    if run.gtpo.allow_changed_advantages:
        logger.warning("%s=True: it is not checked that the update uses GTPO's advantages", ALLOW_CHANGES)
    warning = resume_warning(config, run)
    if warning:
        logger.warning("%s", warning)
    if not need_reference_policy(config):
        logger.info("GTPO runs without a reference policy: no KL term, no reference worker")
    if not compat.is_tested():
        tested = " to ".join((compat.SUPPORTED_VERL[0], compat.SUPPORTED_VERL[-1]))
        advice = "No hook has failed so far; compare gtpo/* of the first steps with a run under a version tested"
        logger.warning("GTPO was tested with verl %s; this is %s. %s", tested, verl.__version__, advice)


def validated(config: DictConfig) -> RunConfig:
    """Return what a config asks of this plugin, once it has been checked.

    Raises:
        RuntimeError: GTPO cannot run in this process.
        ValueError: something that the config asks for (GTPO, its token dump or the monitor) cannot run with these
            settings or with the installed packages. The message names each key, its value and the remedy.
    """
    if uses_gtpo(config):
        compat.check_loaded()
    run, messages = read(config)
    if run and run.applies_gtpo and select(config, "trainer.use_v1"):
        missing = missing_packages()
        if missing:
            remedy = f"pip install {' '.join(missing)}"
            messages.append(f"trainer.use_v1=True needs packages that are not installed: {remedy}")
    if run is None or messages:  # without a run there always is a message
        raise ValueError("; ".join(messages))
    return run
