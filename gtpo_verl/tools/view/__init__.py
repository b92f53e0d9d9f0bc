"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads completions (`gtpo_verl.tools.rollouts`), looks for signs of a fault in them (`gtpo_verl.tools.diagnose`) and
writes the page (`page`), which opens where the first one shows. `demo/` is the dump of a run, for a first look.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.explain import LABELS, label
from gtpo_verl.run.records import atomic_write
from gtpo_verl.tools.diagnose.entries import Log
from gtpo_verl.tools.diagnose.logs import shown
from gtpo_verl.tools.diagnose.report import Run, completions_per_step, report_on
from gtpo_verl.tools.diagnose.rollout_stats import Rollouts
from gtpo_verl.tools.rollouts import find_source, thin_out
from gtpo_verl.tools.view.page import filter_threshold, render, step_element, summarize

_LONG = 16 << 20  # bytes that take seconds
_STEPS = 10  # of fewer, what moved is chance
DEMO = Path(__file__).parent / "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.description = "Write one HTML file that shows what GTPO does, or would do, to every token of a run."
    parser.epilog = (
        "example: gtpo-verl view --demo                     a run that comes with this package\n"
        "         gtpo-verl view dump                       a token dump: +algorithm.gtpo.dump_dir=$PWD/dump\n"
        "         gtpo-verl view rollouts --tokenizer MODEL verl's own files: trainer.rollout_data_dir=$PWD/rollouts\n"
        "         gtpo-verl view outputs --tokenizer MODEL  TRL's output folder: log_completions=True"
    )
    run_or_file = "a dump_dir, or a folder above it, a rollout_data_dir or TRL's output_dir; or one step's file of it"
    parser.add_argument("path", metavar="RUN_OR_FILE", type=Path, nargs="?", help=run_or_file)
    parser.add_argument("-o", "--out", type=Path, default="view.html", help="default: %(default)s; - for stdout")
    parser.add_argument("--tokenizer", help="folder or Hub name of the run's: for text, or if the dump's own is gone")
    parser.add_argument("--demo", action="store_true", help="show the run that comes with this package")


def run(args: argparse.Namespace) -> int:
    """Write the page, and print what it holds."""
    if args.demo:
        if args.path or args.tokenizer:
            raise ValueError("--demo shows a run of its own: it takes no RUN_OR_FILE or --tokenizer")
        args.path = DEMO
    if args.path is None:
        raise ValueError("give a RUN_OR_FILE, or --demo")
    if args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder: name the file to write, such as {args.out / 'view.html'}")
    source = find_source(args.path, args.tokenizer)
    paths = thin_out(source.paths, source.size_limit)
    name = "gtpo-verl view --demo" if args.demo else shown(args.path)
    size = sum(path.stat().st_size for path in paths)
    if size > _LONG:
        print(f"reading {len(paths)} steps, {size >> 20} MB", file=sys.stderr)

    completions = Rollouts()
    summaries = []
    elements = []
    for path in paths:
        step = source.read(path)
        completions.add(step)
        summaries.append(summarize(step))
        elements.append(step_element(step, source.header["gtpo"]["filter_scope"]))
    shown_run = {"source": name, "steps": summaries, "threshold": filter_threshold(source.header)}
    page = render(source.header | shown_run | findings(completions), elements)
    if str(args.out) == "-":
        print(page)
        return 0
    atomic_write(args.out, page)
    print(f"{args.out}: steps {len(paths)}, {len(page) / 1e6:.1f} MB; open it in a browser")
    left_out = len(source.paths) - len(paths)
    if left_out:
        print(f"{left_out} of {len(source.paths)} steps left out, evenly, for size; name a file to see one")
    return 0


def findings(completions: Rollouts) -> dict[str, Any]:
    """Return each step's numbers by their labels, and what `diagnose` says is wrong or moved, with its step."""
    signs = []
    if len(completions.steps) >= _STEPS:
        log = Log(name="", framework="verl", steps=completions.steps, config={}, notes=[])
        run_of_them = Run(
            log=log,
            completions=completions_per_step(log),
            limit=completions.limit,
            rollouts=completions,
        )
        report = report_on(run_of_them)
        if report["since"] is not None:
            signs.append([report["since"], report["why"]])
        signs += [[move["since"], move["meaning"]] for move in report["moved"]]

    numbers = {}
    for step, metrics in completions.steps.items():
        numbers[step] = {label(name): value for name, value in metrics.items() if name in LABELS}
    return {"numbers": numbers, "signs": signs}
