"""OpenRLHF's own trainer, actors and vLLM engines without an accelerator; nothing of its algorithm is replaced.

`install` runs in the driver, in every worker of Ray (`worker_process_setup_hook`) and in every process of vLLM (entry
point `vllm.general_plugins`). tests/openrlhf_on_cpu/README.md says of each stand-in why it changes no number of
the algorithm.
"""

import os
import sys

import wrapt


class Host(str):
    """What `torch.cuda.current_device()` returns: "cpu" for `Tensor.to`, 0 in f"cuda:{…}" of the replay buffer."""

    def __format__(self, spec):
        return "0"


def use_host():
    import torch

    host = Host("cpu")
    torch.cuda.current_device = lambda: host
    for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
        setattr(torch.cuda, name, lambda *args: None)  # one function each: torch._dynamo refuses one under two names


class StoreCommunicator:
    """In place of vLLM's PyNcclCommunicator: broadcasts over the TCP store of the same StatelessProcessGroup."""

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src, stream=None):
        received = self.group.broadcast(tensor.detach() if self.group.rank == src else tensor, src)
        tensor.data.copy_(received)


def broadcast_over_store(module):
    module.PyNcclCommunicator = StoreCommunicator


def receive_on_host(module):
    """`WorkerWrap.update_weight` asks for an empty tensor on "cuda"; the method itself stays."""
    from torch.overrides import TorchFunctionMode

    class OnHost(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if kwargs.get("device") == "cuda":
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    def update_weight(wrapped, instance, args, kwargs):
        with OnHost():
            return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(module, "WorkerWrap.update_weight", update_weight)


def keep_linear_weights(module):
    """oneDNN prepacking empties a layer's weight after loading, and the second weight sync then hangs."""
    module._supports_onednn = False


def install():
    if "openrlhf_cpu.installed" in sys.modules:
        return
    sys.modules["openrlhf_cpu.installed"] = sys.modules[__name__]
    os.environ["VLLM_TARGET_DEVICE"] = os.environ["DS_ACCELERATOR"] = "cpu"
    use_host()
    wrapt.register_post_import_hook(broadcast_over_store, "vllm.distributed.device_communicators.pynccl")
    wrapt.register_post_import_hook(receive_on_host, "openrlhf.trainer.ray.vllm_worker_wrap")
    wrapt.register_post_import_hook(keep_linear_weights, "vllm._custom_ops")
    if "OPENRLHF_CPU_RECORD" in os.environ:
        import recorder

        recorder.install()
