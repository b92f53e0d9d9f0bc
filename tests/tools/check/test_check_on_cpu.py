import sys
from pathlib import Path

import pytest

from gtpo_verl.cli import main
from gtpo_verl.tools.check import command

MAIN_PPO = ["-m", "verl.trainer.main_ppo", "trainer.nnodes=2"]


@pytest.mark.parametrize(
    "words",
    [
        "bash run.sh x=1",
        "source run.sh",
        "sbatch job.sh",
        "srun -n 1 python3 -m verl.trainer.main_ppo",
        "docker run -e HF_TOKEN=secret img bash x",
        "ray job submit -- python3 -m verl.trainer.main_ppo",
        "python3 train.py",
        "python3 -m mine.train",
        "python3 -m torch.distributed.run -m verl.trainer.main_ppo",
        "/nowhere/bin/python3 -m verl.trainer.main_ppo",
        "WANDB_API_KEY=secret python3 -m verl.trainer.main_ppo",
        "rm -rf precious",
    ],
)
def test_what_is_no_module_of_verl_is_not_started_and_one_line_says_how_its_user_checks_it(
    words, monkeypatch, tmp_path, capsys
):
    (tmp_path / "precious").mkdir()
    monkeypatch.chdir(tmp_path)
    for started in ("os.execvp", "os.system", "subprocess.Popen", "runpy.run_module"):
        monkeypatch.setattr(started, lambda *_, **__: pytest.fail("started"))
    assert main(["check", "--", *words.split()]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("not checked: ") and "secret" not in line
    assert "GTPO_CHECK=1 bash my_script.sh" in line and "check.md" in line
    assert [x.name for x in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("word", ["trainer.nnodes=2", "+trainer.mine=1", "~reward", "model_engine=megatron", "seed=1"])
def test_overrides_alone_are_those_of_main_ppo(word):
    assert command.module_of([word, "a.b=1"]) == ("verl.trainer.main_ppo", [word, "a.b=1"])
    assert command.module_of(["--config-name=ppo_megatron_trainer", word])[0] == "verl.trainer.main_ppo"


@pytest.mark.parametrize("python", ["python", "python3", "python3.11", str(Path(sys.executable).parent / "python3")])
def test_a_module_of_verl_or_of_a_recipe_is_this_pythons(python):
    assert command.module_of([python, *MAIN_PPO]) == ("verl.trainer.main_ppo", ["trainer.nnodes=2"])
    assert command.module_of([python, "-u", "-m", "recipe.dapo.main_dapo"]) == ("recipe.dapo.main_dapo", [])
