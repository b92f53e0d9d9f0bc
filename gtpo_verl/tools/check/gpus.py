"""Settings that do not fit the GPUs that a command asks for: splits, batches, tokens, GPUs of the rollout's own."""

import math
from collections.abc import Callable, Iterator

from gtpo_verl.tools.check.finding import Finding
from gtpo_verl.tools.check.resources import pools

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_TOKENS, _TP = f"{_ACTOR}.ppo_max_token_len_per_gpu", f"{_ROLLOUT}.tensor_model_parallel_size"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_MICRO = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
_SPLITS = {
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "torchtitan": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    "veomni": ("ulysses_parallel_size",),
}
"""The keys of an engine that say over how many GPUs it splits a model; FSDP has two names for one."""
_SPLITS_OF_A_SEQUENCE = {"megatron": "megatron.context_parallel_size", "torchtitan": "torchtitan.tensor_parallel_size"}


def misfits(get: Callable) -> Iterator[Finding]:
    """Yield settings that do not fit the GPUs; none for a run that only validates."""
    if get("trainer.val_only") and get("trainer.val_before_train"):
        return
    gpus = get("trainer.nnodes") * get("trainer.n_gpus_per_node")
    split = _split_of_model(get)
    copy = math.prod(split.values())
    if gpus % copy:
        says = f"{copy} GPUs to a copy of the model, of {gpus} in all (trainer.nnodes x trainer.n_gpus_per_node)"
        names = " x ".join(f"{key}={size}" for key, size in split.items())
        yield Finding(names, says, "lower it, or ask for a multiple of it")
    elif get(f"{_ACTOR}.strategy") in ("fsdp", "fsdp2", "veomni", "megatron"):
        yield from _batch_splits(get, 1 if _splits_dynamically(get) else gpus // copy)
    yield from _replicas(get, gpus)
    yield from _token_budgets(get, copy)
    for name, pool in pools(get).items():
        nodes = get(f"{pool}.nnodes") or 0
        if not nodes * (get(f"{pool}.n_gpus_per_node") or 0):
            yield Finding(name, f"{pool}.nnodes={nodes}: no GPUs of its own", f"set {pool}.nnodes=1")


def longest_sequence(get: Callable) -> int:
    """Return the tokens of the longest prompt with its completion, which the engine holds to its context."""
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
        both = (f"{_ACTOR}.ulysses_sequence_parallel_size", f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size")
        keys = [max(both, key=lambda key: get(key) or 1)]
    sizes = {key: get(key) or 1 for key in keys}
    return {key: size for key, size in sizes.items() if size > 1}


def _splits_dynamically(get: Callable) -> bool:
    return get(f"{_ACTOR}.strategy") == "megatron" and bool(get(f"{_ACTOR}.megatron.dynamic_context_parallel"))


def _batch_splits(get: Callable, copies: int) -> Iterator[Finding]:
    """Whether batches split over the copies of the model, as verl asserts at the first update; V1 pads whole ones."""
    keys = [f"{_ACTOR}.ppo_mini_batch_size"]
    if not get("trainer.use_v1") and get("async_training") is None:
        keys.append("data.train_batch_size")
    n, rows = get(f"{_ROLLOUT}.n"), get(_MICRO) or 1
    for key in keys:
        prompts = get(key)
        of_a_copy = prompts * n // copies
        if prompts * n % copies:
            says = f"{prompts} prompts x {n} completions do not split over {copies} copies of the model"
            yield Finding(f"{key}={prompts}", says, f"make {key} x {_ROLLOUT}.n a multiple of {copies}")
        elif key.startswith(_ACTOR) and not get(_DYNAMIC) and of_a_copy % rows:
            says = f"does not divide the {of_a_copy} completions of a GPU in an update"
            yield Finding(f"{_MICRO}={rows}", says, f"set {_MICRO}=1, or another divisor")


def _replicas(get: Callable, gpus: int) -> Iterator[Finding]:
    """Whether copies of the model in the rollout fill the GPUs that serve it: verl rounds down, to none too."""
    kinds = ("tensor_model", "data", "pipeline_model")
    copy = math.prod(get(f"{_ROLLOUT}.{kind}_parallel_size") or 1 for kind in kinds)
    serving = {}
    if get("actor_rollout_ref.hybrid_engine", default=True):
        serving["trainer"] = gpus
    for name, section in pools(get).items():
        if name == "rollout":
            serving[section] = (get(f"{section}.nnodes") or 0) * (get(f"{section}.n_gpus_per_node") or 0)
    for section, number in serving.items():
        if number % copy:
            says = f"{copy} GPUs to a copy of the model in the rollout, of {number} in {section}"
            yield Finding(f"{_TP}={get(_TP)}", says, f"set {_TP}=1, or ask for a multiple of {copy} in {section}")


def _token_budgets(get: Callable, copy: int) -> Iterator[Finding]:
    """Whether the longest sequence fits into a micro-batch, as verl asserts of the real lengths."""
    longest = longest_sequence(get)
    limit = get(f"{_ROLLOUT}.max_model_len")
    asked = get("data.max_prompt_length") + get("data.max_response_length")
    if limit and limit < asked:
        says = f"a sequence has up to {asked} tokens (data.max_prompt_length + data.max_response_length)"
        yield Finding(f"{_ROLLOUT}.max_model_len={limit}", says, advice="the rollout cuts longer ones")
    if not get(_DYNAMIC) or _splits_dynamically(get):
        return
    key = _SPLITS_OF_A_SEQUENCE.get(get(f"{_ACTOR}.strategy"))
    split = get(f"{_ACTOR}.{key}") or 1 if key else copy
    keys = [_TOKENS]
    if not get("algorithm.rollout_correction.bypass_mode"):
        keys.insert(0, f"{_ROLLOUT}.log_prob_max_token_len_per_gpu")
    budgets = {get(key): key for key in keys}  # one key a value: by default the first has the second's
    for tokens, key in budgets.items():
        if tokens and tokens * split < longest:
            says = f"a sequence has up to {longest} tokens"
            yield Finding(f"{key}={tokens}", says, f"set {key}={math.ceil(longest / split)} or more")
