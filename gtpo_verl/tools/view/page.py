"""The page: one HTML file with `view.html`, `view.css`, `view.js` and the data of the run."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib.resources import files
from itertools import compress, groupby
from string import Template
from typing import Any

_OF_GROUP = ("uid", "prompt", "prompt_ids")


def render(run_data: dict[str, Any], steps: Iterable[str]) -> str:
    """Return the page of the elements of all `steps`; all data of the run in it is ASCII.

    `run_data` is the header of the completions with their `source`, for the reader, a summary of each of the `steps`,
    in their order, and what was found: the `numbers` of each, and the `signs`.
    """
    script = _asset("view.js")
    # The page's policy allows this one script, as it stands in view.html between two line breaks.
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    elements = [_data_element("run-data", run_data)]
    elements.extend(steps)
    return Template(_asset("view.html")).substitute(
        title=html.escape(f"Token view: {run_data['source']}"),
        css=_asset("view.css"),
        data="\n".join(elements),
        script=script,
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
    )


def summarize(step: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the strip shows of a step: numbers of tokens, by what GTPO does to them, and the mean reward."""
    tokens = 0
    fates = {"protected": 0, "doubled": 0, "filtered": 0}
    for row in step:
        for weight in compress(row["lambda"], row["loss_mask"]):
            tokens += 1
            if not row["keep"]:
                fates["filtered"] += 1
            elif weight < 1:
                fates["protected"] += 1
            elif weight > 1:
                fates["doubled"] += 1
    reward = sum(row["reward"] for row in step) / len(step)
    summary = {"step": step[0]["step"], "tokens": tokens}
    summary |= fates
    summary["reward"] = reward
    return summary


def filter_of(header: dict[str, Any]) -> float | None:
    """Return the threshold of the run's completion filter, nats per token; None where it filters nothing."""
    return header["gtpo"]["entropy_threshold"] if header.get("filter_active") else None


def step_element(step: list[dict[str, Any]], filter_scope: str = "all") -> str:
    """Return the groups of a step: completions of one prompt, since those of one uid may have several.

    With the `filter_scope` of the run each completion gets whether the filter may drop it, `can_be_filtered`.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for row in step:
        key = (row["uid"], tuple(row["prompt_ids"]))
        group = groups.setdefault(key, {"prompt": row["prompt"], "completions": []})
        completion = {name: _packed(value) for name, value in row.items() if name not in _OF_GROUP}
        completion["can_be_filtered"] = filter_scope == "all" or row["group_advantage"] < 0
        group["completions"].append(completion)
    return _data_element(f"step-{step[0]['step']}", list(groups.values()))


def _packed(value: Any) -> Any:
    """Return a list of what rarely changes along a completion as runs, `[count, value]` each; all else as it is."""
    if not isinstance(value, list):
        return value
    runs = []
    for entry, equal_entries in groupby(value):
        runs.append((len(list(equal_entries)), entry))
    # A run takes about three times the place of an entry.
    is_shorter = 3 * len(runs) < len(value)
    return {"runs": runs} if is_shorter else value


def _data_element(name: str, data: Any) -> str:
    """Return data in a page; with every `<` escaped, no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
