"""The paper's reward for OpenRLHF's `--reward.remote_url`: `gtpo_verl.reward.score` (arXiv:2508.03772, App. 8.2).

OpenRLHF loads this file by its path. The labels are the column `reward_model` of verl's data format:
`--data.input_key prompt --data.label_key reward_model --data.apply_chat_template`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gtpo_verl.reward.score import compute_score


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Score completions as OpenRLHF asks for it.

    Args:
        queries: (bs,), prompt and completion as text.
        prompts: (bs,), the prompts.
        labels: (bs,), each with the right answer as `ground_truth`.

    Returns:
        `rewards` (bs,), format + 10 acc; `scores` (bs,), acc, which dynamic filtering reads; `extra_logs` (bs,) each.

    Raises:
        ValueError: a label has no right answer, or the tokens of a prompt do not decode to it, so that its completion
            cannot be told from it.
    """
    scores = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        if not query.startswith(prompt):  # the prompt names all four tags, and would be rewarded for its format
            raise ValueError(
                "the tokens of a prompt do not decode to it: it was cut to --data.max_len minus "
                "--rollout.max_new_tokens (raise --data.max_len), or the tokenizer changes the text"
            )
        if not isinstance(label, Mapping) or "ground_truth" not in label:
            raise ValueError(f"the label {label!r} has no ground_truth: give --data.label_key reward_model")
        completion = query[len(prompt) :]
        scores.append(compute_score("", completion, label["ground_truth"]))

    logged = {}
    for name in ("format", "acc", "timeout"):
        logged[name] = torch.tensor([score[name] for score in scores])
    return {
        "rewards": torch.tensor([score["score"] for score in scores]),
        "scores": logged["acc"],
        "extra_logs": logged,
    }
