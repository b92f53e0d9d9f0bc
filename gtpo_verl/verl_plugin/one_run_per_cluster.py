"""Refuse a second run in a Ray cluster where one is training.

verl's V1 trainers keep the rollouts in a TransferQueue with a fixed name, one per cluster. A second run silently
attaches to that of the first. Both then train on the rollouts of both, and the one that ends first removes the queue.
"""

from collections.abc import Callable
from textwrap import shorten
from typing import Any

from gtpo_verl.links import DOCS
from gtpo_verl.verl_plugin.run_config import select


def other_run() -> str:
    """Describe the run that holds the TransferQueue of this process's Ray cluster; empty if there is none."""
    import ray

    try:
        job = ray.get_actor("TransferQueueController", namespace="transfer_queue")._actor_id.job_id.hex()
    except ValueError:
        return ""
    return f"Ray job {job}{_driver(job)}"


def _driver(job: str) -> str:
    try:
        from ray._private.state import jobs

        (known,) = (known for known in jobs() if known["JobID"] == job)
        return f", process {known['DriverPid']} on {known['DriverIPAddress']}: {shorten(known['Entrypoint'], 200)}"
    except Exception:  # private API, varies by Ray version
        return ""


def refusal(other: str) -> str:
    """The error that the second run gets; `other` is what `other_run` returns."""
    return (
        f"another run of verl is training in this Ray cluster ({other}). verl keeps the rollouts of all runs of a "
        "cluster in one TransferQueue, so each run would train on the other's rollouts: wait until it ends, or start "
        "a separate cluster for this run; a process of the same run attaches with transfer_queue.init(), without a "
        f"config. The plugin gtpo_verl refuses it ({DOCS}/gpu.md)"
    )


def refuse_second_run(proceed: Callable, *, conf: Any) -> Any:
    """`transfer_queue.init`: its creator, verl's V1 task runner, passes a config; those that only attach pass none. A
    ValueError names another run that holds the queue."""
    if conf is None:
        return proceed()
    if other := other_run():
        raise ValueError(refusal(other))
    merged = proceed()
    # Of two runs that start at once, one made the queue, and has the address of it.
    if merged is not None and select(merged, "controller.zmq_info") is None:
        raise ValueError(refusal(other_run()))
    return merged
