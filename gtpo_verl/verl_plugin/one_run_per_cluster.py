"""Refuse a second run in a Ray cluster where one is training.

verl's V1 trainers keep the rollouts in a TransferQueue with a fixed name, one per cluster. A second run silently
attaches to that of the first. Both then train on the rollouts of both, and the one that ends first removes the queue.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"


def other_run() -> str:
    """Describe the run that holds the TransferQueue of this process's Ray cluster.

    Returns:
        "" if no other run holds it.
    """
    import ray
    from ray._private.state import jobs

    try:
        job = ray.get_actor(CONTROLLER, namespace=NAMESPACE)._actor_id.job_id.hex()
    except ValueError:
        return ""
    if job == ray.get_runtime_context().get_job_id():
        return ""
    drivers = [
        f", process {known['DriverPid']} on {known['DriverIPAddress']}: {shorten(known['Entrypoint'], 200)}"
        for known in jobs()
        if known["JobID"] == job
    ]
    return f"Ray job {job}{''.join(drivers)}"


def refusal(other: str) -> str:
    """The error that the second run gets; `other` is what `other_run` returns."""
    return (
        f"another run of verl is training in this Ray cluster ({other}). verl keeps the rollouts of all runs of a "
        "cluster in one TransferQueue, so each run would train on the other's rollouts: wait until it ends, or start "
        "a separate cluster for this run (docs/clusters.md)"
    )


def refuse_second_run(proceed: Callable, instance: None) -> Any:
    """`transfer_queue.init`, which verl's task runner calls before it starts any worker.

    Raises:
        ValueError: another run holds the TransferQueue; the message names it.
    """
    _refuse()
    result = proceed()
    _refuse()  # of two runs that start at once, one made the queue
    return result


def _refuse() -> None:
    if other := other_run():
        raise ValueError(refusal(other))
