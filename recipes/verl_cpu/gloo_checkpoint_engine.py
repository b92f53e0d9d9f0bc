"""Weights from the training workers to rollouts with workers of their own, over gloo.

verl's own engines for this need an accelerator. To use this one instead, set

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

_TIMEOUT = timedelta(minutes=10)


@wrapt.patch_function_wrapper("verl.utils.fsdp_utils", "fsdp2_sharded_save_to_cpu")
def copy_saved_weights(save: Any, instance: None, args: tuple, kwargs: dict) -> Any:
    """Clone the saved weights.

    `separate_async` keeps the weights of the last sync in host memory. On a CPU they are there already, and verl's
    `.cpu()` returns the live tensors, which the next update would overwrite.
    """
    weights, spec = save(*args, **kwargs)
    return {name: (tensor.clone(), own_spec) for name, (tensor, own_spec) in weights.items()}, spec


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """One broadcast from the first training worker to all rollout workers, in a group that lives for one sync."""

    def __init__(self, bucket_size: int, is_master: bool = False):
        # verl gives every engine a bucket size. All weights go in one message here.
        self.is_master = is_master
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> tuple[str, int] | None:  # type: ignore[override]
        """Open the store through which the group meets and return its address, on the first training worker alone."""
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return what each training worker and each rollout worker joins the group with.

        The first training worker has rank 0. The other training workers have -1: they do not join, and send nothing.
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
            self._group = ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = None
        self._store = None

    async def send_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        global_steps: int | None = None,
    ) -> None:
        """Send all weights in one message."""
        # Workers that send nothing must iterate too: gathering a sharded weight is a collective.
        named = {name: weight.detach().cpu() async for name, weight in ensure_async_iterator(weights)}
        if self._group is None:
            return
        buffer = io.BytesIO()
        torch.save(named, buffer)
        message = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        await self._broadcast(torch.tensor([len(message)]))
        await self._broadcast(message)

    async def receive_weights(  # type: ignore[override]  # verl's annotation is not that of an async generator
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights that are sent."""
        length = await self._broadcast(torch.zeros(1, dtype=torch.int64))
        message = await self._broadcast(torch.empty(int(length), dtype=torch.uint8))
        for name, weight in torch.load(io.BytesIO(message.numpy().tobytes())).items():
            yield name, weight

    async def _broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        await asyncio.to_thread(lambda: self._group.broadcast(tensor, 0).wait())
        return tensor
