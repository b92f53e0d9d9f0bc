"""Settings that do not fit the GPUs that a command asks for: splits, batches, tokens, GPUs of the rollout's own."""

import math
from collections.abc import Callable, Iterator

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.tools.check.resources import pools

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TP = f"{_ROLLOUT}.tensor_model_parallel_size"
_TOKENS = f"{_ACTOR}.ppo_max_token_len_per_gpu"
_LOG_PROB_TOKENS = f"{_ROLLOUT}.log_prob_max_token_len_per_gpu"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_MICRO = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_SPLITS = {
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    "veomni": ("ulysses_parallel_size",),
}
"""The keys of an engine that say over how many GPUs it splits a model; FSDP's are in `_split_of_model`."""
# The one key of these by which an engine also splits a sequence; the other engines split it by all of theirs.
_SPLIT_OF_A_SEQUENCE = {"megatron": "megatron.context_parallel_size", "torchtitan": "torchtitan.tensor_parallel_size"}


def misfits(get: Callable) -> Iterator[Finding]:
    """Yield settings that do not fit the GPUs; none for a run that only validates."""
    if get("trainer.val_only") and get("trainer.val_before_train"):
        return
    gpus = get("trainer.nnodes") * get("trainer.n_gpus_per_node")
    split = _split_of_model(get)
    gpus_per_copy = math.prod(split.values())
    if gpus % gpus_per_copy:
        settings = " x ".join(f"{key}={size}" for key, size in split.items())
        in_all = f"{gpus} in all (trainer.nnodes x trainer.n_gpus_per_node)"
        message = f"{gpus_per_copy} GPUs to a copy of the model, of {in_all}"
        yield Finding(settings, message, "lower it, or ask for a multiple of it")
    elif get(f"{_ACTOR}.strategy") in ("fsdp", "fsdp2", "veomni", "megatron"):
        copies = 1 if _splits_dynamically(get) else gpus // gpus_per_copy
        yield from _unsplittable_batches(get, copies)
    yield from _unfilled_replicas(get, gpus)
    yield from _too_long_sequences(get, gpus_per_copy)
    yield from _empty_pools(get)


def _empty_pools(get: Callable) -> Iterator[Finding]:
    for name, pool in pools(get).items():
        for key in (f"{pool}.nnodes", f"{pool}.n_gpus_per_node"):
            if not get(key):
                yield Finding(name, f"{key}=0: no GPUs of its own", f"set {key}=1")


def longest_sequence(get: Callable) -> int:
    """Return the tokens of the longest prompt with its completion, which the engine cuts to its context."""
    prompt = get(f"{_ROLLOUT}.prompt_length") or get("data.max_prompt_length")
    response = get(f"{_ROLLOUT}.response_length") or get("data.max_response_length")
    context = get(f"{_ROLLOUT}.max_model_len")
    return min(prompt + response, context) if context else prompt + response


def _split_of_model(get: Callable) -> dict[str, int]:
    """Return the keys that split one copy of the trained model over GPUs, with their sizes above 1."""
    strategy = get(f"{_ACTOR}.strategy")
    if strategy in _SPLITS:
        keys = [f"{_ACTOR}.{strategy}.{name}" for name in _SPLITS[strategy]]
    else:
        # FSDP has one size under two names.
        both = (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
        keys = [max(both, key=lambda key: get(key) or 1)]
    sizes = {key: get(key) or 1 for key in keys}
    return {key: size for key, size in sizes.items() if size > 1}


def _splits_dynamically(get: Callable) -> bool:
    """Return whether Megatron chooses for each batch over how many GPUs it splits a sequence."""
    return get(f"{_ACTOR}.strategy") == "megatron" and bool(get(f"{_ACTOR}.megatron.dynamic_context_parallel"))


def _unsplittable_batches(get: Callable, copies: int) -> Iterator[Finding]:
    """Yield batches that do not split over the copies of the model, which verl asserts at the first update.

    The V1 trainer pads `data.train_batch_size`, so only the legacy one is held to it.
    """
    keys = [f"{_ACTOR}.ppo_mini_batch_size"]
    if not get("trainer.use_v1") and get("async_training") is None:
        keys.append("data.train_batch_size")
    n = get(f"{_ROLLOUT}.n")
    micro_batch = get(_MICRO) or 1
    for key in keys:
        prompts = get(key)
        completions_per_copy = prompts * n // copies
        if prompts * n % copies:
            message = f"{prompts} prompts x {n} completions do not split over {copies} copies of the model"
            yield Finding(f"{key}={prompts}", message, f"make {key} x {_ROLLOUT}.n a multiple of {copies}")
        elif key.startswith(_ACTOR) and not get(_DYNAMIC) and completions_per_copy % micro_batch:
            message = f"does not divide the {completions_per_copy} completions of a GPU in an update"
            yield Finding(f"{_MICRO}={micro_batch}", message, f"set {_MICRO}=1, or another divisor")


def _unfilled_replicas(get: Callable, gpus: int) -> Iterator[Finding]:
    """Yield a finding where copies of the rollout's model leave GPUs over: verl rounds their number down, even to 0."""
    kinds = ("tensor_model", "data", "pipeline_model")
    gpus_per_copy = math.prod(get(f"{_ROLLOUT}.{kind}_parallel_size") or 1 for kind in kinds)
    serving = {}  # the GPUs of each section that serve the rollout
    if get("actor_rollout_ref.hybrid_engine", default=True):
        serving["trainer"] = gpus
    for name, section in pools(get).items():
        if name == "rollout":
            serving[section] = (get(f"{section}.nnodes") or 0) * (get(f"{section}.n_gpus_per_node") or 0)
    for section, number in serving.items():
        if number % gpus_per_copy:
            message = f"{gpus_per_copy} GPUs to a copy of the model in the rollout, of {number} in {section}"
            remedy = f"set {_TP}=1, or ask for a multiple of {gpus_per_copy} in {section}"
            yield Finding(f"{_TP}={get(_TP)}", message, remedy)


def _too_long_sequences(get: Callable, gpus_per_copy: int) -> Iterator[Finding]:
    """Yield limits of tokens below the longest sequence; verl asserts that a micro-batch holds each real one."""
    limit = get(f"{_ROLLOUT}.max_model_len")
    asked = get("data.max_prompt_length") + get("data.max_response_length")
    if limit and limit < asked:
        message = f"a sequence has up to {asked} tokens (data.max_prompt_length + data.max_response_length)"
        yield Finding(f"{_ROLLOUT}.max_model_len={limit}", message, advice="the rollout cuts longer ones")
    if not get(_DYNAMIC) or _splits_dynamically(get):
        return

    # Each of the GPUs over which a sequence is split takes as many tokens.
    name = _SPLIT_OF_A_SEQUENCE.get(get(f"{_ACTOR}.strategy"))
    gpus_per_sequence = gpus_per_copy
    if name:
        gpus_per_sequence = get(f"{_ACTOR}.{name}") or 1
    longest = longest_sequence(get)
    limits = {}
    # The log-prob pass has the update's limit by default, and is then not named beside it.
    has_log_prob_pass = not get("algorithm.rollout_correction.bypass_mode")
    if has_log_prob_pass and get(_LOG_PROB_TOKENS) != get(_TOKENS):
        limits[_LOG_PROB_TOKENS] = get(_LOG_PROB_TOKENS)
    limits[_TOKENS] = get(_TOKENS)
    for key, tokens in limits.items():
        if tokens and tokens * gpus_per_sequence < longest:
            message = f"a sequence has up to {longest} tokens"
            remedy = f"set {key}={math.ceil(longest / gpus_per_sequence)} or more"
            yield Finding(f"{key}={tokens}", message, remedy)
