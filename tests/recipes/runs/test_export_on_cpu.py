"""Exports of checkpoints that verl's own checkpoint manager wrote, loaded and held against the model that was saved."""

import importlib.util
import json
import re
import shutil
from threading import Thread

import pytest
import torch
from own_process import run_python
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from recipes.__main__ import main
from recipes.runs import export
from recipes.tasks.tiny import build_model, build_tokenizer


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def base(tmp_path):
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    model = build_model(tokenizer)
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def save(process_group, base, tmp_path):
    """A checkpoint of the model as verl's FSDP2 engine saves it, and the model's log-probs."""

    def saved(lora=False, **config):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        if lora:
            model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"]))
        with torch.no_grad():
            for weight in model.parameters():
                if weight.requires_grad:
                    weight.add_(0.02 * torch.randn_like(weight)).copy_(weight.bfloat16())
        expected = log_probs(model)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
        contents = {"load_contents": ["model"], "save_contents": ["model"], **config}
        tokenizer = AutoTokenizer.from_pretrained(base)
        checkpoint = tmp_path / "run/checkpoints/global_step_3"
        FSDPCheckpointManager(model, processing_class=tokenizer, checkpoint_config=contents).save_checkpoint(
            str(checkpoint / "actor")
        )
        return checkpoint, expected

    return saved


@torch.no_grad()
def log_probs(model):
    tokens = torch.arange(3, 43).reshape(2, 20)
    return model.float().eval()(tokens).logits.log_softmax(-1)


def load(folder):
    AutoTokenizer.from_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_an_exported_model_has_the_log_probs_of_the_trained_one(save, tmp_path):
    checkpoint, expected = save()
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    torch.testing.assert_close(log_probs(load(tmp_path / "out")), expected, rtol=0, atol=1e-5)


def test_an_exported_adapter_names_the_model_that_the_run_was_started_with(save, base, tmp_path):
    checkpoint, expected = save(lora=True)
    (tmp_path / "run/settings.json").write_text(json.dumps({"actor_rollout_ref.model.path": str(base)}))
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 0
    torch.testing.assert_close(log_probs(load(tmp_path / "out")), expected, rtol=0, atol=1e-5)
    assert not list((tmp_path / "out").glob("model*"))


IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

model, adapter, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model, dtype="float32", max_model_len=64, enforce_eager=True, enable_lora=bool(adapter), max_lora_rank=8)
outputs = llm.generate(
    [{"prompt_token_ids": row} for row in tokens],
    SamplingParams(max_tokens=1, prompt_logprobs=0),
    lora_request=LoRARequest("gtpo", 1, adapter) if adapter else None,
)
shown = [[step[token].logprob for step, token in zip(x.prompt_logprobs[1:], x.prompt_token_ids[1:])] for x in outputs]
print("shown", json.dumps(shown))
"""


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="bash scripts/setup_cpu.sh vllm installs vLLM")
@pytest.mark.parametrize("lora", [False, True])
def test_vllm_loads_an_export_and_finds_the_log_probs_of_the_trained_model(save, base, tmp_path, lora):
    checkpoint, expected = save(lora=lora)
    out = tmp_path / "out"
    assert main(["export", str(checkpoint), str(out), *(["--base", str(base)] if lora else [])]) == 0
    tokens = torch.arange(3, 43).reshape(2, 20)
    model, adapter = (base, out) if lora else (out, "")
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    said = run_python(IN_VLLM, model, adapter, json.dumps(tokens.tolist()), **variables).stdout
    (line,) = [line for line in said.splitlines() if line.startswith("shown")]
    found = torch.tensor(json.loads(line.removeprefix("shown")))
    own = expected[:, :-1].gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(found, own, rtol=0, atol=2e-2 if lora else 1e-4)


@pytest.mark.parametrize("save_lora_only", [False, True])
def test_an_adapter_whose_base_is_not_known_needs_it(save, base, tmp_path, capsys, save_lora_only):
    checkpoint, expected = save(lora=True, save_lora_only=save_lora_only)
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "give --base" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main(["export", str(checkpoint), str(tmp_path / "out"), "--base", str(base)]) == 0
    torch.testing.assert_close(log_probs(load(tmp_path / "out")), expected, rtol=0, atol=1e-5)


def test_an_export_is_kept_for_its_checkpoint_and_never_overwritten_by_another(save, tmp_path, capsys):
    checkpoint, _ = save()
    command = ["export", str(checkpoint), str(tmp_path / "out")]
    assert main(command) == 0
    written = (tmp_path / "out/model.safetensors").stat().st_mtime_ns
    assert main(command) == 0
    assert (tmp_path / "out/model.safetensors").stat().st_mtime_ns == written
    shard = checkpoint / "actor/model_world_size_1_rank_0.pt"
    shard.touch()  # the run has saved this step again
    assert main(command) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'out'}" in err and "saved again" in err
    assert (tmp_path / "out/model.safetensors").stat().st_mtime_ns == written


def test_of_two_at_once_one_exports_and_the_other_takes_its_result(save, tmp_path, monkeypatch):
    checkpoint, _ = save()
    command = ["export", str(checkpoint), str(tmp_path / "out")]
    merge, begun, other = export._merge_shards, [], Thread(target=lambda: begun.append(main(command)))

    def start_the_other_and_merge(*args):
        begun.append("merge")
        if not other.ident:
            other.start()
        merge(*args)

    monkeypatch.setattr(export, "_merge_shards", start_the_other_and_merge)
    assert main(command) == 0
    other.join()
    assert begun == ["merge", 0]


def test_an_export_within_its_checkpoint_is_kept(save, capsys):
    checkpoint, _ = save()
    shards = str(checkpoint / "actor")  # as verl's SFT trainer lays a checkpoint out
    assert main(["export", shards]) == main(["export", shards, f"{shards}/mine"]) == main(["export", shards]) == 0
    (checkpoint / "actor/exported.partial").mkdir()
    (checkpoint / "actor/exported.partial/model.safetensors").touch()  # of an export that was interrupted
    assert main(["export", shards, f"{shards}/mine"]) == 0
    assert (checkpoint / "actor/exported/model.safetensors").exists()
    moved = checkpoint.rename(checkpoint.with_name("moved"))  # which carries its export along
    assert main(["export", str(moved / "actor")]) == 0


def test_a_folder_without_a_checkpoint_is_an_error(base, tmp_path, capsys):
    assert main(["export", str(base), str(tmp_path / "out")]) == 2
    assert re.search(f"{base} is not .*checkpoint .*global_step_N", capsys.readouterr().err)


def test_a_checkpoint_of_megatron_without_a_file_is_named(tmp_path, capsys):
    (tmp_path / "global_step_3/actor/model/huggingface").mkdir(parents=True)
    assert main(["export", str(tmp_path / "global_step_3"), str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'global_step_3/actor'} holds no file" in capsys.readouterr().err


def test_a_checkpoint_that_lacks_a_shard_is_an_error(save, tmp_path, capsys):
    checkpoint, _ = save()
    (checkpoint / "actor/model_world_size_1_rank_0.pt").unlink()
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    assert "model_world_size_1_rank_0.pt" in capsys.readouterr().err


def test_megatrons_model_in_hugging_face_format_is_taken_as_it_is(base, tmp_path):
    shutil.copytree(base, tmp_path / "global_step_3/actor/model/huggingface")
    assert main(["export", str(tmp_path / "global_step_3"), str(tmp_path / "out")]) == 0
    torch.testing.assert_close(log_probs(load(tmp_path / "out")), log_probs(load(base)), rtol=0, atol=0)


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "model.path"])
def test_the_base_of_an_adapter_is_named_by_either_trainers_settings(tmp_path, key):
    (tmp_path / "settings.json").write_text(json.dumps({key: "'/x/a, b'"}))
    assert export._name_of_base(tmp_path / "checkpoints/global_step_3") == "/x/a, b"
