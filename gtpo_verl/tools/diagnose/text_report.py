"""The report in at most one screen of 80 columns."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtpo_verl.monitor.signs import label

_WIDTH = 80
_SIGNS = 4
_SHARED = (
    "Good and bad completions share {forward:.0%} of their tokens from the start, {backward:.0%} from the end, "
    "{either:.0%} either way, in {groups:.0%} of groups."
)
_MASKED = "{either:.0%} of tokens are on the run's own mask, in {groups:.0%} of groups."


def screen(report: Mapping[str, Any], plotted: Path | None = None) -> str:
    """Return the verdict, its numbers, what showed first, and one override to try; `plotted` is where the plot is."""
    since = f" since step {report['since']}" if report["since"] is not None else ""
    lines = [*_wrap(f"{report['verdict'].upper()}{since}: {report['why']}."), _cut(report["log"])]
    first, last = report["steps"]
    seen = [report["framework"], f"steps {first} to {last}"]
    seen += [f"{report['completions']} completions a step"] if report["completions"] else []
    seen += [f"cut off at {report['limit']:.0f} tokens"] if report["limit"] else []
    lines += [*_wrap(", ".join(seen)), *(line for note in report["notes"] for line in _wrap(note)), "", *_table(report)]
    signs, beside = report["signs"], report["beside"]
    lines += ["", *(line for note in beside for line in _wrap(note, "   "))] if beside else []
    lines += [""] if signs else []
    for number, sign in enumerate(signs[:_SIGNS], start=1):
        note = "" if sign["calibrated"] else " (uncalibrated)"
        lines += _wrap(f"{number}. since step {sign['since']}: {sign['meaning']}{note}", "   ")
    lines += [f"   and {len(signs) - _SIGNS} more: --json"] if len(signs) > _SIGNS else []
    shown: list[dict[str, Any]] = next((sign["completions"] for sign in signs if sign["completions"]), [])
    lines += [_cut(f"   step {x['step']}: {x['text']!r}") for x in shown]
    if signs:
        override = f"Try {signs[0]['try']}" if signs[0]["try"] else ""
        lines += _wrap(f"{signs[0]['advice']} {override}".lstrip())
    if shares := report["shared_tokens"]:
        lines += ["", *_wrap((_SHARED if "forward" in shares else _MASKED).format(**shares))]
    missing = report["not_logged"]
    for override in dict.fromkeys(filter(None, missing.values())):
        names = "; ".join(label(name) for name in missing if missing[name] == override)
        lines += _wrap(f"Not logged: {names}. To log: {override}")
    lines += [f"plot: {plotted}"] if plotted else ["To see it: --plot FILE.png"]
    return "\n".join(lines)


def _table(report: Mapping[str, Any]) -> list[str]:
    first, last = report["steps"]
    over, between = report["means_over"], (last - first) / max(report["entries"] - 1, 1)
    window = f"means over {over} steps" if between < 1.5 else f"means over {over} entries ({over * between:.0f} steps)"
    lines = [f"{window:36}{'start':>9}{'best':>9}{'now':>9}   bad since"]
    for name, x in report["numbers"].items():
        values = "".join(f"{_short(x[column]) if column in x else '':>9}" for column in ("start", "best", "now"))
        since = "" if x["since"] is None else f"   step {x['since']}"
        lines.append(f"{_cut(label(name), 35):36}{values}{since}")
    return lines


def _short(value: float | None) -> str:
    if value is None:
        return "NaN"
    if abs(value) >= 10:
        return f"{value:.1f}" if abs(value) < 1e5 else f"{value:.0e}"
    return f"{value:.3f}" if abs(value) >= 0.001 or not value else f"{value:.0e}"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _cut(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else f"{text[: width // 2 - 1]} … {text[2 - width // 2 :]}"
