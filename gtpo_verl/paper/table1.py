"""The paper's Table 1 (GTPO, arXiv:2508.03772) from the completions of runs, beside what the paper prints."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np
import pandas as pd

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
    "llama": "llama",
    "llama8b": "llama",
    "llama318b": "llama",
    "llama318binstruct": "llama",
    "metallama318binstruct": "llama",
    "qwen": "qwen",
    "qwen253b": "qwen",
    "qwen253binstruct": "qwen",
}


@lru_cache(maxsize=1)
def _paper_table() -> pd.DataFrame:
    """The paper's Table 1 in percent, by (model, training set, method) in lower case."""
    with (files("gtpo_verl.paper") / "table1.csv").open(encoding="utf-8") as file:
        table = pd.read_csv(file, index_col=["model", "training_set", "method"])
    return table.rename(index=str.lower)


def paper_row(label: Label) -> dict[str, float]:
    """The paper's Table 1 row of a run, as printed: {"AIME 2024 pass@1": percent, ...}; empty if it has none."""
    model = _PAPER_MODELS.get(re.sub(r"[^a-z0-9]", "", label.model.lower()), "")
    key = (model, label.training_set.lower(), label.method.lower())
    paper = _paper_table()
    return paper.loc[key].to_dict() if key in paper.index else {}


def table(records: Sequence[Record]) -> pd.DataFrame:
    """Lay the records out as the paper's Table 1: a row per figure of a run, the paper's first where it has one.

    The columns are (data set, metric, k). The paper's benchmarks get the paper's; any other data set gets every k,
    maj@k from k = 2 on.
    """
    benchmarks = list(dict.fromkeys(column.rsplit(" ", 1)[0] for column in _paper_table()))

    def is_shown(record: Record) -> bool:
        if record.data_set in benchmarks:
            return f"{record.data_set} {record.metric}@{record.k}" in _paper_table()
        return record.metric == "pass" or record.k > 1

    def place(column: tuple[str, str, int]) -> tuple[int, int, bool, int]:
        data_set, metric, k = column
        order = benchmarks.index(data_set) if data_set in benchmarks else -1
        return order, data_sets.index(data_set), metric == "maj", k

    data_sets = list(dict.fromkeys(record.data_set for record in records))
    columns = sorted({(r.data_set, r.metric, r.k) for r in records if is_shown(r)}, key=place)
    rows: dict[tuple[str, ...], dict[tuple[str, str, int], str]] = {}
    for label in dict.fromkeys((r.model, r.training_set, r.method) for r in records):
        mine = [r for r in records if (r.model, r.training_set, r.method) == label and is_shown(r)]
        figures: dict[str, Callable[[Record], str]] = {
            "paper": lambda r: "" if r.paper is None else f"{r.paper:.1f}",
            "ours, one draw": lambda r: f"{r.draw:.1f}",
            "ours, unbiased": lambda r: f"{r.estimate:.1f}",
            "95% interval": lambda r: f"{r.low:.1f}–{r.high:.1f}",
        }
        for source, figure in figures.items():
            cells = {(r.data_set, r.metric, r.k): figure(r) for r in mine}
            if any(cells.values()):
                rows[(*label, source)] = cells
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=pd.MultiIndex.from_tuples(columns)).fillna("")
    frame.index = pd.MultiIndex.from_tuples(rows, names=["Model", "Dataset", "Method", "Source"])
    return frame


def as_markdown(frame: pd.DataFrame) -> str:
    """The table for a README; only the first column of a data set and metric is written out."""
    head, previous = [*frame.index.names[:3], ""], None
    for data_set, metric, k in frame.columns:
        head.append(f"@{k}" if previous == (data_set, metric) else f"{data_set} {metric}@{k}".strip())
        previous = (data_set, metric)
    lines = [head, ["---"] * 4 + ["---:"] * len(frame.columns)]
    lines += [[*labels, *cells] for labels, cells in zip(frame.index, frame.to_numpy(), strict=True)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def as_csv(frame: pd.DataFrame) -> str:
    """The table with one line of column names, such as `AIME 2024 pass@1`."""
    return frame.set_axis([f"{d} {m}@{k}".strip() for d, m, k in frame.columns], axis=1).to_csv(lineterminator="\n")


def as_latex(frame: pd.DataFrame) -> str:
    """A booktabs tabular; needs `\\usepackage{booktabs}`."""
    names = {"pass": "Pass@k (%)", "maj": "Maj@k (%)"}
    rows = frame.rename(columns=names, level=1).reset_index(names=[*frame.index.names[:3], ""], col_level=2)
    return rows.to_latex(
        index=False, escape=True, multicolumn_format="c", column_format="llll" + "r" * len(frame.columns)
    )
