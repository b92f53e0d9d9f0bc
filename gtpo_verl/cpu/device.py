"""The host as a device: what verl asks of a device module."""

import types
from typing import Any

import torch


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
