"""GTPO for verl: Group-relative Trajectory-based Policy Optimization (arXiv:2508.03772).

The objective (Eq. 11), for G completions o_i of one prompt with advantages A_i:

    J = E[ 1/G Σ_i δ_i (A_i − γ⟨H⟩_i) / |o_i| Σ_t r_{i,t} λ_{i,t} ]

λ is 1 off the conflict mask; on it, 0 if A_i < 0 and 2 if A_i > 0 (Eq. 9). δ_i = 0 drops a completion whose mean
entropy ⟨H⟩_i exceeds ln 2 (Eq. 10). There is no KL term, hence no reference model.

Installing the package is enough: `algorithm.adv_estimator=gtpo` then works in any verl config. The functions below need
torch and numpy, the loss verl too.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpo_verl.algorithm.advantage import GTPOAdvantage as GTPOAdvantage
    from gtpo_verl.algorithm.advantage import compute_completion_filter as compute_completion_filter
    from gtpo_verl.algorithm.advantage import compute_gtpo_outcome_advantage as compute_gtpo_outcome_advantage
    from gtpo_verl.algorithm.advantage import compute_gtpo_token_advantages as compute_gtpo_token_advantages
    from gtpo_verl.algorithm.advantage import compute_trajectory_entropy as compute_trajectory_entropy
    from gtpo_verl.algorithm.config import GTPOConfig as GTPOConfig
    from gtpo_verl.algorithm.conflict import compute_conflict_mask as compute_conflict_mask
    from gtpo_verl.algorithm.conflict import compute_conflict_weights as compute_conflict_weights
    from gtpo_verl.verl_plugin.loss import compute_policy_loss_gtpo as compute_policy_loss_gtpo

_MODULES = {
    "GTPOAdvantage": "algorithm.advantage",
    "GTPOConfig": "algorithm.config",
    "compute_completion_filter": "algorithm.advantage",
    "compute_conflict_mask": "algorithm.conflict",
    "compute_conflict_weights": "algorithm.conflict",
    "compute_gtpo_outcome_advantage": "algorithm.advantage",
    "compute_gtpo_token_advantages": "algorithm.advantage",
    "compute_policy_loss_gtpo": "verl_plugin.loss",
    "compute_trajectory_entropy": "algorithm.advantage",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    # Imported at first use: `gtpo-verl check` has to work without torch, and the reward's processes do not need it.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"gtpo_verl.{_MODULES[name]}"), name)
