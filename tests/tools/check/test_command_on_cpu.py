import json
import sys

import pytest

from gtpo_verl.tools.check.command import read

MAIN = ["python3", "-m", "verl.trainer.main_ppo", "trainer.nnodes=2"]


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ([], {}),
        (["VLLM_USE_V1=1", "NAME=a=b"], {"VLLM_USE_V1": "1", "NAME": "a=b"}),
        (["env", "-u", "X", "VLLM_USE_V1=1"], {"VLLM_USE_V1": "1"}),
        (["srun", "--nodes=1", "-w", "node1"], {}),
        (["uv", "run", "--frozen"], {}),
        (["nohup", "timeout", "60"], {}),
        (["ray", "job", "submit", "--no-wait", "--working-dir", ".", "--"], {}),
        (["ray", "job", "submit", '--runtime-env-json={"env_vars": {"A": 1}}', "--", "B=2"], {"A": "1", "B": "2"}),
    ],
)
def test_the_command_behind_its_launchers_is_the_one_that_is_started(before, environment):
    command = read([*before, *MAIN])
    assert command.words == MAIN and command.environment == environment and not command.is_script
    assert bool(command.passed_over) == (bool(before) and "=" not in before[0])


@pytest.mark.parametrize("form", ["--runtime-env={}", "--runtime-env {}"])
def test_variables_of_a_ray_jobs_runtime_environment_are_set(tmp_path, form):
    (tmp_path / "env.yaml").write_text(json.dumps({"env_vars": {"A": 1}}))
    options = form.format(tmp_path / "env.yaml").split()
    assert read(["ray", "job", "submit", *options, "--", *MAIN]).environment == {"A": "1"}


def test_torchrun_starts_a_module_or_a_file():
    assert read(["torchrun", "--nproc-per-node=8", "-m", "a.b", "x=1"]).words == ["python3", "-m", "a.b", "x=1"]
    assert read(["torchrun", "--standalone", "train.py", "x=1"]).words == ["python3", "train.py", "x=1"]


@pytest.mark.parametrize("word", ["trainer.nnodes=2", "+trainer.mine=1", "~reward", "model_engine=megatron", "seed=1"])
def test_overrides_alone_are_those_of_main_ppo(word):
    assert read([word, "trainer.n=1"]).words == [sys.executable, "-m", "verl.trainer.main_ppo", word, "trainer.n=1"]


@pytest.mark.parametrize(
    "words", [["bash", "run.sh"], ["./run.sh", "x=1"], ["N=1", "sh", "-x", "run.sh"], ["verl-train"]]
)
def test_what_is_no_python_may_run_lines_of_the_user_first(words):
    assert read(words).is_script


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srun", "-n", "1"], "no command behind srun -n 1"),
        (["ray", "job", "submit", "python3"], "write -- before the command"),
        (["python3", "-I", "-m", "verl.trainer.main_ppo"], "option -I hides this check"),
        (["python3", "-uE", "train.py"], "option -uE hides this check"),
    ],
)
def test_what_cannot_be_checked_is_an_error(words, message):
    with pytest.raises(ValueError, match=message):
        read(words)
