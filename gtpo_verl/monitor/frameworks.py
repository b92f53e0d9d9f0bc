"""What each framework calls the numbers of a run, and the settings that remedies change: a row for each."""

import math
import re
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, NamedTuple

PART = "part "
"""Begins the name of a number that is one part of the reward, with its own name behind."""


class Framework(NamedTuple):
    """The names of one framework.

    Args:
        metrics: for each of our numbers the metrics that say it, of which the first that is logged counts; `1 - x` is
            the metric x subtracted from 1. Our numbers are those of `explain.LABELS`, and these:
            `lowest`, `highest`: the reward of the worst and of the best completion of a step;
            `lr`: the learning rate;
            `longest`: the tokens of a step's longest completion;
            `cut`: the share of completions that were cut off, or in verl's V1 trainer that are as long as that;
            `clipped`: the share of ratios that were clipped;
            `tokens`: those of a step, its prompts included;
            `prompt`: the mean tokens of a prompt.
        remedies: overrides by their kind, with {lr} and {limit} for new values.
        parts: a pattern of the metrics that are a part of the reward; its group is the name of the part.
        validation: patterns of the results of a validation; the first that matches a metric counts.
    """

    metrics: Mapping[str, tuple[str, ...]]
    remedies: Mapping[str, str]
    parts: str = r"rewards/(\w+?)(?:/mean)?"
    validation: tuple[str, ...] = (r"eval[_/]rewards/\w*[Aa]ccuracy\w*(/mean)?", r"eval[_/](accuracy|reward)")


_IS_ACCURACY = re.compile(r"/acc/|[Aa]ccuracy|_pass1$")
_TRL = {
    "terminated": ("1 - completions/clipped_ratio",),
    "zero_std_groups": ("frac_reward_zero_std",),
    "format": ("rewards/think_format_reward/mean",),
    "accuracy": (
        "rewards/accuracy_reward/mean",
        "rewards/accuracy_reward",
        "rewards/accuracy/mean",
        "rewards/accuracy",
        "rewards/AccuracyORM/mean",
        "rewards/AccuracyORM",
        "rewards/MathAccuracy/mean",
        "rewards/MathAccuracy",
    ),
    "reward": ("reward",),
    "entropy": ("entropy", "entropy/mean"),
    "length": ("completions/mean_length", "completion_length"),
    "mismatch": ("sampling/sampling_logp_difference/mean",),
    "reward_std": ("reward_std",),
    "lr": ("learning_rate",),
    "longest": ("completions/max_length",),
    "clipped": ("clip_ratio/region_mean", "clip_ratio"),
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
_SWIFT_REMEDIES = {
    "lr": "--learning_rate {lr}",
    "limit": "--max_completion_length {limit}",
    "explore": "--epsilon_high 0.28",
    "look": "--log_completions true",
}
FRAMEWORKS = {
    "verl": Framework(
        metrics={
            "terminated": ("completion/eos_rate",),
            "repetition": ("completion/repetition/mean",),
            "zero_std_groups": ("gtpo/group/zero_std_frac", "group/zero_std_frac"),
            "positive": ("gtpo/group/positive_frac",),
            "dropped": ("gtpo/filter/dropped_frac",),
            "no_correct_groups": ("group/none_right_frac",),
            "exact_format": ("reward/strict/mean",),
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
            "clipped": ("actor/pg_clipfrac",),
            "loss": ("actor/pg_loss",),
            "grad_norm": ("actor/grad_norm",),
            "kl": ("actor/kl_loss", "actor/reward_kl_penalty"),
            "tokens": ("perf/total_num_tokens",),
            "prompt": ("prompt_length/mean",),
        },
        remedies={
            "lr": "actor_rollout_ref.actor.optim.lr={lr}",
            "limit": "data.max_response_length={limit}",
            "filter": "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc",
            "correct": "algorithm.rollout_correction.rollout_is=token",
            "explore": "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "look": "trainer.rollout_data_dir=rollouts",
        },
        parts=r"reward/(?!(?:score|acc|format|strict|timeout)/)(\w+)/mean",
        validation=(r"val-core/.+/mean@\d+|val/(.+/)?test_score(/.+)?", r"val-aux/.+/(acc|score|reward)/mean@\d+"),
    ),
    "TRL": Framework(metrics=_TRL, remedies=_TRL_REMEDIES),
    "ms-swift": Framework(metrics=_TRL, remedies=_SWIFT_REMEDIES),
    "OpenRLHF": Framework(
        metrics={
            "terminated": ("1 - rollout/truncated_rate", "1 - truncated"),
            "zero_std_groups": ("gtpo/group/zero_std_frac",),
            "positive": ("gtpo/group/positive_frac",),
            "dropped": ("gtpo/filter/dropped_frac",),
            "reward": ("rollout/reward_mean", "reward"),
            "entropy": ("gtpo/entropy/mean",),
            "length": ("rollout/response_length_mean", "response_length"),
            "mismatch": ("logprobs_diff",),
            "lr": ("actor_lr",),
            "loss": ("policy_loss",),
            "kl": ("kl",),
        },
        remedies={"lr": "--actor.adam.lr {lr}", "limit": "--rollout.max_new_tokens {limit}"},
        validation=(r"(eval/)?eval_.+_pass1",),
    ),
}


_FROM_1 = "1 - "
"""Begins the name of a metric that is subtracted from 1."""


def _metrics_of(framework: Framework) -> set[str]:
    """Return what a framework calls the numbers of a run."""
    names = set[str]()
    for sources in framework.metrics.values():
        names.update(source.removeprefix(_FROM_1) for source in sources)
    return names


_METRICS = {name: _metrics_of(framework) for name, framework in FRAMEWORKS.items()}
METRICS = frozenset().union(*_METRICS.values())
"""What some framework calls a number of a run."""
PREFIXES = ("rewards/", "reward/", "val-core/", "val-aux/", "val/", "eval_", "eval/")
"""What the names of parts of the reward and of validations begin with."""


def is_metric(name: str) -> bool:
    """Return whether some framework logs a number of a run under this name."""
    return name in METRICS or name.startswith(PREFIXES)


def framework_of(metrics: Iterable[str]) -> str:
    """Return the framework that names most of these metrics, the first of those that name as many."""
    names = set(metrics)
    return max(FRAMEWORKS, key=lambda framework: len(names & _METRICS[framework]))


def translate(metrics: Mapping[str, Any], framework: str, limit: float | None = None) -> dict[str, float]:
    """Return our numbers at one step, from what a framework logged at it.

    Beside a validation that is an accuracy stands `validation_limit`, 1. verl's `response_length/clip_ratio` counts the
    completions that were cut off, but in its V1 trainer those as long as the longest, whatever its length (verl #7817):
    it is read if it is 0, or if the longest has `limit` tokens.
    """
    names = FRAMEWORKS[framework]
    values = _as_floats(metrics)
    numbers = {}
    for number, sources in names.metrics.items():
        for source in sources:
            metric = source.removeprefix(_FROM_1)
            if metric in values:
                numbers[number] = 1 - values[metric] if source.startswith(_FROM_1) else values[metric]
                break
    for metric, value in values.items():
        part = re.fullmatch(names.parts, metric)
        if part and metric not in _METRICS[framework]:
            numbers[f"{PART}{part[1]}"] = value

    results = validation_results(values, framework)
    if results:
        numbers["validation"] = sum(values[metric] for metric in results) / len(results)
        if _IS_ACCURACY.search(results[0]):  # then all are
            numbers["validation_limit"] = 1.0

    if "terminated" not in numbers and "cut" in numbers:
        if numbers["cut"] == 0:
            numbers["terminated"] = 1.0
        elif limit is not None and "longest" in numbers:
            numbers["terminated"] = 1 - numbers["cut"] if numbers["longest"] >= limit else 1.0
    return numbers


def _as_floats(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers; one that is too large for a float is infinite."""
    values = {}
    for metric, value in metrics.items():
        if isinstance(value, Real):
            try:
                values[metric] = float(value)
            except OverflowError:
                values[metric] = math.inf
    return values


def validation_results(metrics: Iterable[str], framework: str) -> list[str]:
    """Return the metrics whose mean is the validation: accuracies, if there are any, as others have other scales."""
    names = list(metrics)
    for pattern in FRAMEWORKS[framework].validation:
        results = [name for name in names if re.fullmatch(pattern, name)]
        if results:
            return [name for name in results if _IS_ACCURACY.search(name)] or results
    return []


def limit_of(steps: Iterable[Mapping[str, float]]) -> float | None:
    """Return the tokens at which completions are cut off: those of the longest one, if three steps or more have some of
    that length; else None."""
    longest = []
    for numbers in steps:
        has_cut = numbers.get("cut", 0) > 0 or numbers.get("terminated", 1) < 1
        if has_cut and "longest" in numbers:
            longest.append(numbers["longest"])
    if not longest:
        return None
    limit = max(longest)
    return limit if longest.count(limit) >= 3 else None


def remedy(kind: str, framework: str, lr: float, limit: float | None) -> str:
    """Return the override to try: half the learning rate that was logged, twice the limit; empty where the framework
    has none of this kind, or its old value is not known."""
    template = FRAMEWORKS[framework].remedies.get(kind, "")
    if "{lr}" in template and not lr:
        return ""
    if "{limit}" in template and not limit:
        return ""
    return template.format(lr=f"{lr / 2:.3g}", limit=f"{2 * (limit or 0):.0f}")
