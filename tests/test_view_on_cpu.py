"""What `gtpo-verl view` reads, and that it cannot break out of the page."""

import json
import re
import shutil

import pytest
from token_dump import END, HOSTILE, STEPS, save_tokenizer, write_dump
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gtpo_verl import cli, view
from gtpo_verl.view.page import page_step, render, summarize
from gtpo_verl.view.sources import find_dump, read_step
from gtpo_verl.view.tokens import load_tokenizer, token_pieces


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def dump(tmp_path_factory, tokenizer):
    return write_dump(tmp_path_factory.mktemp("run") / "dump", tokenizer, STEPS)


def test_pieces_keep_every_byte(tokenizer):
    loaded = load_tokenizer(tokenizer)
    data = "é☃🙂 a\n\x00".encode() + bytes(range(256))
    pieces = token_pieces(loaded, {*data, END, 9999})
    assert b"".join(p.encode() if isinstance(p := pieces[b], str) else bytes(p) for b in data) == data
    assert pieces[END] == "<|im_end|>" and pieces[9999] == "<9999>"
    assert pieces[0xE2] == [0xE2] and pieces[ord("a")] == "a"


def test_pieces_of_a_vocabulary_with_byte_tokens():
    vocabulary = {"▁sum": 0, "<0xE2>": 1, "<0x41>": 2, "s": 3, "<unk>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces = token_pieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer), range(4))
    assert pieces == {0: " sum", 1: [0xE2], 2: "A", 3: "s"}


def test_a_dump_is_found_by_folder_by_run_and_by_file(dump):
    header, steps = find_dump(dump.parent)
    assert (header, steps) == find_dump(dump) and len(steps) == 3
    assert find_dump(steps[1]) == (header, [steps[1]])


def test_what_is_no_dump_is_an_error_with_a_remedy(dump, tmp_path, capsys):
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "+algorithm.gtpo.dump_dir=DIR" in capsys.readouterr().err
    shutil.copytree(dump, tmp_path / "a")
    shutil.copytree(dump, tmp_path / "b")
    assert cli.main(["view", str(tmp_path)]) == 2
    assert "several runs" in capsys.readouterr().err
    assert cli.main(["view", str(tmp_path / "a"), "--tokenizer", str(tmp_path / "none")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    header = json.loads((tmp_path / "b/gtpo_dump.json").read_text())
    (tmp_path / "b/gtpo_dump.json").write_text(json.dumps(header | {"schema_version": 99}))
    assert cli.main(["view", str(tmp_path / "b")]) == 2
    assert "schema_version 99" in capsys.readouterr().err


WRONG_FIELDS = [
    (name, value)
    for names, values in (
        (("uid",), (None, 1, ["a"])),
        (
            ("step", "reward", "group_advantage", "trajectory_entropy", "keep", "prefix_len"),
            (None, "1", [1], float("inf")),
        ),
        (("prompt_ids", "token_ids"), (None, "ab", 7, {"a": 1}, ["a"], [1.5], [-1], [10**30])),
        (("response_mask", "loss_mask", "lambda", "advantages", "entropy", "trainer_logprobs"), (None, "x", [], ["a"])),
    )
    for name in names
    for value in (..., *values)  # ...: it is not there
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
def test_a_completion_of_wrong_fields_is_named_by_its_line(dump, tmp_path, capsys, field, value):
    shutil.copy(dump / "gtpo_dump.json", tmp_path)
    first, second, *_ = (dump / "step_000001.jsonl").read_text().splitlines()
    completion = json.loads(second) | {field: value}
    if value is ...:
        del completion[field]
    (tmp_path / "step_000001.jsonl").write_text(f"{first}\n{json.dumps(completion)}\n")
    assert cli.main(["view", str(tmp_path), "--out", str(tmp_path / "view.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_000001.jsonl:2 is not a line of a token dump" in line and len(line) < 500
    assert not (tmp_path / "view.html").exists()


@pytest.mark.parametrize("text", [b"", b"[1]\n", b"7\n", b"\n", b"\xff\xfe\0\n", b"[" * 100_000, b'{"step": 1, "ui'])
def test_a_step_file_that_is_none_is_named(dump, tmp_path, capsys, text):
    shutil.copy(dump / "gtpo_dump.json", tmp_path)
    (tmp_path / "step_000001.jsonl").write_bytes(text)
    assert cli.main(["view", str(tmp_path), "--out", str(tmp_path / "view.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "step_000001.jsonl" in line and not (tmp_path / "view.html").exists()


def test_steps_are_thinned_out_evenly_to_a_size(tmp_path):
    paths = [tmp_path / str(i) for i in range(9)]
    for path in paths:
        path.write_bytes(b"x" * 10)
    assert view.thin_out(paths, 90) == paths
    assert view.thin_out(paths, 50) == paths[::2]
    assert view.thin_out(paths, 1) == [paths[-1]]


def test_the_page_holds_no_markup_of_the_run_and_asks_for_nothing(tmp_path, tokenizer):
    write_dump(tmp_path / "dump", tokenizer, {1: (HOSTILE, [1.0, 0.0, 0.5], 0.2)}, prompt="</script><b>")
    header, paths = find_dump(tmp_path / "dump")
    steps = [page_step(read_step(path)) for path in paths]
    pieces = {id: f"</script><img {id}>" for step in steps for id in step.ids}
    page = render(header, steps, pieces, source="</title><script>x</script>")
    assert page.count("</script>") == 3 and "<img" not in page and page.count("</title>") == 1
    assert "default-src 'none'" in page
    assert not re.search(r"<[^>]+(src|href)=|https?://(?!www.w3.org/2000/svg)|@\w+@", page)


def test_summary_counts_each_trained_token_once():
    base = {"step": 3, "reward": 2.0, "keep": True, "loss_mask": [1, 1, 0, 1], "lambda": [0.0, 2.0, 2.0, 1.0]}
    summary = summarize([base, base | {"keep": False, "reward": 4.0}])
    assert summary == {"step": 3, "tokens": 6, "protected": 1, "doubled": 1, "filtered": 3, "reward": 3.0}
