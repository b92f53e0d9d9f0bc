"""pass@k and maj@k of the paper (GTPO, arXiv:2508.03772, Sec. 6.1, Table 1).

    python3 -m recipes evaluate Qwen/MATH/GRPO=grpo/500.jsonl Qwen/MATH/GTPO=gtpo/500.jsonl --out results

reads verl's validation dumps: those that `recipes/evaluate.sh` samples, and those of a training run with
`trainer.validation_data_dir`, `val_kwargs.n=64` and `val_kwargs.do_sample=True`. Each figure is given twice, in percent
of the questions:

- *unbiased*: the mean over all k-subsets of a question's n completions, which is exact for pass@k (Chen et al.,
  arXiv:2107.03374) and for maj@k. (verl's best@k and maj@k draw with replacement, which is biased, and give a tie to
  the first answer seen.)
- *one draw*: the value on the first k completions. Nearly every cell of the paper's Table 1 is a multiple of 1/30
  (AIME) or 1/40 (AMC), so the paper seems to have drawn once; compare these figures with it.

The interval is a 95% percentile bootstrap over questions of the unbiased figure.
"""

import argparse
import csv
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gtpo_verl.run.dumps import last_outputs, read_lines

DEFAULT_K = (1, 4, 8, 16, 32, 64)
METRICS = ("pass", "maj")  # in the order of the table
RESAMPLES = 10_000
RIGHT, UNPARSED = 0, -1
"""Votes; a wrong answer has a positive number."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that k of n completions, drawn without replacement, hold one of the c right ones.

    This is arXiv:2107.03374's estimate; 1 <= k <= n.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[int], k: int) -> float:
    """Return the expected outcome of a vote among k of the completions, drawn without replacement; 1 <= k <= n."""
    counts = Counter(votes)
    right = counts.pop(RIGHT, 0)
    return _majority_at_k(right, tuple(sorted(counts.values())), k)


@lru_cache(maxsize=100_000)
def _majority_at_k(right: int, others: tuple[int, ...], k: int) -> float:
    # The votes that k draws give each answer are independent Binomial(count, k/n) variables conditioned on their sum
    # being k, so the mean over all C(n, k) subsets costs a small convolution per number of right votes.
    n = right + sum(others)
    p = k / n
    won = 0.0
    for j in range(1, min(right, k) + 1):  # the right answer gets j votes, the others share the rest
        rest = k - j
        # chance[t, s]: of the other answers so far, which share s votes, t hold exactly j and none holds more.
        chance = np.zeros((rest // j + 1, rest + 1))
        # Answers given fewer than j times cannot reach j, whatever is drawn: together they are one binomial.
        rare = _binomial(sum(count for count in others if count < j), p)[: rest + 1]
        chance[0, : len(rare)] = rare
        for count in others:
            if count < j:
                continue
            votes = _binomial(count, p)
            with_this_answer = np.zeros_like(chance)
            for v in range(min(j, rest + 1)):  # it gets fewer than j
                with_this_answer[:, v:] += votes[v] * chance[:, : rest + 1 - v]
            if j <= rest:  # it ties
                with_this_answer[1:, j:] += votes[j] * chance[:-1, : rest + 1 - j]
            chance = with_this_answer
        # Of t + 1 answers that tie each wins as often.
        won += _binomial(right, p)[j] * float((chance[:, rest] / np.arange(1, len(chance) + 1)).sum())
    return min(won / float(_binomial(n, p)[k]), 1.0)  # rounding


@lru_cache(maxsize=100_000)
def _binomial(n: int, p: float) -> np.ndarray:
    """Return the n + 1 probabilities of Binomial(n, p), 0 < p <= 1."""
    if p == 1.0:
        return np.eye(n + 1)[n]
    log_factorials = np.array([math.lgamma(number + 1) for number in range(n + 1)])
    successes = np.arange(n + 1)
    failures = n - successes
    log_ways = log_factorials[n] - log_factorials - log_factorials[::-1]
    return np.exp(log_ways + successes * math.log(p) + failures * math.log1p(-p))


def number_answers(preds: Sequence[str], correct: Sequence[bool]) -> tuple[int, ...]:
    """Return what each completion of a question votes for; "" is an unparsed answer, which is never right.

    All answers that the grader accepted equal the ground truth, so they are one answer, and so is every completion
    that spells one of them: ``acc`` may also ask for a format, a vote does not. Others are compared letter by letter:
    the ``pred`` of ``gtpo_verl.reward.score`` is in canonical form.
    """
    accepted = {answer for answer, is_right in zip(preds, correct, strict=True) if is_right}
    numbers = dict.fromkeys(accepted, RIGHT)
    numbers[""] = UNPARSED
    wrong_answers = 0
    for answer in preds:
        if answer not in numbers:
            wrong_answers += 1
            numbers[answer] = wrong_answers
    return tuple(numbers[answer] for answer in preds)


class Question(NamedTuple):
    """The n completions of a question, in the order they were drawn.

    ``votes`` is what each votes for, see :func:`number_answers`; None if the dump has no ``pred``.
    """

    name: str
    correct: tuple[bool, ...]
    votes: tuple[int, ...] | None


def read_dump(path: Path) -> dict[str, list[Question]]:
    """Return the questions of a verl validation dump, by data source.

    A question is a group of :func:`gtpo_verl.run.dumps.last_outputs`. verl does not write the data source: rows
    are told apart by a ``data_source`` that the reward function returned, and are one data set named "" if there is
    none.

    Raises:
        ValueError: If the file is not such a dump, or does not say what is right: ``acc`` (``score`` in a dump without
            it) must be 0 or 1 in every row.
    """
    if not path.exists():
        raise ValueError(f"No such file: {path}. Name a <step>.jsonl under trainer.validation_data_dir")
    if path.is_dir():
        names = ", ".join(sorted(file.name for file in path.iterdir()))
        raise ValueError(f"{path} is a folder ({names}): name one dump")
    rows_of_source: dict[str, list[dict[str, Any]]] = {}
    timeouts = 0
    for row in read_lines(path, _graded, "validation dump of verl"):
        rows_of_source.setdefault(row["data_source"], []).append(row)
        if row["timeout"]:
            timeouts += 1
    if timeouts:
        print(f"{path}: {timeouts} completions count as wrong: comparing their answer took too long", file=sys.stderr)
    questions = {}
    for source, rows in rows_of_source.items():
        questions[source] = [_question(draws) for draws in last_outputs(rows).values()]
    return questions


def _graded(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of a dump that the evaluation reads, checked."""
    grade = "acc" if "acc" in row else "score"
    source = str(row.get("data_source") or "")
    if row.get(grade) not in (0, 1):
        raise ValueError(
            f"{grade} is {row.get(grade)!r}, which does not say whether the answer is right: let the reward function "
            "return `acc` as 0 or 1 for every completion"
        )
    if not source.isprintable():
        raise ValueError(f"data_source is {source!r}: give it a name that can be printed")
    kept = {
        "input": str(row["input"]),
        "data_source": source,
        "timeout": bool(row.get("timeout")),
        "correct": bool(row[grade]),
        "pred": None,
    }
    if "pred" in row:
        kept["pred"] = str(row["pred"] or "").strip()
    if "uid" in row:
        kept["uid"] = str(row["uid"])
    return kept


def _question(draws: list[dict[str, Any]]) -> Question:
    """Return a question by the rows of its completions, in the order in which they were drawn."""
    correct = tuple(row["correct"] for row in draws)
    preds = [row["pred"] for row in draws]
    votes = None if None in preds else number_answers(preds, correct)
    return Question(draws[0]["input"], correct, votes)


class Label(NamedTuple):
    """Which run a dump comes from: the first three columns of the paper's Table 1."""

    model: str
    training_set: str
    method: str


class Record(NamedTuple):
    """One figure of a run on a data set: ``metric`` (pass or maj) at ``k``, in percent.

    ``estimate`` is the unbiased figure, ``low`` and ``high`` its 95% interval, ``draw`` the one-draw figure, ``paper``
    what the paper's Table 1 prints, or None.
    """

    model: str
    training_set: str
    method: str
    data_set: str
    questions: int
    completions: int
    metric: str
    k: int
    estimate: float
    low: float
    high: float
    draw: float
    paper: float | None


def evaluate(
    label: Label, data_set: str, questions: list[Question], ks: Iterable[int] = DEFAULT_K, samples: int | None = None
) -> list[Record]:
    """Return pass@k and, from k = 2 on, maj@k of one run on one data set, for every k up to the number of completions.

    Raises:
        ValueError: If the questions have different numbers of completions, or others than ``samples``.
    """
    name = " ".join(part for part in [*label, data_set] if part)
    n = samples or max(len(question.correct) for question in questions)
    _require_completions(name, questions, n)
    too_large = [k for k in ks if k > n]
    if too_large:
        print(f"{name}: left out k = {too_large}, a question has {n} completions (val_kwargs.n)", file=sys.stderr)
    votes = [question.votes for question in questions if question.votes is not None]
    has_votes = len(votes) == len(questions)
    if not has_votes:
        print(f"{name}: no maj@k, the dump has no `pred`: let the reward function return it", file=sys.stderr)

    # In each list a row per figure, with the value of each question.
    figures: list[tuple[str, int]] = []
    unbiased_rows = []
    draw_rows = []
    for k in sorted(set(ks) - set(too_large)):
        figures.append(("pass", k))
        unbiased_rows.append([pass_at_k(n, sum(question.correct), k) for question in questions])
        draw_rows.append([float(any(question.correct[:k])) for question in questions])
        if k > 1 and has_votes:
            figures.append(("maj", k))
            unbiased_rows.append([majority_at_k(vote, k) for vote in votes])
            draw_rows.append([majority_at_k(vote[:k], k) for vote in votes])
    if not figures:
        return []

    unbiased = 100.0 * np.array(unbiased_rows)
    draws = 100.0 * np.array(draw_rows)
    low, high = _bootstrap(unbiased)
    papers = _paper_table().get(Label(*map(str.lower, label)), {})
    records = []
    for row, (metric, k) in enumerate(figures):
        printed = papers.get(f"{data_set.lower()} {metric}@{k}")
        records.append(
            Record(
                model=label.model,
                training_set=label.training_set,
                method=label.method,
                data_set=data_set,
                questions=len(questions),
                completions=n,
                metric=metric,
                k=k,
                estimate=unbiased[row].mean().item(),
                low=low[row].item(),
                high=high[row].item(),
                draw=draws[row].mean().item(),
                paper=float(printed) if printed else None,
            )
        )
    return records


def _require_completions(name: str, questions: list[Question], n: int) -> None:
    """Raise a ValueError where a question has another number of completions than `n`."""
    wrong = [question for question in questions if len(question.correct) != n]
    if not wrong:
        return
    least = min(wrong, key=lambda question: len(question.correct))
    if len(least.correct) < n:
        remedy = "completions are lost. Sample them again; bash recipes/evaluate.sh samples what is missing"
    else:
        remedy = f"give --samples {len(least.correct)}, or leave it out"
    raise ValueError(
        f"{name}: {len(wrong)} of {len(questions)} questions do not have {n} completions "
        f"({len(least.correct)} for {least.name[-60:]!r}): {remedy}"
    )


def _bootstrap(values: np.ndarray) -> np.ndarray:
    """Return the 95% percentile intervals of the means over questions, (2, figures), of values (figures, questions).

    All figures see the same resampled questions. The interval is too narrow below some hundred questions that are
    mostly right or mostly wrong.
    """
    count = values.shape[1]
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(40):  # parts, to bound the memory at a few thousand questions
        times_drawn = rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES // 40)
        parts.append(times_drawn @ values.T)
    return np.percentile(np.concatenate(parts) / count, [2.5, 97.5], axis=0)


@lru_cache(maxsize=1)
def _paper_table() -> dict[Label, dict[str, str]]:
    """Return the rows of the paper's Table 1, in percent, all in lower case."""
    table = {}
    with Path(__file__).with_name("table1.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(map(str.lower, file)):
            label = Label(model=row["model"], training_set=row["training_set"], method=row["method"])
            table[label] = row
    return table


def table(records: Iterable[Record]) -> str:
    """Return a row of Markdown per figure, those of different runs below each other."""
    lines = [
        ["Model", "Dataset", "Method", "", "paper", "one draw", "unbiased", "95% interval"],
        ["---"] * 8,
    ]
    for record in sorted(records, key=lambda record: (record.data_set, METRICS.index(record.metric), record.k)):
        paper = "" if record.paper is None else f"{record.paper:.1f}"
        interval = ""  # where all questions agree
        if record.low < record.high:
            interval = f"{record.low:.1f}–{record.high:.1f}"
        lines.append(
            [
                record.model,
                record.training_set,
                record.method,
                f"{record.data_set} {record.metric}@{record.k}".strip(),
                paper,
                f"{record.draw:.1f}",
                f"{record.estimate:.1f}",
                interval,
            ]
        )
    rendered = ""
    for line in lines:
        cells = [cell.replace("|", "\\|") for cell in line]
        rendered += f"| {' | '.join(cells)} |\n"
    return rendered


def parse_dump_argument(argument: str) -> tuple[Label, str, Path]:
    """Read ``MODEL/TRAINING SET/METHOD[/DATA SET]=DUMP``, ``METHOD=DUMP`` or ``DUMP``.

    Returns:
        The label, the data set ("" if none is named) and the path.

    Raises:
        ValueError: If the label has another number of parts.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).exists():
        return Label("", "", Path(argument).stem), "", Path(argument)
    parts = [part.strip() for part in name.split("/")]
    if len(parts) == 1:
        return Label("", "", parts[0]), "", Path(path)
    if len(parts) not in (3, 4):
        raise ValueError(
            f"label {name!r}: write METHOD, MODEL/TRAINING SET/METHOD or MODEL/TRAINING SET/METHOD/DATA SET"
        )
    return Label(*parts[:3]), parts[3] if len(parts) == 4 else "", Path(path)


def evaluate_dumps(arguments: Iterable[str], ks: Sequence[int] = DEFAULT_K, samples: int | None = None) -> list[Record]:
    """Return the records of all dumps, in the order given; see :func:`parse_dump_argument` and :func:`read_dump`.

    Raises:
        ValueError: If a dump names its data sets and its label another one, or two dumps of one label and data set
            share a question.
    """
    questions: dict[tuple[Label, str], list[Question]] = {}
    for argument in arguments:
        label, named, path = parse_dump_argument(argument)
        for source, read in read_dump(path).items():
            data_set = named or source
            if source not in ("", data_set):
                raise ValueError(f"{path} has rows of {source!r}: drop the data set {named!r} from its label")
            held = questions.setdefault((label, data_set), [])
            again = {question.name for question in held} & {question.name for question in read}
            if again:
                raise ValueError(
                    f"{path} repeats {len(again)} questions of an earlier dump labelled {label.method!r} "
                    f"(such as {min(again)[-60:]!r}): give each run and step its own label"
                )
            held += read
    records = []
    for (label, data_set), held in questions.items():
        records += evaluate(label, data_set, held, ks, samples)
    return records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python3 -m recipes evaluate``."""
    parser.description = "Compute pass@k and maj@k from verl's validation dumps, beside the paper's Table 1."
    parser.epilog = (
        "example: python3 -m recipes evaluate Qwen/MATH/GRPO=grpo.jsonl Qwen/MATH/GTPO=gtpo.jsonl --out results\n\n"
        "bash recipes/evaluate.sh CHECKPOINT samples the completions."
    )
    parser.add_argument(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help="<step>.jsonl under trainer.validation_data_dir, or LABEL=DUMP, LABEL being "
        '"METHOD", "MODEL/TRAINING SET/METHOD" or "MODEL/TRAINING SET/METHOD/DATA SET"; the paper\'s own are LLaMA or '
        "Qwen, GSM8K or MATH, SFT, GRPO or GTPO",
    )
    parser.add_argument("--k", nargs="+", type=int, default=list(DEFAULT_K), help="default: 1 4 8 16 32 64")
    parser.add_argument("--samples", type=int, help="completions that every question must have (default: any number)")
    parser.add_argument("--out", type=Path, help="folder for table.md and evaluation.json, which has every figure")


def run(args: argparse.Namespace) -> int:
    """Print the table, and write it with all figures into ``--out``."""
    if min(args.k) < 1:
        raise ValueError(f"--k must be at least 1, got {min(args.k)}")
    records = evaluate_dumps(args.dumps, args.k, args.samples)
    if not records:
        raise ValueError("no k is left to report: no question has that many completions")
    rendered = table(records)
    print(rendered, end="")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(rendered, encoding="utf-8")
        document = {"resamples": RESAMPLES, "records": [record._asdict() for record in records]}
        (args.out / "evaluation.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0
