"""`GTPO_CHECK=1` and `gtpo-verl check --` in processes of their own: verl stops before it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from verl_config import COMPLETE

ROOT = Path(__file__).resolve().parents[2]
GTPO = [*COMPLETE, "algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8"]
GTPO += ["actor_rollout_ref.rollout.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"]

SCRIPT = """
set -e
export PYTHONPATH=$PWD
touch own_line
python3 -m verl.trainer.main_ppo "$@" 2>&1 | cat
test ${PIPESTATUS[0]} = 0
touch reached
"""
LAUNCHER = """
import os, sys
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

with initialize_config_dir(os.path.join(verl.trainer.__path__[0], "config"), version_base=None):
    config = compose("ppo_trainer")  # which verl would refuse
try:
    run_ppo(OmegaConf.merge(config, OmegaConf.from_dotlist(sys.argv[1:])), TaskRunnerV1)
except BaseException:
    pass
open("reached", "w")
"""
STARTS_RAY = """
import hydra, ray, verl

@hydra.main(config_path=None, config_name=None, version_base=None)
def main(config):
    try:
        ray.init()
    except BaseException:
        open("reached", "w")

main()
open("reached", "w")
"""
ENDS = STARTS_RAY.replace("ray.init()", "open('own_line', 'w')")


@pytest.fixture
def run(tmp_path):
    """Run a command in a folder of its own; its status, what it printed, and the files that it left."""

    def started(*command, **variables):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        temporary = tmp_path / "temporary"
        temporary.mkdir(exist_ok=True)
        variables = os.environ | {"PATH": path, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"} | variables
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert not any(temporary.glob("gtpo-check-*"))
        return done.returncode, done.stdout.splitlines(), {x.name for x in tmp_path.iterdir()} - {"temporary"}

    return started


def test_a_script_goes_no_further_and_leaves_nothing_of_verls(run):
    status, lines, files = run("bash", "-c", SCRIPT, "run.sh", *GTPO, "rolout.n=3", GTPO_CHECK="settings")
    assert status == 1 and files == {"own_line"}
    (problem,) = (line for line in lines if line.startswith("problem: "))
    assert problem.startswith("problem: rolout.n: ") and "no such key" in problem
    assert " actor_rollout_ref.rollout.n?" in problem
    assert lines[-1].startswith("checked: verl.trainer.main_ppo: 1 problem ") and "settings" in lines[-1]


def test_a_launcher_is_judged_by_the_config_that_it_hands_to_verl(run):
    status, lines, files = run(sys.executable, "-c", LAUNCHER, *GTPO, GTPO_CHECK="settings")
    assert status == 1 and lines[-1].startswith("checked: ") and "no problem" in lines[-1] and files == set()


@pytest.mark.parametrize(("program", "files"), [(STARTS_RAY, set()), (ENDS, {"own_line"})], ids=["ray", "end"])
def test_a_program_that_nobody_judges_ends_before_ray_and_at_the_end_of_its_main(run, tmp_path, program, files):
    (tmp_path / "train.py").write_text(program)
    status, lines, left = run(sys.executable, "train.py", GTPO_CHECK="1")
    assert status == 1 and lines[-1].startswith("not checked: train.py: ") and left == {"train.py"} | files


def test_verls_other_programs_are_not_judged_and_do_not_start(run):
    status, lines, files = run(sys.executable, "-m", "verl.trainer.sft_trainer", GTPO_CHECK="1")
    assert status == 1 and lines[-1].startswith("not checked: verl.trainer.sft_trainer: ") and files == set()


def check(run, *words, **variables):
    return run(sys.executable, "-m", "gtpo_verl", "check", "--settings", "--", *words, **variables)


def test_main_ppo_with_a_config_folder_of_ones_own(run):
    folder = ["--config-path", str(ROOT / "recipes/config"), "--config-name=gtpo", "trainer.n_gpus_per_node=2"]
    command = ["python3", "-m", "verl.trainer.main_ppo", *folder, "actor_rollout_ref.rollout.n=8"]
    status, lines, files = check(run, *command)
    assert status == 0 and "checked: verl.trainer.main_ppo: no problem" in lines[-1] and files == set()


def test_a_sweep_is_not_judged_and_does_not_start(run):
    status, lines, _ = check(run, "python3", "-m", "verl.trainer.main_ppo", "-m", *GTPO, "data.seed=1,2")
    assert status == 1 and lines[-1].startswith("not checked: verl.trainer.main_ppo: ")
    assert "sweep" in lines[-1] and "without -m " in lines[-1]


def test_a_program_with_another_config_is_judged_by_its_own(run):
    module = "verl.experimental.fully_async_policy.fully_async_main"
    status, lines, _ = check(run, "python3", "-m", module, *GTPO, "rollout.nnodes=1", "rollout.n_gpus_per_node=1")
    assert status == 1 and lines[-1].startswith(f"checked: {module}: ")
    assert any(line.startswith("problem: algorithm.rollout_correction.bypass_mode=True: ") for line in lines)
    assert not any("no such key" in line for line in lines)


@pytest.mark.parametrize("plugins", ["none", "gtpo"])
def test_where_verl_does_not_load_the_check_nothing_is_started(run, plugins):
    status, lines, files = check(run, *GTPO, VERL_USE_EXTERNAL_PLUGINS=plugins)
    assert status == 1 and lines[-1].startswith("not checked: ") and "gtpo_check" in lines[-1] and files == set()
    (problem,) = (line for line in lines if line.startswith("problem: plugin gtpo_check: "))
    assert f"VERL_USE_EXTERNAL_PLUGINS={plugins} " in problem
    assert "unset" in problem and " gtpo,gtpo_check" in problem
