"""verl's validation dumps: the completions of each question, what is right, and what each votes for."""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from gtpo_verl.paper.pass_at_k import RIGHT, UNPARSED


@dataclass(frozen=True)
class Question:
    """The n completions of one question, in the order they were drawn.

    Attributes:
        name: The prompt, for messages.
        correct: Whether each completion is right.
        votes: What each completion votes for: ``RIGHT``, ``UNPARSED`` or a positive number per wrong answer. None if
            the dump has no ``pred``.
    """

    name: str
    correct: tuple[bool, ...]
    votes: tuple[int, ...] | None


def read_dump(path: str | Path) -> dict[str, list[Question]]:
    """The questions of a verl validation dump, by data set.

    Rows are one question if their ``uid`` is the same (the V1 trainer writes ``<uid>_<session>_<output>``: sessions are
    the draws, in order, and a session's last output is its answer), or, in a dump without ``uid`` (the V0 trainer), if
    their ``input`` is the same, in the order of the file. verl does not write the data source: rows are told apart by
    a ``data_source`` that the reward function returned, and are one data set named "" if there is none.

    Raises:
        ValueError: If the file is not such a dump, or does not say what is right: ``acc`` (``score`` in a dump without
            it) must be 0 or 1 in every row.
        ImportError: If it has ``pred`` and math-verify is not installed.
    """
    path = Path(path)
    if path.is_dir():
        steps = ", ".join(sorted(p.name for p in path.glob("*.jsonl"))) or "no *.jsonl"
        raise ValueError(f"{path} is a folder ({steps}): name one dump in it")
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number} is not JSON ({error}): is this a verl validation dump?") from error
            if not isinstance(row, dict) or "input" not in row or "output" not in row:
                raise ValueError(f"{path}:{number} has no `input` and `output`: is this a verl validation dump?")
            rows.append(row | {"_line": number})
    if not rows:
        raise ValueError(f"{path} holds no completions")

    if timeouts := sum(bool(row.get("timeout")) for row in rows):
        print(
            f"{path}: {timeouts} completions count as wrong because comparing their answer took too long",
            file=sys.stderr,
        )

    grade = "acc" if any("acc" in row for row in rows) else "score"
    has_pred = any(row.get("pred") is not None for row in rows)
    drawn: dict[tuple[str, str], dict[Any, tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        if row.get(grade) not in (0, 1):
            raise ValueError(
                f"{path}:{row['_line']}: {grade} is {row.get(grade)!r}, which does not say whether "
                "the answer is right: let the reward function return `acc` as 0 or 1 for every completion"
            )
        question, session, output = str(row["input"]), row["_line"], 0
        if row.get("uid") is not None:
            question = str(row["uid"])
            if match := re.fullmatch(r"(.+)_(\d+)_(\d+)", question):
                question, session, output = match[1], int(match[2]), int(match[3])
        source = str(row.get("data_source") or "")
        if not source.isprintable():
            raise ValueError(f"{path}:{row['_line']}: data_source is {source!r}: give it a name that can be printed")
        draws = drawn.setdefault((source, question), {})
        if session not in draws or output >= draws[session][0]:
            draws[session] = (output, row)

    data_sets: dict[str, list[Question]] = {}
    for (data_set, _), draws in drawn.items():
        completions = [row for _, (_, row) in sorted(draws.items())]
        correct = tuple(bool(row[grade]) for row in completions)
        votes = number_answers([_text(row.get("pred")) for row in completions], correct) if has_pred else None
        data_sets.setdefault(data_set, []).append(Question(str(completions[0]["input"]), correct, votes))
    return data_sets


def _text(pred: Any) -> str:
    return "" if pred is None else str(pred)


def benchmark_name(data_source: str) -> str:
    """The paper's name of its three out-of-distribution benchmarks, whatever prefix they carry; else as given."""
    name = data_source.rsplit("/", 1)[-1].lower()
    if match := re.fullmatch(r"\W*aime\D*(?:20)?(24|25)\D*", name):
        return f"AIME 20{match[1]}"
    if re.fullmatch(r"\W*amc\D*(?:20)?23\D*", name):
        return "AMC 2023"
    return data_source


def number_answers(preds: Sequence[str], correct: Sequence[bool]) -> tuple[int, ...]:
    """Number the answers of one question, "" being an unparsed one.

    All answers that the grader accepted equal the ground truth, so they are one answer, and so is every completion
    that spells one of them: ``acc`` may also ask for a format, a vote does not. An unparsed answer is never right.
    """
    answers = [_spelling(pred) for pred in preds]
    accepted = {answer for answer, ok in zip(answers, correct, strict=True) if ok}
    wrong = dict.fromkeys(answer for answer in answers if answer and answer not in accepted)
    numbers = {answer: number for number, answer in enumerate(wrong, start=1)}
    numbers |= {answer: RIGHT for answer in accepted} | {"": UNPARSED}
    return tuple(numbers[answer] for answer in answers)


@lru_cache(maxsize=100_000)
def _spelling(pred: str) -> str:
    # Imported here: pass@k does without the reward's math-verify.
    from gtpo_verl.paper.reward import MAX_ANSWER_CHARS, canonicalize

    return canonicalize(pred) if len(pred) <= MAX_ANSWER_CHARS else pred
