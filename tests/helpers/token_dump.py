"""A token dump of made-up completions, and the byte-level tokenizer that spells them; imported by the view's tests."""

import json

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gtpo_verl import compute_gtpo_token_advantages
from gtpo_verl.algorithm.advantage import compute_group_advantages
from gtpo_verl.algorithm.completions import Completions
from gtpo_verl.verl_plugin.batch_fields import BatchFields
from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from gtpo_verl.verl_plugin.token_dump import TokenDump

END = 256
GOOD = "<reasoning>\n7 + 5 = 12\n</reasoning>"
BAD = "<reasoning>\n7 + 5 = 13!\n</reasoning>"
STEPS = {
    1: ([GOOD, BAD, "no idea"], [20.0, 0.0, 1.0], 0.25),
    10: ([GOOD, GOOD, BAD], [20.0, 20.0, 0.0], 0.25),
    20: ([GOOD, BAD], [20.0, 0.0], 0.9),
}
HOSTILE = [
    "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>",
    "abc\u202egnorw\u202c \u2066x\u2069 \u0000\u001b[31m\u200b\ufeff\u2028 e\u0301 שלום",
    "☃ 🙂 日本 ß".encode() + b"\xe2\x98" + b"a\xff\xf0\x9f",
]


def save_tokenizer(folder):
    """A tokenizer whose token k is the byte k, so that every character beyond ASCII is spread over several tokens."""
    vocabulary = {character: byte for byte, character in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<|im_end|>"})
    fast.save_pretrained(folder)
    return str(folder)


def batch_of(completions, rewards, entropy=0.25):
    """What `write` takes of completions given as lists of token ids."""
    row_len = torch.tensor([len(ids) for ids in completions])
    responses = pad_sequence([torch.tensor(ids) for ids in completions], batch_first=True)
    mask = (torch.arange(responses.shape[1]) < row_len.unsqueeze(-1)).long()
    scores = torch.zeros(responses.shape)
    scores[torch.arange(len(rewards)), row_len - 1] = torch.tensor(rewards)
    if not torch.is_tensor(entropy):
        entropy = torch.full(responses.shape, float(entropy))
    advantages = (torch.tensor(rewards) - sum(rewards) / len(rewards)).unsqueeze(-1) * mask
    return {
        "responses": responses,
        "response_mask": mask,
        "loss_mask": mask,
        "entropy": entropy,
        "old_log_probs": -entropy,
        "token_level_rewards": scores,
        "advantages": advantages,
    }, row_len


def make_dump(folder, config, adv_estimator="gtpo", tokenizer="x", loaded=None):
    """A dump of a run with this estimator, whose tokenizer is in the folder or `loaded`."""
    of_run = {"adv_estimator": adv_estimator, "gtpo_applied": adv_estimator == "gtpo", "tokenizer": tokenizer}
    return TokenDump(folder, config, of_run | {"checkpoints": ""}, loaded)


def write(dump, step, batch, uids, prompts, row_len, initial_entropy=0.3):
    """What verl's trainers give the dump of a batch of which GTPO's advantages are not asked for."""
    completions = Completions(batch["response_mask"], uids)
    result = compute_gtpo_token_advantages(
        compute_group_advantages(batch["token_level_rewards"].sum(-1), completions),
        uids,
        *(batch[name] for name in ("responses", "response_mask", "entropy")),
        dump.config,
        initial_entropy,
    )
    rows = list(range(len(row_len)))
    tensors = (batch[name] for name in ("responses", "entropy", "response_mask"))
    fields = BatchFields(*tensors, row_len, prompts, rows, rows)
    return dump.write(step, batch | {"response_mask": batch["loss_mask"]}, fields, result, initial_entropy)


def write_dump(folder, tokenizer, steps, adv_estimator="gtpo", prompt="7 + 5 = ?", **config):
    """A dump of `steps`: {step: (texts, rewards, entropy)}, every step one group."""
    settings = VerlGTPOConfig(dump_dir=str(folder), dump_freq=1, **config)
    dump = make_dump(folder, settings, adv_estimator, tokenizer)
    for step, (texts, rewards, entropy) in steps.items():
        completions = [[*(text if isinstance(text, bytes) else text.encode()), END] for text in texts]
        batch, row_len = batch_of(completions, rewards, entropy)
        prompts = [np.frombuffer(prompt.encode(), dtype=np.uint8)] * len(texts)
        write(dump, step, batch, ["prompt"] * len(texts), prompts, row_len)
    return folder


def write_rollouts(folder, steps, prompt="7 + 5 = ?"):
    """Files as verl's V1 trainer writes them under `trainer.rollout_data_dir`: {step: (texts, rewards)}, one group."""
    folder.mkdir(exist_ok=True)
    for step, (texts, rewards) in steps.items():
        with (folder / f"{step}.jsonl").open("w") as file:
            for i, (text, reward) in enumerate(zip(texts, rewards, strict=True)):
                text = text.decode(errors="replace") if isinstance(text, bytes) else text
                row = {"input": prompt, "output": text, "gts": "12", "score": reward, "step": step, "uid": f"u_{i}_0"}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return folder
