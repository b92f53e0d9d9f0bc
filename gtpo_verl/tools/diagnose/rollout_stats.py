"""What the completions say about a run: ends, repetition, groups without spread, tokens that good and bad share."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from gtpo_verl.monitor.repetition import group_shares, repetition
from gtpo_verl.tools.rollouts import find_source, step_of, thin_out

_BYTES = 24 << 20  # what is tokenised in about a minute
_SCORES = {"accuracy": "acc", "exact_format": "strict", "format": "format"}

Completion = dict[str, Any]


@dataclass
class Rollouts:
    """Completions of a run, cut off at `limit` tokens, which verl's text does not show; and of each of its `steps` our
    numbers (`signs.NUMBERS`), `forward`, `backward` and `either`, shares of tokens on the conflict masks, and `groups`,
    the share of groups that have one. `completions` are those of the last steps, with our numbers of each. `is_text`:
    no token ids are stored. Steps that were not read are `left_out`."""

    limit: float | None = None
    is_text: bool = False
    left_out: int = 0
    steps: dict[int, dict[str, float]] = field(default_factory=dict)
    completions: list[Completion] = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Return the shares of tokens that good and bad completions of a group share from their starts (`forward`),
        from their ends (`backward`) and either way, and of groups that have such tokens."""
        of_each = [{*numbers} & {"forward", "backward", "either", "groups"} for numbers in self.steps.values()]
        return {name: fmean(x[name] for x in self.steps.values()) for name in sorted(set.intersection(*of_each))}

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take the completions of one more step."""
        groups: dict[str, list[Completion]] = defaultdict(list)
        for row in rows:
            groups[row["uid"]].append(_completion(row, self.limit))
        completions = [completion for group in groups.values() for completion in group]
        everywhere = set.intersection(*({*x} for x in completions)) - {"step", "text"}
        means = {name: fmean(x[name] for x in completions) for name in completions[0] if name in everywhere}
        masks = {"forward", "backward", "either"} & means.keys()
        means |= {name: means[name] / max(means["length"], 1) for name in masks}  # over the tokens of the step
        means["groups"] = fmean(any(x["either"] for x in group) for group in groups.values())
        means["zero_std_groups"], no_correct = group_shares(groups.values(), "reward", "accuracy")
        self.steps[rows[0]["step"]] = means | ({} if no_correct is None else {"no_correct_groups": no_correct})
        self.completions = [*self.completions, *completions][-4 * len(completions) :]


def read_rollouts(path: Path, tokenizer: str | None, limit: float | None, last: float = math.inf) -> Rollouts:
    """Read completions up to the `last` step, evenly thinned out if they are large; raises what
    `find_source` raises."""
    source = find_source(path, tokenizer)
    if not (paths := [file for file in source.paths if step_of(file) <= last]):
        raise ValueError(f"{path} has no step up to {last}, the log's last: give rollouts of the same run")
    found = Rollouts(limit, "rollouts" in source.header, len(source.paths) - len(paths))
    for file in thin_out(paths, _BYTES):
        found.add(source.read(file))
    return found


def _completion(row: dict[str, Any], limit: float | None) -> Completion:
    ids = [token for token, own in zip(row["token_ids"], row["response_mask"], strict=True) if own]
    ended = row.get("ended", len(ids) < 0.98 * limit if limit else None)  # a text may be cut into other tokens
    scores, ends = row.get("scores", {}), [row[name] for name in ("prefix_len", "suffix_len") if name in row]
    numbers = {
        **{ours: scores.get(theirs) for ours, theirs in _SCORES.items()},
        "terminated": None if ended is None else float(ended),
        "reward": row["reward"],
        "length": len(ids),
        "repetition": repetition(ids),
        "entropy": row.get("trajectory_entropy"),
        "step": row["step"],
        "text": "".join(row["token_strings"]),
        **dict(zip(("forward", "backward"), ends, strict=False)),
        # Of a user's own mask only that is known.
        "either": min(sum(ends), len(ids)) if ends else sum(weight != 1 for weight in row["lambda"]),
    }
    return {name: value for name, value in numbers.items() if value is not None}
