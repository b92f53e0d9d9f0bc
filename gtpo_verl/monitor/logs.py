"""What trainers logged, from their files."""

import gzip
import json
import sys
from pathlib import Path


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The numbers of each step in verl's file log, which may be compressed: `{"step": n, "data": {key: value}}` a line,
    or the same flattened.

    Lines of one step are merged, the later value winning, so a resumed run may be appended. A last line that the writer
    has not finished is left out.

    Raises:
        ValueError: another line is not JSON or has no `step`, or there is no step with a number in it.
    """
    steps: dict[int, dict[str, float]] = {}
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):
                    print(f"{path}:{number} is unfinished and left out: is the run still going?", file=sys.stderr)
                    break
                raise ValueError(f"{path}:{number} is not JSON ({error}): is this verl's file logger?") from error
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                raise ValueError(f'{path}:{number} has no integer "step": is this verl\'s file logger?')
            data = entry.get("data", entry)
            if not isinstance(data, dict):
                raise ValueError(f'{path}:{number}: "data" holds no metrics: is this verl\'s file logger?')
            found = {k: float(v) for k, v in data.items() if k != "step" and isinstance(v, int | float)}
            if found:
                steps.setdefault(entry["step"], {}).update(found)
    if not steps:
        raise ValueError(f"{path} holds no steps: did the run log any metrics?")
    return steps
