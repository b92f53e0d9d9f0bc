"""The data-proto stage in verl's V1 trainer, with TransferQueue replaced by a dictionary."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from in_memory_queue import InMemoryQueue
from rollout_batch import UIDS, expected, padded, real_mean_entropy
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage
from gtpo_verl.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import estimator, update_pass


@pytest.fixture
def trainer(compose_config):
    """verl's sync trainer without its workers."""

    def made(*overrides, global_steps=1):
        trainer = PPOTrainerSync.__new__(PPOTrainerSync)
        trainer.config = compose_config("data.max_response_length=6", *overrides)
        trainer.global_steps = global_steps
        return trainer

    return made


KEYS = [f"{uid}_{i}_0" for i, uid in enumerate(UIDS)]


def step(trainer, rows, monkeypatch, order=None, keys=KEYS):
    """One call of the trainer's advantage stage; the metrics, and advantages in the rows' own order."""
    order = range(len(keys)) if order is None else order
    queue = InMemoryQueue.of_columns(rows, keys)
    monkeypatch.setattr(trainer_base, "tq", queue)
    batch = KVBatchMeta(partition_id="train", keys=[keys[i] for i in order], tags=[{}] * len(keys))
    metrics = {}
    trainer._compute_advantage(batch, metrics=metrics)
    assert estimator.current_step.get() is None
    assert set(queue.put) == {"advantages", "returns"}
    advantages = torch.empty(len(keys), queue.put["advantages"].shape[1])
    advantages[list(order)] = queue.put["advantages"]
    return metrics, advantages


@pytest.mark.parametrize("order", [range(6), [4, 2, 0, 5, 1, 3]])
def test_v1_trainer_gets_the_advantages_of_the_bare_function(trainer, rows, monkeypatch, order):
    metrics, advantages = step(trainer(), rows, monkeypatch, order)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=initial_entropy))
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/group/size_min"] == 2
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    assert metrics["timing_s/gtpo"] > 0
    of_positive = [rows["old_log_probs"][i].mean() for i in (0, 5)]
    assert metrics["gtpo/log_prob/positive"] == pytest.approx(torch.stack(of_positive).mean().item())


def test_completions_cut_off_by_the_models_context_count_as_truncated(trainer, rows, monkeypatch):
    metrics, _ = step(trainer("actor_rollout_ref.rollout.max_model_len=1"), rows, monkeypatch)
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(metrics["gtpo/entropy/mean"])


def test_settings_reach_the_estimator(trainer, rows, monkeypatch):
    overrides = ["algorithm.gtpo.entropy_coeff=0.7", "+algorithm.gtpo.conflict_span=all"]
    gtpo = trainer(*overrides, "algorithm.norm_adv_by_std_in_grpo=false", "algorithm.gtpo.initial_entropy=0.3")
    _, advantages = step(gtpo, rows, monkeypatch)
    config = GTPOConfig(entropy_coeff=0.7, conflict_span="all", initial_entropy=0.3)
    torch.testing.assert_close(advantages, expected(rows, config=config, norm_adv_by_std_in_grpo=False))


def test_initial_entropy_is_measured_once_and_written(trainer, rows, monkeypatch, compose_config):
    gtpo = trainer()
    first, _ = step(gtpo, rows, monkeypatch)
    rows["entropy"] = [e + 0.5 for e in rows["entropy"]]
    second, _ = step(gtpo, rows, monkeypatch)
    assert second["gtpo/entropy/initial"] == first["gtpo/entropy/initial"] < second["gtpo/entropy/mean"]
    record = InitialEntropy.load(gtpo.config.trainer.default_local_dir)
    assert record.value == first["gtpo/entropy/initial"] and (record.completions, record.prompts) == (5, 2)


@pytest.mark.parametrize("global_steps", [2, 9])
def test_resumed_run_reads_the_record_and_does_not_measure(trainer, rows, monkeypatch, global_steps):
    gtpo = trainer(global_steps=global_steps)
    InitialEntropy(0.123).save(gtpo.config.trainer.default_local_dir, GTPOConfig())
    assert step(gtpo, rows, monkeypatch)[0]["gtpo/entropy/initial"] == 0.123
    gtpo = trainer("trainer.default_local_dir=/nowhere", global_steps=global_steps)
    with pytest.raises(ValueError, match="algorithm.gtpo.initial_entropy"):
        step(gtpo, rows, monkeypatch)


def test_resumed_run_without_record_needs_none_where_the_filter_does_not_rest_on_it(
    trainer, rows, monkeypatch, tmp_path
):
    gtpo = trainer(
        f"trainer.default_local_dir={tmp_path / 'none'}", "algorithm.gtpo.completion_filter=always", global_steps=9
    )
    metrics, _ = step(gtpo, rows, monkeypatch)
    assert "gtpo/entropy/initial" not in metrics and metrics["gtpo/filter/active"] == 1


def test_missing_entropy_is_an_error_and_not_a_zero(trainer, rows, monkeypatch):
    del rows["entropy"]
    with pytest.raises(RuntimeError, match="TransferQueue lacks entropy, which GTPO needs"):
        step(trainer(), rows, monkeypatch)


@pytest.mark.parametrize("field", ["responses", "prompts"])
def test_a_missing_field_is_an_error(trainer, rows, monkeypatch, field):
    del rows[field]
    with pytest.raises(RuntimeError, match=f"TransferQueue lacks {field}, which GTPO needs"):
        step(trainer(), rows, monkeypatch)


def test_entropy_that_is_not_as_long_as_the_responses_is_an_error(trainer, rows, monkeypatch):
    rows["entropy"][2] = rows["entropy"][2][:-1]
    with pytest.raises(RuntimeError, match="not as long as the responses"):
        step(trainer(), rows, monkeypatch)


@pytest.mark.parametrize(
    ("field", "name"), [("rm_scores", "reward"), ("entropy", "entropy"), ("old_log_probs", "old_log_probs")]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_an_error_that_names_uid_and_row(trainer, rows, monkeypatch, field, name, value):
    rows[field][2][1] = value
    with pytest.raises(ValueError, match=rf"the {name} of row 2 \(uid q\) is {value}"):
        step(trainer("algorithm.gtpo.initial_entropy=0.3"), rows, monkeypatch)


def test_a_log_prob_off_the_mask_may_be_anything(trainer, rows, monkeypatch):
    rows["old_log_probs"][4][0] = -torch.inf
    _, advantages = step(trainer("algorithm.gtpo.initial_entropy=0.3"), rows, monkeypatch)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=0.3))


def test_rejected_tokens_keep_their_position_and_get_no_advantage(trainer, rows, monkeypatch):
    """verl's rollout correction takes them out of the mask before it computes advantages."""
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    rows["rollout_log_probs"][0][0] -= 5
    gtpo = trainer(
        "algorithm.gtpo.initial_entropy=0.3",
        "algorithm.rollout_correction.rollout_rs=token_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
    )
    queue = InMemoryQueue.of_columns(rows, KEYS)
    monkeypatch.setattr(trainer_base, "tq", queue)
    gtpo._compute_advantage(KVBatchMeta(partition_id="train", keys=KEYS, tags=[{}] * 6), metrics={})
    kept = padded(rows, "response_mask")
    kept[0, 0] = 0
    assert torch.equal(queue.put["response_mask"].long(), kept)
    torch.testing.assert_close(queue.put["advantages"], expected(rows, initial_entropy=0.3) * kept)


def test_with_the_entropy_from_the_update_metrics_come_with_the_updates(trainer, rows, monkeypatch, tmp_path):
    """The trainer's rows have λA and ⟨H⟩ is asked of the update, whose metrics then bring what is logged otherwise."""
    gtpo = ["algorithm.gtpo.completion_filter=always", "+algorithm.gtpo.entropy_threshold=0.5"]
    order = [4, 2, 0, 5, 1, 3]
    before, whole = step(trainer(*gtpo), rows, monkeypatch, order)
    record = InitialEntropy.load(tmp_path / "checkpoints")
    InitialEntropy.path(tmp_path / "checkpoints").unlink()

    queue = InMemoryQueue.of_columns({name: rows[name] for name in rows if name != "entropy"}, KEYS)
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys, metrics = [KEYS[i] for i in order], {}
    update = trainer(*gtpo, "algorithm.gtpo.entropy_from=update")
    update._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 6), metrics=metrics)
    assert metrics == {} and set(queue.put) == {"advantages", "returns", update_pass.ROWS}
    advantages, means = update_pass.apply_entropy(
        queue.put["advantages"],
        *(padded(rows, name)[order] for name in ("response_mask", "entropy")),
        queue.put[update_pass.ROWS],
    )
    torch.testing.assert_close(advantages, whole[order])

    means = [(row, mean, None) for row, mean in enumerate(means.tolist())]
    metrics = reduce_metrics({"actor/pg_loss": [1.0], f"actor/{update_pass.ENTROPIES}": means[3:] + means[:3]})
    assert estimator.current_step.get() is None
    assert metrics.pop("actor/pg_loss") == 1.0 and metrics.pop("timing_s/gtpo") > 0
    del before["timing_s/gtpo"]
    assert metrics == pytest.approx(before)
    assert InitialEntropy.load(tmp_path / "checkpoints").value == pytest.approx(record.value)


# Group p: sessions of 3, 1 and 1 outputs; group q: of 1 and 2.
SESSION_KEYS = ["p_0_0", "p_0_1", "p_0_2", "p_1_0", "p_2_0", "q_0_0", "q_1_0", "q_1_1"]
LAST = [2, 3, 4, 5, 7]
SESSION_OF_ROW = [0, 0, 0, 1, 2, 3, 4, 4]


@pytest.fixture
def session_rows():
    """All outputs of a session have its reward; contexts of later outputs are other prompts."""
    generator = torch.Generator().manual_seed(1)
    lengths, scores = [4, 3, 5, 5, 4, 2, 6, 6], [20.0, 20.0, 20.0, 10.0, 11.0, 1.0, 20.0, 20.0]
    rm_scores = [torch.zeros(n) for n in lengths]
    for row, score in zip(rm_scores, scores, strict=True):
        row[-1] = score
    return {
        "uid": [key[0] for key in SESSION_KEYS],
        "prompts": [torch.full((3 + int(key[-1]),), ord(key[0])) for key in SESSION_KEYS],
        "responses": [torch.randint(1, 3, (n,), generator=generator) for n in lengths],
        "response_mask": [torch.ones(n, dtype=torch.int64) for n in lengths],
        "rm_scores": rm_scores,
        "entropy": [torch.rand(n, generator=generator) for n in lengths],
        "old_log_probs": [-torch.rand(n, generator=generator) for n in lengths],
    }


ALL_OFF = [
    "algorithm.gtpo.entropy_coeff=0",
    "algorithm.gtpo.completion_filter=never",
    "+algorithm.gtpo.conflict_span=none",
]


@pytest.mark.parametrize("order", [range(8), [7, 2, 0, 5, 1, 3, 6, 4]])
def test_sessions_of_several_outputs_with_all_parts_off_are_verls_grpo(trainer, session_rows, monkeypatch, order):
    _, advantages = step(trainer(*ALL_OFF), session_rows, monkeypatch, order, SESSION_KEYS)
    grpo = trainer("algorithm.adv_estimator=grpo")
    _, verls = step(grpo, session_rows, monkeypatch, order, SESSION_KEYS)
    torch.testing.assert_close(advantages, verls)
    assert (verls[:3, 0] == verls[0, 0]).all() and verls[0, 0] > 1


@pytest.mark.parametrize("order", [range(8), [7, 2, 0, 5, 1, 3, 6, 4]])
def test_last_output_stands_for_its_session(trainer, session_rows, monkeypatch, order):
    """Its own GTPO; the earlier outputs get its δ(A − γ⟨H⟩), with λ = 1 on every token."""
    session_rows["prompts"] = [torch.full((3,), ord(key[0])) for key in SESSION_KEYS]
    gtpo = trainer("algorithm.gtpo.initial_entropy=0.3", "+algorithm.gtpo.entropy_threshold=0.6")
    metrics, advantages = step(gtpo, session_rows, monkeypatch, order, SESSION_KEYS)
    config = GTPOConfig(entropy_threshold=0.6, initial_entropy=0.3)

    def of_last(config):
        return compute_gtpo_outcome_advantage(
            *(padded(session_rows, k)[LAST] for k in ("rm_scores", "response_mask")),
            ["p", "p", "p", "q", "q"],
            *(padded(session_rows, k)[LAST] for k in ("responses", "entropy")),
            config=config,
        )[0]

    weighed, unweighted = of_last(config), of_last(replace(config, conflict_span="none"))
    assert (weighed != unweighted).any()
    torch.testing.assert_close(advantages[LAST], weighed)
    mask = padded(session_rows, "response_mask")
    torch.testing.assert_close(advantages[[0, 1, 6]], unweighted[[0, 0, 4], :1] * mask[[0, 1, 6]])
    assert metrics["gtpo/group/size_min"] == 2


def test_initial_entropy_is_that_of_last_outputs(trainer, session_rows, monkeypatch, caplog):
    gtpo = trainer()
    metrics, _ = step(gtpo, session_rows, monkeypatch, keys=SESSION_KEYS)
    last = torch.stack([session_rows["entropy"][i].mean() for i in LAST])
    assert metrics["gtpo/entropy/initial"] == pytest.approx(last.mean().item())
    assert InitialEntropy.load(gtpo.config.trainer.default_local_dir).completions == 5
    step(gtpo, session_rows, monkeypatch, keys=SESSION_KEYS)
    (told,) = [r.getMessage() for r in caplog.records if "outputs in" in r.getMessage()]
    assert "8 outputs in 5 sessions" in told


def test_prompts_that_differ_within_a_group_share_no_positions(trainer, rows, monkeypatch):
    """Groups p and q have a conflict on the first token; one completion of q then answers another prompt."""
    for row in rows["responses"]:
        row[0] = 7
    _, alike = step(trainer("algorithm.gtpo.initial_entropy=0.3"), rows, monkeypatch)
    rows["prompts"][5] = torch.tensor([1, 2])
    metrics, advantages = step(trainer("algorithm.gtpo.initial_entropy=0.3"), rows, monkeypatch)
    torch.testing.assert_close(advantages[[0, 1, 3, 4]], alike[[0, 1, 3, 4]])
    in_q = [2, 5]
    torch.testing.assert_close(
        advantages[in_q], expected(rows, config=GTPOConfig(conflict_span="none"), initial_entropy=0.3)[in_q]
    )
    assert (advantages[in_q] != alike[in_q]).any() and metrics["gtpo/group/size_min"] == 2


def test_grpo_in_the_same_process_is_verls(trainer, rows, monkeypatch):
    del rows["entropy"]
    metrics, advantages = step(trainer("algorithm.adv_estimator=grpo"), rows, monkeypatch)
    grpo, _ = core_algos.compute_grpo_outcome_advantage(
        padded(rows, "rm_scores"), padded(rows, "response_mask"), np.array(UIDS)
    )
    torch.testing.assert_close(advantages, grpo)
    assert not any(key.startswith("gtpo/") for key in metrics)
