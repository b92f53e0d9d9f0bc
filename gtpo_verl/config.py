"""The keys of `algorithm.gtpo`, their defaults (the paper's) and their checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

LN2 = math.log(2)
"""Mean entropy (nats per token) of a policy that chooses between two equiprobable tokens at every step."""

CHOICES = {
    "completion_filter": ("auto", "always", "never"),
    "filter_scope": ("all", "negative"),
    "conflict_span": ("leading", "first", "all", "none"),
    "conflict_masks": ("both", "forward", "backward"),
    "entropy_from": ("old_log_prob", "update"),
}


@dataclass(frozen=True)
class GTPOConfig:
    """Settings of GTPO (arXiv:2508.03772), the section `algorithm.gtpo` of a verl config.

    With `entropy_coeff=0, completion_filter="never", conflict_span="none"` GTPO is GRPO.

    Args:
        entropy_coeff (float): γ of Eq. 11, the weight of ⟨H⟩_i in the advantage (Sec. 5.2 and 6). At least 0.
        entropy_threshold (float): drops a completion whose mean entropy exceeds it (Eq. 10), in nats per token. Above
            0.
        completion_filter (str): `auto` filters iff the initial entropy is below the threshold (Eq. 10); `always`;
            `never`.
        filter_scope (str): `all` completions may be filtered (Eq. 10), or only those with `negative` advantage
            (OnlyNeg, Fig. 4c).
        initial_entropy (float | None): ⟨H⟩_ini in nats per token (Sec. 5.2). None: measured on the first rollouts,
            before any update.
        conflict_span (str): which conflict tokens are masked (Sec. 5.1). `leading`: the run that starts at the
            completion's first (last) token. `first`: the first run from each end, wherever it starts. `all`:
            every conflict token. `none`: no mask.
        conflict_weight_positive (float): λ of a conflict token where the advantage is positive (Eq. 9). At least 0.
        conflict_weight_negative (float): λ of a conflict token where the advantage is negative (Eq. 9). At least 0.
        conflict_masks (str): `both`, or only the `forward` or the `backward` mask, to see what each does.
        entropy_from (str): which forward pass of verl's trainer gives ⟨H⟩_i. `old_log_prob`: the one before the
            update. `update`: the update's own, so that verl can skip the other.
        dump_dir (str | None): folder for the token dump that `gtpo-verl view` shows. None: no dump.
        dump_freq (int): dump the first step and every step that this number divides. At least 1.

    Raises:
        ValueError: a value out of its range; the message names the key, the value and the remedy.
    """

    entropy_coeff: float = 0.1
    entropy_threshold: float = LN2
    completion_filter: str = "auto"
    filter_scope: str = "all"
    initial_entropy: float | None = None
    conflict_span: str = "leading"
    conflict_weight_positive: float = 2.0
    conflict_weight_negative: float = 0.0
    conflict_masks: str = "both"
    entropy_from: str = "old_log_prob"
    dump_dir: str | None = None
    dump_freq: int = 10

    def __post_init__(self) -> None:
        for key, choices in CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise ValueError(f"algorithm.gtpo.{key}={value!r} is not one of {', '.join(choices)}")
        for key in ("entropy_coeff", "conflict_weight_positive", "conflict_weight_negative"):
            self._check_number(key, "a number of at least 0", lambda x: x >= 0)
        self._check_number(
            "entropy_threshold", "a number of nats per token above 0 (ln 2 in the paper)", lambda x: x > 0
        )
        if self.initial_entropy is not None:
            remedy = "a number of nats per token of at least 0, or null to measure it on the first rollouts"
            self._check_number("initial_entropy", remedy, lambda x: x >= 0)
        self._check_number("dump_freq", "a whole number of steps of at least 1", lambda x: x >= 1 and x == int(x))

    def _check_number(self, key: str, remedy: str, in_range) -> None:
        value = getattr(self, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (is_number and in_range(value)):
            raise ValueError(f"algorithm.gtpo.{key}={value!r}: must be {remedy}")

    @classmethod
    def from_config(cls, config: "GTPOConfig | Mapping[str, Any] | None") -> "GTPOConfig":
        """Read the settings from verl's `algorithm` config, from its `gtpo` section alone, or from None (defaults).

        Args:
            config: a `GTPOConfig`, a mapping or OmegaConf config of either kind, or None.

        Raises:
            ValueError: an unknown key under `algorithm.gtpo`, or a value out of its range.
        """
        if isinstance(config, GTPOConfig):
            return config
        section: Mapping[str, Any] = config or {}
        if "adv_estimator" in section or "gtpo" in section:
            section = section.get("gtpo") or {}
        known = [field.name for field in fields(cls)]
        for key in section:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
                raise ValueError(f"algorithm.gtpo.{key}={section[key]!r}: there is no such key; {hint}")
        return cls(**dict(section))

    def filter_is_active(self, initial_entropy: float | None) -> bool:
        """Whether completions are filtered at all in this run: the ⟨H⟩_ini cases of Eq. 10.

        Args:
            initial_entropy: ⟨H⟩_ini in nats per token; needed for `completion_filter="auto"` only.

        Raises:
            ValueError: the filter is `auto` and `initial_entropy` is None.
        """
        if self.completion_filter != "auto":
            return self.completion_filter == "always"
        if initial_entropy is None:
            raise ValueError(
                "algorithm.gtpo.completion_filter='auto' needs the initial entropy, which is None: measure it and set "
                "algorithm.gtpo.initial_entropy (nats per token), or set completion_filter to always or never"
            )
        return initial_entropy < self.entropy_threshold
