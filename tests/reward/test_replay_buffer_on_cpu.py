"""The replay buffer on verl's own code, with a dictionary in TransferQueue's place."""

import numpy as np
import pytest
import torch
import transfer_queue as tq
from harness.stages import InMemoryQueue
from omegaconf import OmegaConf
from transformers import GenerationConfig

from gtpo_verl.reward import replay_buffer
from gtpo_verl.reward.replay_buffer import RewardMetricsReplayBuffer, eos_token_ids
from recipes.tasks.tiny import build_tokenizer

EOS = 2


class Store(InMemoryQueue):
    """Prompts with their completions, as verl's agent loops leave them in TransferQueue."""

    def __init__(self):
        super().__init__({}, {"train": {}, "val": {}})

    def add(self, uid, scores, length=3, step=1, partition="train", last=EOS):
        self.tags[partition][uid] = {"is_prompt": True, "status": "finished", "global_steps": step}
        for session, score in enumerate(scores):
            key = f"{uid}_{session}_0"
            self.tags[partition][key] = {"seq_len": length}
            self.rows[key] = {
                "responses": torch.tensor([7] * (length - 1) + [last]),
                "extra_fields": {"reward_extra_info": {"score": score, "strict": 1, "pred": "a text"}},
            }


@pytest.fixture
def store(monkeypatch):
    store = Store()
    for name in ("kv_list", "kv_clear", "kv_batch_get"):
        monkeypatch.setattr(tq, name, getattr(store, name))
    monkeypatch.setattr(replay_buffer, "eos_token_ids", lambda model: torch.tensor([1, EOS]))
    return store


def make(trainer_mode="sync", refill_fn=None, threshold=8, rollout_n=2, reward_model=None, **filter_groups):
    """The buffer as verl's trainer builds one that is not its own."""
    config = OmegaConf.create(
        {
            "algorithm": {"filter_groups": filter_groups or None},
            "reward": {"reward_model": reward_model or {"enable": False}},
            "actor_rollout_ref": {"model": {"path": "a/model"}, "rollout": {"n": rollout_n}},
            "data": {"train_batch_size": 2},
            "trainer": {"v1": {"sampler": {"sampler_kwargs": {}}}},
        }
    )
    return RewardMetricsReplayBuffer(
        trainer_mode=trainer_mode,
        trainer_config=OmegaConf.create({}),
        max_off_policy_threshold=threshold,
        max_off_policy_strategy="drop",
        sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs,
        refill_fn=refill_fn,
    )


def test_without_a_filter_verls_buffer_is_told_nothing_of_one(store, monkeypatch):
    given = {}
    monkeypatch.setattr(replay_buffer.ReplayBuffer, "__init__", lambda self, **kwargs: given.update(kwargs))
    make(max_inflight_gen_batches=3)
    own = {"filter_groups_metric", "sync_refill_failed_groups", "train_batch_size", "max_inflight_gen_batches"}
    assert "poll_interval" in given and not own & given.keys()
    make(enable=True, metric="acc", max_inflight_gen_batches=3)
    assert (given["filter_groups_metric"], given["max_inflight_gen_batches"]) == ("acc", 3)


def test_a_batch_without_rewards_is_told_once(store, caplog):
    """As with a colocated reward model, which verl asks after sampling."""
    buffer = make()
    for uid in ("a", "b", "c", "d"):
        store.add(uid, [1.0, 2.0])
    for row in store.rows.values():
        row["extra_fields"] = {}
    for _ in range(2):
        _, metrics = buffer.sample(1, "train", 2)
        assert "completion/eos_rate" in metrics and not [name for name in metrics if name.startswith("reward/")]
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "gtpo_verl"]
    assert "reward.reward_model.enable_resource_pool=True" in warning


def test_the_numbers_of_the_reward_are_averaged_over_the_batch(store):
    store.add("a", [10.0, 20.0])
    store.add("b", [0.0, 2.0])
    batch, metrics = make().sample(1, "train", 2)
    assert len(batch.keys) == 4
    assert metrics == {
        "reward/score/mean": 8.0,
        "reward/strict/mean": 1.0,
        "completion/eos_rate": 1.0,
        "completion/repetition/mean": 0.0,
        "group/zero_std_frac": 0.0,
        "completion/length/mean": 3.0,
    }


def test_a_completion_without_an_end_is_not_strict(store):
    store.add("a", [10.0, 20.0], length=3)
    store.add("b", [10.0, 20.0], last=7)  # shorter than others: the limit was that of prompt and response
    _, metrics = make().sample(1, "train", 2)
    assert (metrics["reward/strict/mean"], metrics["completion/eos_rate"]) == (0.5, 0.5)


def test_a_completion_without_tokens_has_not_ended(store):
    store.add("a", [10.0, 20.0])
    for key in ("a_0_0", "a_1_0"):
        store.rows[key]["responses"] = store.rows[key]["responses"][: 0 if key == "a_0_0" else 3]
    assert make().sample(1, "train", 1)[1]["completion/eos_rate"] == 0.5


@pytest.mark.parametrize("kind", [int, np.bool_])
def test_groups_that_teach_without_a_right_answer_are_counted(store, kind):
    store.add("a", [1.0, 2.0])
    store.add("b", [1.0, 2.0])
    store.add("c", [2.0, 2.0])
    for number, row in enumerate(store.rows.values()):
        row["extra_fields"]["reward_extra_info"]["acc"] = kind(number in (3, 4))
    _, metrics = make().sample(1, "train", 3)
    assert (metrics["group/zero_std_frac"], metrics["group/none_right_frac"]) == (pytest.approx(1 / 3), 0.5)


@pytest.mark.parametrize("said", [None, "correct", [1.0], {"a": 1}, 10**400])
def test_what_a_reward_function_says_that_is_no_number_ends_no_training(store, said):
    store.add("a", [1.0, 2.0])
    store.add("b", [1.0, 2.0])
    for row in store.rows.values():
        row["extra_fields"]["reward_extra_info"]["acc"] = said
    _, metrics = make().sample(1, "train", 2)
    assert metrics["reward/score/mean"] == 1.5 and not {"reward/acc/mean", "group/none_right_frac"} & metrics.keys()


def test_without_a_score_groups_are_not_called_equal(store):
    store.add("a", [1.0, 2.0])
    for row in store.rows.values():
        del row["extra_fields"]["reward_extra_info"]["score"]
    assert "group/zero_std_frac" not in make().sample(1, "train", 1)[1]


def test_a_reward_that_is_no_dict_is_a_score_though_verl_calls_it_acc(store):
    store.add("a", [1.0, 2.0])
    for row in store.rows.values():
        extra = row["extra_fields"]
        extra["reward_extra_info"] = {"acc": extra["reward_extra_info"]["score"]}
    _, metrics = make().sample(1, "train", 1)
    assert metrics["reward/score/mean"] == 1.5 and metrics["group/zero_std_frac"] == 0
    assert "reward/acc/mean" not in metrics


@pytest.mark.parametrize(("rollout_n", "seconds"), [(8, 0.02), (2048, 0.2048), (100_000, 2.0)])
def test_the_more_completions_the_rarer_a_look_for_them(store, rollout_n, seconds):
    assert make(rollout_n=rollout_n).poll_interval == pytest.approx(seconds)


def test_a_validation_batch_is_left_to_verl(store):
    store.add("a", [10.0, 20.0], partition="val")
    _, metrics = make().sample(1, "val", 1)
    assert metrics == {}


def test_groups_without_a_signal_are_filtered_and_replaced(store):
    store.add("equal", [10.0, 10.0])
    store.add("mixed", [10.0, 20.0])
    fresh = iter("cdef")
    buffer = make(
        refill_fn=lambda count: [store.add(next(fresh), [0.0, 20.0], step=2) for _ in range(count)],
        enable=True,
        metric="score",
    )
    batch, metrics = buffer.sample(1, "train", 2)
    uids = {key.split("_")[0] for key in batch.keys}
    assert len(uids) == 2 and "mixed" in uids and "equal" not in uids
    assert metrics["training/filter_groups/evicted_samples"] == 1


def test_filtering_by_nothing_is_an_error(store):
    with pytest.raises(ValueError, match=r"algorithm\.filter_groups\.metric .*set"):
        make(enable=True)


def test_a_filter_needs_rewards_before_it_samples(store, monkeypatch):
    monkeypatch.setattr(replay_buffer.ReplayBuffer, "__init__", lambda self, **_: None)
    colocated = {"enable": True, "enable_resource_pool": False}
    with pytest.raises(AssertionError, match=r"reward\.reward_model\.enable_resource_pool=True"):
        make(enable=True, metric="acc", reward_model=colocated)
    make(reward_model=colocated)
    make(enable=True, metric="acc", reward_model=colocated | {"enable_resource_pool": True})


def test_an_async_trainers_buffer_drops_stale_groups(store):
    store.add("stale", [10.0, 20.0], step=1)
    store.add("fresh", [0.0, 2.0], step=5)
    batch, metrics = make("colocate_async", threshold=2).sample(5, "train", 1)
    assert {key.split("_")[0] for key in batch.keys} == {"fresh"}
    assert metrics["training/off_policy/evicted_samples"] == 1
    assert metrics["reward/score/mean"] == 1.0


OF_TOKENIZER = build_tokenizer().eos_token_id


@pytest.mark.parametrize(
    ("of_generation_config", "ends"),
    [
        (None, [OF_TOKENIZER]),
        ([OF_TOKENIZER + 5, OF_TOKENIZER + 9], [OF_TOKENIZER, OF_TOKENIZER + 5, OF_TOKENIZER + 9]),
        (OF_TOKENIZER + 5, [OF_TOKENIZER, OF_TOKENIZER + 5]),
    ],
    ids=["none", "several", "one"],
)
def test_a_completion_ends_with_the_tokenizers_token_or_one_of_the_generation_config(
    tmp_path, of_generation_config, ends
):
    build_tokenizer().save_pretrained(tmp_path)
    if of_generation_config is not None:
        GenerationConfig(eos_token_id=of_generation_config).save_pretrained(tmp_path)
    assert eos_token_ids(OmegaConf.create({"path": str(tmp_path)})).tolist() == ends


def test_the_tokenizer_is_the_runs_own_and_no_code_of_its_is_run_unasked(monkeypatch):
    given = {}

    def load(path, **options):
        given.update(path=path, **options)
        return build_tokenizer()

    monkeypatch.setattr(replay_buffer, "copy_to_local", lambda path: path)
    monkeypatch.setattr(replay_buffer, "hf_tokenizer", load)
    eos_token_ids(OmegaConf.create({"path": "/nowhere", "tokenizer_path": "words"}))
    assert given == {"path": "words", "trust_remote_code": False}
