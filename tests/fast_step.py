"""One step of each method by verl's V1 trainer and by the study's fast loop, on the same rollouts; run by
tests/e2e/test_fast_study_on_cpu.py.

    VERL_PLATFORM=cpu python tests/fast_step.py TASK OUT    writes OUT/steps.pt
"""

import os
import random
import sys
from pathlib import Path

import one_step
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.cpu import tiny
from studies import fast, reward
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
        name: (name, SGD) for name in ("grpo", "grpo_token_mean", "grpo_kl", "gtpo", "double", "entropy", "grpo_strict")
    },
    "grpo with AdamW": ("grpo", ADAMW),
    "gtpo with AdamW, hot, filtered": ("gtpo", [*ADAMW, *HOT]),
}


def completions(tokenizer, question):
    """Eight, of which one is cut off and one goes on behind its answer."""
    rng, config = random.Random(3), tiny.WarmStartConfig()
    texts = [tiny.completion_text(question, rng, config) for _ in range(8)]
    texts[1] = texts[1].removesuffix(tiny.EOS) + "1,2" + tiny.EOS
    ids = [tokenizer.encode(text) for text in texts]
    return [ids[0][:9], *ids[1:]]


def verl_rows(prompt, responses, scores, ref_log_probs):
    """{key: fields} as verl's agent loop and its reference worker put them."""
    rows = {}
    for i, (ids, score, ref) in enumerate(zip(responses, scores, ref_log_probs, strict=True)):
        ones = torch.ones(len(ids), dtype=torch.long)
        rewards = torch.zeros(len(ids))
        rewards[-1] = score
        rows[f"question_{i}_0"] = {
            "uid": "question",
            "prompts": prompt,
            "responses": torch.tensor(ids),
            "input_ids": torch.cat([prompt, torch.tensor(ids)]),
            "position_ids": torch.arange(len(prompt) + len(ids)),
            "response_mask": ones,
            "loss_mask": ones,
            "rm_scores": rewards,
            "ref_log_prob": ref[: len(ids)],
        }
    return rows


def main(task, out):
    one_step.be_rank(0, 1, out / "store")
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    question = tiny.TASKS["arithmetic"]()[3456]
    prompt = torch.tensor(tiny.encode_prompt(tokenizer, question.text))
    responses = completions(tokenizer, question)
    mask = pad_sequence([torch.ones(len(ids), dtype=torch.long) for ids in responses], batch_first=True)
    padded = pad_sequence([torch.tensor(ids) for ids in responses], True, tokenizer.eos_token_id)
    rollout = fast.Rollout(prompt, padded, mask)
    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    start = {name: values.detach().unsqueeze(0) for name, values in model.state_dict().items()}
    torch.manual_seed(0)
    elsewhere = {name: values + 0.02 * torch.randn_like(values) for name, values in start.items()}
    results = {"start": {name: values[0] for name, values in start.items()}}
    for name, (method, overrides) in CASES.items():
        settings = ["data.train_batch_size=1", *METHODS[method], *overrides]
        learner = fast.Learner(
            {key: values.clone() for key, values in start.items()}, fast.build_config([*one_step.OVERRIDES, *settings])
        )
        if learner.reference:
            learner.reference = elsewhere
        with torch.no_grad():
            reference = learner.log_distribution(elsewhere, rollout).gather(-1, padded.unsqueeze(-1)).squeeze(-1)
        rule = getattr(reward, learner.config.reward.custom_reward_function.name)
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = [rule("", text, question.answer)["score"] for text in texts]
        logged = learner.step(rollout, scores)
        step = one_step.step(task, out, settings, 0, verl_rows(prompt, responses, scores, reference))
        results[name] = {
            "fast": {key: values[0].detach() for key, values in learner.weights.items()},
            "verl": step["parameters"],
            "logged": logged,
            "metrics": step["metrics"],
        }
    torch.save(results, out / "steps.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
