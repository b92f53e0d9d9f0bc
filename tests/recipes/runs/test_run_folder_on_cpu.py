import subprocess
import sys

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from recipes.runs import run_folder
from recipes.runs.run_folder import hold_settings, overrides, write_command

COMMAND = ["python3", "-m", "verl.trainer.main_ppo", "--config-name", "gtpo", "seed=1", "trainer.n_gpus_per_node=2"]


@pytest.fixture
def save(tmp_path):
    """Start the run, and note a complete checkpoint as verl does."""

    def saved():
        hold_settings(COMMAND, tmp_path)
        (tmp_path / "checkpoints/global_step_20/actor").mkdir(parents=True)
        (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("20")

    return saved


def test_the_last_value_of_a_key_counts_however_it_is_given():
    command = ["python3", "-m", "x", "--config-name", "gtpo", "+a.b=1", "++a.b=2", "c='d=e'"]
    assert overrides(command) == {"a.b": "2", "c": "'d=e'"}


def test_a_key_that_is_deleted_is_a_setting_without_a_value(tmp_path, save):
    assert overrides(["a.b=1", "~a.b", "~c=2", "d=3"]) == {"d": "3"}
    save()
    for deletion in ("~algorithm.kl_ctrl", "~algorithm.kl_ctrl.type=fixed"):
        with pytest.raises(ValueError, match=rf"\({deletion.partition('=')[0]}=deleted, was unset\)"):
            hold_settings([*COMMAND, deletion], tmp_path)


def test_a_retry_with_other_settings_is_welcome_until_there_is_a_checkpoint(tmp_path, save):
    hold_settings([*COMMAND, "algorithm.gtop=1"], tmp_path)
    save()
    hold_settings(COMMAND, tmp_path)
    with pytest.raises(ValueError, match=r"\(seed=2, was 1\): .*OUT.* remove .*settings\.json"):
        hold_settings([*COMMAND, "seed=2"], tmp_path)


def test_lines_are_read_when_they_are_whole_from_where_the_last_look_ended(tmp_path):
    tail = run_folder.Tail(log := tmp_path / "log", 2)
    assert tail.lines() == []
    with log.open("wb", buffering=0) as file:
        for written, read in ((b"0\n1\n2\xc3", ["1"]), (b"\xa9", []), (b"4\r5\n", ["2é4", "5"])):
            file.write(written)
            assert tail.lines() == read


def test_an_empty_id_of_a_start_on_a_full_disk_is_none(tmp_path):
    (tmp_path / "run_id").touch()
    first, second = (run_folder.logger_variables(tmp_path)["WANDB_RUN_ID"] for _ in range(2))
    assert first == second and len(first) == 21


def test_without_a_checkpoint_what_a_run_of_other_settings_logged_is_kept(tmp_path, capsys):
    for command in (COMMAND, COMMAND, [*COMMAND, "seed=2"]):
        hold_settings(command, tmp_path)
        run_id = run_folder.logger_variables(tmp_path)["WANDB_RUN_ID"]
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f"{run_id}\n")
    (kept,) = tmp_path.glob("metrics.jsonl.*")
    first, second = kept.read_text().split()
    assert first == second != run_id and str(kept) in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_text() == f"{run_id}\n"


def test_a_run_of_other_settings_that_logged_nothing_names_no_file(tmp_path, capsys):
    hold_settings(COMMAND, tmp_path)
    hold_settings([*COMMAND, "seed=2"], tmp_path)
    assert "metrics.jsonl" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"\x83\x00\xff", b"../../etc", b"1 2"])
def test_a_damaged_tracker_is_named(tmp_path, save, content):
    save()
    tracker = tmp_path / "checkpoints/latest_checkpointed_iteration.txt"
    tracker.write_bytes(content)
    with pytest.raises(ValueError, match=str(tracker)):
        hold_settings(COMMAND, tmp_path)


def test_a_damaged_id_is_named(tmp_path):
    (tmp_path / "run_id").write_bytes(b"\x83\x00\xff")
    with pytest.raises(ValueError, match=str(tmp_path / "run_id")):
        run_folder.logger_variables(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5500",
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
        "trainer.logger=[file,wandb]",
        "+ray_kwargs.ray_init.num_cpus=16",
        "actor_rollout_ref.nccl_timeout=1800",
        "hydra.run.dir=/scratch/7",
        "+algorithm.gtpo.dump_dir=dump",
    ],
)
def test_memory_speed_and_reports_may_change(tmp_path, save, change):
    save()
    hold_settings([*COMMAND, change], tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "trainer.n_gpus_per_node=4",
        "trainer.total_epochs=2",
        "trainer.total_training_steps=9",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "algorithm.gtpo.entropy_coeff=0",
    ],
)
def test_what_is_learned_and_the_number_of_gpus_may_not(tmp_path, save, change):
    save()
    with pytest.raises(ValueError, match=change.split("=")[0]):
        hold_settings([*COMMAND, change], tmp_path)


def test_a_run_may_be_extended_by_steps_and_by_nothing_else(tmp_path, save):
    save()
    longer = [*COMMAND, "trainer.total_training_steps=9", "trainer.total_epochs=2"]
    with pytest.raises(ValueError, match="--extend"):
        hold_settings(longer, tmp_path)
    with pytest.raises(ValueError, match=r"\(seed=2, was 1\): "):
        hold_settings([*longer, "seed=2"], tmp_path, extend=True)
    hold_settings(COMMAND, tmp_path)  # which a refused start leaves as it was
    hold_settings(longer, tmp_path, extend=True)
    hold_settings(longer, tmp_path)


def test_the_checkpoints_are_sought_where_verl_writes_them(tmp_path):
    command = [*COMMAND, f"trainer.default_local_dir={tmp_path / 'elsewhere'}"]
    assert not run_folder.has_checkpoint(command, tmp_path)
    (tmp_path / "elsewhere/global_step_3/actor").mkdir(parents=True)
    (tmp_path / "elsewhere/latest_checkpointed_iteration.txt").write_text("3")
    assert run_folder.has_checkpoint(command, tmp_path)


@pytest.mark.parametrize("tracker", ["40", ""])
def test_a_checkpoint_that_is_gone_is_named(tmp_path, save, tracker):
    save()
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text(tracker)
    with pytest.raises(ValueError, match=rf"names global_step_{tracker}, .*missing \(.*: global_step_20\)"):
        hold_settings(COMMAND, tmp_path)
    hold_settings([*COMMAND, "trainer.resume_mode=disable"], tmp_path)


def test_a_checkpoint_whose_weights_verl_has_removed_is_not_whole(tmp_path, save):
    save()
    (tmp_path / "checkpoints/global_step_10/exported").mkdir(parents=True)
    (tmp_path / "checkpoints/global_step_10/data.pt").touch()  # what trainer.max_actor_ckpt_to_keep leaves
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("10")
    with pytest.raises(ValueError, match=r"names global_step_10, .*missing \(.*besides: global_step_20\)"):
        hold_settings(COMMAND, tmp_path)


def test_a_checkpoint_that_was_cut_off_is_named_with_the_whole_one_before_it(tmp_path, save):
    save()
    for step in (5, 10, 20):
        actor = tmp_path / f"checkpoints/global_step_{step}/actor"
        actor.mkdir(parents=True, exist_ok=True)
        torch.save({"weight": torch.ones(1000)}, actor / "model_world_size_1_rank_0.pt")
    hold_settings(COMMAND, tmp_path)
    for step in (5, 20):
        path = tmp_path / f"checkpoints/global_step_{step}/actor/model_world_size_1_rank_0.pt"
        path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(ValueError) as error:
        hold_settings(COMMAND, tmp_path)
    assert f"{path} is cut off" in str(error.value) and "besides: global_step_10)" in str(error.value)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("10")  # the remedy
    hold_settings(COMMAND, tmp_path)


@pytest.mark.parametrize("value", ["/x/josé's [1] {x}, a=b#", "a\\", "a\\'b\\", '"', "~/x", "", " ", "$a"])
def test_a_quoted_value_is_what_hydra_reads(value):
    word = run_folder.quoted(value)
    assert OverridesParser.create().parse_override(f"key={word}").value() == value == run_folder.unquoted(word)


@pytest.mark.parametrize("value", ["'a", "'a','b'", "'a'b'", '"a"', "plain"])
def test_a_value_that_is_no_whole_text_in_quotes_stays_as_it_is(value):
    assert run_folder.unquoted(value) == value


def test_a_run_begun_anew_beside_a_checkpoint_of_other_settings_is_refused(tmp_path, save):
    """It could die before it saves, and the next start would go on from the other run's checkpoint."""
    save()
    hold_settings([*COMMAND, "trainer.resume_mode=disable"], tmp_path)
    with pytest.raises(ValueError, match=r"\(seed=2, was 1\): "):
        hold_settings([*COMMAND, "seed=2", "trainer.resume_mode=disable"], tmp_path)


def test_the_written_command_runs_again_with_the_variables_it_needs_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "a b")
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setenv("HF_TOKEN", "hidden")
    script = "import os, sys; print(os.environ['VERL_PLATFORM'], sys.argv[1:])"
    out = tmp_path / "out"
    out.mkdir()
    write_command([sys.executable, "-c", script, "x='y z'", "trainer.logger=[file]"], out, ["--stall", "60"])
    text = (out / "command.sh").read_text()
    assert "hidden" not in text and "HF_TOKEN" not in text
    monkeypatch.setenv("VERL_PLATFORM", "another")
    subprocess.run(["bash", str(out / "command.sh")], capture_output=True, timeout=900)
    assert "a b [\"x='y z'\", 'trainer.logger=[file]']" in (out / "train.log").read_text()


def test_a_shell_that_runs_the_command_does_not_go_on_with_the_one_that_replaces_it(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    write_command([sys.executable, "-c", "pass"], tmp_path, [])
    with (tmp_path / "command.sh").open() as shell:
        first = shell.read()
        monkeypatch.setenv("VERL_PLATFORM", "cpu")
        write_command([sys.executable, "-c", "pass"], tmp_path, [])
        assert shell.read() == "" and len((tmp_path / "command.sh").read_text()) > len(first)


@pytest.mark.parametrize("name", ["actor", "model", "huggingface"])
def test_weights_are_found_wherever_a_trainer_keeps_them(tmp_path, name):
    (tmp_path / f"checkpoints/global_step_3/{name}").mkdir(parents=True)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    assert run_folder.has_checkpoint(["x"], tmp_path)


def test_a_checkpoint_is_found_in_a_folder_whose_name_is_quoted(tmp_path):
    folder = tmp_path / "a, b"
    (folder / "global_step_3/actor").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    assert run_folder.has_checkpoint([f"trainer.default_local_dir={run_folder.quoted(str(folder))}"], tmp_path)


def test_the_command_does_not_name_the_ray_job_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("RAY_RAYLET_PID", "12")
    write_command([sys.executable], tmp_path, [])
    text = (tmp_path / "command.sh").read_text()
    assert "RAY_JOB" not in text and "RAYLET" not in text


@pytest.mark.parametrize(("address", "seen"), [(None, "old head:1 4,5"), ("new:2", "new:2 4,5")])
def test_the_command_runs_on_the_cluster_and_the_gpus_that_it_is_given_later(tmp_path, monkeypatch, address, seen):
    monkeypatch.setenv("RAY_ADDRESS", "old head:1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    script = "import os; print(os.environ['RAY_ADDRESS'], os.environ['CUDA_VISIBLE_DEVICES'])"
    write_command([sys.executable, "-c", script], tmp_path, [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if address:
        monkeypatch.setenv("RAY_ADDRESS", address)
    else:
        monkeypatch.delenv("RAY_ADDRESS")
    subprocess.run(["bash", str(tmp_path / "command.sh")], capture_output=True, timeout=900)
    assert (tmp_path / "train.log").read_text().splitlines()[-1] == seen


def test_a_loggers_folder_of_ones_own_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", "/mine")
    assert run_folder.logger_variables(tmp_path)["WANDB_DIR"] == "/mine"
