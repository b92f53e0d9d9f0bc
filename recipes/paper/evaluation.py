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

from gtpo_verl.run_files.dumps import last_outputs, read_lines

DEFAULT_K = (1, 4, 8, 16, 32, 64)
RESAMPLES = 10_000
RIGHT, UNPARSED = 0, -1
"""Votes; a wrong answer has a positive number."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n completions, drawn without replacement, hold one of the c right ones (arXiv:2107.03374);
    1 <= k <= n."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(votes: Sequence[int], k: int) -> float:
    """Expected outcome of a majority vote among k of the completions, drawn without replacement; 1 <= k <= n."""
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
    for j in range(1, min(right, k) + 1):
        rest = k - j
        # chance[t, s]: the other answers share s votes, t of them hold exactly j and none holds more.
        chance = np.zeros((rest // j + 1, rest + 1))
        # Answers given fewer than j times cannot reach j, whatever is drawn: together they are one binomial.
        rare = _binomial(sum(count for count in others if count < j), p)[: rest + 1]
        chance[0, : len(rare)] = rare
        for count in others:
            if count < j:
                continue
            votes = _binomial(count, p)
            longer = np.zeros_like(chance)
            for v in range(min(j, rest + 1)):
                longer[:, v:] += votes[v] * chance[:, : rest + 1 - v]
            if j <= rest:
                longer[1:, j:] += votes[j] * chance[:-1, : rest + 1 - j]
            chance = longer
        won += _binomial(right, p)[j] * float((chance[:, rest] / np.arange(1, len(chance) + 1)).sum())
    return min(won / float(_binomial(n, p)[k]), 1.0)  # rounding


@lru_cache(maxsize=100_000)
def _binomial(n: int, p: float) -> np.ndarray:
    """The n + 1 probabilities of Binomial(n, p), 0 < p <= 1."""
    if p == 1.0:
        return np.eye(n + 1)[n]
    log_comb = np.array([math.lgamma(n + 1) - math.lgamma(v + 1) - math.lgamma(n - v + 1) for v in range(n + 1)])
    v = np.arange(n + 1)
    return np.exp(log_comb + v * math.log(p) + (n - v) * math.log1p(-p))


def number_answers(preds: Sequence[str], correct: Sequence[bool]) -> tuple[int, ...]:
    """What each completion of a question votes for; "" is an unparsed answer, which is never right.

    All answers that the grader accepted equal the ground truth, so they are one answer, and so is every completion
    that spells one of them: ``acc`` may also ask for a format, a vote does not. Others are compared letter by letter:
    the ``pred`` of ``gtpo_verl.reward.score`` is in canonical form.
    """
    accepted = {answer for answer, ok in zip(preds, correct, strict=True) if ok}
    wrong = dict.fromkeys(answer for answer in preds if answer and answer not in accepted)
    numbers = {answer: number for number, answer in enumerate(wrong, start=1)}
    numbers |= {answer: RIGHT for answer in accepted} | {"": UNPARSED}
    return tuple(numbers[answer] for answer in preds)


class Question(NamedTuple):
    """The n completions of a question, in the order they were drawn.

    ``votes`` is what each votes for, see :func:`number_answers`; None if the dump has no ``pred``.
    """

    name: str
    correct: tuple[bool, ...]
    votes: tuple[int, ...] | None


def read_dump(path: Path) -> dict[str, list[Question]]:
    """The questions of a verl validation dump, by data source.

    A question is a group of :func:`gtpo_verl.run_files.dumps.last_outputs`. verl does not write the data source: rows
    are told apart by a ``data_source`` that the reward function returned, and are one data set named "" if there is
    none.

    Raises:
        ValueError: If the file is not such a dump, or does not say what is right: ``acc`` (``score`` in a dump without
            it) must be 0 or 1 in every row.
    """
    if not path.exists():
        raise ValueError(f"No such file: {path}. Name a <step>.jsonl under trainer.validation_data_dir")
    if path.is_dir():
        raise ValueError(f"{path} is a folder ({', '.join(sorted(p.name for p in path.iterdir()))}): name one dump")
    of_source: dict[str, list[dict[str, Any]]] = {}
    for row in read_lines(path, _checked, "validation dump of verl"):
        of_source.setdefault(row["data_source"], []).append(row)
    if timeouts := sum(row["timeout"] for rows in of_source.values() for row in rows):
        print(f"{path}: {timeouts} completions count as wrong: comparing their answer took too long", file=sys.stderr)
    return {source: [*map(_question, last_outputs(rows).values())] for source, rows in of_source.items()}


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """What counts of a row."""
    grade, source = "acc" if "acc" in row else "score", str(row.get("data_source") or "")
    if row.get(grade) not in (0, 1):
        raise ValueError(
            f"{grade} is {row.get(grade)!r}, which does not say whether the answer is right: let the reward function "
            "return `acc` as 0 or 1 for every completion"
        )
    if not source.isprintable():
        raise ValueError(f"data_source is {source!r}: give it a name that can be printed")
    pred = str(row["pred"] or "").strip() if "pred" in row else None
    kept = {"input": str(row["input"]), "data_source": source, "timeout": bool(row.get("timeout"))}
    return kept | {"correct": bool(row[grade]), "pred": pred} | ({"uid": str(row["uid"])} if "uid" in row else {})


def _question(draws: list[dict[str, Any]]) -> Question:
    correct, preds = tuple(row["correct"] for row in draws), [row["pred"] for row in draws]
    return Question(draws[0]["input"], correct, None if None in preds else number_answers(preds, correct))


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
    """pass@k and, from k = 2 on, maj@k of one run on one data set, for every k up to the number of completions.

    Raises:
        ValueError: If the questions have different numbers of completions, or others than ``samples``.
    """
    name = " ".join(filter(None, [*label, data_set]))
    n = samples or max(len(q.correct) for q in questions)
    if wrong := [q for q in questions if len(q.correct) != n]:
        least = min(wrong, key=lambda q: len(q.correct))
        lost = "completions are lost. Sample them again; bash recipes/evaluate.sh samples what is missing"
        more = f"give --samples {len(least.correct)}, or leave it out"
        raise ValueError(
            f"{name}: {len(wrong)} of {len(questions)} questions do not have {n} completions "
            f"({len(least.correct)} for {least.name[-60:]!r}): {lost if len(least.correct) < n else more}"
        )
    if dropped := [k for k in ks if k > n]:
        print(f"{name}: left out k = {dropped}, a question has {n} completions (val_kwargs.n)", file=sys.stderr)
    votes = [question.votes for question in questions if question.votes is not None]
    if len(votes) < len(questions):
        print(f"{name}: no maj@k, the dump has no `pred`: let the reward function return it", file=sys.stderr)

    figures = {}  # of each question: unbiased, and of one draw
    for k in sorted({*ks} - {*dropped}):
        figures["pass", k] = [(pass_at_k(n, sum(q.correct), k), float(any(q.correct[:k]))) for q in questions]
        if k > 1 and len(votes) == len(questions):
            figures["maj", k] = [(majority_at_k(v, k), majority_at_k(v[:k], k)) for v in votes]
    if not figures:
        return []
    unbiased, draws = 100.0 * np.array(list(figures.values())).transpose(2, 0, 1)
    rows = np.column_stack([unbiased.mean(1), *_bootstrap(unbiased), draws.mean(1)]).tolist()
    printed = _paper_table().get(Label(*map(str.lower, label)), {})
    records = []
    for (metric, k), (estimate, low, high, draw) in zip(figures, rows, strict=True):
        cell = printed.get(f"{data_set.lower()} {metric}@{k}")
        paper = float(cell) if cell else None
        records.append(Record(*label, data_set, len(questions), n, metric, k, estimate, low, high, draw, paper))
    return records


def _bootstrap(values: np.ndarray) -> np.ndarray:
    """95% percentile interval of the means of (cells, questions); all cells see the same resampled questions. Too
    narrow below some hundred questions that are mostly right or mostly wrong."""
    count, rng = values.shape[1], np.random.default_rng(0)
    # In parts, to bound the memory at a few thousand questions.
    parts = [rng.multinomial(count, np.full(count, 1 / count), size=RESAMPLES // 40) @ values.T for _ in range(40)]
    return np.percentile(np.concatenate(parts) / count, [2.5, 97.5], axis=0)


@lru_cache(maxsize=1)
def _paper_table() -> dict[Label, dict[str, str]]:
    """The rows of the paper's Table 1, in percent, all in lower case."""
    with Path(__file__).with_name("table1.csv").open(encoding="utf-8") as file:
        rows = csv.DictReader(map(str.lower, file))
        return {Label(*(row[name] for name in Label._fields)): row for row in rows}


def table(records: Iterable[Record]) -> str:
    """A row of Markdown per figure, those of different runs below each other."""
    lines = [["Model", "Dataset", "Method", "", "paper", "one draw", "unbiased", "95% interval"], ["---"] * 8]
    for r in sorted(records, key=lambda r: (r.data_set, r.metric != "pass", r.k)):
        paper = "" if r.paper is None else f"{r.paper:.1f}"
        interval = f"{r.low:.1f}–{r.high:.1f}" if r.low < r.high else ""  # none where all questions agree
        figures = paper, f"{r.draw:.1f}", f"{r.estimate:.1f}", interval
        lines.append([r.model, r.training_set, r.method, f"{r.data_set} {r.metric}@{r.k}".strip(), *figures])
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def parse_dump_argument(argument: str) -> tuple[Label, str, Path]:
    """``MODEL/TRAINING SET/METHOD[/DATA SET]=DUMP``, ``METHOD=DUMP`` or ``DUMP`` as (label, data set or "", path).

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
    """Records of all dumps, in the order given; see :func:`parse_dump_argument` and :func:`read_dump`.

    Raises:
        ValueError: If a dump names its data sets and its label another one, or two dumps of one label and data set
            share a question.
    """
    questions: dict[tuple[Label, str], list[Question]] = {}
    for argument in arguments:
        label, named, path = parse_dump_argument(argument)
        for source, found in read_dump(path).items():
            data_set = named or source
            if source not in ("", data_set):
                raise ValueError(f"{path} has rows of {source!r}: drop the data set {named!r} from its label")
            held = questions.setdefault((label, data_set), [])
            if again := {q.name for q in held} & {q.name for q in found}:
                raise ValueError(
                    f"{path} repeats {len(again)} questions of an earlier dump labelled {label.method!r} "
                    f"(such as {min(again)[-60:]!r}): give each run and step its own label"
                )
            held += found
    return [record for key, held in questions.items() for record in evaluate(*key, held, ks, samples)]


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
    print(rendered := table(records), end="")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(rendered, encoding="utf-8")
        document = {"resamples": RESAMPLES, "records": [record._asdict() for record in records]}
        (args.out / "evaluation.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0
