"""python -m openrlhf_cpu MODULE OPTIONS: `python -m MODULE OPTIONS` on logical GPUs."""

import runpy
import sys

import ray

import openrlhf_cpu

openrlhf_cpu.install()
ray.init(
    num_cpus=8,
    num_gpus=4,
    include_dashboard=False,
    object_store_memory=200 * 2**20,
    runtime_env={"worker_process_setup_hook": "openrlhf_cpu.install"},
)
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
