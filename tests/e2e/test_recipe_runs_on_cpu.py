"""The recipes, unchanged, on CPU: tiny model, small data, few steps, by their own variables and overrides."""

import importlib.util
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.paper.data import format_solution

pytestmark = pytest.mark.e2e


@pytest.fixture
def recipe(task, run_recipe, tmp_path):
    """Run a recipe on the arithmetic task until it ends with a status; its output, and the steps it logged."""

    def run(script, *arguments, status=0, **variables):
        small = {
            "INFER_BACKEND": "hf",
            "MODEL_PATH": str(task / "model"),
            "DATA_DIR": str(task),
            "OUT": str(tmp_path / script),
            "NGPUS_PER_NODE": "1",
            "FINETUNE": "full",
            "OFFLOAD": "False",
            "TRAIN_BATCH_SIZE": "2",
            "MAX_PROMPT_LENGTH": "16",
            "MAX_RESPONSE_LENGTH": "64",
            "PPO_MAX_TOKEN_LEN_PER_GPU": "512",
        }
        ended_with, output = run_recipe(script, *arguments, **small | variables)
        assert ended_with == status, output[-4000:]
        metrics = tmp_path / script / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return output, [json.loads(line) for line in lines]

    return run


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="bash scripts/setup_cpu.sh vllm installs vLLM")
def test_the_gtpo_recipe_trains_without_a_reference_worker_from_the_papers_initial_entropy(recipe, tmp_path):
    variables = {"INFER_BACKEND": "vllm", "STRICT_INITIAL_ENTROPY": "1"}
    output, steps = recipe("run_gtpo_qwen", "trainer.total_training_steps=2", **variables)
    log = (tmp_path / "run_gtpo_qwen/train.log").read_text()
    assert "no reference worker" in log
    assert "actor_rollout" in log and "ref_init_model" not in log and "RefPolicy" not in log
    assert "| steps | reward | format | accuracy | strict |" in output
    assert (tmp_path / "run_gtpo_qwen/training.png").stat().st_size > 10_000

    measured = float(re.search(r"^initial_entropy=(.*)$", output, re.MULTILINE)[1])
    assert 0 < measured < 0.6
    assert re.search(rf"filter on: {measured:.3f} < 0\.693 nats, .*algorithm\.gtpo\.initial_entropy", log)
    assert [step["gtpo/entropy/initial"] for step in steps] == [pytest.approx(measured, abs=1e-6)] * 2
    for step in steps:
        assert step["actor/grad_norm"] > 0 and abs(step["actor/ppo_kl"]) < 1e-3
        assert step["training/rollout_probs_diff_max"] < 0.01 and step["gtpo/group/size_min"] == 8
        assert "actor/kl_loss" not in step and "timing_s/ref" not in step


@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="bash scripts/setup_cpu.sh vllm installs vLLM")
def test_a_lora_run_sends_its_adapter_to_vllm(recipe):
    # At this learning rate rollouts from the base would differ from the actor at once.
    variables = {"INFER_BACKEND": "vllm", "FINETUNE": "lora", "LORA_RANK": "8", "ACTOR_LR": "0.1"}
    _, steps = recipe("run_gtpo_llama", "trainer.total_training_steps=2", **variables)
    assert [step["actor/grad_norm"] > 0 for step in steps] == [True, True]
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 0.01


def test_the_grpo_recipe_trains_after_a_launch_that_failed_goes_on_as_gtpo_and_is_evaluated(recipe, task, tmp_path):
    twin = {"ALGO": "grpo", "KL_LOSS_COEF": "0.04", "SAVE_FREQ": "2"}
    output, _ = recipe("run_gtpo_qwen", "algorithm.adv_estimater=grpo", status=1, **twin)
    assert "algorithm.adv_estimater" in output.replace("'", "")
    output, _ = recipe("run_gtpo_qwen", status=1, ROLLOUT_N="1")
    assert re.search(r"actor_rollout_ref\.rollout\.n=1: .* 2 or more", output)
    assert not (tmp_path / "run_gtpo_qwen/train.log").exists()  # Ray would be in it
    _, steps = recipe("run_gtpo_qwen", "trainer.total_training_steps=2", **twin)
    assert len(steps) == 2
    for step in steps:  # with a reference model
        assert step["actor/grad_norm"] > 0 and step["actor/kl_coef"] == 0.04 and "actor/kl_loss" in step
        assert "reward/strict/mean" in step and not any("gtpo" in key for key in step)

    changed = "algorithm.gtpo.entropy_coeff=0.2", "algorithm.gtpo.initial_entropy=0.3"
    output, _ = recipe("run_gtpo_qwen", *changed, status=2, NGPUS_PER_NODE="2")
    for change in ("adv_estimator=gtpo, was grpo", "entropy_coeff=0.2, was unset", "n_gpus_per_node=2, was 1"):
        assert change in output
    (tmp_path / "run_gtpo_qwen/settings.json").unlink()
    output, _ = recipe("run_gtpo_qwen", "trainer.total_training_steps=3", status=1)
    assert re.search(r"/gtpo_initial_entropy\.json .*missing; .*algorithm\.gtpo\.initial_entropy", output)
    assert (tmp_path / "run_gtpo_qwen/train.log").read_text().count("local Ray instance") == 1
    goes_on = "trainer.total_training_steps=3", "algorithm.gtpo.initial_entropy=0.3"
    _, (*grpo, gtpo) = recipe("run_gtpo_qwen", *goes_on)
    assert [step["step"] for step in grpo] == [1, 2] and gtpo["step"] == 3
    assert gtpo["gtpo/entropy/initial"] == 0.3 and gtpo["actor/grad_norm"] > 0

    checkpoint = tmp_path / "run_gtpo_qwen/checkpoints/global_step_2"
    of = {"DATA_ROOT": str(task.parent), "DATASETS": task.name, "SAMPLES": "2", "LABEL": "tiny/sums/GRPO"}
    output, _ = recipe("evaluate", str(checkpoint), "data.val_max_samples=4", **of)
    assert "| tiny | sums | GRPO | arithmetic pass@1 |" in output
    assert len((tmp_path / "evaluate/arithmetic.jsonl").read_text().splitlines()) == 8
    assert (checkpoint / "exported/model.safetensors").exists()


@pytest.mark.nightly
def test_a_killed_evaluation_keeps_its_batches_and_loses_no_completion(recipe, task, tmp_path):
    """6 questions, 4 completions of each, 2 questions a batch."""
    command = ("evaluate", str(task / "model"), "data.val_max_samples=6")
    of = {"DATA_ROOT": str(task.parent), "DATASETS": task.name, "LABEL": "tiny/sums/start"}
    of |= {"SAMPLES": "4", "BATCH": "2"}
    parts = tmp_path / "evaluate/arithmetic.parts"
    recipe(*command, **of, may_be_killed=lambda: list(parts.glob("*.jsonl")), status=None)
    kept = [path.read_text() for path in parts.glob("*.jsonl")]
    assert not (tmp_path / "evaluate/arithmetic.jsonl").exists()

    output, _ = recipe(*command, **of)
    dump = (tmp_path / "evaluate/arithmetic.jsonl").read_text()
    assert kept and all(part in dump for part in kept)
    rows = [json.loads(line) for line in dump.splitlines()]
    assert len({row["uid"] for row in rows}) == 24 and len({row["input"] for row in rows}) == 6
    records = json.loads((tmp_path / "evaluate/evaluation.json").read_text())["records"]
    assert {(record["questions"], record["completions"]) for record in records} == {(6, 4)}
    assert {(record["metric"], record["k"]) for record in records} >= {("pass", 1), ("maj", 4)}
    assert "| tiny | sums | start | arithmetic maj@4 |" in output


@pytest.mark.nightly
def test_a_lora_run_sends_merged_weights_to_a_rollout_that_takes_no_adapter(recipe):
    # At this learning rate rollouts from the base would differ from the actor by far more than bfloat16 rounds.
    lora = ("actor_rollout_ref.model.lora.merge=True", "actor_rollout_ref.actor.optim.lr=0.1")
    _, steps = recipe("run_gtpo_llama", *lora, "trainer.total_training_steps=2", FINETUNE="lora", LORA_RANK="4")
    assert [step["actor/grad_norm"] > 0 for step in steps] == [True, True]
    assert max(step["training/rollout_probs_diff_mean"] for step in steps) < 2e-3


@pytest.mark.nightly
def test_the_sft_recipe_trains_on_solutions(recipe, task, tmp_path):
    for name in ("train", "test"):
        messages = []
        for row in pq.read_table(task / f"{name}.parquet").to_pylist()[:16]:
            solution = format_solution("add", row["reward_model"]["ground_truth"])
            messages.append({"messages": [*row["prompt"], {"role": "assistant", "content": solution}]})
        pq.write_table(pa.Table.from_pylist(messages), tmp_path / f"sft_{name}.parquet")
    output, steps = recipe(
        "run_sft",
        "trainer.total_epochs=2",
        "optim.lr=1e-3",
        TRAIN_FILE=str(tmp_path / "sft_train.parquet"),
        VAL_FILE=str(tmp_path / "sft_test.parquet"),
        MAX_LENGTH="128",
    )
    losses = [step["train/loss"] for step in steps if "train/loss" in step]
    assert len(losses) == 16 and sum(losses[8:]) < sum(losses[:8])
    assert any("val/loss" in step for step in steps)
    assert (tmp_path / "run_sft/checkpoints/global_step_16/fsdp_config.json").exists()
