"""The paper's Table 1 (GTPO, arXiv:2508.03772) from the completions of runs, beside what the paper prints."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from gtpo_verl.paper.pass_at_k import expected_majority, majority_of_draw, pass_at_k
from gtpo_verl.paper.validation_dumps import Question

DEFAULT_K = (1, 4, 8, 16, 32, 64)
RESAMPLES = 10_000
SEED = 0


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
    completions: int
    metric: str
    k: int
    estimate: float
    low: float
    high: float
    draw: float
    paper: float | None


def evaluate(
    label: Label,
    data_set: str,
    questions: Sequence[Question],
    ks: Iterable[int] = DEFAULT_K,
    seed: int = SEED,
    resamples: int = RESAMPLES,
) -> list[Record]:
    """pass@k and maj@k of one run on one data set, for every k up to the number of completions.

    Raises:
        ValueError: If there are no questions, or they have different numbers of completions.
    """
    if not questions:
        raise ValueError(f"no questions for {label} on {data_set!r}")
    name = " ".join(filter(None, [label.model, label.training_set, label.method, data_set]))
    sizes = [len(question.correct) for question in questions]
    n = min(sizes)
    if n != max(sizes):
        fewest = questions[int(np.argmin(sizes))].name
        raise ValueError(
            f"{name}: between {n} and {max(sizes)} completions per question, fewest for {fewest[-60:]!r}: completions "
            "are lost. Sample them again; bash recipes/evaluate.sh samples what is missing"
        )
    dropped = [k for k in ks if k > n]
    if dropped:
        print(f"{name}: left out k = {dropped}, a question has {n} completions (val_kwargs.n)", file=sys.stderr)
    can_vote = all(question.votes is not None for question in questions)
    if not can_vote:
        print(f"{name}: no maj@k, the dump has no `pred`: let the reward function return it", file=sys.stderr)

    cells: list[tuple[str, int]] = []
    columns: list[np.ndarray] = []
    for k in sorted(set(ks) - set(dropped)):
        cells.append(("pass", k))
        columns.append(np.array([pass_at_k(len(q.correct), sum(q.correct), k) for q in questions]))
        columns.append(np.array([float(any(q.correct[:k])) for q in questions]))
        if can_vote:
            cells.append(("maj", k))
            votes = [q.votes or () for q in questions]
            columns.append(np.array([expected_majority(v, k) for v in votes]))
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
            completions=n,
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
