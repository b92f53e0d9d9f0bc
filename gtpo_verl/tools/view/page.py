"""The page of the token view: one HTML file with `view.html`, `view.css`, `view.js` and the data of the run."""

import base64
import hashlib
import html
import json
from collections.abc import Iterable
from importlib.resources import files
from itertools import compress, groupby
from string import Template
from typing import Any

_GROUP_FIELDS = ("uid", "prompt", "prompt_ids")


def render(run_data: dict[str, Any], step_elements: Iterable[str]) -> str:
    """Return the page; all JSON in it is ASCII.

    Args:
        run_data: the header of the dump; `source`, the name that is shown; `steps`, a `summarize` of each, in their
            order; `threshold`, of `filter_threshold`; `numbers` and `signs`, of `findings`.
        step_elements: a `step_element` of each.
    """
    script = _asset("view.js")
    # The page's policy allows this one script, as it stands in view.html between two line breaks.
    digest = hashlib.sha256(f"\n{script}\n".encode()).digest()
    elements = [_data_element("run-data", run_data)]
    elements.extend(step_elements)
    return Template(_asset("view.html")).substitute(
        title=html.escape(f"Token view: {run_data['source']}"),
        css=_asset("view.css"),
        data="\n".join(elements),
        script=script,
        script_hash=f"sha256-{base64.b64encode(digest).decode()}",
    )


def summarize(step: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the overview shows of a step: its tokens, counted by what GTPO does to them, and the mean reward."""
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


def filter_threshold(header: dict[str, Any]) -> float | None:
    """Return the threshold of the run's completion filter, nats per token; None if the filter is off."""
    return header["gtpo"]["entropy_threshold"] if header.get("filter_active") else None


def step_element(step: list[dict[str, Any]], filter_scope: str = "all") -> str:
    """Return a step as an element of JSON: its completions, by uid *and* prompt, since a uid may cover several prompts.

    `can_be_filtered` says of a completion whether the filter may drop it under the `filter_scope` of the run.
    """
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for row in step:
        key = (row["uid"], tuple(row["prompt_ids"]))
        group = groups.setdefault(key, {"prompt": row["prompt"], "completions": []})
        completion = {name: _run_length_encoded(value) for name, value in row.items() if name not in _GROUP_FIELDS}
        completion["can_be_filtered"] = filter_scope == "all" or row["group_advantage"] < 0
        group["completions"].append(completion)
    return _data_element(f"step-{step[0]['step']}", list(groups.values()))


def _run_length_encoded(value: Any) -> Any:
    """Return a list as `{"runs": [[count, value], …]}` if that is shorter; return anything else unchanged."""
    if not isinstance(value, list):
        return value
    runs = []
    for entry, equal_entries in groupby(value):
        runs.append((len(list(equal_entries)), entry))
    # A run takes about three times the space of an entry.
    is_shorter = 3 * len(runs) < len(value)
    return {"runs": runs} if is_shorter else value


def _data_element(name: str, data: Any) -> str:
    """Return a script element that holds data as JSON; with every `<` escaped, no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
