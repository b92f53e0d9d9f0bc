"""verl's V1 trainer: what TransferQueue must hold, and agent loops with several outputs per session."""

from dataclasses import replace

import pytest
import torch
from harness.stages import InMemoryQueue
from rollout_batch import expected, make_rows, padded
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import utils

from gtpo_verl import GTPOConfig, compute_gtpo_outcome_advantage
from gtpo_verl.run.initial_entropy import InitialEntropy
from gtpo_verl.verl_plugin import batch_fields, hooks
from gtpo_verl.verl_plugin.state import activate


@pytest.fixture
def v1(make_stage):
    return lambda *overrides, **kwargs: make_stage("v1", *overrides, **kwargs)


@pytest.mark.parametrize("field", ["entropy", "responses", "prompts"])
def test_a_missing_field_is_an_error_and_not_a_zero(v1, rows, field):
    del rows[field]
    with pytest.raises(RuntimeError, match=f"TransferQueue lacks {field},"):
        v1().step()


def test_entropy_that_is_not_as_long_as_the_responses_is_an_error(v1, rows):
    rows["entropy"][2] = rows["entropy"][2][:-1]
    with pytest.raises(RuntimeError, match="entropy .*not as long"):
        v1().step()


KNOWN = "algorithm.gtpo.initial_entropy=0.3"

# Group p: sessions of 3, 1 and 1 outputs; group q: of 1 and 2.
SESSION_KEYS = ["p_0_0", "p_0_1", "p_0_2", "p_1_0", "p_2_0", "q_0_0", "q_1_0", "q_1_1"]
LAST = [2, 3, 4, 5, 7]


@pytest.fixture
def session_rows():
    """All outputs of a session have its reward; contexts of later outputs are other prompts."""
    lengths, scores = [4, 3, 5, 5, 4, 2, 6, 6], [20.0, 20.0, 20.0, 10.0, 11.0, 1.0, 20.0, 20.0]
    rows = make_rows([key[0] for key in SESSION_KEYS], lengths, scores)
    return rows | {"prompts": [torch.full((3 + int(key[-1]),), ord(key[0])) for key in SESSION_KEYS]}


@pytest.fixture
def sessions(v1, session_rows):
    return lambda *overrides: v1(*overrides, rows=session_rows, keys=SESSION_KEYS)


def test_the_last_output_has_the_highest_number(session_rows):
    """10 comes after 9, whose text does not."""
    keys = ["p_0_10", "p_0_9", "p_0_8", "p_1_0"]
    queue = InMemoryQueue({key: {name: session_rows[name][i] for name in session_rows} for i, key in enumerate(keys)})
    fields = batch_fields.from_transfer_queue(queue, KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * 4))
    assert fields.last_outputs == [0, 3] and fields.sessions == [0, 0, 0, 1]


ALL_OFF = [
    "algorithm.gtpo.entropy_coeff=0",
    "algorithm.gtpo.completion_filter=never",
    "+algorithm.gtpo.conflict_span=none",
]


@pytest.mark.parametrize("order", [range(8), [7, 2, 0, 5, 1, 3, 6, 4]])
def test_sessions_of_several_outputs_with_all_parts_off_are_verls_grpo(sessions, session_rows, order):
    _, advantages = sessions(*ALL_OFF).step(order)
    _, verls = sessions("algorithm.adv_estimator=grpo").step(order)
    torch.testing.assert_close(advantages, verls)
    assert (verls[:3, 0] == verls[0, 0]).all() and verls[0, 0] > 1


@pytest.mark.parametrize("order", [range(8), [7, 2, 0, 5, 1, 3, 6, 4]])
def test_last_output_stands_for_its_session(sessions, session_rows, order):
    """Its own GTPO; the earlier outputs get its δ(A − γ⟨H⟩), with λ = 1 on every token."""
    session_rows["prompts"] = [torch.full((3,), ord(key[0])) for key in SESSION_KEYS]
    gtpo = sessions("algorithm.gtpo.initial_entropy=0.3", "+algorithm.gtpo.entropy_threshold=0.6")
    metrics, advantages = gtpo.step(order)
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


@pytest.mark.parametrize("order", [range(8), [7, 2, 0, 5, 1, 3, 6, 4]])
@pytest.mark.parametrize("overrides", [(), ("algorithm.gtpo.entropy_from=update",)], ids=["old_log_prob", "update"])
def test_metrics_and_dump_of_sessions_are_those_of_their_last_outputs_alone(
    v1, session_rows, tmp_path, overrides, order
):
    """The filter drops some of the completions with a negative advantage."""
    settings = (KNOWN, *overrides, "+algorithm.gtpo.entropy_threshold=0.45", "+algorithm.gtpo.filter_scope=negative")
    last_rows = {name: [column[row] for row in LAST] for name, column in session_rows.items()}
    last_keys = [SESSION_KEYS[row] for row in LAST]
    # Last outputs come in the order in which the batch first has their sessions.
    sessions_in_order = dict.fromkeys(SESSION_KEYS[row].rsplit("_", 1)[0] for row in order)
    order_of_last = [[key.rsplit("_", 1)[0] for key in last_keys].index(session) for session in sessions_in_order]

    metrics = {}
    lines = {}
    for name, rows, keys, of_rows in (
        ("sessions", session_rows, SESSION_KEYS, order),
        ("last", last_rows, last_keys, order_of_last),
    ):
        folder = tmp_path / name
        stage = v1(*settings, f"+algorithm.gtpo.dump_dir={folder}", rows=rows, keys=keys)
        metrics[name], _ = stage.step(list(of_rows))
        lines[name] = (folder / "step_000001.jsonl").read_text().splitlines()
        for timing in ("timing_s/gtpo", "timing_s/gtpo_dump"):
            metrics[name].pop(timing)
    assert 0 < metrics["last"]["gtpo/filter/dropped_frac"] < 1 and "gtpo/log_prob/negative" in metrics["last"]
    assert metrics["sessions"] == pytest.approx(metrics["last"])
    assert len(lines["last"]) == 5 and lines["sessions"] == lines["last"]


@pytest.mark.parametrize("at_once", [2, 64])
@pytest.mark.parametrize(("change", "differs"), [(0, False), (1, True)], ids=["equal pixels", "other pixels"])
def test_outputs_whose_prompts_differ_in_a_picture_share_no_positions(
    sessions, session_rows, monkeypatch, at_once, change, differs
):
    """Equal ids and other pixels are another context; equal pixels are the same, in whichever tensor."""
    monkeypatch.setattr(batch_fields, "_SESSIONS_PER_FETCH", at_once)
    session_rows["prompts"] = [torch.full((3,), ord(key[0])) for key in SESSION_KEYS]
    _, alike = sessions(KNOWN).step()
    pixels = torch.arange(12.0).reshape(3, 4).bfloat16()
    pictures = [{"pixel_values": pixels.clone(), "image_grid_thw": torch.tensor([[1, 2, 2]])} for _ in SESSION_KEYS]
    pictures[LAST[0]]["pixel_values"] = pixels + change
    pictures[-1] = dict(reversed(pictures[-1].items()))
    session_rows["multi_modal_inputs"] = pictures
    _, advantages = sessions(KNOWN).step()
    assert bool((advantages != alike).any()) is differs


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_a_session_without_pictures_hides_no_picture_of_another(sessions, session_rows, monkeypatch, at_once):
    """TransferQueue leaves out a field that one key of a fetch lacks."""
    monkeypatch.setattr(batch_fields, "_SESSIONS_PER_FETCH", at_once)
    session_rows["prompts"] = [torch.full((3,), ord(key[0])) for key in SESSION_KEYS]
    session_rows["multi_modal_inputs"] = [
        {"pixel_values": torch.full((3,), float(row))} for row in range(len(SESSION_KEYS))
    ]
    _, all_differ = sessions(KNOWN).step()
    get = InMemoryQueue.kv_batch_get

    def without_those_of_one(self, keys, partition_id, select_fields):
        data = get(self, keys=keys, partition_id=partition_id, select_fields=select_fields)
        if SESSION_KEYS[LAST[0]] in keys and select_fields == ["multi_modal_inputs"]:
            data.pop("multi_modal_inputs")
        return data

    monkeypatch.setattr(InMemoryQueue, "kv_batch_get", without_those_of_one)
    _, advantages = sessions(KNOWN).step()
    assert torch.equal(advantages, all_differ)


def test_pictures_are_fetched_of_last_outputs_alone(sessions, session_rows, monkeypatch):
    session_rows["multi_modal_inputs"] = [{"pixel_values": torch.ones(3)} for _ in SESSION_KEYS]
    asked, get = [], InMemoryQueue.kv_batch_get

    def recorded(self, keys, partition_id, select_fields):
        asked.extend(keys if select_fields == ["multi_modal_inputs"] else ())
        return get(self, keys=keys, partition_id=partition_id, select_fields=select_fields)

    monkeypatch.setattr(InMemoryQueue, "kv_batch_get", recorded)
    sessions(KNOWN).step()
    assert asked == [SESSION_KEYS[row] for row in LAST]


def test_initial_entropy_is_that_of_last_outputs(sessions, session_rows, caplog):
    gtpo = sessions()
    metrics, _ = gtpo.step()
    last = torch.stack([session_rows["entropy"][i].mean() for i in LAST])
    assert metrics["gtpo/entropy/initial"] == pytest.approx(last.mean().item())
    assert InitialEntropy.load(gtpo.config.trainer.default_local_dir).completions == 5
    gtpo.step()
    (told,) = [r.getMessage() for r in caplog.records if "outputs in" in r.getMessage()]
    assert "8 outputs in 5 sessions" in told


def test_a_verl_that_computes_advantages_elsewhere_is_an_error_at_the_first_step(v1, monkeypatch):
    monkeypatch.setattr(utils, "compute_advantage", utils.compute_advantage.__wrapped__)
    with pytest.raises(RuntimeError, match="without (token ids|.*compute_advantage)"):
        v1().step()


def test_advantages_that_pass_by_the_hooked_function_are_an_error_and_leave_no_rows_behind(v1):
    stage = v1()
    stage.step()
    batch = KVBatchMeta(partition_id="train", keys=stage.keys, tags=[{}] * len(stage.keys))
    with pytest.raises(RuntimeError, match="without .*compute_advantage"):
        hooks.v1_compute_advantage(lambda: None, stage.trainer, batch=batch)
    assert activate(stage.trainer).v1_fields is None


@pytest.fixture
def legacy(make_stage):
    return lambda *overrides: make_stage("legacy", *overrides)


def test_rows_without_entropy_are_an_error(legacy):
    stage = legacy(KNOWN)
    data = stage.compute_advantage(stage.old_log_prob_pass())
    with pytest.raises(RuntimeError, match="without token ids"):  # it served once
        stage.compute_advantage(data)


def test_entropy_moves_with_the_rows(legacy, rows):
    """A trainer may reorder, drop and join rows between its old-log-prob pass and the estimator, as DAPO's does."""
    stage = legacy(KNOWN)
    data = stage.old_log_prob_pass()
    whole = expected(rows, initial_entropy=0.3)
    reordered = data[[5, 1, 2, 3, 4, 0]]
    joined = DataProto.concat([data[[1, 0, 3]], data[[5, 2, 4]]])
    for changed, order in ((reordered, [5, 1, 2, 3, 4, 0]), (joined, [1, 0, 3, 5, 2, 4]), (data[[5, 2]], [5, 2])):
        stage.compute_advantage(changed)
        torch.testing.assert_close(changed.batch["advantages"], whole[order])


def test_a_group_that_lost_its_positives_has_no_conflicts_and_keeps_the_entropy_term(legacy, rows):
    """What is left of a group after rollouts that failed is a group of its own."""
    stage = legacy("algorithm.gtpo.initial_entropy=0.9")
    left = stage.compute_advantage(stage.old_log_prob_pass()[[1, 3]])  # the third, row 0, had the higher reward
    regularizer = torch.stack([0.1 * rows["entropy"][row].mean() for row in (1, 3)]).unsqueeze(-1)
    torch.testing.assert_close(left.batch["advantages"], -regularizer * left.batch["response_mask"])
    metrics = stage.update()
    assert metrics["gtpo/conflict/token_frac"] == 0 and metrics["gtpo/group/zero_std_frac"] == 1


def test_prompts_are_without_padding(legacy, rows):
    """Two completions reach the model's context of 8 tokens."""
    rows["prompts"] = [torch.full((n,), ord(uid[0])) for uid, n in zip(rows["uid"], (3, 1, 5, 1, 3, 1), strict=True)]
    metrics, _ = legacy(KNOWN, "actor_rollout_ref.rollout.max_model_len=8", "data.max_response_length=99").step()
    cut = torch.stack([rows["entropy"][i].mean() for i in (0, 2)])
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(cut.mean().item())
