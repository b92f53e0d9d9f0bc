"""pass@k and maj@k of the paper (GTPO, arXiv:2508.03772, Sec. 6.1, Table 1) from verl's validation dumps.

A dump is what verl writes under ``trainer.validation_data_dir``: one ``<step>.jsonl`` per validation, one line per
completion with ``input``, ``output``, ``gts``, ``score``, ``step``, every value the reward function returned (``acc``,
``pred``, ...), and, from the V1 trainer, ``uid``. Sample it with ``val_kwargs.n=64 val_kwargs.do_sample=True``.

    gtpo-verl evaluate Qwen/MATH/GRPO=grpo/500.jsonl Qwen/MATH/GTPO=gtpo/500.jsonl --out results

Each figure is given twice, in percent of the questions:

- *unbiased*: its mean over all k-subsets of a question's n completions. For pass@k this is Chen et al.'s estimator
  1 − C(n−c, k)/C(n, k) (arXiv:2107.03374); for maj@k the same mean, exact as well, see :func:`majority_at_k`.
- *one draw*: its value on the first k completions. Nearly every cell of the paper's Table 1 is a multiple of 1/30
  (AIME) or 1/40 (AMC), so the paper seems to have drawn once; these are the figures to hold against it.

The interval is a 95% percentile bootstrap over questions of the unbiased figure. A k larger than the number of
completions of some question is left out for that data set, and said on stderr.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

DEFAULT_K = (1, 4, 8, 16, 32, 64)
RESAMPLES = 10_000
SEED = 0

RIGHT = 0
UNPARSED = -1


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


@dataclass(frozen=True)
class Label:
    """Which run a dump comes from: the first three columns of the paper's Table 1."""

    model: str
    training_set: str
    method: str


@dataclass(frozen=True)
class Record:
    """One cell: ``metric`` (pass or maj) at ``k`` of one run on one data set, in percent.

    ``estimate`` is the unbiased figure, ``low`` and ``high`` its 95% interval, ``draw`` the one-draw figure, ``paper``
    what the paper's Table 1 prints for this cell, or None.
    """

    model: str
    training_set: str
    method: str
    data_set: str
    questions: int
    completions_min: int
    completions_max: int
    metric: str
    k: int
    estimate: float
    low: float
    high: float
    draw: float
    paper: float | None


# --- the two metrics of one question ---------------------------------------------------------------------------------


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n completions, drawn without replacement, hold one of the c right ones (arXiv:2107.03374).

    Raises:
        ValueError: If not 1 <= k <= n or not 0 <= c <= n.
    """
    if not (1 <= k <= n and 0 <= c <= n):
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={n}, c={c}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@lru_cache(maxsize=100_000)
def majority_at_k(right: int, others: tuple[int, ...], k: int) -> float:
    """Expected outcome of a majority vote among k completions drawn without replacement, a t-way tie counting 1/t.

    The votes that k draws give each answer are independent Binomial(count, k/n) variables conditioned on their sum
    being k, so the mean over all C(n, k) subsets is exact and costs a small convolution per number of right votes.

    Args:
        right: How many of the n completions give the right answer.
        others: How many give each other answer; n = right + sum(others).
        k: Size of the vote.

    Raises:
        ValueError: If not 1 <= k <= n.
    """
    n = right + sum(others)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got k={k}, n={n}")
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
    return won / float(_binomial(n, p)[k])


@lru_cache(maxsize=100_000)
def _binomial(n: int, p: float) -> np.ndarray:
    """The n + 1 probabilities of Binomial(n, p), 0 < p <= 1."""
    if p == 1.0:
        return np.eye(n + 1)[n]
    log_comb = np.array([math.lgamma(n + 1) - math.lgamma(v + 1) - math.lgamma(n - v + 1) for v in range(n + 1)])
    v = np.arange(n + 1)
    return np.exp(log_comb + v * math.log(p) + (n - v) * math.log1p(-p))


def majority_of_draw(votes: Sequence[int]) -> float:
    """Outcome of one vote: 1 if ``RIGHT`` leads alone, 1/t if it shares the lead with t − 1 others, else 0."""
    counts = Counter(votes)
    most = max(counts.values())
    if counts[RIGHT] < most:
        return 0.0
    return 1.0 / sum(count == most for count in counts.values())


# --- answers ---------------------------------------------------------------------------------------------------------


def _votes(preds: Sequence[str], correct: Sequence[bool]) -> tuple[int, ...]:
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


# --- dumps -----------------------------------------------------------------------------------------------------------


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
        _say(f"{path}: {timeouts} completions count as wrong because comparing their answer took too long")

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
        draws = drawn.setdefault((str(row.get("data_source") or ""), question), {})
        if session not in draws or output >= draws[session][0]:
            draws[session] = (output, row)

    data_sets: dict[str, list[Question]] = {}
    for (data_set, _), draws in drawn.items():
        completions = [row for _, (_, row) in sorted(draws.items())]
        correct = tuple(bool(row[grade]) for row in completions)
        votes = _votes([_text(row.get("pred")) for row in completions], correct) if has_pred else None
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


# --- a table ---------------------------------------------------------------------------------------------------------


def evaluate(
    label: Label,
    data_set: str,
    questions: Sequence[Question],
    ks: Iterable[int] = DEFAULT_K,
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> list[Record]:
    """pass@k and maj@k of one run on one data set, for every k that all questions have completions for.

    Raises:
        ValueError: If there are no questions.
    """
    if not questions:
        raise ValueError(f"no questions for {label} on {data_set!r}")
    name = " ".join(filter(None, [label.model, label.training_set, label.method, data_set]))
    sizes = [len(question.correct) for question in questions]
    shortest = questions[int(np.argmin(sizes))]
    if min(sizes) != max(sizes):
        _say(
            f"{name}: between {min(sizes)} and {max(sizes)} completions per question; "
            f"fewest for {shortest.name[-60:]!r}. Did some rollouts fail?"
        )
    dropped = [k for k in ks if k > min(sizes)]
    if dropped:
        _say(f"{name}: left out k = {dropped}, a question has {min(sizes)} completions only (rollout.val_kwargs.n)")
    can_vote = all(question.votes is not None for question in questions)
    if not can_vote:
        _say(f"{name}: no maj@k, the dump has no `pred`: let the reward function return the answer it read as `pred`")

    cells: list[tuple[str, int]] = []
    columns: list[np.ndarray] = []
    for k in sorted(set(ks) - set(dropped)):
        cells.append(("pass", k))
        columns.append(np.array([pass_at_k(len(q.correct), sum(q.correct), k) for q in questions]))
        columns.append(np.array([float(any(q.correct[:k])) for q in questions]))
        if can_vote:
            cells.append(("maj", k))
            votes = [q.votes or () for q in questions]
            columns.append(np.array([_expected_majority(v, k) for v in votes]))
            columns.append(np.array([majority_of_draw(v[:k]) for v in votes]))
    if not cells:
        return []
    values = 100.0 * np.stack(columns, axis=1)
    means = values.mean(axis=0)
    low, high = _bootstrap(values[:, ::2], seed, resamples)
    paper = paper_row(label)
    return [
        Record(
            **asdict(label),
            data_set=data_set,
            questions=len(questions),
            completions_min=min(sizes),
            completions_max=max(sizes),
            metric=metric,
            k=k,
            estimate=float(means[2 * i]),
            low=float(low[i]),
            high=float(high[i]),
            draw=float(means[2 * i + 1]),
            paper=paper.get(f"{data_set} {metric}@{k}"),
        )
        for i, (metric, k) in enumerate(cells)
    ]


def _expected_majority(votes: tuple[int, ...], k: int) -> float:
    counts = Counter(votes)
    right = counts.pop(RIGHT, 0)
    return majority_at_k(right, tuple(sorted(counts.values())), k)


def _bootstrap(values: np.ndarray, seed: int, resamples: int) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile interval of the mean over axis 0; all columns see the same resampled questions."""
    rng = np.random.default_rng(seed)
    count = len(values)
    chunk = 250  # Bounds the memory at a few thousand questions.
    means = np.concatenate(
        [
            rng.multinomial(count, np.full(count, 1 / count), size=min(chunk, resamples - start)) @ values / count
            for start in range(0, resamples, chunk)
        ]
    )
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


_PAPER_MODELS = {
    "llama": "LLaMA",
    "llama8b": "LLaMA",
    "llama318b": "LLaMA",
    "llama318binstruct": "LLaMA",
    "metallama318binstruct": "LLaMA",
    "qwen": "Qwen",
    "qwen253b": "Qwen",
    "qwen253binstruct": "Qwen",
}


@lru_cache(maxsize=1)
def _paper_table() -> dict[tuple[str, str, str], dict[str, float]]:
    text = (files("gtpo_verl.paper") / "table1.csv").read_text(encoding="utf-8")
    key = ("model", "training_set", "method")
    return {
        (row["model"], row["training_set"].lower(), row["method"].lower()): {
            column: float(value) for column, value in row.items() if column not in key
        }
        for row in csv.DictReader(io.StringIO(text))
    }


def paper_row(label: Label) -> Mapping[str, float]:
    """The paper's Table 1 row of a run, as printed: {"AIME 2024 pass@1": percent, ...}; empty if it has none."""
    model = _PAPER_MODELS.get(re.sub(r"[^a-z0-9]", "", label.model.lower()), "")
    return _paper_table().get((model, label.training_set.lower(), label.method.lower()), {})


@dataclass(frozen=True)
class Table:
    """The layout of the paper's Table 1: ``columns`` are (data set, metric, k), ``rows`` (labels, cells)."""

    columns: list[tuple[str, str, int]]
    rows: list[tuple[tuple[str, str, str, str], list[str]]]

    HEAD = ("Model", "Dataset", "Method", "")

    def markdown(self) -> str:
        head, previous = list(self.HEAD), None
        for data_set, metric, k in self.columns:
            head.append(f"@{k}" if previous == (data_set, metric) else f"{data_set} {metric}@{k}".strip())
            previous = (data_set, metric)
        lines = [head, ["---"] * 4 + ["---:"] * len(self.columns)]
        lines += [[*labels, *cells] for labels, cells in self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([*self.HEAD[:3], "Source", *(f"{d} {m}@{k}".strip() for d, m, k in self.columns)])
        writer.writerows([*labels, *cells] for labels, cells in self.rows)
        return out.getvalue()

    def latex(self) -> str:
        """A booktabs tabular; needs ``\\usepackage{booktabs}``."""
        data_sets = [data_set for data_set, _, _ in self.columns]
        metrics = [(data_set, metric) for data_set, metric, _ in self.columns]
        names = {"pass": r"Pass@$k$ (\%)", "maj": r"Maj@$k$ (\%)"}
        lines = [
            rf"\begin{{tabular}}{{llll{'r' * len(self.columns)}}}",
            r"\toprule",
            " & & & & " + _spans([(_tex(d), n) for d, n in _runs(data_sets)]) + r" \\",
            " & & & & " + _spans([(names[m], n) for (_, m), n in _runs(metrics)]) + r" \\",
            " & ".join([*self.HEAD, *(str(k) for _, _, k in self.columns)]) + r" \\",
            r"\midrule",
        ]
        lines += [" & ".join(_tex(cell) for cell in (*labels, *cells)) + r" \\" for labels, cells in self.rows]
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def table(records: Sequence[Record]) -> Table:
    """Lay the records out as the paper's Table 1, the paper's own row first where it has one.

    The paper's benchmarks get the paper's columns; any other data set gets every k, maj@k from k = 2 on.
    """
    columns: list[tuple[str, str, int]] = []
    paper_columns = next(iter(_paper_table().values()))
    benchmarks = list(dict.fromkeys(column.rsplit(" ", 1)[0] for column in paper_columns))
    data_sets = list(dict.fromkeys(record.data_set for record in records))
    data_sets.sort(key=lambda name: benchmarks.index(name) if name in benchmarks else -1)
    for data_set in data_sets:
        for metric in ("pass", "maj"):
            for k in sorted({r.k for r in records if (r.data_set, r.metric) == (data_set, metric)}):
                if data_set in benchmarks:
                    wanted = f"{data_set} {metric}@{k}" in paper_columns
                else:
                    wanted = metric == "pass" or k > 1
                if wanted:
                    columns.append((data_set, metric, k))

    rows: list[tuple[tuple[str, str, str, str], list[str]]] = []
    for label in dict.fromkeys((r.model, r.training_set, r.method) for r in records):
        cells = {(r.data_set, r.metric, r.k): r for r in records if (r.model, r.training_set, r.method) == label}
        mine = [cells.get(column) for column in columns]
        if any(record and record.paper is not None for record in mine):
            rows.append(((*label, "paper"), [_cell(r, "paper") for r in mine]))
        rows.append(((*label, "ours, one draw"), [_cell(r, "draw") for r in mine]))
        rows.append(((*label, "ours, unbiased"), [_cell(r, "estimate") for r in mine]))
        rows.append(((*label, "95% interval"), [f"{r.low:.1f}–{r.high:.1f}" if r else "" for r in mine]))
    return Table(columns, rows)


def _cell(record: Record | None, figure: str) -> str:
    value = getattr(record, figure, None)
    return "" if value is None else f"{value:.1f}"


def _runs(values: Sequence[Any]) -> list[tuple[Any, int]]:
    runs: list[tuple[Any, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1] + 1)
        else:
            runs.append((value, 1))
    return runs


def _spans(cells: Sequence[tuple[str, int]]) -> str:
    return " & ".join(rf"\multicolumn{{{n}}}{{c}}{{{text}}}" for text, n in cells)


def _tex(text: str) -> str:
    return re.sub(r"([%&_#$])", r"\\\1", text).replace("–", "--")


def _say(message: str) -> None:
    print(message, file=sys.stderr)


# --- command line ----------------------------------------------------------------------------------------------------


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


def evaluate_dumps(
    arguments: Iterable[str], ks: Sequence[int] = DEFAULT_K, seed: int = SEED, resamples: int = RESAMPLES
) -> list[Record]:
    """Records of all dumps, in the order given; see :func:`parse_dump_argument` and :func:`read_dump`.

    Raises:
        ValueError: If a dump names its data sets and its label another one, or two dumps of one label and data set
            share a question.
    """
    questions: dict[tuple[Label, str], list[Question]] = {}
    for argument in arguments:
        label, named, path = parse_dump_argument(argument)
        for source, found in read_dump(path).items():
            data_set = benchmark_name(named or source)
            if named and source and benchmark_name(source) != data_set:
                raise ValueError(f"{path} has rows of {source!r}: drop the data set {named!r} from its label")
            held = questions.setdefault((label, data_set), [])
            if again := {q.name for q in held} & {q.name for q in found}:
                raise ValueError(
                    f"{path} repeats {len(again)} questions of an earlier dump labelled {label.method!r} "
                    f"(such as {min(again)[-60:]!r}): give each run and step its own label"
                )
            held += found
    return [
        record
        for (label, data_set), held in questions.items()
        for record in evaluate(label, data_set, held, ks, seed, resamples)
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``gtpo-verl evaluate``."""
    parser.description = "pass@k and maj@k in the layout of the paper's Table 1, from verl's validation dumps."
    parser.epilog = (
        "example: gtpo-verl evaluate Qwen/MATH/GRPO=grpo/500.jsonl Qwen/MATH/GTPO=gtpo/500.jsonl --out results\n\n"
        "bash recipes/evaluate.sh CHECKPOINT samples the completions."
    )
    parser.add_argument(
        "dumps",
        nargs="+",
        metavar="DUMP",
        help="<step>.jsonl under trainer.validation_data_dir, or LABEL=DUMP, LABEL being "
        '"METHOD", "MODEL/TRAINING SET/METHOD" or "MODEL/TRAINING SET/METHOD/DATA SET"',
    )
    parser.add_argument("--k", nargs="+", type=int, default=list(DEFAULT_K), help="default: 1 4 8 16 32 64")
    parser.add_argument("--format", choices=["md", "csv", "latex"], default="md")
    parser.add_argument("--out", type=Path, help="folder for evaluation.json (every figure) and the table")
    parser.add_argument("--seed", type=int, default=SEED, help="of the bootstrap over questions")


def run(args: argparse.Namespace) -> int:
    """Print the table, and write it with all figures into ``--out``."""
    if min(args.k) < 1:
        raise ValueError(f"--k must be at least 1, got {min(args.k)}")
    records = evaluate_dumps(args.dumps, args.k, args.seed)
    if not records:
        raise ValueError("no k is left to report: no question has that many completions")
    layout = table(records)
    text, suffix = {
        "md": (layout.markdown, "md"),
        "csv": (layout.csv, "csv"),
        "latex": (layout.latex, "tex"),
    }[args.format]
    rendered = text()
    print(rendered, end="")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"table.{suffix}").write_text(rendered, encoding="utf-8")
        document = {"seed": args.seed, "resamples": RESAMPLES, "records": [asdict(record) for record in records]}
        (args.out / "evaluation.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    return 0
