"""One step of each method by verl's V1 trainer and by the study's fast loop, on the same rollouts; run by
test_fast_study_on_cpu.py.

    python tests/e2e/fast_step.py TASK OUT    writes OUT/steps.pt

TASK is a folder of `python3 -m recipes make-task`, with the tiny model or with SmolLM2.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from harness import one_process
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from studies import fast, model, rewards
from studies.plan import METHODS

SGD = ["actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=0.5"]
# With the usual 1e-8 AdamW's first step would turn the rounding of tiny gradients into whole steps.
ADAMW = [
    "actor_rollout_ref.actor.optim.optimizer=AdamW",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
]
HOT = ["actor_rollout_ref.rollout.temperature=1.2", "++algorithm.gtpo.entropy_threshold=0.3"]
# name -> (method, further overrides)
CASES = {
    **{
        name: (name, SGD)
        for name in ("grpo", "grpo_token_mean", "grpo_kl", "gtpo", "double", "entropy", "grpo_strict", "gtpo_no_std")
    },
    "grpo with AdamW": ("grpo", ADAMW),
    "gtpo with AdamW, hot, filtered": ("gtpo", [*ADAMW, *HOT]),
}
# Its entropy on given completions is high: the filter would drop them all.
REAL_CASES = {"grpo": CASES["grpo"], "gtpo without the filter": ("gtpo_no_filter", SGD)}
PROMPTS = 2


def completions(tokenizer, answer):
    """Eight: right ones and wrong ones, one cut off, one that goes on behind its answer, one without its last tag."""

    def written(reasoning, answer, behind=""):
        text = f"<reasoning>{reasoning}</reasoning><answer>{answer}</answer>{behind}"
        return [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]

    rows = [written(f"{i}+{i}={2 * i}", answer if i % 2 else f"{answer}0") for i in range(6)]
    rows.append(written("1", answer, "1,2"))
    rows.append([*written("7;8", answer)[:-3], tokenizer.eos_token_id])
    rows[0] = rows[0][:9]
    return rows


def main(task, out):
    one_process.be_rank(0, 1, out / "store")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    questions = load_dataset("parquet", data_files=str(task / "train.parquet"), split="train")
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        for row in questions
    ]
    # Of several lengths: the fast loop pads them.
    chosen = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))[:: len(prompts) - 1][:PROMPTS]
    answers = [questions[i]["reward_model"]["ground_truth"] for i in chosen]
    responses = [completions(tokenizer, answer) for answer in answers]
    rollouts = []
    for i, ids in zip(chosen, responses, strict=True):
        tensors = [torch.tensor(row) for row in ids]
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in ids], batch_first=True)
        padded = pad_sequence(tensors, True, tokenizer.eos_token_id)
        rollouts.append(model.Rollout(torch.tensor(prompts[i]), padded, mask))
    shape, start = model.load(task / "model")
    torch.manual_seed(0)
    elsewhere = {name: values + 0.02 * torch.randn_like(values) for name, values in start.items()}
    results = {"start": {name: values[0] for name, values in start.items()}}
    for name, (method, overrides) in (REAL_CASES if len(start) > 100 else CASES).items():
        settings = [
            *(f"{key}={PROMPTS}" for key in ("data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size")),
            f"data.max_prompt_length={max(map(len, prompts))}",
            *METHODS[method],
            *overrides,
        ]
        learner = fast.Learner(shape, start, fast.build_config([*one_process.OVERRIDES, *settings]))
        if learner.reference:
            learner.reference = elsewhere
        with torch.no_grad():
            reference, _ = learner.log_probs(elsewhere, rollouts)
        rule = getattr(rewards, learner.config.reward.custom_reward_function.name)
        rows, scores = {}, []
        for i, (answer, ids) in enumerate(zip(answers, responses, strict=True)):
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            own = [rule("", text, answer)["score"] for text in texts]
            of_reference = reference[i * len(ids) : (i + 1) * len(ids)]
            for session, (row, score, log_prob) in enumerate(zip(ids, own, of_reference, strict=True)):
                fields = one_process.row(f"question{i}", prompts[chosen[i]], row, score)
                rows[f"question{i}_{session}_0"] = fields | {"ref_log_prob": log_prob[: len(row)]}
            scores += own
        logged = learner.step(rollouts, scores)
        step = one_process.step(task, out, settings, 0, rows)
        results[name] = {
            "fast": {key: values[0].detach() for key, values in learner.weights.items()},
            "verl": {key: values for key, values in step["parameters"].items() if key in learner.weights},
            "logged": logged,
            "metrics": step["metrics"],
        }
    torch.save(results, out / "steps.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
