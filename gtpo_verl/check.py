"""`gtpo-verl check`: which verl this is, whether GTPO is registered and hooked there."""

import argparse
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pkgutil import resolve_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.description = "Say what is registered where. Exit status 1 if GTPO cannot run here."
    parser.epilog = "example: gtpo-verl check"


def run(args: argparse.Namespace) -> int:
    """Print what is registered where; exit status 1 if GTPO cannot run."""
    import verl

    loaded = "gtpo_verl.verl_plugin" in sys.modules
    from verl.trainer.ppo import core_algos

    from gtpo_verl import verl_plugin

    print(f"gtpo_verl {version('gtpo-verl')} at {verl_plugin.__file__}")
    print(f"verl {verl.__version__} at {verl.__file__} (supported: {', '.join(verl_plugin.SUPPORTED_VERL)})")
    print(f"loaded by verl: {'yes' if loaded else 'no'}")
    for kind, registry in (
        ("advantage estimator gtpo", core_algos.ADV_ESTIMATOR_REGISTRY),
        ("policy loss gtpo", core_algos.POLICY_LOSS_REGISTRY),
    ):
        function = registry.get("gtpo")
        print(f"{kind}: {f'{function.__module__}.{function.__qualname__}' if function else 'not registered'}")
    problems = verl_plugin.problems()
    for name, module, path in (
        ("validate_config", "verl.utils.config", "validate_config"),
        ("V1 trainer", "verl.trainer.ppo.v1.trainer_base", "PPOTrainer._compute_advantage"),
        ("legacy trainer", "verl.trainer.ppo.ray_trainer", "RayPPOTrainer._compute_old_log_prob"),
        ("advantages", "verl.trainer.ppo.ray_trainer", "compute_advantage"),
        ("metrics", "verl.trainer.ppo.metric_utils", "compute_data_metrics"),
    ):
        hooked = _hooked(module, path)
        print(f"hook on {name}: {hooked}")
        if hooked == "no":
            problems.append(f"{module}.{path} is not hooked")
    if verl_plugin.verl_has_gtpo():
        print("this verl has GTPO of its own: it serves gtpo, the plugin gtpo_trajectory")
    if not loaded:
        problems.append(
            "verl did not load the plugin (before 0.9.0 it reads no entry points): set "
            "VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_plugin; docs/versions.md says how, for a running Ray cluster too"
        )
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


def _hooked(module: str, path: str) -> str:
    package = module.rpartition(".")[0]
    if not (find_spec(package) and find_spec(module)):
        return "this verl has none"
    return "yes" if hasattr(resolve_name(f"{module}:{path}"), "__wrapped__") else "no"
