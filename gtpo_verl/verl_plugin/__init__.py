"""GTPO inside verl: registration and hooks.

verl loads this module in every process (entry point `verl.plugins`; before 0.9.0, `VERL_USE_EXTERNAL_MODULES`), which
registers the advantage estimator and the policy loss, and hooks the functions of `trainer_hooks.HOOKS`.
What happens to a batch:

1. Before verl computes advantages, a hook fetches what verl does not give an estimator (token ids, entropy, prompts)
   from TransferQueue (V1 trainer) or from the batch (legacy trainer), and puts it into the process's `Step`.
2. verl's `compute_advantage` calls the registered estimator, which finds the `Step`, measures or recalls the initial
   entropy, and weighs each token.
3. Back in the hook, the result goes to the token dump, if there is one, and its metrics to the trainer's.
4. verl's update sees only `advantages`, under any policy loss.

With `algorithm.gtpo.entropy_from=update` there is no entropy before the update: the estimator gives λA, and a hook on
the actor's loss, in the workers' processes, applies δ and −γ⟨H⟩ (`update_pass`). The update's metrics bring back each
⟨H⟩_i, from which GTPO's metrics are then computed.

Before workers start, verl's `validate_config` runs `preflight`. While the trainer loops, `collapse` watches what it
logs, if the config asks for it, under any estimator. A verl with GTPO of its own serves `gtpo` itself; this plugin then
serves only `gtpo_trajectory`.

verl swallows what a plugin raises while it loads. So `registration.load_errors()` keeps the errors: a hook that does
not fit, a name that is taken, a verl that is too old. `gtpo-verl check` shows them, and they are raised once a config
asks for GTPO. An untested verl gets a warning and the same checks.
"""

import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import MethodType, ModuleType
from typing import Any

import verl
import wrapt
from packaging.version import Version

from gtpo_verl.verl_plugin import registration

logger = logging.getLogger("gtpo_verl")


class _Hook(wrapt.FunctionWrapper):
    """A hook that is pickled by name, and so is one in every process of Ray.

    Ray pickles what the trainer of fully_async, an actor, inherits; up to verl 0.8.0 the TaskRunner of `main_ppo`, too.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # As of a function: what is pickled by name must be what the name gives.
        return self if instance is None else super().__get__(instance, owner)

    def __reduce_ex__(self, protocol: Any) -> str:
        return self.__qualname__


def _wrap(path: str, hook: Callable, module: ModuleType) -> None:
    """Call `hook` in place of `path` in a module of verl, if it exists and takes the arguments that the hook reads."""
    name = f"{module.__name__}.{path}"
    try:
        signature = inspect.signature(attrgetter(path)(module))
    except AttributeError as error:
        registration.add_load_error(f"verl {verl.__version__} has no {name}: {error}")
        return
    _, _, *read = inspect.signature(hook).parameters
    if missing := [parameter for parameter in read if parameter not in signature.parameters]:
        registration.add_load_error(
            f"in verl {verl.__version__} {name} takes no {', '.join(missing)}: ({', '.join(signature.parameters)})"
        )
        return
    is_method = "." in path
    if is_method:
        signature = signature.replace(parameters=[*signature.parameters.values()][1:])

    def call_hook(wrapped: Callable, instance: Any, args: Any, kwargs: dict) -> Any:
        if is_method and instance is None:  # Ray calls an actor's methods as functions
            instance, *args = args
            wrapped = MethodType(wrapped, instance)
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()

        def proceed(**changed: Any) -> Any:
            call.arguments.update(changed)
            return wrapped(*call.args, **call.kwargs)

        return hook(proceed, instance, **{name: call.arguments[name] for name in read})

    wrapt.wrap_object(module, path, _Hook, (call_hook,))


def _register(core_algos: ModuleType) -> None:
    """Register estimator and loss, unless another package, or verl itself, has taken the name."""
    for name in registration.NAMES:
        if name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(name)(estimate_gtpo_advantage)
        if name not in core_algos.POLICY_LOSS_REGISTRY:
            core_algos.register_policy_loss(name)(compute_policy_loss_gtpo)


def _configure_logging() -> None:
    """Keep this package's log apart from the root logger, as verl keeps its own: importing vLLM raises it to ERROR."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))
    logger.propagate = False


def _install() -> None:
    found, first = registration.verl_version(), registration.SUPPORTED_VERL[0]
    if found is not None and found < Version(first):
        registration.add_load_error(f"GTPO needs verl {first} or later; this is {verl.__version__}: upgrade verl")
    wrapt.register_post_import_hook(_register, "verl.trainer.ppo.core_algos")
    for _, module, path, hook in (*HOOKS, *WORKER_HOOKS):
        wrapt.register_post_import_hook(partial(_wrap, path, hook), module)


try:
    _configure_logging()
    from gtpo_verl.loss import compute_policy_loss_gtpo
    from gtpo_verl.verl_plugin.estimator import estimate_gtpo_advantage
    from gtpo_verl.verl_plugin.trainer_hooks import HOOKS, WORKER_HOOKS

    _install()
except Exception:
    # verl logs a plugin's exception at DEBUG level only and goes on without the plugin.
    traceback.print_exc()
    print("gtpo_verl: verl could not load the plugin (error above): no estimator gtpo", file=sys.stderr, flush=True)
    raise
