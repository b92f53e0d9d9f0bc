"""`gtpo-verl diagnose`: what is wrong with a run, from its files.

It reads what a trainer logged (`logs`) and completions if there are any (`rollout_stats`), asks for the verdict that
the monitor in training asks for (`monitor.verdict`), and shows it with what moved (`report`, `text_report`, `plot`).
"""

import argparse
import json
from pathlib import Path

from gtpo_verl.tools.diagnose import plot
from gtpo_verl.tools.diagnose.entries import FORMS
from gtpo_verl.tools.diagnose.report import STATUS, read_run, report_on
from gtpo_verl.tools.diagnose.text_report import screen

BAD_INPUT = 4  # argparse's own, 2, means failed here


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's options."""
    parser.description = "Say what is wrong with a run, from files that it left."
    parser.epilog = (
        "example: gtpo-verl diagnose train.log --plot train.png         verl's console, saved by tee, Slurm or wandb\n"
        "         gtpo-verl diagnose outputs                            TRL's output folder\n"
        "         gtpo-verl diagnose metrics.jsonl --rollouts rollouts --tokenizer MODEL\n"
        "status:  0 healthy, 1 degraded, 2 failed, 3 cannot tell, 4 bad input"
    )
    forms = f"{FORMS}; compressed or not; a folder with one of these, or of rollouts alone; - for the standard input"
    parser.add_argument("log", metavar="LOG", type=Path, help=forms)
    parser.add_argument("--rollouts", type=Path, help="the run's completions: trainer.rollout_data_dir, or a dump_dir")
    parser.add_argument("--tokenizer", help="folder or Hub name of the run's tokenizer, for verl's rollouts")
    parser.add_argument("--limit", type=int, help="tokens at which completions are cut: data.max_response_length")
    parser.add_argument("--completions", type=int, help="completions per step; default: what the log shows")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the run: a PNG, SVG or PDF file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    if any(number is not None and number < 1 for number in (args.limit, args.completions)):
        raise ValueError("--limit and --completions must be at least 1")
    diagnosed = read_run(
        args.log,
        rollouts=args.rollouts,
        tokenizer=args.tokenizer,
        limit=args.limit,
        completions=args.completions,
    )
    report = report_on(diagnosed)
    if args.plot:
        plot.plot(diagnosed, report, args.plot)
    print(json.dumps(report, indent=1) if args.json else screen(report, args.plot))
    return STATUS[report["verdict"]]
