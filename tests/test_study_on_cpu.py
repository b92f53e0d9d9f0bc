"""The study: its plan, its rewards, what it keeps of a run, its statistics and its tables."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass

from gtpo_verl import GTPOConfig
from studies import plan, report, reward, run
from studies.plan import METHODS, Run

GOOD = "<reasoning>t,a,c</reasoning><answer>tac</answer>"


def test_a_right_answer_is_the_same_word_not_the_same_product():
    assert reward.paper("x", GOOD, "tac") == {"score": 20, "format": 10, "acc": 1, "strict": 1}
    assert reward.paper("x", GOOD, "cat") == {"score": 10, "format": 10, "acc": 0, "strict": 1}


def test_only_the_strict_reward_sees_the_end():
    text = GOOD + "t,t,"
    assert reward.paper("x", text, "tac")["score"] == 20
    assert reward.strict("x", text, "tac") == {"score": 10, "format": 10, "acc": 1, "strict": 0}
    assert reward.strict("x", GOOD, "tac")["score"] == 20


def test_the_coin_knows_nothing_of_the_completion():
    scores = {text: [reward.coin("x", text, "tac")["score"] for _ in range(400)] for text in (GOOD, "")}
    for drawn in scores.values():
        assert set(drawn) == {0, 20}
        assert 150 < drawn.count(20) < 250  # 5 standard deviations
    assert reward.coin("x", GOOD, "tac")["acc"] == 1


def test_runs_have_names_of_their_own_and_known_methods():
    runs = plan.plan()
    assert len({r.name for r in runs}) == len({r.log for r in runs}) == len(runs)
    assert {r.method for r in runs} == set(METHODS)
    seeds = [r.seed for r in runs if (r.group, r.task, r.method) == ("main", "arithmetic", "gtpo")]
    assert seeds == list(range(1, 11))


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Overrides of a run's trainer."""
    monkeypatch.setattr(run, "chosen_rate", lambda family: {"grpo": 1e-4, "gtpo": 2e-4}[family])

    def overrides(study_run):
        made = run.command(study_run, tmp_path, tmp_path / "out")
        return made[made.index("--config-name") + 2 :]

    return overrides


@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_what_it_says_and_nothing_else(command, method):
    with initialize_config_dir(str(run.ROOT / "recipes/config"), version_base=None):
        config = compose("gtpo_cpu", overrides=command(Run("main", "arithmetic", method, 3)))
        twin = compose("gtpo_cpu", overrides=command(Run("main", "arithmetic", "grpo", 3)))
    is_gtpo = config.algorithm.adv_estimator == "gtpo"
    assert is_gtpo == (not method.startswith("grpo"))
    assert config.actor_rollout_ref.actor.optim.lr == (2e-4 if is_gtpo else 1e-4)
    settings = GTPOConfig.from_config(config.algorithm)
    expected = {
        "gtpo": {},
        "masks": {"entropy_coeff": 0, "completion_filter": "never"},
        "backward": {"entropy_coeff": 0, "completion_filter": "never", "conflict_masks": "backward"},
        "forward": {"entropy_coeff": 0, "completion_filter": "never", "conflict_masks": "forward"},
        "skip": {"entropy_coeff": 0, "completion_filter": "never", "conflict_weight_positive": 1},
        "double": {"entropy_coeff": 0, "completion_filter": "never", "conflict_weight_negative": 1},
        "entropy": {"conflict_span": "none"},
    }
    if method in expected:
        assert settings == replace(GTPOConfig(), **expected[method])
    for key in ("algorithm.adv_estimator", "algorithm.gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode"):
        _set(config, key, _get(twin, key))
    _set(config, "actor_rollout_ref.actor.optim.lr", 1e-4)
    changed = {"grpo_strict": "reward.custom_reward_function.name", "grpo_coin": "reward.custom_reward_function.name"}
    if key := changed.get(method, "actor_rollout_ref.rollout.n" if method.endswith("G12") else ""):
        assert _get(config, key) != _get(twin, key)
        _set(config, key, _get(twin, key))
    assert config == twin
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def _get(config, key):
    for part in key.split("."):
        config = config[part]
    return config


def _set(config, key, value):
    *path, last = key.split(".")
    _get(config, ".".join(path))[last] = value


def logged(run_, values, steps=None):
    """Write a run's log as the runner keeps it."""
    lines = [
        json.dumps({"step": step + 1, **{key: value(step) for key, value in values.items()}, "perf/throughput": 1.0})
        for step in range(steps or run_.steps)
    ]
    run.keep(lines, run_.log)


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "HERE", tmp_path)
    return tmp_path / "results"


def test_a_log_is_kept_small_and_reads_back(results):
    one = Run("main", "arithmetic", "gtpo", 1, steps=200)
    logged(one, {"reward/acc/mean": lambda step: step / 3, "actor/entropy": lambda step: 0.123456789})
    (first, *_) = [json.loads(line) for line in gzip.open(one.log, "rt")]
    assert first == {"step": 1, "reward/acc/mean": 0.0, "actor/entropy": 0.123457}
    assert run.final(one, "reward/acc/mean") == pytest.approx(np.mean(np.arange(100, 200) / 3), rel=1e-5)


def test_each_family_takes_the_rate_of_its_highest_final_reward(results):
    best = {"grpo": 5e-5, "gtpo": 2e-4}
    for one in plan.selection():
        logged(one, {"reward/score/mean": lambda step, one=one: 10.0 + (one.lr == best[one.family])})
    assert {family: run.chosen_rate(family) for family in best} == best


def test_the_statistics_by_hand():
    assert report.iqm(np.array([0.0, 1.0, 2.0, 100.0])) == 1.5
    higher, same = np.array([2.0, 3.0]), np.array([0.0, 1.0])
    assert report.probability_of_improvement(higher, same) == 1.0
    assert report.probability_of_improvement(higher, same, same, same) == 0.75
    assert report.interval(report.iqm, [same]).startswith("0.50 [0.00, 1.00]")


def test_the_tables_count_what_is_done_and_what_went_wrong(results, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "OUT", tmp_path / "out")
    for one in plan.selection():
        logged(one, dict.fromkeys(report.METRICS.values(), lambda step: 1.0))
    for one in plan.plan():
        if one.group == "main" and one.task == "arithmetic" and one.seed <= 3:
            ends = 1.0 if one.method == "gtpo" else 0.25
            values = dict.fromkeys(report.METRICS.values(), lambda step, ends=ends: ends)
            logged(one, {**values, "reward/acc/mean": lambda step: 0.3 + step / 1000})
    assert report.main() == 0
    tables = (tmp_path / "out/tables.md").read_text()
    assert "| arithmetic | grpo | 3 of 10 | 3/3 | 0/3 |" in tables
    assert "| arithmetic | gtpo | 3 of 10 | 0/3 | 0/3 |" in tables
    assert "| 1.00 [1.00, 1.00] | 1.00 |\n" in tables and "| 0.25 [0.25, 0.25] | 0.25 |\n" in tables
    assert "| strict | 1.00 [1.00, 1.00] |" in tables
    rows = list(csv.DictReader((tmp_path / "out/finals.csv").open()))
    assert len(rows) == 6 + len(list(plan.selection()))
    assert (tmp_path / "out/arithmetic.png").stat().st_size > 10_000


def test_the_worst_stretch_of_a_run_that_recovers_is_told(results):
    (run,) = (one for one in plan.quick() if one.method == "gtpo")
    constant = dict.fromkeys(report.METRICS.values(), lambda step: 1.0)
    logged(run, {**constant, "reward/strict/mean": lambda step: 0.0 if 100 < step <= 140 else 1.0})
    assert report.worst_strict(run) == pytest.approx(0.2) and not report.lost_end(run)


def test_a_short_or_failed_run_leaves_no_log(results, tmp_path, monkeypatch, capsys):
    one = Run("main", "arithmetic", "gtpo", 1, steps=5)
    monkeypatch.setattr(run, "prepare", lambda *_: None)

    def started(status, steps):
        def start(command, **_):
            out = Path(command[command.index("--out") + 1])
            (out / "metrics.jsonl").write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(steps)))
            return type("Completed", (), {"returncode": status})

        return start

    monkeypatch.setattr(run, "chosen_rate", lambda family: 1e-4)
    for status, steps in ((1, 5), (0, 4)):
        monkeypatch.setattr(run.subprocess, "run", started(status, steps))
        assert not run.execute(one, tmp_path / "outputs")
        assert not one.log.exists()
    assert "4/5 steps" in capsys.readouterr().out
    monkeypatch.setattr(run.subprocess, "run", started(0, 5))
    assert run.execute(one, tmp_path / "outputs")
    assert one.log.exists()
