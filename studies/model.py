"""The forward pass of the study's models, and sampling from several runs at once: a tiny Qwen2 and SmolLM2, a Llama.

Both are the same blocks: rotary attention, whose key heads may be fewer, and a gated MLP. Written anew so that runs of
several methods sample together, each from its own weights, so that the completions of a prompt share its keys and
values, and so that what has ended costs nothing. `tests/studies/test_fast_on_cpu.py` compares it with transformers.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from verl.utils.torch_functional import get_response_mask

Weights = Mapping[str, torch.Tensor]
"""The parameters of a model by their names, of several runs: (runs, …)."""
POSITIONS = 1024
"""Most tokens of a prompt and its completion."""


class Rollout(NamedTuple):
    """The completions of one prompt.

    Args:
        prompt (torch.Tensor): (prompt_length,) int64 token ids.
        responses (torch.Tensor): (n, response_length) int64 token ids, padded after the end.
        response_mask (torch.Tensor): (n, response_length), 1 up to and with the end.
    """

    prompt: torch.Tensor
    responses: torch.Tensor
    response_mask: torch.Tensor


class Shape(NamedTuple):
    """What the names of the parameters do not tell about a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """From the configuration that transformers has of a Qwen2 or a Llama."""
        return cls(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.hidden_size // config.num_attention_heads,
            config.rms_norm_eps,
            config.rope_parameters["rope_theta"],
        )


class Fused(NamedTuple):
    """The weights as the forward pass multiplies by them."""

    shape: Shape
    embeddings: torch.Tensor
    layers: list[tuple[torch.Tensor, ...]]
    norm: torch.Tensor
    head: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Fused":
        """The same, with each tensor changed."""
        layers = [tuple(map(change, layer)) for layer in self.layers]
        return Fused(self.shape, change(self.embeddings), layers, change(self.norm), change(self.head))

    def select(self, runs: torch.Tensor) -> "Fused":
        """Those of some runs; what all share has no dimension."""
        return self.map(lambda own: own[runs] if own.ndim else own)

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.embeddings, *itertools.chain(*self.layers), self.norm, self.head]


def load(folder: str | Path, device: str = "cpu") -> tuple[Shape, dict[str, torch.Tensor]]:
    """A model in Hugging Face format, as one run: (1, …) float32 parameters."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return Shape.of(model.config), {name: values.detach().unsqueeze(0) for name, values in model.named_parameters()}


def fuse(shape: Shape, weights: Weights, dtype: torch.dtype = torch.float32) -> Fused:
    """Few large products in place of many small ones, computed in `dtype`; autograd passes through."""

    def turned(matrices: torch.Tensor) -> torch.Tensor:
        matrices = matrices.to(dtype).to(product_dtype(dtype, matrices.device.type)).mT
        return matrices if torch.is_grad_enabled() else matrices.contiguous()  # faster with few rows

    def layer(name: str) -> tuple[torch.Tensor, ...]:
        def joined(kind: str, *names: str) -> torch.Tensor:
            return torch.cat([weights[f"{name}.{part}_proj.{kind}"] for part in names], 1)

        attention = [f"self_attn.{part}" for part in "qkv"]
        has_bias = f"{name}.self_attn.q_proj.bias" in weights
        return (
            weights[f"{name}.input_layernorm.weight"].to(dtype).unsqueeze(1),
            turned(joined("weight", *attention)),
            joined("bias", *attention).to(dtype).unsqueeze(1) if has_bias else torch.zeros((), dtype=dtype),
            turned(weights[f"{name}.self_attn.o_proj.weight"]),
            weights[f"{name}.post_attention_layernorm.weight"].to(dtype).unsqueeze(1),
            turned(joined("weight", "mlp.gate", "mlp.up")),
            turned(weights[f"{name}.mlp.down_proj.weight"]),
        )

    embeddings = weights["model.embed_tokens.weight"]
    head = turned(weights.get("lm_head.weight", embeddings))
    layers = [layer(f"model.layers.{i}") for i in range(shape.layers)]
    return Fused(shape, embeddings.to(dtype), layers, weights["model.norm.weight"].to(dtype).unsqueeze(1), head)


class Cache:
    """Keys and values of the tokens so far, for each layer (2, runs * rows, kv_heads, positions, head_dim)."""

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}

    def extend(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """With these behind what there is."""
        before = self.layers.get(layer)
        self.layers[layer] = kv if before is None else torch.cat([before, kv], -2)
        return self.layers[layer]


class Room(Cache):
    """A cache with room for `limit` more tokens, which are written in place."""

    def __init__(self, prefix: Cache, limit: int):
        super().__init__()
        self.layers = {i: F.pad(kv, (0, 0, 0, limit)) for i, kv in prefix.layers.items()}
        self.lengths = {i: kv.shape[-2] for i, kv in prefix.layers.items()}

    def extend(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        start = self.lengths[layer]
        self.lengths[layer] = end = start + kv.shape[-2]
        self.layers[layer][..., start:end, :] = kv
        return self.layers[layer][..., :end, :]


class Slots(Cache):
    """A cache of a fixed size, written in place where a tensor, (1,), says."""

    def __init__(self, layers: Mapping[int, torch.Tensor], position: torch.Tensor):
        super().__init__()
        self.layers, self.position = dict(layers), position

    def extend(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        return self.layers[layer].index_copy_(-2, self.position, kv)


def hidden(
    fused: Fused,
    ids: torch.Tensor,
    cache: Cache | None = None,
    start: int | torch.Tensor = 0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last layer's states, (runs, rows, length, width), for ids (runs, rows, length), each run under its weights.

    Args:
        fused: the weights.
        ids: token ids, of which the first stands at position `start`.
        cache: keys and values of what precedes the ids, and from now on theirs.
        start: an int or, of one id, a tensor, (1,). Rotary attention knows differences of positions alone: padding on
            the left changes nothing.
        mask: broadcasts to (runs * rows, 1, length, positions), added before the softmax; None: causal.
    """
    runs, rows, length = ids.shape
    shape, table = fused.shape, fused.embeddings
    if mask is None:
        mask = _causal(length).to(table.device)
    rotation = _rotation(shape.head_dim, shape.theta, table.dtype, table.device)
    places = start if isinstance(start, torch.Tensor) else slice(start, start + length)
    cos, sin = (part[places] for part in rotation)
    x = table[torch.arange(runs, device=table.device).view(-1, 1), ids.reshape(runs, -1)]
    for i, (norm, qkv, bias, out, mlp_norm, gate_up, down) in enumerate(fused.layers):
        h = product(_normed(x, norm, shape.eps), qkv) + bias
        h = h.view(runs * rows, length, -1, shape.head_dim).transpose(1, 2)
        qk, v = h[:, : -shape.kv_heads], h[:, -shape.kv_heads :]
        qk = qk * cos + qk.roll(shape.head_dim // 2, -1) * sin
        q, kv = qk[:, : shape.heads], torch.stack([qk[:, shape.heads :], v])
        k, v = cache.extend(i, kv) if cache else kv
        h = _attend(q, k, v, mask)
        x = x + product(h.transpose(1, 2).reshape(runs, rows * length, -1), out)
        gate, up = product(_normed(x, mlp_norm, shape.eps), gate_up).chunk(2, -1)
        x = x + product(F.silu(gate) * up, down)
    return _normed(x, fused.norm, shape.eps).view(runs, rows, length, -1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of (rows, heads, length, dim) to fewer heads of keys: the queries that share one are queries of it."""
    rows, heads, length, dim = q.shape
    q = q.reshape(rows, k.shape[1], -1, dim)
    if length == 1 or _on_gpu(q):
        wide = product_dtype(q.dtype, q.device.type)
        mask = mask.to(wide) if length == 1 else mask.to(wide).repeat(1, 1, heads // k.shape[1], 1)
        h = F.scaled_dot_product_attention(q.to(wide), k.to(wide), v.to(wide), mask)
        return h.to(q.dtype).reshape(rows, heads, length, dim)
    # On a CPU several times faster than torch's backward.
    scores = product(q, k.mT).view(rows, heads, length, -1).float() * dim**-0.5
    weights = (scores + mask).softmax(-1).to(q.dtype)
    return product(weights.view(rows, k.shape[1], -1, k.shape[2]), v).view(rows, heads, length, dim)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def product_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """In which products of `dtype` are computed: float32 for bfloat16 on a CPU without instructions for it, where they
    take fifty times as long."""
    emulated = dtype == torch.bfloat16 and device == "cpu" and not torch.cpu._is_avx512_bf16_supported()
    return torch.float32 if emulated else dtype


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of values in x's dtype, summed in float32, and rounded to it once, forward and backward."""
    wide = product_dtype(x.dtype, x.device.type)
    return (x.to(wide) @ y.to(wide)).to(x.dtype)


def _causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight


@functools.cache
def _rotation(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = theta ** (-torch.arange(0, dim, 2) / dim)
    angles = torch.arange(POSITIONS).unsqueeze(-1) * frequencies.repeat(2)
    sign = torch.ones(dim)
    sign[: dim // 2] = -1
    return angles.cos().to(device, dtype), (angles.sin() * sign).to(device, dtype)


def logits_of(fused: Fused, states: torch.Tensor) -> torch.Tensor:
    """(runs, …, vocabulary) float32, of states (runs, …, width)."""
    flat = product(states.reshape(len(states), -1, states.shape[-1]), fused.head)
    return flat.view(*states.shape[:-1], -1).float()


class Read(NamedTuple):
    """Prompts under each run's weights.

    Args:
        states (torch.Tensor): at their last tokens, (runs, prompts, width).
        cache: their keys and values, padded on the left.
        added (torch.Tensor): to attention, for that padding, (prompts, longest).
    """

    states: torch.Tensor
    cache: Cache
    added: torch.Tensor


def read_prompts(fused: Fused, prompts: Sequence[torch.Tensor]) -> Read:
    """Put the prompts through the model."""
    runs, longest, device = len(fused.embeddings), max(map(len, prompts)), fused.embeddings.device
    ids = pad_sequence([prompt.flip(0) for prompt in prompts], batch_first=True).flip(1)
    padding = torch.arange(longest) < longest - torch.tensor([len(prompt) for prompt in prompts]).unsqueeze(-1)
    added = torch.zeros(padding.shape, dtype=fused.embeddings.dtype).masked_fill(padding, -torch.inf)
    # A padding token sees itself: a row of -inf alone would be nan.
    own = torch.eye(longest, dtype=torch.bool)
    mask = torch.where(own, 0, added.unsqueeze(1) + _causal(longest)).unsqueeze(1).to(device).repeat(runs, 1, 1, 1)
    cache = Cache()
    states = hidden(fused, ids.to(device).expand(runs, -1, -1), cache, mask=mask)
    return Read(states[:, :, -1], cache, added.to(device))


def log_probs(
    shape: Shape,
    weights: Weights,
    rollouts: Sequence[Rollout],
    temperature: float,
    dtype: torch.dtype,
    rows_at_once: int = 64,
    trained: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log π of the completions' own tokens under one run's weights, and the entropy there, in nats, without gradient.

    Rows of similar length go through the model together, `rows_at_once` of them; with `trained`, (rows,) bool, the
    others without gradient.

    Returns:
        Two tensors (rows, response_length) on the CPU with the completions of all rollouts, 0 after their ends.
    """
    fused = fuse(shape, weights, dtype)
    device = fused.embeddings.device
    responses = pad_rows([rollout.responses for rollout in rollouts]).to(device)
    own = pad_rows([rollout.response_mask for rollout in rollouts]).bool().to(device)
    prompt_of = torch.arange(len(rollouts), device=device).repeat_interleave(len(responses) // len(rollouts))
    first, prefix, added = read_prompts(fused, [rollout.prompt for rollout in rollouts])
    log_prob, entropy = torch.zeros(own.shape, device=device), torch.zeros(own.shape, device=device)
    by_length = own.sum(-1).argsort()
    if trained is None:
        parts = [(torch.is_grad_enabled(), by_length)]
    else:
        parts = [(needed, by_length[trained.to(device)[by_length] == needed]) for needed in (False, True)]
    for needs_gradient, rows in [(needed, rows) for needed, part in parts for rows in part.split(rows_at_once)]:
        with torch.set_grad_enabled(needs_gradient):
            prompts, longest = prompt_of[rows], int(own[rows].sum(-1).max())
            ids, mine = responses[rows, :longest], own[rows, :longest]
            states = first[:, prompts].unsqueeze(2)
            if longest > 1:
                cache = Cache()
                cache.layers = {i: kv[:, prompts] for i, kv in prefix.layers.items()}
                before = added[prompts][:, None, None, :].expand(-1, -1, longest - 1, -1)
                causal = _causal(longest - 1).to(device, dtype)
                mask = torch.cat([before, causal.expand(len(rows), 1, -1, -1)], -1)
                behind = hidden(fused, ids[:, :-1].unsqueeze(0), cache, added.shape[1], mask)
                states = torch.cat([states, behind], 2)
            distribution = (logits_of(fused, states[:, mine]).squeeze(0) / temperature).log_softmax(-1)
            row, place = mine.nonzero(as_tuple=True)
            places = rows[row], place
            log_prob = log_prob.index_put(places, distribution.gather(-1, ids[mine].unsqueeze(-1)).squeeze(-1))
            entropy[places] = -(distribution.exp() * distribution).sum(-1).detach()
    return log_prob.cpu(), entropy.cpu()


class Decoder:
    """The logits of every completion's next token. On a GPU one CUDA graph computes them, since launching a small
    model's thousand kernels takes most of the time. Elsewhere they are computed kernel by kernel.

    Args:
        fused: weights of the shapes to come; `begin` gives those that count.
        rows: completions of each run.
        width: positions of a prompt and its completion.
    """

    def __init__(self, fused: Fused, rows: int, width: int):
        table, shape = fused.embeddings, fused.shape
        runs, dtype, device = len(table), table.dtype, table.device
        self.fused = fused.map(torch.clone)
        self.ids = torch.zeros(runs, rows, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.mask = torch.zeros(runs * rows, 1, 1, width, dtype=dtype, device=device)
        size = 2, runs * rows, shape.kv_heads, width, shape.head_dim
        kv = {i: torch.zeros(size, dtype=dtype, device=device) for i in range(shape.layers)}
        self.cache = Slots(kv, self.position)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._compute()  # libraries allocate at their first call, which is not allowed during the capture
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits = self._compute()

    def begin(self, fused: Fused, read: Read, n: int) -> None:
        """Take new weights and prompts, n completions of each."""
        for own, new in zip(self.fused.tensors(), fused.tensors(), strict=True):
            own.copy_(new)
        longest = read.added.shape[1]
        for i, kv in read.cache.layers.items():
            self.cache.layers[i].zero_()  # a mask hides what is left there, but for nan
            self.cache.layers[i][..., :longest, :] = kv.repeat_interleave(n, 1)
        self.mask.fill_(-torch.inf)
        self.mask[..., :longest] = read.added.repeat_interleave(n, 0).repeat(len(self.ids), 1)[:, None, None]
        self.position.fill_(longest)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """(runs, rows, vocabulary) behind these tokens, (runs, rows); the next call writes over them."""
        self.ids.copy_(tokens.unsqueeze(-1))
        if self.graph:
            self.graph.replay()
        else:
            self.logits = self._compute()
        return self.logits

    def _compute(self) -> torch.Tensor:
        self.mask.index_fill_(-1, self.position, 0)
        states = hidden(self.fused, self.ids, self.cache, self.position, self.mask)
        self.position += 1
        return logits_of(self.fused, states[:, :, -1])


_decoders: dict[tuple[object, ...], Decoder] = {}
"""The last one: its memory, and the time in which it was made, serve the next draws of its shape."""


def pad_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(rows, length) tensors of several lengths, one above the other, with 0 behind the shorter ones."""
    longest = max(tensor.shape[1] for tensor in tensors)
    return torch.cat([F.pad(tensor, (0, longest - tensor.shape[1])) for tensor in tensors])


@torch.no_grad()
def sample(
    shape: Shape,
    weights: Sequence[Weights],
    prompts: Sequence[torch.Tensor],
    n: int,
    limit: int,
    temperature: float,
    eos: int,
    generators: Sequence[torch.Generator],
    dtype: torch.dtype = torch.float32,
) -> list[list[Rollout]]:
    """n completions of each prompt from each run, of at most `limit` tokens, drawn from the whole distribution.

    A run draws from its own generator, so its completions do not depend on the runs beside it.

    Returns:
        For each run, a rollout for each prompt, on the CPU.
    """
    fused = fuse(shape, {name: torch.cat([own[name] for own in weights]) for name in weights[0]}, dtype)
    draw = _draw_on_gpu if _on_gpu(fused.head) else _draw
    responses = draw(fused, read_prompts(fused, prompts), n, limit, temperature, eos, generators)
    masks = get_response_mask(responses.flatten(0, 1), eos).view(len(weights), len(prompts), n, limit)
    responses, masks = responses.view(masks.shape).masked_fill(masks == 0, eos).cpu(), masks.cpu()
    results = []
    for of_run, own_masks in zip(responses, masks, strict=True):
        lengths = own_masks.sum(-1).amax(-1).tolist()
        groups = zip(prompts, of_run, own_masks, lengths, strict=True)
        results.append([Rollout(prompt, r[:, :k], m[:, :k]) for prompt, r, m, k in groups])
    return results


def _draw_on_gpu(
    fused: Fused,
    read: Read,
    n: int,
    limit: int,
    temperature: float,
    eos: int,
    generators: Sequence[torch.Generator],
) -> torch.Tensor:
    """Token ids, (runs, rows, limit), whatever behind an end: rows that have ended go on, so that no size changes."""
    logits = logits_of(fused, read.states).repeat_interleave(n, 1)
    runs, rows = logits.shape[:2]
    width = -(-(read.added.shape[1] + limit) // 64) * 64
    key = fused.shape, runs, rows, width, fused.head.dtype, fused.head.device
    if key not in _decoders:
        _decoders.clear()
        _decoders[key] = Decoder(fused, rows, width)
    decoder = _decoders[key]
    decoder.begin(fused, read, n)
    drawn = torch.stack([torch.rand(limit, rows, generator=own, dtype=torch.float64) for own in generators], 1)
    responses = torch.full((runs, rows, limit), eos, device=logits.device)
    ended = torch.zeros(runs, rows, dtype=torch.bool, device=logits.device)
    for i, at_random in enumerate(drawn.to(logits.device)):
        tokens = _pick(logits, at_random, temperature)
        responses[..., i] = tokens
        ended |= tokens == eos
        if i + 1 == limit or bool(ended.all()):
            break
        logits = decoder(tokens)
    return responses


def _pick(logits: torch.Tensor, at_random: torch.Tensor, temperature: float) -> torch.Tensor:
    """A token for each of (runs, rows), by numbers from 0 to 1."""
    cumulated = (logits.double() / temperature).softmax(-1).cumsum(-1)
    return torch.searchsorted(cumulated, at_random.unsqueeze(-1) * cumulated[..., -1:], right=True).squeeze(-1)


def _draw(
    fused: Fused,
    read: Read,
    n: int,
    limit: int,
    temperature: float,
    eos: int,
    generators: Sequence[torch.Generator],
) -> torch.Tensor:
    """Token ids, (runs, rows, limit), `eos` behind an end: what has ended costs nothing further."""
    logits = logits_of(fused, read.states).repeat_interleave(n, 1)
    (runs, rows), device, added = logits.shape[:2], logits.device, read.added
    read.cache.layers = {i: kv.repeat_interleave(n, 1) for i, kv in read.cache.layers.items()}
    cache, start = Room(read.cache, limit), added.shape[1]
    mask = F.pad(added.repeat_interleave(n, 0), (0, limit)).expand(runs, rows, -1)
    responses = torch.full((runs, rows, limit), eos, device=device)
    ended = torch.zeros(runs, rows, dtype=torch.bool, device=device)
    active, places = torch.arange(runs, device=device), torch.arange(rows, device=device).repeat(runs, 1)
    for i in range(limit):
        drawn = torch.zeros(len(active), rows, dtype=torch.float64)
        for k, numbers in zip(active, drawn, strict=True):
            if not ended[k].all():  # so that later draws do not depend on the runs beside it
                numbers.uniform_(generator=generators[k])
        tokens = _pick(logits, drawn.to(device).gather(1, places), temperature)
        responses[active.unsqueeze(-1), places, i] = tokens
        ended[active.unsqueeze(-1), places] |= tokens == eos
        left = (~ended[active]).sum(-1)
        most = int(left.max())
        if most == 0 or i + 1 == limit:
            break
        if int((left > 0).sum()) * most <= 0.8 * places.numel():
            going_on = left > 0
            kept = ended[active.unsqueeze(-1), places][going_on].int().argsort(dim=1, stable=True)[:, :most]
            chosen = (going_on.nonzero() * places.shape[1] + kept).flatten()
            cache.layers = {layer: kv[:, chosen] for layer, kv in cache.layers.items()}
            active, places, tokens, mask = (
                active[going_on],
                places[going_on].gather(1, kept),
                tokens[going_on].gather(1, kept),
                mask.flatten(0, 1)[chosen].view(len(kept), most, -1),
            )
            if len(kept) < len(going_on):
                fused = fused.select(going_on)
        end = start + i + 1
        states = hidden(fused, tokens.unsqueeze(-1), cache, start + i, mask.flatten(0, 1)[:, None, None, :end])
        logits = logits_of(fused, states[:, :, -1])
    return responses
