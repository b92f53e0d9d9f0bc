"""Give each run sockets of its own for the weights that its rollout gets.

verl sends a rollout its weights over a Unix socket that it names by Ray job, replica and rank, and removes whatever has
that name. Every Ray that a run starts for itself calls its first job 01000000. So two runs on one host share the name:
one rollout gets the other run's weights, without an error, and the other run hangs.

Sender (a training worker) and receiver (a process of the rollout engine) are in different processes. Both descend from
one Ray node, whose raylet they can name.
"""

import os
from collections.abc import Callable
from typing import Any


def own_socket(zmq_handle: str) -> str:
    """The handle with this process's Ray node in its name: the raylet's process id and the namespace that it counts in.

    Args:
        zmq_handle (str): as verl names it, `ipc://PATH`.

    Returns:
        `ipc://PATH.NAMESPACE-PID`.

    Raises:
        RuntimeError: this process does not descend from a Ray worker, so its peer cannot derive the same name.
    """
    if "RAY_RAYLET_PID" not in os.environ:
        raise RuntimeError(f"RAY_RAYLET_PID is unset: weights go through {zmq_handle} between processes of Ray only")
    # Containers that share a folder of sockets may count the same process ids.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{zmq_handle}.{namespace}-{os.environ['RAY_RAYLET_PID']}"


def use_own_socket(proceed: Callable, transfer: Any) -> None:
    """The constructor of verl's `BucketedWeightSender` and `BucketedWeightReceiver`."""
    proceed()
    if transfer.zmq_handle.startswith("ipc://"):
        transfer.zmq_handle = own_socket(transfer.zmq_handle)
