"""⟨H⟩_ini as the paper measures it, on a tiny random model."""

import json
import math
import re
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gtpo_verl.cli import main
from gtpo_verl.tools import measure_initial_entropy as measure
from recipes.tasks.tiny import build_model, build_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    """A random model whose own generation settings, like Qwen2.5's, narrow the distribution."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(tokenizer)
    model.generation_config.update(do_sample=True, temperature=0.1, top_k=2, top_p=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"{'1' * (1 + i % 3)}+{i}="}]} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    return tmp_path / "prompts.parquet"


def test_the_initial_entropy_is_sampled_from_the_whole_distribution_at_temperature_1(tiny_model, prompts, monkeypatch):
    settings = []
    sample_entropies = measure.sample_entropies

    def noting(model, *args):
        settings.append(model.generation_config)
        return sample_entropies(model, *args)

    monkeypatch.setattr(measure, "sample_entropies", noting)
    measured = measure.measure_initial_entropy(str(tiny_model), prompts, 10, 12, batch_size=4, seed=0, template={})
    assert (measured.completions, measured.prompts, len(settings)) == (10, 10, 3)
    for used in settings:
        assert used.do_sample and (used.temperature, used.top_k, used.top_p) == (1.0, 0, 1.0)
        assert used.repetition_penalty == 1.0
    # A random model is all but uniform over its 71 tokens.
    assert math.log(71) - 0.6 < measured.value < math.log(71)


@pytest.mark.parametrize("prompt", [[1], [None], ["a role"]], ids=["numbers", "nulls", "texts"])
def test_prompts_that_are_lists_of_something_else_are_named(tmp_path, prompt):
    pq.write_table(pa.table({"prompt": [prompt]}), tmp_path / "prompts.parquet")
    with pytest.raises(ValueError, match="does not hold chat messages"):
        measure.read_prompts(tmp_path / "prompts.parquet", 1)


def test_the_recorded_entropies_are_those_of_a_second_pass(tiny_model, prompts):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    model.generation_config.update(temperature=1.0, top_k=0, top_p=1.0)
    seen = {}
    generate = model.generate

    def noting(**kwargs):
        seen["prompt"] = kwargs["input_ids"]
        seen["sequences"] = generate(**kwargs)
        return seen["sequences"]

    model.generate = noting
    torch.manual_seed(1)
    messages = measure.read_prompts(prompts, 6)
    entropies, lengths = measure.sample_entropies(model, tokenizer, messages, max_response_length=40)
    assert lengths.min() < 40  # some completions end by themselves
    for row, (entropy, length) in enumerate(zip(entropies, lengths.tolist(), strict=True)):
        width = seen["prompt"].shape[1]
        ids = seen["sequences"][row, : width + length]
        real = ids[:width] != tokenizer.pad_token_id
        ids = torch.cat([ids[:width][real], ids[width:]])
        assert length == 40 or ids[-1] == tokenizer.eos_token_id
        probabilities = model(ids[None]).logits[0, int(real.sum()) - 1 : -1].softmax(-1)
        torch.testing.assert_close(entropy, torch.special.entr(probabilities).sum(-1).mean(), rtol=1e-4, atol=1e-4)


TEMPLATE_KEY = "data.apply_chat_template_kwargs"


def test_the_prompts_are_those_of_a_run_with_the_same_arguments_of_the_chat_template(
    tiny_model, prompts, tmp_path, capsys
):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template += "{% if not (thinking | default(true)) %}<reasoning></reasoning>{% endif %}"
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    command = ["initial-entropy", "--model", str(tmp_path / "model"), "--data", str(prompts), "--samples", "4"]
    command += ["--max-response-length", "8", "--"]

    def measured(*overrides):
        assert main([*command, *overrides]) == 0
        return capsys.readouterr().out

    without = measured(f"+{TEMPLATE_KEY}.thinking=False")
    assert without == measured(f"{TEMPLATE_KEY}={{thinking:true}}", f"++{TEMPLATE_KEY}.thinking=false") != measured()
    assert measured(f"+{TEMPLATE_KEY}.thinking=True") == measured()


@pytest.mark.parametrize("override", ["seed=1", f"{TEMPLATE_KEY}.thinking=[", f"{TEMPLATE_KEY}s.a=1"])
def test_other_overrides_than_arguments_of_the_chat_template_are_an_error(tiny_model, prompts, capsys, override):
    command = ["initial-entropy", "--model", str(tiny_model), "--data", str(prompts), "--samples", "4", "--", override]
    assert main(command) == 2 and TEMPLATE_KEY in capsys.readouterr().err


def same_entropies(model, tokenizer, prompts, *_):
    return torch.ones(len(prompts)), torch.ones(len(prompts))


def test_a_completion_ends_at_any_token_that_ends_it_in_the_rollout(tiny_model, prompts, tmp_path, monkeypatch):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    ends = []

    def sample(model, tokenizer, prompts, *_):
        ends.extend(model.generation_config.eos_token_id)
        return same_entropies(model, tokenizer, prompts)

    monkeypatch.setattr(measure, "sample_entropies", sample)
    assert main(["initial-entropy", "--model", str(model), "--data", str(prompts), "--samples", "2"]) == 0
    assert ends == sorted([5, 7, AutoTokenizer.from_pretrained(tiny_model).eos_token_id])


def test_more_samples_than_rows_are_an_error(tiny_model, prompts, capsys):
    assert main(["initial-entropy", "--model", str(tiny_model), "--data", str(prompts), "--samples", "100"]) == 2
    assert "has 12 rows" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"no parquet", None])
def test_a_file_without_prompts_is_named(tiny_model, tmp_path, capsys, content):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"messages": [1]}), path)
    if content:
        path.write_bytes(content)
    assert main(["initial-entropy", "--model", str(tiny_model), "--data", str(path)]) == 2
    assert re.search(f"--data {path}: not .*parquet .*column prompt", capsys.readouterr().err)


def test_the_command_prints_the_value_its_spread_and_the_decision_without_hydra_too(
    tiny_model, prompts, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "hydra", None)  # OpenRLHF and TRL bring none
    arguments = ["--model", str(tiny_model), "--data", str(prompts), "--samples", "4", "--max-response-length", "8"]
    assert main(["initial-entropy", *arguments]) == 0
    value, spread, decision = capsys.readouterr().out.splitlines()
    assert value.startswith("initial_entropy=") and math.log(2) < float(value.split("=")[1]) < math.log(71)
    (deviation,) = re.findall(r"^standard deviation .*: (\d+\.\d+) nats per token$", spread)
    assert float(deviation) > 0
    assert decision.startswith("completion filter off: ")


def test_a_machine_without_a_gpu_leaves_the_measurement_to_the_cluster_that_has_some(
    tiny_model, prompts, monkeypatch, capsys
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert main(["initial-entropy", "--model", str(tiny_model), "--data", str(prompts), "--samples", "2"]) == 2
    said = capsys.readouterr().err
    assert "RAY_ADDRESS=head:6379" in said and "ray job submit --entrypoint-num-gpus=1" in said


def test_prompts_are_padded_on_the_left_and_by_the_eos_of_a_model_without_a_pad_token(
    tiny_model, prompts, tmp_path, monkeypatch
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": None}))
    seen = []

    def sample(model, tokenizer, prompts, *_):
        seen.append((tokenizer.padding_side, tokenizer.pad_token))
        return same_entropies(model, tokenizer, prompts)

    monkeypatch.setattr(measure, "sample_entropies", sample)
    assert main(["initial-entropy", "--model", str(model), "--data", str(prompts), "--samples", "2"]) == 0
    assert seen == [("left", build_tokenizer().eos_token)]


def test_a_cpu_run_measures_beside_a_ray_cluster(tiny_model, prompts, monkeypatch):
    monkeypatch.setattr(measure, "sample_entropies", same_entropies)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    assert main(["initial-entropy", "--model", str(tiny_model), "--data", str(prompts), "--samples", "2"]) == 0
