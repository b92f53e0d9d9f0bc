"""Make the run of `gtpo-verl view --demo`: the first steps of GRPO on SmolLM2-135M-Instruct (Apache-2.0).

    STEPS=1 OUT=outputs/start MODEL=smollm2 bash recipes/run_gtpo_cpu.sh      # makes .cache/smollm2-seed1
    python scripts/make_view_demo.py .cache/smollm2-seed1 gtpo_verl/tools/view/demo 3

The model counts the legs of animals under the prompt and the reward of the paper (arXiv:2508.03772): one prompt and
eight completions a step, learning rate 2e-5, float32, a minute of one CPU core and more a step. It starts from five
supervised steps. The files are a token dump as verl's trainers write it, with the words in it, so no tokenizer is
needed to show it. Other versions of the packages of `bash scripts/setup_cpu.sh smollm2` sample other tokens. In the
stored `gtpo_dump.json` we then set `gtpo.dump_dir` to null.
"""

import sys
import time

import numpy as np
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl import compute_group_advantages, compute_gtpo
from gtpo_verl.reward.score import compute_score
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from gtpo_verl.verl_plugin.token_dump import TokenDump


def main() -> None:
    """Train, and write the dump."""
    task = sys.argv[1]
    folder = sys.argv[2]
    steps = int(sys.argv[3])
    torch.manual_seed(1)
    torch.set_num_threads(1)
    warm_start = f"{task}/warm_start/checkpoints/global_step_5/huggingface"
    tokenizer = AutoTokenizer.from_pretrained(warm_start)
    model = AutoModelForCausalLM.from_pretrained(warm_start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95), weight_decay=0.0)
    questions = pq.read_table(f"{task}/train.parquet").to_pylist()
    config = VerlGTPOConfig(dump_dir=folder, dump_freq=1)
    header = {"adv_estimator": "grpo", "gtpo_applied": False, "tokenizer": "SmolLM2-135M-Instruct", "checkpoints": ""}
    dump = TokenDump(folder, config, header, tokenizer.backend_tokenizer)
    initial_entropy = None
    order = np.random.default_rng(1).permutation(len(questions))
    for step, number in enumerate(order[:steps].tolist(), start=1):
        start = time.time()
        question = questions[number]
        encoded = tokenizer.apply_chat_template(
            question["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        prompt = encoded["input_ids"]
        with torch.no_grad():
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=8,
                max_new_tokens=96,
                pad_token_id=tokenizer.pad_token_id,
            )
        responses = ids[:, prompt.shape[1] :]
        ended = (responses == tokenizer.eos_token_id).int()
        mask = (ended.cumsum(-1) - ended == 0).long()  # up to the first end of sequence, which it includes
        lengths = mask.sum(-1)
        uids = [str(step)] * 8
        scores = []
        for response, length in zip(responses, lengths, strict=True):
            text = tokenizer.decode(response[:length], skip_special_tokens=True)
            score = compute_score(question["data_source"], text, question["reward_model"]["ground_truth"])
            scores.append(score["score"])
        rewards = torch.tensor(scores)
        group_advantages = compute_group_advantages(rewards, uids)

        logits = model(ids).logits[:, prompt.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1)
        chosen = log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.detach().exp() * log_probs.detach()).sum(-1)
        advantages = group_advantages.unsqueeze(-1) * mask
        # One update per rollout: the ratio is 1, and its gradient that of the log-probability.
        loss = -((advantages * chosen * mask).sum(-1) / lengths).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if initial_entropy is None:
            initial_entropy = ((entropy * mask).sum(-1) / lengths).mean().item()

        # What GTPO would have done.
        result = compute_gtpo(
            advantages=group_advantages,
            responses=responses,
            response_mask=mask,
            group_ids=uids,
            entropy=entropy,
            config=config,
            initial_entropy=initial_entropy,
        )
        batch = {
            "response_mask": mask,
            "old_log_probs": chosen.detach(),
            "token_level_rewards": torch.zeros(responses.shape).scatter(
                1, lengths.unsqueeze(-1) - 1, rewards.unsqueeze(-1)
            ),
            "advantages": advantages,
        }
        rows = list(range(8))  # each is a session of one output
        fields = BatchFields(
            responses=responses,
            entropy=entropy,
            response_mask=mask,
            response_len=lengths,
            prompts=[prompt[0].numpy()] * 8,
            last_outputs=rows,
            sessions=rows,
        )
        dump.write(step, batch, fields, result, initial_entropy)
        print(step, f"{time.time() - start:.0f} s", rewards.tolist(), lengths.tolist(), flush=True)


if __name__ == "__main__":
    main()
