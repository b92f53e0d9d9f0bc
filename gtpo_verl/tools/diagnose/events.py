"""A log that is TensorBoard's event files."""

from collections.abc import Iterator
from pathlib import Path

from gtpo_verl.monitor.frameworks import is_metric
from gtpo_verl.tools.diagnose.entries import Entry


def read_events(path: Path) -> Iterator[Entry]:
    """Yield the scalars of a file or a folder; of several starts the last has what it has, and the first the rest.

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

    # A step that a later start has too, or will have, is left to it.
    first_later = []
    earliest = None
    for _, step, *_ in reversed(scalars):
        earliest = step if earliest is None else min(earliest, step)
        first_later.append(earliest)
    for (_, step, metric, value), first in zip(scalars, reversed(first_later), strict=True):
        if step <= first:
            yield Entry(step, {metric: value})
