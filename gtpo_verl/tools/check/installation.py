"""Whether GTPO is hooked into the verl of this process."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pkgutil import resolve_name

from gtpo_verl.tools.check import Finding, module_spec


def findings() -> Iterator[Finding]:
    """Yield what is registered and hooked, and what is not."""
    if missing := [name for name in ("torch", "verl") if not module_spec(name)]:
        remedy = "install verl as its documentation says, then run this again"
        yield Finding("installed", f"no {' and no '.join(missing)}", remedy)
        return
    import verl

    loaded = {"gtpo": "gtpo_verl.verl_plugin", "gtpo_check": "gtpo_verl.tools.check.stop_before_start"}
    absent = [name for name, module in loaded.items() if module not in sys.modules]
    from verl.trainer.ppo import core_algos

    from gtpo_verl import verl_plugin
    from gtpo_verl.verl_plugin import compat, hooks

    yield Finding("gtpo_verl", f"{version('gtpo-verl')} at {verl_plugin.__file__}")
    tested = ", ".join(compat.SUPPORTED_VERL)
    yield Finding("verl", f"{verl.__version__} at {verl.__file__} (tested: {tested})")
    if only := os.environ.get(variable := "VERL_USE_EXTERNAL_PLUGINS"):
        how_to_load = f"{variable}={only} leaves it out: unset it, or set it to {','.join(loaded)}"
    else:
        how_to_load = "install gtpo_verl again: this installation does not have that entry point"
    for name in loaded:
        yield Finding(f"{name} loaded by verl", *(["no", how_to_load] if name in absent else ["yes"]))
    with suppress(ValueError):  # the plugin is not loaded
        serves = core_algos.get_adv_estimator_fn("gtpo")
        yield Finding("advantage estimator gtpo", f"{serves.__module__}.{serves.__qualname__}")
    for subject, module, path, _ in hooks.HOOKS:
        hooked = "not in this verl"
        if module_spec(module):
            hooked = "yes" if hasattr(resolve_name(f"{module}:{path}"), "hooked_by_gtpo") else "no"
        yield Finding(f"hook on {subject}", hooked, f"{module}.{path} is not hooked" if hooked == "no" else "")
    if "GTPO" in core_algos.AdvantageEstimator.__members__:
        yield Finding("gtpo", "this verl has GTPO of its own", advice="it serves gtpo, the plugin gtpo_trajectory")
    for problem in compat.load_errors():
        yield Finding("registration", "failed", problem)
