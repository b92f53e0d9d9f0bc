"""The study's step of reinforcement learning in plain PyTorch: one core does in a minute what takes verl many.

What verl decides is verl's here: GRPO's advantage, the policy loss, its aggregation, the KL term and the optimizer are
its functions, set by its config (`recipes/config/gtpo_cpu.yaml` with a method's overrides); GTPO's advantage is this
package's; tasks, warm starts and rewards are those of the runs under verl. `studies.model` has the forward pass.
`tests/e2e/test_fast_study_on_cpu.py` compares the step with that of verl's trainer.
"""

import copy
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.core_algos import agg_loss, compute_grpo_outcome_advantage, get_policy_loss_fn, kl_penalty
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.config import build_optimizer

from gtpo_verl.algorithm.advantage import compute_group_advantages, compute_gtpo_token_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.algorithm.config import LN2, GTPOConfig
from gtpo_verl.reward.score import TAGS, extract_answer
from gtpo_verl.verl_plugin.loss import compute_policy_loss_gtpo
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from studies import rewards, variants
from studies.model import Rollout, Shape, Weights, log_probs, pad_rows, sample
from studies.plan import ROOT
from studies.tasks import Asked, Task

CHECKPOINT_EVERY = 10
"""Steps; what a real model's run has made before an interruption is not made again."""
MASKS_ONLY = GTPOConfig(entropy_coeff=0, completion_filter="never")


# In one kernel AdamW takes a fifth of the time.
_FAST = (
    "+actor_rollout_ref.actor.optim.override_optimizer_config.fused=true",
    "reward.custom_reward_function.name=paper",
)


@functools.cache
def _base_config() -> DictConfig:
    with initialize_config_dir(str(ROOT / "recipes/config"), version_base=None):
        config = compose("gtpo_cpu", overrides=["task_dir=none", *_FAST])
    OmegaConf.resolve(config)
    return OmegaConf.create({key: config[key] for key in ("algorithm", "data", "reward", "actor_rollout_ref")})


def build_config(overrides: Sequence[str]) -> DictConfig:
    """verl's config of a run, from overrides as one gives them to verl."""
    config = copy.deepcopy(_base_config())
    config.merge_with_dotlist([override.lstrip("+") for override in overrides])
    return config


@dataclass(frozen=True)
class Batch:
    """What a step trains on, and what of it does not change within the step: (rows, response_length) each.

    Args:
        rollouts: of all prompts.
        responses (torch.Tensor): int64 token ids.
        response_mask (torch.Tensor): 1 on a completion's own tokens.
        old_log_prob (torch.Tensor): log π at the start of the step.
        entropy (torch.Tensor): in nats, at the start of the step.
        index (np.ndarray): (rows,), the number of a row's prompt.
        group_advantages (torch.Tensor): (rows,), A_i.
    """

    rollouts: Sequence[Rollout]
    responses: torch.Tensor
    response_mask: torch.Tensor
    old_log_prob: torch.Tensor
    entropy: torch.Tensor
    index: np.ndarray
    group_advantages: torch.Tensor


class Learner:
    """What a run changes: its weights, its optimizer and its random numbers."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        config: DictConfig,
        control: str | None = None,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        """`weights`, (1, …) each, are copied; `control` is of `CONTROLS` or `OUTCOMES`; products are in `dtype`."""
        self.shape, self.config, self.control, self.dtype = shape, config, control, dtype
        self.actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.settings = VerlGTPOConfig.from_config(config.algorithm)
        self.temperature = config.actor_rollout_ref.rollout.temperature
        self.weights = {name: values.detach().clone().requires_grad_() for name, values in weights.items()}
        self.reference = dict(weights) if self.actor.use_kl_loss else None
        self.optimizer = build_optimizer(list(self.weights.values()), self.actor.optim)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, self.actor.optim.lr_warmup_steps)
        self.generator = torch.Generator().manual_seed(seed)

    def state(self) -> dict[str, Any]:
        """What the next step depends on."""
        own = {"weights": self.weights, "generator": self.generator.get_state()}
        return own | {name: getattr(self, name).state_dict() for name in ("optimizer", "scheduler")}

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""
        for name, values in state["weights"].items():
            self.weights[name].copy_(values)
        self.generator.set_state(state["generator"])
        for name in ("optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])

    def log_probs(
        self, weights: Weights, rollouts: Sequence[Rollout], trained: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log π of the completions' tokens, and the entropy there; `trained`: rows with a gradient, all by default."""
        rows_at_once = 8 if self.dtype == torch.bfloat16 and weights["model.norm.weight"].is_cpu else 64
        return log_probs(self.shape, weights, rollouts, self.temperature, self.dtype, rows_at_once, trained)

    def trained(self, group_advantages: torch.Tensor) -> torch.Tensor | None:
        """Rows whose loss has a gradient, if not all have: without γ and KL a completion with A_i = 0 has none."""
        moves_all = self.config.algorithm.adv_estimator == "gtpo" and self.settings.entropy_coeff != 0
        trained = group_advantages != 0
        return trained if trained.any() and not (trained.all() or moves_all or self.reference) else None

    def step(
        self,
        rollouts: Sequence[Rollout],
        scores: Sequence[float],
        template: torch.Tensor | None = None,
        right: Sequence[float] | None = None,
        kept: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The updates on the completions of several prompts, as verl's trainer makes them; what there is to log.

        Args:
            rollouts: of as many prompts as `data.train_batch_size` says; `actor.ppo_mini_batch_size` of them make an
                update.
            scores: a reward for each completion.
            template: (rows, response_length), 1 on the tokens of the format, whose part in the update is logged.
            right: 1 for each right completion, for the controls of `OUTCOMES`.
            kept: gets a record of each completion, with its own tokens and their advantages, if it is given.
        """
        size = min(self.actor.ppo_mini_batch_size, len(rollouts))
        before = {name: values.detach().clone() for name, values in self.weights.items()}
        one_update = size == len(rollouts)
        index = np.repeat(np.arange(len(rollouts)), len(rollouts[0].responses))
        responses, mask = (pad_rows([getattr(r, name) for r in rollouts]) for name in ("responses", "response_mask"))
        group_advantages = self.group_advantages(torch.tensor(scores, dtype=torch.float32), mask, index)
        if self.control in OUTCOMES:
            group_advantages = OUTCOMES[self.control](group_advantages, torch.tensor(right) == 1, index)
        trained = self.trained(group_advantages) if one_update else None
        with torch.set_grad_enabled(one_update):
            log_prob, entropy = self.log_probs(self.weights, rollouts, trained)
        batch = Batch(rollouts, responses, mask, log_prob.detach(), entropy, index, group_advantages)
        advantages, logged = self.advantages(batch)
        if kept is not None:
            kept += _records(batch, advantages, scores)
        norms = []
        for first in range(0, len(rollouts), size):
            chosen = slice(first * len(index) // len(rollouts), (first + size) * len(index) // len(rollouts))
            if not one_update:
                log_prob, _ = self.log_probs(self.weights, rollouts[first : first + size])
            longest = log_prob.shape[1]
            norms.append(self.update(batch, log_prob, advantages[chosen, :longest], chosen))
        self.scheduler.step()
        changes = [(values.detach() - before[name]).square().sum() for name, values in self.weights.items()]
        means = (entropy * mask).sum(-1) / mask.sum(-1)
        if template is not None:
            weight = advantages.abs() * mask
            if self.actor.loss_agg_mode == "seq-mean-token-mean":
                weight = weight / mask.sum(-1, keepdim=True)
            logged["template"] = ((weight * template).sum() / weight.sum().clamp(min=1e-9)).item()
        return logged | {
            "entropy": means.mean().item(),
            "above_ln2": (means > LN2).float().mean().item(),
            "grad_norm": float(np.mean(norms)),
            "change": torch.stack(changes).sum().sqrt().item(),
            "no_spread": float(np.mean([(group_advantages[index == i] == 0).all().item() for i in set(index)])),
        }

    def group_advantages(self, scores: torch.Tensor, mask: torch.Tensor, index: np.ndarray) -> torch.Tensor:
        """GRPO's A_i of the completions, (rows,); the package's where `min_correct_reward` limits them."""
        by_std = self.config.algorithm.norm_adv_by_std_in_grpo
        if (least := self.settings.min_correct_reward) is not None:
            return compute_group_advantages(scores, Completions(mask, index), by_std, min_correct_reward=least)
        rewards_ = torch.zeros(mask.shape)
        rewards_[:, 0] = scores
        return compute_grpo_outcome_advantage(rewards_, mask, index, norm_adv_by_std_in_grpo=by_std)[0][:, 0].clone()

    def advantages(self, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
        """Of the tokens, (rows, response_length); what there is to log.

        The masks of GTPO are logged under every method.
        """
        algorithm, mask = self.config.algorithm, batch.response_mask
        advantages = batch.group_advantages.unsqueeze(-1) * mask
        inputs = batch.group_advantages, batch.index, batch.responses, mask, batch.entropy
        tokens = mask.sum().item()
        conflicts = compute_gtpo_token_advantages(*inputs, MASKS_ONLY).conflicts
        assert conflicts is not None
        logged = {
            name: length.sum().item() / tokens
            for name, length in (
                ("conflict", conflicts.conflict_len),
                ("conflict_first", conflicts.prefix_len),
                ("conflict_last", conflicts.suffix_len),
            )
        }
        logged["forks"] = conflicts.forks.float().mean().item()
        if algorithm.adv_estimator == "gtpo":
            result = compute_gtpo_token_advantages(*inputs, replace(self.settings, min_correct_reward=None))
            advantages = result.advantages
            logged["dropped"] = (~result.keep).float().mean().item()
        if self.control in CONTROLS:
            advantages = CONTROLS[self.control](advantages, batch, self.generator)
        return advantages, logged

    def update(self, batch: Batch, log_prob: torch.Tensor, advantages: torch.Tensor, chosen: slice) -> float:
        """One optimizer step on some rows; the norm of its gradient."""
        actor, mask = self.actor, batch.response_mask[chosen, : log_prob.shape[1]]
        gtpo = actor.policy_loss.loss_mode == "gtpo"
        policy_loss = compute_policy_loss_gtpo if gtpo else get_policy_loss_fn("vanilla")
        actor.global_batch_info["loss_scale_factor"] = actor.loss_scale_factor
        loss, _ = policy_loss(
            old_log_prob=batch.old_log_prob[chosen, : log_prob.shape[1]],
            log_prob=log_prob,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
        )
        if self.reference:
            rows_of_a_prompt = len(batch.index) // len(batch.rollouts)
            own = batch.rollouts[chosen.start // rows_of_a_prompt : chosen.stop // rows_of_a_prompt]
            with torch.no_grad():
                ref_log_prob, _ = self.log_probs(self.reference, own)
            kl = kl_penalty(log_prob, ref_log_prob, actor.kl_loss_type)  # type: ignore[arg-type]
            loss = loss + actor.kl_loss_coef * agg_loss(kl, mask, actor.loss_agg_mode)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.weights.values(), actor.optim.clip_grad)
        if norm.isfinite():
            self.optimizer.step()
        self.optimizer.zero_grad()  # so that no gradient takes memory beside the next run's step
        return norm.item()


def drop_negative(advantages: torch.Tensor, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """Only completions above the mean of their group train."""
    return advantages.clamp(min=0)


def skip_at_random(advantages: torch.Tensor, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """As many negative updates left out as both masks of GTPO leave out, at random tokens of the same completions."""
    return _skip(advantages, batch, torch.rand(advantages.shape, generator=generator))


def skip_confident(advantages: torch.Tensor, batch: Batch, generator: torch.Generator) -> torch.Tensor:
    """As many, at the most probable tokens: the idea of arXiv:2606.17250, in GTPO's measure."""
    return _skip(advantages, batch, batch.old_log_prob)


def _skip(advantages: torch.Tensor, batch: Batch, order: torch.Tensor) -> torch.Tensor:
    masked = compute_gtpo_token_advantages(
        advantages[:, 0], batch.index, batch.responses, batch.response_mask, batch.entropy, MASKS_ONLY
    ).advantages
    own = batch.response_mask.bool()
    number = (own & (masked == 0) & (advantages < 0)).sum(-1, keepdim=True)
    rank = order.masked_fill(~own, -torch.inf).argsort(-1, descending=True).argsort(-1)
    return advantages.masked_fill(rank < number, 0)


CONTROLS: dict[str, Callable[[torch.Tensor, Batch, torch.Generator], torch.Tensor]] = {
    "drop_negative": drop_negative,
    "skip_at_random": skip_at_random,
    "skip_confident": skip_confident,
    "common": variants.weigh(variants.common),
    "agreed": variants.weigh(variants.agreed),
    "common_skip": variants.weigh(variants.common, positive=1),
    "divide": variants.divide,
}
"""What changes the advantages of the tokens."""
OUTCOMES: dict[str, Callable[[torch.Tensor, torch.Tensor, np.ndarray], torch.Tensor]] = {
    "gate": variants.gate,
    "never_positive_if_wrong": variants.never_positive_if_wrong,
}
"""What changes the A_i, before the masks of GTPO."""


def _records(batch: Batch, advantages: torch.Tensor, scores: Sequence[float]) -> list[dict[str, Any]]:
    """Each completion: its prompt's number, own token ids, score and A_i, and log π and advantage of each token."""
    records = []
    for row, own in enumerate(batch.response_mask.bool()):
        records.append(
            {
                "group": int(batch.index[row]),
                "ids": batch.responses[row][own].tolist(),
                "score": scores[row],
                "a": batch.group_advantages[row].item(),
                "log_prob": batch.old_log_prob[row][own].tolist(),
                "advantages": advantages[row][own].tolist(),
            }
        )
    return records


def template_mask(rollouts: Sequence[Rollout], tokenizer: Any) -> torch.Tensor:
    """(rows, response_length), 1 on the tokens that write one of the four tags, and on the end."""
    responses = pad_rows([rollout.responses for rollout in rollouts])
    result = torch.zeros(responses.shape)
    for row, ids in enumerate(responses.tolist()):
        # A byte-level tokenizer writes printable ASCII as it is.
        pieces = tokenizer.convert_ids_to_tokens(ids)
        text, starts = "".join(pieces), np.cumsum([0, *map(len, pieces)])
        covered = np.zeros(len(text), dtype=bool)
        for found in re.finditer("|".join(map(re.escape, TAGS)), text):
            covered[slice(*found.span())] = True
        result[row] = torch.tensor([covered[a:b].any() for a, b in itertools.pairwise(starts)])
    return result.masked_fill(responses == tokenizer.eos_token_id, 1)


def read_scores(rollouts: Sequence[Rollout], questions: Sequence[Asked], task: Task, reward: str) -> list[dict]:
    """What the reward function named `reward` says of each completion, its answer, and the three measures of its form.

    `strict` is the exact format: the two blocks and nothing else, then EOS. `eos` is 1 if the completion ends with EOS.
    `well_formed` is 1 if its text up to the first ``</answer>`` is in the exact format.
    """
    results = []
    for rollout, asked in zip(rollouts, questions, strict=True):
        texts = task.tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)
        ends = (rollout.responses == task.tokenizer.eos_token_id).any(-1).tolist()
        for text, end in zip(texts, ends, strict=True):
            parts = getattr(rewards, reward)("", text, asked.answer, least_reasoning=task.least_reasoning)
            short = re.match(r"\s*<reasoning>\s*<(/reasoning|answer)>", text) is not None
            parts |= {"strict": parts["strict"] * end, "eos": float(end), "short": float(short)}
            parts["well_formed"] = float(rewards.is_well_formed(text))
            results.append({**parts, "answer": extract_answer(text)})
    return results


def train(
    learners: Sequence[Learner],
    task: Task,
    order: Sequence[Asked],
    steps: int,
    kept: Sequence[list[list[dict[str, Any]]]] = (),
    keep: int = 0,
    files: Sequence[TextIO] = (),
    checkpoint: Path | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[dict[str, list[float]]]:
    """Train runs that share task, prompts a step, group size and temperature; a list of numbers per metric and run,
    and with those of the first run the seconds of each step.

    The completions of the first `keep` steps go into each run's list in `kept`. Each run's file in `files` gets a line
    of JSON with the metrics of a step, and the seconds since the step began, as the step is made. `checkpoint` is
    written every `CHECKPOINT_EVERY` steps, and is where runs that were interrupted go on. `after_step` is called with
    the number of each step that was made, before its checkpoint is written.
    """
    config = learners[0].config
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.train_batch_size
    first, logs = 0, [dict[str, list[float]]() for _ in learners]
    if checkpoint and checkpoint.exists():
        saved = torch.load(checkpoint)
        first, logs = saved["step"], saved["logs"]
        for learner, state in zip(learners, saved["learners"], strict=True):
            learner.restore(state)
        for records_of_run, before in zip(kept, saved["kept"], strict=True):
            records_of_run += before
    asked_in_turn = itertools.islice(itertools.cycle(order), first * prompts, None)
    for step in range(first, steps):
        began = time.monotonic()
        questions = list(itertools.islice(asked_in_turn, prompts))
        for run, own in enumerate(draw(learners, task, questions, rollout.n)):
            learner, log = learners[run], logs[run]
            scored = read_scores(own, questions, task, learner.config.reward.custom_reward_function.name)
            scores, right = ([s[key] for s in scored] for key in ("score", "acc"))
            records: list[dict[str, Any]] | None = [] if step < keep else None
            record = {
                **{
                    key: float(np.mean([s[key] for s in scored])) for key in ("acc", "format", "strict", "eos", "short")
                },
                "length": pad_rows([r.response_mask for r in own]).sum(-1).float().mean().item(),
                **learner.step(own, scores, template_mask(own, task.tokenizer), right, records),
            }
            if records is not None:
                kept[run].append(records)
            for key, value in record.items():
                log.setdefault(key, []).append(value)
            if files:
                line = {"step": step + 1, "seconds": round(time.monotonic() - began, 1), **record}
                print(json.dumps(line), file=files[run], flush=True)
        logs[0].setdefault("seconds", []).append(time.monotonic() - began)
        if after_step:
            after_step(step + 1)
        if checkpoint and (step + 1) % CHECKPOINT_EVERY == 0:
            states = [learner.state() for learner in learners]
            torch.save({"step": step + 1, "logs": logs, "learners": states, "kept": list(kept)}, f"{checkpoint}.new")
            Path(f"{checkpoint}.new").replace(checkpoint)
    return logs


def draw(
    learners: Sequence[Learner],
    task: Task,
    questions: Sequence[Asked],
    n: int,
    generators: Sequence[torch.Generator] | None = None,
) -> list[list[Rollout]]:
    """n completions of each question from each run."""
    first = learners[0]
    return sample(
        first.shape,
        [learner.weights for learner in learners],
        [asked.prompt for asked in questions],
        n,
        task.limit,
        first.temperature,
        task.tokenizer.eos_token_id,
        generators or [learner.generator for learner in learners],
        first.dtype,
    )


def hold_out(
    learners: Sequence[Learner], task: Task, questions: Sequence[Asked], samples: int, prompts: int
) -> list[dict[str, Any]]:
    """Ask each run the held-out questions; `prompts` of them are answered together.

    The draws come from generators of their own, so that a run which is asked goes on as one which is not.

    Returns:
        For each run, lists with an item a question: how many of `samples` completions are right, in the exact format
        (`strict`), end with EOS, are well formed up to the first ``</answer>``; how many different answers there are;
        and the `texts` of all of them, special tokens included. Logs of blocks 1 to 12 have one `text` a question.
    """
    counted = {"right": "acc", "strict": "strict", "eos": "eos", "well_formed": "well_formed"}
    results: list[dict[str, Any]] = [
        {"samples": samples, **{name: [] for name in counted}, "answers": [], "texts": []} for _ in learners
    ]
    generators = [torch.Generator().manual_seed(0) for _ in learners]
    for first in range(0, len(questions), prompts):
        some = questions[first : first + prompts]
        for own, result in zip(draw(learners, task, some, samples, generators), results, strict=True):
            scored = read_scores(own, some, task, "paper")
            for i, rollout in enumerate(own):
                group = scored[i * samples : (i + 1) * samples]
                for name, key in counted.items():
                    result[name].append(int(sum(score[key] for score in group)))
                result["answers"].append(len({score["answer"] for score in group}))
                own_tokens = zip(rollout.responses, rollout.response_mask == 1, strict=True)
                result["texts"].append([task.tokenizer.decode(ids[is_own]) for ids, is_own in own_tokens])
    return results
