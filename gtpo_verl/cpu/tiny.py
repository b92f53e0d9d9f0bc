"""Tasks small enough for two CPU cores, a model of 0.4 M parameters and its warm start.

The tasks are two-digit addition (`arithmetic`) and subtraction, and two of `reasoning-gym`: `spell_backward` and
`letter_counting`. `worded_counting` is the latter in whole sentences, of about 100 tokens and in several phrasings.
`prepare` writes, for `gtpo-verl make-task arithmetic`,

- `DIR/model`: a Qwen2 in Hugging Face format with its tokenizer, trained for a few hundred supervised steps on
  `<reasoning>…</reasoning><answer>…</answer>`, the paper's format (arXiv:2508.03772, Sec. 6). Some of those examples
  have a damaged tag and some a wrong answer, so that reinforcement learning has something to repair;
- `DIR/train.parquet`, `DIR/test.parquet`: prompts in verl's format, test disjoint from train;
- `DIR/warm_start.json`: the settings and the statistics of the warm start on prompts of the test set.

What GTPO needs is kept: every tag is several tokens, the reward is the paper's, the mean entropy lies far below ln 2,
and a completion has room for twice its natural length, 30 tokens, or 100 in words. What is not the paper's: there is no
system prompt, because this model knows nothing but this task. To math-verify `cab` and `abc` are one product, so where
answers are words, the reward must compare them as such.
"""

import functools
import importlib.util
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.utils.torch_functional import get_response_mask

from gtpo_verl.cpu.make_once import make_once
from gtpo_verl.paper.reward import TAGS, compute_format_reward, extract_answer, is_strict

# Qwen's own names: the class that transformers picks for a Qwen2 model adds <|endoftext|> to a vocabulary without it.
PAD, EOS, USER, ASSISTANT = "<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>"
REPORT = "warm_start.json"
OUTPUTS = ("model", "train.parquet", "test.parquet")


class Question(NamedTuple):
    """A prompt, the right answer, the ways to reason towards it, and answers that are wrong."""

    text: str
    answer: str
    reasonings: tuple[str, ...]
    wrong_answers: tuple[str, ...]


@dataclass(frozen=True)
class WarmStartConfig:
    """What decides the output; two calls with equal settings share one result.

    Args:
        seed: reaches the split of the prompts, the training examples and the initial weights.
        task: one of `TASKS`.
        steps: supervised steps.
        batch_size: examples per step.
        lr: peak learning rate of AdamW, after 50 steps of linear warm-up and before a linear decay to 0.
        damaged_tag_share: share of the examples with a missing, unclosed or misspelt tag.
        wrong_answer_share: share of the examples whose answer is wrong.
        test_size: prompts held out, of the 8,100 sums, say; the rest is the training set.
    """

    seed: int = 0
    task: str = "arithmetic"
    steps: int = 250
    batch_size: int = 32
    lr: float = 3e-3
    damaged_tag_share: float = 0.12
    wrong_answer_share: float = 0.45
    test_size: int = 256


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE like Qwen2's, of 71 tokens: single digits and letters, and the parts of the four tags.

    Decoding gives the text back exactly. Capital letters and other symbols have no token and vanish in encoding.
    """
    merges = ["r e", "a s", "re as", "o n", "reas on", "i n", "in g", "a n", "s w", "an sw", "e r", "answ er", "< /"]
    newline, space = "Ċ", "Ġ"
    symbols = [*"0123456789+-*/=<>.,:;?!()'", newline, space, *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [PAD, EOS, USER, ASSISTANT, *symbols, *(merge.replace(" ", "") for merge in merges)]
    bpe = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split()) for merge in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        additional_special_tokens=[USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        chat_template=(
            "{% for message in messages %}"
            "{{ '<|' + message['role'] + '|>' + message['content'] }}"
            "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
            "{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
        ),
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """A Qwen2 of two layers and 0.4 M float32 parameters, initialised from torch's current random state."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,  # vLLM on CPU takes heads of 32, not of 16
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.06,  # at this width the usual 0.02 takes twice as many steps
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def two_digit(sign: str) -> list[Question]:
    """All sums of two numbers of two digits, or all differences but negative ones; units first, then tens with the
    carry."""
    one = int(f"{sign}1")
    questions = []
    for a in range(10, 100):
        for b in range(10, 100 if one > 0 else a + 1):
            (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)
            carry = one * (not 0 <= a0 + one * b0 <= 9)
            units = a0 + b0 if one > 0 else (a0 - b0) % 10
            tens = f"{a1}{sign}{b1}{f'{carry:+}' if carry else ''}={a1 + one * b1 + carry}"
            questions.append(_number_question(f"{a}{sign}{b}=", a + one * b, f"{a0}{sign}{b0}={units}", tens))
    return questions


def _number_question(text: str, answer: int, units: str, tens: str) -> Question:
    wrong = tuple(str(answer + error) for error in (-20, -11, -10, -9, -1, 1, 9, 10, 11, 20))
    return Question(text, str(answer), (f"{units},{tens}", f"{units};{tens}"), wrong)


def spell_backward() -> list[Question]:
    """Words of three to five letters, spelled backward letter by letter (`reasoning-gym`)."""
    questions = {}
    for row in _reasoning_gym("spell_backward", size=20_000, min_word_len=3, max_word_len=5):
        word, answer = row["metadata"]["word"], row["answer"]
        swaps = {answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :] for i in range(len(answer) - 1)}
        if (wrong := swaps - {answer}) and re.fullmatch("[a-z]+", word):
            questions[word] = Question(f"{word}=", answer, (",".join(answer), ";".join(answer)), tuple(sorted(wrong)))
    return list(questions.values())


def letter_counting() -> list[Question]:
    """How often a letter occurs in a word of three to six letters, counted along the word (`reasoning-gym`)."""
    questions = {}
    for row in _reasoning_gym("letter_counting", size=40_000, min_words=1, max_words=1):
        letter, (word,), answer = row["metadata"]["target_letter"], row["metadata"]["span"], row["answer"]
        if re.fullmatch("[a-z]{3,6}", word) and letter in word:
            counts = "".join(f"{c}{word[: i + 1].count(letter)}" for i, c in enumerate(word))
            wrong = tuple(str(int(answer) + error) for error in (-1, 1, 2))
            text = f"{letter} in {word}="
            questions[text] = Question(text, answer, (counts, ":" + counts), wrong)
    return list(questions.values())


def worded_counting() -> list[Question]:
    """The questions of `letter_counting`, answered in sentences: in three ways of about 100 tokens and a short one."""

    def told(question: Question) -> tuple[str, ...]:
        counts = question.reasonings[0]
        return (
            f"i go along the word and count as i go: {counts}. the last number is the one that was asked for.",
            f"{counts}. so i have counted letter by letter from the first to the last, and this is the result.",
            f"every letter of the word gets its own count, the target is one of them. so here they are: {counts}",
            counts,
        )

    return [question._replace(reasonings=told(question)) for question in letter_counting()]


FURTHER_CHARACTERS = {f"letter_counting_after_{n}": n for n in (20, 70, 240)}
"""Tasks whose reasoning begins with so many characters that say nothing and differ from completion to completion."""


def counting_after(characters: int) -> list[Question]:
    """The questions of `letter_counting`, answered after further characters: the share of shared tokens falls."""
    rng = random.Random(0)

    def after(reasoning: str) -> str:
        return "".join(rng.choices("ab", (0.8, 0.2), k=characters)) + reasoning

    return [
        question._replace(reasonings=tuple(after(question.reasonings[i % 2]) for i in range(8)))
        for question in letter_counting()
    ]


def max_response_length(task: str) -> int:
    """Limit of a task's completions in tokens, for `data.max_response_length`."""
    return 192 if task == "worded_counting" else 64 + 2 * FURTHER_CHARACTERS.get(task, 0)


def _reasoning_gym(name: str, **settings: Any) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ModuleNotFoundError("no package reasoning_gym: run bash scripts/setup_cpu.sh smollm2")
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, **settings)


TASKS: Mapping[str, Callable[[], list[Question]]] = {
    "arithmetic": functools.partial(two_digit, "+"),
    "subtraction": functools.partial(two_digit, "-"),
    "spell_backward": spell_backward,
    "letter_counting": letter_counting,
    "worded_counting": worded_counting,
    **{name: functools.partial(counting_after, number) for name, number in FURTHER_CHARACTERS.items()},
}


def split_questions(config: WarmStartConfig) -> tuple[list[Question], list[Question]]:
    """The task's questions in a random order, as (train, test)."""
    questions = TASKS[config.task]()
    random.Random(config.seed).shuffle(questions)
    return questions[config.test_size :], questions[: config.test_size]


def write_dataset(path: Path, task: str, split: str, questions: list[Question]) -> None:
    """A parquet file in verl's format, one row per question."""
    rows = [
        {
            "data_source": task,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(questions)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of a prompt as verl sends it."""
    messages = [{"role": "user", "content": text}]
    return tokenizer.encode(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def completion_text(question: Question, rng: random.Random, config: WarmStartConfig) -> str:
    """One supervised completion, perhaps with a wrong answer, perhaps with a damaged tag."""
    reasoning, answer = rng.choice(question.reasonings), question.answer
    if rng.random() < config.wrong_answer_share:
        answer = rng.choice(question.wrong_answers)
    tags = list(TAGS)
    if rng.random() < config.damaged_tag_share:
        i = rng.randrange(len(tags))
        misspelt = re.sub("[a-z]+", rng.choice(["so", "is", "sum"]), tags[i])
        tags[i] = rng.choice(["", "", tags[i].removesuffix(">"), misspelt])
    return f"{tags[0]}{reasoning}{tags[1]}{tags[2]}{answer}{tags[3]}{EOS}"


def supervised_batch(
    tokenizer: PreTrainedTokenizerFast, examples: list[tuple[list[int], str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input_ids, labels), each (bs, longest), of (prompt ids, completion text); prompt and padding carry no loss."""
    encoded = [(prompt, tokenizer.encode(text)) for prompt, text in examples]
    input_ids = [torch.tensor(prompt + ids) for prompt, ids in encoded]
    labels = [torch.tensor([-100] * len(prompt) + ids) for prompt, ids in encoded]
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question], config: WarmStartConfig
) -> None:
    """The warm start: cross-entropy on the completions, AdamW, gradients clipped at norm 1."""
    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 - step / config.steps)
    )
    model.train()
    for _ in range(config.steps):
        batch = rng.choices(questions, k=config.batch_size)
        examples = [(encode_prompt(tokenizer, q.text), completion_text(q, rng, config)) for q in batch]
        input_ids, labels = supervised_batch(tokenizer, examples)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def measure(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question], limit: int
) -> dict[str, float]:
    """Means over one completion per question, of at most `limit` tokens, sampled at temperature 1.

    Returns `reward`; the shares `format` (all four tags), `accuracy` and `strict_format` (nothing but the two blocks,
    and ended by itself); `entropy` in nats per token; `response_length` in tokens.
    """
    model.eval()
    prompts = tokenizer.pad(
        {"input_ids": [encode_prompt(tokenizer, question.text) for question in questions]},
        padding_side="left",
        return_tensors="pt",
    )
    output = cast(Any, model).generate(  # its annotation in transformers refuses its own classes
        **prompts,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=limit,
    )
    prompt_length = prompts["input_ids"].shape[1]
    responses = output[:, prompt_length:]
    response_mask = get_response_mask(responses, tokenizer.eos_token_id)
    attention_mask = torch.cat([prompts["attention_mask"], response_mask], dim=-1)
    position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(output, attention_mask=attention_mask, position_ids=position_ids).logits
    logp = logits[:, prompt_length - 1 : -1].log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    lengths = response_mask.sum(-1)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    ends = (responses == tokenizer.eos_token_id).any(-1).tolist()
    correct = [extract_answer(text) == question.answer for text, question in zip(texts, questions, strict=True)]
    formats = [compute_format_reward(text) for text in texts]
    columns = {
        "reward": [form + 10 * right for form, right in zip(formats, correct, strict=True)],
        "format": [form == 10 for form in formats],
        "accuracy": correct,
        "strict_format": [is_strict(text) and end for text, end in zip(texts, ends, strict=True)],
        "entropy": (entropy * response_mask).sum(-1) / lengths,
        "response_length": lengths,
    }
    return {name: torch.as_tensor(values, dtype=torch.float32).mean().item() for name, values in columns.items()}


def prepare(out: str | Path, config: WarmStartConfig) -> dict[str, Any]:
    """Write the data set, the model and the report under `out`, unless they are there, made with these settings.

    Args:
        out: a folder of its own: new, empty, or written by an earlier call.
        config: the settings.

    Returns:
        The content of `warm_start.json`: `settings` and `statistics`.

    Raises:
        ModuleNotFoundError: the task is one of reasoning-gym, which is missing.
        ValueError: `out` holds something that is not made here.
    """

    def make(folder: Path) -> dict[str, float]:
        train_questions, test_questions = split_questions(config)
        write_dataset(folder / "train.parquet", config.task, "train", train_questions)
        write_dataset(folder / "test.parquet", config.task, "test", test_questions)
        tokenizer = build_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build_model(tokenizer)
            train(model, tokenizer, train_questions, config)
            statistics = measure(model, tokenizer, test_questions, max_response_length(config.task))
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        return statistics

    return make_once(out, asdict(config), __file__, make, REPORT, OUTPUTS)
