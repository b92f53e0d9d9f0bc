"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads a token dump, verl's own rollout files or TRL's completions (`gtpo_verl.tools.rollouts`), looks for signs of a
fault in them (`gtpo_verl.tools.diagnose`) and writes the page (`page`), which opens where the first one shows. `demo/`
is the dump of a run, for a first look.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.signs import NUMBERS, STEPS, label
from gtpo_verl.run_files.records import atomic_write
from gtpo_verl.tools.diagnose.logs import Log
from gtpo_verl.tools.diagnose.rollout_stats import Rollouts
from gtpo_verl.tools.diagnose.verdict import Run, completions_per_step, report_on
from gtpo_verl.tools.rollouts.sources import find_source, thin_out
from gtpo_verl.tools.view.page import render

_LONG = 16 << 20  # bytes that take seconds
DEMO = Path(str(files(__package__))) / "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.description = (
        "Write one HTML file that shows, for every token of a run, whether GTPO protects, doubles or filters it, or "
        "would do so."
    )
    parser.epilog = (
        "example: gtpo-verl view --demo                     a run that comes with this package\n"
        "         gtpo-verl view dump                       a token dump: +algorithm.gtpo.dump_dir=$PWD/dump\n"
        "         gtpo-verl view rollouts --tokenizer MODEL verl's own files: trainer.rollout_data_dir=$PWD/rollouts\n"
        "         gtpo-verl view outputs --tokenizer MODEL  TRL's output folder: log_completions=True"
    )
    parser.add_argument(
        "path",
        metavar="RUN_OR_FILE",
        type=Path,
        nargs="?",
        help="a run's dump_dir, a folder above it, or one step_*.jsonl of it; a run's rollout_data_dir, or one "
        "N.jsonl of it; TRL's output_dir, or one completions_N.parquet of it",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("view.html"), help="default: %(default)s; - for standard output"
    )
    parser.add_argument(
        "--tokenizer",
        help="folder or Hub name of the run's tokenizer: for text, or if the dump's own is gone",
    )
    parser.add_argument("--demo", action="store_true", help="show the run that comes with this package")


def run(args: argparse.Namespace) -> int:
    """Write the page, and print what it holds."""
    if args.demo:
        if args.path or args.tokenizer:
            raise ValueError("--demo shows a run of its own: it takes no RUN_OR_FILE or --tokenizer")
        args.path = DEMO
    if args.path is None:
        raise ValueError("give a RUN_OR_FILE, or --demo")
    source = find_source(args.path, args.tokenizer)
    paths = thin_out(source.paths, source.size_limit)
    name = "gtpo-verl view --demo" if args.demo else os.fsencode(args.path).decode(errors="replace")
    seen, size = Rollouts(source), sum(path.stat().st_size for path in paths)
    if size > _LONG:
        print(f"reading {len(paths)} steps, {size >> 20} MB", file=sys.stderr)

    def steps() -> Iterator[list[dict[str, Any]]]:
        for path in paths:
            rows = source.read(path)
            seen.add(rows)
            yield rows

    page = render(source.header, steps(), name, lambda: findings(seen))
    if str(args.out) == "-":
        print(page)
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.out, page)
    print(f"{args.out}: steps {len(paths)}, {len(page) / 1e6:.1f} MB; open it in a browser")
    if left_out := len(source.paths) - len(paths):
        print(f"{left_out} of {len(source.paths)} steps left out, evenly, for size; name a file to see one")
    return 0


def findings(seen: Rollouts) -> dict[str, Any]:
    """Return each step's numbers by their labels, and the signs that `diagnose` finds with their first steps."""
    log, signs = Log("", "verl", seen.steps, {}, []), []
    if len(seen.steps) >= STEPS:  # of fewer, signs are chance
        report = report_on(Run(log, completions_per_step(log), seen.limit, seen))
        signs = [[sign["since"], sign["meaning"]] for sign in report["signs"]]
    numbers = {
        step: {label(name): value for name, value in of_step.items() if name in NUMBERS}
        for step, of_step in seen.steps.items()
    }
    return {"numbers": numbers, "signs": signs}
