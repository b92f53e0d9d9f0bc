"""A log that is one JSON document: TRL's trainer_state.json, its history by itself, or a notebook."""

import json
from collections.abc import Iterator
from typing import Any

from gtpo_verl.tools.diagnose.entries import FORMS, Entry, entry_of

DOCUMENT = 1 << 26
"""Characters of a document, at most."""


def is_document(first: str, second: str) -> bool:
    """Return whether a file is one JSON document, and not a dict a line, by its first two lines."""
    first = first.strip()
    if first.startswith("["):
        return True
    if not first.startswith("{"):
        return False
    is_one_line = not second.strip()
    try:
        logged = json.loads(first)
    except (RecursionError, ValueError):
        is_opened = first == "{"
        is_unfinished = first.startswith('{"') and is_one_line
        return is_opened or is_unfinished
    is_summary = isinstance(logged, dict) and "_runtime" in logged  # of W&B
    is_entry = isinstance(logged, dict) and entry_of(logged) is not None
    return is_one_line and (is_summary or not is_entry)


def read_document(name: str, text: str) -> Any:
    """Return the document of a text; a ValueError names what is wrong with it."""
    if len(text) >= DOCUMENT:
        raise ValueError(f"{name} is longer than {DOCUMENT >> 20} MB: give the log of the run, {FORMS}")
    try:
        document = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{name} contains no training metrics ({error!r}): give {FORMS}") from error
    if isinstance(document, dict) and "_runtime" in document:
        raise ValueError(f"{name} is W&B's summary, the last step alone: give output.log, or the history as CSV")
    return document


def history(name: str, document: Any) -> list[Entry]:
    """Return the entries of the first list of dicts with a step in a document, whatever holds it.

    Raises:
        ValueError: there is none.
    """
    for candidate in _lists(document):
        entries = []
        for logged in candidate:
            entry = entry_of(logged) if isinstance(logged, dict) else None
            if entry is not None and entry.step is not None:
                entries.append(entry)
        if entries:
            return entries
    raise ValueError(
        f"{name} contains no training metrics, such as the log_history of trainer_state.json: give {FORMS}"
    )


def _lists(document: Any) -> list[list[Any]]:
    """Return the lists in a document: itself, or those that a dict holds, TRL's `log_history` first."""
    if isinstance(document, list):
        return [document]
    if not isinstance(document, dict):
        return []
    lists: list[list[Any]] = []
    for key, value in document.items():
        if not isinstance(value, list):
            continue
        if key == "log_history":
            lists.insert(0, value)
        else:
            lists.append(value)
    return lists


def printed_lines(name: str, document: Any) -> Iterator[str]:
    """Yield the lines that the cells of a notebook printed.

    Raises:
        ValueError: they printed none, as where training shows a table, or it is no notebook.
    """
    lines = []
    try:
        for cell in document["cells"]:
            for output in cell.get("outputs", []):
                text = output.get("text", "")
                lines += "".join(text).splitlines(keepends=True)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{name} has cells that are none of a notebook: give {FORMS}") from error
    if not lines:
        raise ValueError(f"{name} is a notebook that printed nothing: copy its table into a .csv file")
    yield from lines
