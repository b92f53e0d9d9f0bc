"""GTPO for verl: Group-relative Trajectory-based Policy Optimization (arXiv:2508.03772).

The objective (Eq. 11), for G completions o_i of one prompt with advantages A_i:

    J = E[ 1/G Σ_i δ_i (A_i − γ⟨H⟩_i) / |o_i| Σ_t r_{i,t} λ_{i,t} ]

λ is 1 off the conflict mask; on it 0 where A_i < 0 and 2 where A_i > 0 (Eq. 9). δ_i = 0 filters a completion whose mean
entropy ⟨H⟩_i exceeds ln 2 (Eq. 10). There is no KL term, hence no reference model.

Installing the package is enough: `algorithm.adv_estimator=gtpo` then works in any verl config. The functions below need
torch alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpo_verl.advantage import (
        GTPOAdvantage,
        compute_gtpo_outcome_advantage,
        compute_gtpo_token_advantages,
    )
    from gtpo_verl.config import GTPOConfig
    from gtpo_verl.conflict import compute_conflict_mask, compute_conflict_weights
    from gtpo_verl.entropy import compute_completion_filter, compute_trajectory_entropy
    from gtpo_verl.loss import compute_policy_loss_gtpo

__all__ = [
    "GTPOAdvantage",
    "GTPOConfig",
    "compute_completion_filter",
    "compute_conflict_mask",
    "compute_conflict_weights",
    "compute_gtpo_outcome_advantage",
    "compute_gtpo_token_advantages",
    "compute_policy_loss_gtpo",
    "compute_trajectory_entropy",
]


def __getattr__(name: str) -> Any:
    # Imported at first use: `gtpo-verl check` has to work without torch, and the reward's processes do not need it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (
        import_module(f"gtpo_verl.{module}") for module in ("advantage", "config", "conflict", "entropy", "loss")
    )
    return next(vars(module)[name] for module in modules if name in vars(module))
