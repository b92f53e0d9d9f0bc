"""What tokens spell."""

import pytest
from token_dump import END
from tokenizers import Tokenizer, decoders, models

from gtpo_verl.tokens import load_tokenizer, spell

LOST = "\ufffd"


def test_a_character_is_at_the_last_of_its_tokens(tokenizer):
    loaded = load_tokenizer(tokenizer)
    words = spell(loaded, [*"é☃🙂 a\n\x00".encode(), END, 9999])
    assert words == ["", "é", "", "", "☃", "", "", "", "🙂", " ", "a", "\n", "\x00", "<|im_end|>", "<9999>"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xffa", ["", LOST + "a"]),
        (b"\xe2\x98", ["", LOST]),
        (b"\xff" * 6, ["", "", "", LOST * 4, "", LOST * 2]),
        (b"", []),
    ],
)
def test_bytes_that_are_no_character_hold_up_three_tokens_at_most(tokenizer, data, words):
    assert spell(load_tokenizer(tokenizer), [*data]) == words


def test_a_vocabulary_with_byte_tokens_and_a_space_before_each_word():
    vocabulary = {"▁sum": 0, "<0xE2>": 1, "<0x41>": 2, "s": 3, "<unk>": 4, "<0x98>": 5, "<0x83>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    assert spell(tokenizer, [0, 0, 3, 1, 5, 6, 2]) == ["sum", " sum", "s", "", "", "☃", "A"]
    assert spell(tokenizer, [2, 1, 3, 0]) == ["A", "", LOST + "s", " sum"]


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_folder_without_a_tokenizer_is_named(tmp_path, text):
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match="save_pretrained"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_was_saved_with_a_limit_cuts_nothing(tokenizer, tmp_path):
    limited = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    limited.enable_truncation(3)
    limited.enable_padding(length=9)
    limited.save(str(tmp_path / "tokenizer.json"))
    encoded = [load_tokenizer(str(folder)).encode("a long text").ids for folder in (tmp_path, tokenizer)]
    assert encoded[0] == encoded[1]
