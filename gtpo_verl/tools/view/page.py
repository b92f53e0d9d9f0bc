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
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    return Template(_asset("view.html")).substitute(
        title=html.escape(f"Token view: {run_data['source']}"),
        css=_asset("view.css"),
        data="\n".join([_data_element("run-data", run_data), *steps]),
        script=script,
        script_hash=f"sha256-{digest}",
    )


def summarize(step: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of a step for the strip: own tokens, how many GTPO protects, doubles and filters, and the mean reward."""
    own = [(row["keep"], weight) for row in step for weight in compress(row["lambda"], row["loss_mask"])]
    return {
        "step": step[0]["step"],
        "tokens": len(own),
        "protected": sum(keep and weight < 1 for keep, weight in own),
        "doubled": sum(keep and weight > 1 for keep, weight in own),
        "filtered": sum(not keep for keep, _ in own),
        "reward": sum(row["reward"] for row in step) / len(step),
    }


def step_element(step: list[dict[str, Any]]) -> str:
    """Return the groups of a step: completions of one prompt, since those of one uid may have several."""
    groups: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    for row in step:
        key = row["uid"], tuple(row["prompt_ids"])
        group = groups.setdefault(key, {"prompt": row["prompt"], "completions": []})
        group["completions"].append({name: _packed(x) for name, x in row.items() if name not in _OF_GROUP})
    return _data_element(f"step-{step[0]['step']}", [*groups.values()])


def _packed(value: Any) -> Any:
    """Return a list of what rarely changes along a completion as runs, `[count, value]` each."""
    if not isinstance(value, list):
        return value
    runs = [(len(list(run)), x) for x, run in groupby(value)]
    return {"runs": runs} if 3 * len(runs) < len(value) else value


def _data_element(name: str, data: Any) -> str:
    """Return data in a page; with every `<` escaped, no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
