"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads a token dump, or verl's own rollout files (`sources`), spells the tokens (`tokens`) and writes the page
(`page`). `demo/` is the dump of a run, for a first look.
"""

import argparse
import time
from importlib.resources import files
from pathlib import Path

from gtpo_verl.records import atomic_write
from gtpo_verl.view.page import PageStep, page_step, render
from gtpo_verl.view.sources import NoStepYetError, Source, find_source
from gtpo_verl.view.tokens import token_pieces

DEMO = Path(str(files(__package__))) / "demo"
_POLL_S = 2.0

_Stamped = tuple[Path, int, int]  # a file as it was at a time, by its size and time of change


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
    """Write the page, with --follow again and again."""
    if args.demo:
        if args.path or args.tokenizer or args.follow:
            raise ValueError("--demo shows a run of its own: it takes no RUN_OR_FILE, --tokenizer or --follow")
        write_page(find_source(DEMO, str(DEMO)), args.out, "gtpo-verl view --demo")
        return 0
    if args.path is None:
        raise ValueError("give a RUN_OR_FILE, or --demo")
    if not args.follow:
        write_page(find_source(args.path, args.tokenizer), args.out, str(args.path))
        return 0
    return follow(args.path, args.tokenizer, args.out)


def follow(path: Path, tokenizer: str | None, out: Path) -> int:
    """Write the page whenever the files at `path` change; a run that has not written a step yet is waited for."""
    pages: dict[_Stamped, PageStep] = {}
    written: list[_Stamped] = []
    said = ""
    while True:
        try:
            source = find_source(path, tokenizer)
            found = [_stamped(file) for file in source.paths]
            if found != written:
                write_page(source, out, str(path), pages)
                written = found
        except NoStepYetError as error:
            if str(error) != said:
                said = str(error)
                print(f"waiting: {said}", flush=True)
        time.sleep(_POLL_S)


def write_page(source: Source, out: Path, name: str, pages: dict[_Stamped, PageStep] | None = None) -> None:
    """Write the page of a source, and print what it holds.

    Args:
        source: what to show.
        out: the page.
        name (str): where the source is, for the reader.
        pages: finished steps, to which new ones are added; a followed page opens at its last step.
    """
    paths = thin_out(source.paths, source.size_limit)
    header, pages = source.header | {"follow": pages is not None}, {} if pages is None else pages
    steps = []
    for stamped in map(_stamped, paths):
        if stamped not in pages:
            pages[stamped] = page_step(source.read(stamped[0]))
        steps.append(pages[stamped])
    page = render(header, steps, token_pieces(source.tokenizer, {id for step in steps for id in step.ids}), name)
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


def _stamped(path: Path) -> _Stamped:
    status = path.stat()
    return path, status.st_mtime_ns, status.st_size
