"""What the completions say about a run: ends, repetition, groups without spread, tokens that good and bad share."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo_verl.monitor.completions import group_shares, repetition
from gtpo_verl.tools.rollouts import find_source, step_of, thin_out

_BYTES = 24 << 20  # what is tokenised in about a minute
_SCORES = {"accuracy": "acc", "exact_format": "strict", "format": "format"}
_MASKS = {"forward", "backward", "either"}

Completion = dict[str, Any]


@dataclass
class Rollouts:
    """The completions of a run, and the metrics of each step that follow from them."""

    limit: float | None = None  # tokens at which a completion is cut off
    is_text: bool = False  # whether the files hold text without token ids
    left_out: int = 0  # steps after the last one that was asked for
    # For each step our metrics (`explain.LABELS`); the share of tokens on each conflict mask, `forward`, `backward` and
    # `either`; and `groups`, the share of groups that have such a token.
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)  # of the last four steps

    def shares(self) -> dict[str, float]:
        """Return the shares of conflict tokens and of groups that have some, as means over the steps."""
        names = _MASKS | {"groups"}
        for metrics in self.steps.values():
            names &= metrics.keys()
        return {name: fmean(metrics[name] for metrics in self.steps.values()) for name in sorted(names)}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the completions of one more step."""
        groups: dict[str, list[Completion]] = defaultdict(list)
        for row in rows:
            groups[row["uid"]].append(_completion(row, self.limit))
        completions = [completion for group in groups.values() for completion in group]

        # A metric that some completions lack, such as their entropy, has no mean.
        names = completions[0].keys() - {"step", "text"}
        for completion in completions:
            names &= completion.keys()
        metrics = {}
        for name in completions[0]:
            if name in names:
                metrics[name] = fmean(completion[name] for completion in completions)

        # Lengths of masks become shares of the step's tokens.
        for name in _MASKS & names:
            metrics[name] /= max(metrics["length"], 1)
        metrics["groups"] = fmean(any(completion["either"] for completion in group) for group in groups.values())

        metrics["zero_std_groups"], no_correct = group_shares(groups.values(), "reward", "accuracy")
        if no_correct is not None:
            metrics["no_correct_groups"] = no_correct

        self.steps[rows[0]["step"]] = metrics
        four_steps = 4 * len(completions)
        self.completions = [*self.completions, *completions][-four_steps:]


def read_rollouts(path: Path, tokenizer: str | None, limit: float | None, last: float = math.inf) -> Rollouts:
    """Read the completions of the steps up to `last`, evenly thinned out if they are large.

    Raises:
        ValueError: there is no such step, or what `find_source` raises.
    """
    source = find_source(path, tokenizer)
    paths = [file for file in source.paths if step_of(file) <= last]
    if not paths:
        raise ValueError(f"{path} has no step up to {last}, the log's last: give rollouts of the same run")

    rollouts = Rollouts(limit=limit, is_text="rollouts" in source.header, left_out=len(source.paths) - len(paths))
    for file in thin_out(paths, _BYTES):
        rollouts.add(source.read(file))
    return rollouts


def _completion(row: dict[str, Any], limit: float | None) -> Completion:
    """Return our metrics of one completion; those that are not known are left out."""
    ids = [token for token, is_own in zip(row["token_ids"], row["response_mask"], strict=True) if is_own]
    metrics: dict[str, Any] = {
        "reward": row["reward"],
        "length": len(ids),
        "repetition": repetition(ids),
        "step": row["step"],
        "text": "".join(row["token_strings"]),
    }
    if row.get("trajectory_entropy") is not None:
        metrics["entropy"] = row["trajectory_entropy"]
    for ours, theirs in _SCORES.items():
        if theirs in row.get("scores", {}):
            metrics[ours] = row["scores"][theirs]

    if "ended" in row:
        metrics["terminated"] = float(row["ended"])
    elif limit:
        metrics["terminated"] = float(len(ids) < 0.98 * limit)  # a text may be cut into other tokens

    if "prefix_len" in row:
        metrics["forward"] = row["prefix_len"]
        metrics["backward"] = row["suffix_len"]
        metrics["either"] = min(row["prefix_len"] + row["suffix_len"], len(ids))
    else:  # of a user's own mask only λ is known
        metrics["either"] = sum(weight != 1 for weight in row["lambda"])
    return metrics
