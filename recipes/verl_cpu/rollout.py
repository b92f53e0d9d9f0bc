"""`rollout.name=hf`: completions from a transformers model, one Ray actor per replica, for machines without vLLM.

`generate` calls transformers' `generate`, `HFServer` is the actor that the agent loop calls, `HFServerAdapter` the
worker's end that pushes new weights to it, `HFReplica` what launches it. The log-probs are of the distribution that was
sampled (verl's `processed_logprobs`); those of a greedy completion are at temperature 1. Each server computes with
`OMP_NUM_THREADS` threads, which Ray sets to 1 where the environment does not.

A completion is drawn by numbers that follow from the seed, the step of the weights, the prompt, and which of the equal
prompts it is. Requests that arrive in another order are drawn alike: two runs of a seed begin with equal token ids.
Several servers share the prompts as the requests arrive, and two such runs differ.
"""

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.utils.torch_functional import get_response_mask
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator, get_max_position_embeddings

from gtpo_verl.tokens import eos_ids

# A batch starts when this long has passed without a new request (seconds): the agent loop sends a step's requests
# one by one, and two half batches take twice as long as one.
QUIET_PERIOD = 0.02


def sampling(
    max_tokens: int, stop_token_ids: Collection[int] = (), temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1
) -> GenerationConfig:
    """Translate how to sample from vLLM's terms to those of transformers, which names what it refuses.

    Args:
        max_tokens: most tokens to generate.
        stop_token_ids: a completion ends with the first of these, which it keeps.
        temperature: 0 is greedy, and then `top_p` and `top_k` have no part.
        top_p: nucleus size in [0, 1], after `top_k`.
        top_k: most likely tokens kept; 0 or -1 keeps all.
    """
    sampled_from: dict[str, Any] = {}
    if temperature:
        sampled_from["temperature"] = float(temperature)
        sampled_from["top_p"] = top_p
        sampled_from["top_k"] = 0 if top_k == -1 else top_k
    return GenerationConfig(
        **sampled_from,
        do_sample=temperature != 0,
        max_new_tokens=max_tokens,
        eos_token_id=sorted(stop_token_ids) or None,
        pad_token_id=0,
    )


class TokenChoice(LogitsProcessor):
    """Chooses each row's next token, and leaves it as the only one with a probability above 0.

    transformers would draw all rows from one random state, where a completion depends on the rows beside it.

    Args:
        draws: (rows, tokens) float32 in [0, 1), by which a row's tokens are chosen one after another; None is greedy.
    """

    def __init__(self, draws: torch.Tensor | None) -> None:
        self.draws = draws
        self.log_probs: list[torch.Tensor] = []  # of the tokens chosen so far, each (rows, 1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise ArithmeticError("rollout.name=hf: the model's logits are not numbers; its weights have diverged")
        if self.draws is None:
            token_ids = scores.argmax(-1, keepdim=True)
        else:
            # The first token up to which the probabilities sum to more than the draw. In float64 a draw below 1 stays
            # below the sum of them all.
            cumulated = scores.softmax(-1, dtype=torch.float64).cumsum(-1)
            draw = self.draws[:, len(self.log_probs), None].double()
            token_ids = torch.searchsorted(cumulated, draw * cumulated[:, -1:], right=True)
        self.log_probs.append(scores.log_softmax(-1).gather(-1, token_ids))
        return torch.full_like(scores, -torch.inf).scatter(-1, token_ids, 0.0)


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[list[int]], config: GenerationConfig, seeds: Sequence[Sequence[int]]
) -> list[tuple[list[int], list[float]]]:
    """Generate one completion per prompt, all in one batch.

    Args:
        model: a transformers model.
        prompts: the token ids of each prompt.
        config: how to sample, as `sampling` returns it.
        seeds: for each prompt numbers of 0 or above, from which its draws follow.

    Returns:
        For every prompt the generated token ids (the stop token included) and their log-probs.
    """
    rows = [torch.tensor(prompt) for prompt in prompts]
    masks = [torch.ones_like(row) for row in rows]
    input_ids = pad_sequence(rows, batch_first=True, padding_side="left")
    attention_mask = pad_sequence(masks, batch_first=True, padding_side="left")

    processors = LogitsProcessorList()
    draws = None
    if config.do_sample:
        if config.temperature != 1.0:
            processors.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p < 1.0:
            processors.append(TopPLogitsWarper(config.top_p))
        streams = [np.random.default_rng(seed) for seed in seeds]
        draws = torch.from_numpy(np.stack([stream.random(config.max_new_tokens, np.float32) for stream in streams]))
    choice = TokenChoice(draws)
    processors.append(choice)

    # Greedy: one token is left to choose.
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    sequences = model.generate(
        input_ids, attention_mask=attention_mask, generation_config=greedy, logits_processor=processors
    )
    token_ids = sequences[:, input_ids.shape[1] :]
    log_probs = torch.cat(choice.log_probs, dim=-1)
    lengths = get_response_mask(token_ids, config.eos_token_id or [-1]).sum(-1)
    completions = []
    for row, length in enumerate(lengths.tolist()):
        completions.append((token_ids[row, :length].tolist(), log_probs[row, :length].tolist()))
    return completions


def load_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy `weights` into `model`; every parameter must get a value, by its own name or its tied partner's.

    Raises:
        ValueError: a parameter is missing, or a weight has no place in the model.
        RuntimeError: a shape differs (from torch).
    """
    absent, unknown = model.load_state_dict(weights, strict=False)
    # A parameter that shares its memory with one that was given is the other half of a tied pair.
    parameters = model.state_dict()
    given = {parameters[name].data_ptr() for name in weights if name in parameters}
    missing = [name for name in absent if parameters[name].data_ptr() not in given]
    if missing or unknown:
        raise ValueError(
            f"weight sync: {len(missing)} weights missing {missing[:5]}, {len(unknown)} unknown {unknown[:5]}. "
            "The actor and the rollout must hold the same model: check actor_rollout_ref.model."
        )


class HFServer:
    """Serves one replica as a Ray actor: it batches requests of equal sampling and takes new weights in between."""

    def __init__(self, config: RolloutConfig, model_config: Any, replica_rank: int) -> None:
        self.config = config
        self.model_config = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig)
        hf_config = self.model_config.hf_config
        self.model = AutoModelForCausalLM.from_config(
            hf_config, dtype=PrecisionType.to_dtype(config.dtype), trust_remote_code=self.model_config.trust_remote_code
        ).eval()
        self.model.generation_config = GenerationConfig()  # else generate fills in the model's own eos
        sources = (self.model_config.tokenizer, self.model_config.generation_config, hf_config)
        self.eos_token_ids = frozenset(eos_ids(*sources))
        self.max_model_len = config.max_model_len or get_max_position_embeddings(hf_config)
        self.replica_rank = replica_rank
        self.global_steps: int | None = None
        # How often a prompt was completed in one way of sampling since the weights changed.
        self._completed: Counter[tuple[GenerationConfig, tuple[int, ...]]] = Counter()
        self._synced = False
        self._waiting: dict[GenerationConfig, list[tuple[list[int], asyncio.Future]]] = defaultdict(list)
        self._serving: asyncio.Task | None = None
        self._model_lock = asyncio.Lock()  # generating and loading weights exclude each other

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **inputs: Any
    ) -> TokenOutput:
        """Generate one completion. `inputs` are the other modalities verl may pass; only None is accepted.

        Raises:
            ValueError: an input or a sampling parameter this server does not have, or a prompt without room.
        """
        given = sorted(name for name, value in inputs.items() if value is not None)
        if given:
            raise ValueError(
                f"rollout.name=hf generates from text only, got {given}; use actor_rollout_ref.rollout.name=vllm"
            )
        if not self._synced:
            raise RuntimeError("rollout.name=hf was asked to generate before the trainer sent its weights")
        way_of_sampling, wants_log_probs = self._parse(len(prompt_ids), dict(sampling_params))
        future = asyncio.get_running_loop().create_future()
        self._waiting[way_of_sampling].append((prompt_ids, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        token_ids, log_probs, global_steps = await future
        return TokenOutput(
            token_ids=token_ids,
            log_probs=log_probs if wants_log_probs else None,
            stop_reason="completed",
            extra_fields={"global_steps": global_steps},
        )

    def _parse(self, prompt_length: int, params: dict[str, Any]) -> tuple[GenerationConfig, bool]:
        """Return what verl's (vLLM's) sampling parameters ask for, and whether they ask for log-probs."""
        config = self.config
        room = self.max_model_len - prompt_length
        if room < 1:
            raise ValueError(
                f"a prompt of {prompt_length} tokens leaves no room within {self.max_model_len}; "
                "lower data.max_prompt_length or raise actor_rollout_ref.rollout.max_model_len"
            )
        default = min(config.response_length, config.prompt_length + config.response_length - prompt_length)
        max_tokens = params.pop("max_tokens", params.pop("max_new_tokens", default))
        stop_token_ids = frozenset(params.pop("stop_token_ids", None) or ())
        if not params.pop("ignore_eos", config.ignore_eos):
            stop_token_ids |= self.eos_token_ids
        wants_log_probs = params.pop("logprobs", None) not in (None, False)
        given = {name: params.pop(name) for name in ("temperature", "top_p", "top_k") if name in params}
        if params.get("repetition_penalty") == 1.0:
            del params["repetition_penalty"]
        if params:
            raise ValueError(f"rollout.name=hf does not know the sampling parameters {params}; leave them out")
        return sampling(min(max_tokens, room), stop_token_ids, **given), wants_log_probs

    async def _serve(self) -> None:
        """Complete the requests that wait, batch by batch, until none does."""
        while self._waiting:
            way_of_sampling, waiting = next(iter(self._waiting.items()))
            # Until a quiet period adds none.
            arrived = 0
            while arrived < len(waiting) < self.config.max_num_seqs:
                arrived = len(waiting)
                await asyncio.sleep(QUIET_PERIOD)
            batch = waiting[: self.config.max_num_seqs]
            del waiting[: len(batch)]
            if not waiting:
                del self._waiting[way_of_sampling]
            try:
                async with self._model_lock:
                    global_steps = self.global_steps
                    prompts = [prompt_ids for prompt_ids, _ in batch]
                    seeds = [self._next_seed(way_of_sampling, prompt_ids) for prompt_ids in prompts]
                    # In a thread, so that requests arriving meanwhile are queued for the next batch.
                    completions = await asyncio.to_thread(generate, self.model, prompts, way_of_sampling, seeds)
            except Exception as error:
                for _, future in batch:
                    if not future.cancelled():
                        future.set_exception(error)
                continue
            for (_, future), completion in zip(batch, completions, strict=True):
                if not future.cancelled():
                    future.set_result((*completion, global_steps))

    def _next_seed(self, way_of_sampling: GenerationConfig, prompt_ids: list[int]) -> list[int]:
        """Return the numbers by which the next completion of a prompt is drawn, and count it."""
        request = (way_of_sampling, tuple(prompt_ids))
        occurrence = self._completed[request]
        self._completed[request] += 1
        return [self.config.get("seed", 0), self.replica_rank, self.global_steps or 0, occurrence, *prompt_ids]

    async def update_weights(self, weights: dict[str, torch.Tensor], global_steps: int | None) -> None:
        """Replace all weights, after the batch that is being generated."""
        async with self._model_lock:
            await asyncio.to_thread(load_weights, self.model, weights)
            self._synced = True
            if global_steps is not None and global_steps != self.global_steps:
                self.global_steps = global_steps
                self._completed.clear()

    async def _nothing_to_do(self, **kwargs: Any) -> None:
        """Do nothing: no memory is handed back, no cache outlives a batch, which ends on the weights it began with."""

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing_to_do
    abort_all_requests = resume_generation = _nothing_to_do


class HFServerAdapter(BaseRollout):
    """Sends the training worker's weights to its replica's server."""

    def __init__(
        self, config: RolloutConfig, model_config: HFModelConfig, device_mesh: Any, replica_rank: int | None = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        # Beside the trainer a worker's rank is its replica's: HFReplica checks that a replica is one worker.
        self.replica_rank = int(os.environ["RANK"]) if replica_rank is None else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Do nothing, since nothing was released."""

    async def release(self) -> None:
        """Do nothing: the server keeps its weights, and a KV cache lives only as long as its batch."""

    @torch.no_grad()
    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",  # the only one of verl's naive engine
        global_steps: int | None = None,
        peft_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Send the actor's weights, all in one message.

        Raises:
            ValueError: LoRA adapters come unmerged.
        """
        if peft_config is not None:
            raise ValueError("rollout.name=hf takes merged LoRA weights: set actor_rollout_ref.model.lora.merge=True")
        # Every rank must draw every weight: gathering one is a collective. And copy it at once: merged LoRA weights
        # are the live parameters, unmerged when the iterator ends.
        named = {name: weight.detach().to("cpu", copy=True) async for name, weight in ensure_async_iterator(weights)}
        await ray.get_actor(_server_name(self.replica_rank)).update_weights.remote(named, global_steps)


class HFReplica(RolloutReplica):
    """Launches one server per training worker."""

    async def launch_servers(self) -> None:
        self._check_config()
        server: Any = (
            ray.remote(HFServer)
            .options(name=_server_name(self.replica_rank), max_concurrency=self.max_concurrency)
            .remote(self.config, self.model_config, self.replica_rank)
        )
        await server.__ray_ready__.remote()  # once the model is built; raises the constructor's error
        self.servers = [server]
        self._server_handle = server
        self._server_address = _server_name(self.replica_rank)

    def _check_config(self) -> None:
        """Refuse what a user may ask of a rollout and this one cannot do, with a ValueError."""
        only_supported = {
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "full_determinism": False,
            "logprobs_mode": "processed_logprobs",
            "quantization": None,
            "repetition_penalty": 1.0,
            "enable_rollout_routing_replay": False,
        }
        for key, supported in only_supported.items():
            value = self.config.get(key, supported)
            if value != supported:
                raise ValueError(
                    f"actor_rollout_ref.rollout.{key} must be {supported} with rollout.name=hf, got {value}"
                )


def _server_name(replica_rank: int) -> str:
    return f"hf_server_{replica_rank}"
