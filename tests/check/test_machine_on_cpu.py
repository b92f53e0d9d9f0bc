import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from gtpo_verl import check
from gtpo_verl.check import machine
from recipes import __main__ as clones

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def paper_config():
    command = ["python3", "-m", "verl.trainer.main_ppo", "--config-path", str(ROOT / "recipes/config")]
    command += ["--config-name", "gtpo", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n=8"]
    command += ["trainer.logger=[console]"]
    config, unknown = check.compose([*command, "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"])
    assert unknown == []
    return config


def raises(error):
    raise error


@pytest.fixture
def findings(monkeypatch, tmp_path, paper_config):
    """The findings about a run with these settings on a made-up machine, by subject."""

    def found(*settings, gpus=2, cpus=64, missing=(), free_gb=999, shared_gb=16, size_gb=1, driver=""):
        real = shutil.disk_usage(tmp_path)._replace(free=int(free_gb * 1e9))
        shared = real._replace(total=int(shared_gb * 1e9))
        monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: shared if str(path) == "/dev/shm" else real)
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: range(cpus))
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus) and not driver)
        monkeypatch.setattr("torch.cuda.init", lambda: raises(RuntimeError(driver)))
        monkeypatch.setattr(machine, "find_spec", lambda name: None if name in missing else SimpleNamespace(name=name))
        monkeypatch.setattr(machine, "_model", lambda path: (False, size_gb * 1e9 / 12))
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        config = paper_config.copy()
        for key, value in OmegaConf.from_dotlist(
            [f"trainer.default_local_dir={tmp_path}/new/checkpoints", *settings]
        ).items():
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        return {finding.subject: finding for finding in machine.findings(config)}

    return found


def test_a_machine_with_all_that_a_run_needs_has_no_problem(findings):
    found = findings()
    assert [finding.remedy for finding in found.values()] == [""] * len(found)
    assert set(found) == {"packages", "batch", "GPUs", "shared memory", "CPUs", "disk"}


def test_all_missing_packages_are_installed_by_one_line(findings):
    found = findings(
        "actor_rollout_ref.model.lora_rank=8",
        "trainer.logger=[console,swanlab]",
        missing=("transfer_queue", "vllm", "math_verify", "peft", "swanlab", "wandb"),
    )
    assert found["packages"].remedy == "pip install TransferQueue vllm math-verify peft swanlab"


def test_without_flash_attn_verls_default_is_a_problem_and_sdpa_slow(findings):
    attention = "actor_rollout_ref.model.override_config.attn_implementation"
    finding = findings(f"{attention}=flash_attention_2", missing=("flash_attn",))["flash-attn"]
    assert f"+{attention}=sdpa" in finding.remedy
    finding = findings(missing=("flash_attn",))["flash-attn"]  # with sdpa
    assert finding.remedy == "" and "docs/gpu.md" in finding.advice
    assert "flash-attn" not in findings("trainer.device=cpu", missing=("flash_attn",))


def test_megatron_is_all_that_verls_engine_imports(findings):
    settings = "actor_rollout_ref.actor.strategy=megatron"
    finding = findings(settings, missing=("megatron.bridge", "transformer_engine", "flash_attn"))["packages"]
    assert finding.says == "no megatron.bridge, transformer_engine, flash_attn" and "uv.lock" in finding.remedy
    assert "sdpa" not in finding.remedy and findings(settings)["packages"].remedy == ""


def test_a_driver_that_is_too_old_for_torch_is_a_problem(findings, tmp_path, capsys):
    finding = findings(driver="The NVIDIA driver on your system is too old (found version 12040).\nUpdate")["driver"]
    assert finding.says.endswith("too old (found version 12040).") and "580 or later for CUDA 13" in finding.remedy
    assert clones.main(["smoke", str(tmp_path / "recipe.sh")]) == 2
    assert "too old (found version 12040)" in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "units", "needed"), [(1, 8, 13), (2, 8, 16), (2, 2, 10)])
def test_cpus_are_counted_as_ray_will_count_them(findings, gpus, units, needed):
    settings = (
        f"trainer.n_gpus_per_node={gpus}",
        f"transfer_queue.backend.SimpleStorage.num_data_storage_units={units}",
    )
    assert findings(*settings, cpus=needed)["CPUs"].remedy == ""
    finding = findings(*settings, cpus=needed - 1)["CPUs"]
    assert f"set ray_kwargs.ray_init.num_cpus={needed}" in finding.remedy
    assert findings(*settings, f"ray_kwargs.ray_init.num_cpus={needed}", cpus=1)["CPUs"].remedy == ""


def test_more_gpus_than_the_machine_has_are_a_problem(findings):
    assert findings(gpus=1)["GPUs"].remedy == "set trainer.n_gpus_per_node to at most 1"
    assert findings(gpus=0)["GPUs"].remedy == "run on a machine with GPUs"
    assert "GPUs" not in findings("trainer.device=cpu", gpus=0)


@pytest.mark.parametrize("setting", ["trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.n=9"])
def test_a_batch_that_cannot_be_split_evenly_is_a_problem(findings, setting):
    assert findings(setting, gpus=4)["batch"].remedy
    assert findings(gpus=4)["batch"].remedy == ""


def test_disk_space_is_held_against_the_checkpoints_that_are_kept(findings):
    settings = ("trainer.save_freq=20", "trainer.max_actor_ckpt_to_keep=2")
    assert findings(*settings, free_gb=42, size_gb=14)["disk"].remedy == ""
    assert "3 checkpoints take 42.0 GB" in findings(*settings, free_gb=41, size_gb=14)["disk"].says
    assert "default_local_dir" in findings(*settings, free_gb=41, size_gb=14)["disk"].remedy
    assert "disk" not in findings("trainer.save_freq=-1")


def test_a_containers_64_mb_of_shared_memory_are_a_problem_for_two_gpus(findings):
    assert "--shm-size" in findings(shared_gb=0.064)["shared memory"].remedy
    assert "shared memory" not in findings("trainer.n_gpus_per_node=1", shared_gb=0.064)


@pytest.fixture
def ray_cluster(monkeypatch):
    """Ray's answers about a cluster with these nodes."""

    def answer(*nodes, error=None):
        monkeypatch.setattr("ray.init", lambda *args, **kwargs: raises(error) if error else None)
        monkeypatch.setattr("ray.shutdown", lambda: None)
        monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": dict(node)} for node in nodes])

    return answer


def test_a_cluster_is_asked_for_its_nodes_gpus_and_cpus(findings, ray_cluster):
    node = {"GPU": 8.0, "CPU": 32.0}
    settings = "trainer.nnodes=2", "trainer.n_gpus_per_node=8", "data.train_batch_size=64"
    ray_cluster(node, node)
    found = findings(*settings, gpus=0, cpus=1)
    assert "GPUs" not in found and not any(finding.remedy for finding in found.values())
    ray_cluster(node, {"CPU": 8.0})
    found = findings(*settings)
    assert "1 of 2 nodes at auto have 8 GPUs, 2 asked for" in found["Ray cluster"].says
    assert "RAY_AUTH_MODE=disabled" in found["Ray cluster"].remedy
    assert found["CPUs"].says == "Ray has 40, verl asks for 58" and found["CPUs"].remedy


def test_a_cluster_that_cannot_be_joined_is_a_problem(findings, ray_cluster):
    ray_cluster(error=ConnectionError("InvalidAuthToken\nmore"))
    finding = findings("trainer.nnodes=2")["Ray cluster"]
    assert finding.says == "not reached at auto: InvalidAuthToken" and "RAY_AUTH_MODE=disabled" in finding.remedy
