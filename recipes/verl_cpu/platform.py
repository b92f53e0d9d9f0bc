"""The cpu platform: what verl asks of a device, answered for a machine without an accelerator."""

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class HostDevice(types.ModuleType):
    """`torch.cpu`, with the memory calls verl makes on a device module: there is no device memory to manage."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def is_available(self) -> bool:
        # torch.cpu says True, and verl would then trace and trim memory that does not exist.
        return False

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def memory_allocated(self) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    set_rng_state = staticmethod(torch.set_rng_state)

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """FSDP2 on gloo; one *logical* Ray GPU per worker, given by `ray_kwargs.ray_init.num_gpus`."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = HostDevice("verl_cpu_host_device")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl passes this to Tensor.to(), where an index would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        # verl counts the resources of a cluster as GPU or NPU only (ResourcePoolManager._check_resource_available).
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def _nothing_to_do(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is one device, without streams, an allocator or a profiler of its own."""

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing_to_do
    profiler_start = profiler_stop = cudart = _nothing_to_do
