"""What is missing of a list of runs, and logs that are whole: `studies.run` and `studies.verl_runs` share both."""

import argparse
import gzip
from collections.abc import Callable, Sequence
from pathlib import Path

from gtpo_verl.run.records import atomic_write
from studies.plan import ROOT, Cell, is_stored


def missing_runs(
    description: str | None, runs: Sequence[tuple[Cell, int]], log_of: Callable[[Cell, int], Path]
) -> tuple[list[tuple[Cell, int]], Path]:
    """Read the command's options, and say how many runs are done; with `--list`, which.

    Returns:
        The runs to make, none with `--list`, and the folder to make them in.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="what there is, and what is done")
    parser.add_argument("--outputs", type=Path, default=ROOT / "outputs/study", help="folder of warm starts and runs")
    args = parser.parse_args()
    missing = [(cell, seed) for cell, seed in runs if not is_stored(log_of(cell, seed))]
    print(f"{len(runs)} runs, {len(runs) - len(missing)} of them done", flush=True)
    if args.list:
        for cell, seed in runs:
            print("    " if (cell, seed) in missing else "done", log_of(cell, seed))
        missing = []
    return missing, args.outputs


def write_log(text: str, path: Path) -> None:
    """Write a log, compressed; the file appears when it is whole, and the same text gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, gzip.compress(text.encode(), mtime=0))
