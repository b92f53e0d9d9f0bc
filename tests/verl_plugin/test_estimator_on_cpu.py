"""What holds in both trainers of verl, V1 and legacy, from the rows to the loss and the log."""

from pathlib import Path

import pytest
import torch
from rollout_batch import expected, make_rows, padded, real_mean_entropy
from verl.utils.metric import reduce_metrics
from verl.utils.tracking import Tracking

from gtpo_verl import GTPOConfig
from gtpo_verl.run.initial_entropy import InitialEntropy

KNOWN = "algorithm.gtpo.initial_entropy=0.3"


ORDER = [4, 2, 0, 5, 1, 3]


@pytest.mark.parametrize("order", [range(6), ORDER])
@pytest.mark.parametrize("name", ["gtpo", "gtpo_trajectory"])
def test_advantages_are_those_of_the_bare_function_and_the_metrics_are_logged(stage, rows, order, name):
    metrics, advantages = stage(f"algorithm.adv_estimator={name}").step(order)
    initial_entropy = real_mean_entropy(rows)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=initial_entropy))
    assert metrics["gtpo/entropy/initial"] == pytest.approx(initial_entropy)
    assert metrics["gtpo/group/size_min"] == 2 and metrics["timing_s/gtpo"] > 0
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(rows["entropy"][5].mean().item())
    of_positive = [rows["old_log_probs"][i].mean() for i in (0, 5)]
    assert metrics["gtpo/log_prob/positive"] == pytest.approx(torch.stack(of_positive).mean().item())
    assert reduce_metrics({"actor/pg_loss": [1.0]}) == {"actor/pg_loss": 1.0}  # they are logged once


def test_completions_cut_off_by_the_models_context_count_as_truncated(stage):
    metrics, _ = stage("actor_rollout_ref.rollout.max_model_len=1").step()
    assert metrics["gtpo/entropy/truncated"] == pytest.approx(metrics["gtpo/entropy/mean"])


def test_settings_reach_the_estimator(stage, rows):
    overrides = ["algorithm.gtpo.entropy_coeff=0.7", "+algorithm.gtpo.conflict_span=all"]
    overrides += ["+algorithm.gtpo.min_correct_reward=21"]
    _, advantages = stage(*overrides, KNOWN, "algorithm.norm_adv_by_std_in_grpo=false").step()
    config = GTPOConfig(entropy_coeff=0.7, conflict_span="all", initial_entropy=0.3, min_correct_reward=21)
    torch.testing.assert_close(advantages, expected(rows, config=config, norm_adv_by_std_in_grpo=False))


def by_entropy(responses, response_mask, advantages, entropy):
    """λ of one's own, also where A_i = 0."""
    return response_mask * (0.5 + entropy) * (2 + advantages.sign().unsqueeze(-1))


def by_log_probs(response_mask, old_log_probs, advantages):
    return response_mask * old_log_probs.exp()


def test_lambda_of_ones_own_acts_in_both_trainers(stage, rows):
    name = f"pkg://{__name__}.by_entropy"
    metrics, advantages = stage(KNOWN, f"++algorithm.gtpo.token_weights='{name}'").step()
    torch.testing.assert_close(advantages, expected(rows, config={"token_weights": name}, initial_entropy=0.3))
    assert metrics["gtpo/lambda/mean"] != 1 and "gtpo/conflict/token_frac" not in metrics


@pytest.mark.parametrize("rewards", [[20.0, 10.0, 1.0, 10.0, 0.0, 20.0], [1.0, 1.0, 2.0, 1.0, 0.0, 2.0]])
def test_lambda_of_ones_own_reaches_the_update_where_a_is_0_too(stage, rows, rewards):
    """The entropy of the update gives what that of the pass before it gives."""
    rows["rm_scores"] = [
        torch.tensor([0.0] * (len(row) - 1) + [r]) for row, r in zip(rows["responses"], rewards, strict=True)
    ]
    name = f"++algorithm.gtpo.token_weights='pkg://{__name__}.by_log_probs'"
    before_metrics, before = stage(KNOWN, name).step()
    updating = stage(KNOWN, name, "algorithm.gtpo.entropy_from=update")
    metrics, handed_over = updating.step()
    torch.testing.assert_close(updating.in_own_order(updating.used), before)
    assert (before != 0).any() and metrics["gtpo/lambda/mean"] == pytest.approx(before_metrics["gtpo/lambda/mean"])
    assert (handed_over[rows["rm_scores"][0].new_tensor(rewards) == 0].abs() < 1e-20).all()


def test_a_field_that_the_mode_cannot_give_is_an_error(stage):
    name = f"++algorithm.gtpo.token_weights='pkg://{__name__}.by_entropy'"
    settings = r"algorithm\.gtpo\.token_weights=.* entropy: algorithm\.gtpo\.entropy_from=update"
    with pytest.raises(ValueError, match=settings):
        stage(KNOWN, name, "algorithm.gtpo.entropy_from=update").step()


def test_initial_entropy_is_measured_once_and_written(stage, rows, caplog):
    """On two prompts, and not far from the threshold: there is a warning."""
    gtpo = stage()
    first, _ = gtpo.step()
    rows["entropy"] = [e + 0.5 for e in rows["entropy"]]
    second, _ = gtpo.step()
    assert second["gtpo/entropy/initial"] == first["gtpo/entropy/initial"] < second["gtpo/entropy/mean"]
    record = InitialEntropy.load(gtpo.config.trainer.default_local_dir)
    assert record.value == first["gtpo/entropy/initial"] and (record.completions, record.prompts) == (5, 2)
    (decision,) = [record for record in caplog.records if "completion filter" in record.getMessage()]
    assert decision.levelname == "WARNING" and "`gtpo-verl initial-entropy`" in decision.getMessage()


@pytest.mark.parametrize("global_steps", [2, 9])
def test_resumed_run_reads_the_record_and_does_not_measure(stage, global_steps):
    gtpo = stage(global_steps=global_steps)
    InitialEntropy(0.123).save(gtpo.config.trainer.default_local_dir, GTPOConfig())
    assert gtpo.step()[0]["gtpo/entropy/initial"] == 0.123
    with pytest.raises(ValueError, match="algorithm.gtpo.initial_entropy"):
        stage("trainer.default_local_dir=/nowhere", global_steps=global_steps).step()


def test_resumed_run_without_record_needs_none_where_the_filter_does_not_rest_on_it(stage, tmp_path):
    overrides = [f"trainer.default_local_dir={tmp_path / 'none'}", "algorithm.gtpo.completion_filter=always"]
    metrics, _ = stage(*overrides, global_steps=9).step()
    assert "gtpo/entropy/initial" not in metrics and metrics["gtpo/filter/active"] == 1


@pytest.mark.parametrize(
    ("field", "name"), [("rm_scores", "reward"), ("entropy", "entropy"), ("old_log_probs", "old_log_probs")]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_an_error_that_names_uid_and_row(stage, rows, field, name, value):
    rows[field][2][1] = value
    with pytest.raises(ValueError, match=rf"{name} .*row 2 \(uid q\) .*{value}"):
        stage(KNOWN).step()


@pytest.mark.parametrize(("entropy", "sound"), [(-3.0, False), (-0.2, True), (3.0, True), (40.0, False)])
@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
def test_an_entropy_that_no_distribution_has_is_an_error(stage, rows, entropy, sound, estimator, tmp_path):
    """From 0 to ln V: −3 nats would reward the completion, and 40 nats drop it."""
    rows["entropy"][2][:] = entropy
    overrides = KNOWN, f"algorithm.adv_estimator={estimator}", f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}"
    gtpo = stage(*overrides)
    gtpo.trainer.tokenizer = range(8)  # of 8 tokens
    if sound or estimator == "grpo":
        gtpo.step()
    else:
        with pytest.raises(ValueError, match=rf"entropy .*row 2 \(uid q\) .*{entropy:.4g} nats.* 0 to 2\.773"):
            gtpo.step()


def test_the_largest_entropy_is_unknown_without_a_tokenizer(stage, rows):
    rows["entropy"][2][:] = 40
    stage(KNOWN).step()


@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs"])
def test_a_log_probability_above_0_is_an_error(stage, rows, field):
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    rows[field][3][2] = 0.2  # bfloat16 rounds
    stage(KNOWN).step()
    rows[field][3][2] = 59.0
    with pytest.raises(ValueError, match=rf"{field} .*row 3 \(uid p\) .*59 nats.*use_fused_kernels=False"):
        stage(KNOWN).step()


@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs"])
def test_a_log_probability_that_is_not_finite_is_an_error_whoever_computed_it(stage, rows, field):
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    rows[field][3][2] = torch.nan
    with pytest.raises(ValueError, match=rf"{field} .*row 3 \(uid p\) .*nan"):
        stage(KNOWN).step()


@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
def test_a_filter_that_empties_batch_after_batch_warns_once_and_then_ends_the_run(stage, rows, caplog, entropy_from):
    gtpo = stage(KNOWN, f"algorithm.gtpo.entropy_from={entropy_from}")
    entropies = rows["entropy"]
    high = [e + 2 for e in entropies]
    for batch in [high] * 19 + [entropies] + [high] * 19:  # one batch that teaches something starts the count anew
        rows["entropy"] = batch
        gtpo.step()
    levels = [record.levelname for record in caplog.records if "completion filter dropped" in record.getMessage()]
    assert levels == ["WARNING"] * 2
    with pytest.raises(ValueError, match=r"filter dropped .*20 batches.*algorithm\.gtpo\.completion_filter=never"):
        gtpo.step()


@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
def test_groups_of_one_warn_at_the_first_batch_and_end_the_run_at_the_20th(stage, caplog, entropy_from):
    """Every completion has a uid of its own."""
    alone = make_rows(uids=["a", "b", "c", "d", "pad0f", "e"])
    gtpo = stage(KNOWN, f"algorithm.gtpo.entropy_from={entropy_from}", rows=alone)
    for _ in range(19):
        gtpo.step()
    levels = [record.levelname for record in caplog.records if "alone in" in record.getMessage()]
    assert levels == ["WARNING"]
    with pytest.raises(ValueError, match=r"20 batches.*alone in .*uid"):
        gtpo.step()


@pytest.mark.parametrize("entropy_from", ["old_log_prob", "update"])
def test_equal_rewards_are_told_at_the_1st_and_the_10th_batch(stage, caplog, entropy_from):
    gtpo = stage(KNOWN, f"algorithm.gtpo.entropy_from={entropy_from}", rows=make_rows(scores=[20.0] * 6))
    for _ in range(12):
        metrics, _ = gtpo.step()
    first, tenth = [record.getMessage() for record in caplog.records if "equal rewards" in record.getMessage()]
    assert "in 1 batches" in first and "in 10 batches" in tenth
    assert metrics["gtpo/group/zero_std_frac"] == 1


def test_another_estimators_batches_are_not_counted(stage, caplog, tmp_path):
    grpo = "algorithm.adv_estimator=grpo"
    dump = f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}"
    gtpo = stage(grpo, dump, "+algorithm.gtpo.dump_freq=1", rows=make_rows(uids=["a", "b", "c", "d", "pad0f", "e"]))
    for _ in range(25):
        gtpo.step()
    assert "alone in" not in caplog.text


def test_a_log_prob_off_the_mask_may_be_anything(stage, rows):
    rows["old_log_probs"][4][0] = -torch.inf
    _, advantages = stage(KNOWN).step()
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=0.3))


def test_rejected_tokens_keep_their_position_and_get_no_advantage(stage, rows):
    """verl's rollout correction takes them out of the mask before it computes advantages."""
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    rows["rollout_log_probs"][0][0] -= 5
    correction = "algorithm.rollout_correction.rollout_rs"
    rejecting = stage(KNOWN, f"{correction}=token_k2", f"{correction}_threshold=2.0")
    advantages = rejecting.advantages()
    kept = padded(rows, "response_mask")
    kept[0, 0] = 0
    assert torch.equal(rejecting.batch["response_mask"].long(), kept)
    torch.testing.assert_close(advantages, expected(rows, initial_entropy=0.3) * kept)


def test_prompts_that_differ_within_a_group_share_no_positions(stage, rows):
    """Groups p and q have a conflict on the first token; one completion of q then answers another prompt."""
    for row in rows["responses"]:
        row[0] = 7
    _, alike = stage(KNOWN).step()
    rows["prompts"][5] = torch.tensor([1, 2])
    metrics, advantages = stage(KNOWN).step()
    torch.testing.assert_close(advantages[[0, 1, 3, 4]], alike[[0, 1, 3, 4]])
    plain = expected(rows, config=GTPOConfig(conflict_span="none"), initial_entropy=0.3)
    torch.testing.assert_close(advantages[[2, 5]], plain[[2, 5]])
    assert (advantages[[2, 5]] != alike[[2, 5]]).any() and metrics["gtpo/group/size_min"] == 2


def save_checkpoint(gtpo, step):
    """As verl does, which then logs the step."""
    folder = Path(gtpo.config.trainer.default_local_dir)
    (folder / f"global_step_{step}").mkdir(parents=True, exist_ok=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    Tracking("gtpo", "run", ["console"]).log({"training/global_step": step}, step)


def test_runs_that_share_a_folder_of_checkpoints_resume_each_with_its_own_initial_entropy(stage, rows):
    """As all runs of a project do that do not set default_local_dir."""
    first = stage()
    measured = first.step()[0]["gtpo/entropy/initial"]
    save_checkpoint(first, 1)
    rows["entropy"] = [entropy + 0.1 for entropy in rows["entropy"]]
    other = stage("trainer.resume_mode=disable")  # it writes its record, and no checkpoint
    assert other.step()[0]["gtpo/entropy/initial"] == pytest.approx(measured + 0.1)
    Tracking("gtpo", "run", ["console"]).log({"training/global_step": 1}, 1)
    save_checkpoint(other, 3)
    assert stage(global_steps=4).step()[0]["gtpo/entropy/initial"] == pytest.approx(measured + 0.1)
    Path(first.config.trainer.default_local_dir, "latest_checkpointed_iteration.txt").write_text("1")
    assert stage(global_steps=2).step()[0]["gtpo/entropy/initial"] == measured
