"""What `gtpo-verl view` reads, and that it cannot break out of the page."""

import json
import os
import re
import shutil
import tracemalloc

import pandas as pd
import pytest
from own_process import run_python
from rollout_files import LETTER_COUNTING
from token_dump import BAD, END, GOOD, STEPS, write_rollouts

from gtpo_verl import cli
from gtpo_verl.run import dumps
from gtpo_verl.tools import rollouts
from gtpo_verl.tools.rollouts import find_source, read_step, thin_out


def test_a_dump_is_found_by_folder_by_run_and_by_file(dump):
    steps = find_source(dump.parent).paths
    assert len(steps) == 3 and find_source(dump).paths == steps and find_source(steps[1]).paths == [steps[1]]


def refusal(capsys, folder, *options):
    assert cli.main(["view", str(folder), *map(str, options), "--out", str(folder / "view.html")]) == 2
    assert not (folder / "view.html").exists()
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("gtpo-verl"))
    return line


def test_an_empty_folder_leads_to_the_key_that_writes_a_dump(tmp_path, capsys):
    assert "+algorithm.gtpo.dump_dir=DIR" in refusal(capsys, tmp_path)


def test_dumps_of_several_runs_are_not_mixed(dump, tmp_path, capsys):
    shutil.copytree(dump, tmp_path / "a")
    shutil.copytree(dump, tmp_path / "b")
    line = refusal(capsys, tmp_path)
    assert "several runs" in line and str(tmp_path / "a") in line and str(tmp_path / "b") in line


def test_a_tokenizer_that_is_not_there_is_named(dump, tmp_path, capsys):
    shutil.copytree(dump, tmp_path / "a")
    line = refusal(capsys, tmp_path / "a", "--tokenizer", tmp_path / "none")
    assert f"no tokenizer {tmp_path / 'none'} " in line and "--tokenizer" in line


def test_rollouts_which_are_text_need_a_tokenizer(tmp_path, capsys):
    write_rollouts(tmp_path / "rollouts", {1: STEPS[1][:2]})
    line = refusal(capsys, tmp_path / "rollouts")
    assert f"{tmp_path / 'rollouts'} has verl's" in line and line.endswith("--tokenizer")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schema_version": 99}, "gtpo_dump.json has schema_version 99"),
        ({"gtpo": 1}, "gtpo_dump.json is corrupt"),
        ({"tokenizer": 7}, "gtpo_dump.json is corrupt"),
        ({"initial_entropy": float("nan")}, "gtpo_dump.json is corrupt"),
    ],
    ids=["schema_version", "gtpo", "tokenizer", "initial_entropy"],
)
def test_a_header_of_another_version_or_of_wrong_fields_is_named(dump, tmp_path, capsys, changed, message):
    shutil.copytree(dump, tmp_path / "a")
    header = json.loads((tmp_path / "a/gtpo_dump.json").read_text())
    (tmp_path / "a/gtpo_dump.json").write_text(json.dumps(header | changed))
    assert message in refusal(capsys, tmp_path / "a")


def test_a_folder_is_no_file_for_the_page(dump, tmp_path, capsys):
    assert cli.main(["view", str(dump), "-o", str(tmp_path)]) == 2
    assert f"--out {tmp_path} is a folder" in capsys.readouterr().err


SLIM = "import sys; sys.modules.update(dict.fromkeys(('torch', 'verl', 'transformers', 'ray')))\n"


def test_a_dump_is_read_without_torch_and_what_a_text_needs_is_named(tmp_path, tokenizer):
    view = SLIM + "from gtpo_verl.cli import main; sys.exit(main(['view', *sys.argv[1:]]))"
    own = (LETTER_COUNTING, "--tokenizer", LETTER_COUNTING)
    assert "steps 11" in run_python(view, *own, "-o", tmp_path / "view.html").stdout
    write_rollouts(tmp_path / "rollouts", {1: STEPS[1][:2]})
    failed = run_python(view, tmp_path / "rollouts", "--tokenizer", tokenizer, "-o", "-", status=2)
    assert "no package torch" in failed.stderr and "pip install '.[rollouts]'" in failed.stderr
    code = SLIM + (
        "from pathlib import Path; from gtpo_verl.tools.diagnose.rollout_stats import read_rollouts\n"
        "print(len(read_rollouts(Path(sys.argv[1]), sys.argv[1], None).steps))"
    )
    assert run_python(code, LETTER_COUNTING).stdout == "11\n"


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_what_is_no_regular_file_is_left_out(dump, tmp_path, kind):
    shutil.copytree(dump, tmp_path / "dump")
    (tmp_path / "rollouts").mkdir()
    for path in (tmp_path / "dump/step_000002.jsonl", tmp_path / "rollouts/1.jsonl"):
        os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    assert len(find_source(tmp_path / "dump").paths) == 3
    with pytest.raises(ValueError, match="has no gtpo_dump.json"):
        find_source(tmp_path / "rollouts")


def test_words_of_the_dump_do_without_a_tokenizer_unless_one_is_given(dump, tmp_path, tokenizer):
    rows = read_step(dump / "step_000001.jsonl", tokenizer)
    (tmp_path / "step_000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_step(tmp_path / "step_000001.jsonl", "none") == rows
    with pytest.raises(ValueError, match="no tokenizer"):
        read_step(tmp_path / "step_000001.jsonl", tokenizer, "./none")
    with pytest.raises(ValueError, match="which the tokenizer"):
        read_step(tmp_path / "step_000001.jsonl", tokenizer, str(LETTER_COUNTING))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, ...) for name in ("uid", "reward", "keep", "prompt_ids", "lambda", "entropy")),  # not there
        ("uid", 1),
        *(("reward", value) for value in (None, "1", [1], float("inf"), 10**400, 1e308)),
        *(("step", value) for value in (1e999, [1], {}, -1, 1.5)),
        *(("entropy", [value] * 37) for value in (10**400, -1e308)),
        *(("prompt_ids", value) for value in (None, 7, {"a": 1}, ["a"], [1.5], [-1], [10**30])),
        *(("lambda", value) for value in (None, "x", [], ["a"])),
        ("inference_logprobs", [0.0]),
    ],
)
def test_a_completion_of_wrong_fields_is_named_by_its_line(dump, tmp_path, capsys, field, value):
    shutil.copy(dump / "gtpo_dump.json", tmp_path)
    first, second, *_ = (dump / "step_000001.jsonl").read_text().splitlines()
    completion = json.loads(second) | {field: value}
    if value is ...:
        del completion[field]
    (tmp_path / "step_000001.jsonl").write_text(f"{first}\n{json.dumps(completion)}\n")
    line = refusal(capsys, tmp_path)
    assert "step_000001.jsonl:2 is not" in line and "token dump" in line and len(line) < 500


@pytest.mark.parametrize("text", [b"", b"[1]\n", b"7\n", b"\n", b"\xff\xfe\0\n", b"[" * 100_000, b'{"step": 1, "ui'])
def test_a_step_file_that_is_none_is_named(dump, tmp_path, capsys, text):
    shutil.copy(dump / "gtpo_dump.json", tmp_path)
    (tmp_path / "step_000001.jsonl").write_bytes(text)
    assert "step_000001.jsonl" in refusal(capsys, tmp_path)


def read_rollouts(path, tokenizer):
    source = find_source(path, tokenizer)
    return [completion for file in source.paths for completion in source.read(file)]


def test_rollouts_get_what_a_dump_of_the_same_completions_has_but_for_the_end(dump, tmp_path, tokenizer):
    texts, rewards, _ = STEPS[1]
    write_rollouts(tmp_path, {1: (texts, rewards)})
    of_dump = read_step(dump / "step_000001.jsonl", tokenizer)
    for found, dumped in zip(read_rollouts(tmp_path, tokenizer), of_dump, strict=True):
        assert [*found["token_ids"], END] == dumped["token_ids"] and found["prompt_ids"] == dumped["prompt_ids"]
        assert [*found["token_strings"], "<|im_end|>"] == dumped["token_strings"] and found["prompt"] == dumped[
            "prompt"
        ]
        assert found["lambda"] == dumped["lambda"][:-1]
        for name in ("step", "reward", "group_advantage", "prefix_len"):
            assert found[name] == dumped[name]
        assert found["suffix_len"] == max(0, dumped["suffix_len"] - 1)
        assert dumped["ended"] and not found.keys() & {"ended", "entropy", "trajectory_entropy", "trainer_logprobs"}


def test_rollouts_of_both_trainers_are_grouped(tmp_path, tokenizer):
    """V1 writes `{uid}_{session}_{output}`, the legacy trainer no uid; padding is no member."""
    v1 = [("a_0_0", "call", 0.0), ("a_0_1", GOOD, 20.0), ("a_1_0", BAD, 0.0), ("b_0_0", "x", 1.0), ("b_1_0", "", 3.0)]
    rows = [
        {"uid": uid, "output": text, "score": score, "input": "q"} for uid, text, score in [*v1, ("pad1f_0_0", "", 0.0)]
    ]
    (tmp_path / "10.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    legacy = [{"output": text, "score": score, "input": uid[0]} for uid, text, score in v1[1:]]
    (tmp_path / "9.jsonl").write_text("".join(json.dumps(row) + "\n" for row in legacy))
    completions = read_rollouts(tmp_path, tokenizer)
    assert [x["step"] for x in completions] == [9] * 4 + [10] * 4
    assert [x["uid"] for x in completions] == ["a", "a", "b", "b"] * 2
    assert [round(x["group_advantage"], 3) for x in completions] == [0.707, -0.707, -0.707, 0.707] * 2


def write_trl(folder, step, rows):
    """What TRL writes under `log_completions=True`: (completion, accuracy, style, A) of one prompt each."""
    names = ("completion", "accuracy_reward", "style", "advantage")
    table = pd.DataFrame([dict(zip(names, row, strict=True)) for row in rows]).assign(step=step, prompt="7 + 5 = ?")
    folder.mkdir(parents=True, exist_ok=True)
    table.to_parquet(folder / f"completions_{step:05d}.parquet")


@pytest.mark.parametrize("below", ["completions", "completions/train"])
def test_trls_completions_have_its_own_advantages(tmp_path, tokenizer, capsys, below):
    write_trl(tmp_path / below, 10, [(GOOD, 1.0, 0.5, 0.25), (BAD, 0.0, float("nan"), -0.25)])
    write_trl(tmp_path / below, 9, [(GOOD, 1.0, 0.0, 0.0), (GOOD, 1.0, 0.0, 0.0)])
    write_trl(tmp_path / "completions/eval", 11, [(GOOD, 1.0, 0.0, 0.0)])
    completions = read_rollouts(tmp_path, tokenizer)
    assert [(x["step"], x["reward"], x["group_advantage"]) for x in completions] == [
        *((9, 1.0, 0.0), (9, 1.0, 0.0), (10, 1.5, 0.25), (10, 0.0, -0.25)),
    ]
    assert max(completions[2]["lambda"]) == 2 and min(completions[3]["lambda"]) == 0
    assert cli.main(["view", str(tmp_path), "--tokenizer", tokenizer, "-o", str(tmp_path / "view.html")]) == 0
    assert "TRL's completions" in (tmp_path / "view.html").read_text()


def test_a_group_of_conversations_is_read_and_a_rounded_a_at_the_mean_has_no_sign(tmp_path, tokenizer):
    rewards = (0.4, 0.5, 0.6, 0.4, 0.7, 0.8, 0.7, 0.7)
    outputs = [GOOD if reward == 0.6 else BAD for reward in rewards]
    rows = [(output, reward, 0.0, reward - 0.6 or 4e-7) for output, reward in zip(outputs, rewards, strict=True)]
    write_trl(tmp_path, 1, rows)
    file = tmp_path / "completions_00001.parquet"
    as_text, table = read_rollouts(tmp_path, tokenizer), pd.read_parquet(file)
    assert [x["group_advantage"] for x in as_text if x["reward"] == 0.6] == [0.0]
    for name in ("prompt", "completion"):
        table[name] = [[{"role": "user", "content": text}] for text in table[name]]
    table.to_parquet(file)
    assert read_rollouts(tmp_path, tokenizer) == as_text


def test_a_of_weighted_rewards_is_left_as_it_is(tmp_path, tokenizer):
    write_trl(tmp_path, 1, [(GOOD, 1.0, 0.0, 0.707), (BAD, 0.0, 1.0, -0.707)])  # equal sums
    assert [round(x["group_advantage"], 3) for x in read_rollouts(tmp_path, tokenizer)] == [0.707, -0.707]


def test_rollouts_of_several_runs_are_not_mixed(tmp_path, tokenizer, capsys):
    for run in ("a", "b"):
        write_trl(tmp_path / run, 1, [(GOOD, 1.0, 0.5, 0.25), (BAD, 0.0, 0.5, -0.25)])
    line = refusal(capsys, tmp_path, "--tokenizer", tokenizer)
    assert f"{tmp_path} has rollouts" in line and line.endswith(f" {tmp_path / 'a'}, {tmp_path / 'b'}")


@pytest.mark.parametrize("damage", ["no parquet", "no text"])
def test_what_is_no_table_of_trl_is_named(tmp_path, tokenizer, capsys, damage):
    file = tmp_path / "completions_00001.parquet"
    file.write_bytes(b"PAR1") if damage == "no parquet" else pd.DataFrame({"prompt": [["a"]]}).to_parquet(file)
    assert file.name in refusal(capsys, tmp_path, "--tokenizer", tokenizer)


def test_a_small_file_that_holds_any_amount_of_text_is_named(tmp_path, tokenizer, monkeypatch, capsys):
    """Parquet writes a thousand equal rows as one."""
    write_trl(tmp_path, 10, [(GOOD * 20, 1.0, 0.5, 0.25)] * 1000)
    monkeypatch.setattr(rollouts, "_READ_BYTES", 1 << 18)
    assert (tmp_path / "completions_00010.parquet").stat().st_size < 1 << 14
    assert "completions_00010.parquet holds more than" in refusal(capsys, tmp_path, "--tokenizer", tokenizer)


@pytest.mark.parametrize("length", [3 << 20, 9 << 20])  # less than may be read, and more
def test_a_long_text_of_many_rows_is_refused_before_it_is_held(tmp_path, tokenizer, monkeypatch, capsys, length):
    write_trl(tmp_path, 10, [("a" * length, 1.0, 0.5, 0.25)] * 16)
    monkeypatch.setattr(rollouts, "_READ_BYTES", 4 << 20)
    assert (tmp_path / "completions_00010.parquet").stat().st_size < 1 << 20
    tracemalloc.start()
    said = refusal(capsys, tmp_path, "--tokenizer", tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "completions_00010.parquet holds more than" in said
    assert peak < 16 << 20  # the rows together are 48 MB and more


def test_a_line_that_grows_in_memory_is_refused_and_what_nobody_knows_is_not_kept(
    dump, tmp_path, tokenizer, monkeypatch
):
    rows = (dump / "step_000001.jsonl").read_text().splitlines()
    (tmp_path / "step_000001.jsonl").write_text("".join(f'{row[:-1]},"x":[1,[],[]]}}\n' for row in rows))
    assert read_step(tmp_path / "step_000001.jsonl", tokenizer) == read_step(dump / "step_000001.jsonl", tokenizer)
    monkeypatch.setattr(dumps, "_MAX_BRACKETS", 100)
    (tmp_path / "step_000001.jsonl").write_text(rows[0][:-1] + ',"x":[' + "[]," * 100 + "0]}\n")
    with pytest.raises(ValueError, match="step_000001.jsonl:1 .*brackets"):
        read_step(tmp_path / "step_000001.jsonl", tokenizer)


def test_of_a_large_step_of_a_dump_its_first_whole_groups_are_read(dump, tmp_path, tokenizer, monkeypatch, capsys):
    first, second, third = (json.loads(row) for row in (dump / "step_000001.jsonl").read_text().splitlines())
    of_two = [first, second, first | {"uid": "other"}, third | {"uid": "other"}, third | {"uid": "third"}]
    lines = [json.dumps(row) + "\n" for row in of_two]
    path = tmp_path / "step_000001.jsonl"
    path.write_text("".join(lines))
    monkeypatch.setattr(rollouts, "_DUMP_BYTES", sum(map(len, lines[:2])))
    assert [row["uid"] for row in read_step(path, tokenizer)] == [first["uid"]] * 2
    assert f"{path}: the first 2 completions" in capsys.readouterr().err
    monkeypatch.setattr(rollouts, "_DUMP_BYTES", 10)
    assert len(read_step(path, tokenizer)) == 1  # of a first group that is as large, its beginning


def test_a_file_of_too_much_text_is_named(tmp_path, tokenizer, monkeypatch, capsys):
    write_rollouts(tmp_path, {1: STEPS[1][:2]})
    monkeypatch.setattr(rollouts, "_READ_BYTES", 10)
    assert "1.jsonl holds more than" in refusal(capsys, tmp_path, "--tokenizer", tokenizer)


def test_a_line_that_does_not_end_is_named(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(dumps, "_MAX_LINE_BYTES", 1 << 10)
    row = {"input": "q", "output": "o" * (1 << 11), "score": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    assert f"{tmp_path / '1.jsonl'}:1 is not" in refusal(capsys, tmp_path, "--tokenizer", tokenizer)


def test_a_large_step_shows_its_first_groups_and_says_so(tmp_path, tokenizer, monkeypatch, capsys):
    rows = [{"uid": f"{i}_{j}_0", "input": str(i), "output": GOOD, "score": j} for j in range(2) for i in range(9)]
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(rollouts, "_TEXT_BYTES", 5 * len(GOOD))
    assert [x["uid"] for x in read_rollouts(tmp_path, tokenizer)] == ["0", "0", "1", "1", "2", "2"]
    assert "1.jsonl: the first 3 of 9" in capsys.readouterr().err


def test_steps_are_thinned_out_evenly_to_a_size(tmp_path):
    paths = [tmp_path / str(i) for i in range(9)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    assert thin_out(paths, 90) == paths
    assert thin_out(paths, 50) == paths[::2]
    assert thin_out(paths, 1) == [paths[-1]]


def test_a_file_that_verl_is_still_writing_is_left_out(tmp_path, tokenizer):
    write_rollouts(tmp_path, {1: STEPS[1][:2], 2: STEPS[10][:2]})
    with (tmp_path / "2.jsonl").open("rb+") as file:
        file.truncate((tmp_path / "2.jsonl").stat().st_size - 5)
    assert [path.name for path in find_source(tmp_path, tokenizer).paths] == ["1.jsonl"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", r"1\.jsonl:2 is not "),
        ('{"input": "q", "output": "o"}', r"1\.jsonl:2 is not .*KeyError\('score'\)"),
        ('{"input": "q", "output": 1, "score": 0}', r"1\.jsonl:2 is not .*output .*not text"),
        ('{"input": "q", "output": "o", "score": NaN}', r"1\.jsonl:2 is not .*score is nan"),
        ('{"input": "other", "output": "o", "score": 0}', r"1\.jsonl has one completion"),
    ],
    ids=["no object", "no score", "a number", "nan", "no groups"],
)
def test_a_file_that_is_no_rollout_is_named(tmp_path, tokenizer, capsys, line, message):
    (tmp_path / "1.jsonl").write_text('{"input": "q", "output": "o", "score": 1}\n' + line + "\n")
    assert re.search(message, refusal(capsys, tmp_path, "--tokenizer", tokenizer))
