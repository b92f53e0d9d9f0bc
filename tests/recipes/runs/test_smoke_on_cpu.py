import json
import os
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.__main__ import main
from recipes.runs import smoke

# A recipe in which verl is a few lines of shell: each start adds the steps up to the last one, and saves it.
RECIPE = """
last=${1#trainer.total_training_steps=}
mkdir -p "$OUT/checkpoints/global_step_$last"
for step in $(seq $((last == 4 ? 4 : 1)) "$last"); do
    printf '{"step": %s, "reward/score/mean": 1, "timing_s/step": %s, ' "$step" "$((step % 3 == 1 ? 99 : 7))"
    printf '"training/%s": %s}\\n' "${LOGGED:-rollout_probs_diff_mean}" "${DIFF:-0.001}"
done >>"$OUT/metrics.jsonl"
echo "$last" >"$OUT/checkpoints/latest_checkpointed_iteration.txt"
printf '{"data.train_files": "%s/train.parquet", "data.train_batch_size": "2", "trainer.total_epochs": "3"}' \\
    "$DATA_DIR" >"$OUT/settings.json"
exit "${STATUS:-0}"
"""


@pytest.fixture
def started(monkeypatch, tmp_path):
    """A smoke run of the recipe above, with evaluation and export that always work; its status, its commands."""
    recipe = tmp_path / "recipe.sh"
    recipe.write_text(RECIPE)
    pq.write_table(pa.table({"prompt": ["a"] * 1000}), tmp_path / "train.parquet")
    monkeypatch.setenv("SMOKE_MODEL", "small")
    monkeypatch.setenv("DATA_DIR", str(tmp_path))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(smoke, "end_process", lambda process: None)
    commands, popen = [], subprocess.Popen

    def start(command, **kwargs):
        commands.append(command)
        return popen(command if command[1] == str(recipe) else ["true"], **kwargs)

    monkeypatch.setattr(smoke.subprocess, "Popen", start)
    return lambda *overrides: (main(["smoke", str(recipe), "--", *overrides]), commands)


def test_everything_is_tried_and_the_whole_run_is_reckoned(started, capsys):
    status, commands = started()
    out = capsys.readouterr().out
    assert status == 0 and out.count("| ok |") == 6
    assert [command[1] for command in commands[2:]] == ["recipes/evaluate.sh", "-m"]
    # 500 batches of 2 rows, three times, at 7 s a step; the first step of each start takes 99
    assert re.search(r"run of 1500 steps .*2\.9 hours", out)


@pytest.mark.parametrize(
    ("overrides", "steps", "hours"),
    [([], 20, 0.2), (["trainer.total_training_steps=500"], 500, 5.0)],
    ids=["data", "override"],
)
def test_the_recipes_own_number_of_steps_is_that_of_the_whole_run(
    capsys, started, monkeypatch, overrides, steps, hours
):
    monkeypatch.setattr(smoke, "checks", lambda *_: {})
    folder = Path(os.environ["OUT"] + "_smoke")
    monkeypatch.setattr(smoke.shutil, "rmtree", lambda *_, **__: None)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "timing_s/step": 9}\n{"step": 2, "timing_s/step": 36}\n')
    settings = {"data.train_files": f"{folder.parent}/train.parquet", "data.train_batch_size": "10"}
    settings |= {"trainer.total_epochs": "1", "data.train_max_samples": "200"}
    (folder / "settings.json").write_text(json.dumps(settings))
    started(*overrides)
    assert re.search(f"run of {steps} steps .*{hours} hours", capsys.readouterr().out)


def test_what_fails_is_named_and_the_rest_is_not_tried(started, capsys, monkeypatch):
    monkeypatch.setenv("DIFF", "0.4")
    status, commands = started()
    out = capsys.readouterr().out
    assert status == 1 and len(commands) == 1
    assert out.count("| ok |") == 1
    assert re.search(r"training/rollout_probs_diff_mean below 0\.02 \| \*\*failed\*\* \|", out)
    assert out.count("not tried") == 4


def test_what_verl_did_not_measure_is_said_and_nothing_stops_for_it(started, capsys, monkeypatch):
    monkeypatch.setenv("LOGGED", "other")  # as in bypass mode
    status, _ = started()
    out = capsys.readouterr().out
    assert status == 0 and out.count("| ok |") == 5 and out.count("| not measured") == 1


def test_a_recipe_that_dies_fails_the_smoke_run(started, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("STATUS", "3")
    assert started()[0] == 1
    assert f" {tmp_path / 'out_smoke/train.log'}" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", ["recipes/evaluate.sh", "recipes/run_gtpo_cpu.sh"])
def test_what_is_no_recipe_for_gpus_is_refused(recipe, capsys):
    assert main(["smoke", recipe]) == 2
    assert re.search(f"{recipe} has no smoke .*recipes/run_gtpo_qwen.sh", capsys.readouterr().err)


def test_only_its_own_folder_is_begun_anew(started, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/metrics.jsonl").write_text("a real run")
    started()
    assert (tmp_path / "out/metrics.jsonl").read_text() == "a real run"
    assert json.loads((tmp_path / "out_smoke/metrics.jsonl").read_text().splitlines()[-1])["step"] == 4


def test_without_a_gpu_it_asks_for_vllms_cpu_build_and_short_completions(tmp_path, monkeypatch):
    for name in ("VERL_PLATFORM", "INFER_BACKEND"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MAX_RESPONSE_LENGTH", "512")  # as recipes export theirs
    monkeypatch.setenv("MAX_PROMPT_LENGTH", "16")
    monkeypatch.setenv("STRICT_INITIAL_ENTROPY", "1")
    monkeypatch.setenv("SMOKE_MODEL", "small")
    monkeypatch.setenv("SMOKE", "1")
    on_cpu = smoke.environment_of(tmp_path, has_gpu=False)
    on_gpu = smoke.environment_of(tmp_path, has_gpu=True)
    assert (on_cpu["VERL_PLATFORM"], on_cpu["INFER_BACKEND"], on_cpu["MAX_RESPONSE_LENGTH"]) == ("cpu", "vllm", "64")
    assert not {"VERL_PLATFORM", "INFER_BACKEND", "SMOKE"} & set(on_gpu) and on_gpu["MAX_RESPONSE_LENGTH"] == "512"
    assert on_cpu["MAX_PROMPT_LENGTH"] == "16" and on_cpu["TRAIN_BATCH_SIZE"] == "1"
    assert on_cpu["STRICT_INITIAL_ENTROPY"] == on_gpu["STRICT_INITIAL_ENTROPY"] == "0"
    assert on_gpu["MODEL_PATH"] == "small" and on_gpu["OUT"] == str(tmp_path)


def test_an_empty_data_set_is_the_recipes_default(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    monkeypatch.setenv("DATASET", "")
    monkeypatch.setenv("SMOKE_MODEL", "small")
    environment = smoke.environment_of(tmp_path, has_gpu=True)
    assert environment["DATA_DIR"] == "data/gsm8k"
    done = subprocess.Popen(["true"])
    monkeypatch.setattr(smoke.subprocess, "Popen", lambda *_, **__: done)
    monkeypatch.setattr(smoke, "end_process", lambda process: None)
    evaluate = smoke.checks(tmp_path / "recipe.sh", [], tmp_path, environment)["an evaluation of the checkpoint"]
    assert evaluate() and (tmp_path / "gsm8k").readlink() == Path("data/gsm8k").absolute()


def test_the_worst_step_says_whether_rollout_and_trainer_agree(tmp_path):
    lines = ({"step": step, smoke._PROBS_DIFF: value} for step, value in ((1, 0.001), (2, 0.4)))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    agrees = [*smoke.checks(tmp_path, [], tmp_path, {"DATA_DIR": "x"}).values()][1]
    assert agrees() is False
