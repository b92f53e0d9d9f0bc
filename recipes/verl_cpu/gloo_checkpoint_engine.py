"""Send weights over gloo from the training workers to rollout workers in processes of their own.

verl's own engines for this need an accelerator. Importing this module also makes verl copy the weights that it saves in
host memory (`copy_saved_weights`). To use it, set

    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipes.verl_cpu.gloo_checkpoint_engine
    actor_rollout_ref.rollout.checkpoint_engine.backend=gloo
"""

import asyncio
import io
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
import wrapt
from torch.distributed import ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

_BROADCAST_TIMEOUT = timedelta(minutes=10)


@wrapt.patch_function_wrapper("verl.utils.fsdp_utils", "fsdp2_sharded_save_to_cpu")
def copy_saved_weights(wrapped: Any, instance: None, args: tuple, kwargs: dict) -> Any:
    """Clone the weights that verl saves, which on a CPU are the live ones.

    `separate_async` keeps the last weights that were sent in host memory. On a CPU verl's `.cpu()` does not copy, so
    that the next update would overwrite them.
    """
    weights, spec = wrapped(*args, **kwargs)
    copies = {}
    for name, (tensor, spec_of_tensor) in weights.items():
        copies[name] = (tensor.clone(), spec_of_tensor)
    return copies, spec


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcast all weights at once from the first training worker to the rollout workers, in a new group each time."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        # verl gives every engine a bucket size. All weights go in one message here.
        self.is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:  # type: ignore[override]
        """Open the group's store on the first training worker, and return its address; elsewhere return None."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`, for the training workers and for the rollout workers.

        Each is a list with an entry per worker. The first training worker has rank 0. The other training workers have
        -1: they do not join, and send nothing.
        """

        def arguments_of(ranks: list[int]) -> dict[str, list[Any]]:
            world_size = rollout_world_size + 1
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "address": [metadata[0]] * len(ranks),  # what `prepare` returned on the first training worker
            }

        training = [0] + [-1] * (actor_wg_world_size - 1)
        rollout = list(range(1, rollout_world_size + 1))
        return arguments_of(training), arguments_of(rollout)

    def init_process_group(  # type: ignore[override]
        self, rank: int, world_size: int, address: tuple[str, int]
    ) -> None:
        """Join the group of this sync."""
        # Rank 0 has opened its store in `prepare`, and rank -1 stays out.
        if rank > 0:
            self._store = TCPStore(*address, is_master=False)
        if rank >= 0:
            self._group = ProcessGroupGloo(self._store, rank, world_size, _BROADCAST_TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> None:
        """Broadcast all weights: the length of their bytes, and then the bytes."""
        # Workers that send nothing must iterate too: gathering a sharded weight is a collective.
        weights_by_name = {}
        async for name, weight in ensure_async_iterator(weights):
            weights_by_name[name] = weight.detach().cpu()
        if self._group is None:
            return
        buffer = io.BytesIO()
        torch.save(weights_by_name, buffer)
        message = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(message)]))
        await self._broadcast(message)

    async def receive_weights(  # type: ignore[override]  # verl's annotation is not that of an async generator
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the name and the tensor of each weight that the first training worker broadcasts."""
        length = await self._broadcast(torch.zeros(1, dtype=torch.int64))
        message = await self._broadcast(torch.empty(int(length), dtype=torch.uint8))
        weights_by_name = torch.load(io.BytesIO(message.numpy().tobytes()))
        for name, weight in weights_by_name.items():
            yield name, weight

    async def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        await asyncio.to_thread(lambda: self._group.broadcast(tensor, 0).wait())
        return tensor
