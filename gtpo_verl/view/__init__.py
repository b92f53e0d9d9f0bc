"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads a token dump, or verl's own rollout files (`sources`), spells the tokens (`tokens`) and writes the page
(`page`). `demo/` is the dump of a run, for a first look.
"""

import argparse
from importlib.resources import files
from pathlib import Path

from gtpo_verl.records import atomic_write
from gtpo_verl.view.page import render
from gtpo_verl.view.sources import find_source

DEMO = Path(str(files(__package__))) / "demo"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.description = (
        "Write one HTML file that shows, for every token of a run, whether GTPO protects, doubles or filters it, or "
        "would do so."
    )
    parser.epilog = (
        "example: gtpo-verl view --demo                     a run that comes with this package\n"
        "         gtpo-verl view dump                       a token dump: +algorithm.gtpo.dump_dir=$PWD/dump\n"
        "         gtpo-verl view rollouts --tokenizer MODEL verl's own files: trainer.rollout_data_dir=$PWD/rollouts"
    )
    parser.add_argument(
        "path",
        metavar="RUN_OR_FILE",
        type=Path,
        nargs="?",
        help="a run's dump_dir, a folder above it, or one step_*.jsonl of it; or a run's rollout_data_dir, or one "
        "N.jsonl of it",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("view.html"), help="default: %(default)s; - for standard output"
    )
    parser.add_argument(
        "--tokenizer",
        help="folder or Hub name of the run's tokenizer: for verl's rollouts, or if the dump's own is gone",
    )
    parser.add_argument("--demo", action="store_true", help="show the run that comes with this package")


def run(args: argparse.Namespace) -> int:
    """Write the page, and print what it holds."""
    if args.demo:
        if args.path or args.tokenizer:
            raise ValueError("--demo shows a run of its own: it takes no RUN_OR_FILE or --tokenizer")
        args.path, args.tokenizer = DEMO, str(DEMO)
    if args.path is None:
        raise ValueError("give a RUN_OR_FILE, or --demo")
    source = find_source(args.path, args.tokenizer)
    paths = thin_out(source.paths, source.size_limit)
    name = "gtpo-verl view --demo" if args.demo else str(args.path)
    page = render(source.header, map(source.read, paths), source.tokenizer, name)
    if str(args.out) == "-":
        print(page)
        return 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.out, page)
    print(f"{args.out}: steps {len(paths)}, {len(page) / 1e6:.1f} MB; open it in a browser")
    if left_out := len(source.paths) - len(paths):
        print(f"{left_out} of {len(source.paths)} steps left out, evenly, for size; name a file to see one")
    return 0


def thin_out(paths: list[Path], size: int) -> list[Path]:
    """Evenly spaced steps, the last among them, of no more than `size` bytes; one step at least."""
    while len(paths) > 1 and sum(path.stat().st_size for path in paths) > size:
        paths = paths[::-2][::-1]
    return paths
