"""GTPO inside verl: names and hooks.

verl loads this module in every process (entry point `verl.plugins`), which hooks the functions of `hooks`.
What happens to a batch:

1. Before verl computes advantages, a hook fetches what verl does not give an estimator (token ids, entropy, prompts)
   from TransferQueue (V1 trainer) or from the batch (legacy trainer), and puts it into the trainer's `TrainerState`.
2. verl's `compute_advantage` calls the estimator, which finds it there, and weighs each token. The result goes to the
   token dump, if there is one.
3. verl's update sees only `advantages`, under any policy loss; GTPO's metrics join those of the update.
4. Where the trainer hands over the batch that it has updated with, its advantages are compared with GTPO's; the run
   ends if they are others (`update_check`).

With `algorithm.gtpo.entropy_from=update` there is no entropy before the update: the estimator gives λA, and a hook on
the actor's loss, in the workers' processes, applies δ and −γ⟨H⟩ (`update_pass`). The update's metrics bring back each
⟨H⟩_i, from which GTPO's metrics are then computed.

Before workers start, verl's `validate_config` runs `preflight`. While the trainer loops, `training_monitor` reads what
it logs, if the config asks for it, under any estimator. A run that asks for nothing gets verl's own numbers, with two
differences: one Ray cluster takes one run at a time, and each run has weight sockets of its own.

verl swallows what a plugin raises while it loads. So `compat` keeps it (a hook that does not fit, a verl that is too
old): `gtpo-verl check` shows it, and it is raised once a config asks for GTPO.
"""

import functools
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

import verl
import wrapt

from gtpo_verl.verl_plugin import compat
from gtpo_verl.verl_plugin.run_config import ALIAS

logger = logging.getLogger("gtpo_verl")


def _hook_into(path: str, hook: Callable, module: ModuleType) -> None:
    """Call `hook` in place of `path` in a module of verl.

    What is called there stays a plain function of that name: it can be copied, and pickled to another process of Ray.

    Raises:
        AttributeError, TypeError: there is no such function, or it does not take the arguments that the hook reads.
    """
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, module)
    function = getattr(owner, name)
    if hasattr(function, "hooked_by_gtpo"):  # by way of another module, in which verl defines it
        return
    signature = inspect.signature(function)
    read = [x.name for x in inspect.signature(hook).parameters.values() if x.kind is x.KEYWORD_ONLY]
    if missing := [parameter for parameter in read if parameter not in signature.parameters]:
        raise TypeError(f"{path} takes no {', '.join(missing)}: ({', '.join(signature.parameters)})")

    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        instance = list(call.arguments.values())[:1] if classes else []
        proceed = functools.partial(function, *args, **kwargs)
        return hook(proceed, *instance, **{name: call.arguments[name] for name in read})

    hooked.hooked_by_gtpo = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)
    # Where it is defined, and where modules that verl loads before plugins (VERL_USE_EXTERNAL_MODULES) imported it.
    for other in [*sys.modules.values()]:
        if type(other) is ModuleType and vars(other).get(name) is function:
            setattr(other, name, hooked)


def _when_imported(module: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module of verl when it is imported, which must not fail because of that, whatever happens."""

    def change_safely(imported: ModuleType) -> None:
        try:
            change(imported)
        except Exception as error:
            why = f"this plugin does not fit {module} of verl {verl.__version__} ({type(error).__name__}: {error})"
            compat.load_errors[why] = None

    wrapt.register_post_import_hook(change_safely, module)


def _register(core_algos: ModuleType) -> None:
    """Register what is ours alone; `hooks` serves `gtpo` where it is asked for and nobody else has the name."""
    core_algos.register_adv_est(ALIAS)(estimate_gtpo_advantage)
    core_algos.register_policy_loss(ALIAS)(compute_policy_loss_gtpo)


def _configure_logging() -> None:
    """Keep this package's log apart from the root logger, as verl keeps its own: importing vLLM raises it to ERROR."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
    logger.propagate = False


def _install() -> None:
    if compat.is_too_old():
        first = compat.SUPPORTED_VERL[0]
        compat.load_errors[f"GTPO needs verl {first} or later; this is {verl.__version__}: upgrade verl"] = None
    _when_imported("verl.trainer.ppo.core_algos", _register)
    for _, module, path, hook in (*HOOKS, *WORKER_HOOKS):
        _when_imported(module, functools.partial(_hook_into, path, hook))


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
