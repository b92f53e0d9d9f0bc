"""Refuse a second run in a Ray cluster where one is training.

verl's V1 trainers keep their rollouts in a TransferQueue with a fixed name, so there is one per cluster. A second run
silently attaches to the queue of the first. Both then train on each other's rollouts, and whichever ends first removes
the queue.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any

from gtpo_verl.links import DOCS
from gtpo_verl.verl_plugin.run_config import select


def queue_holder() -> str:
    """Describe the run that made the TransferQueue of this process's Ray cluster; empty if there is no queue."""
    import ray

    try:
        job_id = ray.get_actor("TransferQueueController", namespace="transfer_queue")._actor_id.job_id.hex()
    except ValueError:
        return ""
    return f"Ray job {job_id}{_driver(job_id)}"


def _driver(job_id: str) -> str:
    """Describe the driver process of a Ray job; empty if it cannot be found out."""
    try:
        from ray._private.state import jobs

        for record in jobs():
            if record["JobID"] == job_id:
                process = f"process {record['DriverPid']} on {record['DriverIPAddress']}"
                return f", {process}: {shorten(record['Entrypoint'], 200)}"
        return ""
    except Exception:  # the API is private, and varies by Ray version
        return ""


def refusal(holder: str) -> str:
    """Return the message of the error that the second run gets; `holder` is what `queue_holder` returns."""
    return (
        f"another run of verl is training in this Ray cluster ({holder}). All runs of a cluster share one "
        "TransferQueue, so each would train on the other's rollouts. Wait until that run ends, or start a separate "
        "cluster for this one. If this process belongs to that run, call transfer_queue.init() without a config. "
        f"Refused by the plugin gtpo_verl ({DOCS}/gpu.md)"
    )


def refuse_second_run(proceed: Callable, *, conf: Any) -> Any:
    """Let a run create the TransferQueue of its cluster with `transfer_queue.init`, unless there is one.

    verl's V1 task runner, which creates it, passes a config. Processes that only attach to it pass none.

    Raises:
        ValueError: there is one; the message names the run that made it.
    """
    if conf is None:
        return proceed()
    holder = queue_holder()
    if holder:
        raise ValueError(refusal(holder))
    merged = proceed()
    # If two runs start at once, both come to here. `init` fills in `controller.zmq_info` only for the one that created
    # the queue; for the one that attached to it, it stays null.
    if select(merged, "controller.zmq_info") is None:
        raise ValueError(refusal(queue_holder()))
    return merged
