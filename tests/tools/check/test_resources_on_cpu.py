import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl_config import COMPLETE, verl_config

from gtpo_verl.tools.check import resources
from recipes import __main__ as clones

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def paper_config():
    attention = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
    words = [
        "actor_rollout_ref.model.path=a/model",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n=8",
        "trainer.logger=[console]",
        attention,
    ]
    return verl_config(*words, name="gtpo", folder=ROOT / "recipes/config")


def raises(error):
    raise error


@pytest.fixture
def findings(monkeypatch, tmp_path, paper_config):
    """The findings about a run with these settings on a made-up machine, by subject."""
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda folder: None)

    def found(*settings, gpus=2, cpus=64, missing=(), shared_gb=16, driver=""):
        shared = shutil.disk_usage(tmp_path)._replace(total=int(shared_gb * 1e9))
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: shared)
        monkeypatch.setattr("ray._private.utils.get_num_cpus", lambda: cpus)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus) and not driver)
        monkeypatch.setattr("torch.cuda.init", lambda: raises(RuntimeError(driver)))
        monkeypatch.setattr(resources, "module_spec", lambda name: name not in missing)
        monkeypatch.setattr(resources, "_data_file", lambda *arguments: [])
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        config = paper_config.copy()
        for key, value in OmegaConf.from_dotlist(
            [f"trainer.default_local_dir={tmp_path}/new/checkpoints", *settings]
        ).items():
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        return {finding.subject: finding for finding in resources.findings(config)}

    return found


def test_a_machine_with_all_that_a_run_needs_has_no_problem(findings):
    assert findings() == {}


def test_all_missing_packages_are_installed_by_one_line(findings):
    found = findings(
        "actor_rollout_ref.model.lora_rank=8",
        "trainer.logger=[console,swanlab]",
        missing=("transfer_queue", "vllm", "math_verify", "peft", "swanlab", "wandb"),
    )
    assert found["packages"].remedy == "pip install TransferQueue 'vllm<0.29' math-verify peft swanlab"


def test_without_flash_attn_verls_default_is_a_problem_and_sdpa_is_none(findings):
    attention = "actor_rollout_ref.model.override_config.attn_implementation"
    finding = findings(f"{attention}=flash_attention_2", missing=("flash_attn",))["flash-attn"]
    assert f"+{attention}=sdpa" in finding.remedy
    assert "flash-attn" not in findings(missing=("flash_attn",))  # with sdpa
    assert "flash-attn" not in findings("trainer.device=cpu", missing=("flash_attn",))


def test_megatron_is_all_that_verls_engine_imports(findings):
    settings = "actor_rollout_ref.actor.strategy=megatron"
    finding = findings(settings, missing=("megatron.bridge", "transformer_engine", "flash_attn"))["Megatron"]
    assert finding.message == "no megatron.bridge, transformer_engine, flash_attn" and "uv.lock" in finding.remedy
    assert "sdpa" not in finding.remedy and "Megatron" not in findings(settings)


def test_a_driver_that_is_too_old_for_torch_is_a_problem(findings, tmp_path, capsys):
    finding = findings(driver="The NVIDIA driver on your system is too old (found version 12040).\nUpdate")["driver"]
    assert "12040" in finding.message and "580 or later" in finding.remedy and "CUDA 13" in finding.remedy
    assert clones.main(["smoke", str(tmp_path / "recipe.sh")]) == 2
    assert "12040" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "units", "needed"), [(1, 8, 13), (2, 8, 16), (2, 2, 10)])
def test_cpus_are_counted_as_ray_will_count_them(findings, gpus, units, needed):
    units_key = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    settings = f"trainer.n_gpus_per_node={gpus}", f"{units_key}={units}"
    assert "CPUs" not in findings(*settings, cpus=needed)
    finding = findings(*settings, cpus=needed - 1)["CPUs"]
    assert f"set ray_kwargs.ray_init.num_cpus={needed}" in finding.remedy
    assert f"{units_key}=1" in finding.remedy and units_key not in findings(*settings, cpus=1)["CPUs"].remedy
    assert "CPUs" not in findings(*settings, f"ray_kwargs.ray_init.num_cpus={needed}", cpus=1)


def test_more_gpus_than_the_machine_has_are_a_problem(findings):
    remedy = findings(gpus=1)["GPUs"].remedy
    assert "trainer.n_gpus_per_node" in remedy and remedy.endswith(" 1")
    assert findings(gpus=0)["GPUs"].remedy.endswith("machine with GPUs")


def test_a_run_on_cpus_needs_no_gpu(findings):
    assert "GPUs" not in findings("trainer.device=cpu", gpus=0)


def test_a_containers_64_mb_of_shared_memory_are_a_problem_for_two_gpus(findings):
    assert "--shm-size" in findings(shared_gb=0.064)["shared memory"].remedy
    assert "shared memory" not in findings("trainer.n_gpus_per_node=1", shared_gb=0.064)


@pytest.fixture
def ray_cluster(monkeypatch):
    """Answers of a cluster's head about these nodes, of which those in use are apart from the idle ones."""

    def answer(*nodes, error=None):
        members = [SimpleNamespace(total_resources=lambda node=node: node) for node in nodes]
        status = SimpleNamespace(active_nodes=members[:1], idle_nodes=members[1:])
        monkeypatch.setattr("ray._private.services.canonicalize_bootstrap_address_or_die", lambda address: "head:1")
        monkeypatch.setattr(resources.socket, "create_connection", lambda *args, **kwargs: SimpleNamespace(close=list))
        monkeypatch.setattr(
            "ray.autoscaler.v2.sdk.get_cluster_status", lambda address: raises(error) if error else status
        )

    return answer


def test_a_cluster_is_asked_for_its_nodes_gpus_and_cpus(findings, ray_cluster):
    node = {"GPU": 8.0, "CPU": 32.0}
    settings = "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "data.train_batch_size=64"
    ray_cluster(node, node)
    assert findings(*settings, gpus=0, cpus=1) == {}
    ray_cluster(node, {"CPU": 8.0})
    found = findings(*settings)
    assert re.search("1 of 2 nodes at auto .*8 GPUs, 2 asked", found["Ray cluster"].message)
    assert "RAY_AUTH_MODE=disabled" in found["Ray cluster"].remedy
    assert re.findall(r"\d+", found["CPUs"].message) == ["40", "58"] and found["CPUs"].remedy


def test_a_cluster_that_does_not_answer_is_a_problem(findings, ray_cluster):
    ray_cluster(error=ConnectionError("InvalidAuthToken\nmore"))
    finding = findings("trainer.nnodes=2")["Ray cluster"]
    assert re.fullmatch("not reached .*auto: InvalidAuthToken more", finding.message)  # in one line
    assert "RAY_AUTH_MODE=disabled" in finding.remedy


def test_the_cluster_is_the_one_that_ray_would_join(findings, ray_cluster, monkeypatch):
    key = "ray_kwargs.ray_init.address"
    ray_cluster({"NPU": 8.0, "CPU": 64.0})
    assert findings(f"{key}=head:6379", "trainer.n_gpus_per_node=8", gpus=0, cpus=1) == {}
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda folder: "10.0.0.1:6379")  # of a `ray start` here
    says = findings("trainer.n_gpus_per_node=9")["Ray cluster"].message
    assert re.match(r"0 of 1 nodes at 10\.0\.0\.1:6379 .*9 GPUs, 1 asked", says)
    ray_cluster(error=ConnectionError("gone"))
    finding = findings()["Ray cluster"]
    assert "not reached at 10.0.0.1:6379" in finding.message and f"++{key}=local" in finding.remedy
    assert findings(f"{key}=local") == {} and findings(f"{key}=local", "trainer.nnodes=2")["Ray"].remedy
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda folder: None if folder == "/mine" else "other:1")
    assert findings("ray_kwargs.ray_init._temp_dir=/mine") == {} != findings()


def test_a_number_among_the_variables_of_rays_workers_is_a_problem(findings):
    key = "ray_kwargs.ray_init.runtime_env"
    finding = findings(f"{key}.env_vars.NCCL_IB_DISABLE=1")[key]
    assert "the value 1" in finding.message and r"NAME=\'1\'" in finding.remedy
    assert findings(f"{key}.env_vars.NCCL_IB_DISABLE='1'") == {}
    assert findings(f"{key}.working_dir=[1]")[key].remedy == "correct it"


def test_a_ray_clients_address_is_not_asked():
    (finding,) = resources._cluster(lambda key: None, "ray://head:10001", 1, 8)
    assert finding.advice and not finding.remedy


@pytest.mark.parametrize(
    ("installed", "settings", "is_refused"),
    [
        ("0.29.0", [], True),
        ("0.30.1", ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.merge=True"], True),
        ("0.29.0", ["actor_rollout_ref.model.lora_rank=8"], False),  # adapters have no embeddings
        ("0.28.3", [], False),
        ("0.29.0", ["actor_rollout_ref.rollout.name=sglang"], False),
    ],
)
@pytest.mark.parametrize("config", [{"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_vllm_that_refuses_tied_weights_is_named(
    findings, monkeypatch, tmp_path, config, installed, settings, is_refused
):
    monkeypatch.setattr(resources, "version", lambda name: installed)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = f"actor_rollout_ref.model.path={tmp_path}"
    found = findings(model, *settings)
    assert ("vllm" in found) == is_refused
    if is_refused:
        assert found["vllm"].remedy == "pip install 'vllm<0.29'" and found["vllm"].message.startswith(installed)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert "vllm" not in findings(model, *settings)


def test_a_checkpoint_that_is_not_there_is_a_problem_of_this_machine(findings, tmp_path):
    path = f"trainer.resume_from_path={tmp_path}/global_step_5"
    (finding,) = findings("trainer.resume_mode=resume_path", path).values()
    assert finding.remedy.startswith(f"{path}: no checkpoint")
    (tmp_path / "global_step_5").mkdir()
    assert findings("trainer.resume_mode=resume_path", path) == {} == findings("trainer.resume_mode=auto")


def said_of(*overrides):
    """The findings by subject, on this machine."""
    return {x.subject: x for x in resources.findings(verl_config(*COMPLETE, *overrides))}


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("actor_rollout_ref.model.path={folder}/none", "no model"),
        ("data.train_files={folder}/none.parquet", "no such file"),
        ("data.val_files={folder}/broken.parquet", "no parquet file"),
        ("reward.custom_reward_function.path={folder}/none.py", "no such file"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path={folder}/none.yaml", "no such file"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/none.yaml", "no such file"),
    ],
)
def test_what_the_config_names_must_be_there(tmp_path, setting, says):
    (tmp_path / "broken.parquet").write_text("no")
    setting = setting.format(folder=tmp_path)
    finding = said_of(setting)[setting]
    assert finding.message.startswith(says) and finding.remedy


def test_data_with_the_columns_that_are_read_have_no_problem(tmp_path):
    right = parquet(tmp_path / "right.parquet", prompt=["a"], data_source=["b"], reward_model=["c"])
    found = said_of(f"data.train_files=[{right}]", f"data.val_files={right}")
    assert not [subject for subject in found if subject.startswith("data.")]


def test_each_file_of_a_pattern_is_looked_at(tmp_path):
    parquet(tmp_path / "right.parquet", prompt=["a"], data_source=["b"], reward_model=["c"])
    parquet(tmp_path / "rig.parquet", prompt=["a"], data_source=["b"])
    pattern = f"data.train_files={tmp_path}/rig*.parquet"
    assert "reward_model" in said_of(pattern)[pattern].message.partition(",")[0]
    (tmp_path / "rig.parquet").unlink()
    assert pattern not in said_of(pattern)


def test_data_without_the_columns_that_are_read_name_those_that_it_has(tmp_path):
    file = parquet(tmp_path / "a.parquet", question=["a"], data_source=["b"])
    found = said_of(f"data.train_files={file}", "data.prompt_key=question")
    assert found[f"data.train_files={file}"].message.endswith("no column reward_model, only data_source, question")
    assert found[f"data.train_files={file}"].remedy
    reward = "reward.reward_model.enable=True"
    assert f"data.train_files={file}" not in said_of(f"data.train_files={file}", "data.prompt_key=question", reward)


def test_a_folder_that_cannot_be_written_to_is_a_problem(monkeypatch):
    monkeypatch.setattr(resources.os, "access", lambda path, mode: mode != os.W_OK)  # root may write everywhere
    folder = "trainer.default_local_dir=/proc/checkpoints"
    finding = said_of(folder)[folder]
    assert "/proc cannot " in finding.message and finding.remedy


def test_folders_in_which_ray_and_datasets_cannot_write_are_named_with_the_variable_that_moves_them(
    findings, monkeypatch, tmp_path
):
    for variable in ("RAY_TMPDIR", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, f"{tmp_path}/locked/{variable}")
    (tmp_path / "locked").mkdir()
    access = os.access
    monkeypatch.setattr(resources.os, "access", lambda path, mode: "locked" not in str(path) and access(path, mode))
    assert findings().keys() == {"RAY_TMPDIR", "HF_DATASETS_CACHE"}
    monkeypatch.setenv("HOME", f"{tmp_path}/locked")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    token = f"{tmp_path}/locked/.ray/auth_token"
    assert "RAY_AUTH_MODE=disabled" in findings("data.custom_cls.path=pkg://mine")[token].advice
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert findings("data.custom_cls.path=pkg://mine").keys() == {"RAY_TMPDIR"}


@pytest.mark.parametrize("engine", ["torchtitan", "veomni"])
def test_an_engine_that_is_not_installed_is_a_missing_package(findings, engine):
    found = findings(f"actor_rollout_ref.actor.strategy={engine}", missing=[engine, "flash_attn"])
    assert found["packages"].message == f"no {engine}" and "flash-attn" not in found


def test_gpus_of_a_teacher_are_counted(findings):
    found = findings("distillation.enabled=True", "distillation.n_gpus_per_node=1", "distillation.nnodes=1")
    assert re.match("2 here, 3 asked for, 1 .*teacher$", found["GPUs"].message) and found["GPUs"].remedy


def test_gpus_of_a_rollout_of_its_own_are_counted_and_get_two_cpus_each(findings):
    own = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.nnodes=1")
    before, found = findings(cpus=1), findings(*own, "actor_rollout_ref.rollout.n_gpus_per_node=4", cpus=1)
    assert re.match("2 here, 6 asked for, 4 .*rollout$", found["GPUs"].message)
    needed, more = (int(x["CPUs"].message.split()[-1]) for x in (before, found))
    assert more - needed == 8


def test_other_accelerators_are_not_held_against_the_gpus(findings):
    assert not {"GPUs", "driver", "flash-attn"} & findings("trainer.device=npu", gpus=0).keys()


def test_a_run_of_one_node_in_a_ray_cluster_is_not_judged_by_this_machine(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    found = {finding.subject for finding in resources.findings(verl_config(*COMPLETE))}
    assert "Ray cluster" in found and "GPUs" not in found


def test_the_columns_of_a_dataset_of_ones_own_are_its_own_matter(tmp_path):
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "a.parquet")
    word = f"data.train_files={tmp_path}/a.parquet"
    found = resources.findings(verl_config(*COMPLETE, word, "data.custom_cls.path=pkg://mine"))
    assert word not in {finding.subject for finding in found}


@pytest.mark.parametrize("path", ["model", "outputs/sft/model"])
def test_a_folder_beside_the_run_is_a_model_and_no_name_on_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    setting = f"actor_rollout_ref.model.path={path}"
    assert said_of(setting)[setting].message.startswith("no model")
