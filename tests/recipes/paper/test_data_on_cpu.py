import json
import shutil
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from gtpo_verl.reward.score import compute_score
from recipes.__main__ import main
from recipes.paper import data
from recipes.paper.data import (
    DATASETS,
    SYSTEM_PROMPT,
    extract_boxed,
    extract_gsm8k_answer,
    load_splits,
    make_rows,
    parse_contest_answer,
    write_parquet,
)
from recipes.tasks.tiny import build_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def prepare(name: str, source: Path, out: Path, split: str | None = None) -> dict[str, list[dict]]:
    dataset = DATASETS[name]
    written = write_parquet(dataset, load_splits(dataset, str(source), split), out)
    return {
        path.name: datasets.load_dataset("parquet", data_files=str(path), split="train").to_list() for path in written
    }


def ground_truths(rows: list[dict]) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows]


def test_a_gsm8k_folder_gives_the_rows_that_verl_reads(tmp_path):
    files = prepare("gsm8k", FIXTURES / "gsm8k", tmp_path / "out")
    assert ground_truths(files["train.parquet"]) == ["52", "1250", "-5"]
    assert ground_truths(files["test.parquet"]) == ["16", "6"]
    raw = [json.loads(line) for line in (FIXTURES / "gsm8k" / "test.jsonl").read_text().splitlines()]
    assert files["test.parquet"][1] == {
        "data_source": "GSM8K",
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": raw[1]["question"]},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "6"},
        "extra_info": {"split": "test", "index": 1, **raw[1]},
    }


def test_math_answers_are_the_last_box_with_its_braces(tmp_path):
    files = prepare("math", FIXTURES / "math", tmp_path / "out")
    assert ground_truths(files["train.parquet"]) == [r"\frac{3}{10}", "4", r"\{1,2\}", r"$3\sqrt{2}$"]
    assert ground_truths(files["test.parquet"]) == ["6", r"\frac{\sqrt{2}}{2}"]
    assert [(row["extra_info"]["subject"], row["extra_info"]["level"]) for row in files["test.parquet"]] == [
        ("Counting & Probability", "Level 1"),
        ("Intermediate Algebra", "Level 3"),
    ]


@pytest.mark.parametrize(
    ("name", "file", "expected"),
    [
        ("aime2024", "aime2024.jsonl", ["24", "24"]),
        ("aime2024", "aime2024_capitalized.jsonl", ["27", "313"]),
        ("aime2025", "aime2025.jsonl", ["97", r"108^\circ"]),
        ("amc2023", "amc2023.jsonl", ["28", "9"]),
    ],
)
def test_contest_answers_are_integers_whatever_their_column_type(name, file, expected, tmp_path):
    files = prepare(name, FIXTURES / file, tmp_path / "out")
    assert {file: ground_truths(rows) for file, rows in files.items()} == {"test.parquet": expected}


def test_a_set_that_is_only_tested_on_goes_to_test_parquet_whatever_the_hub_calls_its_split(tmp_path):
    (tmp_path / "source").mkdir()
    shutil.copy(FIXTURES / "aime2024.jsonl", tmp_path / "source/train.jsonl")
    files = prepare("aime2024", tmp_path / "source", tmp_path / "out")
    assert list(files) == ["test.parquet"] and files["test.parquet"][0]["extra_info"]["split"] == "train"


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_single_file_is_the_split_of_its_name_or_of_the_option(suffix, tmp_path):
    file = tmp_path / f"train{suffix}"
    table = datasets.Dataset.from_list(raw_rows("gsm8k"))
    table.to_parquet(file) if suffix == ".parquet" else table.to_json(file)
    assert list(prepare("gsm8k", file, tmp_path / "out")) == ["train.parquet"]
    other = file.rename(tmp_path / f"mine{suffix}")
    with pytest.raises(ValueError, match="--split"):
        prepare("gsm8k", other, tmp_path / "out")
    assert list(prepare("gsm8k", other, tmp_path / "out", split="test")) == ["test.parquet"]


def raw_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (FIXTURES / name / "train.jsonl").read_text().splitlines()]


def hub_folder(folder: Path, configs: tuple[str, ...], rows: list[dict]) -> Path:
    """A dataset repository with named configurations, each with every row of ``rows`` marked with its name."""
    card = ["---", "configs:"]
    for config in configs:
        (folder / config).mkdir(parents=True)
        marked = datasets.Dataset.from_list([{**row, "type": config} for row in rows])
        card += [f"- config_name: {config}", "  data_files:"]
        for split in ("train", "test"):
            marked.to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
            card += [f"  - split: {split}", f"    path: {config}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*card, "---", ""]))
    return folder


def test_math_is_the_union_of_its_subjects(tmp_path):
    rows, subjects = raw_rows("math"), ("algebra", "geometry", "prealgebra")
    files = prepare("math", hub_folder(tmp_path / "hub", subjects, rows), tmp_path / "out")
    assert list(files) == ["train.parquet", "test.parquet"]
    assert all(
        [row["extra_info"]["subject"] for row in file] == [s for s in subjects for _ in rows] for file in files.values()
    )
    numbers = list(range(len(subjects) * len(rows)))
    assert all([row["extra_info"]["index"] for row in file] == numbers for file in files.values())


def test_gsm8k_leaves_the_socratic_configuration_out(tmp_path):
    rows = raw_rows("gsm8k")
    source = hub_folder(tmp_path / "hub", ("main", "socratic"), rows)
    assert len(prepare("gsm8k", source, tmp_path / "out")["train.parquet"]) == len(rows)


@pytest.mark.parametrize(("name", "split"), [("gsm8k", "validation"), ("amc2023", None)])
def test_a_split_that_the_source_lacks_or_that_is_one_of_several_must_be_chosen(name, split, tmp_path):
    with pytest.raises(ValueError, match="splits train, test: .*--split"):
        prepare(name, FIXTURES / "gsm8k", tmp_path / "out", split)


def test_a_single_file_of_training_questions_is_one_of_two_splits(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    with pytest.raises(ValueError, match="--split Train: .*train or test"):
        prepare("gsm8k", tmp_path / "mine.jsonl", tmp_path / "out", "Train")


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "no marker 5"}, "no number after '####'"),
        ("gsm8k", {"question": "q", "answer": "#### five"}, "no number after '####'"),
        ("gsm8k", {"question": " ", "answer": "#### 5"}, "the question is ' '"),
        ("gsm8k", {"question": "q", "answer": None}, "the answer is None"),
        ("gsm8k", {"question": 7, "answer": "#### 5"}, "the question is 7"),
        ("math", {"problem": None, "type": "t", "level": "l", "solution": r"\boxed{1}"}, "the problem is None"),
        ("math", {"problem": "q", "type": "t", "level": "l", "solution": None}, "the solution is None"),
        ("gsm8k", {"problem": "q", "answer": "#### 5"}, r"column question, only problem, answer\."),
        ("math", {"problem": "q", "type": "t", "level": "l", "solution": "so $5$"}, r"no \\boxed"),
        ("math", {"problem": "q", "type": "t", "level": "l", "solution": r"so $\boxed{5$"}, "never closed"),
        ("math", {"problem": "q", "type": "t", "level": "l", "solution": r"so $\boxed{ }$"}, "is empty"),
        ("math", {"problem": "q", "type": "t", "level": "l", "solution": rf"\boxed{{{'x' * 301}}}"}, "more than 300"),
        ("amc2023", {"question": "q", "answer": None}, "answer is None"),
        ("amc2023", {"question": "q", "answer": float("nan")}, "answer is nan"),
        ("amc2023", {"question": "q", "answer": " "}, "answer is ' '"),
    ],
)
def test_a_row_that_cannot_be_parsed_is_named(name, row, reason):
    good = {
        "gsm8k": {"question": "q", "answer": "#### 1"},
        "math": {"problem": "q", "type": "t", "level": "l", "solution": r"\boxed{1}"},
        "amc2023": {"question": "q", "answer": 1},
    }[name]
    with pytest.raises(ValueError, match=rf"^{DATASETS[name].name}, split train, row 1: .*{reason}"):
        make_rows(DATASETS[name], "train", [good, row])


def test_nothing_is_written_when_a_row_is_bad(tmp_path):
    splits = {"train": [{"question": "q", "answer": "#### 1"}], "test": [{"question": "q", "answer": "1"}]}
    with pytest.raises(ValueError, match="split test, row 0"):
        write_parquet(DATASETS["gsm8k"], splits, tmp_path / "out")
    with pytest.raises(ValueError, match="train: no rows"):
        write_parquet(DATASETS["gsm8k"], {"train": []}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", data._MATH_UNBOXED, ids=["first", "second"])
def test_the_two_math_problems_without_a_box_have_their_answer(start):
    row = {"problem": start + " ...", "solution": "It is the first.", "type": "Number Theory", "level": "Level 5"}
    assert ground_truths(make_rows(DATASETS["math"], "train", [row])) == ["0"]


@pytest.mark.parametrize(
    ("solution", "boxed"),
    [
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{1}$ or rather $\boxed{2}$", "2"),
        (r"$\boxed{1}$ or rather \fbox{2}", "2"),
        (r"$\boxed{\left\{1,2\right\}}$", r"\left\{1,2\right\}"),
        (r"$\boxed{[0,\infty)\}}$", r"[0,\infty)\}"),
        (r"$\boxed {5}$", "5"),
        (r"$\boxed 5$.", "5"),
        (r"$x=\boxed 12$ and $3$", "12"),
        (r"\[\boxed5.\]", "5"),
        (r"$\boxed{5}$ then \boxedanswer{6}", "5"),
    ],
)
def test_extract_boxed(solution, boxed):
    assert extract_boxed(solution) == boxed


@given(st.recursive(st.text("ab1 ^", min_size=1), lambda inner: inner.map("\\frac{{{0}}}{{{0}}}".format), max_leaves=6))
def test_extract_boxed_keeps_nested_braces_whole(content):
    solution = rf"First $\boxed{{0}}$, then $\boxed{{{content}}}$, done {{}}."
    if content.strip():
        assert extract_boxed(solution) == content.strip()
    else:
        with pytest.raises(ValueError, match="empty"):
            extract_boxed(solution)


@given(st.integers(-(10**9), 10**9))
def test_a_gsm8k_number_survives_its_separators(number):
    assert extract_gsm8k_answer(f"#### no\n#### {number:,} ") == str(number)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (27, "27"),
        (27.0, "27"),
        ("027", "27"),
        ("27.0", "27"),
        (" -3 ", "-3"),
        (2.5, "2.5"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_parse_contest_answer(answer, expected):
    assert parse_contest_answer(answer) == expected


def test_the_command_writes_and_says_what_it_wrote(tmp_path, capsys):
    source, out = FIXTURES / "gsm8k", tmp_path / "out"
    assert main(["data", "--dataset", "gsm8k", "--source", str(source), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"3 rows to {out / 'train.parquet'}" in printed and f"2 rows to {out / 'test.parquet'}" in printed
    assert SYSTEM_PROMPT in printed and raw_rows("gsm8k")[0]["question"] in printed
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["test.parquet", "train.parquet"]


def test_the_dataset_of_verl_reads_the_files(tmp_path):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    prepare("math", FIXTURES / "math", tmp_path / "out")
    config = OmegaConf.create({"cache_dir": str(tmp_path / "verl"), "filter_overlong_prompts_workers": 1})
    dataset = RLHFDataset(str(tmp_path / "out" / "train.parquet"), build_tokenizer(), config)
    assert len(dataset) == 4
    assert dataset[1]["raw_prompt"][1] == {"role": "user", "content": "Solve $2x+3=11$ for $x$."}
    assert dataset[1]["reward_model"]["ground_truth"] == "4"
    assert (dataset[1]["data_source"], dataset[1]["index"]) == ("MATH", 1)


@pytest.mark.parametrize("name", ["gsm8k", "math"])
def test_sft_texts_are_solutions_in_the_papers_format(name, tmp_path):
    splits = load_splits(DATASETS[name], str(FIXTURES / name))
    write_parquet(DATASETS[name], splits, tmp_path / "data", sft=True)
    rows = pq.read_table(tmp_path / "data/sft_train.parquet").to_pylist()
    assert len(rows) == len(splits["train"])
    for row, raw in zip(rows, make_rows(DATASETS[name], "train", splits["train"]), strict=True):
        *prompt, solution = row["messages"]
        assert prompt == raw["prompt"]
        score = compute_score(name, solution["content"], raw["reward_model"]["ground_truth"])
        assert (solution["role"], score["score"], score["strict"]) == ("assistant", 20.0, 1.0)
        assert "<<" not in solution["content"] and "####" not in solution["content"]


def test_sft_texts_of_another_data_set_are_not_trained_on(tmp_path, capsys):
    (path, *_) = write_parquet(
        DATASETS["gsm8k"], load_splits(DATASETS["gsm8k"], str(FIXTURES / "gsm8k")), tmp_path, True
    )
    assert main(["data", "--dataset", "gsm8k", "--holds", str(path)]) == 0
    assert main(["data", "--dataset", "math", "--holds", str(path)]) == 2
    assert f"{path} holds gsm8k, not math: " in capsys.readouterr().err


def test_a_set_of_answers_has_no_sft_texts():
    with pytest.raises(ValueError, match="AIME2024 .*no solutions"):
        data.make_sft_rows(DATASETS["aime2024"], "test", [])


def test_data_of_another_name_are_not_trained_on(tmp_path, capsys):
    sources = {"math": "MATH", "mine": "my own"}
    for name, source in sources.items():
        datasets.Dataset.from_list([{"data_source": source}]).to_parquet(tmp_path / name)
    datasets.Dataset.from_list([{"messages": "of run_sft.sh"}]).to_parquet(tmp_path / "sft")
    (tmp_path / "half").write_bytes(b"PAR1")
    holds = ["data", "--dataset", "gsm8k", "--holds"]
    assert main([*holds, str(tmp_path / "mine"), str(tmp_path / "sft")]) == 0
    assert main([*holds, str(tmp_path / "math")]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'math'} holds math, not gsm8k: " in err and "DATASET" in err
    assert main([*holds, str(tmp_path / "half")]) == 2
    assert f"{tmp_path / 'half'} cannot be read" in capsys.readouterr().err
