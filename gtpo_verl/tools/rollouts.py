"""Read completions from a token dump, from verl's rollout files, or from the completions that TRL logs.

All are returned with the fields of a line of a dump (`gtpo_verl.verl_plugin.token_dump`). verl's `N.jsonl` and TRL's
`completions_N.parquet` hold text without special tokens. It is tokenised again, and what GTPO (arXiv:2508.03772) would
do is computed with its default settings and without the filter. Such completions lack `ended`, and the fields that need
the model's probabilities.
"""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run.dumps import HEADER_NAME, SCHEMA_VERSION, STEP_FILES, last_outputs, read_lines
from gtpo_verl.run.records import read_record
from gtpo_verl.tokens import decoded_fields, load_tokenizer, spell

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

# Keys that the header of a dump must have, and keys of its completions.
_HEADER = ("schema_version", "adv_estimator", "gtpo_applied", "tokenizer", "initial_entropy", "filter_active", "gtpo")
_NUMBERS = ("step", "reward", "group_advantage", "trajectory_entropy", "keep")
_CONFLICT_LENGTHS = ("prefix_len", "suffix_len")  # absent under weights of the user's own
_IDS = ("prompt_ids", "token_ids")
_PER_TOKEN = ("response_mask", "loss_mask", "lambda", "advantages", "entropy", "trainer_logprobs")
_OPTIONAL_PER_TOKEN = {"inference_logprobs"}
_OPTIONAL_TEXTS = ("prompt", "token_strings", "ended")
_KNOWN = {"uid", *_NUMBERS, *_CONFLICT_LENGTHS, *_IDS, *_PER_TOKEN, *_OPTIONAL_PER_TOKEN, *_OPTIONAL_TEXTS}
_LARGE = 1e30  # of smaller numbers neither a sum nor a mean overflows

# How many bytes of a dump, or of text, make the largest page of `gtpo-verl view`: about 25 MB of HTML either way.
_DUMP_BYTES = 32 << 20
_TEXT_BYTES = 24 << 20
# More text than this takes seconds to tokenise, so that a line says what is being read.
_LONG_BYTES = 1 << 20
# A larger file of text is refused; of a smaller one the first groups are shown.
_READ_BYTES = 256 << 20
# What a page shows of the parts of a reward.
_SCORES = ("acc", "format", "strict")


class Source(NamedTuple):
    """Completions on disk.

    Attributes:
        header: the settings, as in `gtpo_dump.json`; for text also what the files are (`rollouts`), and which advantage
            is shown (`advantage`).
        paths: a file per step.
        size_limit: how many bytes of them one page can show.
        read: returns the completions of a file, each with `prompt` and `token_strings`.
    """

    header: dict[str, Any]
    paths: list[Path]
    size_limit: int
    read: Callable[[Path], list[dict[str, Any]]]


def find_source(path: Path, tokenizer: str | None = None) -> Source:
    """Find the completions at a path, to be read later.

    Args:
        path: a token dump, verl's rollout files or TRL's completions, as a folder or as one of their files; for a dump
            also a folder above it.
        tokenizer: the run's, a folder or a name on the Hub. Text needs it.

    Raises:
        ValueError: there are none, they are of several runs or of another version, or the tokenizer is missing.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a folder with rollouts or a token dump, or a file of it")
    if path.is_dir():
        os.listdir(path)  # raises if it cannot be read, which rglob takes for an empty folder
        headers = sorted(path.rglob(HEADER_NAME))
    else:
        headers = [path.parent / HEADER_NAME]
    headers = [header for header in headers if header.is_file()]
    if headers:
        return _dump_source(path, headers, tokenizer)
    return _text_source(path, tokenizer)


def _dump_source(path: Path, headers: list[Path], tokenizer: str | None) -> Source:
    header, paths = _read_dump(path, headers)

    def read(file: Path) -> list[dict[str, Any]]:
        return read_step(file, header["tokenizer"], tokenizer)

    return Source(header=header, paths=paths, size_limit=_DUMP_BYTES, read=read)


def _text_source(path: Path, tokenizer: str | None) -> Source:
    files = sorted(_text_files(path), key=step_of)
    if not files:
        remedy = "train with +algorithm.gtpo.dump_dir=DIR or trainer.rollout_data_dir=DIR (TRL: log_completions=True)"
        raise ValueError(f"{path} has no {HEADER_NAME}, N.jsonl or completions_N.parquet: {remedy}")
    steps = {step_of(file) for file in files}
    if len(steps) < len(files):
        folders = ", ".join(sorted({str(file.parent) for file in files}))
        raise ValueError(f"{path} has rollouts of several runs: give one of {folders}")

    if files[0].suffix == ".jsonl":
        kind = "verl's rollout files"
        advantage = "GRPO's, from the scores"
        read_rows = _verl_rows
    else:
        kind = "TRL's completions"
        advantage = "the run's"
        read_rows = _trl_rows
    if tokenizer is None:
        raise ValueError(f"{path} has {kind}, which are text: name the run's tokenizer with --tokenizer")
    # Asked for before tokenizers, which is also in a smaller extra than the one that reads text.
    if find_spec("torch") is None:
        raise ModuleNotFoundError("no torch, which computes λ", name="torch")
    load_tokenizer(tokenizer)  # raises if there is none

    size = sum(file.stat().st_size for file in files)
    if size > _LONG_BYTES:
        print(f"reading {len(files)} files of text, {size >> 20} MB, with the tokenizer {tokenizer}", file=sys.stderr)
    config = GTPOConfig(completion_filter="never")

    def read(file: Path) -> list[dict[str, Any]]:
        return _completions_from_text(file, read_rows(file), tokenizer, config)

    header = {
        "rollouts": kind,
        "advantage": advantage,
        "gtpo_applied": False,
        "filter_active": False,
        "gtpo": asdict(config),
    }
    return Source(header=header, paths=files, size_limit=_TEXT_BYTES, read=read)


def thin_out(paths: list[Path], max_bytes: int) -> list[Path]:
    """Return evenly spaced steps, the last among them, of no more than `max_bytes`; one step at least."""
    while len(paths) > 1 and sum(path.stat().st_size for path in paths) > max_bytes:
        every_second_from_the_last = paths[::-2]
        paths = every_second_from_the_last[::-1]
    return paths


def _read_dump(path: Path, headers: list[Path]) -> tuple[dict[str, Any], list[Path]]:
    """Return a dump's header and the files of its steps; a ValueError if one is missing or damaged."""
    if len(headers) > 1:
        folders = ", ".join(str(header.parent) for header in headers)
        raise ValueError(f"{path} has dumps of several runs: give one of {folders}")
    (header_path,) = headers
    header = read_record(header_path, *_HEADER)
    version = header["schema_version"]
    if version != SCHEMA_VERSION:
        raise ValueError(f"{header_path} has schema_version {version!r}: read it with the gtpo-verl that wrote it")
    if not _is_valid_header(header):
        raise ValueError(f"{header_path} is corrupt: restore or delete it")

    if path.is_file():
        return header, [path]
    steps = [file for file in sorted(header_path.parent.glob(STEP_FILES)) if file.is_file()]
    if not steps:
        raise ValueError(f"{header_path.parent} has no {STEP_FILES}: the run has not dumped a step yet")
    return header, steps


def _is_valid_header(header: dict[str, Any]) -> bool:
    """Return whether a dump's header has a tokenizer and settings, and only finite numbers."""
    settings = header["gtpo"]
    if not isinstance(header["tokenizer"], str) or not isinstance(settings, dict):
        return False
    values = [*header.values(), *settings.values()]
    return all(_is_bounded_number(value) for value in values if isinstance(value, float))


def read_step(path: Path, dump_tokenizer: str, tokenizer: str | None = None) -> list[dict[str, Any]]:
    """Return the completions of a step file, with the text of their tokens.

    Args:
        path: a step of a dump.
        dump_tokenizer: the tokenizer that the dump names, for completions without text.
        tokenizer: the tokenizer that spells all tokens; None for the text that is in the dump.

    Raises:
        ValueError: a line is not as `gtpo_verl.verl_plugin.token_dump` wrote it, or `tokenizer` lacks a token.
    """
    lines = read_lines(path, _check_dump_line, "token dump", _DUMP_BYTES)
    completions = _drop_cut_group(path, lines)
    for completion in completions:
        if not tokenizer and "token_strings" in completion:
            continue
        loaded = load_tokenizer(tokenizer or dump_tokenizer)
        if tokenizer and any(loaded.id_to_token(token) is None for token in completion["token_ids"]):
            raise ValueError(f"{path} has tokens which the tokenizer {tokenizer} lacks: give the run's own")
        completion.update(decoded_fields(completion, loaded))
    return completions


def _drop_cut_group(path: Path, completions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the last group of a file that was read up to `_DUMP_BYTES`, which may be incomplete, and print a note."""
    if path.stat().st_size <= _DUMP_BYTES:
        return completions
    cut_uid = completions[-1]["uid"]
    complete = [completion for completion in completions if completion["uid"] != cut_uid]
    shown = complete or completions
    print(f"{path}: the first {len(shown)} completions, for size", file=sys.stderr)
    return shown


def _check_dump_line(completion: dict[str, Any]) -> dict[str, Any]:
    """Validate a line of a dump and return the fields that we know.

    Raises:
        ValueError, KeyError, TypeError: it is damaged.
    """
    numbers = [completion[name] for name in _NUMBERS]
    numbers += [completion.get(name, 0) for name in _CONFLICT_LENGTHS]
    if not isinstance(completion["uid"], str) or not all(abs(number) < _LARGE for number in numbers):
        raise ValueError("uid is not text, or a number is not finite")
    if type(completion["step"]) is not int or completion["step"] < 0:
        raise ValueError(f"step is {completion['step']!r}")
    for name in _IDS:
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in completion[name]):
            raise ValueError("a token id is out of range")

    length = len(completion["token_ids"])
    if "token_strings" in completion:
        words = completion["token_strings"]
        are_text = all(isinstance(text, str) for text in [completion["prompt"], *words])
        if not are_text or len(words) != length or not isinstance(completion["ended"], bool):
            raise ValueError("prompt or token_strings is not text, or ended is not true or false")

    given = _OPTIONAL_PER_TOKEN & completion.keys()
    for name in [*_PER_TOKEN, *given]:
        values = completion[name]
        # null and 0 pass
        are_bounded = all(abs(value) < _LARGE for value in values if value)
        if len(values) != length or not are_bounded:
            raise ValueError(f"{name} is not a number or null for each token")
    return {name: value for name, value in completion.items() if name in _KNOWN}


def _check_verl_line(row: dict[str, Any]) -> dict[str, Any]:
    """Validate a line of verl's rollout files, and return it."""
    texts = [row["input"], row["output"], row.get("uid", "")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("input, output or uid is not text")
    if not _is_bounded_number(row["score"]):
        raise ValueError(f"score is {row['score']!r}")
    return row


def _text_files(path: Path) -> list[Path]:
    """Return the finished `N.jsonl` of verl, or `completions_N.parquet` of TRL, at a path, except an evaluation's."""
    if path.is_file():
        candidates = [path]
    else:
        candidates = [*path.glob("*.jsonl"), *path.rglob("completions_*.parquet")]  # TRL writes into a subfolder
    files = []
    for file in candidates:
        if not file.is_file():
            continue
        is_verl = re.fullmatch(r"\d+\.jsonl", file.name) and _ends_with_newline(file)
        is_trl = re.fullmatch(r"completions_\d+\.parquet", file.name) and file.parent.name != "eval"
        if is_verl or is_trl:
            files.append(file)
    return files


def step_of(path: Path) -> int:
    """Return the step in the name of a file."""
    return int(re.findall(r"\d+", path.stem)[-1])


def _ends_with_newline(path: Path) -> bool:
    """Return whether a file of verl is finished: its last line ends with a newline."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def _verl_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row per session, its last output, without the rows with which verl pads a batch."""
    if path.stat().st_size > _READ_BYTES:
        raise ValueError(f"{path} holds more than {_READ_BYTES >> 20} MB of text: name another file")
    lines = read_lines(path, _check_verl_line, "rollout file of verl")
    # A row that pads the batch has a uid that begins with pad, and no output.
    outputs = [row for row in lines if row["output"] or not row.get("uid", "").startswith("pad")]
    rows = []
    for uid, group in last_outputs(outputs).items():
        rows += [row | {"uid": uid} for row in group]
    return rows


def _trl_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row per completion: a prompt is a group, the score sums the reward functions, the advantage is TRL's."""
    rows = []
    for logged in _read_parquet(path):
        prompt = _joined(logged.get("prompt"))
        output = _joined(logged.get("completion"))
        advantage = logged.get("advantage")
        if not isinstance(prompt, str) or not isinstance(output, str) or not _is_bounded_number(advantage):
            raise ValueError(f"{path} has no prompt and completion as text (images, tools), or is not of GRPOTrainer")

        rewards = {}  # every other column of numbers is a reward function
        for name, value in logged.items():
            if name not in ("step", "advantage") and _is_bounded_number(value):
                rewards[name] = float(value)
        row = {
            "uid": prompt,
            "input": prompt,
            "output": output,
            "advantage": advantage,
            "score": sum(rewards.values()),
        }
        rows.append(rewards | row)
    return sorted(rows, key=lambda row: row["uid"])  # a group stands together


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    # A small file may hold any amount of text: compressed, or one text for a thousand rows. So the declared size of a
    # row group is checked before it is decoded, and its rows are decoded and counted one by one.
    too_large = f"{path} holds more than {_READ_BYTES >> 20} MB of text: name another file"
    rows: list[dict[str, Any]] = []
    size = 0
    try:
        file = pyarrow.parquet.ParquetFile(path)
        for group in range(file.metadata.num_row_groups):
            if file.metadata.row_group(group).total_byte_size > _READ_BYTES:
                raise ValueError(too_large)
            for batch in file.iter_batches(1, row_groups=[group]):
                size += batch.nbytes
                if size > _READ_BYTES:
                    raise ValueError(too_large)
                rows += batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is no parquet file ({error})") from error
    return rows


def _joined(messages: Any) -> Any:
    """Join the contents of a conversation's messages; return anything else unchanged."""
    try:
        return "\n".join(message["content"] for message in messages)
    except (KeyError, TypeError):  # a plain text, or content that is not text
        return messages


def _completions_from_text(
    path: Path, rows: list[dict[str, Any]], tokenizer_name: str, config: GTPOConfig
) -> list[dict[str, Any]]:
    """Return the completions of rows of text, with what GTPO would do to their tokens."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from gtpo_verl.algorithm.advantage import compute_gtpo
    from gtpo_verl.algorithm.completions import Completions

    tokenizer = load_tokenizer(tokenizer_name)
    rows = _first_groups(path, rows)
    uids = [row["uid"] for row in rows]
    if len(set(uids)) == len(uids):
        raise ValueError(f"{path} has one completion per prompt, so no groups: is it of a validation?")

    prompts = _encode(tokenizer, [row["input"] for row in rows])
    outputs = _encode(tokenizer, [row["output"] for row in rows])
    words = [spell(tokenizer, ids) for ids in outputs]
    # One output that comes back as it was shows that this is the tokenizer.
    if not any(_is_spelt(row["output"], spelling) for row, spelling in zip(rows, words, strict=True)):
        raise ValueError(f"{path} is not text of the tokenizer {tokenizer_name}: name the run's with --tokenizer")

    responses = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in outputs], batch_first=True)
    mask = pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in outputs], batch_first=True)
    advantages = _group_advantages(rows, uids)
    result = compute_gtpo(
        advantages=advantages,
        responses=responses,
        response_mask=mask,
        group_ids=Completions(mask, uids, [row["input"] for row in rows]),
        entropy=None,
        config=config,
    )
    token_weights = result.token_weights.tolist()
    conflicts = result.conflicts
    assert conflicts is not None

    completions = []
    for i, (row, ids) in enumerate(zip(rows, outputs, strict=True)):
        completion = {
            "step": step_of(path),
            "uid": row["uid"],
            "reward": row["score"],
            "scores": {key: row[key] for key in _SCORES if isinstance(row.get(key), int | float)},
            "group_advantage": advantages[i].item(),
            "keep": True,
            "prompt": row["input"],
            "prompt_ids": prompts[i],
            "token_ids": ids,
            "token_strings": words[i],
            "response_mask": [1] * len(ids),
            "loss_mask": [1] * len(ids),
            "lambda": token_weights[i][: len(ids)],
            # As in a run without GTPO, which these files are of: λ is what GTPO would add.
            "advantages": [round(advantages[i].item(), 4)] * len(ids),
        }
        completion |= conflicts.lengths_of(i)
        completions.append(completion)
    return completions


def _group_advantages(rows: list[dict[str, Any]], uids: list[str]) -> "torch.Tensor":
    """Return A_i of each row, (bs,): the one that TRL logged, or GRPO's, from the scores."""
    import torch

    from gtpo_verl.algorithm.advantage import compute_group_advantages
    from gtpo_verl.algorithm.completions import Completions

    # An empty output has no token. A mask with one token each keeps it in the mean of its group.
    groups = Completions(torch.ones(len(rows), 1), uids)
    scores = torch.tensor([float(row["score"]) for row in rows])
    advantages = compute_group_advantages(scores, groups)
    if "advantage" not in rows[0]:
        return advantages
    trl_advantages = torch.tensor([float(row["advantage"]) for row in rows])
    # TRL's rounding can make an advantage of 0 slightly positive or negative. It is 0 where TRL's value is tiny and our
    # score is at its group's mean. Either alone is not enough: our score ignores the weights of the reward functions.
    is_at_mean = (advantages == 0) & (trl_advantages.abs() < 1e-3)
    return trl_advantages.masked_fill(is_at_mean, 0)


def _encode(tokenizer: "Tokenizer", texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _is_spelt(text: str, words: list[str]) -> bool:
    """Return whether the words are the text, but for white space."""
    return re.sub(r"\s", "", "".join(words)) == re.sub(r"\s", "", text)


def _first_groups(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first groups, until their outputs exceed `_TEXT_BYTES`, and print a note if some are left out."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["uid"])]
    shown = 0
    size = 0
    for group in groups:
        if size > _TEXT_BYTES:
            break
        shown += 1
        size += sum(len(row["output"]) for row in group)
    if shown < len(groups):
        print(f"{path}: the first {shown} of {len(groups)} groups, for size", file=sys.stderr)
    return [row for group in groups[:shown] for row in group]


def _is_bounded_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < _LARGE
