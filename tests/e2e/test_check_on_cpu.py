"""`gtpo-verl check` with verl's own programs, which it starts and ends."""

from pathlib import Path

import pytest
from verl_config import COMPLETE

from gtpo_verl.cli import main

ROOT = Path(__file__).resolve().parents[2]
GTPO = [*COMPLETE, "algorithm.adv_estimator=gtpo", "actor_rollout_ref.rollout.n=8"]


@pytest.fixture
def said(capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def checked(*words, status):
        assert main(["check", "--settings", *words]) == status
        assert not any(tmp_path.iterdir())
        return capfd.readouterr().out

    return checked


def test_main_ppo_with_a_config_folder_of_ones_own(said):
    folder = ["--config-path", str(ROOT / "recipes/config"), "--config-name=gtpo", "trainer.n_gpus_per_node=2"]
    folder += ["actor_rollout_ref.rollout.n=8"]
    out = said("--", "python3", "-m", "verl.trainer.main_ppo", *folder, status=0)
    assert out.startswith("judged: verl.trainer.main_ppo, config gtpo\n") and "Its settings are right" in out


def test_a_program_with_another_config_is_judged_by_its_own(said):
    module = "verl.experimental.fully_async_policy.fully_async_main"
    out = said("--", "python3", "-m", module, *GTPO, "rollout.nnodes=1", "rollout.n_gpus_per_node=1", status=1)
    assert f"judged: {module}, config fully_async_ppo_trainer\n" in out and "no such key" not in out
    assert "problem: algorithm.rollout_correction.bypass_mode=True: " in out


def test_a_script_is_judged_as_what_it_starts(said):
    out = said("--run-script", "--", "bash", str(ROOT / "recipes/run_gtpo_qwen.sh"), "rolout.n=8", status=1)
    assert "config gtpo\n" in out and "problem: rolout.n: verl has no such key" in out
