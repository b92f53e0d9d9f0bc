"""A log that is TensorBoard's event files."""

import math
from collections.abc import Iterator
from pathlib import Path

from gtpo_verl.monitor.frameworks import is_metric
from gtpo_verl.tools.diagnose.entries import Entry


def read_events(path: Path) -> Iterator[Entry]:
    """Yield the scalars of a file or a folder, in the order in which they were written.

    Of a run that was started again each step comes from the last start that has it; what an earlier start wrote from
    there on is left out.

    Raises:
        ValueError: tensorboard is missing.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"{path} needs tensorboard: pip install '.[diagnose]' in a clone of gtpo-verl") from error
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    scalars = []
    for tag in events.Tags()["scalars"]:
        metric = tag.removeprefix("train/")
        if is_metric(metric):
            scalars += [(scalar.wall_time, scalar.step, metric, scalar.value) for scalar in events.Scalars(tag)]
    scalars.sort()

    # Read from the last one back, a step counts if no later scalar is of a lower step.
    kept = []
    lowest = math.inf
    for _, step, metric, value in reversed(scalars):
        if step <= lowest:
            lowest = step
            kept.append(Entry(step, {metric: value}))
    yield from reversed(kept)
