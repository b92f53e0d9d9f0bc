"""Text for a terminal: what a file, a name or a log holds must not steer it.

A clipboard can be set, a title or a key changed, by characters that nobody sees (OSC 52, OSC 0, and others).
"""

import unicodedata
from collections.abc import Iterable
from typing import Any

_STEERING = {
    "Cc",  # control characters, among them ESC, which begins every sequence
    "Cf",  # directions of writing, and what has no width
    "Cs",  # halves of a pair, which no encoding has
    "Zl",  # ends of lines that look like none
    "Zp",
}


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text with each character that steers a terminal spelt out, such as `\\x1b`, but for the kept ones."""
    if text.isprintable():
        return text
    return "".join(_spelt_out(character) if _steers(character, kept) else character for character in text)


def _steers(character: str, kept: str) -> bool:
    return character not in kept and unicodedata.category(character) in _STEERING


def _spelt_out(character: str) -> str:
    return ascii(character)[1:-1]


class PrintableStream:
    """A text stream through which nothing that steers a terminal passes, but for the kept characters."""

    def __init__(self, stream: Any, kept: str = "\n\t"):
        self._stream = stream
        self._kept = kept

    def write(self, text: str) -> int:
        """Write a text; returns its length, as the stream behind does."""
        self._stream.write(printable(text, self._kept))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of some texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
