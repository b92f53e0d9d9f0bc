"""Runs on one host exchange weights with verl's own sender and receiver: whose does a rollout get?"""

import json
import shutil
import tempfile
from types import SimpleNamespace

import pytest
from own_process import run_python, running_python

from gtpo_verl.verl_plugin import weight_transfer

# Each run is a sender and a receiver, in processes of their own as in verl. The second run's sender comes while the
# first waits for its receiver. verl's package is entered without its __init__, which imports vLLM.
TWO_RUNS = """
import asyncio, json, multiprocessing, os, sys, types
from pathlib import Path
import verl
import verl.workers.rollout as rollout

package = types.ModuleType("verl.workers.rollout.vllm_rollout")
package.__path__ = [str(Path(rollout.__path__[0], "vllm_rollout"))]
sys.modules[package.__name__] = package
import torch
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer

handle, raylets, receivers = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])

def descend_from(raylet):
    os.environ.pop("RAY_RAYLET_PID", None)
    if raylet:
        os.environ["RAY_RAYLET_PID"] = raylet

def send(raylet, value, bound):
    descend_from(raylet)
    sender = transfer.BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    init_socket = sender._init_socket
    sender._init_socket = lambda: (init_socket(), bound.set())
    asyncio.run(sender.async_send_weights(iter([("weight", torch.full((2,), value))])))

def receive(raylet, got):
    descend_from(raylet)
    receiver = transfer.BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    receiver.receive_weights(lambda weights, is_last: got.put(weights[0][1][0].item()))

processes = multiprocessing.get_context("fork")
got = []
for value, raylet in enumerate(raylets):
    bound = processes.Event()
    processes.Process(target=send, args=(raylet, float(value), bound), daemon=True).start()
    bound.wait()
for raylet in raylets[:receivers]:
    queue = processes.Queue()
    processes.Process(target=receive, args=(raylet, queue), daemon=True).start()
    got.append(queue.get())
print(json.dumps(got))
"""


@pytest.fixture
def exchange():
    """Runs under one name of verl's, on Ray nodes with these raylets; what the rollouts of the first of them got."""
    folder = tempfile.mkdtemp()  # pytest's is longer than the name of a socket may be

    def run(*raylets, receivers, **environment):
        handle = f"ipc://{folder}/rl-colocate-zmq-01000000-replica-0-rank-0.sock"
        environment |= {"VERL_USE_EXTERNAL_MODULES": "recipes.verl_cpu.plugin", "OMP_NUM_THREADS": "1"}
        said = run_python(TWO_RUNS, handle, json.dumps(raylets), receivers, **environment).stdout
        return json.loads(said.splitlines()[-1])

    yield run
    shutil.rmtree(folder)


@pytest.mark.process
def test_each_rollout_gets_the_weights_of_its_own_run(exchange):
    assert exchange("101", "102", receivers=2) == [0.0, 1.0]


@pytest.mark.process
def test_without_the_plugin_a_rollout_gets_the_other_runs_weights(exchange):
    """The day this fails, verl keeps runs apart by itself."""
    assert exchange("101", "102", receivers=1, VERL_USE_EXTERNAL_PLUGINS="none") == [1.0]


@pytest.mark.process
def test_outside_ray_weights_go_through_the_socket_that_verl_names(exchange):
    assert exchange(None, receivers=1) == [0.0]


def test_containers_that_share_a_folder_of_sockets_have_names_of_their_own(monkeypatch):
    """Both count process ids from 1 on, so their raylets may have the same."""
    monkeypatch.setenv("RAY_RAYLET_PID", "7")
    handles = set()
    for namespace in (1, 2):
        monkeypatch.setattr(weight_transfer.os, "stat", lambda path, found=namespace: SimpleNamespace(st_ino=found))
        weight_transfer._node_suffix.cache_clear()
        transfer = SimpleNamespace(zmq_handle="ipc:///tmp/a.sock")
        weight_transfer.use_own_socket(lambda: None, transfer)
        handles.add(transfer.zmq_handle)
    monkeypatch.undo()
    weight_transfer._node_suffix.cache_clear()
    assert len(handles) == 2 and all(handle.startswith("ipc:///tmp/a.sock.") for handle in handles)


# What vLLM's processes inherit is the environment of the actor that starts them.
NAMES = """
import subprocess, sys
import ray

@ray.remote
class Worker:
    def name(self, child):
        code = "from gtpo_verl.verl_plugin.weight_transfer import _node_suffix; print(_node_suffix())"
        if child:
            return subprocess.check_output([sys.executable, "-c", code], text=True).split()[-1]
        from gtpo_verl.verl_plugin.weight_transfer import _node_suffix
        return _node_suffix()

ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100_000_000, log_to_driver=False)
trainer, server = Worker.remote(), Worker.remote()
names = ray.get([trainer.name.remote(False), server.name.remote(True)])
print(ray.get_runtime_context().get_job_id(), *names, flush=True)
sys.stdin.read()
"""


@pytest.mark.process
def test_the_processes_of_a_ray_node_agree_on_a_name_and_two_rays_do_not():
    with (
        running_python(NAMES, OMP_NUM_THREADS="1") as (_, first),
        running_python(NAMES, OMP_NUM_THREADS="1") as (_, second),
    ):
        job_a, trainer_a, server_a = first.split()
        job_b, trainer_b, server_b = second.split()
    assert job_a == job_b == "01000000"
    assert trainer_a == server_a != trainer_b == server_b


def test_without_a_raylet_a_warning_says_that_the_socket_is_shared(monkeypatch, caplog):
    monkeypatch.delenv("RAY_RAYLET_PID", raising=False)
    weight_transfer._node_suffix.cache_clear()
    assert weight_transfer._node_suffix() == "" and "other runs share" in caplog.text
    weight_transfer._node_suffix.cache_clear()
