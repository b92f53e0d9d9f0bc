"""What the completions say about a run: ends, repetition, groups without spread, and how much is in conflict."""

import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from gtpo_verl.diagnose.evidence import EVIDENCE
from gtpo_verl.monitor.completions import group_shares, repetition
from gtpo_verl.view import thin_out
from gtpo_verl.view.sources import Source, find_source

_BYTES = 24 << 20  # what is tokenised in about a minute
_SCORES = {"accuracy": "acc", "strict": "strict", "format": "format"}

Completion = dict[str, Any]


class Rollouts(NamedTuple):
    """What was read.

    Args:
        steps: our numbers (`signs.NUMBERS`) at each step; `forward`, `backward`, `either`, shares of tokens on the
            conflict masks; and `groups`, the share of groups that have one.
        completions: those of the last steps, each with its step, its text and our numbers of it.
        unpunished: of each completion that does not end, in a group where others do and rewards differ, whether it
            scores above the group's mean.
        applied (bool): whether GTPO trained them.
    """

    steps: dict[int, dict[str, float]]
    completions: list[Completion]
    unpunished: list[bool]
    applied: bool


def read_rollouts(path: Path, tokenizer: str | None, limit: float | None) -> Rollouts:
    """Read a token dump or verl's rollout files, evenly thinned out if they are large.

    Args:
        limit: tokens at which completions were cut off. A dump shows how they end, verl's text does not.

    Raises:
        ValueError: there are none, or the tokenizer is of another model.
    """
    source = find_source(path, tokenizer)
    early = [file for file in source.paths if int(re.findall(r"\d+", file.stem)[-1]) <= EVIDENCE["early"]]
    files = {*thin_out(early, _BYTES // 4), *thin_out(source.paths, _BYTES)}
    found = Rollouts({}, [], [], bool(source.header["gtpo_applied"]))
    for file in (file for file in source.paths if file in files):
        rows = source.read(file)
        tokens, unknown = len(source.tokenizer), source.tokenizer.unk_token_id
        if any(id >= tokens or id == unknown for row in rows for id in row["token_ids"]):
            name = source.tokenizer.name_or_path
            raise ValueError(
                f"{file} has tokens that the tokenizer {name} has not: give the run's own with --tokenizer"
            )
        groups: dict[str, list[Completion]] = defaultdict(list)
        for row in rows:
            groups[row["uid"]].append(_completion(row, source, limit))
        completions = [completion for group in groups.values() for completion in group]
        found.steps[rows[0]["step"]] = _means(completions) | _of_groups(list(groups.values()))
        found.completions[:] = [*found.completions, *completions][-4 * len(completions) :]
        found.unpunished.extend(above for group in groups.values() for above in _unpunished(group))
    return found


def _completion(row: dict[str, Any], source: Source, limit: float | None) -> Completion:
    ids = [token for token, own in zip(row["token_ids"], row["response_mask"], strict=True) if own]
    numbers = {ours: row.get("scores", {}).get(theirs) for ours, theirs in _SCORES.items()}
    if not source.header.get("rollouts"):
        numbers["ended"] = float(bool(ids) and ids[-1] in source.tokenizer.all_special_ids)
    elif limit:
        numbers["ended"] = float(len(ids) < 0.98 * limit)  # a text may be cut into other tokens than were sampled
    numbers |= {"reward": row["reward"], "length": len(ids), "repetition": repetition(ids)}
    numbers |= {"entropy": row.get("trajectory_entropy"), "forward": row["prefix_len"], "backward": row["suffix_len"]}
    numbers["either"] = min(row["prefix_len"] + row["suffix_len"], len(ids))
    numbers |= {"step": row["step"], "text": source.tokenizer.decode(ids)}
    return {name: value for name, value in numbers.items() if value is not None}


def _means(completions: list[Completion]) -> dict[str, float]:
    """Over the completions of a step; the masks' over its tokens."""
    means = {name: fmean(x[name] for x in completions) for name in completions[0] if name not in ("step", "text")}
    return means | {name: means[name] / max(means["length"], 1) for name in ("forward", "backward", "either")}


def _of_groups(groups: list[list[Completion]]) -> dict[str, float]:
    """Shares of groups: with conflict, with equal rewards, and of those with unequal rewards those with none right."""
    equal, unearned = group_shares(groups, "reward", "accuracy")
    shares = {"groups": fmean(any(x["either"] for x in group) for group in groups), "equal": equal}
    return shares if unearned is None else shares | {"unearned": unearned}


def _unpunished(group: list[Completion]) -> list[bool]:
    mean = fmean(x["reward"] for x in group)
    mixed = len({x["reward"] for x in group}) > 1 and len({x.get("ended") for x in group}) > 1
    return [x["reward"] > mean for x in group if mixed and not x["ended"]]
