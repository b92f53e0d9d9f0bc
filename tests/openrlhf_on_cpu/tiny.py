"""A random Qwen2 of two layers with a tokenizer of single characters, sums as prompts and a reward."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

# Sharp enough that completions of a prompt share tokens, and that about a quarter of them lies above ln 2.
SHARPNESS = 10.0
REWARD = '''"""The number of different digits in a completion."""

import torch


def reward_func(queries, prompts, labels):
    completions = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts)]
    scores = torch.tensor([float(len(set(x) & set("0123456789"))) for x in completions])
    return {"rewards": scores, "scores": scores / 10, "extra_logs": {}}
'''


def write(folder, prompts=64):
    characters = ["<|endoftext|>", "<|im_end|>", *"0123456789+-*/=<>.,:;?!() abcdefghijklmnopqrstuvwxyz"]
    vocab = {token: number for number, token in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>"
    ).save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.lm_head.weight.data *= SHARPNESS
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    sums = [f"{10 + 7 * i % 90}+{10 + 13 * i % 90}=" for i in range(prompts)]
    (folder / "train.jsonl").write_text("".join(json.dumps({"input": x}) + "\n" for x in sums))
    (folder / "reward.py").write_text(REWARD)
