"""GTPO for verl: Group-relative Trajectory-based Policy Optimization (arXiv:2508.03772).

The objective (Eq. 11), for G completions o_i of one prompt with advantages A_i:

    J = E[ 1/G Σ_i δ_i (A_i − γ⟨H⟩_i) / |o_i| Σ_t r_{i,t} λ_{i,t} ]

λ is 1 off the conflict mask; on it, 0 if A_i < 0 and 2 if A_i > 0 (Eq. 9). δ_i = 0 drops a completion whose mean
entropy ⟨H⟩_i exceeds ln 2 (Eq. 10). There is no KL term, hence no reference model.

Installing the package is enough: `algorithm.adv_estimator=gtpo` then works in any verl config. In a loop of your own:

    compute_gtpo                  δ_i (A_i − γ⟨H⟩_i) λ_{i,t} of a batch, and its parts (Eq. 11)
    GTPOConfig                    the settings; the defaults are the paper's
    compute_group_advantages      A_i (Sec. 3)
    compute_conflict_mask         the tokens on which λ acts (Sec. 5.1)
    compute_token_weights         λ_{i,t} (Eq. 9)
    compute_conflict_weights      λ_{i,t} of the tokens on the mask (Eq. 9)
    compute_completion_filter     δ_i (Eq. 10)
    compute_trajectory_entropy    ⟨H⟩_i (Sec. 4.2)
    entropy_from_logits           the entropy of each token
    compute_gtpo_metrics          what GTPO did to a batch, as numbers to log
    Completions                   which tokens are whose, where the functions above share one batch
    GTPORun                       what a run keeps: ⟨H⟩_ini, its record, and how many batches gave no signal

They need torch and numpy. `compute_policy_loss_gtpo`, the loss of Eq. 11, needs verl too. With the names of verl's
estimators there are `compute_gtpo_outcome_advantage`, and `compute_gtpo_token_advantages` for A_i of another estimator.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtpo_verl.algorithm.advantage import GTPOAdvantage as GTPOAdvantage
    from gtpo_verl.algorithm.advantage import compute_completion_filter as compute_completion_filter
    from gtpo_verl.algorithm.advantage import compute_group_advantages as compute_group_advantages
    from gtpo_verl.algorithm.advantage import compute_gtpo as compute_gtpo
    from gtpo_verl.algorithm.advantage import compute_gtpo_outcome_advantage as compute_gtpo_outcome_advantage
    from gtpo_verl.algorithm.advantage import compute_gtpo_token_advantages as compute_gtpo_token_advantages
    from gtpo_verl.algorithm.advantage import compute_trajectory_entropy as compute_trajectory_entropy
    from gtpo_verl.algorithm.advantage import entropy_from_logits as entropy_from_logits
    from gtpo_verl.algorithm.completions import Completions as Completions
    from gtpo_verl.algorithm.config import GTPOConfig as GTPOConfig
    from gtpo_verl.algorithm.conflict import compute_conflict_mask as compute_conflict_mask
    from gtpo_verl.algorithm.conflict import compute_conflict_weights as compute_conflict_weights
    from gtpo_verl.algorithm.conflict import compute_token_weights as compute_token_weights
    from gtpo_verl.algorithm.metrics import compute_gtpo_metrics as compute_gtpo_metrics
    from gtpo_verl.run.gtpo_run import GTPORun as GTPORun
    from gtpo_verl.verl_plugin.loss import compute_policy_loss_gtpo as compute_policy_loss_gtpo

_MODULES = {
    "Completions": "algorithm.completions",
    "GTPOAdvantage": "algorithm.advantage",
    "GTPOConfig": "algorithm.config",
    "GTPORun": "run.gtpo_run",
    "compute_completion_filter": "algorithm.advantage",
    "compute_conflict_mask": "algorithm.conflict",
    "compute_conflict_weights": "algorithm.conflict",
    "compute_group_advantages": "algorithm.advantage",
    "compute_gtpo": "algorithm.advantage",
    "compute_gtpo_metrics": "algorithm.metrics",
    "compute_gtpo_outcome_advantage": "algorithm.advantage",
    "compute_gtpo_token_advantages": "algorithm.advantage",
    "compute_policy_loss_gtpo": "verl_plugin.loss",
    "compute_token_weights": "algorithm.conflict",
    "compute_trajectory_entropy": "algorithm.advantage",
    "entropy_from_logits": "algorithm.advantage",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    # Imported at first use: `gtpo-verl check` has to work without torch, and the reward's processes do not need it.
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _MODULES:
        value = getattr(import_module(f"gtpo_verl.{_MODULES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    try:
        return version("gtpo-verl")
    except PackageNotFoundError:  # a folder on PYTHONPATH
        return "unknown"
