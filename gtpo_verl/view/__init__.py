"""`gtpo-verl view`: what GTPO (arXiv:2508.03772) does to each token of a run, as one HTML file that needs nothing else.

It reads a token dump (`gtpo_verl.verl_plugin.token_dump`), decodes it, and puts it with `view.html`, `view.css` and
`view.js` into one file.
"""

import argparse
import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from gtpo_verl.records import read_record
from gtpo_verl.verl_plugin.token_dump import HEADER_NAME, SCHEMA_VERSION, STEP_FILES

# A page of about a quarter of this many bytes is still opened by a browser in a moment.
_DUMP_BYTES = 256 << 20
# What a completion must have, beside its uid.
_NUMBERS = ("step", "reward", "group_advantage", "trajectory_entropy", "keep", "prefix_len", "suffix_len")
_IDS = ("prompt_ids", "token_ids")
_PER_TOKEN = ("response_mask", "loss_mask", "lambda", "advantages", "entropy", "trainer_logprobs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.description = (
        "Write one HTML file that shows, for every token of a dumped run, whether GTPO protects, doubles or filters it."
    )
    parser.epilog = (
        "example: gtpo-verl view dump -o view.html\n\n"
        "a run that leaves a dump:\n"
        "  bash recipes/run_gtpo_cpu.sh +algorithm.gtpo.dump_dir=$PWD/dump +algorithm.gtpo.dump_freq=10"
    )
    parser.add_argument(
        "path", metavar="RUN_OR_FILE", type=Path, help="a run's dump_dir, a folder above it, or one step_*.jsonl of it"
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("view.html"), help="default: %(default)s")
    parser.add_argument("--tokenizer", help="folder or Hub name, where the run's own is no longer there")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    header, paths = find_dump(args.path)
    shown = thin_out(paths)
    steps = [read_step(path) for path in shown]
    pieces = token_pieces(load_tokenizer(args.tokenizer or header["tokenizer"]), used_ids(steps))
    page = render(header, steps, pieces, source=str(args.path))
    args.out.write_text(page, encoding="utf-8")
    completions = [completion for step in steps for completion in step]
    tokens = sum(len(completion["token_ids"]) for completion in completions)
    print(
        f"{args.out}: steps {len(steps)}, completions {len(completions)}, tokens {tokens}, {len(page) / 1e6:.1f} MB; "
        "open it in a browser"
    )
    if len(shown) < len(paths):
        print(f"{len(paths) - len(shown)} of {len(paths)} steps left out, evenly, for size; name a file to see one")
    return 0


def find_dump(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Header and step files of a dump, from its folder, a folder above it, or one of its step files.

    Raises:
        ValueError: there is none, or more than one, or it is of another version.
    """
    headers = [path.parent / HEADER_NAME] if path.is_file() else sorted(path.rglob(HEADER_NAME))
    headers = [header for header in headers if header.is_file()]
    if not headers:
        raise ValueError(
            f"{path} has no {HEADER_NAME}: train with +algorithm.gtpo.dump_dir=DIR and name that folder or a file of it"
        )
    if len(headers) > 1:
        raise ValueError(f"{path} has the dumps of several runs, name one: {', '.join(str(x.parent) for x in headers)}")
    header = read_record(headers[0], "schema_version", "tokenizer")
    if header["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{headers[0]} has schema_version {header['schema_version']}, this is {SCHEMA_VERSION}")
    if not isinstance(header["tokenizer"], str):
        raise ValueError(f"{headers[0]} has tokenizer {header['tokenizer']!r}, which is no name: give --tokenizer")
    steps = [path] if path.is_file() else sorted(headers[0].parent.glob(STEP_FILES))
    if not steps:
        raise ValueError(f"{headers[0].parent} has no {STEP_FILES}: the run has not dumped a step yet")
    return header, steps


def thin_out(paths: list[Path], size: int = _DUMP_BYTES) -> list[Path]:
    """Evenly spaced steps, the last among them, of no more than `size` bytes; one step at least."""
    while len(paths) > 1 and sum(path.stat().st_size for path in paths) > size:
        paths = paths[::-2][::-1]
    return paths


def read_step(path: Path) -> list[dict[str, Any]]:
    """The completions of a step file, as `gtpo_verl.verl_plugin.token_dump` wrote them.

    Raises:
        ValueError: they are not; the message names the line.
    """
    completions = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                completions.append(_checked(json.loads(line)))
            except (KeyError, RecursionError, TypeError, ValueError) as error:
                raise ValueError(f"{path}:{number} is not a line of a token dump ({error!r})") from error
    if not completions:
        raise ValueError(f"{path} holds no completion")
    return completions


def _checked(completion: dict[str, Any]) -> dict[str, Any]:
    numbers, ids, per_token = ([completion[name] for name in names] for names in (_NUMBERS, _IDS, _PER_TOKEN))
    if not isinstance(completion["uid"], str):
        raise TypeError("uid is no text")
    for name, values in zip((*_IDS, *_PER_TOKEN), [*ids, *per_token], strict=True):
        kinds = {int} if name in _IDS else {int, float, type(None)}
        if type(values) is not list or not kinds.issuperset(map(type, values)):
            raise TypeError(f"{name} is no list of numbers")
        numbers.append(sum(filter(None, values)))
        if name not in _IDS and len(values) != len(completion["token_ids"]):
            raise ValueError(f"{name} has {len(values)} tokens of {len(completion['token_ids'])}")
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in numbers):
        raise ValueError("a number is missing or not finite")
    if not all(0 <= x < 1 << 31 for x in chain(*ids)):
        raise ValueError("a token id is out of range")
    return completion


def used_ids(steps: Iterable[list[dict[str, Any]]]) -> set[int]:
    """Token ids that stand in prompts or completions."""
    ids: set[int] = set()
    for completion in (completion for step in steps for completion in step):
        ids.update(completion["prompt_ids"], completion["token_ids"])
    return ids


# ---------------------------------------------------------------- tokens


def load_tokenizer(name: str) -> Any:
    """The tokenizer in a folder, or of that name on the Hub.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer {name}: give its folder or Hub name with --tokenizer") from error


def token_pieces(tokenizer: Any, ids: Iterable[int]) -> dict[int, str | list[int]]:
    """What each token adds to a text: a string, or its bytes where they are not whole characters.

    Decoding tokens one by one would lose such bytes, so the vocabulary's own entries are read: those of a byte-level
    BPE spell each byte as a character, others have tokens like `<0xE2>`.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    byte_of = byte_level_alphabet()
    pieces: dict[int, str | list[int]] = {}
    for number in ids:
        piece = tokenizer.convert_ids_to_tokens(number)
        if number in added:
            pieces[number] = added[number]
        elif piece is None:
            pieces[number] = f"<{number}>"
        elif isinstance(piece, bytes):
            pieces[number] = _text_or_bytes(piece)
        elif is_byte_level and set(piece) <= byte_of.keys():
            pieces[number] = _text_or_bytes(bytes(byte_of[character] for character in piece))
        elif not is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            pieces[number] = _text_or_bytes(bytes([int(piece[3:5], 16)]))
        else:
            pieces[number] = piece if is_byte_level else piece.replace("▁", " ")
    return pieces


def byte_level_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level BPE vocabulary stands for.

    Printable bytes of Latin-1 stand for themselves, the others are numbered from U+0100 on.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _text_or_bytes(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


# ---------------------------------------------------------------- the page


def render(
    header: dict[str, Any], steps: list[list[dict[str, Any]]], pieces: dict[int, str | list[int]], source: str
) -> str:
    """The page; all data of the run in it is ASCII.

    Args:
        header: `gtpo_dump.json`.
        steps: completions of each step.
        pieces: of `token_pieces`.
        source (str): where the dump came from, for the reader.
    """
    summaries = [summarize(step) for step in steps]
    run_data = header | {
        "source": source,
        "pieces": pieces,
        "steps": summaries,
        "max_entropy": max(completion["trajectory_entropy"] for step in steps for completion in step),
    }
    data = [_data_element("run-data", run_data)]
    data += [_data_element(f"step-{s['step']}", list(_groups(step))) for s, step in zip(summaries, steps, strict=True)]
    script = _asset("view.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    parts = {
        "title": html.escape(f"GTPO token view: {source}"),
        "css": _asset("view.css"),
        "data": "\n".join(data),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    return re.sub(r"@(title|css|data|script|script_hash)@", lambda found: parts[found[1]], _asset("view.html"))


def summarize(step: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of a step for the strip: own tokens, how many GTPO protects, doubles and filters, and the mean reward."""
    summary = {"step": step[0]["step"], "tokens": 0, "protected": 0, "doubled": 0, "filtered": 0}
    for completion in step:
        trained = sum(completion["loss_mask"])
        summary["tokens"] += trained
        if not completion["keep"]:
            summary["filtered"] += trained
            continue
        weights = [x for x, is_trained in zip(completion["lambda"], completion["loss_mask"], strict=True) if is_trained]
        summary["protected"] += sum(x < 1 for x in weights)
        summary["doubled"] += sum(x > 1 for x in weights)
    return summary | {"reward": sum(completion["reward"] for completion in step) / len(step)}


def _groups(step: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Completions of the same prompt: one uid may have several prompts, which share no token positions."""
    groups: dict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for completion in step:
        groups.setdefault((completion["uid"], tuple(completion["prompt_ids"])), []).append(completion)
    for completions in groups.values():
        yield {"prompt": completions[0]["prompt_ids"], "completions": [_shown(x) for x in completions]}


def _shown(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion as `view.js` reads it: thousandths for entropies and log-probs, runs for what changes seldom."""
    return {
        "reward": completion["reward"],
        "A": completion["group_advantage"],
        "entropy": completion["trajectory_entropy"],
        "keep": completion["keep"],
        "prefix_len": completion["prefix_len"],
        "suffix_len": completion["suffix_len"],
        "ids": completion["token_ids"],
        "token_entropy": _thousandths(completion["entropy"]),
        "token_logprob": _thousandths(completion["trainer_logprobs"]),
        "lambda": _runs(completion["lambda"]),
        "advantages": _runs(completion["advantages"]),
        "own": _runs(completion["response_mask"]),
        "trained": _runs(completion["loss_mask"]),
    }


def _thousandths(values: list[float | None]) -> list[int | None]:
    return [None if x is None else round(1000 * x) for x in values]


def _runs(values: list[float]) -> list[tuple[int, float]]:
    return [(len(list(run)), value) for value, run in groupby(values)]


def _data_element(name: str, data: Any) -> str:
    """Data in a page; with every `<` escaped, no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
