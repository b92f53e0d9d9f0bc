"""Whether GTPO is loaded and hooked in the verl of this process."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from pkgutil import resolve_name

from gtpo_verl.tools.check.finding import Finding, module_spec, print_all

# The variable by which verl loads the named plugins alone.
_PLUGINS_VARIABLE = "VERL_USE_EXTERNAL_PLUGINS"
# Our entry points of `verl.plugins`, and the modules that verl imports for them.
_PLUGINS = {"gtpo": "gtpo_verl.verl_plugin", "gtpo_check": "gtpo_verl.tools.check.stop_before_start"}


def installation() -> Iterator[Finding]:
    """Yield what of GTPO is not loaded or hooked in the verl of this process."""
    missing = [name for name in ("torch", "verl") if not module_spec(name)]
    if missing:
        remedy = "install verl as its documentation says, then run this again"
        yield Finding("installed", f"no {' and no '.join(missing)}", remedy)
        return
    from verl.trainer.ppo import core_algos

    # Before the next import, which would load the plugin itself.
    absent = [name for name, module in _PLUGINS.items() if module not in sys.modules]
    from gtpo_verl.verl_plugin import compat, hooks

    how_to_load = "install gtpo_verl again: this installation does not have that entry point"
    chosen = os.environ.get(_PLUGINS_VARIABLE)
    if chosen:
        how_to_load = f"{_PLUGINS_VARIABLE}={chosen} leaves it out: unset it, or set it to {','.join(_PLUGINS)}"
    for name in absent:
        yield Finding(f"plugin {name}", "not loaded by verl", how_to_load)
    for hook in hooks.HOOKS:
        place = f"{hook.module}:{hook.path}"
        if module_spec(hook.module) and not hasattr(resolve_name(place), "hooked_by_gtpo"):
            yield Finding(f"hook on {hook.subject}", "missing", f"{hook.module}.{hook.path} is not hooked")
    if "GTPO" in core_algos.AdvantageEstimator.__members__:
        advice = "gtpo is verl's then, and this plugin's is gtpo_trajectory"
        yield Finding("gtpo", "this verl has GTPO of its own", advice=advice)
    for reason in compat.load_errors:
        yield Finding("registration", "failed", reason)


def report_installation(module: str) -> int:
    """Print whether GTPO is installed, and how a run of a module of verl is checked; returns 1 if it is not, else 0."""
    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # what libraries print is no finding
        warnings.simplefilter("ignore")
        findings = list(installation())
    if print_all(findings):
        print("GTPO cannot run here, and GTPO_CHECK=1 may stop nothing here: a run with it may START.")
        return 1
    import verl

    print(f"GTPO is installed and hooked into verl {verl.__version__}. To check a run before it starts:")
    print("  GTPO_CHECK=1 bash my_script.sh      (its own lines run for real; where GTPO is not installed, all does)")
    print(f"  gtpo-verl check -- python3 -m {module} …")
    return 0
