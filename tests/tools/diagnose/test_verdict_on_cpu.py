"""What diagnose says of runs, from a log alone: each kind of run that it once misjudged, in each form of log."""

import math

import pytest
import run_logs

from gtpo_verl.tools.diagnose.logs import Log
from gtpo_verl.tools.diagnose.verdict import completions_per_step, read_run, report_on

COLLAPSE = [*run_logs.collapse()]
TO_NAN = [*run_logs.collapse(grad_norm=lambda step: 0.2 if step < 63 else math.nan, kl=lambda s: 0.1)]
LOST_ACCURACY = [
    x
    | {
        "rewards/accuracy": 0.4 if n < 35 else 0.005 * n % 0.01,
        "rewards/tag/mean": 0.01 * n,
        "completion_length": 600.0,
    }
    for n, x in enumerate(run_logs.trl(run_logs.verl()))
]
FEW = {"steps": 300, "completions": 2, "noise": 0.2, "cut": lambda step: 0.0, "lowest": lambda step: -1.0}


def diagnose(path, **options):
    return report_on(read_run(path, **options))


def write(form, folder, records):
    if form in ("state", "printed", "swift"):
        records = records if "reward" in records[0] else [*run_logs.trl(records)]
    name = {"state": "outputs/checkpoint-9/trainer_state.json", "csv": "a.csv", "swift": "logging.jsonl"}.get(
        form, "a.log"
    )
    return getattr(run_logs, f"write_{form}")(folder / name, records)


@pytest.mark.parametrize(
    ("form", "records", "verdict", "since", "named"),
    [
        *(
            (form, COLLAPSE, "failed", 72, ["some completions no longer end", "the reward is lost"])
            for form in ("console", "jsonl", "state", "printed", "swift", "csv")
        ),
        ("console", [*run_logs.verl()], "healthy", None, []),
        ("console", [*run_logs.verl(steps=200, score=lambda step: 0.98, noise=0.01)], "healthy", None, []),  # ceiling
        ("jsonl", [*run_logs.collapse(cut=0.0)], "failed", 72, ["the reward is lost"]),
        ("jsonl", TO_NAN, "failed", 63, ["gradient norm is not finite", "loss is not finite"]),
        ("console", TO_NAN, "failed", 63, ["gradient norm is not finite", "loss is not finite"]),
        ("state", LOST_ACCURACY, "failed", 35, ["accuracy is lost"]),
        (
            "state",
            [x | {"frac_reward_zero_std": 1} for x in run_logs.trl(run_logs.verl())],
            "degraded",
            1,
            ["no gradient"],
        ),
        ("jsonl", [*run_logs.verl(grad_norm=lambda s: 0.0)], "degraded", 1, ["no gradient: its norm is 0"]),
        ("jsonl", [*run_logs.verl(score=lambda s: 0.0)], "degraded", 1, ["hardly a completion ever got a reward"]),
        ("state", [*run_logs.verl(score=lambda s: 0.5)], "degraded", 1, ["no progress: the reward is no better"]),
        (
            "jsonl",
            [*run_logs.verl(entropy=lambda s: 0.55 * 0.93**s, score=lambda s: min(0.3 + 0.01 * s, 0.55))],
            "degraded",
            40,
            ["entropy fell to almost nothing"],
        ),
        (
            "jsonl",
            [*run_logs.verl(score=lambda s: min(-0.9 + 0.01 * s, -0.2), lowest=lambda s: -1.0)],
            "healthy",
            None,
            [],
        ),
        ("jsonl", [*run_logs.verl(score=lambda s: -0.44 + 0.0026 * s, **FEW)], "healthy", None, []),
        (
            "jsonl",
            [*run_logs.verl(score=lambda s: 0.18 if s < 90 else -0.44, **FEW)],
            "failed",
            90,
            ["the reward is lost"],
        ),
    ],
)
def test_each_kind_of_run_gets_its_verdict_since_when_and_why(tmp_path, form, records, verdict, since, named):
    report = diagnose(write(form, tmp_path, records))
    assert report["verdict"] == verdict
    meanings = " | ".join(sign["meaning"] for sign in report["signs"])
    assert all(meaning in meanings for meaning in named) and bool(named) == bool(meanings)
    window = 10 if len(records) < 200 else 40
    assert report["since"] == since or since <= report["since"] <= since + window


def test_what_the_log_implies_is_used_and_an_option_overrides_it(tmp_path):
    path = run_logs.write_console(tmp_path / "train.log", COLLAPSE)
    report = diagnose(path)
    assert (report["completions"], report["limit"], report["means_over"]) == (512, 1024, 10)
    report = diagnose(path, completions=16, limit=2048)
    assert (report["completions"], report["limit"], report["means_over"]) == (16, 2048, 40)


def test_of_how_many_completions_a_log_is():
    def of(*steps, **config):
        return completions_per_step(Log("log", "verl", dict(enumerate(steps)), config, []))

    assert of({"tokens": 410.0 * 512, "prompt": 110.0, "length": 300.0}, prompts=1, n=1) == 512
    assert of({"ended": 0.875}, prompts=64, n=8) == 512
    assert of({"ended": 0.875}, {"ended": 0.5}) == 8
    assert of({"ended": 1.0}, {"ended": 0.9583333134651184}) == 24  # in single precision
    assert of({"ended": 0.8438}, {"ended": 0.0312}, {"ended": 0.2188}) == 32  # rounded
    assert of({"ended": 1.0, "accuracy": 0.3}) is None


def test_a_gradient_that_was_not_finite_once_is_named_and_no_failure(tmp_path):
    records = [*run_logs.verl()]
    records[50] |= {"actor/grad_norm": math.inf}
    report = diagnose(run_logs.write_console(tmp_path / "train.log", records))
    assert report["verdict"] == "healthy"
    assert report["notes"] == [
        "gradient norm was not finite in 1 steps, last in step 51: no failure if the trainer skipped them"
    ]


def test_an_outcome_that_is_lost_counts_though_its_last_value_is_not_finite(tmp_path):
    records = [*COLLAPSE[:-1], COLLAPSE[-1] | {"critic/score/mean": math.nan}]
    report = diagnose(run_logs.write_jsonl(tmp_path / "run.jsonl", records))
    assert report["verdict"] == "failed" and "; reward 0.01 at the end, best 0.62" in report["why"]


def test_advice_is_of_the_first_sign(tmp_path):
    report = diagnose(run_logs.write_console(tmp_path / "train.log", TO_NAN))
    assert "Go back to a checkpoint before it" in report["signs"][0]["advice"]
    assert report["why"].startswith("not finite since step 63: loss, gradient norm")


@pytest.mark.parametrize("steps", [15, 19])
def test_a_log_that_is_too_short_is_no_verdict(tmp_path, steps):
    report = diagnose(run_logs.write_console(tmp_path / "train.log", [*run_logs.verl(steps=steps)]))
    assert report["verdict"] == "cannot tell" and report["why"].startswith("a verdict needs 20 steps")
