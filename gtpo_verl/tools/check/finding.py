"""What a check has found, and how it is printed."""

from collections.abc import Collection
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import NamedTuple

from gtpo_verl.terminal import printable

VARIABLE = "GTPO_CHECK"
"""The environment variable with which a run of verl is checked and not started."""


class Finding(NamedTuple):
    """A problem, which has a remedy, or a warning, which has none.

    Attributes:
        subject: what it is about, such as a key with its value.
        message: what is wrong with it.
        remedy: what to do; only a problem has one.
        advice: what a warning adds to its message.
    """

    subject: str
    message: str
    remedy: str = ""
    advice: str = ""


def problem(text: str) -> Finding:
    """Return a problem whose text already names key, value and remedy."""
    return Finding(subject="", message="", remedy=text)


def print_all(findings: Collection[Finding]) -> int:
    """Print warnings and problems; returns the number of problems."""
    problems = 0
    for finding in findings:
        if finding.remedy:
            problems += 1
            parts = ["problem", finding.subject, finding.message, finding.remedy]
        else:
            parts = ["warning", finding.subject, finding.message, finding.advice]
        line = ": ".join(part for part in parts if part)
        # A table begins on a line of its own.
        print(printable(line.replace(": \n", ":\n")))
    return problems


def module_spec(name: str) -> ModuleSpec | None:
    """Return the spec of a module; None if it, or a package that it would be in, is not installed.

    The packages that it is in are imported, the module itself is not.
    """
    with suppress(ModuleNotFoundError):
        return find_spec(name)
    return None
