"""Refuse a second run in a Ray cluster where one is training.

verl's V1 trainers keep the rollouts in a TransferQueue, of which a cluster has one, under a fixed name. A second run
attaches to that of the first without a word: both train on the rollouts of both, and the one that ends first removes
the queue.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"


def other_run() -> str:
    """The run that holds the TransferQueue of the Ray cluster that this process is connected to, in words.

    Returns:
        "" where no run but this one holds it.
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
    """What is said to the second run; `other` as `other_run` returns it."""
    return (
        f"another run of verl trains in this Ray cluster ({other}). verl keeps the rollouts of all runs of a cluster "
        "in one TransferQueue, so each would train on those of the other: wait for its end, or start a cluster of "
        "its own for this one (docs/clusters.md)"
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
