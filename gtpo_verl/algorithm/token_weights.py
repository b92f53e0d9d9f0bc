"""A rule of a user's own for λ_{i,t}: the function that `token_weights=pkg://module.function` names.

It is given the fields of the batch that it declares by its arguments' names, and returns λ, (bs, response_length)
floats, in place of the conflict weights of arXiv:2508.03772, Eq. 9:

    responses       (bs, response_length) int64 token ids
    response_mask   (bs, response_length) bool, a completion's own tokens
    uids            (bs,) int64, a number for each uid
    groups          (bs,) int64, a number for each uid *and* prompt
    advantages      (bs,), A_i
    entropy         (bs, response_length), nats
    old_log_probs   (bs, response_length), of the policy before the update; under verl's bypass mode the rollout's

Each is a copy, so that nothing is changed by it.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

# A config is also read where there is no torch.
if TYPE_CHECKING:
    import torch

    from gtpo_verl.algorithm.completions import Completions

FIELDS = ("responses", "response_mask", "uids", "groups", "advantages", "entropy", "old_log_probs")
PREFIX = "pkg://"
_EXAMPLE = f"{PREFIX}module.function"


def load_function(name: str, setting: str) -> "Callable[..., torch.Tensor]":
    """Import the function of `pkg://module.function`; `setting` names the key in messages.

    Raises:
        ValueError: there is no such function, or it asks for what is no field of a batch.
    """
    try:
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is no text; a function itself goes to compute_gtpo(token_weights=…)")
        if not name.startswith(PREFIX):
            raise ValueError(f"no {PREFIX}")
        module, _, attribute = name.removeprefix(PREFIX).rpartition(".")
        function = resolve_name(f"{module}:{attribute}")
        fields_of(function)
    except Exception as error:  # whatever a module raises when it is imported
        raise ValueError(
            f"{setting}: {error}; give {_EXAMPLE}, a function of some of {', '.join(FIELDS)} in a module that can be "
            "imported on every node, installed or on PYTHONPATH"
        ) from error
    return function


def fields_of(function: "Callable[..., torch.Tensor]") -> list[str]:
    """Return the fields of a batch that a function declares by its arguments' names; a ValueError if it needs another
    argument. What it takes by `*args` or `**kwargs` it does not need."""
    fields = []
    for name, parameter in signature(function).parameters.items():
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            continue
        can_be_named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        if can_be_named and name in FIELDS:
            fields.append(name)
        elif parameter.default is Parameter.empty:
            function_name = getattr(function, "__name__", repr(function))
            raise ValueError(
                f"{function_name}: its argument {name} is no field of a batch; name its arguments as some of "
                f"{', '.join(FIELDS)}, or give this one a default"
            )
    return fields


def compute_own_weights(
    function: "Callable[..., torch.Tensor]",
    batch: "Mapping[str, torch.Tensor | None]",
    completions: "Completions",
    setting: str = "token_weights",
) -> "torch.Tensor":
    """Return λ of a user's function, (bs, response_length) float32, with 0 off the response mask.

    Args:
        batch: responses, advantages, entropy and old_log_probs; None where the caller has none.
        setting: the key, for messages.

    Raises:
        ValueError: the function asks for a field that the caller does not have, or it returns something other than
            floats of this shape, a weight that is not finite, or a weight other than 0 and 1 on a token that is no
            completion's own.
    """
    # A rule's `groups` are groups of equal uids and prompts, which are the `prompts` of `Completions`.
    fields: dict[str, Any] = {
        **batch,
        "response_mask": completions.mask,
        "uids": completions.groups,
        "groups": completions.prompts,
    }
    arguments = {}
    for name in fields_of(function):
        if fields[name] is None:
            raise ValueError(f"{setting} asks for {name}, which is not given here")
        arguments[name] = fields[name].detach().clone()
    weights = function(**arguments)

    shape = tuple(completions.shape)
    if not hasattr(weights, "is_floating_point"):
        raise ValueError(f"{setting} returned {type(weights).__name__}: it must return a tensor of floats, {shape}")
    if not weights.is_floating_point() or weights.shape != completions.shape:
        raise ValueError(f"{setting} returned {weights.dtype} {tuple(weights.shape)}: it must return floats, {shape}")
    weights = weights.detach().float()
    is_own = completions.mask
    is_wrong_own = is_own & ~weights.isfinite()
    is_wrong_elsewhere = ~is_own & (weights != 0) & (weights != 1)
    is_wrong = is_wrong_own | is_wrong_elsewhere
    if is_wrong.any():
        row, column = is_wrong.nonzero()[0].tolist()
        requirement = "must be finite" if is_own[row, column] else "is not the completion's own, and needs 0 or 1"
        raise ValueError(
            f"{setting} gives token {column} of row {row} (uid {completions.uids[row]}) the weight "
            f"{weights[row, column]:g}: it {requirement}"
        )
    return weights.where(completions.mask, 0)
