"""What tokens spell, from the vocabulary of their tokenizer."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

Piece: TypeAlias = str | list[int]
"""What a token adds to a text: a string, or its bytes where they are not whole characters."""


def load_tokenizer(name: str) -> Any:
    """The tokenizer in a folder, or of that name on the Hub.

    Raises:
        ValueError: there is none.
    """
    from transformers import AutoTokenizer

    is_path, is_there = Path(name).is_absolute() or name.startswith((".", "~")), Path(name).is_dir()
    if not is_path and not is_there:
        print(f"{name} is no folder here: asking the Hugging Face Hub", file=sys.stderr)
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=is_path)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer {name}: give its folder or Hub name with --tokenizer") from error


def token_pieces(tokenizer: Any, ids: Iterable[int]) -> dict[int, Piece]:
    """What each token adds to a text.

    Decoding tokens one by one would lose such bytes, so the vocabulary's own entries are read: those of a byte-level
    BPE spell each byte as a character, others have tokens like `<0xE2>`.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    is_byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    pieces: dict[int, Piece] = {}
    for number in ids:
        piece = tokenizer.convert_ids_to_tokens(number)
        if number in added:
            pieces[number] = added[number]
        elif piece is None:
            pieces[number] = f"<{number}>"
        elif isinstance(piece, bytes):
            pieces[number] = _text_or_bytes(piece)
        elif is_byte_level and set(piece) <= byte_of.keys():
            pieces[number] = _text_or_bytes(bytes(byte_of[character] for character in piece))
        elif not is_byte_level and re.fullmatch("<0x[0-9A-F]{2}>", piece):
            pieces[number] = _text_or_bytes(bytes([int(piece[3:5], 16)]))
        else:
            pieces[number] = piece if is_byte_level else piece.replace("▁", " ")
    return pieces


def spell(pieces: Sequence[Piece]) -> list[str]:
    """The text of each token of a sequence; a character whose bytes are spread over tokens is at that of its first.

    A byte that is no UTF-8 becomes the lone surrogate U+DC00 + byte.
    """
    encoded = [piece.encode(errors="surrogatepass") if isinstance(piece, str) else bytes(piece) for piece in pieces]
    owners = [t for t, piece in enumerate(encoded) for _ in piece]
    words, at = [""] * len(pieces), 0
    for character in b"".join(encoded).decode(errors="surrogateescape"):
        words[owners[at]] += character
        at += len(character.encode(errors="surrogateescape"))
    return words


def _text_or_bytes(piece: bytes) -> Piece:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
