"""A token dump (`gtpo_verl.verl_plugin.token_dump`), verl's own rollout files, or the completions that TRL logs.

All become completions with the fields of a dump's line. verl's `N.jsonl` and TRL's `completions_N.parquet` hold text
without special tokens, which is tokenised again; what GTPO (arXiv:2508.03772) would do is computed with its default
settings, but for the filter. `ended` and what needs the model's probabilities are left out.
"""

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.run_files.dumps import HEADER_NAME, SCHEMA_VERSION, STEP_FILES, last_outputs, read_lines
from gtpo_verl.run_files.records import read_record
from gtpo_verl.run_files.tokens import load_tokenizer, spell, words_of

# What a dump's header and its completions must have, beside the latter's uid; other lists have an entry per token too.
_HEADER = ("schema_version", "adv_estimator", "gtpo_applied", "tokenizer", "initial_entropy", "filter_active", "gtpo")
_NUMBERS = ("step", "reward", "group_advantage", "trajectory_entropy", "keep")
_ENDS = ("prefix_len", "suffix_len")  # not of a user's own mask
_IDS = ("prompt_ids", "token_ids")
_PER_TOKEN = ("response_mask", "loss_mask", "lambda", "advantages", "entropy", "trainer_logprobs")
_OF_AN_ENGINE = {"inference_logprobs"}  # per token, where the run has them
_KNOWN = {"uid", *_NUMBERS, *_ENDS, *_IDS, *_PER_TOKEN, *_OF_AN_ENGINE, "prompt", "token_strings", "ended"}
_LARGE = 1e30  # of which neither a sum nor a mean overflows

# What a page shows of a dump, of which it takes four fifths, and of text, which becomes as large a page.
_DUMP_BYTES = 32 << 20
_TEXT_BYTES = 24 << 20
_READ_BYTES = 256 << 20  # of one file of text, of which the page then has the first groups
_SCORES = ("acc", "format", "strict")


class Source(NamedTuple):
    """Completions on disk, a file per step in `paths`, of which `size_limit` bytes make a page.

    `read` returns the completions of a file, each with `prompt` and `token_strings`. `header` has the settings, as in
    `gtpo_dump.json`; for text it also says what the files are (`rollouts`) and whose A is shown (`advantage`).
    """

    header: dict[str, Any]
    paths: list[Path]
    size_limit: int
    read: Callable[[Path], list[dict[str, Any]]]


def find_source(path: Path, tokenizer: str | None = None) -> Source:
    """Return the completions at a path: a token dump, verl's rollout files or TRL's completions, in a folder or as one
    of its files; of a dump a folder above it too. Text needs the run's `tokenizer`, a folder or a name on the Hub. A
    ValueError if there is none, more than one dump, one of another version, or no tokenizer."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a folder with rollouts or a token dump, or a file of it")
    if path.is_dir():
        os.listdir(path)  # an error if it cannot be read, which rglob takes for an empty one
    headers = [path.parent / HEADER_NAME] if path.is_file() else sorted(path.rglob(HEADER_NAME))
    headers = [header for header in headers if header.is_file()]
    if headers:
        header, paths = _read_dump(path, headers)
        return Source(header, paths, _DUMP_BYTES, lambda file: read_step(file, header["tokenizer"], tokenizer))
    files = sorted(_text_files(path), key=step_of)
    if not files:
        remedy = "train with +algorithm.gtpo.dump_dir=DIR or trainer.rollout_data_dir=DIR (TRL: log_completions=True)"
        raise ValueError(f"{path} has no {HEADER_NAME}, N.jsonl or completions_N.parquet: {remedy}")
    if len({*map(step_of, files)}) < len(files):
        folders = ", ".join(sorted({str(file.parent) for file in files}))
        raise ValueError(f"{path} has rollouts of several runs: give one of {folders}")
    if files[0].suffix == ".jsonl":
        of, read_rows, a = "verl's rollout files", _verl_rows, "GRPO's, from the scores"
    else:
        of, read_rows, a = "TRL's completions", _trl_rows, "the run's"
    if tokenizer is None:
        raise ValueError(f"{path} has {of}, which are text: name the run's tokenizer with --tokenizer")
    name, settings = tokenizer, GTPOConfig(completion_filter="never")
    load_tokenizer(name)
    if (size := sum(file.stat().st_size for file in files)) > 1 << 20:
        print(f"reading {len(files)} files of text, {size >> 20} MB, with the tokenizer {name}", file=sys.stderr)
    header = {"rollouts": of, "advantage": a, "gtpo_applied": False, "filter_active": False, "gtpo": asdict(settings)}
    return Source(header, files, _TEXT_BYTES, lambda file: _read_text(file, read_rows(file), name, settings))


def thin_out(paths: list[Path], size: int) -> list[Path]:
    """Return evenly spaced steps, the last among them, of no more than `size` bytes; one step at least."""
    while len(paths) > 1 and sum(path.stat().st_size for path in paths) > size:
        paths = paths[::-2][::-1]
    return paths


def _read_dump(path: Path, headers: list[Path]) -> tuple[dict[str, Any], list[Path]]:
    if len(headers) > 1:
        raise ValueError(f"{path} has dumps of several runs: give one of {', '.join(str(x.parent) for x in headers)}")
    header = read_record(headers[0], *_HEADER)
    if (found := header["schema_version"]) != SCHEMA_VERSION:
        raise ValueError(f"{headers[0]} has schema_version {found!r}: read it with the gtpo-verl that wrote it")
    settings = header["gtpo"].values() if isinstance(header["gtpo"], dict) else [math.nan]
    floats = [x for x in (*header.values(), *settings) if isinstance(x, float)]
    if not isinstance(header["tokenizer"], str) or not all(map(_is_number, floats)):
        raise ValueError(f"{headers[0]} is corrupt: restore or delete it")
    steps = [path] if path.is_file() else [x for x in sorted(headers[0].parent.glob(STEP_FILES)) if x.is_file()]
    if not steps:
        raise ValueError(f"{headers[0].parent} has no {STEP_FILES}: the run has not dumped a step yet")
    return header, steps


def read_step(path: Path, own: str, given: str | None = None) -> list[dict[str, Any]]:
    """Return a step file's completions, in words of the `given` tokenizer, else their own, else the `own` tokenizer's.
    A ValueError names a line that is not as `gtpo_verl.verl_plugin.token_dump` wrote it."""
    completions = _whole_groups(path, read_lines(path, _checked, "token dump", _DUMP_BYTES))
    for completion in completions:
        if given or "token_strings" not in completion:
            tokenizer, ids = load_tokenizer(given or own), completion["token_ids"]
            if given and any(tokenizer.id_to_token(token) is None for token in ids):
                raise ValueError(f"{path} has tokens which the tokenizer {given} lacks: give the run's own")
            completion.update(words_of(completion, tokenizer))
    return completions


def _whole_groups(path: Path, completions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the completions that were read of a step, without those of a group that may go on, and say so."""
    if path.stat().st_size <= _DUMP_BYTES:
        return completions
    cut = completions[-1]["uid"]
    whole = [completion for completion in completions if completion["uid"] != cut]
    shown = whole or completions
    print(f"{path}: the first {len(shown)} completions, for size", file=sys.stderr)
    return shown


def _checked(completion: dict[str, Any]) -> dict[str, Any]:
    numbers = [completion[name] for name in _NUMBERS] + [completion.get(name, 0) for name in _ENDS]
    if not isinstance(completion["uid"], str) or not all(abs(x) < _LARGE for x in numbers):
        raise ValueError("uid is not text, or a number is not finite")
    if type(completion["step"]) is not int or completion["step"] < 0:
        raise ValueError(f"step is {completion['step']!r}")
    if not all(type(x) is int and 0 <= x < 1 << 31 for name in _IDS for x in completion[name]):
        raise ValueError("a token id is out of range")
    if "token_strings" in completion:
        texts = [completion["prompt"], *completion["token_strings"]]
        are_text = len(texts) == 1 + len(completion["token_ids"]) and all(isinstance(x, str) for x in texts)
        if not are_text or not isinstance(completion["ended"], bool):
            raise ValueError("prompt or token_strings is not text, or ended is not true or false")
    for name in (*_PER_TOKEN, *(_OF_AN_ENGINE & completion.keys())):
        values = completion[name]
        if len(values) != len(completion["token_ids"]) or not all(abs(x) < _LARGE for x in filter(None, values)):
            raise ValueError(f"{name} is not a number or null for each token")
    return {name: value for name, value in completion.items() if name in _KNOWN}


def _text_files(path: Path) -> list[Path]:
    """Return the whole `N.jsonl` of verl, or `completions_N.parquet` of TRL, at a path, but those of an evaluation."""
    files = [path] if path.is_file() else [*path.glob("*.jsonl"), *path.rglob("completions_*.parquet")]
    files = [x for x in files if x.is_file() and re.fullmatch(r"\d+\.jsonl|completions_\d+\.parquet", x.name)]
    return [x for x in files if (_ends_a_line(x) if x.suffix == ".jsonl" else x.parent.name != "eval")]


def step_of(path: Path) -> int:
    """Return the step in the name of a file."""
    return int(re.findall(r"\d+", path.stem)[-1])


def _ends_a_line(path: Path) -> bool:
    """Return whether verl has written it whole."""
    with path.open("rb") as file:
        return file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read() == b"\n"


def _verl_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row per completion: of a session with several outputs the last, and no padding of the batch."""
    if path.stat().st_size > _READ_BYTES:
        raise ValueError(f"{path} holds more than {_READ_BYTES >> 20} MB of text: name another file")
    lines = read_lines(path, _checked_rollout, "rollout file of verl")
    own = [row for row in lines if row["output"] or not row.get("uid", "").startswith("pad")]
    return [row | {"uid": uid} for uid, group in last_outputs(own).items() for row in group]


def _trl_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row per completion: a prompt is a group, the score the sum of the reward functions, and A TRL's."""
    import pyarrow
    import pyarrow.parquet

    # A small file may hold any amount of text: compressed, or one text for a thousand rows. What is stored is looked at
    # before it is unpacked, and rows are unpacked one by one.
    too_large = f"{path} holds more than {_READ_BYTES >> 20} MB of text: name another file"
    table: list[dict[str, Any]] = []
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
                table += batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path} is no parquet file ({error})") from error
    rows = []
    for row in table:
        prompt, output, a = _joined(row.get("prompt")), _joined(row.get("completion")), row.get("advantage")
        if not (isinstance(prompt, str) and isinstance(output, str) and _is_number(a)):
            raise ValueError(f"{path} has no prompt and completion as text (images, tools), or is not of GRPOTrainer")
        rewards = {name: float(x) for name, x in row.items() if name not in ("step", "advantage") and _is_number(x)}
        own = {"uid": prompt, "input": prompt, "output": output, "advantage": a, "score": sum(rewards.values())}
        rows.append(rewards | own)
    return sorted(rows, key=lambda row: row["uid"])


def _joined(messages: Any) -> Any:
    """Return the text of a conversation's messages."""
    try:
        return "\n".join(message["content"] for message in messages)
    except (KeyError, TypeError):  # text, or content that is none
        return messages


def _read_text(path: Path, rows: list[dict[str, Any]], name: str, config: GTPOConfig) -> list[dict[str, Any]]:
    """Return completions that are text, with what GTPO would do to them; A_i is the rows' `advantage`, or GRPO's."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from gtpo_verl.algorithm.advantage import compute_group_advantages, compute_gtpo
    from gtpo_verl.algorithm.completions import Completions

    tokenizer = load_tokenizer(name)
    rows = _first_groups(path, rows)
    uids = [row["uid"] for row in rows]
    if len(set(uids)) == len(uids):
        raise ValueError(f"{path} has one completion per prompt, so no groups: is it of a validation?")
    texts = ([row[key] for row in rows] for key in ("input", "output"))
    prompts, outputs = ([x.ids for x in tokenizer.encode_batch(text, add_special_tokens=False)] for text in texts)
    words = [spell(tokenizer, ids) for ids in outputs]
    spelt = (re.sub(r"\s", "", "".join(found)) for found in words)
    if not any(text == re.sub(r"\s", "", row["output"]) for text, row in zip(spelt, rows, strict=True)):
        raise ValueError(f"{path} is not text of the tokenizer {name}: name the run's with --tokenizer")
    responses = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in outputs], batch_first=True)
    mask = pad_sequence([torch.ones(len(ids), dtype=torch.bool) for ids in outputs], batch_first=True)
    # An output without text, whose group is not to lose it, has no token for a mask.
    groups = Completions(torch.ones(len(rows), 1), uids)
    advantages = compute_group_advantages(torch.tensor([float(row["score"]) for row in rows]), groups)
    if "advantage" in rows[0]:
        own = torch.tensor([float(row["advantage"]) for row in rows])
        # TRL's rounding can leave a sign at the mean; the sum is without weights, and may be at its mean by chance.
        advantages = own.masked_fill((advantages == 0) & (own.abs() < 1e-3), 0)
    completions = Completions(mask, uids, [(row["uid"], row["input"]) for row in rows])
    result = compute_gtpo(
        advantages=advantages,
        responses=responses,
        response_mask=mask,
        group_ids=completions,
        entropy=None,
        config=config,
    )
    return [
        {
            "step": step_of(path),
            "uid": row["uid"],
            "reward": row["score"],
            "scores": {key: row[key] for key in _SCORES if isinstance(row.get(key), int | float)},
            "group_advantage": advantages[i].item(),
            "keep": True,
            **result.conflicts.ends(i),
            "prompt": row["input"],
            "prompt_ids": prompts[i],
            "token_ids": ids,
            "token_strings": words[i],
            "response_mask": [1] * len(ids),
            "loss_mask": [1] * len(ids),
            "lambda": weights[: len(ids)],
            "advantages": [round(advantages[i].item(), 4)] * len(ids),
        }
        for i, (row, ids, weights) in enumerate(zip(rows, outputs, result.token_weights.tolist(), strict=True))
    ]


def _first_groups(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many whole groups as make a page, and say so if they are not all."""
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["uid"])]
    sizes = accumulate((sum(len(row["output"]) for row in group) for group in groups), initial=0)
    shown = [group for group, before in zip(groups, sizes, strict=False) if before <= _TEXT_BYTES]
    if len(shown) < len(groups):
        print(f"{path}: the first {len(shown)} of {len(groups)} groups, for size", file=sys.stderr)
    return [row for group in shown for row in group]


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and abs(x) < _LARGE


def _checked_rollout(row: dict[str, Any]) -> dict[str, Any]:
    if not all(isinstance(x, str) for x in (row["input"], row["output"], row.get("uid", ""))):
        raise ValueError("input, output or uid is not text")
    if not _is_number(row["score"]):
        raise ValueError(f"score is {row['score']!r}")
    return row
