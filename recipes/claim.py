"""Claim a folder for one set of settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_verl.run.records import atomic_write, differences, read_record


def claim(record: Path, settings: Mapping[str, Any], remedy: str) -> None:
    """Record with which settings a folder is filled, unless an earlier start has; then they must be the same.

    Raises:
        ValueError: the record has other settings, or is damaged; the message names each.
    """
    if not record.exists():
        atomic_write(record, json.dumps(settings, indent=1) + "\n")
        return
    changed = differences(read_record(record), settings)
    if changed:
        raise ValueError(f"{record.parent} was filled with other settings ({'; '.join(changed)}): {remedy}")
