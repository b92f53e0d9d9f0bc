"""Training and test sets of GTPO (arXiv:2508.03772, Sec. 6) as verl's parquet files.

    python3 -m recipes data --dataset gsm8k --out data/gsm8k
    python3 -m recipes data --dataset gsm8k --out data/gsm8k --sft    # for verl's SFT trainer

GSM8K and MATH are trained and tested on, so their splits become ``train.parquet`` and ``test.parquet``. AIME 2024, AIME
2025 and AMC 2023 are only tested on: whatever split holds them (the Hub's "train" for AIME 2024) becomes
``test.parquet``. A row is what verl's ``RLHFDataset`` and ``gtpo_verl.reward.score`` read: the system prompt of App.
8.2 and the question, and the bare answer as ground truth. A row whose answer cannot be found stops the run.

``data_source`` is the paper's name of the set ("GSM8K", "MATH", "AIME2024", ...), which verl's built-in rewards do not
know: a run that forgets to set ``reward.custom_reward_function`` fails instead of training on another reward.
"""

import argparse
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gtpo_verl.reward.score import MAX_ANSWER_CHARS, closing_brace
from gtpo_verl.run.dumps import read_lines

Row = dict[str, Any]

SYSTEM_PROMPT = """\
You are a helpful assistant for solving math problems.
Given a question, first think step by step between <reasoning> and </reasoning>.
Then, give the final answer between <answer> and </answer>."""
"""The prompt of App. 8.2, word for word."""


def extract_gsm8k_answer(answer: str) -> str:
    """Return the number after the last ``####``, without thousands separators.

    Raises:
        ValueError: if there is no ``####``, or what follows is not a number.
    """
    _, marker, number = answer.rpartition("####")
    number = number.strip().replace(",", "")
    if not marker or not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", number):
        raise ValueError(f"no number after '####' at the end of the answer {answer[-60:]!r}")
    return number


def extract_boxed(solution: str) -> str:
    """Return what the last ``\\boxed{...}`` or ``\\fbox{...}`` holds, with balanced braces; ``\\boxed 5$`` gives ``5``.

    Raises:
        ValueError: if there is no box, its brace is never closed, or it is empty.
    """
    boxes = list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", solution))
    if not boxes:
        raise ValueError(f"no \\boxed answer in the solution ending in {solution[-60:]!r}")
    start = boxes[-1].end()  # of what is boxed
    if solution[start : start + 1] == "{":
        end = closing_brace(solution, start)
        if end < 0:
            raise ValueError(f"the last \\boxed is never closed: {solution[boxes[-1].start() :][:60]!r}")
        boxed = solution[start + 1 : end].strip()
    else:
        boxed = re.split(r"\$|\\[\])]|\n", solution[start:])[0].strip().rstrip(".")
    if not boxed:
        raise ValueError(f"the last \\boxed is empty: {solution[-60:]!r}")
    return boxed


def parse_contest_answer(answer: int | float | str) -> str:
    """Return an AIME or AMC answer as a string: ``27``, ``27.0``, ``"027"`` and ``"27.0"`` all give ``"27"``.

    Raises:
        ValueError: if the answer is missing or empty.
    """
    is_missing = answer is None or answer != answer  # NaN
    text = "" if is_missing else str(answer).strip()
    if not text:
        raise ValueError(f"answer is {answer!r}")
    integer = re.fullmatch(r"(-?[0-9]+)(?:\.0*)?", text)
    return str(int(integer[1])) if integer else text


# The two of MATH's 12,500 solutions that box nothing, by the start of their problem.
_MATH_UNBOXED = {
    "For any integer $n>1$, the number of prime numbers greater than $n!+1$": "0",
    "You are given a sequence of $58$ terms; each term has the form $P+n$": "0",
}


def _parse_gsm8k(row: Row) -> tuple[str, str, Row]:
    question = _text_column(row, "question")
    answer = _text_column(row, "answer")
    return question, extract_gsm8k_answer(answer), {"answer": answer}


def _parse_math(row: Row) -> tuple[str, str, Row]:
    question = _text_column(row, "problem")
    solution = _text_column(row, "solution")
    extra = {
        "answer": solution,
        "subject": _column(row, "type", "subject"),
        "level": str(_column(row, "level")),
    }
    for start, answer in _MATH_UNBOXED.items():
        if question.startswith(start):
            return question, answer, extra
    return question, extract_boxed(solution), extra


def _parse_contest(row: Row) -> tuple[str, str, Row]:
    question = _text_column(row, "problem", "question")
    answer = _column(row, "answer")
    return question, parse_contest_answer(answer), {"answer": str(answer)}


def _column(row: Row, *names: str) -> Any:
    columns = {name.lower(): value for name, value in row.items()}
    for name in names:
        if name in columns:
            return columns[name]
    raise ValueError(f"no column {' or '.join(names)}, only {', '.join(row)}")


def _text_column(row: Row, *names: str) -> str:
    value = _column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"the {' or '.join(names)} is {value!r}, no text")
    return value


@dataclass(frozen=True)
class MathDataset:
    """One of the paper's datasets.

    Attributes:
        name: The paper's name, verl's ``data_source``.
        source: Where the Hugging Face Hub keeps it.
        parse: Makes (question, ground truth, further ``extra_info``) of a row; a ValueError gives the reason it cannot.
        config: The configuration to take where the source has it; otherwise all are concatenated.
        trained_on: Whether a "train" split is for training.
    """

    name: str
    source: str
    parse: Callable[[Row], tuple[str, str, Row]]
    config: str = ""
    trained_on: bool = False


DATASETS = {
    "gsm8k": MathDataset("GSM8K", "openai/gsm8k", _parse_gsm8k, config="main", trained_on=True),
    "math": MathDataset("MATH", "EleutherAI/hendrycks_math", _parse_math, trained_on=True),
    "aime2024": MathDataset("AIME2024", "HuggingFaceH4/aime_2024", _parse_contest),
    "aime2025": MathDataset("AIME2025", "math-ai/aime25", _parse_contest),
    "amc2023": MathDataset("AMC2023", "math-ai/amc23", _parse_contest),
}


def load_splits(dataset: MathDataset, source: str | None = None, split: str | None = None) -> dict[str, list[Row]]:
    """Return the raw rows of each wanted split of a Hub name, a folder or a file.

    Args:
        dataset: What to load.
        source: A Hub name, a local folder, or a ``.jsonl``, ``.json`` or ``.parquet`` file. None: ``dataset.source``.
        split: The one split wanted. None for "train" and "test" of a set that is trained on, and for the only split of
            one that is not. A single file without ``split`` is the split its name says (``train.jsonl``), or for a set
            that is only tested on, "test".

    Raises:
        ValueError: if the source cannot be read, lacks a wanted split, or does not say which split it is.
    """
    import datasets
    from datasets.exceptions import DatasetsError

    source = source or dataset.source
    path = Path(source)
    try:
        if path.is_file():
            if dataset.trained_on and split not in (None, "train", "test"):
                raise ValueError(f"--split {split}: must be train or test")
            name = split or (path.stem if dataset.trained_on else "test")
            if path.suffix == ".jsonl":  # pyarrow crashes on a line that is `null`
                parts = [{name: read_lines(path, _object, "JSONL file of questions")}]
            else:
                builder = "parquet" if path.suffix == ".parquet" else "json"
                parts = [datasets.load_dataset(builder, data_files={name: str(path)})]
        else:
            configs = datasets.get_dataset_config_names(source)
            configs = [dataset.config] if dataset.config in configs else configs
            parts = [datasets.load_dataset(source, config) for config in configs]
    except (DatasetsError, StopIteration) as error:  # StopIteration: a JSON file without a row
        raise ValueError(f"--source {source} cannot be read: {error.__cause__ or str(error) or 'no rows'}") from error

    available = list(dict.fromkeys(name for part in parts for name in part))
    if split:
        wanted = [split]
    elif dataset.trained_on:
        wanted = [name for name in ("train", "test") if name in available]
    else:
        wanted = available
    is_missing = not wanted or not set(wanted) <= set(available)
    is_ambiguous = len(wanted) > 1 and not dataset.trained_on
    if is_missing or is_ambiguous:
        raise ValueError(
            f"--source {source} has the splits {', '.join(available)}: choose one with --split; for a single file it "
            "says which split it is, train or test"
        )
    splits = {}
    for name in wanted:
        splits[name] = [row for part in parts for row in part.get(name, [])]
    return splits


def _object(row: Any) -> Row:
    """Return a line of a JSONL file; a TypeError says that it is not an object."""
    return {**row}


def make_rows(dataset: MathDataset, split: str, rows: Iterable[Row]) -> list[Row]:
    """Make rows of verl (``data_source``, ``prompt``, ``ability``, ``reward_model``, ``extra_info``) of raw ``rows``.

    ``extra_info`` has the row's ``split`` and its ``index`` there (MATH: over all subjects, one after another), the
    ``question``, the source's whole ``answer`` (GSM8K's and MATH's worked solution), and for MATH ``subject`` and
    ``level``.

    Raises:
        ValueError: if a row cannot be parsed, or has an answer that ``gtpo_verl.reward.score`` would not take; names
            the dataset, the split, the row and the reason.
    """
    made = []
    for index, row in enumerate(rows):
        try:
            question, ground_truth, extra = dataset.parse(row)
            if not question.strip():
                raise ValueError(f"the question is {question!r}")
            if len(ground_truth) > MAX_ANSWER_CHARS:
                raise ValueError(f"the answer has more than {MAX_ANSWER_CHARS} characters: {ground_truth!r}")
        except ValueError as error:
            raise ValueError(
                f"{dataset.name}, split {split}, row {index}: {error}. Correct the row in a local copy and give that "
                "with --source"
            ) from error
        made.append(
            {
                "data_source": dataset.name,
                "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": ground_truth},
                "extra_info": extra | {"split": split, "index": index, "question": question},
            }
        )
    return made


def format_solution(solution: str, ground_truth: str) -> str:
    """Return a worked solution as a completion in the paper's format (App. 8.2), which its reward gives all 20 points.

    GSM8K's calculator notes (``<<48/2=24>>``) and its closing ``#### 24`` are left out. MATH's solution stays whole,
    with the box around its answer.
    """
    reasoning = re.sub(r"<<[^<>]*>>", "", solution)
    reasoning = re.sub(r"\n####[^\n]*\s*$", "", reasoning).strip()
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>{ground_truth}</answer>"


def make_sft_rows(dataset: MathDataset, split: str, rows: Iterable[Row]) -> list[Row]:
    """Return rows of verl's SFT trainer: the same prompt, then the dataset's own solution in the paper's format.

    The trainer reads `messages`; `data_source` tells `check_files` what they are.

    Raises:
        ValueError: if a row cannot be parsed, or the dataset has answers only.
    """
    if not dataset.trained_on:
        raise ValueError(f"{dataset.name} has answers but no solutions: supervised training is on gsm8k or math")
    made = []
    for row in make_rows(dataset, split, rows):
        completion = format_solution(row["extra_info"]["answer"], row["reward_model"]["ground_truth"])
        messages = [*row["prompt"], {"role": "assistant", "content": completion}]
        made.append({"data_source": row["data_source"], "messages": messages})
    return made


def write_parquet(
    dataset: MathDataset, splits: dict[str, list[Row]], out: Path, sft: bool = False
) -> dict[Path, list[Row]]:
    """Write ``train.parquet`` and ``test.parquet`` under ``out``, and return the rows of each file written.

    The "train" split of a set that is trained on is written to ``train.parquet``, any other split to ``test.parquet``;
    with ``sft`` to ``sft_train.parquet`` and ``sft_test.parquet`` for verl's SFT trainer. Nothing is written unless
    every row can be parsed.

    Raises:
        ValueError: if a split is empty, a row cannot be parsed, or there are no solutions to train on.
    """
    import datasets

    prefix = "sft_" if sft else ""
    make = make_sft_rows if sft else make_rows
    written = {}
    for split, rows in splits.items():
        if not rows:
            raise ValueError(f"{dataset.name}, split {split}: no rows")
        name = "train" if split == "train" and dataset.trained_on else "test"
        written[out / f"{prefix}{name}.parquet"] = make(dataset, split, rows)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as partial:  # one of its own: recipes may start side by side
        for path, rows in written.items():
            datasets.Dataset.from_list(rows).to_parquet(Path(partial, path.name))
        for path in written:
            Path(partial, path.name).replace(path)
    return written


def check_files(dataset: str, files: Iterable[Path]) -> None:
    """Check that verl's parquet files are not another of the paper's data sets; accepts a user's own data.

    Raises:
        ValueError: a file that cannot be read, or that holds another of the paper's data sets.
    """
    import pyarrow.parquet as pq

    names = {known.name: name for name, known in DATASETS.items()}
    for path in files:
        try:
            sources = set()
            if "data_source" in pq.read_schema(path).names:
                (column,) = pq.read_table(path, columns=["data_source"]).columns
                sources = set(column.unique().to_pylist())
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read ({error}): remove it, and it will be made again") from error
        others = sorted(names[source] for source in sources & names.keys() if names[source] != dataset)
        if others:
            raise ValueError(f"{path} holds {', '.join(others)}, not {dataset}: set DATASET, or another DATA_DIR")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python3 -m recipes data``."""
    parser.description = "Write one of the paper's datasets as verl's parquet files, with the paper's prompt."
    sources = "".join(f"\n  {name:<10}{dataset.source}" for name, dataset in DATASETS.items())
    parser.epilog = (
        "example: python3 -m recipes data --dataset gsm8k --out data/gsm8k\n\n"
        f"where the Hugging Face Hub keeps them:{sources}"
    )
    parser.add_argument("--dataset", required=True, help=", ".join(DATASETS))
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder for train.parquet and test.parquet")
    what.add_argument(
        "--holds", type=Path, nargs="+", metavar="FILE", help="only check that these files hold no other data set"
    )
    parser.add_argument("--source", help="another Hub name, a local folder, or a .jsonl, .json or .parquet file")
    parser.add_argument("--split", help="the one split to write (default: train and test, as far as they exist)")
    parser.add_argument("--sft", action="store_true", help="write sft_*.parquet with solutions, for verl's SFT trainer")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print the first row as the model will see it.

    Raises:
        ValueError: an unknown data set, a source that cannot be read, or a file of another data set.
    """
    if args.holds:
        check_files(args.dataset, args.holds)
        return 0
    if args.dataset not in DATASETS:
        raise ValueError(f"--dataset {args.dataset}: must be one of {', '.join(DATASETS)}")
    dataset = DATASETS[args.dataset]
    written = write_parquet(dataset, load_splits(dataset, args.source, args.split), args.out, args.sft)
    for path, rows in written.items():
        print(f"wrote {len(rows)} rows to {path}")
    first = next(iter(written.values()))[0]
    for message in first["messages" if args.sft else "prompt"]:
        print(f"\n[{message['role']}]\n{message['content']}")
    if not args.sft:
        print(f"\n[ground truth]\n{first['reward_model']['ground_truth']}")
    return 0
