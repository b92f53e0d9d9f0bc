import gzip
import io
import json
import math
import os
import struct

import pytest
import run_logs
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from gtpo_verl.tools.diagnose import console, entries
from gtpo_verl.tools.diagnose.entries import FORMS
from gtpo_verl.tools.diagnose.logs import read_log
from gtpo_verl.tools.diagnose.report import read_run, report_on

RECORDS = [*run_logs.verl(steps=12)]
EXPECTED = {record["training/global_step"]: record for record in RECORDS}
OF_TRL = [*run_logs.trl(RECORDS)]


def same(log, framework="verl"):
    expected = EXPECTED if framework == "verl" else dict(enumerate(OF_TRL, start=1))
    assert log.framework == framework and log.steps.keys() == expected.keys()
    for step, metrics in log.steps.items():
        known = {name: value for name, value in metrics.items() if name in expected[step]}
        assert len(known) > 8 and known == pytest.approx({name: expected[step][name] for name in known})


def note_of(log):
    (note,) = log.notes
    return note


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_verls_console_is_read_with_the_config_that_it_prints(tmp_path, encoding):
    log = read_log(run_logs.write_console(tmp_path / "train.log", RECORDS, encoding=encoding))
    same(log)
    assert log.config == {"limit": 1024, "prompts": 64, "n": 8} and log.notes == []


def test_the_config_may_stand_in_the_command(tmp_path):
    path = run_logs.write_console(tmp_path / "output.log", RECORDS, config=False)
    command = "+ python3 -m verl.trainer.main_ppo data.max_response_length=1024 data.train_batch_size=64 \\\n"
    path.write_text(command + "  actor_rollout_ref.rollout.n=8\n" + path.read_text())
    assert read_log(path).config == {"limit": 1024, "prompts": 64, "n": 8}


def test_of_several_starts_in_one_file_the_last_counts(tmp_path):
    path = run_logs.write_console(
        tmp_path / "train.log", [*RECORDS[:8], *(x | {"actor/lr": 5e-7} for x in RECORDS[4:])]
    )
    log = read_log(path)
    assert "last of 2 starts" in note_of(log) and [*log.steps] == [*range(1, 13)]
    assert [x["actor/lr"] for x in log.steps.values()] == [1e-6] * 4 + [5e-7] * 8


def test_of_several_printed_starts_the_last_counts_which_begins_where_the_epoch_falls(tmp_path):
    records = [x | {"epoch": 0.1 * n} for start in (OF_TRL[:8], OF_TRL) for n, x in enumerate(start)]
    log = read_log(run_logs.write_printed(tmp_path / "nohup.out", records, bar=False))
    assert "last of 2 starts" in note_of(log) and [*log.steps] == [*range(1, 13)]


def test_a_line_that_is_being_written_is_said(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS)
    path.write_text(path.read_text()[:-10])
    log = read_log(path)
    same(log)
    assert "not finished" in note_of(log)


def test_verls_file_logger_is_read_and_null_is_nan(tmp_path):
    path = run_logs.write_jsonl(tmp_path / "run.jsonl", [*RECORDS[:11], RECORDS[11] | {"actor/grad_norm": math.nan}])
    steps = read_log(path).steps
    assert math.isnan(steps[12].pop("actor/grad_norm"))
    assert steps[11]["actor/grad_norm"] == 0.2 and len(steps) == 12


@pytest.mark.parametrize("compressed", [False, True])
def test_the_standard_input_is_read(tmp_path, monkeypatch, compressed):
    content = run_logs.write_console(tmp_path / "train.log", RECORDS).read_bytes()
    piped = io.BufferedReader(io.BytesIO(gzip.compress(content) if compressed else content))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(piped))
    same(read_log(type(tmp_path)("-")))


@pytest.mark.parametrize("quoted", [False, True])
@pytest.mark.parametrize("bar", [False, True])
def test_printed_dicts_are_read(tmp_path, quoted, bar):
    same(read_log(run_logs.write_printed(tmp_path / "nohup.out", OF_TRL, quoted, bar)), "TRL")


def wrap(path, width):
    """Break the lines as a terminal of this width does."""
    lines = []
    for line in path.read_text().splitlines():
        lines += [line[start : start + width] for start in range(0, max(len(line), 1), width)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("width", [37, 80, 133])
@pytest.mark.parametrize("bar", [False, True])
def test_printed_dicts_that_a_terminal_wrapped_are_read(tmp_path, width, bar):
    path = wrap(run_logs.write_printed(tmp_path / "nohup.out", OF_TRL, False, bar), width)
    path.write_text("config = {'a':\n 1}\n{'loss': 0.1, 'rew\n" + path.read_text())
    same(read_log(path), "TRL")


def test_json_lines_that_a_terminal_wrapped_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(json.dumps({"step": step, "data": data}) for step, data in EXPECTED.items()))
    same(read_log(wrap(path, 80)))


def test_a_dict_that_is_never_finished_hides_nothing(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS)
    path.write_text("{'loss': 0.1,\n" + "a\n" * entries.PRINTED + path.read_text() + "{'loss': 0.1,\n")
    same(read_log(path))


def test_a_number_that_is_printed_as_nan_is_nan(tmp_path):
    path = run_logs.write_printed(tmp_path / "nohup.out", [*OF_TRL, OF_TRL[0] | {"loss": math.nan, "kl": -math.inf}])
    last = read_log(path).steps[13]
    assert math.isnan(last["loss"]) and last["kl"] == -math.inf


def test_trls_state_has_the_steps_of_the_log(tmp_path):
    steps = read_log(run_logs.write_state(tmp_path / "trainer_state.json", OF_TRL, every=10)).steps
    assert [*steps] == [*range(10, 130, 10)] and steps[10]["reward"] == OF_TRL[0]["reward"]


def test_of_trls_output_folder_the_newest_checkpoint_is_read(tmp_path):
    for number in (8, 12):
        run_logs.write_state(tmp_path / f"checkpoint-{number}/trainer_state.json", OF_TRL[:number])
    log = read_log(tmp_path)
    same(log, "TRL")
    assert log.name.endswith("checkpoint-12/trainer_state.json")


def test_ms_swifts_log_is_read(tmp_path):
    same(read_log(run_logs.write_swift(tmp_path / "logging.jsonl", OF_TRL)), "ms-swift")


def test_wandbs_history_is_read_and_an_empty_cell_is_no_number(tmp_path):
    path = run_logs.write_csv(tmp_path / "history.csv", RECORDS)
    path.write_text(path.read_text() + "\n13,1\n,1\n")
    log = read_log(path)
    same(log)
    assert "empty" not in log.steps[1]


def test_wandbs_chart_is_read(tmp_path):
    log = read_log(run_logs.write_csv(tmp_path / "chart.csv", RECORDS, "critic/score/mean"))
    assert log.steps == {s: {"critic/score/mean": x["critic/score/mean"]} for s, x in EXPECTED.items()}


@pytest.mark.parametrize(("separator", "step"), [(",", "_step"), (",", "train/global_step"), ("\t", "Step")])
def test_a_table_is_read_wherever_its_column_of_steps_stands(tmp_path, separator, step):
    """W&B's API writes an index before the names; a notebook's table has blanks around the slash."""
    names = ["", "completions / mean_length", "train/reward", "Training Loss", step]
    rows = [[n, x["completions/mean_length"], x["reward"], x["loss"], n + 1] for n, x in enumerate(OF_TRL)]
    path = tmp_path / "history.csv"
    path.write_text("\n".join(separator.join(map(str, row)) for row in (names, *rows)))
    log = read_log(path)
    assert log.framework == "TRL" and [*log.steps] == [*range(1, 13)]
    assert log.steps[3] == pytest.approx(
        {name: OF_TRL[2][name] for name in ("completions/mean_length", "reward", "loss")}
    )


def test_what_trl_logs_at_the_end_is_no_step(tmp_path):
    end = OF_TRL[0] | {"train_runtime": 9.0, "train_loss": 0.0}
    same(read_log(run_logs.write_printed(tmp_path / "nohup.out", [*OF_TRL, end], bar=False)), "TRL")
    same(read_log(run_logs.write_state(tmp_path / "trainer_state.json", [*OF_TRL, end])), "TRL")


def test_a_printed_evaluation_is_of_the_step_before(tmp_path):
    records = [*OF_TRL[:6], {"eval_reward": 0.5}, *OF_TRL[6:]]
    path = run_logs.write_printed(tmp_path / "nohup.out", records, bar=False)
    log = read_log(path)
    assert [step for step, metrics in log.steps.items() if metrics.pop("eval_reward", 0)] == [6]
    same(log, "TRL")


@pytest.mark.parametrize(("prefix", "framework", "records"), [("", "verl", RECORDS), ("train/", "TRL", OF_TRL)])
def test_tensorboard_is_of_whom_its_names_are(tmp_path, prefix, framework, records):
    with SummaryWriter(str(tmp_path / "runs/May01")) as writer:
        for step, record in enumerate(records, start=1):
            for name, value in record.items():
                writer.add_scalar(prefix + name, value, step)
    same(read_log(tmp_path), framework)


def test_all_metrics_are_read_for_figures(tmp_path):
    path = run_logs.write_jsonl(tmp_path / "run.jsonl", [x | {"perf/mfu": 0.4} for x in RECORDS])
    assert read_log(path).steps[1]["perf/mfu"] == 0.4


NO_METRIC = 1 << 22


def bad_logs(folder):
    two = folder / "two"
    two.mkdir()
    for name in "ab":
        run_logs.write_jsonl(two / f"{name}.jsonl", RECORDS)
    chart = folder / "chart.csv"
    chart.write_text("Step,a - critic/score/mean,b - critic/score/mean\n1,0.5,0.5\n")
    files = {
        "empty.log": b"",
        "notes.txt": b"step 1: it went well\n",
        "picture.png": bytes(range(256)),
        "cut.gz": gzip.compress(b"step:1 - critic/score/mean:1" * 99)[:50],
        "config.json": b"{}",
        "list.json": b"[1]",
        "trainer_state.json": b'{"log_history": [{"reward": 1}]}',
        "deep.jsonl": b"[" * 99999,
        "loss.jsonl": b'{"step": 1, "data": {"throughput": 1}}',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    unreadable = {name: "trainer_state.json" if name.endswith("json") else FORMS for name in files}
    (folder / "none").mkdir()
    os.mkfifo(folder / "pipe")
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "line.gz").write_bytes(gzip.compress(b"x" * 2 * NO_METRIC))
    (folder / "lines.gz").write_bytes(gzip.compress(b"1234567\n" * NO_METRIC))
    unreadable |= {"line.gz": FORMS, "lines.gz": FORMS}
    return unreadable | {
        "pipe": "pipe is no file; to read from a pipe, give -",
        "endless": "endless is no file",
        "absent.log": "absent.log does not exist: name a log",
        "none": "none has no log: name one",
        "two": "two has 2 logs (a.jsonl, b.jsonl): name the file of one run",
        "chart.csv": "chart.csv has the runs a, b: export the chart of one",
    }


def test_what_cannot_be_read_is_answered_with_what_can(tmp_path, monkeypatch):
    monkeypatch.setattr(console, "NO_METRIC", NO_METRIC)
    for name, message in bad_logs(tmp_path).items():
        with pytest.raises(ValueError) as raised:
            read_log(tmp_path / name)
        assert message in str(raised.value) and name in str(raised.value)
        assert len(str(raised.value)) < 160 + len(FORMS) + len(str(tmp_path))


def test_a_log_of_json_lines_beside_others_is_read_line_by_line(tmp_path):
    path = tmp_path / "mixed.log"
    path.write_text("".join(f"INFO {json.dumps({'step': s, 'data': x})}\nother: {{}}\n" for s, x in EXPECTED.items()))
    same(read_log(path))


HOSTILE = ["Infinity", "1e400", "9" * 4000, "[1]", "{}", "NaN", '"abc"', "-1", "null"]


@pytest.mark.parametrize("step", HOSTILE)
def test_a_step_that_is_none_is_left_out(tmp_path, step):
    """Of JSON lines, of ms-swift, of trainer_state.json and of a table."""
    good = [f'{{"step": {n}, "reward": {n}, "kl": 0.1}}' for n in range(1, 4)]
    bad = f'{{"step": {step}, "reward": 9, "kl": 0.1}}'
    lines, state, table = tmp_path / "a.jsonl", tmp_path / "trainer_state.json", tmp_path / "a.csv"
    lines.write_text("\n".join([*good, bad] if step != "null" else good))
    state.write_text(f'{{"log_history": [{", ".join([*good, bad])}]}}')
    table.write_text("step,reward,kl\n" + "".join(f"{n},{n},0.1\n" for n in (1, 2, 3)) + f'"{step}",9,0.1\n')
    swift = tmp_path / "b.jsonl"
    swift.write_text("".join(f'{{"reward": 1, "global_step/max_steps": "{n}/10"}}\n' for n in (1, 2, 3, "abc")))
    for path in (lines, state, table, swift):
        assert [*read_log(path).steps] == [1, 2, 3]


@pytest.mark.parametrize("value", ["1e308", "-1e308", "9" * 400, "1e400"])
def test_a_value_beyond_reason_is_not_finite_and_reported_so(tmp_path, value):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"step": {n}, "reward": {value if n > 20 else 1}, "kl": 0.1}}\n' for n in range(1, 41)))
    report = report_on(read_run(path))
    assert report["verdict"] == "failed" and report["since"] == 21 and "not finite: reward" in report["why"]


def test_a_config_that_opens_a_thousand_times_takes_no_time(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS, config=False)
    path.write_text("'rollout':\n" * 20_000 + path.read_text())
    same(read_log(path))


@pytest.mark.parametrize("write", [run_logs.write_console, run_logs.write_csv])
def test_a_file_has_no_more_steps_than_a_run(tmp_path, monkeypatch, write):
    monkeypatch.setattr(entries, "MAX_STEPS", 10)
    with pytest.raises(ValueError, match=r"a\.log .*more than 10 steps"):
        read_log(write(tmp_path / "a.log", RECORDS))


@pytest.mark.parametrize("write", [run_logs.write_console, run_logs.write_csv, run_logs.write_jsonl])
def test_a_step_has_no_more_metrics_than_a_trainer_logs(tmp_path, write):
    many = {f"reward/{number}/mean": 0.5 for number in range(entries.MAX_METRICS)}
    with pytest.raises(ValueError, match="more than 10000 metrics"):
        read_log(write(tmp_path / "a.log", [record | many for record in RECORDS]))


def test_a_long_line_and_much_other_text_hide_no_metrics(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS)
    text = path.read_text().splitlines(keepends=True)
    other = "a completion\n" * (1 << 18) + "y" * (5 << 20) + "\n"
    path.write_text("".join(text[:9]) + other + "".join(text[9:15]) + other + "".join(text[15:]))
    same(read_log(path))


def test_a_tensorboard_record_beyond_any_memory_is_named(tmp_path):
    length = struct.pack("<Q", 1 << 50)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(length + struct.pack("<I", masked_crc32c(length)))
    with pytest.raises(ValueError, match=r"tfevents\.1\.x .*\(MemoryError\)"):
        read_log(tmp_path)


def test_a_row_of_a_table_that_does_not_end_is_named(tmp_path):
    path = run_logs.write_csv(tmp_path / "a.csv", RECORDS)
    path.write_text(path.read_text() + "\0" * (1 << 20))
    with pytest.raises(ValueError, match=r"a\.csv .*field limit"):
        read_log(path)


def test_a_long_first_line_of_another_form_is_no_table(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS, config=False)
    steps = read_log(path).steps
    path.write_text("\0" * (1 << 20) + path.read_text())  # as a log that was emptied while it was written
    assert read_log(path).steps == steps


def test_what_an_agent_prints_beside_verl_is_no_step_of_the_run(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", RECORDS)
    episode = "{{'step': {}, 'reward': 0.5, 'done': False}}\n"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(episode.format(n % 3) + line for n, line in enumerate(lines)))
    log = read_log(path)
    same(log)
    assert log.notes == []


def test_openrlhfs_console_names_the_step_before_the_numbers(tmp_path):
    line = "INFO ✨ Global step {}: {{'reward': {}, 'response_length': 30.0, 'kl': 0.0}}\n"
    starts = [*range(1, 13), *range(9, 16)]
    path = tmp_path / "train.log"
    text = "".join(line.format(step, n) for n, step in enumerate(starts))
    path.write_text(text + "INFO ✨ Evaluation completed, global_step 15, eval_metrics: {'eval_a_pass1': 0.5}\n")
    log = read_log(path)
    assert log.steps[15]["eval_a_pass1"] == 0.5
    assert [*log.steps] == [*range(1, 16)] and log.steps[9]["reward"] == 12 and "last of 2 starts" in log.notes[0]


def test_a_table_may_have_nan_where_a_row_has_no_such_number(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"{step},1,nan,nan,0.5\n{step},1,{step},{'nan' if step == 3 else 1},nan\n" for step in range(1, 5)]
    path.write_text("step,epoch,reward,loss,eval_reward\n" + "".join(rows) + "5,1,nan,nan,nan\n")
    steps = read_log(path).steps
    assert all(steps[step]["reward"] == step and steps[step]["eval_reward"] == 0.5 for step in range(1, 5))
    assert [step for step, x in steps.items() if x["loss"] != x["loss"]] == [3, 5]  # at 5 all is lost


def test_a_name_that_is_not_utf_8_is_printed(tmp_path):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()
    run_logs.write_console(folder / "train.log", RECORDS)
    read_log(folder).name.encode()
    with pytest.raises(ValueError) as raised:
        read_log(folder / "absent")
    str(raised.value).encode()


def test_two_lines_of_a_step_are_one_start(tmp_path):
    lines = [
        line
        for record in RECORDS
        for line in (record, {"training/global_step": record["training/global_step"], "val-core/a/acc/mean@1": 0.5})
    ]
    log = read_log(run_logs.write_console(tmp_path / "a.log", lines))
    assert log.notes == [] and {"critic/score/mean", "val-core/a/acc/mean@1"} <= log.steps[12].keys()


def test_event_files_of_a_resumed_run_are_one(tmp_path):
    for start in (1, 7):
        with SummaryWriter(str(tmp_path / "runs")) as writer:
            for step in range(start, start + 6):
                writer.add_scalar("critic/score/mean", 0.5, step)
    assert [*read_log(tmp_path).steps] == [*range(1, 13)]


def test_of_several_starts_in_a_tensorboard_folder_the_last_counts(tmp_path):
    for start, end, value in ((1, 12, 0.1), (7, 10, 0.2), (9, 9, 0.3)):
        with SummaryWriter(str(tmp_path / "runs")) as writer:
            for step in range(start, end + 1):
                writer.add_scalar("critic/score/mean", value, step)
            writer.add_scalar("timing/start", 1.0, 0)  # of no step of training
    steps = read_log(tmp_path).steps
    assert [round(x["critic/score/mean"], 3) for _, x in sorted(steps.items())] == [0.1] * 6 + [0.2] * 2 + [0.3]


def test_a_second_start_is_seen_by_the_tokens_that_trl_counts(tmp_path):
    records = [x | {"num_tokens": 100 * n} for start in (OF_TRL[:8], OF_TRL) for n, x in enumerate(start)]
    log = read_log(run_logs.write_printed(tmp_path / "nohup.out", records, bar=False))
    assert "last of 2 starts" in note_of(log)


@pytest.mark.parametrize("bar", [False, True])
def test_a_printed_start_from_a_checkpoint_replaces_what_came_after_that(tmp_path, bar):
    records = [x | {"num_tokens": 100 * n} for n, x in enumerate(OF_TRL, start=1)]
    for name, part in (("a", records[:8]), ("b", [x | {"learning_rate": 5e-7} for x in records[4:]])):
        run_logs.write_printed(tmp_path / name, part, bar=False)
    lines = "".join((tmp_path / name).read_text() for name in "ab").splitlines()
    bars = [f"  1%|#   | {n}/12 [01:00<09:00, 6.1s/it]      " * bar for n in (*range(1, 9), *range(5, 13))]
    path = tmp_path / "nohup.out"
    path.write_text("".join(f"{before}{line}\n" for before, line in zip(bars, lines, strict=True)))
    log = read_log(path)
    assert "last of 2 starts" in note_of(log) and [*log.steps] == [*range(1, 13)]
    assert [x["learning_rate"] for x in log.steps.values()] == [1e-6] * 4 + [5e-7] * 8


def test_lines_of_json_have_the_steps_that_they_name(tmp_path):
    lines = [json.dumps({"training/global_step": step, "critic/score/mean": 0.5}) for step in (10, 20, 30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    assert [*read_log(tmp_path / "a.jsonl").steps] == [10, 20, 30]


def test_a_compressed_log_that_lacks_its_end_is_read_as_far_as_it_goes(tmp_path):
    lines = "".join(f"step:{step} - critic/score/mean:{step / 7919}\n" for step in range(1, 2000))
    whole = gzip.compress(lines.encode())
    (tmp_path / "train.log.gz").write_bytes(whole[: len(whole) // 2])
    steps = read_log(tmp_path).steps
    assert [*steps] == [*range(1, max(steps) + 1)] and 500 < len(steps) < 1999


def test_a_line_of_json_may_have_a_validation_and_nothing_else(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 5, "data": {"val/test_score/gsm8k": 0.5}}\n')
    assert read_log(tmp_path / "a.jsonl").steps == {5: {"val/test_score/gsm8k": 0.5}}


def test_names_that_a_logger_wrote_with_underscores_are_verls(tmp_path):
    (tmp_path / "a.csv").write_text("_step,critic_score_mean,val-core_openai_gsm8k_acc_mean@1\n1,0.5,0.25\n")
    expected = {"critic/score/mean": 0.5, "val-core/openai_gsm8k/acc/mean@1": 0.25}
    assert read_log(tmp_path / "a.csv").steps == {1: expected}


@pytest.mark.parametrize("cells", ["[1]", "5", '[{"outputs": [{"text": null}]}]', '[{"outputs": 1}]'])
def test_cells_that_are_none_of_a_notebook_are_bad_input(tmp_path, cells):
    path = tmp_path / "other.json"
    path.write_text(f'{{"cells": {cells}}}')
    with pytest.raises(ValueError, match="other.json"):
        read_log(path)
