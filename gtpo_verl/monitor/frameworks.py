"""What each framework calls the numbers of a run, and the settings that remedies change."""

from collections.abc import Mapping
from typing import NamedTuple

_METRICS_OF_COMPLETIONS = (
    "trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward_metrics "
    "trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer"
)
_COMPLETIONS = ("ended", "repetition", "equal", "unearned", "strict", "format", "accuracy")


class Framework(NamedTuple):
    """The names of one framework.

    Args:
        metrics: of each of our numbers (`signs.NUMBERS`, and `lowest`, the smallest reward of a step, `lr`, `longest`,
            tokens of the longest completion, and `cut`, the share as long as the longest): the metrics that give it, of
            which the first that is logged counts; `1 - x` is one of them subtracted.
        remedies: the override of each kind of remedy, with {lr} and {limit} for the new values.
        to_log: what logs a number that is missing.
    """

    metrics: Mapping[str, tuple[str, ...]]
    remedies: Mapping[str, str]
    to_log: Mapping[str, str]


FRAMEWORKS = {
    "verl": Framework(
        {
            "ended": ("completion/eos_rate",),
            "repetition": ("completion/repetition/mean",),
            "equal": ("gtpo/group/zero_std_frac", "group/zero_std_frac"),
            "unearned": ("group/none_right_frac",),
            "strict": ("reward/strict/mean",),
            "format": ("reward/format/mean",),
            "accuracy": ("reward/acc/mean",),
            "reward": ("critic/score/mean", "reward/score/mean"),
            "entropy": ("actor/entropy", "actor/entropy_loss"),  # the second without an old-log-prob pass
            "length": ("response_length/mean", "completion/length/mean"),
            "mismatch": ("training/rollout_probs_diff_mean",),
            "lowest": ("critic/score/min",),
            "lr": ("actor/lr",),
            "longest": ("response_length/max",),
            "cut": ("response_length/clip_ratio",),
        },
        {
            "lr": "actor_rollout_ref.actor.optim.lr={lr}",
            "limit": "data.max_response_length={limit}",
            "filter": "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
            "correct": "algorithm.rollout_correction.rollout_is=token",
        },
        dict.fromkeys(_COMPLETIONS, _METRICS_OF_COMPLETIONS)
        | {"mismatch": "actor_rollout_ref.rollout.calculate_log_probs=True"},
    ),
    "TRL": Framework(
        {
            "ended": ("1 - completions/clipped_ratio",),
            "equal": ("frac_reward_zero_std",),
            "format": ("rewards/think_format_reward/mean",),
            "accuracy": ("rewards/accuracy_reward/mean",),
            "reward": ("reward",),
            "entropy": ("entropy",),
            "length": ("completions/mean_length",),
            "mismatch": ("sampling/sampling_logp_difference/mean",),
            "lr": ("learning_rate",),
            "longest": ("completions/max_length",),
        },
        {"lr": "learning_rate={lr}", "limit": "max_completion_length={limit}"},
        {},
    ),
    "OpenRLHF": Framework(
        {
            "ended": ("1 - rollout/truncated_rate", "1 - truncated"),
            "equal": ("gtpo/group/zero_std_frac",),
            "reward": ("rollout/reward_mean", "reward"),
            "entropy": ("gtpo/entropy/mean",),
            "length": ("rollout/response_length_mean", "response_length"),
            "mismatch": ("logprobs_diff",),
            "lr": ("actor_lr",),
        },
        {"lr": "--actor.adam.lr {lr}", "limit": "--rollout.max_new_tokens {limit}"},
        {},
    ),
}


def translate(metrics: Mapping[str, float], framework: str, limit: float | None = None) -> dict[str, float]:
    """Our numbers in what a framework logged at one step.

    With the `limit` of a completion in tokens, verl's `response_length/clip_ratio` says how many were cut off: its V1
    trainer counts the completions as long as the longest (verl #7817), which are cut off if that is the limit.
    """
    found: dict[str, float] = {}
    for name, sources in FRAMEWORKS[framework].metrics.items():
        for source in sources:
            metric = source.removeprefix("1 - ")
            if isinstance(value := metrics.get(metric), int | float):
                found[name] = value if metric == source else 1 - value
                break
    if limit is not None and "ended" not in found and {"longest", "cut"} <= found.keys():
        found["ended"] = 1 - found["cut"] * (found["longest"] >= limit)
    return found


def remedy(kind: str, framework: str, lr: float, limit: float | None) -> str:
    """The override to try: half the learning rate that was logged, or twice the limit of a completion."""
    templates = FRAMEWORKS[framework].remedies
    half, double = f"{lr / 2:.3g}" if lr else "<half of it>", f"{2 * limit:.0f}" if limit else "<twice of it>"
    return templates.get(kind, templates["lr"]).format(lr=half, limit=double)
