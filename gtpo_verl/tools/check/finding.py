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
    """A problem, which has a remedy, or a warning, which has advice."""

    subject: str
    says: str
    remedy: str = ""
    advice: str = ""


def print_all(findings: Collection[Finding]) -> int:
    """Print warnings and problems; returns the number of problems."""
    problems = 0
    for finding in findings:
        kind = "problem" if finding.remedy else "warning"
        problems += 1 if finding.remedy else 0
        parts = [part for part in (kind, finding.subject, finding.says, finding.remedy or finding.advice) if part]
        # A table begins on a line of its own.
        print(printable(": ".join(parts).replace(": \n", ":\n")))
    return problems


def module_spec(name: str) -> ModuleSpec | None:
    """Return where a module is, None also if the package that it would be in is missing; imports that package."""
    with suppress(ModuleNotFoundError):
        return find_spec(name)
    return None
