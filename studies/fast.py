"""The study's step of reinforcement learning in plain PyTorch: one core does in half a minute what takes verl minutes.

What verl decides is verl's here: GRPO's advantage, the policy loss, its aggregation, the KL term and the optimizer are
its functions, set by its config (`recipes/config/gtpo_cpu.yaml` with a method's overrides); GTPO's advantage is this
package's; tasks, warm starts and rewards are those of the runs under verl. Written anew is the forward pass of the tiny
Qwen2, so that runs of several methods can sample together, each from its own weights and with its own random numbers.
`tests/e2e/test_fast_study_on_cpu.py` compares the step with that of verl's trainer.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedTokenizerFast
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, get_policy_loss_fn, kl_penalty
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_response_mask
from verl.workers.config import build_optimizer

from gtpo_verl.advantage import compute_gtpo_token_advantages
from gtpo_verl.config import LN2, GTPOConfig
from gtpo_verl.cpu.tiny import Question, encode_prompt, max_response_length
from gtpo_verl.loss import compute_policy_loss_gtpo
from gtpo_verl.paper.reward import extract_answer
from gtpo_verl.verl_plugin.config import VerlGTPOConfig
from studies import reward as rewards
from studies.plan import ROOT

Weights = Mapping[str, torch.Tensor]
"""The parameters of `tiny.build_model` by their names, of several runs: (runs, …)."""
LAYERS, HEADS, HEAD_DIM = 2, 4, 32


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


class Fused(NamedTuple):
    """The weights as the forward pass multiplies by them."""

    embeddings: torch.Tensor
    layers: list[tuple[torch.Tensor, ...]]
    norm: torch.Tensor
    head: torch.Tensor


def fuse(weights: Weights) -> Fused:
    """Few large products in place of many small ones; autograd passes through."""

    def turned(matrices: torch.Tensor) -> torch.Tensor:
        return matrices.mT if torch.is_grad_enabled() else matrices.mT.contiguous()  # faster with few rows

    def layer(name: str) -> tuple[torch.Tensor, ...]:
        def joined(kind: str, *names: str) -> torch.Tensor:
            return torch.cat([weights[f"{name}.{part}_proj.{kind}"] for part in names], 1)

        attention = [f"self_attn.{part}" for part in "qkv"]
        return (
            weights[f"{name}.input_layernorm.weight"].unsqueeze(1),
            turned(joined("weight", *attention)),
            joined("bias", *attention).unsqueeze(1),
            turned(weights[f"{name}.self_attn.o_proj.weight"]),
            weights[f"{name}.post_attention_layernorm.weight"].unsqueeze(1),
            turned(joined("weight", "mlp.gate", "mlp.up")),
            turned(weights[f"{name}.mlp.down_proj.weight"]),
        )

    norm, head = weights["model.norm.weight"].unsqueeze(1), turned(weights["lm_head.weight"])
    layers = [layer(f"model.layers.{i}") for i in range(LAYERS)]
    return Fused(weights["model.embed_tokens.weight"], layers, norm, head)


def forward(fused: Fused, ids: torch.Tensor, cache: torch.Tensor | None = None, start: int = 0) -> torch.Tensor:
    """Logits (runs, rows, length, vocabulary) for ids (runs, rows, length), each run under its own weights.

    With a `cache`, (layers, 2, runs * rows, heads, positions, head_dim), keys and values are kept there, and the ids
    stand from `start` on.
    """
    runs, rows, length = ids.shape
    cos, sin = _rotation(256)[:, start : start + length]
    x = fused.embeddings[torch.arange(runs).view(-1, 1), ids.reshape(runs, -1)]
    for layer, (norm, qkv, bias, out, mlp_norm, gate_up, down) in enumerate(fused.layers):
        h = torch.baddbmm(bias, _normed(x, norm), qkv)
        h = h.view(runs * rows, length, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        qk = h[:2] * cos + h[:2].roll(HEAD_DIM // 2, -1) * sin
        k, v = qk[1], h[2]
        if cache is not None:
            cache[layer, 0, :, :, start : start + length] = k
            cache[layer, 1, :, :, start : start + length] = v
            k, v = cache[layer, :, :, :, : start + length]
        h = F.scaled_dot_product_attention(qk[0], k, v, is_causal=length > 1)
        x = torch.baddbmm(x, h.transpose(1, 2).reshape(x.shape), out)
        gate, up = torch.bmm(_normed(x, mlp_norm), gate_up).chunk(2, -1)
        x = torch.baddbmm(x, F.silu(gate) * up, down)
    return torch.bmm(_normed(x, fused.norm), fused.head).view(runs, rows, length, -1)


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


@functools.cache
def _rotation(positions: int) -> torch.Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(positions).unsqueeze(-1) * frequencies.repeat(2)
    sign = torch.ones(HEAD_DIM)
    sign[: HEAD_DIM // 2] = -1
    return torch.stack([angles.cos(), angles.sin() * sign])


@torch.no_grad()
def sample(
    weights: Weights,
    prompt: torch.Tensor,
    n: int,
    limit: int,
    temperature: float,
    eos: int,
    generators: Sequence[torch.Generator],
) -> list[Rollout]:
    """n completions of a prompt from each run, of at most `limit` tokens, drawn from the whole distribution.

    A run draws from its own generator, so its completions do not depend on the runs beside it.
    """
    runs, start = len(generators), len(prompt)
    fused = fuse(weights)
    prefix = torch.empty(LAYERS, 2, runs, HEADS, start, HEAD_DIM)
    logits = forward(fused, prompt.expand(runs, 1, -1), prefix)[:, :, -1].repeat(1, n, 1)
    cache = torch.empty(LAYERS, 2, runs * n, HEADS, start + limit, HEAD_DIM)
    cache[..., :start, :] = prefix.repeat_interleave(n, 2)
    responses = torch.full((runs, n, limit), eos)
    active, ended = torch.arange(runs), torch.zeros(runs, n, dtype=torch.bool)
    for i in range(limit):
        noise = [torch.empty(logits.shape[1:]).exponential_(generator=generators[run]) for run in active.tolist()]
        # The largest of p / Exp(1) is a draw from p.
        tokens = ((logits / temperature).softmax(-1) / torch.stack(noise)).argmax(-1)
        responses[active, :, i] = tokens
        ended |= tokens == eos
        going_on = ~ended.all(-1)
        if not going_on.any() or i + 1 == limit:
            break
        if going_on.sum() <= 0.8 * len(active):  # the runs that have ended cost nothing further
            active, ended, tokens = active[going_on], ended[going_on], tokens[going_on]
            cache = cache[:, :, going_on.repeat_interleave(n)]
            fused = fuse({name: values[active] for name, values in weights.items()})
        logits = forward(fused, tokens.unsqueeze(-1), cache, start + i)[:, :, -1]
    masks = get_response_mask(responses.view(-1, limit), eos).view(responses.shape)
    responses.masked_fill_(masks == 0, eos)  # what a completion that has ended was given beside the others
    lengths = masks.sum(-1).amax(-1).tolist()
    return [Rollout(prompt, r[:, :k], m[:, :k]) for r, m, k in zip(responses, masks, lengths, strict=True)]


# In one kernel AdamW takes a fifth of the time. Every start lies below ln 2, where `auto` is `always`.
_FAST = (
    "+actor_rollout_ref.actor.optim.override_optimizer_config.fused=true",
    "algorithm.gtpo.completion_filter=always",
    "reward.custom_reward_function.name=paper",
)


@functools.cache
def _base_config() -> DictConfig:
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        config = compose("gtpo_cpu", overrides=["task_dir=none", *_FAST])
    OmegaConf.resolve(config)
    return OmegaConf.create({key: config[key] for key in ("algorithm", "reward", "actor_rollout_ref")})


def build_config(overrides: Sequence[str]) -> DictConfig:
    """verl's config of a run, from overrides as one gives them to verl."""
    config = copy.deepcopy(_base_config())
    config.merge_with_dotlist([override.lstrip("+") for override in overrides])
    return config


class Learner:
    """What a run changes: its weights, its optimizer and its random numbers."""

    def __init__(self, weights: Weights, config: DictConfig, control: str | None = None, seed: int = 0):
        """`weights`, (1, …) each, are changed in place; `control` is one of `CONTROLS`."""
        self.config, self.control = config, control
        self.actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.weights = {name: values.detach().requires_grad_() for name, values in weights.items()}
        self.reference = {name: values.clone() for name, values in weights.items()} if self.actor.use_kl_loss else None
        self.optimizer = build_optimizer(list(self.weights.values()), self.actor.optim)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, self.actor.optim.lr_warmup_steps)
        self.generator = torch.Generator().manual_seed(seed)

    def log_distribution(self, weights: Weights, rollout: Rollout) -> torch.Tensor:
        """log π, (n, response_length, vocabulary), at the tokens of the completions."""
        ids = torch.cat([rollout.prompt.expand(len(rollout.responses), -1), rollout.responses], -1)
        logits = forward(fuse(weights), ids[:, :-1].unsqueeze(0))[0, :, len(rollout.prompt) - 1 :]
        return (logits / self.config.actor_rollout_ref.rollout.temperature).log_softmax(-1)

    def step(self, rollout: Rollout, scores: Sequence[float]) -> dict[str, Any]:
        """One update, as verl's trainer makes it; what there is to log about it."""
        actor, mask = self.actor, rollout.response_mask
        distribution = self.log_distribution(self.weights, rollout)
        log_prob = distribution.gather(-1, rollout.responses.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        rewards_ = torch.zeros(mask.shape)
        rewards_[:, 0] = torch.tensor(scores, dtype=torch.float32)
        index = np.zeros(len(mask), dtype=int)
        group_advantages, _ = compute_grpo_outcome_advantage(rewards_, mask, index)
        advantages, logged = group_advantages, {}
        if self.config.algorithm.adv_estimator == "gtpo":
            settings = VerlGTPOConfig.from_config(self.config.algorithm)
            result = compute_gtpo_token_advantages(
                group_advantages[:, 0], index, rollout.responses, mask, entropy, settings
            )
            advantages = result.advantages
            logged["dropped"] = (~result.keep).float().mean().item()
            logged["conflict"] = result.conflicts.conflict_len.sum().item() / mask.sum().item()
        if self.control:
            advantages = CONTROLS[self.control](advantages, rollout, self.generator)

        policy_loss = (
            compute_policy_loss_gtpo if actor.policy_loss.loss_mode == "gtpo" else get_policy_loss_fn("vanilla")
        )
        loss, _ = policy_loss(
            old_log_prob=log_prob.detach(),
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        if self.reference:
            with torch.no_grad():
                reference = self.log_distribution(self.reference, rollout)
            ref_log_prob = reference.gather(-1, rollout.responses.unsqueeze(-1)).squeeze(-1)
            kl = kl_penalty(log_prob, ref_log_prob, actor.kl_loss_type)  # type: ignore[arg-type]
            loss = loss + actor.kl_loss_coef * agg_loss(kl, mask, actor.loss_agg_mode)
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), actor.optim.clip_grad)
        if norm.isfinite():
            self.optimizer.step()
        self.scheduler.step()
        means = (entropy * mask).sum(-1) / mask.sum(-1)
        return logged | {
            "entropy": means.mean().item(),
            "above_ln2": (means > LN2).float().mean().item(),
            "grad_norm": norm.item(),
            **shared_weight(rollout, group_advantages[:, 0], actor.loss_agg_mode),
        }


def shared_weight(rollout: Rollout, advantages: torch.Tensor, loss_agg_mode: str) -> dict[str, float]:
    """Σ A_i w_i of the loss at tokens that the whole group shares, and how many it shares at the start and the end.

    w_i is a token's weight in the loss: 1/(n L_i) for `seq-mean-token-mean`, 1/ΣL for `token-mean`, where Σ A_i = 0
    leaves nothing of the update of a token that all completions have in the same place.
    """
    lengths = rollout.response_mask.sum(-1)
    weight = 1 / (len(lengths) * lengths) if loss_agg_mode == "seq-mean-token-mean" else 1 / lengths.sum()
    rows = [row[:length] for row, length in zip(rollout.responses, lengths.tolist(), strict=True)]
    shortest = int(lengths.min())
    shared = {
        "shared_first": torch.stack([row[:shortest] for row in rows]),
        "shared_last": torch.stack([row.flip(0)[:shortest] for row in rows]),
    }
    counts = {name: int((ids == ids[0]).all(0).cumprod(0).sum()) for name, ids in shared.items()}
    return {"net_weight": (advantages * weight).sum().item(), **counts}


def drop_negative(advantages: torch.Tensor, rollout: Rollout, generator: torch.Generator) -> torch.Tensor:
    """Only completions above the mean of their group train."""
    return advantages.clamp(min=0)


def skip_at_random(advantages: torch.Tensor, rollout: Rollout, generator: torch.Generator) -> torch.Tensor:
    """As many negative updates left out as both masks of GTPO leave out, at random tokens of the same completions."""
    settings = GTPOConfig(entropy_coeff=0, completion_filter="never")
    index, zero = [0] * len(advantages), torch.zeros_like(advantages)
    masked = compute_gtpo_token_advantages(
        advantages[:, 0], index, rollout.responses, rollout.response_mask, zero, settings
    ).advantages
    result = advantages.clone()
    for row in range(len(advantages)):
        if advantages[row, 0] < 0:
            length = int(rollout.response_mask[row].sum())
            number = int((masked[row, :length] == 0).sum())
            result[row, torch.randperm(length, generator=generator)[:number]] = 0
    return result


CONTROLS: dict[str, Callable[[torch.Tensor, Rollout, torch.Generator], torch.Tensor]] = {
    "drop_negative": drop_negative,
    "skip_at_random": skip_at_random,
}


def read_scores(rollout: Rollout, question: Question, tokenizer: PreTrainedTokenizerFast, reward: str) -> list[dict]:
    """What the reward function named `reward` says of each completion, its answer, and whether it ended strictly."""
    texts = tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)
    ends = (rollout.responses == tokenizer.eos_token_id).any(-1).tolist()
    results = []
    for text, end in zip(texts, ends, strict=True):
        parts = getattr(rewards, reward)("", text, question.answer)
        results.append({**parts, "strict": parts["strict"] * end, "eos": float(end), "answer": extract_answer(text)})
    return results


def train(
    learners: Sequence[Learner],
    weights: Weights,
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    steps: int,
) -> list[dict[str, list[float]]]:
    """Train runs that share task, questions, group size and temperature; a list of numbers per metric and run.

    `weights` are (runs, …), and the learners' parameters are views of them.
    """
    rollout = learners[0].config.actor_rollout_ref.rollout
    logs: list[dict[str, list[float]]] = [{} for _ in learners]
    for step in range(steps):
        question = questions[step % len(questions)]
        prompt = torch.tensor(encode_prompt(tokenizer, question.text))
        generators = [learner.generator for learner in learners]
        limit, eos = max_response_length(task), tokenizer.eos_token_id
        rollouts = sample(weights, prompt, rollout.n, limit, rollout.temperature, eos, generators)
        for learner, own, log in zip(learners, rollouts, logs, strict=True):
            scored = read_scores(own, question, tokenizer, learner.config.reward.custom_reward_function.name)
            means = {key: float(np.mean([s[key] for s in scored])) for key in ("acc", "format", "strict", "eos")}
            record = {
                **means,
                "length": own.response_mask.sum(-1).float().mean().item(),
                "answers": len({s["answer"] for s in scored}),
                **learner.step(own, [s["score"] for s in scored]),
            }
            for key, value in record.items():
                log.setdefault(key, []).append(value)
    return logs


def hold_out(
    learners: Sequence[Learner],
    weights: Weights,
    questions: Sequence[Question],
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    samples: int = 64,
) -> list[dict[str, list[int]]]:
    """For each run and each of its held-out questions: how many of `samples` completions are right, how many strict,
    and how many different answers and texts there are among them."""
    temperature = learners[0].config.actor_rollout_ref.rollout.temperature
    results: list[dict[str, list[int]]] = [
        {key: [] for key in ("right", "strict", "answers", "texts")} for _ in learners
    ]
    generators = [torch.Generator().manual_seed(0) for _ in learners]
    limit, eos = max_response_length(task), tokenizer.eos_token_id
    for question in questions:
        prompt = torch.tensor(encode_prompt(tokenizer, question.text))
        for own, result in zip(
            sample(weights, prompt, samples, limit, temperature, eos, generators), results, strict=True
        ):
            scored = read_scores(own, question, tokenizer, "paper")
            result["right"].append(int(sum(s["acc"] for s in scored)))
            result["strict"].append(int(sum(s["strict"] for s in scored)))
            result["answers"].append(len({s["answer"] for s in scored}))
            result["texts"].append(len({tuple(row) for row in own.responses.tolist()}))
    return results
