"""GTPO inside verl: names and hooks.

verl loads this module in every process (entry point `verl.plugins`). It hooks the functions of verl that `hooks` lists.
What happens to a batch:

1. Before verl computes advantages, a hook fetches what verl does not give an estimator (token ids, entropy, prompts)
   from TransferQueue (V1 trainer) or from the batch (legacy trainer), and puts it into the trainer's `TrainerState`.
2. verl's `compute_advantage` calls the estimator, which reads it from there and computes an advantage for each token.
   The result also goes to the token dump, if there is one.
3. verl's update sees only `advantages`, under any policy loss; GTPO's metrics join those of the update.
4. Where the trainer hands over the batch that it has updated with, its advantages are compared with GTPO's; the run
   ends if they are others (`update_check`).

With `algorithm.gtpo.entropy_from=update` there is no entropy before the update: the estimator gives λA, and a hook on
the actor's loss, in the workers' processes, applies δ and −γ⟨H⟩ (`update_pass`). The update's metrics bring back each
⟨H⟩_i, from which GTPO's metrics are then computed.

Before workers start, verl's `validate_config` runs `preflight`. While the trainer loops, `training_monitor` reads what
it logs, if the config asks for it, under any estimator. A run that asks for nothing gets verl's own numbers. Only two
things differ for it: one Ray cluster takes one run at a time, and each run has weight sockets of its own.

verl swallows what a plugin raises while it loads. So `compat` keeps the reason why GTPO cannot run (a hook that does
not fit, a verl that is too old): `gtpo-verl check` shows it, and it is raised once a config asks for GTPO.
"""

import functools
import logging
import os
import sys
import traceback
from types import ModuleType

import verl

from gtpo_verl.verl_plugin import compat, hooking
from gtpo_verl.verl_plugin.run_config import ALIAS

logger = logging.getLogger("gtpo_verl")


def _register(core_algos: ModuleType) -> None:
    """Register estimator and loss by the alias, a name that only this plugin has.

    Other packages may register the name `gtpo`, so `hooks` serves it when verl looks it up and nobody has taken it.
    """
    core_algos.register_adv_est(ALIAS)(estimate_gtpo_advantage)
    core_algos.register_policy_loss(ALIAS)(compute_policy_loss_gtpo)


def _configure_logging() -> None:
    """Give this package's log a handler of its own, as verl does: vLLM sets the root logger's level to ERROR."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
    logger.propagate = False


def _install() -> None:
    """Hook verl's functions, each when its module is imported."""
    if compat.is_too_old():
        first = compat.SUPPORTED_VERL[0]
        compat.load_errors[f"GTPO needs verl {first} or later; this is {verl.__version__}: upgrade verl"] = None
    hooking.when_imported("verl.trainer.ppo.core_algos", _register)
    for hook in HOOKS + WORKER_HOOKS:
        hooking.when_imported(hook.module, functools.partial(hooking.hook_into, hook.path, hook.hook))


try:
    _configure_logging()
    from gtpo_verl.verl_plugin.hooks import HOOKS, WORKER_HOOKS
    from gtpo_verl.verl_plugin.loss import compute_policy_loss_gtpo
    from gtpo_verl.verl_plugin.state import estimate_gtpo_advantage

    _install()
except Exception:
    # verl logs a plugin's exception at DEBUG level only and goes on without the plugin.
    traceback.print_exc()
    print("gtpo_verl: verl could not load the plugin (error above): no estimator gtpo", file=sys.stderr, flush=True)
    raise
