"""What tokens spell."""

from token_dump import END
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gtpo_verl.tools.rollouts.tokens import load_tokenizer, token_pieces


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
