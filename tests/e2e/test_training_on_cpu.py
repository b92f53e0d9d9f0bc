"""verl's real trainer, with Ray, TransferQueue, FSDP2 and a rollout server, for a few steps each."""

import json
import math
import re
from importlib.metadata import entry_points

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def check_gtpo_records(records, steps, ppo_kl=1e-3):
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    for record in records:
        assert record["gtpo/group/size_min"] == 8
        assert 0 <= record["gtpo/conflict/token_frac"] <= 1
        assert record["gtpo/entropy/mean"] == pytest.approx(record["actor/entropy"], rel=0.2)
        assert 0 < record["timing_s/gtpo"] < record["timing_s/step"]
        assert math.isfinite(record["actor/grad_norm"]) and record["actor/grad_norm"] > 0
        assert abs(record["actor/ppo_kl"]) < ppo_kl
        assert {"reward/format/mean", "reward/acc/mean", "reward/strict/mean", "completion/eos_rate"} <= set(record)
        assert 0 <= record["completion/repetition/mean"] < 1
        assert "timing_s/ref" not in record
    assert len({record["gtpo/entropy/initial"] for record in records}) == 1


def test_two_data_parallel_ranks_take_the_step_that_one_takes_on_the_same_rollouts(train, tmp_path):
    same = ["skip.rollout_tq.enable=true", f"skip.rollout_tq.dump_dir={tmp_path}", "skip.rollout_tq.steps=[1]"]
    same += ["actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=0.1"]
    same += ["data.train_batch_size=3", "trainer.save_freq=1"]
    same += ["actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]"]
    first, weights = {}, {}
    for ranks in (1, 2):
        folder = tmp_path / f"checkpoints{ranks}"
        result = train(*same, f"trainer.n_gpus_per_node={ranks}", f"trainer.default_local_dir={folder}", steps=ranks)
        assert result.returncode == 0, result.stdout + result.stderr
        check_gtpo_records(train.records(), ranks)
        first[ranks] = train.records()[0]
        weights[ranks] = load_file(folder / "global_step_1/actor/huggingface/model.safetensors")
    for key, value in first[1].items():
        if key.startswith("gtpo/") or key in ("actor/grad_norm", "actor/entropy", "reward/score/mean"):
            assert first[2][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    for name, weight in weights[1].items():
        torch.testing.assert_close(weights[2][name], weight, rtol=0, atol=5e-7)


def test_colocate_async_trains_on_groups_that_dapo_keeps(train):
    result = train(
        "trainer.v1.trainer_mode=colocate_async",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=strict",  # which has no spread in half of the groups
        steps=4,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    records = train.records()
    check_gtpo_records(records, 4)
    measured = records[0]["gtpo/entropy/initial"]
    assert f"filter on: {measured:.3f} < 0.693 nats, 16 completions of 2 prompts" in result.stdout
    assert re.search(r"algorithm\.gtpo\.initial_entropy +null .*first batch .*signal", result.stdout)
    assert all(0 < record["reward/strict/mean"] < 1 for record in records)
    assert sum(record.get("training/filter_groups/evicted_samples", 0) for record in records) > 0


GLOO = (
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=recipes.verl_cpu.gloo_checkpoint_engine",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=gloo",
)
SEPARATE_ASYNC = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    *GLOO,
    "ray_kwargs.ray_init.num_gpus=2",
)


def test_separate_async_trains_with_two_updates_between_weight_syncs(train):
    result = train(*SEPARATE_ASYNC, steps=3)
    assert result.returncode == 0, result.stdout + result.stderr
    records = train.records()
    check_gtpo_records(records, 3, ppo_kl=0.1)
    # The second update of a step still takes its entropies and old log-probs from the policy of the last sync.
    assert records[0]["training/rollout_probs_diff_max"] < 1e-3
    assert all(abs(record["actor/ppo_kl"]) > 1e-6 for record in records)
    assert "what finished first" in result.stdout


ROLLOUT_APART = (
    "trainer.use_v1=False",
    "actor_rollout_ref.hybrid_engine=False",
    *GLOO,
    "+rollout.nnodes=1",
    "+rollout.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_gpus=2",
)
FULLY_ASYNC = (
    "+async_training.staleness_threshold=0.1",
    "+async_training.trigger_parameter_sync_step=1",
    "+async_training.require_batches=1",
    "+async_training.partial_rollout=True",
    "+async_training.use_trainer_do_validate=False",
    "+rollout.total_rollout_steps=6",
    "data.train_batch_size=0",
    "data.gen_batch_size=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "algorithm.gtpo.initial_entropy=0.15",
    "ray_kwargs.ray_init.num_cpus=64",  # its trainer and its rollouter ask Ray for ten each
)


FROM_UPDATE = (
    "algorithm.gtpo.entropy_from=update",
    "algorithm.rollout_correction.bypass_mode=true",
    "algorithm.gtpo.initial_entropy=0.15",
)


@pytest.mark.parametrize(
    ("module", "overrides"),
    [
        ("trainer.main_ppo", ()),
        ("trainer.main_ppo", ("trainer.v1.trainer_mode=colocate_async",)),
        ("trainer.main_ppo", SEPARATE_ASYNC),
        ("experimental.fully_async_policy.fully_async_main", (*ROLLOUT_APART, *FULLY_ASYNC)),
    ],
    ids=["sync", "colocate_async", "separate_async", "fully_async"],
)
def test_bypass_mode_trains_with_the_entropy_from_the_update(train, module, overrides, tmp_path):
    dump = () if "experimental" in module else (f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}",)
    result = train(*overrides, *FROM_UPDATE, *dump, module=f"verl.{module}", steps=3)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [record for record in train.records() if "gtpo/entropy/initial" in record]
    assert len(records) >= 2
    for record in records:
        assert record["gtpo/group/size_min"] == 8 and record["actor/grad_norm"] > 0
        assert record["gtpo/entropy/mean"] == pytest.approx(record["actor/entropy_loss"], rel=0.2)
        assert abs(record["actor/ppo_kl"]) < 0.1 and "actor/entropy" not in record
    lines = (tmp_path / "dump/step_000001.jsonl").read_text().splitlines() if dump else []
    assert len(lines) % 8 == 0 and len(lines) >= 16 * len(dump)
    for line in map(json.loads, lines):
        assert sum(line["entropy"]) / len(line["token_ids"]) == pytest.approx(line["trajectory_entropy"], abs=1e-3)


@pytest.mark.parametrize(
    ("module", "overrides"),
    [
        ("one_step_off_policy.main_ppo", ()),
        # At an end between two validations its last update is logged twice.
        ("fully_async_policy.fully_async_main", (*FULLY_ASYNC, "trainer.test_freq=2")),
    ],
)
def test_verls_experimental_trainers_train(train, module, overrides):
    result = train(*ROLLOUT_APART, *overrides, module=f"verl.experimental.{module}", steps=3)
    assert result.returncode == 0, result.stdout + result.stderr
    records = [record for record in train.records() if "gtpo/entropy/initial" in record]
    assert len(records) >= 2 and len({record["gtpo/entropy/initial"] for record in records}) == 1
    for record in records:
        assert record["gtpo/group/size_min"] == 8 and record["actor/grad_norm"] > 0
        assert record["gtpo/entropy/mean"] == pytest.approx(record["actor/entropy"], rel=0.2)
    # The first rollouts are the first policy's, and its entropies with them.
    assert records[0]["training/rollout_probs_diff_max"] < 1e-3


# How long things took, how many rollouts wait just then, and how old verl takes cached ones to be; the cache, progress
# bars, what fully_async's rollouter says each minute, gRPC now and then, and how a worker of Ray aborts that it finds
# at work as the run ends.
VARIES = re.compile(r"timing|perf/|off_policy|_time(_s)?$|idle_ratio|utilization|mq_size")
NOISE = re.compile(r"Skip\(\)|it/s\]|s/it\]|MonitorLoop|'(count|monitor|static)/|RAW: |SIGABRT|\(unknown\)")
# The process that computes rewards loads this, and says once whether verl has loaded the plugin.
REWARD = """
import sys
from gtpo_verl.reward.score import compute_score
print("plugin loaded:", "gtpo_verl.verl_plugin" in sys.modules)
"""
# One prompt in flight, and none while weights are older than the last update: fully_async's order is then the data's.
IN_TURN = (
    *ROLLOUT_APART,
    *FULLY_ASYNC,
    "++async_training.staleness_threshold=0",
    "++rollout.total_rollout_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
)


def outcome(out):
    """The weights of a run's second step, its metrics and its log's lines, without what differs from run to run."""
    (model,) = out.glob("checkpoints/global_step_2/**/model.safetensors")
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    numbers = [{key: x for key, x in record.items() if not VARIES.search(key)} for record in records]
    log = (out / "train.log").read_text()
    lines = re.sub(r"^\x1b\[\d+m\((.*? )?pid=.*?\)\x1b\[0m |\x1b\[\d+m", "", log, flags=re.MULTILINE)
    return load_file(model), numbers, [re.sub(r"[\da-f-]*\d[\da-f.-]*", "0", line) for line in lines.splitlines()]


@pytest.mark.parametrize(
    ("module", "cache", "overrides"),
    [
        ("trainer.main_ppo", "rollout_tq", ()),
        ("trainer.main_ppo", "rollout", ("trainer.use_v1=False",)),
        ("experimental.fully_async_policy.fully_async_main", "async_rollout", IN_TURN),
    ],
    ids=["v1", "legacy", "fully_async"],
)
def test_a_grpo_run_is_bit_for_bit_and_line_for_line_what_it_is_without_the_plugin(
    train, module, cache, overrides, tmp_path
):
    """Both runs train on the rollouts of a third, by verl's cache: sampled tokens, and the order of the rows, depend on
    the time at which requests arrive."""
    (tmp_path / "reward.py").write_text(REWARD)
    overrides += ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.policy_loss.loss_mode=vanilla")
    overrides += (f"skip.{cache}.enable=true", f"skip.{cache}.dump_dir={tmp_path}", f"skip.{cache}.steps=[1,2]")
    overrides += ("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]")
    overrides += (f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",)
    others = ",".join(plugin.name for plugin in entry_points(group="verl.plugins") if plugin.name != "gtpo")
    runs = [tmp_path / f"run{i}" for i in range(3)]  # a number, since log lines that name a folder are compared too
    for out, plugins in zip(runs, (others, others, "auto"), strict=True):
        run = train(*overrides, module=f"verl.{module}", out=out, VERL_USE_EXTERNAL_PLUGINS=plugins)
        assert run.returncode == 0, run.stdout + run.stderr
    weights, numbers, lines = outcome(runs[1])
    weights_with, numbers_with, lines_with = outcome(runs[2])
    assert weights and all(torch.equal(weights_with[name], weight) for name, weight in weights.items())
    assert numbers_with == numbers and any(record.get("actor/grad_norm", 0) > 0 for record in numbers)
    said = "".join(lines)  # Ray may break a line anywhere
    assert [line for line in lines_with if line not in said and not NOISE.search(line)] == ["plugin loaded: True"]


def test_run_that_cannot_go_on_ends_with_the_workers_error_in_sight(train, tmp_path):
    reward = tmp_path / "broken_reward.py"
    reward.write_text("def compute_score(**kwargs):\n    raise KeyError('reward-server')\n")
    result = train(f"reward.custom_reward_function.path={reward}", options=("--stall", "55"))
    assert result.returncode != 0
    assert "the run failed: " in result.stderr and "'reward-server'" in result.stderr
