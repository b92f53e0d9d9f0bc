import gzip
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from gtpo_verl import cli
from gtpo_verl.diagnose import EVIDENCE, completions_per_step, diagnose, screen
from gtpo_verl.view import DEMO

HERE = Path(__file__).resolve().parent
STUDY = HERE.parents[1] / "studies/results/verl"
HEALTHY = STUDY / "letter_counting/gtpo-lr0.0001-seed1.jsonl.gz"
NO_END = STUDY / "letter_counting/grpo-lr5e-05-seed1.jsonl.gz"
NO_ACCURACY = STUDY / "arithmetic/gtpo-lr0.0003-seed1.jsonl.gz"
TRL = HERE / "trainer_state.json"
"""Of TRL 1.16.0, as `examples/test_trl_gtpo_on_cpu.py` trains: the reward is the number of small digits, limit 16."""


def write(path, records, nested=False):
    """verl's file logger."""
    lines = [{"step": n, "data": record} if nested else {"step": n, **record} for n, record in enumerate(records)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def steps(count=40, **changed):
    """Steps of a GRPO run of verl, the second half changed."""
    good = {"critic/score/mean": 0.5, "response_length/max": 100, "response_length/clip_ratio": 1 / 64}
    return [
        good if n < count / 2 else good | {k.replace("__", "/"): v for k, v in changed.items()} for n in range(count)
    ]


def command(capsys, *arguments):
    status = cli.main(["diagnose", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("log", "status", "verdict", "signs"),
    [
        (HEALTHY, 0, "HEALTHY: no sign of a fault.", []),
        (NO_END, 2, "FAILED: completions that end 0.81 at the end, best 1.00", ["completions are no longer", "some"]),
        (NO_ACCURACY, 2, "FAILED: accuracy 0.07 at the end, best 0.32.", ["accuracy fell below half"]),
        (TRL, 2, "FAILED: completions that end 0.04 at the end, best 0.22.", ["most completions are cut off"]),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_what_is_wrong_with_a_run_that_trained(capsys, log, status, verdict, signs):
    found, said, _ = command(capsys, log)
    assert found == status and verdict in said
    named = re.findall(r"^(\d)\. since step \d+: (.*)", said, re.MULTILINE)
    assert [int(number) for number, _ in named] == [*range(1, len(signs) + 1)]
    assert all(meaning.startswith(sign) for (_, meaning), sign in zip(named, signs, strict=True))
    lines = said.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "No run on a GPU." in " ".join(said.split())
    own = "Would GTPO change it? No: it is GTPO's own run." in said
    assert own is log.name.startswith("gtpo")


def test_the_documentation_shows_what_the_command_prints(monkeypatch):
    monkeypatch.chdir(HERE.parents[1])
    assert f"```\n{screen(diagnose(NO_END.relative_to(Path.cwd())))}\n```" in Path("docs/diagnose.md").read_text()


def test_json_has_what_the_screen_says(capsys):
    status, said, _ = command(capsys, NO_END, "--json")
    report = json.loads(said)
    assert status == 2 and report == diagnose(NO_END) and screen(report) == screen(diagnose(NO_END))
    assert report["numbers"]["ended"] == {"start": 1.0, "best": 1.0, "now": pytest.approx(0.8125), "since": 329}


def test_a_sign_without_a_loss_is_degraded(tmp_path):
    ended = [*[0.75] * 10, *[1.0] * 40, *[0.875] * 30]  # below its best, and not below its start
    log = [{"completion/eos_rate": x, "critic/score/mean": 1.0} for x in ended]
    report = diagnose(write(tmp_path / "run.jsonl", log), completions=64)
    assert report["verdict"] == "degraded" and [sign["number"] for sign in report["signs"]] == ["ended"]


def test_what_is_not_logged_is_never_taken_for_healthy(tmp_path, capsys):
    log = write(tmp_path / "run.jsonl", steps(), nested=True)
    status, said, _ = command(capsys, log)
    assert status == 3
    assert "CANNOT TELL: nothing bad shows, but how completions end is not known." in said
    assert "To log:\ntrainer.v1.sampler.custom_sampler.path=pkg://gtpo_verl.reward_metrics\n" in said
    assert command(capsys, log, "--limit", 200)[0] == 0  # the longest never reached it


@pytest.mark.parametrize(("accuracy", "verdict"), [(0.03, "cannot tell"), (0.2, "healthy")])
def test_a_run_that_was_never_right_is_not_healthy(tmp_path, accuracy, verdict):
    log = [{"completion/eos_rate": 1.0, "reward/acc/mean": accuracy} for _ in range(40)]
    assert diagnose(write(tmp_path / "run.jsonl", log), completions=64)["verdict"] == verdict


def test_completions_that_verl_cuts_off_are_seen_with_the_limit(tmp_path):
    log = write(tmp_path / "run.jsonl", steps(response_length__max=128, response_length__clip_ratio=0.75))
    report = diagnose(log, limit=128)
    assert report["verdict"] == "failed" and report["numbers"]["ended"]["now"] == 0.25
    assert report["signs"][0]["try"] == "actor_rollout_ref.actor.optim.lr=<half of it>"


def test_too_few_completions_for_a_verdict_is_said(tmp_path):
    log = write(tmp_path / "run.jsonl", [{"completion/eos_rate": n % 2 / 8, "reward/acc/mean": 0.5} for n in range(60)])
    assert diagnose(log)["verdict"] == "cannot tell"
    assert diagnose(log, completions=16)["verdict"] == "cannot tell"  # one window and a half
    assert diagnose(log, completions=64)["verdict"] != "cannot tell"


def test_shares_show_of_how_many_completions_they_are():
    assert completions_per_step({1: {"ended": 0.875}, 2: {"ended": 0.5}}) == 8
    assert completions_per_step({1: {"ended": 1.0}, 2: {"ended": 0.9583333134651184}}) == 24  # in single precision
    assert completions_per_step({1: {"ended": 1.0, "accuracy": 0.3}}) == 1


# ---------------------------------------------------------------- rollouts


def test_the_demos_rollouts_show_repetition_and_three_completions(capsys):
    status, said, _ = command(capsys, DEMO, "--tokenizer", DEMO)
    assert status == 3 and "CANNOT TELL: a verdict needs 160 steps" in said  # 11 steps of one prompt
    assert "some completions no longer end" in said and "completions repeat themselves (uncalibrated)" in said
    assert said.count("   step 400: '<reasoning>") == 6
    assert "forward mask 42%, backward mask 37%, either 73%; groups with a conflict: 100%." in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 80 and len(said.splitlines()) <= 40
    quoted = said[said.index("Would GTPO change it? Perhaps") :]
    assert quoted.count("pairs,") == 2 and "conflict at 68%: clean" in quoted and "SmolLM2-135M)" in quoted


def rollouts(folder, groups, first=1):
    """verl's rollout files: a step per entry, each a list of (text, score, acc)."""
    folder.mkdir()
    for number, completions in enumerate(groups, start=first):
        rows = [
            {"uid": f"a_{i}_0", "input": "1+1", "output": text, "score": score, "acc": acc}
            for i, (text, score, acc) in enumerate(completions)
        ]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_groups_whose_rewards_differ_without_a_right_answer_are_counted(tmp_path):
    wrong = [("12", 1.0, 0), ("13", 0.0, 0)]
    right = [("12", 1.0, 1), ("13", 0.0, 0)]
    folder = rollouts(tmp_path / "rollouts", [right] * 2 + [wrong] * 18)
    report = diagnose(folder, tokenizer=str(DEMO))
    assert report["numbers"]["unearned"]["now"] == 1.0 and report["numbers"]["accuracy"]["now"] == 0
    (sign,) = (sign for sign in report["signs"] if sign["number"] == "unearned")
    assert sign["try"] == "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc"


HALF_SHARED = [("1234", 1.0, 1), ("1256", 0.0, 0)]


@pytest.mark.parametrize(
    ("completions", "first", "studied", "answer", "why"),
    [
        ([("12", 1.0, 1), ("34", 0.0, 0)], 1, 0.5, "no", "share no token"),
        ([("12", 1.0, 1), ("12345678", 0.0, 0), ("1", 1.0, 1)], 1, 0.5, "no", "already sees whether"),
        (HALF_SHARED, 1, 0.7, "no evidence", "the study had 6"),
        (HALF_SHARED, 100, 0.5, "no evidence", "in steps 1 to 20"),
        (HALF_SHARED, 1, 0.5, "perhaps", "conflict at 50%: "),
    ],
)
def test_whether_gtpo_would_change_it(tmp_path, monkeypatch, completions, first, studied, answer, why):
    other, found = EVIDENCE["shares"][:2]
    found = found | {"share": studied, "to": studied + 0.1}
    ranges = [other | {"share": studied - 0.08, "from": studied - 0.1}, found]
    monkeypatch.setitem(EVIDENCE, "shares", ranges)
    folder = rollouts(tmp_path / "rollouts", [completions] * 20, first)
    gtpo = diagnose(folder, tokenizer=str(DEMO), limit=8)["gtpo"]
    assert gtpo["answer"] == answer and why in gtpo["why"]
    if completions is HALF_SHARED:
        assert gtpo["either"] == gtpo["forward"] == 0.5 and gtpo["backward"] == 0
    low, high = found["effects"]["clean endings"][1:]
    assert (f"[{low:+.2f}, {high:+.2f}]" in gtpo["why"]) is (answer == "perhaps")


def test_rollouts_add_to_the_log_what_it_lacks(tmp_path):
    folder = rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("13", 0.0, 0)]] * 40)
    log = write(tmp_path / "run.jsonl", [{}, *[record | {"response_length/mean": 2} for record in steps()]])
    report = diagnose(log, rollouts=folder, tokenizer=str(DEMO))
    assert report["numbers"]["reward"]["now"] == 0.5 and report["numbers"]["repetition"]["now"] == 0
    assert set(report["not_logged"]) & {"repetition", "equal", "accuracy"} == set()


# ---------------------------------------------------------------- other frameworks


def test_openrlhfs_tensorboard_is_read(tmp_path):
    with SummaryWriter(str(tmp_path / "run")) as writer:
        for step in range(40):
            truncated = 0.25 if step < 20 else 0.75
            for name, value in {"truncated_rate": truncated, "reward_mean": 1.5, "response_length_mean": 20}.items():
                writer.add_scalar(f"train/rollout/{name}", value, step)
            writer.add_scalar("train/actor_lr", 4e-6, step)
    report = diagnose(tmp_path / "run", completions=64)
    assert report["framework"] == "OpenRLHF" and report["verdict"] == "failed"
    assert report["numbers"]["ended"]["now"] == 0.25 and report["numbers"]["length"]["now"] == 20
    assert [sign["try"] for sign in report["signs"]] == ["--actor.adam.lr 2e-06"]


# ---------------------------------------------------------------- bad input


def bad_inputs(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    text = tmp_path / "notes.jsonl"
    text.write_text("step 1: loss 0.5\n")
    others = write(tmp_path / "loss.jsonl", [{"loss": 0.1}] * 3)
    one = write(tmp_path / "one.jsonl", steps(1))
    nan = write(tmp_path / "nan.jsonl", [*steps(30), {"actor/entropy": math.nan}])
    two = tmp_path / "two"
    two.mkdir()
    for name in "ab":
        write(two / f"{name}.jsonl", steps())
    state = tmp_path / "config.json"
    state.write_text("{}")
    history = tmp_path / "trainer_state.json"
    history.write_text('{"log_history": [{"reward": 1}]}')
    folder = rollouts(tmp_path / "rollouts", [[("12", 1.0, 1), ("13", 0.0, 0)]] * 3)
    words = rollouts(tmp_path / "words", [[("A word", 1.0, 1), ("Another", 0.0, 0)]] * 3)
    long = write(tmp_path / "long.jsonl", [record | {"response_length/mean": 50} for record in steps()])
    return [
        ([tmp_path / "absent.jsonl"], "absent.jsonl does not exist: name the run's metrics.jsonl"),
        ([empty], "empty.jsonl holds no steps"),
        ([text], "notes.jsonl:1 is not JSON"),
        ([state], "config.json is not as it was written, an object with log_history"),
        ([others], "loss.jsonl has none of the metrics of verl that diagnose reads"),
        ([one], "one.jsonl has one step, and nothing to compare it with"),
        ([nan], "nan.jsonl: entropy, nats per token is nan at step 30: look at that step's batch"),
        ([two], "two has 2 logs (a.jsonl, b.jsonl): name the file of one run"),
        ([folder], "name the run's tokenizer with --tokenizer"),
        ([folder, "--tokenizer", tmp_path], "no tokenizer"),
        ([words, "--tokenizer", DEMO], "1.jsonl is not text of the tokenizer"),
        ([long, "--rollouts", folder, "--tokenizer", DEMO], "has 2 tokens a completion at step 1"),
        ([long, "--rollouts", tmp_path / "two"], "has no gtpo_dump.json and no N.jsonl"),
        ([history], "trainer_state.json has an entry without a step in its log_history"),
        ([long, "--limit", "0"], "--limit and --completions must be at least 1"),
    ]


@pytest.mark.parametrize("number", range(15))
def test_bad_input_is_one_line_with_the_file_and_a_remedy(tmp_path, capsys, number):
    arguments, message = bad_inputs(tmp_path)[number]
    status, out, err = command(capsys, *arguments)
    assert status == 4 and out == "" and err.count("\n") == 1
    assert err.startswith("gtpo-verl diagnose: ") and message in err


def test_a_wrong_option_is_bad_input_too(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["diagnose", "--limit", "many", "log"])
    assert stopped.value.code == 4 and "invalid int value" in capsys.readouterr().err


def test_a_folder_with_one_log_names_it(tmp_path):
    shutil.copy(TRL, tmp_path)
    assert diagnose(tmp_path)["log"] == str(tmp_path / "trainer_state.json")


def test_a_compressed_log_reads_as_the_same_uncompressed(tmp_path):
    (tmp_path / "run.jsonl").write_bytes(gzip.decompress(HEALTHY.read_bytes()))
    assert diagnose(tmp_path / "run.jsonl") | {"log": ""} == diagnose(HEALTHY) | {"log": ""}
