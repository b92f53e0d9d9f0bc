"""Two runs in one Ray cluster, each as verl's task runner begins: a real Ray, a real TransferQueue, no model."""

import pytest
from omegaconf import OmegaConf
from own_process import run_python, running_python

from gtpo_verl.verl_plugin import one_run_per_cluster

# The first run starts the cluster, as verl does; the second joins it, as a job of its own, or as a second task runner
# of the first job. A guest only attaches to the queue.
RUN = """
import sys
import ray

@ray.remote
class TaskRunner:
    def run(self, uid, conf):
        import verl  # loads the plugin, unless it is told not to
        import torch
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from tensordict import TensorDict

        tq.init(OmegaConf.create(conf) if conf else None)
        self.tq = tq
        tq.kv_put(uid, "train", TensorDict({"responses": torch.zeros(1, 2)}, 1))

    def uids(self):
        return sorted(self.tq.kv_list("train")["train"])

uid, address = sys.argv[1:]
own = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": 100_000_000}
ray.init(address, namespace=uid, log_to_driver=False, **(own if address == "local" else {}))
conf = {} if uid == "guest" else {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
runner = TaskRunner.remote()
try:
    ray.get(runner.run.remote(uid, conf))
except ray.exceptions.RayTaskError as error:
    sys.exit(str(error.cause))
print(ray.get_runtime_context().gcs_address, flush=True)
for line in sys.stdin:
    if line == "again\\n":
        try:
            ray.get(TaskRunner.remote().run.remote("again", conf))
        except ray.exceptions.RayTaskError as error:
            print(str(error.cause), flush=True)
    else:
        print(*ray.get(runner.uids.remote()), flush=True)
"""


ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}


def start(uid, address="local", **environment):
    """A run, and the address of its cluster; a line that it gets is answered with its uids."""
    return running_python(RUN, uid, address, **ENVIRONMENT, **environment)


def ask(process, what="?"):
    process.stdin.write(what + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.process
def test_a_second_run_in_a_ray_cluster_is_refused_and_told_of_the_first():
    with start("first") as (first, address):
        second = run_python(RUN, "second", address, status=1, **ENVIRONMENT)
        assert second.stdout == "" and "(Ray job 01000000" in second.stderr
        assert f"process {first.pid} on " in second.stderr and "separate cluster" in second.stderr
        assert "(Ray job 01000000" in ask(first, "again")
        assert ask(first) == "first"


@pytest.mark.process
def test_another_job_may_attach_to_the_queue_of_a_run():
    with start("first") as (first, address), start("guest", address) as (_, address_of_guest):
        assert address_of_guest == address
        assert ask(first) == "first guest"


def test_of_two_runs_that_start_at_once_the_one_that_did_not_make_the_queue_is_refused(monkeypatch):
    others = iter(["", "Ray job 02000000"])
    monkeypatch.setattr(one_run_per_cluster, "queue_holder", lambda: next(others))
    with pytest.raises(ValueError, match="another run .*Ray job 02000000"):
        one_run_per_cluster.refuse_second_run(lambda: OmegaConf.create({"backend": {}}), conf={})
    monkeypatch.setattr(one_run_per_cluster, "queue_holder", lambda: "")
    made = OmegaConf.create({"controller": {"zmq_info": "address"}})
    assert one_run_per_cluster.refuse_second_run(lambda: made, conf={}) is made


def test_a_ray_that_cannot_name_the_driver_of_the_other_run_is_no_error(monkeypatch):
    monkeypatch.setattr("ray._private.state.jobs", lambda: [{"JobID": "01000000"}])
    assert one_run_per_cluster._driver("01000000") == ""


@pytest.mark.process
def test_without_the_plugin_each_run_trains_on_the_rollouts_of_both():
    """The day this fails, verl keeps runs apart by itself."""
    without = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    with start("first", **without) as (first, address), start("second", address, **without) as (second, other):
        assert other == address
        assert ask(first) == ask(second) == "first second"
