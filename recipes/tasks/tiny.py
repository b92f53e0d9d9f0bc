"""A toy task, and a model of 0.4 M parameters with a warm start for it: small enough for two CPU cores.

The task is two-digit addition; a caller may give other questions. `prepare` writes, for `python3 -m recipes make-task
arithmetic`:

- `DIR/model`: a Qwen2 in Hugging Face format with its tokenizer, trained for a few hundred supervised steps on
  `<reasoning>…</reasoning><answer>…</answer>`, the paper's format (arXiv:2508.03772, Sec. 6). Some of those examples
  have a damaged tag and some a wrong answer, so that reinforcement learning has something to repair;
- `DIR/train.parquet`, `DIR/test.parquet`: prompts in verl's format, test disjoint from train;
- `DIR/warm_start.json`: the settings of the warm start.

What GTPO needs is kept: every tag is several tokens, the reward is the paper's, the mean entropy lies far below ln 2,
above which GTPO drops completions, and a completion has room for twice its natural length of 30 tokens. Unlike in the
paper there is no system prompt, because this model knows nothing but this task.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gtpo_verl.reward.score import TAGS
from recipes.tasks.make_once import make_once

# Named as in Qwen, since transformers' tokenizer class for Qwen2 adds <|endoftext|> to a vocabulary without it.
PAD = "<|endoftext|>"
EOS = "<|im_end|>"
# The chat template's roles, which are not Qwen's.
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
RECORD = "warm_start.json"
OUTPUTS = ("model", "train.parquet", "test.parquet")


class Question(NamedTuple):
    """A prompt, the right answer, the ways to reason towards it, and answers that are wrong."""

    text: str
    answer: str
    reasonings: tuple[str, ...]
    wrong_answers: tuple[str, ...]


MakeQuestions: TypeAlias = Callable[[], list[Question]]


@dataclass(frozen=True)
class WarmStartConfig:
    """The settings of `prepare`: a folder that was made with the same ones is left as it is.

    Args:
        seed: of the split of the prompts, the training examples and the initial weights.
        task: its name, verl's `data_source`.
        steps: supervised steps.
        batch_size: examples per step.
        lr: learning rate of AdamW, multiplied by a linear warm-up over 50 steps and by a linear decay to 0 over all
            steps; with the default number of steps it peaks at 0.8 of this.
        damaged_tag_share: share of the examples with a missing, unclosed or misspelt tag.
        wrong_answer_share: share of the examples whose answer is wrong.
        test_size: prompts held out for testing, of 8,100 by default; the others are for training.
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
    """Make a byte-level BPE like Qwen2's, of 71 tokens: single digits and letters, and the parts of the four tags.

    Text of these characters, and of punctuation, is the same after encoding and decoding. Capital letters and other
    symbols have no token and are dropped.
    """
    merges = ["r e", "a s", "re as", "o n", "reas on", "i n", "in g", "a n", "s w", "an sw", "e r", "answ er", "< /"]
    newline = "Ċ"
    space = "Ġ"
    tokens = [PAD, EOS, USER, ASSISTANT]
    tokens += "0123456789+-*/=<>.,:;?!()'"
    tokens += [newline, space]
    tokens += "abcdefghijklmnopqrstuvwxyz"
    tokens += [merge.replace(" ", "") for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split()) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
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
    """Make a Qwen2 of two layers and 0.4 M float32 parameters, initialised from torch's current random state."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,  # vLLM on CPU takes a head size of 32, not of 16
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


def two_digit(sign: str = "+") -> list[Question]:
    """Make every sum of two two-digit numbers, or with `-` every difference that is not negative."""
    questions = []
    for a in range(10, 100):
        largest = 99 if sign == "+" else a
        for b in range(10, largest + 1):
            questions.append(_add(a, b) if sign == "+" else _subtract(a, b))
    return questions


def _add(a: int, b: int) -> Question:
    tens_a, units_a = divmod(a, 10)
    tens_b, units_b = divmod(b, 10)
    units = units_a + units_b
    carry = units // 10
    tens = tens_a + tens_b + carry
    return _question(f"{a}+{b}", a + b, f"{units_a}+{units_b}={units}", f"{tens_a}+{tens_b}{_signed(carry)}={tens}")


def _subtract(a: int, b: int) -> Question:
    tens_a, units_a = divmod(a, 10)
    tens_b, units_b = divmod(b, 10)
    # As on paper: 42-17 is 2-7=5, which borrows, and 4-1-1=2.
    units = (units_a - units_b) % 10
    carry = -1 if units_a < units_b else 0
    tens = tens_a - tens_b + carry
    return _question(f"{a}-{b}", a - b, f"{units_a}-{units_b}={units}", f"{tens_a}-{tens_b}{_signed(carry)}={tens}")


def _signed(carry: int) -> str:
    """Return how a carry is written behind a sum: `+1`, `-1`, or nothing for 0."""
    return f"{carry:+}" if carry else ""


def _question(expression: str, answer: int, units: str, tens: str) -> Question:
    """Make a question whose reasoning is about the units first, and then about the tens with the carry."""
    errors = (-20, -11, -10, -9, -1, 1, 9, 10, 11, 20)
    return Question(
        text=f"{expression}=",
        answer=str(answer),
        reasonings=(f"{units},{tens}", f"{units};{tens}"),
        wrong_answers=tuple(str(answer + error) for error in errors),
    )


def split_questions(
    config: WarmStartConfig, make_questions: MakeQuestions = two_digit
) -> tuple[list[Question], list[Question]]:
    """Return the task's questions in a random order, as (train, test)."""
    questions = make_questions()
    random.Random(config.seed).shuffle(questions)
    return questions[config.test_size :], questions[: config.test_size]


def write_dataset(path: Path, task: str, split: str, questions: list[Question]) -> None:
    """Write a parquet file in verl's format, one row per question."""
    rows = []
    for index, question in enumerate(questions):
        row = {
            "data_source": task,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": split, "index": index},
        }
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), path)


def encode_prompt(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the token ids of a prompt as verl sends it."""
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(prompt)


def completion_text(question: Question, rng: random.Random, config: WarmStartConfig) -> str:
    """Return a supervised completion, perhaps with a wrong answer, perhaps with a damaged tag."""
    reasoning = rng.choice(question.reasonings)
    answer = question.answer
    if rng.random() < config.wrong_answer_share:
        answer = rng.choice(question.wrong_answers)
    tags = list(TAGS)
    if rng.random() < config.damaged_tag_share:
        i = rng.randrange(len(tags))
        misspelt = re.sub("[a-z]+", rng.choice(["so", "is", "sum"]), tags[i])
        missing = ""  # twice as likely as the others
        unclosed = tags[i].removesuffix(">")
        tags[i] = rng.choice([missing, missing, unclosed, misspelt])
    return f"{tags[0]}{reasoning}{tags[1]}{tags[2]}{answer}{tags[3]}{EOS}"


def supervised_batch(
    tokenizer: PreTrainedTokenizerFast, examples: list[tuple[list[int], str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (input_ids, labels), each (bs, longest), for examples of prompt ids and completion text.

    Prompt and padding carry no loss. Padding is on the right, so that causal attention needs no mask.
    """
    input_ids = []
    labels = []
    for prompt_ids, completion in examples:
        completion_ids = tokenizer.encode(completion)
        without_loss = [-100] * len(prompt_ids)
        input_ids.append(torch.tensor(prompt_ids + completion_ids))
        labels.append(torch.tensor(without_loss + completion_ids))
    return (
        pad_sequence(input_ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        pad_sequence(labels, batch_first=True, padding_value=-100),
    )


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question], config: WarmStartConfig
) -> None:
    """Train the warm start: cross-entropy on the completions, AdamW, gradients clipped at norm 1."""

    def lr_factor(step: int) -> float:
        warm_up = min(1.0, (step + 1) / 50)
        decay = 1 - step / config.steps
        return warm_up * decay

    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor)
    model.train()
    for _ in range(config.steps):
        examples = []
        for question in rng.choices(questions, k=config.batch_size):
            examples.append((encode_prompt(tokenizer, question.text), completion_text(question, rng, config)))
        input_ids, labels = supervised_batch(tokenizer, examples)
        loss = model(input_ids=input_ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def prepare(
    out: str | Path,
    config: WarmStartConfig,
    make_questions: MakeQuestions = two_digit,
    sources: Sequence[str] = (),
) -> None:
    """Write the data set, the model and the settings under `out`, unless it holds them, made with these settings.

    Args:
        out: the folder.
        config: the settings.
        make_questions: makes the questions of `config.task`.
        sources: further files on which the result depends, such as the module of `make_questions`: a change in one
            makes everything anew.

    Raises:
        ValueError: `out` holds files that `prepare` did not write.
    """

    def make(folder: Path) -> None:
        train_questions, test_questions = split_questions(config, make_questions)
        write_dataset(folder / "train.parquet", config.task, "train", train_questions)
        write_dataset(folder / "test.parquet", config.task, "test", test_questions)
        tokenizer = build_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            model = build_model(tokenizer)
            train(model, tokenizer, train_questions, config)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")

    make_once(out, asdict(config), [__file__, *sources], make, RECORD, OUTPUTS)
