"""What the token view reads: a token dump (`gtpo_verl.verl_plugin.token_dump`) or verl's own rollout files.

Both become completions with the fields of a dump's line. verl's files, `N.jsonl` under `trainer.rollout_data_dir`, hold
text without special tokens. This module tokenises it again. How a completion ended, how unsure the model was, and which
text a tool wrote are unknown. It computes from the scores what GTPO (arXiv:2508.03772) would do with its default
settings and without its filter. `trajectory_entropy`, `entropy` and `trainer_logprobs` are left out.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from gtpo_verl.algorithm.advantage import apply_gtpo, compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import GTPOConfig
from gtpo_verl.dumps import HEADER_NAME, SCHEMA_VERSION, STEP_FILES, last_outputs, read_lines
from gtpo_verl.records import read_record
from gtpo_verl.view.tokens import load_tokenizer

# What a completion of a dump must have, beside its uid; other lists have an entry per token too.
_NUMBERS = ("step", "reward", "group_advantage", "trajectory_entropy", "keep", "prefix_len", "suffix_len")
_IDS = ("prompt_ids", "token_ids")
_PER_TOKEN = ("response_mask", "loss_mask", "lambda", "advantages", "entropy", "trainer_logprobs")

# A page of about five million tokens is still opened by a browser in a moment.
_DUMP_BYTES, _ROLLOUT_BYTES = 256 << 20, 24 << 20


@dataclass(frozen=True)
class Source:
    """Where completions come from.

    Args:
        header: the settings of the run, as in `gtpo_dump.json`; `rollouts` is true for verl's own files.
        tokenizer: of the run.
        paths: a file per step, in the order of the steps.
        size_limit (int): bytes of such files that make a page.
        read: completions of one of these files.
    """

    header: dict[str, Any]
    tokenizer: Any
    paths: list[Path]
    size_limit: int
    read: Callable[[Path], list[dict[str, Any]]]


def find_source(path: Path, tokenizer: str | None = None) -> Source:
    """A token dump, or else verl's rollout files, in a folder or as one of its files.

    Args:
        path: a dump's folder, a folder above it, one of its files; or `trainer.rollout_data_dir`, or a file of it.
        tokenizer: folder or Hub name of the run's tokenizer; None: the one that the dump names.

    Raises:
        ValueError: there is neither, or more than one dump, or it is of another version, or there is no tokenizer.
    """
    headers = [path.parent / HEADER_NAME] if path.is_file() else sorted(path.rglob(HEADER_NAME))
    headers = [header for header in headers if header.is_file()]
    if headers:
        header, paths = _read_dump(path, headers)
        return Source(header, load_tokenizer(tokenizer or header["tokenizer"]), paths, _DUMP_BYTES, read_step)
    rollouts = sorted(_rollout_files(path), key=lambda file: int(file.stem))
    if not rollouts:
        raise ValueError(
            f"{path} has no {HEADER_NAME} and no N.jsonl: train with +algorithm.gtpo.dump_dir=DIR or "
            "trainer.rollout_data_dir=DIR and name that folder or a file of it"
        )
    if tokenizer is None:
        raise ValueError(f"{path} has verl's rollouts, which are text: name the run's tokenizer with --tokenizer")
    loaded, settings = load_tokenizer(tokenizer), GTPOConfig(completion_filter="never")
    header = {"rollouts": True, "gtpo_applied": False, "filter_active": False, "gtpo": asdict(settings)}
    return Source(header, loaded, rollouts, _ROLLOUT_BYTES, lambda file: _read_rollouts(file, loaded, settings))


# ---------------------------------------------------------------- a token dump


def _read_dump(path: Path, headers: list[Path]) -> tuple[dict[str, Any], list[Path]]:
    """Header and step files of the dump at or below a path."""
    if len(headers) > 1:
        raise ValueError(f"{path} has the dumps of several runs, name one: {', '.join(str(x.parent) for x in headers)}")
    header = read_record(headers[0], "schema_version", "tokenizer")
    if header["schema_version"] != SCHEMA_VERSION:
        raise ValueError(f"{headers[0]} has schema_version {header['schema_version']}, this is {SCHEMA_VERSION}")
    if not isinstance(header["tokenizer"], str):
        raise ValueError(f"{headers[0]} has tokenizer {header['tokenizer']!r}, which is not a name: give --tokenizer")
    steps = [path] if path.is_file() else sorted(headers[0].parent.glob(STEP_FILES))
    if not steps:
        raise ValueError(f"{headers[0].parent} has no {STEP_FILES}: the run has not dumped a step yet")
    return header, steps


def read_step(path: Path) -> list[dict[str, Any]]:
    """The completions of a step file, as `gtpo_verl.verl_plugin.token_dump` wrote them.

    Raises:
        ValueError: they are not; the message names the line.
    """
    return read_lines(path, _checked, "token dump")


def _checked(completion: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(completion["uid"], str) or not all(math.isfinite(completion[name]) for name in _NUMBERS):
        raise ValueError("uid is not text, or a number is not finite")
    if not all(type(x) is int and 0 <= x < 1 << 31 for name in _IDS for x in completion[name]):
        raise ValueError("a token id is out of range")
    per_token = {name for name, value in completion.items() if isinstance(value, list)} - {*_IDS}
    for name in per_token | {*_PER_TOKEN}:
        values = completion[name]
        if len(values) != len(completion["token_ids"]) or not math.isfinite(sum(filter(None, values))):
            raise ValueError(f"{name} is not a number or null for each token")
    return completion


# ---------------------------------------------------------------- verl's rollout files


def _rollout_files(path: Path) -> list[Path]:
    """The whole `N.jsonl` of verl at a path; the one that verl is writing does not end with a line's end yet."""
    files = [path] if path.is_file() else list(path.glob("*.jsonl"))
    return [file for file in files if file.stem.isdecimal() and file.suffix == ".jsonl" and _ends_a_line(file)]


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        return file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read() == b"\n"


def _read_rollouts(path: Path, tokenizer: Any, config: GTPOConfig) -> list[dict[str, Any]]:
    """The completions in a file of verl's rollouts, with what GTPO would do to them.

    A group is what has one `uid`, or, in files of verl's legacy trainer, one prompt; of a session with several outputs
    the last one counts. A_i is GRPO's, from the scores.

    Raises:
        ValueError: it is not such a file (the message names the line), or every prompt has one completion.
    """
    lines = read_lines(path, _checked_rollout, "rollout file of verl")
    own = [row for row in lines if row["output"] or not row.get("uid", "").startswith("pad")]  # others fill the batch
    rows = [row | {"uid": uid} for uid, group in last_outputs(own).items() for row in group]
    uids = [row["uid"] for row in rows]
    if len(set(uids)) == len(uids):
        raise ValueError(f"{path} has one completion per prompt, so no groups: is it of a validation?")
    prompts = _encode(tokenizer, [row["input"] for row in rows])
    outputs = _encode(tokenizer, [row["output"] for row in rows])
    if not any(_bare(tokenizer.decode(ids)) == _bare(row["output"]) for row, ids in zip(rows, outputs, strict=True)):
        raise ValueError(
            f"{path} is not text of the tokenizer {tokenizer.name_or_path}: name the run's with --tokenizer"
        )
    responses = pad_sequence([torch.tensor(ids, dtype=torch.int64) for ids in outputs], batch_first=True)
    response_len = torch.tensor([len(ids) for ids in outputs])
    mask = torch.arange(responses.shape[1]) < response_len.unsqueeze(-1)
    # An output without text, whose group is not to lose it, has no token for a mask.
    groups = Completions(torch.ones(len(rows), 1), uids)
    advantages = compute_group_advantages(torch.tensor([float(row["score"]) for row in rows]), groups)
    completions = Completions(mask, uids, [(row["uid"], row["input"]) for row in rows])
    result = apply_gtpo(advantages, completions, responses, torch.zeros(len(rows)), config)
    return [
        {
            "step": int(path.stem),
            "uid": row["uid"],
            "reward": row["score"],
            "scores": {key: row[key] for key in ("acc", "format", "strict") if isinstance(row.get(key), int | float)},
            "group_advantage": advantages[i].item(),
            "keep": True,
            "prefix_len": int(result.conflicts.prefix_len[i]),
            "suffix_len": int(result.conflicts.suffix_len[i]),
            "prompt_ids": prompts[i],
            "token_ids": ids,
            "response_mask": [1] * len(ids),
            "loss_mask": [1] * len(ids),
            "lambda": weights[: len(ids)],
            "advantages": [round(advantages[i].item(), 4)] * len(ids),
        }
        for i, (row, ids, weights) in enumerate(zip(rows, outputs, result.token_weights.tolist(), strict=True))
    ]


def _encode(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _bare(text: str) -> str:
    return "".join(text.split())


def _checked_rollout(row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row["input"], str) or not isinstance(row["output"], str):
        raise TypeError("input or output is not text")
    if not isinstance(row["score"], int | float) or not math.isfinite(row["score"]):
        raise ValueError(f"score is {row['score']!r}")
    if not isinstance(row.get("uid", ""), str):
        raise TypeError("uid is not text")
    return row
