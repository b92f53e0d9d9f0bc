"""The page: one HTML file with `view.html`, `view.css`, `view.js` and the data of the run."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import groupby
from typing import Any, NamedTuple


class PageStep(NamedTuple):
    """A step as the page holds it, and what the rest of the page needs to know about it.

    Args:
        summary: numbers for the strip.
        data (str): the element that holds its groups.
        ids: token ids of its prompts and completions.
        max_entropy (float | None): highest mean entropy of a completion, in nats per token; None: not known.
        has_inference (bool): whether it has log-probs of the inference engine.
    """

    summary: dict[str, Any]
    data: str
    ids: frozenset[int]
    max_entropy: float | None
    has_inference: bool


def page_step(step: list[dict[str, Any]]) -> PageStep:
    """The completions of a step, as `gtpo_verl.view.sources` reads them, in the form of the page."""
    summary = summarize(step)
    entropies = [completion["trajectory_entropy"] for completion in step]
    return PageStep(
        summary,
        _data_element(f"step-{summary['step']}", list(_groups(step))),
        frozenset().union(*(completion[name] for completion in step for name in ("prompt_ids", "token_ids"))),
        None if None in entropies else max(entropies),
        any("inference_logprobs" in completion for completion in step),
    )


def render(header: dict[str, Any], steps: Sequence[PageStep], pieces: dict[int, str | list[int]], source: str) -> str:
    """The page; all data of the run in it is ASCII.

    Args:
        header: of the source.
        steps: in their order.
        pieces: of `token_pieces`.
        source (str): where the steps came from, for the reader.
    """
    entropies = [step.max_entropy for step in steps if step.max_entropy is not None]
    run_data = header | {
        "source": source,
        "pieces": pieces,
        "steps": [step.summary for step in steps],
        "max_entropy": max(entropies, default=None),
        "has_inference": any(step.has_inference for step in steps),
    }
    script = _asset("view.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    parts = {
        "title": html.escape(f"GTPO token view: {source}"),
        "css": _asset("view.css"),
        "data": "\n".join([_data_element("run-data", run_data), *(step.data for step in steps)]),
        "script": script,
        "script_hash": f"sha256-{digest}",
    }
    return re.sub(r"@(title|css|data|script|script_hash)@", lambda found: parts[found[1]], _asset("view.html"))


def summarize(step: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of a step for the strip: own tokens, how many GTPO protects, doubles and filters, and the mean reward."""
    summary = {"step": step[0]["step"], "tokens": 0, "protected": 0, "doubled": 0, "filtered": 0}
    for completion in step:
        trained = sum(completion["loss_mask"])
        summary["tokens"] += trained
        if not completion["keep"]:
            summary["filtered"] += trained
            continue
        weights = [x for x, is_trained in zip(completion["lambda"], completion["loss_mask"], strict=True) if is_trained]
        summary["protected"] += sum(x < 1 for x in weights)
        summary["doubled"] += sum(x > 1 for x in weights)
    return summary | {"reward": sum(completion["reward"] for completion in step) / len(step)}


def _groups(step: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Completions of the same prompt: one uid may have several prompts, which share no token positions."""
    groups: dict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for completion in step:
        groups.setdefault((completion["uid"], tuple(completion["prompt_ids"])), []).append(completion)
    for completions in groups.values():
        yield {"prompt": completions[0]["prompt_ids"], "completions": [_shown(x) for x in completions]}


def _shown(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion as `view.js` reads it: thousandths for entropies and log-probs, runs for what rarely changes."""
    return {
        "reward": completion["reward"],
        "A": completion["group_advantage"],
        "entropy": completion["trajectory_entropy"],
        "keep": completion["keep"],
        "prefix_len": completion["prefix_len"],
        "suffix_len": completion["suffix_len"],
        "ids": completion["token_ids"],
        "token_entropy": _thousandths(completion["entropy"]),
        "token_logprob": _thousandths(completion["trainer_logprobs"]),
        "token_inference": _thousandths(completion.get("inference_logprobs")),
        "lambda": _runs(completion["lambda"]),
        "advantages": _runs(completion["advantages"]),
        "own": _runs(completion["response_mask"]),
        "trained": _runs(completion["loss_mask"]),
    }


def _thousandths(values: list[float | None] | None) -> list[int | None] | None:
    return None if values is None else [None if x is None else round(1000 * x) for x in values]


def _runs(values: list[float]) -> list[tuple[int, float]]:
    return [(len(list(run)), value) for value, run in groupby(values)]


def _data_element(name: str, data: Any) -> str:
    """Data in a page; with every `<` escaped, no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").rstrip("\n")
