"""The report as one screen of 80 columns, which opens with the verdict and the advice."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.explain import label
from gtpo_verl.monitor.frameworks import PART
from gtpo_verl.tools.diagnose.report import window_text

_WIDTH = 80
_NAME_WIDTH = 36
_COLUMN_WIDTH = 9
_LAST_WIDTH = 12
_TELLING = ("validation", "accuracy", "exact_format", "terminated", "kl")
"""The numbers that are most worth logging; all of them fit on one line."""
_SHARED = (
    "Good and bad completions share {forward:.0%} of their tokens from the start, {backward:.0%} from the end, "
    "{either:.0%} either way, in {groups:.0%} of groups."
)
_MASKED = "{either:.0%} of tokens have another weight than 1 in the run itself, in {groups:.0%} of groups."


def screen(report: Mapping[str, Any], plotted: Path | None = None) -> str:
    """Return the whole report as text; `plotted` is the file of the plot, if one was drawn."""
    paragraphs = [_verdict(report), _moved(report), _table(report), _completions(report), _end(report, plotted)]
    return "\n\n".join("\n".join(lines) for lines in paragraphs if lines)


def _verdict(report: Mapping[str, Any]) -> list[str]:
    since = "" if report["since"] is None else f" since step {report['since']}"
    lines = _wrap(f"{report['verdict'].upper()}{since}: {report['why']}.")
    if report["advice"]:
        lines += _wrap(report["advice"])
    if report["try"]:
        lines += _wrap(f"Try {report['try']}")
    lines.append(_cut(report["log"]))
    first, last = report["steps"]
    source = [report["framework"], f"steps {first} to {last}"]
    if report["completions"]:
        source.append(f"{report['completions']} completions a step")
    if report["limit"]:
        source.append(f"cut off at {report['limit']:.0f} tokens")
    lines += _wrap(", ".join(source))
    for note in report["notes"]:
        lines += _wrap(note)
    return lines


def _moved(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each number that moved, and for each part of the reward that never did."""
    lines = []
    if report["moved"]:
        lines.append("What moved, the largest first:")
    for move in report["moved"]:
        levels = f"{_name(move['number'])} {_short(move['first'])} to {_short(move['last'])}"
        text = f"{levels} since step {move['since']} ({_deviations(move['deviations'])}): {move['meaning']}"
        override = f"; try {move['try']}" if move["try"] and move["try"] != report["try"] else ""
        lines += _wrap(f"- {text}{override}", "  ")
    for name, value in report["constant_parts"].items():
        lines += _wrap(f"- {name}, a part of the reward, is {_short(value)} in every step: it teaches nothing", "  ")
    return lines


def _table(report: Mapping[str, Any]) -> list[str]:
    lines = [_row(window_text(report), "start", "best", "now", "last value")]
    for name, numbers in report["numbers"].items():
        best = _short(numbers["best"]) if "best" in numbers else ""
        start = _short(numbers["start"])
        now = _short(numbers["now"])
        last = _short(numbers["value"])
        lines.append(_row(_cut(_name(name), _NAME_WIDTH - 1), start, best, now, last))
    return lines


def _row(name: str, start: str, best: str, now: str, value: str) -> str:
    """Return a line of the table."""
    columns = "".join(f"{cell:>{_COLUMN_WIDTH}}" for cell in (start, best, now))
    return f"{name:{_NAME_WIDTH}}{columns}{value:>{_LAST_WIDTH}}"


def _completions(report: Mapping[str, Any]) -> list[str]:
    """Return completions that show what decided the verdict, or else the largest move, and the share of their tokens
    that good and bad ones have in common."""
    lines = []
    candidates = [report["completions_shown"]]
    for move in report["moved"]:
        candidates.append(move["completions"])
    for completions in candidates:
        if completions:
            lines += [_cut(f"step {completion['step']}: {completion['text']!r}") for completion in completions]
            break
    shares = report["shared_tokens"]
    if shares:
        lines += _wrap((_SHARED if "forward" in shares else _MASKED).format(**shares))
    return lines


def _end(report: Mapping[str, Any], plotted: Path | None) -> list[str]:
    lines = []
    missing = [label(name) for name in _TELLING if name in report["not_logged"]]
    if missing:
        lines.append(f"Not logged: {', '.join(missing)}")
    lines.append(f"plot: {plotted}" if plotted else "To see it: --plot FILE.png")
    return lines


def _name(number: str) -> str:
    return label(number).removeprefix(PART)


def _deviations(deviations: float) -> str:
    return f"{deviations:.0f} standard errors" if deviations < 1000 else "over 1000 standard errors"


def _short(value: float | None) -> str:
    """Return a number in at most eight characters; None stands for one that is not finite."""
    if value is None:
        return "NaN"
    if abs(value) >= 1e5:
        return f"{value:.0e}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    if abs(value) >= 0.001 or value == 0:
        return f"{value:.3f}"
    return f"{value:.0e}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _cut(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]} … {text[2 - width // 2 :]}"
