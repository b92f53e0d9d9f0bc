"""GTPO in TRL, trained on CPU with a random model of two thousand parameters; `bash scripts/check_trl.sh` runs it."""

import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from reference import advantages as slow_advantages
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl_gtpo import GTPOTrainer, departures

from gtpo_verl import GTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.tools.diagnose.report import read_run, report_on
from gtpo_verl.tools.rollouts import find_source

ROOT = Path(__file__).resolve().parents[1]
ALL_OFF = GTPOConfig(entropy_coeff=0, completion_filter="never", conflict_span="none")
PROMPTS = Dataset.from_list([{"prompt": f"{a}+2="} for a in (1, 23, 4, 567)] * 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a model and a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("model")
    vocab = {token: number for number, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    characters = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocab), initializer_range=0.8, eos_token_id=1, pad_token_id=0, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def small_digits(completions, **kwargs):
    """A reward that random completions often get, and often not."""
    return [float(sum(character in "01234" for character in text)) for text in completions]


def train(
    trainer_class,
    model,
    output_dir,
    gtpo=None,
    reward=small_digits,
    steps=3,
    resume=None,
    eval_dataset=None,
    **settings,
):
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3} | settings
    common = {
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "loss_type": "grpo",
    } | settings
    config = GRPOConfig(str(output_dir), max_steps=steps, max_completion_length=5, logging_steps=1, **common)
    trainer = trainer_class(model, reward, config, PROMPTS, eval_dataset, **({} if gtpo is None else {"gtpo": gtpo}))
    trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
    return trainer


class Recorder(GTPOTrainer):
    """Keeps of each completion what an unpadded forward pass of the same policy says of it, and its advantages."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        for prompt, prompt_mask, response, mask, advantages in zip(*(batch[name] for name in names), strict=True):
            prompt, response = prompt[prompt_mask.bool()], response[mask.bool()]
            with torch.no_grad():
                logits = self.model(torch.cat([prompt, response]).unsqueeze(0)).logits[0, len(prompt) - 1 : -1]
            entropy = torch.distributions.Categorical(logits=logits / self.args.temperature).entropy()
            text = self.processing_class.decode(response, skip_special_tokens=True)
            row = {"response": response.tolist(), "entropy": entropy.tolist(), "reward": small_digits([text])[0]}
            row["is_training"] = self.model.training
            assert not advantages[len(response) :].any()
            self.rows = [*getattr(self, "rows", []), row | {"advantages": advantages[: len(response)].tolist()}]
        return batch


def assert_rows_are_gtpo(rows, gtpo, scale_rewards="group"):
    responses, entropy, rewards, advantages = (
        [row[name] for row in rows] for name in ("response", "entropy", "reward", "advantages")
    )
    masks = [[1] * len(response) for response in responses]
    prompts = [number // 4 for number in range(len(rows))]
    norm_by_std = scale_rewards == "group"
    expected = slow_advantages(rewards, masks, prompts, responses, entropy, gtpo, None, norm_by_std, epsilon=1e-4)
    torch.testing.assert_close(torch.tensor(sum(advantages, [])), torch.tensor(sum(expected, [])), rtol=1e-4, atol=1e-5)
    return expected


def filter_metrics(trainer):
    log = trainer.state.log_history
    return [
        (step["gtpo/filter/active"], step["gtpo/filter/dropped_frac"]) for step in log if "gtpo/filter/active" in step
    ]


def test_a_model_that_starts_above_the_threshold_is_not_filtered(model, tmp_path):
    """With `always` there would be nothing to learn from."""
    initial = load_file(Path(model) / "model.safetensors")
    trainer = train(GTPOTrainer, model, tmp_path, temperature=2.0)
    assert trainer.gtpo_run.initial_entropy.value > math.log(2)
    assert filter_metrics(trainer) == [(0, 0)] * 3
    trained = trainer.model.state_dict()
    assert any(not torch.equal(trained[name], weight) for name, weight in initial.items())


def test_a_model_that_starts_below_the_threshold_is_filtered(model, tmp_path):
    """By the first batch; completions above the threshold are then dropped."""
    trainer = train(GTPOTrainer, model, tmp_path, GTPOConfig(entropy_threshold=2.0))
    assert trainer.gtpo_run.initial_entropy.value < 2 and all(active for active, _ in filter_metrics(trainer))


def test_the_initial_entropy_is_that_of_the_first_training_batch_and_not_of_an_evaluation(model, tmp_path):
    settings = {"eval_strategy": "steps", "eval_on_start": True, "num_generations_eval": 2}
    trainer = train(Recorder, model, tmp_path, GTPOConfig(), eval_dataset=PROMPTS, **settings)
    trained = [row for row in trainer.rows if row["is_training"]]
    assert trainer.rows[0]["is_training"] is False and len(trained) == 3 * 8
    measured = trainer.gtpo_run.initial_entropy
    means = [sum(row["entropy"]) / len(row["entropy"]) for row in trained[:8]]
    assert (measured.completions, measured.prompts) == (8, 2)
    assert measured.value == pytest.approx(sum(means) / 8, rel=1e-4)
    first_evaluation = next(step for step in trainer.state.log_history if "eval_gtpo/filter/active" in step)
    assert first_evaluation["step"] == 0 and first_evaluation["eval_gtpo/filter/active"] == 0


def test_a_resumed_run_takes_the_initial_entropy_from_its_checkpoint(model, tmp_path):
    first = train(GTPOTrainer, model, tmp_path, save_strategy="steps", save_steps=3)
    record = InitialEntropy.path(tmp_path / "checkpoint-3")
    assert InitialEntropy.load(record.parent) == first.gtpo_run.initial_entropy
    resumed = train(GTPOTrainer, model, tmp_path, resume=record.parent, steps=4)
    assert resumed.gtpo_run.initial_entropy == first.gtpo_run.initial_entropy
    record.unlink()
    with pytest.raises(ValueError, match=r"this run is resumed, but .* is missing; set .*initial_entropy"):
        train(GTPOTrainer, model, tmp_path, resume=record.parent, steps=5)
    train(GTPOTrainer, model, tmp_path, GTPOConfig(completion_filter="never"), resume=record.parent, steps=4)


def test_resuming_from_the_last_checkpoint_finds_its_record(model, tmp_path):
    first = train(GTPOTrainer, model, tmp_path, save_strategy="steps", save_steps=1)
    InitialEntropy.path(tmp_path).unlink()  # that of the run; each checkpoint has its own
    resumed = train(GTPOTrainer, model, tmp_path, resume=True, steps=4)
    assert resumed.gtpo_run.initial_entropy == first.gtpo_run.initial_entropy


def test_a_filter_that_empties_batch_after_batch_ends_the_run(model, tmp_path, caplog):
    nothing_passes = GTPOConfig(completion_filter="always", entropy_threshold=1e-9)
    with pytest.raises(ValueError, match="dropped every completion of 20 batches in a row"):
        train(GTPOTrainer, model, tmp_path, nothing_passes, steps=30)
    assert sum("dropped every completion" in record.getMessage() for record in caplog.records) == 1


def test_equal_rewards_are_told(model, tmp_path, caplog):
    train(GTPOTrainer, model, tmp_path, reward=lambda completions, **kwargs: [1.0] * len(completions))
    assert sum("equal rewards" in record.getMessage() for record in caplog.records) == 1


def test_a_completion_below_the_least_reward_of_a_right_answer_gets_no_positive_advantage(model, tmp_path):
    off = {"entropy_coeff": 0, "completion_filter": "never", "conflict_span": "none"}
    rows = train(Recorder, model, tmp_path, GTPOConfig(**off, min_correct_reward=3)).rows
    assert any(row["reward"] < 3 and min(row["advantages"]) < 0 for row in rows)
    assert all(max(row["advantages"]) <= 0 for row in rows if row["reward"] < 3)
    assert any(max(row["advantages"]) > 0 for row in rows if row["reward"] >= 3)


def test_a_least_reward_that_no_completion_reaches_is_told(model, tmp_path, caplog):
    train(GTPOTrainer, model, tmp_path, GTPOConfig(completion_filter="never", min_correct_reward=99), steps=10)
    assert sum("min_correct_reward=99" in record.getMessage() for record in caplog.records) == 1


def test_pictures_are_refused(model, tmp_path, monkeypatch):
    generate = GRPOTrainer._generate_and_score_completions

    def with_pictures(self, inputs):
        return generate(self, inputs) | {"pixel_values": torch.zeros(8, 3, 2, 2)}

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_pictures)
    with pytest.raises(ValueError, match="pixel_values"):
        train(GTPOTrainer, model, tmp_path)


def test_the_importance_weights_of_vllm_are_a_departure(tmp_path):
    common = {"output_dir": str(tmp_path), "loss_type": "grpo", "use_cpu": True, "bf16": False}
    weighted = GRPOConfig(use_vllm=True, **common)
    assert departures(weighted) == {"vllm_importance_sampling_correction": (True, False)}
    assert not departures(GRPOConfig(use_vllm=True, vllm_importance_sampling_correction=False, **common))
    assert not departures(GRPOConfig(**common))


@pytest.mark.parametrize("temperature, threshold, scale_rewards", [(1.0, 0.9, "group"), (0.6, 0.6, "none")])
def test_every_token_gets_the_advantage_of_a_slow_reference(model, tmp_path, temperature, threshold, scale_rewards):
    gtpo = GTPOConfig(completion_filter="always", entropy_threshold=threshold)
    trainer = train(Recorder, model, tmp_path, gtpo, temperature=temperature, scale_rewards=scale_rewards)
    assert len(trainer.rows) == 3 * 8
    assert_rows_are_gtpo(trainer.rows, gtpo, scale_rewards)
    log = trainer.state.log_history
    assert any(step.get("gtpo/conflict/token_frac", 0) > 0 for step in log)
    assert any(0 < step.get("gtpo/filter/dropped_frac", 0) < 1 for step in log)


def test_conflict_tokens_of_bad_completions_get_nothing_and_of_good_ones_twice_the_advantage(model, tmp_path):
    gtpo = GTPOConfig(entropy_coeff=0, completion_filter="never")
    rows = train(Recorder, model, tmp_path, gtpo, scale_rewards="none").rows
    weights = {1: set(), -1: set()}
    for start in range(0, len(rows), 4):
        group = rows[start : start + 4]
        mean = sum(row["reward"] for row in group) / 4
        for row in group:
            deviation = row["reward"] - mean
            if deviation:
                weights[1 if deviation > 0 else -1] |= {value / deviation for value in row["advantages"]}
            else:
                assert not any(row["advantages"])
    assert weights == {1: {1, 2}, -1: {0, 1}}


def test_with_all_parts_off_the_model_learns_what_trls_own_trainer_teaches_it(model, tmp_path):
    grpo, off, gtpo = (
        train(trainer_class, model, tmp_path, config).model.state_dict()
        for trainer_class, config in ((GRPOTrainer, None), (GTPOTrainer, ALL_OFF), (GTPOTrainer, None))
    )
    assert all(torch.equal(grpo[name], off[name]) for name in grpo)
    assert any(not torch.equal(grpo[name], gtpo[name]) for name in grpo)


def test_a_completion_that_nobody_scored_does_not_move_the_policy(model, tmp_path):
    """TRL's own trainer gives it A = 0; with GTPO −γ⟨H⟩ would be left."""

    class Unscored(GTPOTrainer):
        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            self.moves = [*getattr(self, "moves", []), *batch["advantages"].any(-1).tolist()]
            return batch

    def every_second(completions, **kwargs):
        return [None if number % 2 else score for number, score in enumerate(small_digits(completions))]

    trainer = train(Unscored, model, tmp_path, GTPOConfig(completion_filter="never"), reward=every_second)
    assert any(trainer.moves[::2]) and not any(trainer.moves[1::2])


def test_a_completion_at_the_mean_of_its_group_has_no_sign(model, tmp_path):
    """TRL's own A of the third, whose reward is the mean, is 3.9e-7."""

    def tenths(completions, **kwargs):
        return [0.4, 0.5, 0.6, 0.4, 0.7, 0.8, 0.7, 0.7]

    settings = {"reward": tenths, "num_generations": 8, "scale_rewards": "none"}
    rows = train(Recorder, model, tmp_path, ALL_OFF, **settings).rows
    assert [any(row["advantages"]) for row in rows[:8]] == [True, True, False, *[True] * 5]


@pytest.mark.parametrize(
    "other",
    [
        {"loss_type": "dapo"},
        {"importance_sampling_level": "sequence"},
        {"entropy_coef": 0.01},
        {"beta": 0.04, "num_iterations": 2, "steps_per_generation": 4},
    ],
)
def test_a_setting_that_is_not_the_papers_is_told(model, tmp_path, other):
    config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none", **({"loss_type": "grpo"} | other))
    with pytest.warns(UserWarning, match=f"not the paper's GTPO: {re.escape(str(other))}"):
        GTPOTrainer(model, small_digits, config, PROMPTS)


def test_evaluation_has_groups_of_its_own_size(model, tmp_path):
    trainer = train(GTPOTrainer, model, tmp_path, num_generations_eval=2)
    assert trainer.evaluate(PROMPTS)["eval_gtpo/group/size_min"] == 2


def test_diagnose_reads_what_trl_wrote(model, tmp_path):
    """`tests/tools/diagnose/trainer_state.json` is of 50 such steps of GRPO, with longer completions."""
    train(GRPOTrainer, model, tmp_path, save_strategy="steps", save_steps=3)
    report = report_on(read_run(tmp_path / "checkpoint-3/trainer_state.json"))
    assert report["framework"] == "TRL" and report["steps"] == [1, 3] and report["verdict"] == "cannot tell"
    assert {"terminated", "zero_std_groups", "reward", "entropy", "length"} <= report["numbers"].keys()


def test_the_view_reads_the_completions_that_trl_logs(model, tmp_path):
    train(GRPOTrainer, model, tmp_path, log_completions=True, epsilon_high=0.28)
    source = find_source(tmp_path, str(model))
    steps = [source.read(path) for path in source.paths]
    assert [rows[0]["step"] for rows in steps] == [1, 2, 3] and {len(rows) for rows in steps} == {len(steps[0])}
    assert abs(sum(row["group_advantage"] for rows in steps for row in rows)) < 1e-3


def test_completions_of_a_prompt_may_be_spread_over_processes(model, tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launch, __file__, model, tmp_path], check=True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    rows = [row for step in range(3) for half in (first, second) for row in half[2 * step : 2 * step + 2]]
    expected = assert_rows_are_gtpo(rows, GTPOConfig(completion_filter="never"))
    assert any(0 in row and any(row) for row in expected)


@pytest.mark.parametrize("number", [0, 1], ids=["paper", "authors"])
def test_command_of_the_documentation_trains(model, tmp_path, number):
    page = (ROOT / "docs/other-trainers.md").read_text().replace("\\\n", " ")
    command = re.findall(r"^python (examples/trl_gtpo\.py .*)$", page, re.MULTILINE)[number]
    command = command.replace("Qwen/Qwen2.5-0.5B-Instruct", model).replace("outputs/trl", str(tmp_path))
    small = "--max_steps 2 --max_completion_length 5 --logging_steps 1 --use_cpu --report_to none"
    run = [sys.executable, *shlex.split(command, comments=True), *small.split()]
    log = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert log.count("gtpo/conflict/token_frac") == 2
    assert (tmp_path / "model.safetensors").exists() or list(tmp_path.glob("checkpoint-*"))


def test_the_example_loads_and_resumes_as_it_is_told(model, tmp_path):
    command = [sys.executable, "examples/trl_gtpo.py", "--model_name_or_path", model, "--output_dir", tmp_path]
    command += "--dtype bfloat16 --bf16 false --max_completion_length 5 --save_steps 1".split()
    command += "--use_cpu --report_to none".split()
    subprocess.run([*command, "--max_steps", "1"], cwd=ROOT, check=True)
    weights = tmp_path / "checkpoint-1/model.safetensors"
    written = weights.stat().st_mtime_ns
    resume = ["--max_steps", "2", "--resume_from_checkpoint", tmp_path / "checkpoint-1"]
    subprocess.run([*command, *resume], cwd=ROOT, check=True)
    assert (tmp_path / "checkpoint-2").exists() and weights.stat().st_mtime_ns == written  # not trained from the start
    assert {weight.dtype for weight in load_file(weights).values()} == {torch.bfloat16}


def by_log_probs(response_mask, old_log_probs):
    return response_mask * old_log_probs.exp()


def by_entropy(response_mask, entropy, advantages):
    return response_mask * (1 + entropy) * (2 + advantages.sign().unsqueeze(-1))


def test_lambda_of_ones_own_acts_on_the_advantages(model, tmp_path):
    gtpo = GTPOConfig(entropy_coeff=0, completion_filter="never", token_weights=f"pkg://{__name__}.by_entropy")
    weighed = train(Recorder, model, tmp_path / "own", gtpo)
    plain = train(Recorder, model, tmp_path / "plain", ALL_OFF)
    first, same = weighed.rows[:8], plain.rows[:8]  # of one policy
    for own, row in zip(first, same, strict=True):
        for weighed_a, a in zip(own["advantages"], row["advantages"], strict=True):
            assert (weighed_a == 0) == (a == 0) and weighed_a * a >= 0
            assert abs(weighed_a) > abs(a) or a == 0
    assert any("gtpo/lambda/mean" in entry for entry in weighed.state.log_history)


def test_log_probs_that_trl_does_not_compute_are_an_error_at_the_start(model, tmp_path):
    gtpo = GTPOConfig(completion_filter="never", token_weights=f"pkg://{__name__}.by_log_probs")
    with pytest.raises(ValueError, match="token_weights=.* asks for old_log_probs"):
        train(GTPOTrainer, model, tmp_path, gtpo)
    train(GTPOTrainer, model, tmp_path, gtpo, num_iterations=2)


if __name__ == "__main__":
    folder, output = sys.argv[1:]
    trainer = train(Recorder, folder, output, GTPOConfig(completion_filter="never"), per_device_train_batch_size=2)
    torch.save(trainer.rows, Path(output) / f"{trainer.accelerator.process_index}.pt")
    trainer.accelerator.end_training()  # else a thread of the process group may abort a rank as it exits
