import re
from pathlib import Path

import pytest

from gtpo_verl.monitor import explain
from gtpo_verl.monitor.explain import LABELS, ROWS, Advice
from gtpo_verl.monitor.frameworks import FRAMEWORKS, framework_of, limit_of, remedy, translate

ROOT = Path(__file__).resolve().parents[2]


def test_a_share_of_the_opposite_is_turned():
    assert translate({"completions/clipped_ratio": 0.25}, "TRL") == {"terminated": 0.75}


def test_the_first_metric_that_is_logged_counts():
    assert translate({"actor/entropy_loss": 2.0, "actor/entropy": 1.0}, "verl") == {"entropy": 1.0}


def test_a_reward_function_of_trl_is_a_part_unless_it_is_the_format():
    metrics = {"rewards/think_format_reward/mean": 0.5, "rewards/tag/mean": 0.25, "rewards/tag/std": 9}
    assert translate(metrics, "TRL") == {"format": 0.5, "part tag": 0.25}


def test_a_reward_of_verl_is_a_part_unless_it_is_the_format():
    named = {f"reward/{name}/mean": 1.0 for name in ("format", "format_tags", "accuracy", "tags")}
    assert {*translate(named, "verl")} == {"format", "part format_tags", "part accuracy", "part tags"}


def test_what_is_to_be_tried_or_logged_is_in_verls_config(compose_config):
    verl = FRAMEWORKS["verl"]
    advices = [row.advice for row in ROWS] + [x for x in vars(explain).values() if isinstance(x, Advice)]
    kinds = {advice.remedy for advice in advices}
    assert kinds - {""} == verl.remedies.keys()
    overrides = [remedy(kind, "verl", 1e-4, 64) for kind in sorted(kinds - {""})]
    page = (ROOT / "docs/diagnose.md").read_text()
    overrides += re.findall(r"^(trainer\.v1\S+|actor\S+calculate_log_probs=True)$", page, re.MULTILINE)
    assert len(overrides) == len(kinds) + 2
    assert remedy("lr", "verl", 0, 64) == remedy("limit", "verl", 1e-4, None) == remedy("filter", "TRL", 1e-4, 64) == ""
    assert remedy("look", "ms-swift", 1e-4, 64) == "--log_completions true"
    config = compose_config(*" ".join(overrides).split())
    assert config.actor_rollout_ref.actor.optim.lr == 5e-5 and config.data.max_response_length == 128
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.28 and config.trainer.rollout_data_dir == "rollouts"
    assert config.algorithm.filter_groups.enable


@pytest.mark.parametrize(
    ("framework", "metrics", "validation"),
    [
        ("verl", {"val-core/a/acc/mean@8": 0.5, "val-core/b/acc/mean@8": 0.3, "val-core/a/acc/best@8/mean": 0.9}, 0.4),
        ("TRL", {"eval/reward": 1.5, "eval/rewards/accuracy_reward/mean": 0.25}, 0.25),
        ("ms-swift", {"eval_reward": 1.7, "eval_rewards/AccuracyORM/mean": 0.25}, 0.25),
        ("OpenRLHF", {"eval_gsm8k_pass1": 0.25}, 0.25),
        ("verl", {"val-core/a/acc/mean@8": 0.5, "val-core/game/reward/mean@8": 50.0}, 0.5),
        ("OpenRLHF", {"eval/eval_openai/gsm8k_pass1": 0.5, "eval/eval_aime-2024_pass1": 0.1}, 0.3),
    ],
)
def test_an_accuracy_in_validation_is_the_mean_of_its_results_and_at_most_1(framework, metrics, validation):
    assert translate(metrics, framework) == {"validation": validation, "validation_limit": 1}


@pytest.mark.parametrize(
    ("framework", "metrics", "validation"),
    [
        ("verl", {"val-aux/a/reward/mean@1": 0.5, "val-aux/a/num_turns/mean@1": 9, "val-aux/num_turns/max": 9}, 0.5),
        ("verl", {"val-core/a/reward/mean@8": 0.5, "val-core/b/reward/mean@8": 1.5}, 1.0),
        ("TRL", {"eval_reward": 1.5, "eval_loss": 0.1}, 1.5),
    ],
)
def test_a_reward_in_validation_may_be_anything(framework, metrics, validation):
    assert translate(metrics, framework) == {"validation": validation}


def test_what_is_no_number_is_left_out():
    assert translate({"reward": None, "kl": "0.1", "rewards/tag/mean": [1], "loss": 1}, "TRL") == {"loss": 1.0}


def test_verls_clip_ratio_says_how_many_are_cut_off_only_where_the_longest_reaches_the_limit():
    """In the V1 trainer it is the share that is as long as the longest (verl #7817)."""
    short = {"response_length/max": 33, "response_length/clip_ratio": 0.4}
    long = {"response_length/max": 64, "response_length/clip_ratio": 0.4}
    assert translate(short, "verl", 64)["terminated"] == 1 and translate(long, "verl", 64)["terminated"] == 0.6
    assert "terminated" not in translate(long, "verl")
    assert translate(short | {"response_length/clip_ratio": 0}, "verl")["terminated"] == 1
    assert translate(long | {"completion/eos_rate": 0.9}, "verl", 64)["terminated"] == 0.9


def test_every_number_of_a_framework_is_one_of_ours():
    helpers = {"lowest", "highest", "lr", "longest", "cut", "clipped", "tokens", "prompt"}
    for framework in FRAMEWORKS.values():
        assert framework.metrics.keys() <= LABELS.keys() | helpers
    assert {row.number for row in ROWS} <= LABELS.keys()


def test_the_limit_is_the_longest_if_several_steps_have_completions_cut_off_at_it():
    cut = [{"longest": 64, "terminated": 0.9}] * 3
    assert limit_of([*cut, {"longest": 70, "terminated": 1.0}]) == 64
    assert limit_of(cut[1:]) is None and limit_of([*cut, {"longest": 70, "cut": 0.1}]) is None


@pytest.mark.parametrize(
    ("metrics", "framework"),
    [
        (["reward", "reward_std", "completion_length", "kl"], "TRL"),
        (["critic/score/mean", "response_length/mean"], "verl"),
        (["rollout/reward_mean", "actor_lr"], "OpenRLHF"),
    ],
)
def test_the_framework_is_that_which_calls_most_metrics_so(metrics, framework):
    assert framework_of(metrics) == framework


@pytest.mark.parametrize(
    ("metric", "number", "value"),
    [
        ("rollout/truncated_rate", "terminated", 0.75),
        ("truncated", "terminated", 0.75),
    ],
)
def test_openrlhfs_names(metric, number, value):
    assert translate({metric: 0.25}, "OpenRLHF") == {number: value}
