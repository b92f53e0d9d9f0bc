"""Give each run sockets of its own for the weights that its rollout gets.

verl sends a rollout its weights over a Unix socket that it names by Ray job, replica and rank, and removes whatever has
that name. Every Ray that a run starts for itself calls its first job 01000000. So two runs on one host share the name:
one rollout gets the other run's weights, without an error, and the other run hangs. Sender (a training worker) and
receiver (a process of the rollout engine) both descend from one Ray node, whose raylet they can name.
"""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

logger = logging.getLogger("gtpo_verl")


def use_own_socket(proceed: Callable, transfer: Any) -> None:
    """Have verl's `BucketedWeightSender` or `BucketedWeightReceiver`, once constructed, use a socket of this run's."""
    proceed()
    if transfer.zmq_handle.startswith("ipc://"):
        transfer.zmq_handle += _node_suffix()


@cache
def _node_suffix() -> str:
    """Return what to add to a socket's name: the raylet's process id and the namespace that it counts in.

    Empty in a process that descends from no Ray worker, whose peer could not derive the same name.
    """
    if "RAY_RAYLET_PID" not in os.environ:
        logger.warning("no RAY_RAYLET_PID here: weights go through the socket that verl names, which other runs share")
        return ""
    # Containers that share a folder of sockets may count the same process ids.
    return f".{os.stat('/proc/self/ns/pid').st_ino}-{os.environ['RAY_RAYLET_PID']}"
