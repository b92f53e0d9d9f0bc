"""What a run of the study starts from: questions, a model after its warm start, and that model's mean entropy.

The tasks of `studies.questions` have the model of 0.4 M parameters (`recipes.tasks.tiny`); `leg_counting` has
SmolLM2-135M-Instruct (`recipes.tasks.smollm2`), trained on a few solutions, a question about one kind of animal or two.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.run.records import atomic_write
from recipes.tasks import smollm2, tiny
from studies import questions
from studies.model import Shape, Weights, load, log_probs, sample
from studies.plan import Start

PAPER_PROMPTS = 100
"""On which the paper measures ⟨H⟩_ini."""


class Asked(NamedTuple):
    """A question as a model reads it, (prompt_length,) token ids, and its right answer."""

    prompt: torch.Tensor
    answer: str


class Task(NamedTuple):
    """A start, of one seed.

    Args:
        train, held_out: the questions.
        tokenizer: of transformers.
        limit: most tokens of a completion.
        shape, weights: the model after its warm start, (1, …) each.
        initial_entropy: ⟨H⟩_ini in nats per token, one completion each of 100 training questions.
        least_reasoning: characters of reasoning without which an answer is not right.
    """

    train: list[Asked]
    held_out: list[Asked]
    tokenizer: Any
    limit: int
    shape: Shape
    weights: Weights
    initial_entropy: float
    least_reasoning: int


def open_task(start: Start, seed: int, outputs: Path) -> Task:
    """Make what a start needs under `outputs`, unless it is there."""
    folder = outputs / f"{start.name}-seed{seed}"
    task = _smollm2(start, seed, folder) if start.is_real else _tiny(start, seed, folder)
    record = folder / "initial_entropy.json"
    if not record.exists():
        atomic_write(record, json.dumps(measure_entropy(task, start.temperature, start.dtype)).encode())
    return task._replace(initial_entropy=json.loads(record.read_text()))


def _tiny(start: Start, seed: int, folder: Path) -> Task:
    settings: dict[str, Any] = questions.WARM_STARTS.get(start.task, {})
    warm = tiny.WarmStartConfig(seed=seed, task=start.task, steps=start.warm_steps, **settings)
    make_questions = questions.TASKS[start.task]
    tiny.prepare(folder / "task", warm, make_questions, [questions.__file__])
    tokenizer = tiny.build_tokenizer()
    train, held_out = (
        [Asked(torch.tensor(tiny.encode_prompt(tokenizer, question.text)), question.answer) for question in split]
        for split in tiny.split_questions(warm, make_questions)
    )
    least_reasoning = questions.FURTHER_CHARACTERS.get(start.task, 0)
    return Task(train, held_out, tokenizer, start.limit, *load(folder / "task/model"), 0.0, least_reasoning)


def _smollm2(start: Start, seed: int, folder: Path) -> Task:
    config = smollm2.Config(seed=seed, animals=start.animals)
    smollm2.prepare(folder / "task", config)
    tokenizer = AutoTokenizer.from_pretrained(folder / "task/model")
    if not (folder / "warm/config.json").exists():
        _warm_start(folder, tokenizer, start)
    train, held_out = (
        [
            Asked(_encode(tokenizer, row["prompt"], True), row["reward_model"]["ground_truth"])
            for row in load_dataset("parquet", data_files=str(folder / f"task/{split}.parquet"), split="train")
        ]
        for split in ("train", "test")
    )
    return Task(train, held_out, tokenizer, start.limit, *load(folder / "warm", start.device), 0.0, 0)


def _encode(tokenizer: Any, messages: list[dict[str, str]], add_generation_prompt: bool) -> torch.Tensor:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False))


def _warm_start(folder: Path, tokenizer: Any, start: Start) -> None:
    """Supervised steps of four solutions each, as recipes/run_sft.sh makes them."""
    rows = load_dataset("parquet", data_files=str(folder / "task/sft_train.parquet"), split="train")
    model = AutoModelForCausalLM.from_pretrained(folder / "task/model", dtype=torch.float32).to(start.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(start.warm_steps):
        optimizer.zero_grad()
        for row in rows.select(range(4 * step, 4 * step + 4)):
            ids = _encode(tokenizer, row["messages"], False).to(start.device)
            first = len(_encode(tokenizer, row["messages"][:-1], True))
            logits = model(ids.unsqueeze(0)).logits[0, first - 1 : -1]
            (F.cross_entropy(logits, ids[first:]) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.save_pretrained(folder / "warm")


def measure_entropy(task: Task, temperature: float, dtype: torch.dtype) -> float:
    """⟨H⟩_ini in nats per token."""
    means = []
    generator = torch.Generator().manual_seed(0)
    questions = random.Random(0).sample(task.train, PAPER_PROMPTS)
    for first in range(0, PAPER_PROMPTS, 25):
        prompts = [asked.prompt for asked in questions[first : first + 25]]
        eos = task.tokenizer.eos_token_id
        (rollouts,) = sample(task.shape, [task.weights], prompts, 1, task.limit, temperature, eos, [generator], dtype)
        with torch.no_grad():
            _, entropy = log_probs(task.shape, task.weights, rollouts, temperature, dtype, 8)
        lengths = torch.tensor([rollout.response_mask.sum() for rollout in rollouts])
        means += (entropy.sum(-1) / lengths).tolist()
    return sum(means) / len(means)
