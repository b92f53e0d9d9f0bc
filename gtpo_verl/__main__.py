"""`python -m gtpo_verl`: which verl this is, and whether GTPO is registered and hooked there."""

import sys


def main() -> int:
    """Print what is registered where; exit status 1 if GTPO cannot run."""
    from importlib.metadata import entry_points, version

    import verl
    import verl.utils.config as verl_config
    from verl.trainer.ppo import core_algos, ray_trainer
    from verl.trainer.ppo.v1 import trainer_base

    from gtpo_verl import verl_plugin

    entry = [f"{e.name} = {e.value}" for e in entry_points(group="verl.plugins") if e.value.startswith("gtpo_verl.")]
    hooks = {
        "validate_config": verl_config.validate_config,
        "V1 trainer": trainer_base.PPOTrainer._compute_advantage,
        "legacy trainer": ray_trainer.RayPPOTrainer._compute_old_log_prob,
    }
    print(f"gtpo_verl {version('gtpo-verl')} at {verl_plugin.__file__}")
    print(f"verl {verl.__version__} at {verl.__file__} (supported: {', '.join(verl_plugin.SUPPORTED_VERL)})")
    print(f"entry points: {', '.join(entry) or 'none; set VERL_USE_EXTERNAL_MODULES=gtpo_verl.verl_plugin'}")
    for kind, registry in (
        ("advantage estimator gtpo", core_algos.ADV_ESTIMATOR_REGISTRY),
        ("policy loss gtpo", core_algos.POLICY_LOSS_REGISTRY),
    ):
        function = registry.get("gtpo")
        print(f"{kind}: {f'{function.__module__}.{function.__qualname__}' if function else 'not registered'}")
    for name, function in hooks.items():
        print(f"hook on {name}: {'yes' if hasattr(function, '__wrapped__') else 'no'}")
    if verl_plugin.steps_back():
        print("this verl has GTPO of its own: it serves gtpo, and the plugin steps back")
    for problem in verl_plugin.problems():
        print(f"problem: {problem}")
    return 1 if verl_plugin.problems() else 0


if __name__ == "__main__":
    sys.exit(main())
