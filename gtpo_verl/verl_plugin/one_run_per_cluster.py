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
    """Describe the driver process of a Ray job; empty if it cannot be found out."""
    try:
        from ray._private.state import jobs

        for record in jobs():
            if record["JobID"] == job:
                process = f"process {record['DriverPid']} on {record['DriverIPAddress']}"
                return f", {process}: {shorten(record['Entrypoint'], 200)}"
        return ""
    except Exception:  # the API is private, and varies by Ray version
        return ""


def refusal(other: str) -> str:
    """Return the message of the error that the second run gets; `other` is what `other_run` returns."""
    return (
        f"another run of verl is training in this Ray cluster ({other}). verl keeps the rollouts of all runs of a "
        "cluster in one TransferQueue, so each run would train on the other's rollouts: wait until it ends, or start "
        "a separate cluster for this run; a process of the same run attaches with transfer_queue.init(), without a "
        f"config. The plugin gtpo_verl refuses it ({DOCS}/gpu.md)"
    )


def refuse_second_run(proceed: Callable, *, conf: Any) -> Any:
    """Let a run create the TransferQueue of its cluster with `transfer_queue.init`, unless another run holds it.

    verl's V1 task runner, which creates it, passes a config. Processes that only attach to it pass none.

    Raises:
        ValueError: another run holds it; the message names that run.
    """
    if conf is None:
        return proceed()
    if other := other_run():
        raise ValueError(refusal(other))
    merged = proceed()
    # Where two runs start at once, only the one that has created the queue gets a config with its address.
    if merged is not None and select(merged, "controller.zmq_info") is None:
        raise ValueError(refusal(other_run()))
    return merged
