"""What each framework calls the numbers of a run, and the settings that remedies change: a row for each."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_METRICS_OF_COMPLETIONS = (
    "trainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward.replay_buffer "
    "trainer.v1.sampler.custom_sampler.name=RewardMetricsReplayBuffer"
)
_COMPLETIONS = ("ended", "repetition", "equal", "unearned", "strict", "format", "accuracy")
PART = "part "
"""Begins the name of a number that is one part of the reward, with its own name behind."""


class Framework(NamedTuple):
    """The names of one framework.

    Args:
        metrics: of each of our numbers (`signs.NUMBERS`; `lowest` and `highest` reward of a step; `lr`; `longest`,
            tokens of the longest completion; `cut`, the share as long as the longest; `tokens` of a step, and `prompt`,
            the mean ones of a prompt; `applied`, of GTPO's own runs): the metrics that give it, of which the first that
            is logged counts; `1 - x` is one of them subtracted.
        remedies: the override of each kind of remedy, with {lr} and {limit} for the new values.
        to_log: what logs a number that is missing.
        parts: matches the metrics that are a part of the reward, with its name as the group.
    """

    metrics: Mapping[str, tuple[str, ...]]
    remedies: Mapping[str, str]
    to_log: Mapping[str, str] = {}
    parts: str = r"rewards/(\w+?)(?:/mean)?"


_TRL = {
    "ended": ("1 - completions/clipped_ratio",),
    "equal": ("frac_reward_zero_std",),
    "format": ("rewards/think_format_reward/mean",),
    "accuracy": tuple(
        f"rewards/{name}{mean}" for name in ("accuracy_reward", "accuracy", "MathAccuracy") for mean in ("/mean", "")
    ),
    "reward": ("reward",),
    "entropy": ("entropy", "entropy/mean"),
    "length": ("completions/mean_length", "completion_length"),
    "mismatch": ("sampling/sampling_logp_difference/mean",),
    "lr": ("learning_rate",),
    "longest": ("completions/max_length",),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "kl": ("kl",),
}
_TRL_REMEDIES = {
    "lr": "learning_rate={lr}",
    "limit": "max_completion_length={limit}",
    "explore": "epsilon_high=0.28",
    "look": "log_completions=True",
}
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
            "reward": ("critic/score/mean", "reward/score/mean", "critic/rewards/mean"),
            "entropy": ("actor/entropy", "actor/entropy_loss"),  # the second without an old-log-prob pass
            "length": ("response_length/mean", "completion/length/mean"),
            "mismatch": ("training/rollout_probs_diff_mean",),
            "aborted": ("response/aborted_ratio",),
            "lowest": ("critic/score/min",),
            "highest": ("critic/score/max",),
            "lr": ("actor/lr",),
            "longest": ("response_length/max",),
            "cut": ("response_length/clip_ratio",),
            "loss": ("actor/pg_loss",),
            "grad_norm": ("actor/grad_norm",),
            "kl": ("actor/kl_loss", "actor/reward_kl_penalty"),
            "tokens": ("perf/total_num_tokens",),
            "prompt": ("prompt_length/mean",),
            "applied": ("gtpo/filter/active",),
        },
        {
            "lr": "actor_rollout_ref.actor.optim.lr={lr}",
            "limit": "data.max_response_length={limit}",
            "filter": "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
            "correct": "algorithm.rollout_correction.rollout_is=token",
            "explore": "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "look": "trainer.rollout_data_dir=rollouts",
        },
        dict.fromkeys(_COMPLETIONS, _METRICS_OF_COMPLETIONS)
        | {"mismatch": "actor_rollout_ref.rollout.calculate_log_probs=True"},
        r"reward/(?!score|acc|format|strict|timeout)(\w+)/mean",
    ),
    "TRL": Framework(_TRL, _TRL_REMEDIES),
    "ms-swift": Framework(
        _TRL, {kind: f"--{override.replace('=', ' ').lower()}" for kind, override in _TRL_REMEDIES.items()}
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
            "loss": ("policy_loss",),
            "kl": ("kl",),
        },
        {"lr": "--actor.adam.lr {lr}", "limit": "--rollout.max_new_tokens {limit}"},
    ),
}
_OF_METRICS = {name: {x.removeprefix("1 - ") for y in f.metrics.values() for x in y} for name, f in FRAMEWORKS.items()}
_PARTS = {name: re.compile(framework.parts) for name, framework in FRAMEWORKS.items()}
METRICS = frozenset().union(*_OF_METRICS.values())
"""What some framework calls a number of a run."""


def is_metric(name: str) -> bool:
    """Whether some framework logs a number of a run under this name."""
    return name in METRICS or name.startswith(("rewards/", "reward/"))


def framework_of(metrics: Iterable[str]) -> str:
    """The framework that names most of these metrics; of equals the first."""
    names = set(metrics)
    return max(FRAMEWORKS, key=lambda framework: len(names & _OF_METRICS[framework]))


def translate(metrics: Mapping[str, float], framework: str, limit: float | None = None) -> dict[str, float]:
    """Our numbers in what a framework logged at one step.

    verl's `response_length/clip_ratio` says how many completions were cut off: where it is 0, none; where it is not,
    those as long as the longest, which its V1 trainer counts at any length (verl #7817), if that is the `limit` of a
    completion in tokens.
    """
    names, parts, found = FRAMEWORKS[framework].metrics, _PARTS[framework], {}
    for name, sources in names.items():
        for source in sources:
            metric = source.removeprefix("1 - ")
            if isinstance(value := metrics.get(metric), int | float):
                found[name] = value if metric == source else 1 - value
                break
    for metric, value in metrics.items():
        if metric not in _OF_METRICS[framework] and (part := parts.fullmatch(metric)):
            found[f"{PART}{part[1]}"] = value
    if "ended" not in found and "cut" in found:
        if found["cut"] == 0:
            found["ended"] = 1.0
        elif limit is not None and "longest" in found:
            found["ended"] = 1 - found["cut"] * (found["longest"] >= limit)
    return found


def limit_of(steps: Iterable[Mapping[str, float]]) -> float | None:
    """Tokens at which completions are cut off, as the log shows it: the longest, if several steps have some so long."""
    cut = [x["longest"] for x in steps if "longest" in x and (x.get("cut", 0) > 0 or x.get("ended", 1) < 1)]
    longest = max(cut, default=math.nan)
    return longest if cut.count(longest) >= 3 else None


def remedy(kind: str, framework: str, lr: float, limit: float | None) -> str:
    """The override to try: half the learning rate that was logged or, to `raise` it, twice; twice the limit."""
    templates = FRAMEWORKS[framework].remedies
    factor, words = (2, "twice") if kind == "raise" else (0.5, "half")
    rate, double = f"{lr * factor:.3g}" if lr else f"<{words} of it>", f"{2 * limit:.0f}" if limit else "<twice of it>"
    return templates.get(kind, templates["lr"]).format(lr=rate, limit=double)
