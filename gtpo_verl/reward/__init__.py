"""The paper's reward (GTPO, arXiv:2508.03772, App. 8.2) for verl, and what is logged of its scores.

`reward.custom_reward_function.path=pkg://gtpo_verl.reward` finds `compute_score` here; `replay_buffer` needs no
math-verify.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "compute_score":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gtpo_verl.reward.score import compute_score

    return compute_score
