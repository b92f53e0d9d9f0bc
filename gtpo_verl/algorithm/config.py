"""The keys of the algorithm, `algorithm.gtpo` in verl, their defaults (the paper's) and their checks."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from gtpo_verl.algorithm import token_weights

if TYPE_CHECKING:
    from typing_extensions import Self

LN2 = math.log(2)
"""Mean entropy (nats per token) of a policy that chooses between two equiprobable tokens at every step."""

CompletionFilter = Literal["auto", "always", "never"]
FilterScope = Literal["all", "negative"]
ConflictSpan = Literal["leading", "first", "all", "none"]
ConflictMasks = Literal["both", "forward", "backward"]

_SYMBOLS = {
    "gamma": "entropy_coeff",
    "lambda": "conflict_weight_positive and conflict_weight_negative",
    "delta": "completion_filter and entropy_threshold",
}
"""The keys behind the symbols of the paper's Eq. 9 to 11."""


@dataclass(frozen=True)
class GTPOConfig:
    """Settings of GTPO (arXiv:2508.03772).

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
        token_weights (str | None): `pkg://module.function` names a function that gives λ of every token in place of the
            conflict masks (`gtpo_verl.algorithm.token_weights`). Not the paper's. None: Eq. 9.
        min_correct_reward (float | None): a completion with a lower reward is wrong, and its A_i at most 0. Not the
            paper's. None: A_i is GRPO's.

    Raises:
        ValueError: a value out of its range; the message names the key, the value and the remedy.
    """

    section: ClassVar[str] = "algorithm.gtpo"
    """Where a trainer's config has these keys, for messages."""

    trainer: ClassVar[str] = "your own trainer"
    """Who reads these keys, for messages; a trainer that has more keys extends this class."""

    entropy_coeff: float = 0.1
    entropy_threshold: float = LN2
    completion_filter: CompletionFilter = "auto"
    filter_scope: FilterScope = "all"
    initial_entropy: float | None = None
    conflict_span: ConflictSpan = "leading"
    conflict_weight_positive: float = 2.0
    conflict_weight_negative: float = 0.0
    conflict_masks: ConflictMasks = "both"
    token_weights: str | None = None
    min_correct_reward: float | None = None

    def __post_init__(self) -> None:
        self._check_choice("completion_filter", *get_args(CompletionFilter))
        self._check_choice("filter_scope", *get_args(FilterScope))
        self._check_choice("conflict_masks", *get_args(ConflictMasks))
        self._check_choice("conflict_span", *get_args(ConflictSpan))
        self._check_token_weights()
        for key in ("entropy_coeff", "conflict_weight_positive", "conflict_weight_negative"):
            self._check_number(key, "a number of at least 0", lambda number: number >= 0)
        expected = "a number of nats per token above 0 (ln 2 in the paper)"
        self._check_number("entropy_threshold", expected, lambda number: number > 0)
        if self.initial_entropy is not None:
            expected = "a number of nats per token of at least 0, or null to measure it on the first rollouts"
            self._check_number("initial_entropy", expected, lambda number: number >= 0)
        if self.min_correct_reward is not None:
            expected = "the least reward of a right answer, or null"
            self._check_number("min_correct_reward", expected, lambda number: True)

    def _check_choice(self, key: str, *choices: str) -> None:
        value = getattr(self, key)
        if value not in choices:
            raise ValueError(f"{self.section}.{key}={value!r} is not one of {', '.join(choices)}")

    def _check_number(self, key: str, expected: str, is_in_range: Callable[[float], bool]) -> None:
        value = getattr(self, key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not is_in_range(value):
            raise ValueError(f"{self.section}.{key}={value!r}: must be {expected}")

    @classmethod
    def from_config(cls, config: "Self | Mapping[str, Any] | None") -> "Self":
        """Read the settings from verl's `algorithm` config, from its `gtpo` section alone, or from None (defaults).

        Args:
            config: such settings, a mapping or OmegaConf config of either kind, or None.

        Raises:
            ValueError: unknown keys under `algorithm.gtpo`, all of them, or a value out of its range.
        """
        if isinstance(config, cls):
            return config
        section: Any = config or {}
        if hasattr(section, "keys") and ("adv_estimator" in section or "gtpo" in section):
            section = section.get("gtpo")
            if section is None:
                section = {}
        if not hasattr(section, "keys"):
            raise ValueError(f"{cls.section}={section!r} is no mapping: set one of its keys, such as entropy_coeff")
        known = [field.name for field in fields(cls)]
        unknown = [key for key in section if key not in known]
        if unknown:
            raise ValueError("; ".join(f"{cls.section}.{key}={section[key]!r}: {cls.hint(key)}" for key in unknown))
        return cls(**dict(section))

    @classmethod
    def hint(cls, key: Any) -> str:
        """Return what to do about an unknown key: remove it, if only another trainer has it, or use the key that it
        resembles, or the keys behind the symbol of the paper that it resembles."""
        for other in GTPOConfig.__subclasses__():
            if key in [field.name for field in fields(other)]:
                return f"unknown key; only {other.trainer} has it: remove it"
        known = [field.name for field in fields(cls)]
        near = get_close_matches(str(key), [*known, *_SYMBOLS])
        if not near:
            return f"unknown key; the keys are {', '.join(known)}"
        return f"unknown key; did you mean {_SYMBOLS.get(near[0], near[0])}?"

    @property
    def token_weight_function(self) -> Callable[..., Any] | None:
        """The function that `token_weights` names; a ValueError if there is none of this name."""
        if self.token_weights is None:
            return None
        return token_weights.load_function(self.token_weights, f"{self.section}.token_weights={self.token_weights}")

    @property
    def token_weight_fields(self) -> list[str]:
        """What the function of `token_weights` asks for, by the names of its arguments."""
        function = self.token_weight_function
        return [] if function is None else token_weights.fields_of(function)

    def unavailable_fields(self) -> dict[str, str]:
        """Return the fields of a batch that the function of `token_weights` cannot be given with these settings, each
        with the reason."""
        return {}

    def _check_token_weights(self) -> None:
        if self.token_weights is None:
            return
        setting = f"{self.section}.token_weights={self.token_weights}"
        for field in fields(GTPOConfig):
            value = getattr(self, field.name)
            if field.name.startswith("conflict_") and value != field.default:
                raise ValueError(
                    f"{self.section}.{field.name}={value!r} with {setting}: leave the first out; the function alone "
                    "says what λ is"
                )
        unavailable = self.unavailable_fields()
        for name in self.token_weight_fields:
            if name in unavailable:
                raise ValueError(f"{setting} asks for {name}: {unavailable[name]}")

    @property
    def measures_initial_entropy(self) -> bool:
        """Whether a new run measures ⟨H⟩_ini, since the filter needs it and the config does not say it."""
        return self.completion_filter == "auto" and self.initial_entropy is None

    def filter_is_active(self, initial_entropy: float | None) -> bool:
        """Return whether completions are filtered at all in this run: the ⟨H⟩_ini cases of Eq. 10.

        Args:
            initial_entropy: ⟨H⟩_ini in nats per token; needed for `completion_filter="auto"` only.

        Raises:
            ValueError: the filter is `auto` and `initial_entropy` is None, or it is no entropy.
        """
        if initial_entropy is not None:
            check_initial_entropy(initial_entropy)
        if self.completion_filter != "auto":
            return self.completion_filter == "always"
        if initial_entropy is None:
            raise ValueError(
                f"{self.section}.completion_filter='auto' needs the initial entropy, which is None: measure it and set "
                f"{self.section}.initial_entropy (nats per token), or set completion_filter to always or never"
            )
        return initial_entropy < self.entropy_threshold


def check_initial_entropy(initial_entropy: float) -> None:
    """Raise a ValueError if ⟨H⟩_ini, in nats per token, is no entropy."""
    if not 0 <= initial_entropy < math.inf:
        raise ValueError(f"initial_entropy={initial_entropy}: must be a number of nats per token of at least 0")
