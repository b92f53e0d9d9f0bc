"""The token dump: what it writes, when, how much, and from which trainers."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness.stages import STAGES
from rollout_batch import LENGTHS, SCORES, UIDS, real_mean_entropy
from token_dump import batch_of, make_dump, write

from gtpo_verl import compute_gtpo_token_advantages
from gtpo_verl.tokens import load_tokenizer
from gtpo_verl.tools.diagnose.report import read_run
from gtpo_verl.verl_plugin import problems
from gtpo_verl.verl_plugin import token_dump as writer
from gtpo_verl.verl_plugin.run_config import RunConfig, VerlGTPOConfig
from gtpo_verl.verl_plugin.token_dump import TokenDump, bounded_rows
from gtpo_verl.verl_plugin.update_pass import UpdateInputs

KNOWN = "algorithm.gtpo.initial_entropy=0.3"
GROUPED = [0, 1, 3, 2, 5]  # the real rows, group by group


def lines(folder, step=1):
    return [json.loads(line) for line in (folder / f"step_{step:06d}.jsonl").read_text().splitlines()]


def check_lines(found, rows, advantages):
    """The lines are those of the real rows of `rollout_batch`, one group after the other."""
    assert [line["uid"] for line in found] == [UIDS[i] for i in GROUPED]
    for line, i in zip(found, GROUPED, strict=True):
        length = LENGTHS[i]
        assert line["reward"] == SCORES[i] and line["schema_version"] == 2
        assert line["token_ids"] == rows["responses"][i].tolist()
        assert line["loss_mask"] == line["response_mask"] == [1] * length
        assert line["entropy"] == pytest.approx(rows["entropy"][i].tolist(), abs=1e-4)
        assert line["advantages"] == pytest.approx(advantages[i, :length].tolist(), abs=1e-4)


def test_a_line_has_the_parts_of_which_the_advantage_is_made(tmp_path):
    completions = [[5, 6, 1, 9], [5, 6, 2, 9], [5, 3]]
    torch.manual_seed(0)
    batch, row_len = batch_of(completions, [2.0, 0.0, 1.0], entropy=torch.rand(3, 4))
    config = VerlGTPOConfig(dump_dir=str(tmp_path), entropy_threshold=0.5, completion_filter="always")
    path = write(make_dump(tmp_path, config, "gtpo", "/model"), 3, batch, ["u"] * 3, [np.array([8])] * 3, row_len)
    found = lines(tmp_path, 3)
    assert path.name == "step_000003.jsonl"
    result = compute_gtpo_token_advantages(
        torch.tensor([line["group_advantage"] for line in found]),
        ["u"] * 3,
        *(batch[name] for name in ("responses", "response_mask", "entropy")),
        config,
    )
    for row, line in enumerate(found):
        assert line["prompt_ids"] == [8] and line["step"] == 3
        assert line["lambda"] == result.token_weights[row, : row_len[row]].tolist()
        assert line["keep"] == bool(result.keep[row])
        assert line["trajectory_entropy"] == pytest.approx(result.trajectory_entropy[row].item())
        assert line["prefix_len"] == int(result.conflicts.prefix_len[row])
        assert line["suffix_len"] == int(result.conflicts.suffix_len[row])
    assert found[1]["lambda"] == [0.0, 0.0, 1.0, 0.0] and found[0]["lambda"] == [2.0, 2.0, 1.0, 2.0]
    header = json.loads((tmp_path / "gtpo_dump.json").read_text())
    assert header["tokenizer"] == "/model" and header["initial_entropy"] == 0.3 and header["filter_active"] is True
    assert header["gtpo"]["entropy_threshold"] == 0.5
    rows = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  ", writer.__doc__, re.MULTILINE)
    documented = [name for row in rows for name in row.split(", ")]
    assert {*documented} == found[0].keys() | {"inference_logprobs", "prompt", "token_strings", "ended"}


def test_with_the_runs_tokenizer_at_hand_a_line_has_its_words(tmp_path, tokenizer):
    batch, row_len = batch_of([[*"é!".encode(), 256], [*b"a"]], [1.0, 0.0])
    dump = make_dump(tmp_path, VerlGTPOConfig(), loaded=load_tokenizer(tokenizer))
    write(dump, 1, batch, "uu", [np.frombuffer(b"2?", dtype=np.uint8)] * 2, row_len)
    found = [[line[name] for name in ("prompt", "ended", "token_strings")] for line in lines(tmp_path)]
    assert found == [["2?", True, ["", "é", "!", "<|im_end|>"]], ["2?", False, ["a"]]]


def by_sign(response_mask, advantages):
    return response_mask * (1.0 + advantages.sign().unsqueeze(-1))


def test_of_lambda_of_ones_own_a_dump_has_lambda_and_diagnose_reads_it(tmp_path, tokenizer):
    config = VerlGTPOConfig(token_weights=f"pkg://{__name__}.by_sign", completion_filter="never")
    batch, row_len = batch_of([[5, 6], [5, 7]], [2.0, 0.0])
    for step in (1, 2):
        write(make_dump(tmp_path, config, "gtpo", tokenizer), step, batch, ["u"] * 2, [np.array([8])] * 2, row_len)
    assert [line["lambda"] for line in lines(tmp_path)] == [[2.0, 2.0], [0.0, 0.0]]
    assert not any("prefix_len" in line or "suffix_len" in line for line in lines(tmp_path))
    seen = read_run(tmp_path).rollouts
    assert {step: numbers["either"] for step, numbers in seen.steps.items()} == {1: 1, 2: 1}
    assert not any("forward" in numbers for numbers in seen.steps.values())


def test_several_updates_of_one_step_share_its_file_and_a_run_begun_anew_replaces_it(tmp_path):
    dump = make_dump(tmp_path, VerlGTPOConfig(dump_dir=str(tmp_path)))
    batch, row_len = batch_of([[1, 2], [1, 3]], [1.0, 0.0])
    for step, uid in ((1, "a"), (1, "b"), (10, "c")):
        write(dump, step, batch, [uid] * 2, batch["responses"], row_len)
    assert [line["uid"] for line in lines(tmp_path)] == ["a", "a", "b", "b"]
    assert [line["uid"] for line in lines(tmp_path, 10)] == ["c", "c"]
    assert dump._bytes == sum(path.stat().st_size for path in tmp_path.glob("step_*"))
    again = make_dump(tmp_path, VerlGTPOConfig(dump_dir=str(tmp_path)))
    write(again, 1, batch, ["d"] * 2, batch["responses"], row_len)
    assert [line["uid"] for line in lines(tmp_path)] == ["d", "d"]


def test_numbers_that_json_cannot_say_are_null(tmp_path):
    batch, row_len = batch_of([[1, 2], [1, 3]], [1.0, 0.0])
    batch["old_log_probs"] = torch.tensor([[-0.5, -torch.inf], [torch.nan, -1.0]])
    write(
        make_dump(tmp_path, VerlGTPOConfig(dump_dir=str(tmp_path))),
        1,
        batch,
        "uu",
        batch["responses"],
        row_len,
    )
    assert [line["trainer_logprobs"] for line in lines(tmp_path)] == [[-0.5, None], [None, -1.0]]


def test_a_step_is_cut_to_whole_groups_and_a_folder_to_its_limit(tmp_path, monkeypatch, caplog):
    batch, row_len = batch_of([[1, 2, 3]] * 6, [1.0, 0.0] * 3)
    config = VerlGTPOConfig(dump_dir=str(tmp_path), dump_freq=1)
    result = compute_gtpo_token_advantages(
        torch.tensor([1.0, -1.0] * 3),
        list("abcabc"),
        *(batch[name] for name in ("responses", "response_mask", "entropy")),
        VerlGTPOConfig(initial_entropy=0.3),
    )
    assert [bounded_rows(result, tokens) for tokens in (0, 11, 12, 18)] == [
        [0, 3],
        [0, 3],
        [0, 3, 1, 4],
        [0, 3, 1, 4, 2, 5],
    ]
    dump = make_dump(tmp_path, config)
    monkeypatch.setitem(TokenDump.write.__globals__, "_FOLDER_BYTES", 2000)
    for step in range(1, 4):
        if dump.is_due(step):
            write(dump, step, batch, "uuvvww", batch["responses"], row_len)
    files = sorted(tmp_path.glob("step_*.jsonl"))
    assert dump.is_due(4) is False and len(files) < 3 and f"ends with step {len(files)}" in caplog.text
    assert make_dump(tmp_path, config).is_due(4) is False


def test_the_first_step_and_every_nth_are_due(tmp_path):
    dump = make_dump(tmp_path, VerlGTPOConfig(dump_dir=str(tmp_path), dump_freq=4))
    assert [step for step in range(1, 13) if dump.is_due(step)] == [1, 4, 8, 12]


def check_header(folder, estimator, initial_entropy):
    header = json.loads((folder / "gtpo_dump.json").read_text())
    assert (header["adv_estimator"], header["gtpo_applied"]) == (estimator, estimator == "gtpo")
    assert header["initial_entropy"] == pytest.approx(initial_entropy)


@pytest.fixture
def dumping(make_stage, tmp_path):
    """A trainer of verl with a dump."""

    def made(name, adv_estimator, *overrides, **kwargs):
        dump = f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}"
        return make_stage(name, f"algorithm.adv_estimator={adv_estimator}", dump, *overrides, **kwargs)

    return made


@pytest.mark.parametrize("trainer", STAGES)
@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
def test_a_trainer_dumps_what_the_loss_gets(dumping, rows, tmp_path, trainer, estimator):
    rows["prompts"] = [torch.tensor([7] * (i + 1)) for i in range(6)]
    metrics, _ = dumping(trainer, estimator, KNOWN, global_steps=2).step()
    assert "timing_s/gtpo_dump" not in metrics and not (tmp_path / "dump").exists()
    metrics, advantages = dumping(trainer, estimator, KNOWN).step()
    assert metrics["timing_s/gtpo_dump"] > 0
    found = lines(tmp_path / "dump")
    check_lines(found, rows, advantages)
    assert [line["prompt_ids"] for line in found] == [[7] * (i + 1) for i in GROUPED]
    check_header(tmp_path / "dump", estimator, 0.3)


@pytest.mark.parametrize("trainer", STAGES)
def test_with_the_entropy_from_the_update_the_same_is_dumped(dumping, rows, tmp_path, trainer):
    """The actor is asked for the entropy of each token of the completions that are dumped, and of no others."""
    dumping(trainer, "gtpo", KNOWN).step()
    before = lines(tmp_path / "dump")
    shutil.rmtree(tmp_path / "dump")

    from_update = dumping(trainer, "gtpo", KNOWN, "algorithm.gtpo.entropy_from=update")
    from_update.advantages()
    assert not (tmp_path / "dump").exists()
    assert UpdateInputs.from_batch(from_update.batch).wants_token_entropy.tolist() == [i in GROUPED for i in range(6)]
    assert from_update.update()["timing_s/gtpo_dump"] > 0
    for line, expected in zip(lines(tmp_path / "dump"), before, strict=True):
        assert line.keys() == expected.keys()
        for name, value in expected.items():
            assert line[name] == (value if isinstance(value, str) else pytest.approx(value, abs=2e-4)), name


@pytest.mark.parametrize("trainer", STAGES)
def test_rejected_tokens_and_the_rollouts_own_log_probs_are_dumped(dumping, rows, tmp_path, trainer):
    rows["rollout_log_probs"] = [x.clone() for x in rows["old_log_probs"]]
    rows["rollout_log_probs"][0][2] -= 5
    correction = "algorithm.rollout_correction.rollout_rs"
    dumping(trainer, "gtpo", KNOWN, f"{correction}=token_k2", f"{correction}_threshold=2.0").step()
    first, *_ = lines(tmp_path / "dump")
    assert (first["loss_mask"], first["response_mask"]) == ([1, 1, 0, 1, 1], [1] * 5)
    assert first["inference_logprobs"] == pytest.approx(rows["rollout_log_probs"][0].tolist(), abs=1e-4)


@pytest.mark.parametrize("adv_estimator", ["gtpo", "grpo"])
def test_of_a_session_with_several_outputs_the_last_one_is_dumped(dumping, rows, tmp_path, adv_estimator):
    """verl's own grpo is called with the last outputs alone."""
    keys = ["p_0_1", "p_0_0", "q_0_0", "p_1_0", "pad0f_0_0", "q_1_0"]
    dumping("v1", adv_estimator, KNOWN, keys=keys).step()
    found = [line["token_ids"] for line in lines(tmp_path / "dump")]
    assert found == [rows["responses"][i].tolist() for i in (0, 3, 2, 5)]


def test_initial_entropy_without_gtpo_is_that_of_the_first_dump(dumping, rows, tmp_path):
    measured = real_mean_entropy(rows)
    for global_steps in (1, 10):
        dumping("v1", "grpo", global_steps=global_steps).step()
        check_header(tmp_path / "dump", "grpo", measured)
        rows["entropy"] = [entropy + 0.5 for entropy in rows["entropy"]]


@pytest.fixture
def dump_problems(compose_config, tmp_path):
    """The problems of a run that is to dump into a folder, or into this test's."""

    def found(*overrides, folder=tmp_path):
        return problems.problems(compose_config(f"+algorithm.gtpo.dump_dir={folder}", *overrides))

    return found


@pytest.fixture
def earlier_dump(compose_config, tmp_path):
    """Leave a dump in this test's folder, with a header and with a checkpoint of its run where they are asked for."""
    checkpoints = Path(compose_config().trainer.default_local_dir)

    def leave(header=None, has_checkpoint=True):
        (tmp_path / "step_000001.jsonl").touch()
        if header is not None:
            (tmp_path / "gtpo_dump.json").write_text(json.dumps(header))
        if has_checkpoint:
            (checkpoints / "global_step_1").mkdir(parents=True)
            (checkpoints / "latest_checkpointed_iteration.txt").write_text("1")

    leave.checkpoints = str(checkpoints)
    return leave


def is_of_another_run(messages, folder):
    """Whether the folder's dump is all that is wrong, since it is another run's."""
    (message,) = messages
    return message.startswith(f"algorithm.gtpo.dump_dir={folder} ") and "another run" in message


def test_an_empty_folder_can_be_dumped_into(dump_problems):
    assert dump_problems() == []


def test_steps_between_dumps_are_a_number_above_0_where_there_is_a_dump(compose_config, dump_problems):
    never = "algorithm.adv_estimator=grpo", "+algorithm.gtpo.dump_freq=0"
    assert problems.problems(compose_config(*never)) == []
    (problem,) = dump_problems(*never)
    assert problem.startswith("algorithm.gtpo.dump_freq=0: ")


def test_a_dump_below_a_file_is_refused_before_the_run(dump_problems, tmp_path):
    (tmp_path / "file").touch()
    (problem,) = dump_problems(folder=f"{tmp_path}/file/dump")
    assert problem.startswith(f"algorithm.gtpo.dump_dir={tmp_path}/file/dump: {tmp_path}/file ")


def test_a_folder_in_which_nobody_may_write_is_refused_before_the_run(dump_problems, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    (problem,) = dump_problems(KNOWN, folder=f"{tmp_path}/dump")
    assert problem.startswith(f"algorithm.gtpo.dump_dir={tmp_path}/dump: {tmp_path} ")


@pytest.mark.parametrize("header", [None, {"checkpoints": "/of/another/run"}], ids=["no header", "other checkpoints"])
def test_a_dump_of_another_run_is_refused_before_the_run(dump_problems, earlier_dump, tmp_path, header):
    earlier_dump(header, has_checkpoint=False)
    assert is_of_another_run(dump_problems(KNOWN), tmp_path)


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["resumed", "ended before its first checkpoint"])
def test_a_run_dumps_beside_its_own_earlier_start(dump_problems, earlier_dump, has_checkpoint):
    earlier_dump({"checkpoints": earlier_dump.checkpoints}, has_checkpoint)
    assert dump_problems(KNOWN) == []


@pytest.mark.parametrize("header", [{}, {"checkpoints": "/before/the/folder/was/moved"}], ids=["unknown", "moved"])
def test_a_resumed_run_may_have_been_moved_with_its_dump(dump_problems, earlier_dump, header):
    earlier_dump(header)
    assert dump_problems(KNOWN) == []


def test_a_branch_of_a_run_does_not_dump_into_its_folder(dump_problems, earlier_dump, tmp_path):
    earlier_dump({"checkpoints": earlier_dump.checkpoints})
    branch = ("trainer.default_local_dir=/of/a/branch", "trainer.resume_mode=resume_path")
    checkpoint = f"trainer.resume_from_path={earlier_dump.checkpoints}/global_step_1"
    assert is_of_another_run(dump_problems(KNOWN, *branch, checkpoint), tmp_path)


def test_a_dump_of_grpo_is_not_continued_by_gtpo(dump_problems, earlier_dump, tmp_path):
    earlier_dump({"checkpoints": earlier_dump.checkpoints, "adv_estimator": "grpo"})
    assert is_of_another_run(dump_problems(KNOWN), tmp_path)


def test_a_dump_of_gtpo_is_continued_under_its_other_name(dump_problems, earlier_dump):
    earlier_dump({"checkpoints": earlier_dump.checkpoints, "adv_estimator": "gtpo_trajectory"})
    assert dump_problems(KNOWN) == []


def test_a_header_whose_estimator_is_no_name_is_of_another_run(dump_problems, earlier_dump, tmp_path):
    earlier_dump({"checkpoints": earlier_dump.checkpoints, "adv_estimator": ["gtpo"]})
    assert is_of_another_run(dump_problems(KNOWN), tmp_path)


def test_a_header_whose_checkpoints_are_no_path_is_as_one_without(dump_problems, earlier_dump):
    earlier_dump({"checkpoints": 5})
    assert dump_problems(KNOWN) == []


def test_a_dump_that_fails_in_training_ends_and_the_run_goes_on(make_stage, tmp_path, caplog):
    stage = make_stage("legacy", f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}", "+algorithm.gtpo.dump_freq=1")
    stage.step()
    shutil.rmtree(tmp_path / "dump")
    (tmp_path / "dump").touch()  # the mount is gone
    for stage.trainer.global_steps in (2, 3):
        logged, _ = stage.step()
        assert "gtpo/conflict/token_frac" in logged
    (warning,) = [record.getMessage() for record in caplog.records if "token dump ends" in record.getMessage()]
    assert "step 2," in warning and str(tmp_path / "dump") in warning


def test_a_dump_that_cannot_be_cleared_is_left_out_and_the_run_goes_on(make_stage, tmp_path, monkeypatch, caplog):
    def unlink(path, missing_ok=False):
        raise PermissionError(f"{path} is another user's, in a folder of all")

    overrides = KNOWN, f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}"
    make_stage("legacy", *overrides).step()
    monkeypatch.setattr(Path, "unlink", unlink)
    logged, _ = make_stage("legacy", *overrides).step()
    assert "gtpo/conflict/token_frac" in logged
    (warning,) = [record.getMessage() for record in caplog.records if "token dump" in record.getMessage()]
    assert f"{tmp_path / 'dump'}" in warning


@pytest.mark.parametrize("trainer", ["v1", "legacy"])
def test_a_run_that_is_only_observed_goes_on_where_gtpo_could_not(make_stage, rows, trainer, tmp_path, caplog):
    rows["entropy"][0][0] = float("nan")
    stage = make_stage(trainer, "algorithm.adv_estimator=grpo", f"+algorithm.gtpo.dump_dir={tmp_path / 'dump'}")
    stage.step()
    (warning,) = [record.getMessage() for record in caplog.records if "token dump ends" in record.getMessage()]
    assert "step 1," in warning and "entropy of row 0" in warning


def test_a_run_that_starts_again_drops_the_steps_that_it_will_make_again(compose_config, tmp_path):
    config = compose_config(f"+algorithm.gtpo.dump_dir={tmp_path}")
    for step in (1, 100, 200):
        (tmp_path / f"step_{step:06d}.jsonl").write_text("{}")
    (tmp_path / "step_000100_copy.jsonl").write_text("")
    dump = TokenDump.of(SimpleNamespace(config=config, global_steps=100), RunConfig.read(config))
    left = ["step_000001.jsonl", "step_000100_copy.jsonl"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == left and dump._bytes == 2


@pytest.mark.parametrize("estimator", ["gtpo", "grpo"])
@pytest.mark.parametrize(("override", "value"), [("''", ""), ("' '", " "), ("5", 5)])
def test_a_folder_without_a_name_is_an_error(compose_config, override, value, estimator):
    with pytest.raises(ValueError, match=rf"algorithm\.gtpo\.dump_dir={value!r}: .*null"):
        RunConfig.read(compose_config(f"algorithm.adv_estimator={estimator}", f"+algorithm.gtpo.dump_dir={override}"))


def test_a_tokenizer_of_its_own_is_named(make_stage, tmp_path):
    make_stage("v1", f"+algorithm.gtpo.dump_dir={tmp_path}", "++actor_rollout_ref.model.tokenizer_path=/words").step()
    assert json.loads((tmp_path / "gtpo_dump.json").read_text())["tokenizer"] == "/words"
