"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads a token dump, or verl's own rollout files (`sources`), spells the tokens (`tokens`) and writes the page
(`page`). `demo/` is the dump of a run, for a first look.
"""

import argparse
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from gtpo_verl.records import atomic_write
from gtpo_verl.view.page import PageStep, page_step, render
from gtpo_verl.view.sources import NoStepYetError, Source, find_source

DEMO = Path(str(files(__package__))) / "demo"
_POLL_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.description = (
        "Write one HTML file that shows, for every token of a run, whether GTPO protects, doubles or filters it, or "
        "would do so."
    )
    parser.epilog = (
        "example: gtpo-verl view --demo                     a run that comes with this package\n"
        "         gtpo-verl view dump                       a token dump: +algorithm.gtpo.dump_dir=$PWD/dump\n"
        "         gtpo-verl view rollouts --tokenizer MODEL verl's own files: trainer.rollout_data_dir=$PWD/rollouts\n"
        "         gtpo-verl view --follow dump              rewrite the page whenever the run has dumped a step"
    )
    parser.add_argument(
        "path",
        metavar="RUN_OR_FILE",
        type=Path,
        nargs="?",
        help="a run's dump_dir, a folder above it, or one step_*.jsonl of it; or a run's rollout_data_dir, or one "
        "N.jsonl of it",
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("view.html"), help="default: %(default)s")
    parser.add_argument(
        "--tokenizer",
        help="folder or Hub name of the run's tokenizer: for verl's rollouts, or if the dump's own is gone",
    )
    parser.add_argument("--demo", action="store_true", help="show the run that comes with this package")
    parser.add_argument("--follow", action="store_true", help="until Ctrl-C, rewrite the page as new steps come")


def run(args: argparse.Namespace) -> int:
    """Write the page; with --follow whenever the files change, after waiting for the first of them."""
    if args.demo:
        if args.path or args.tokenizer or args.follow:
            raise ValueError("--demo shows a run of its own: it takes no RUN_OR_FILE, --tokenizer or --follow")
        args.path, args.tokenizer = DEMO, str(DEMO)
    if args.path is None:
        raise ValueError("give a RUN_OR_FILE, or --demo")
    name = "gtpo-verl view --demo" if args.demo else str(args.path)
    pages: dict[Any, PageStep] = {}  # of files as they were, by name, size and time of change
    written, said = None, ""
    while True:
        try:
            source = find_source(args.path, args.tokenizer)
            if (found := [*map(_stamped, source.paths)]) != written:
                write_page(source, args.out, name, pages, args.follow)
                written = found
        except NoStepYetError as error:
            if not args.follow:
                raise
            if str(error) != said:
                said = str(error)
                print(f"waiting: {said}", flush=True)
        if not args.follow:
            return 0
        time.sleep(_POLL_S)


def write_page(source: Source, out: Path, name: str, pages: dict[Any, PageStep], follow: bool) -> None:
    """Write the page of a source, and print what it holds.

    Args:
        source: what to show.
        out: the page.
        name (str): where the source is, for the reader.
        pages: finished steps, to which new ones are added.
        follow (bool): open the page at the last step.
    """
    paths = thin_out(source.paths, source.size_limit)
    for path in paths:
        if _stamped(path) not in pages:
            pages[_stamped(path)] = page_step(source.read(path), source.tokenizer)
    steps = [pages[_stamped(path)] for path in paths]
    page = render(source.header | {"follow": follow}, steps, name)
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, page)
    tokens = sum(step.summary["tokens"] for step in steps)
    print(f"{out}: steps {len(steps)}, tokens {tokens}, {len(page) / 1e6:.1f} MB; open it in a browser", flush=True)
    if len(paths) < len(source.paths):
        left_out = len(source.paths) - len(paths)
        print(f"{left_out} of {len(source.paths)} steps left out, evenly, for size; name a file to see one", flush=True)


def thin_out(paths: list[Path], size: int) -> list[Path]:
    """Evenly spaced steps, the last among them, of no more than `size` bytes; one step at least."""
    while len(paths) > 1 and sum(path.stat().st_size for path in paths) > size:
        paths = paths[::-2][::-1]
    return paths


def _stamped(path: Path) -> tuple[Path, int, int]:
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size
