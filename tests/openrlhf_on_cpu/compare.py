"""What a run should have computed, from vLLM's tokens and rewards and the weights before each update."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from runs import GROUP, PROMPTS
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from gtpo_verl import compute_gtpo_token_advantages


@dataclass
class Comparison:
    """Largest differences over a run, and what happened in it."""

    advantage: float = 0.0
    log_prob: float = 0.0
    entropy: float = 0.0
    completions: int = 0
    conflict_tokens: int = 0
    dropped: int = 0
    weights: bool = True

    def __str__(self):
        return (
            f"{self.completions} completions, {self.conflict_tokens} conflict tokens, {self.dropped} dropped; largest "
            f"difference of an advantage in the loss {self.advantage:.2g}, of a completion's mean log-prob, vLLM's and "
            f"the actor's, {self.log_prob:.2g}, of an entropy, the actor's and transformers', {self.entropy:.2g}"
        )


def group_norm(rewards):
    """OpenRLHF's GRPO."""
    grouped = rewards.view(-1, GROUP)
    return ((grouped - grouped.mean(-1, keepdim=True)) / (grouped.std(-1, keepdim=True) + 1e-9)).flatten()


def own_tokens(row):
    """Token ids of a rollout, and True where the next token was sampled."""
    tokens = torch.tensor(row["observation_tokens"])
    mask = torch.zeros(len(tokens) - 1, dtype=torch.bool)
    for start, end in row["action_ranges"]:
        mask[start - 1 : end - 1] = True
    return tokens, mask


def by_step(recorded, steps):
    """What each process recorded, in order, dealt out to the steps."""
    of_process = defaultdict(list)
    for _, process, content in recorded:
        of_process[process].append(content)
    per_step = [[] for _ in range(steps)]
    for _, contents in sorted(of_process.items()):  # not by who was first: the names are paired
        for number, content in enumerate(contents):
            per_step[number * steps // len(contents)].append(content)
    return per_step


def rows_of(content, *names):
    for row, attention in enumerate(content["attention_mask"].bool()):
        tokens = tuple(content["sequences"][row][attention].tolist())
        yield tokens, *(content[name][row] for name in names)


def compare(run, model_path, settings=None, initial_entropy=None, temperature=1.0):
    """Compare a run with `compute_gtpo_token_advantages`, or without `settings` with OpenRLHF's `group_norm`.

    Args:
        initial_entropy: of the run that this one goes on from; None: from the first rollouts.

    Returns:
        The `Comparison`, the `GTPOAdvantage` of each step and the initial entropy.
    """
    rollouts = [content for _, _, content in run.recorded("rollout")]
    rank = run.recorded("before")[0][1]
    before, after = (
        [content["weights"] for _, pid, content in run.recorded(name) if pid == rank] for name in ("before", "after")
    )
    steps, found, results = len(before), Comparison(), []
    assert len(rollouts) == steps * GROUP * PROMPTS
    found.weights = all(torch.equal(x, before[i + 1][n]) for i in range(steps - 1) for n, x in after[i].items())
    assert not any(torch.equal(before[i]["lm_head.weight"], after[i]["lm_head.weight"]) for i in range(steps))

    entropies, batches, losses = (by_step(run.recorded(name), steps) for name in ("entropy", "batch", "loss"))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, attn_implementation="sdpa")
    for step in range(steps):
        rows = rollouts[step * GROUP * PROMPTS : (step + 1) * GROUP * PROMPTS]
        assert all(row["prompt"] == rows[i // GROUP * GROUP]["prompt"] for i, row in enumerate(rows))
        tokens, masks = zip(*map(own_tokens, rows), strict=True)
        mask = pad_sequence(masks, batch_first=True)
        rewards = torch.tensor([float(row["reward"]) for row in rows])
        if settings is None:
            expected = group_norm(rewards)[:, None] * mask
        else:
            measured = defaultdict(list)
            for content in entropies[step]:
                for key, entropy in rows_of(content, "entropy"):
                    measured[key].append(entropy)
            own = [measured[tuple(x.tolist())].pop()[: len(x) - 1] for x in tokens]
            model.load_state_dict(before[step])
            found.entropy = max(found.entropy, entropy_gap(model, tokens, masks, own, temperature))
            if initial_entropy is None:
                means = [values[m].double().mean() for values, m in zip(own, masks, strict=True)]
                initial_entropy = torch.stack(means).mean().item()
            grouped = rewards.double().view(-1, GROUP)
            deviation = grouped - grouped.mean(-1, keepdim=True)
            group_advantages = (deviation / (grouped.std(-1, keepdim=True) + 1e-6)).flatten()
            result = compute_gtpo_token_advantages(
                group_advantages,
                [i // GROUP for i in range(len(rows))],
                pad_sequence([x[1:] for x in tokens], batch_first=True),
                mask,
                pad_sequence(own, batch_first=True),
                settings,
                initial_entropy,
            )
            results.append(result)
            expected = result.advantages
            found.conflict_tokens += len(result.conflicts.rows)
            found.dropped += int((~result.keep).sum())
        # By tokens; equal completions can only differ in the rounding of their entropy, and are compared in that order.
        row_of, wanted, got = {}, defaultdict(list), defaultdict(list)
        for x, advantages, own_mask, row in zip(tokens, expected, mask, rows, strict=True):
            row_of[tuple(x.tolist())] = row
            wanted[tuple(x.tolist())].append(advantages[own_mask].tolist())
        for batch, loss in zip(batches[step], losses[step], strict=True):
            for key, advantages, log_probs, own_mask in rows_of(
                batch | loss, "advantages", "old_log_probs", "action_mask"
            ):
                got[key].append(advantages[own_mask.bool()].tolist())
                sampled = torch.tensor(row_of[key]["rollout_log_probs"][1:])[own_tokens(row_of[key])[1]]
                gap = log_probs[own_mask.bool()].mean() - sampled.mean()
                found.log_prob = max(found.log_prob, gap.abs().item())
                found.completions += 1
        for key, advantages in wanted.items():
            for one, other in zip(sorted(got[key]), sorted(advantages), strict=True):
                gap = torch.tensor(one) - torch.tensor(other)
                found.advantage = max(found.advantage, gap.abs().max().item())
    assert found.completions == len(rollouts)
    return found, results, initial_entropy


@torch.no_grad()
def entropy_gap(model, tokens, masks, measured, temperature):
    """Largest difference of a token's entropy to that of transformers, which has one completion a batch, no padding."""
    largest = 0.0
    for row, mask, values in zip(tokens, masks, measured, strict=True):
        log_probs = (model(row[None]).logits[0].float() / temperature).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)[:-1]
        largest = max(largest, (entropy - values)[mask].abs().max().item())
    return largest
