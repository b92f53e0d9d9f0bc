"""The host as a device: what verl asks of a device module, and verl's own device functions before it had platforms."""

import types
from typing import Any

import torch
import wrapt


class HostDevice(types.ModuleType):
    """`torch.cpu`, with the memory calls verl makes on a device module: there is no device memory to manage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        # torch.cpu says True, and verl would then trace and trim memory that does not exist.
        return False

    def empty_cache(self) -> None:
        pass

    def memory_allocated(self) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


HOST = HostDevice("gtpo_verl_host_device")


def install() -> None:
    """For verl 0.7 and 0.8, which ask CUDA and NPU only; `platform` serves later ones. Set `trainer.device=cuda`."""
    wrapt.register_post_import_hook(use_host, "verl.utils.device")
    wrapt.register_post_import_hook(use_cuda_engines, "verl.workers.engine.fsdp.transformer_impl")


def use_host(module: Any) -> None:
    """verl's device functions; `trainer.device` only says which resource of Ray a worker takes."""
    module.get_torch_device = lambda: HOST
    module.get_device_id = lambda: torch.device("cpu")
    module.get_nccl_backend = lambda: "gloo"
    module.get_resource_name = lambda: "GPU"


def use_cuda_engines(module: Any) -> None:
    """verl registers its FSDP2 engine for cuda and npu; it is the same engine on gloo."""
    for backends in module.EngineRegistry._engines.values():
        for devices in backends.values():
            devices["cpu"] = devices["cuda"]
