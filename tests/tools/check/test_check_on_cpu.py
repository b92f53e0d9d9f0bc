import sys
from pathlib import Path

import pytest

from gtpo_verl.cli import main
from gtpo_verl.tools import check

MAIN_PPO = ["-m", "verl.trainer.main_ppo", "trainer.nnodes=2"]


@pytest.mark.parametrize(
    ("words", "form"),
    [
        ("bash run.sh x=1", "GTPO_CHECK=1 bash my_script.sh"),
        ("source run.sh", "GTPO_CHECK=1 "),
        ("./run.sh", "GTPO_CHECK=1 bash my_script.sh"),
        ("sbatch job.sh", "sbatch --export=ALL,GTPO_CHECK=1"),
        ("srun -n 1 python3 -m verl.trainer.main_ppo", "srun --export=ALL,GTPO_CHECK=1"),
        ("docker run -e HF_TOKEN=secret img bash x", "docker run -e GTPO_CHECK=1"),
        ("ssh node1 bash train.sh", "ssh HOST 'GTPO_CHECK=1 "),
        ("ray job submit -- python3 -m verl.trainer.main_ppo", '{"env_vars": {"GTPO_CHECK": "1"}}'),
        ("python3 train.py", "GTPO_CHECK=1 python3 my_program.py"),
        ("python3 -m mine.train", "GTPO_CHECK=1 python3 my_program.py"),
        ("python3 -m torch.distributed.run -m verl.trainer.main_ppo", "GTPO_CHECK=1 "),
        ("/nowhere/bin/python3 -m verl.trainer.main_ppo", "GTPO_CHECK=1 "),
        ("WANDB_API_KEY=secret python3 -m verl.trainer.main_ppo", "GTPO_CHECK=1 "),
        ("rm -rf precious", "GTPO_CHECK=1 "),
    ],
)
def test_what_is_no_module_of_verl_is_not_started_and_one_line_says_how_its_user_checks_it(
    words, form, monkeypatch, tmp_path, capsys
):
    (tmp_path / "precious").mkdir()
    monkeypatch.chdir(tmp_path)
    for started in ("os.execvp", "os.system", "subprocess.Popen", "runpy.run_module"):
        monkeypatch.setattr(started, lambda *_, **__: pytest.fail("started"))
    assert main(["check", "--", *words.split()]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not judged: ") and form in line and "secret" not in line
    assert [x.name for x in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("word", ["trainer.nnodes=2", "+trainer.mine=1", "~reward", "model_engine=megatron", "seed=1"])
def test_overrides_alone_are_those_of_main_ppo(word):
    assert check._module_of([word, "a.b=1"]) == ("verl.trainer.main_ppo", [word, "a.b=1"])
    assert check._module_of(["--config-name=ppo_megatron_trainer", word])[0] == "verl.trainer.main_ppo"


@pytest.mark.parametrize("python", ["python", "python3", "python3.11", str(Path(sys.executable).parent / "python3")])
def test_a_module_of_verl_or_of_a_recipe_is_this_pythons(python):
    assert check._module_of([python, *MAIN_PPO]) == ("verl.trainer.main_ppo", ["trainer.nnodes=2"])
    assert check._module_of([python, "-u", "-m", "recipe.dapo.main_dapo"]) == ("recipe.dapo.main_dapo", [])
