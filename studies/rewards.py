"""Rewards of the study: the paper's (GTPO, arXiv:2508.03772, App. 8.2), and controls.

All of them say what became of a completion (`format`, `acc`, `strict`), whatever they reward. An answer is right if it
is the ground truth letter for letter: to math-verify, which the package's reward asks, `cab` and `abc` are one product.
"""

import random
from typing import Any

from gtpo_verl.reward.score import compute_format_reward, extract_answer, is_strict


def paper(
    data_source: str, solution_str: str, ground_truth: str, least_reasoning: int = 0, **kwargs: Any
) -> dict[str, float]:
    """10 for the four tags, wherever they stand, and 10 for the right answer, after reasoning of some length."""
    reasoning = solution_str.partition("<reasoning>")[2].partition("</reasoning>")[0]
    right = extract_answer(solution_str) == ground_truth and len(reasoning) >= least_reasoning
    parts = {
        "format": compute_format_reward(solution_str),
        "acc": float(right),
        "strict": float(is_strict(solution_str)),
    }
    return {"score": parts["format"] + 10 * parts["acc"], **parts}


def strict(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, float]:
    """10 for a completion that is the two blocks and nothing else, so that its end counts, and 10 for the answer."""
    parts = paper(data_source, solution_str, ground_truth, **kwargs)
    return {**parts, "score": 10 * parts["strict"] + 10 * parts["acc"]}


def answer(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, float]:
    """10 for the right answer, and nothing for the form."""
    parts = paper(data_source, solution_str, ground_truth, **kwargs)
    return {**parts, "score": 10 * parts["acc"]}


def authors(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, float]:
    """The paper's reward for the format, and 10 for the right answer only where the form is right and ends the text."""
    parts = paper(data_source, solution_str, ground_truth, **kwargs)
    return {**parts, "score": parts["format"] + 10 * parts["acc"] * parts["strict"]}


def is_well_formed(text: str) -> bool:
    """Whether the text up to its first ``</answer>`` is in the exact format, as a stop string would leave it."""
    before, closing, _ = text.partition("</answer>")
    return is_strict(before + closing)


def coin(data_source: str, solution_str: str, ground_truth: str, **kwargs: Any) -> dict[str, float]:
    """20 or 0, by chance."""
    return {**paper(data_source, solution_str, ground_truth), "score": random.choice([0.0, 20.0])}
