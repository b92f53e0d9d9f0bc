"""The report in one screen of 80 columns, the verdict and what to do first."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.explain import label
from gtpo_verl.monitor.frameworks import PART

_WIDTH = 80
_NAME = 36
_COLUMN = 9
_TELLING = ("validation", "accuracy", "exact_format", "terminated", "kl")
"""What would tell most, if it were logged; a line has room for all."""
_SHARED = (
    "Good and bad completions share {forward:.0%} of their tokens from the start, {backward:.0%} from the end, "
    "{either:.0%} either way, in {groups:.0%} of groups."
)
_MASKED = "{either:.0%} of tokens are on the run's own mask, in {groups:.0%} of groups."


def screen(report: Mapping[str, Any], plotted: Path | None = None) -> str:
    """Return the verdict, what to do, what moved, and a table of the numbers; `plotted` is where the plot is."""
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
    """Return a line for each number that moved, and one for parts of the reward that never did."""
    lines = []
    for move in report["moved"]:
        levels = f"{_name(move['number'])} {_short(move['first'])} to {_short(move['last'])}"
        text = f"{levels} since step {move['since']} ({_times(move['deviations'])} its noise): {move['meaning']}"
        override = f"; try {move['try']}" if move["try"] and move["try"] != report["try"] else ""
        lines += _wrap(f"- {text}{override}", "  ")
    for name, value in report["constant_parts"].items():
        lines += _wrap(f"- {name}, a part of the reward, is {_short(value)} in every step: it teaches nothing", "  ")
    return ["What moved, the largest first:", *lines] if lines else []


def _table(report: Mapping[str, Any]) -> list[str]:
    first, last = report["steps"]
    over = report["means_over"]
    between = (last - first) / max(report["entries"] - 1, 1)
    window = f"means over {over} steps"
    if between >= 1.5:
        window = f"means over {over} entries ({over * between:.0f} steps)"
    lines = [_row(window, "start", "best", "now", "last value")]
    for name, numbers in report["numbers"].items():
        best = _short(numbers["best"]) if "best" in numbers else ""
        start = _short(numbers["start"])
        lines.append(_row(_cut(_name(name), _NAME - 1), start, best, _short(numbers["now"]), _short(numbers["value"])))
    return lines


def _row(name: str, start: str, best: str, now: str, value: str) -> str:
    """Return a line of the table."""
    return f"{name:{_NAME}}{start:>{_COLUMN}}{best:>{_COLUMN}}{now:>{_COLUMN}}{value:>{_COLUMN + 3}}"


def _completions(report: Mapping[str, Any]) -> list[str]:
    """Return completions that show what decides, or else what moved, and which tokens good and bad ones share."""
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


def _times(deviations: float) -> str:
    return f"{deviations:.0f} times" if deviations < 1000 else "over 1000 times"


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
