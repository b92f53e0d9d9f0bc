"""The tiny tasks: their tokenizer, their data sets, their warm start and the cache around them."""

import json
import random
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.reward.score import TAGS, compute_score, extract_answer
from recipes.tasks import tiny
from recipes.tasks.tiny import WarmStartConfig, completion_text, prepare, two_digit
from studies.questions import TASKS, max_response_length

SHORT = WarmStartConfig(seed=3, steps=5, batch_size=4, test_size=8)
SUM = next(question for question in two_digit() if question.text == "47+85=")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "out"
    prepare(path, SHORT)
    return path


@pytest.fixture(scope="module")
def tokenizer(out):
    """As verl loads it; transformers rebuilds it as its own class for Qwen2."""
    return AutoTokenizer.from_pretrained(out / "model")


@pytest.fixture
def calls(monkeypatch):
    """The settings of every warm start from here on, none of which trains."""
    seen = []
    monkeypatch.setattr(tiny, "train", lambda model, tokenizer, questions, config: seen.append(config))
    return seen


def rows(out, split):
    return pq.read_table(out / f"{split}.parquet").to_pylist()


@pytest.fixture(params=TASKS, scope="module")
def task(request):
    return request.param


@pytest.fixture(scope="module")
def questions(task):
    """200 questions of one task."""
    if "spell" in task or "counting" in task:
        pytest.importorskip("reasoning_gym")
    return random.Random(0).sample(TASKS[task](), 200)


def test_decoding_gives_the_text_back(tokenizer, questions):
    rng = random.Random(0)
    texts = [text for question in questions for text in (question.text, completion_text(question, rng, SHORT))]
    texts += ["7 + 5 = 12,\nso the answer is (12)!", " </ answer > ", "reasoninging"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_tag_is_several_tokens_inside_a_completion_too(tokenizer):
    pieces = {tag: tokenizer.convert_ids_to_tokens(tokenizer.encode(tag)) for tag in TAGS}
    assert pieces == {
        "<reasoning>": ["<", "reason", "ing", ">"],
        "</reasoning>": ["</", "reason", "ing", ">"],
        "<answer>": ["<", "answer", ">"],
        "</answer>": ["</", "answer", ">"],
    }
    apart = [tokenizer.encode(part) for part in (*TAGS[:2], TAGS[2], "132", TAGS[3])]
    assert tokenizer.encode("<reasoning></reasoning><answer>132</answer>") == sum(apart, [])


def test_test_prompts_are_not_among_the_training_prompts(out):
    prompts = {split: {row["prompt"][0]["content"] for row in rows(out, split)} for split in ("train", "test")}
    assert len(prompts["test"]) == SHORT.test_size
    assert len(prompts["train"]) == 8100 - SHORT.test_size
    assert not prompts["train"] & prompts["test"]


def test_a_completion_takes_half_of_the_room_at_most_and_a_prompt_fits_the_recipe(tokenizer, task, questions):
    rng = random.Random(0)
    lengths = [len(tokenizer.encode(completion_text(question, rng, SHORT))) for question in questions]
    assert sum(lengths) / len(lengths) <= max_response_length(task) / 2
    assert max(len(tiny.encode_prompt(tokenizer, question.text)) for question in questions) <= 16


def test_a_tasks_own_questions_are_written(tmp_path, calls):
    prepare(tmp_path / "out", replace(SHORT, task="subtraction"), TASKS["subtraction"])
    answers = {question.text: question.answer for question in TASKS["subtraction"]()}
    for row in rows(tmp_path / "out", "test"):
        (message,) = row["prompt"]
        assert (row["data_source"], message["role"]) == ("subtraction", "user")
        assert row["reward_model"] == {"style": "rule", "ground_truth": answers[message["content"]]}


def test_an_unspoilt_example_has_the_full_reward(questions):
    rng, config = random.Random(0), replace(SHORT, damaged_tag_share=0.0, wrong_answer_share=0.0)
    for question in questions:
        text = completion_text(question, rng, config).removesuffix("<|im_end|>")
        score = compute_score("tiny", text, question.answer)
        assert (score["score"], score["strict"]) == (20, 1)


def test_a_damaged_tag_costs_the_format_reward_and_a_wrong_answer_the_accuracy(questions):
    rng = random.Random(0)
    damaged = replace(SHORT, damaged_tag_share=1.0, wrong_answer_share=0.0)
    wrong = replace(SHORT, damaged_tag_share=0.0, wrong_answer_share=1.0)
    for question in questions:
        assert compute_score("tiny", completion_text(question, rng, damaged), question.answer)["format"] == 1
        text = completion_text(question, rng, wrong)
        assert compute_score("tiny", text, question.answer)["format"] == 10
        assert extract_answer(text) in set(question.wrong_answers) - {question.answer}


def test_prompt_and_padding_carry_no_loss(tokenizer):
    prompt = tiny.encode_prompt(tokenizer, SUM.text)
    input_ids, labels = tiny.supervised_batch(tokenizer, [(prompt, "132"), (prompt, "13245")])
    pad = tokenizer.pad_token_id
    assert input_ids.tolist() == [[*prompt, *tokenizer.encode("132"), pad, pad], [*prompt, *tokenizer.encode("13245")]]
    ignored = [-100] * len(prompt)
    assert labels.tolist() == [[*ignored, *tokenizer.encode("132"), -100, -100], [*ignored, *tokenizer.encode("13245")]]


def test_a_short_warm_start_is_written_in_hugging_face_format(out, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert 0.3e6 < model.num_parameters() < 0.5e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert model.config.vocab_size == len(tokenizer)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    generation_config = json.loads((out / "model" / "generation_config.json").read_text())
    generation_config.pop("transformers_version")
    assert generation_config == ids  # and no sampling default


def test_training_lowers_the_loss(tokenizer):
    torch.manual_seed(0)
    model = tiny.build_model(tokenizer)
    rng = random.Random(1)
    examples = [(tiny.encode_prompt(tokenizer, SUM.text), completion_text(SUM, rng, SHORT)) for _ in range(4)]
    input_ids, labels = tiny.supervised_batch(tokenizer, examples)
    before = model(input_ids=input_ids, labels=labels).loss.item()
    tiny.train(model, tokenizer, [SUM], replace(SHORT, steps=20))
    assert model(input_ids=input_ids, labels=labels).loss.item() < before - 0.5


def test_the_seed_decides_weights_and_prompts(tmp_path):
    def made(name, seed):
        prepare(tmp_path / name, replace(SHORT, seed=seed, steps=2, test_size=1))
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / name / "model").lm_head.weight
        return weights, rows(tmp_path / name, "train")

    weights, prompts = made("a", 0)
    same_weights, same_prompts = made("b", 0)
    other_weights, other_prompts = made("c", 1)
    assert prompts == same_prompts != other_prompts
    torch.testing.assert_close(weights, same_weights)
    assert not torch.allclose(weights, other_weights)


def test_the_callers_random_state_is_left_alone(tmp_path, calls):
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    prepare(tmp_path / "out", SHORT)
    assert torch.equal(torch.rand(3), expected)
