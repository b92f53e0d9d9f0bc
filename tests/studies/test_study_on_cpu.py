"""The study: its plan, its rewards, its logs, its statistics, and its page against its logs."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest
from filelock import FileLock
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from gtpo_verl.verl_plugin.run_config import VerlGTPOConfig
from studies import comparisons, plan, report, rewards, run, runs, tables, titles, verl_runs
from studies.plan import CONTROLS, COUNTING, GUESSING_ARMS, MANY, METHODS, TABLES, Cell
from studies.run_queue import write_log

GOOD = "<reasoning>t,a,c</reasoning><answer>tac</answer>"


def test_a_right_answer_is_the_same_word_not_the_same_product():
    assert rewards.paper("x", GOOD, "tac") == {"score": 20, "format": 10, "acc": 1, "strict": 1}
    assert rewards.paper("x", GOOD, "cat") == {"score": 10, "format": 10, "acc": 0, "strict": 1}


def test_only_the_strict_reward_sees_the_end():
    text = GOOD + "t,t,"
    assert rewards.paper("x", text, "tac")["score"] == 20
    assert rewards.strict("x", text, "tac") == {"score": 10, "format": 10, "acc": 1, "strict": 0}
    assert rewards.strict("x", GOOD, "tac")["score"] == 20


def test_an_answer_after_too_little_reasoning_is_not_right():
    assert rewards.paper("x", GOOD, "tac", least_reasoning=5)["acc"] == 1
    assert rewards.paper("x", GOOD, "tac", least_reasoning=6) == {"score": 10, "format": 10, "acc": 0, "strict": 1}
    assert rewards.strict("x", GOOD, "tac", least_reasoning=6)["score"] == 10


def test_other_rewards_pay_for_the_answer_alone_or_for_one_that_ends_the_text():
    wrong, untagged, behind = GOOD, "<answer>tac</answer>", GOOD + "t,t,"
    assert [rewards.answer("x", text, "tac")["score"] for text in (GOOD, untagged, behind, "tac")] == [10, 10, 10, 0]
    assert rewards.answer("x", wrong, "cat")["score"] == 0
    assert [rewards.authors("x", text, "tac")["score"] for text in (GOOD, untagged, behind, "tac")] == [20, 1, 10, 0]
    assert rewards.authors("x", wrong, "cat")["score"] == 10


def test_the_coin_knows_nothing_of_the_completion():
    scores = {text: [rewards.coin("x", text, "tac")["score"] for _ in range(400)] for text in (GOOD, "")}
    for drawn in scores.values():
        assert set(drawn) == {0, 20}
        assert 150 < drawn.count(20) < 250  # 5 standard deviations
    assert rewards.coin("x", GOOD, "tac")["acc"] == 1


def test_every_part_of_the_plan_runs_each_of_its_cells_with_every_seed_once():
    one_prompt = plan.one_prompt()
    assert {cell for cell, _ in one_prompt} == {cell for table in TABLES.values() for cell in table}
    assert {seed for _, seed in one_prompt} == set(range(1, plan.SEEDS + 1))
    for of_part in (one_prompt, *plan.blocks().values()):
        assert len(of_part) == len(set(of_part)) == len({cell.log(seed) for cell, seed in of_part})
        assert {cell.method for cell, _ in of_part} <= set(METHODS)
        seeds = {seed for _, seed in of_part}
        assert {(cell, seed) for cell, _ in of_part for seed in seeds} == set(of_part)
    assert set(CONTROLS) <= set(METHODS)


def test_runs_side_by_side_share_start_and_seed_and_none_is_left_out():
    runs = plan.one_prompt()
    side_by_side = list(run.batches(runs))
    assert sorted(map(str, runs)) == sorted(str((cell, seed)) for _, seed, cells in side_by_side for cell in cells)
    for start, _, cells in side_by_side:
        assert {cell.start for cell in cells} == {start} and len(cells) <= run.AT_A_TIME[start.device]


def test_the_arms_of_block_10_go_over_all_seeds_one_after_another_on_a_cpu_and_side_by_side_on_a_gpu():
    on_cpu = list(run.batches(plan.planned("10")))
    assert [(seed, [cell.method for cell in cells]) for _, seed, cells in on_cpu[:7]] == [
        *((seed, ["grpo_clamped"]) for seed in range(7, 13)),
        (7, ["masks"]),
    ]
    on_gpu = list(run.batches(plan.planned("10-gpu")))
    assert [(seed, [cell.method for cell in cells]) for _, seed, cells in on_gpu] == [
        (seed, methods)
        for seed in range(7, 13)
        for methods in (
            *(["grpo_clamped", "corpo_gtpo"], ["grpo", "masks"], ["gtpo", "gtpo_answer"]),
            *(["grpo_answer", "gtpo_authors"], ["gtpo_clamped"]),
        )
    ]
    assert {start.device for start, *_ in on_gpu} == {"cuda"}


def test_no_log_of_a_gpu_has_the_name_of_one_of_a_cpu():
    of_cpu, of_gpu = ({cell.log(seed) for cell, seed in plan.planned(block)} for block in ("9", "10-gpu"))
    assert of_gpu and not of_cpu & of_gpu
    assert plan.Start("leg_counting", 5, 1.0, 4, 60).device == "cpu"  # whatever the machine has


def test_a_machine_that_cannot_make_a_block_says_so_and_makes_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "execute", lambda *_: pytest.fail("a run was begun"))
    monkeypatch.setattr(run.sys, "argv", ["run", "--block", "10-gpu", "--outputs", str(tmp_path)])
    with pytest.raises(SystemExit):
        run.main()
    assert "torch finds none" in capsys.readouterr().err
    monkeypatch.setattr(run, "planned", lambda block: plan.planned("10-gpu"))
    assert not run.run_next("", tmp_path)


def test_a_start_that_another_process_has_is_left_to_it(tmp_path, monkeypatch):
    missing = [(Cell(start, "gtpo", 1e-4), 1000) for start in MANY[:2]]
    executed = []
    monkeypatch.setattr(run, "planned", lambda block: missing)
    monkeypatch.setattr(run, "execute", lambda start, seed, cells, outputs: executed.append((start, seed, cells)))
    with FileLock(tmp_path / f"{MANY[0].name}-seed1000.lock"):
        assert run.run_next("2", tmp_path)
    assert executed == [(MANY[1], 1000, [missing[1][0]])]
    missing.pop()
    with FileLock(tmp_path / f"{MANY[0].name}-seed1000.lock"):
        assert not run.run_next("2", tmp_path)


@pytest.fixture
def no_logs(tmp_path, monkeypatch):
    """An empty folder in the place of the study's logs."""
    monkeypatch.setattr(plan, "HERE", tmp_path)


@pytest.fixture
def accuracies(no_logs):
    """Write logs of runs of letter counting with these held-out accuracies, by rate."""

    def write(method, by_rate, seed=1, exact_format=10):
        for rate, accuracy in by_rate.items():
            held_out = {"samples": 10, "right": [round(10 * accuracy)] * 3, "strict": [exact_format] * 3}
            write_log(json.dumps({"held_out": held_out}), Cell(COUNTING, method, rate).log(seed))

    return write


def test_the_best_rate_is_that_of_the_highest_accuracy_once_all_its_runs_are_there(accuracies):
    rates = (1e-5, 2e-5, 4e-5)
    accuracies("grpo", {1e-5: 0.5, 2e-5: 0.7})
    assert plan.best_rate(COUNTING, "grpo", rates, (1,)) is None
    accuracies("grpo", {4e-5: 0.7})
    assert plan.best_rate(COUNTING, "grpo", rates, (1,)) == 2e-5
    accuracies("grpo", {1e-5: 0.9, 2e-5: 0.6, 4e-5: 0.1}, seed=2)
    assert plan.best_rate(COUNTING, "grpo", rates, (1, 2)) == 1e-5
    accuracies("gtpo", {1e-5: 0.9}, exact_format=8)
    accuracies("gtpo", {2e-5: 0.1}, exact_format=9)
    assert plan.best_rate(COUNTING, "gtpo", rates[:2], (1,), least_exact_format=0.9) == 2e-5


def test_a_grid_grows_where_a_best_rate_is_at_its_edge_at_most_twice(accuracies):
    grid = (1e-5, 2e-5, 4e-5)
    assert plan.extended(COUNTING, ["grpo"], grid, (1,)) == list(grid)
    accuracies("grpo", {1e-5: 0.5, 2e-5: 0.7, 4e-5: 0.6})
    assert plan.extended(COUNTING, ["grpo"], grid, (1,)) == list(grid)
    accuracies("gtpo", {1e-5: 0.5, 2e-5: 0.6, 4e-5: 0.7})
    assert plan.extended(COUNTING, ["grpo", "gtpo"], grid, (1,)) == [*grid, 8e-5]
    for method in ("grpo", "gtpo"):
        accuracies(method, {8e-5: 0.8, 16e-5: 0.9, 32e-5: 1})
    assert plan.extended(COUNTING, ["grpo", "gtpo"], grid, (1,)) == [*grid, 8e-5, 16e-5]


@pytest.fixture
def command(tmp_path):
    """Overrides of a run under verl."""

    def made(cell):
        words = verl_runs.command(cell, 3, tmp_path, tmp_path / "out")
        return words[words.index("--config-name") + 2 :]

    return made


@pytest.mark.parametrize("method", [method for method in METHODS if method not in CONTROLS])
def test_a_method_changes_what_it_says_and_nothing_else(command, method):
    with initialize_config_dir(str(plan.ROOT / "recipes/config"), version_base=None):
        config = compose("gtpo_cpu", overrides=command(Cell(COUNTING, method, 1e-4)))
        twin = compose("gtpo_cpu", overrides=command(Cell(COUNTING, "grpo", 1e-4)))
    assert (config.algorithm.adv_estimator == "gtpo") == ("grpo" not in method or method == "grpo_clamped")
    settings = VerlGTPOConfig.from_config(config.algorithm)
    no_entropy = {"entropy_coeff": 0, "completion_filter": "never"}
    expected = {
        "gtpo": {},
        "masks": no_entropy,
        "backward": no_entropy | {"conflict_masks": "backward"},
        "forward": no_entropy | {"conflict_masks": "forward"},
        "skip": no_entropy | {"conflict_weight_positive": 1},
        "double": no_entropy | {"conflict_weight_negative": 1},
        "entropy": {"conflict_span": "none"},
        "filter": {"conflict_span": "none", "entropy_coeff": 0},
        "gtpo_no_filter": {"completion_filter": "never"},
        "grpo_clamped": no_entropy | {"conflict_span": "none", "min_correct_reward": 11},
        "gtpo_clamped": {"min_correct_reward": 11},
        "prefix_weights": no_entropy | {"token_weights": "pkg://examples.token_weights.lambda_grpo"},
        "highest_entropy": no_entropy | {"token_weights": "pkg://examples.token_weights.highest_entropy"},
        "shared_beginning": no_entropy | {"token_weights": "pkg://examples.token_weights.shared_beginning"},
    }
    if method in expected:
        assert settings == replace(VerlGTPOConfig(), **expected[method])
    changed = {
        **dict.fromkeys(
            ["grpo_strict", "gtpo_strict", "grpo_coin", "gtpo_answer", "grpo_answer", "gtpo_authors"],
            ["reward.custom_reward_function.name"],
        ),
        "gtpo_no_std": ["algorithm.norm_adv_by_std_in_grpo"],
        "dr_grpo": ["algorithm.norm_adv_by_std_in_grpo", "actor_rollout_ref.actor.loss_agg_mode"],
        **dict.fromkeys(["grpo_4_updates", "gtpo_4_updates"], ["actor_rollout_ref.actor.ppo_mini_batch_size"]),
        "grpo_token_mean": ["actor_rollout_ref.actor.loss_agg_mode"],
        "grpo_kl": ["actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"],
        **dict.fromkeys(["grpo_G12", "gtpo_G12"], ["actor_rollout_ref.rollout.n"]),
        **dict.fromkeys(
            ["grpo_betas", "gtpo_betas"],
            ["actor_rollout_ref.actor.optim.betas", "actor_rollout_ref.actor.optim.lr_warmup_steps"],
        ),
    }.get(method, ())
    assert all(OmegaConf.select(config, key) != OmegaConf.select(twin, key) for key in changed)
    gtpos = ("algorithm.adv_estimator", "algorithm.gtpo", "actor_rollout_ref.actor.policy_loss.loss_mode")
    for key in (*gtpos, *changed):
        OmegaConf.update(config, key, OmegaConf.select(twin, key), merge=False)
    assert config == twin
    omega_conf_to_dataclass(config.actor_rollout_ref.actor)


@pytest.fixture
def logged(no_logs):
    """Write a run's log of 400 steps: `strict` by step; `right` of 64 completions for each held-out question."""

    def write(cell, seed, strict, right=(32,)):
        columns = ("acc", "entropy", "above_ln2", "length", "net_weight", "shared_last")
        steps = {name: [0.5] * 400 for name in columns} | {"strict": [strict(step) for step in range(400)]}
        held_out = {"right": list(right), "strict": [64], "answers": [3], "texts": [9]}
        run.keep({"steps": steps, "held_out": held_out, "seconds": 1.0}, cell.log(seed))
        return cell, seed

    return write


def test_a_log_is_kept_small_and_reads_back(tmp_path):
    run.keep({"steps": {"entropy": [0.123456789, 1.0]}, "held_out": {"right": [63]}}, tmp_path / "a/b.json.gz")
    with gzip.open(tmp_path / "a/b.json.gz", "rt") as file:
        assert json.load(file) == {"steps": {"entropy": [0.1235, 1.0]}, "held_out": {"right": [63]}}


def test_an_archived_log_reads_back_and_is_not_run_again(no_logs, monkeypatch, capsys):
    cell = Cell(MANY[0], "gtpo", 1e-4)
    record = {"steps": {"entropy": [0.5]}, "held_out": {"right": [63]}}
    for seed in (1, 2):
        run.keep(record | {"seconds": float(seed)}, cell.log(seed))
    monkeypatch.setattr(run, "one_prompt", lambda: [])
    monkeypatch.setattr(run, "blocks", lambda: {"2. done": [(cell, 1)], "3. begun": [(cell, 2), (cell, 3)]})
    run.archive_finished()
    assert capsys.readouterr().out == "2. done: 1 logs archived\n"
    assert not cell.log(1).exists() and cell.log(2).exists()
    assert plan.complete([(cell, seed) for seed in (1, 2, 3)]) == [(cell, 1), (cell, 2)]
    plan.read_log.cache_clear()
    assert plan.read_log(cell.log(1)) == record | {"seconds": 1.0}
    plan.archive([cell.log(2)], "2")
    assert plan.read_log(cell.log(2))["seconds"] == 2 and plan.is_stored(cell.log(1))


def test_a_run_is_judged_by_its_worst_stretch_after_the_hundredth_step(logged):
    cell = Cell(COUNTING, "grpo", 1e-4)
    early = logged(cell, 1, lambda step: float(step >= 100), right=[64, 0])
    passing = logged(replace(cell, method="gtpo"), 1, lambda step: 0.0 if 200 <= step < 240 else 1.0, right=[8])
    first, second = runs.results([early, passing]).to_dict("records")
    assert first["worst"] == 1 and not first["lost"]
    assert first["accuracy"] == first["pass8"] == 0.5
    assert second["worst"] == pytest.approx(0.2) and second["lost"]
    assert second["push"] == pytest.approx(25)
    of_k = runs.load(*passing).pass_at
    assert of_k[1] == 1 / 8 and of_k[64] == 1


def test_methods_are_compared_in_pairs_of_one_seed(logged):
    cell = Cell(COUNTING, "grpo", 1e-4)
    strict = {("grpo", 1): 0.2, ("gtpo", 1): 0.9, ("grpo", 2): 0.8, ("gtpo", 3): 0.1}
    made = runs.results([logged(replace(cell, method=m), seed, lambda step, v=v: v) for (m, seed), v in strict.items()])
    comparison = comparisons.compare(made, "gtpo", "grpo", "worst")
    assert comparison.differences == [pytest.approx(0.7)] and comparison.higher == 1
    assert comparisons.compare(made, "grpo", "gtpo", "worst").mean == pytest.approx(-0.7)


def test_pairs_of_one_rate_are_clustered_by_task_and_seed():
    gtpo = table("gtpo", {1: {1e-4: 0.9, 2e-4: 0.7}, 2: {1e-4: 0.5}})
    grpo = table("grpo", {1: {1e-4: 0.5, 2e-4: 0.5}, 2: {1e-4: 0.5}, 3: {1e-4: 0.1}})
    both = pd.concat([gtpo, grpo])
    by_rate = comparisons.compare(both, "gtpo", "grpo", "accuracy", comparisons.PER_RATE)
    assert by_rate.differences == pytest.approx([0.4, 0.0, 0.2])
    assert by_rate.clusters == [("task", 1), ("task", 2), ("task", 1)]
    assert comparisons.compare(both, "gtpo", "grpo", "accuracy").differences == pytest.approx([0.3, 0.0])


def test_a_prediction_is_the_share_of_pairs_in_the_right_order():
    made = pd.DataFrame({"push": [-2.0, 1.0, 0.0, 2.0], "lost": [True, True, False, False]})
    assert comparisons.prediction(made) == 0.75
    assert np.isnan(comparisons.prediction(made[made["lost"]]))


def test_the_page_knows_no_number_that_the_report_does_not():
    assert report.render("a {{one}} b", {"one": "1"}) == "a 1 b"
    with pytest.raises(KeyError):
        report.render("{{two}}", {"one": "1"})


def test_the_page_and_the_tables_are_what_the_logs_give(tmp_path, monkeypatch):
    expected = {path.name: path.read_text() for path in (*report.PAGES.values(), report.TABLES_PAGE, report.RUNS)}
    monkeypatch.setattr(report, "OUT", tmp_path)
    for name in ("TABLES_PAGE", "RUNS"):
        monkeypatch.setattr(report, name, tmp_path / getattr(report, name).name)
    monkeypatch.setattr(report, "PAGES", {name: tmp_path / page.name for name, page in report.PAGES.items()})
    assert report.main([]) == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("*.[mc]*")} == expected
    assert all(
        (tmp_path / name).stat().st_size > 10_000
        for name in ("answer.png", "shrinking.png", "overview.png", "collapse.png")
    )


def test_a_short_or_failed_run_under_verl_leaves_no_log(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verl_runs, "HERE", tmp_path)
    monkeypatch.setattr(verl_runs, "prepare", lambda *_: None)
    cell = Cell(COUNTING, "gtpo", 1e-4)

    def started(status, steps):
        def start(command, **_):
            out = Path(command[command.index("--out") + 1])
            (out / "metrics.jsonl").write_text("".join(f'{{"step": {i + 1}}}\n' for i in range(steps)))
            return type("Completed", (), {"returncode": status})

        return start

    for status, steps in ((1, 600), (0, 599)):
        monkeypatch.setattr(verl_runs.subprocess, "run", started(status, steps))
        assert not verl_runs.execute(cell, 1, tmp_path / "outputs")
        assert not verl_runs.log_of(cell, 1).exists()
    assert "599/600 steps" in capsys.readouterr().out
    monkeypatch.setattr(verl_runs.subprocess, "run", started(0, 600))
    assert verl_runs.execute(cell, 1, tmp_path / "outputs")
    assert verl_runs.log_of(cell, 1).exists()


RESULT = [
    f"{place}: {method} {what}"
    for place, what in (("2 planned", "lost"), ("1b", "collapsed"), ("9", "collapsed"))
    for method in ("gtpo", "grpo")
]
RESULT.append("8: gtpo - grpo accuracy")
PART_ONE = [*(f"main: {method} lost" for method in ("gtpo", "grpo", "grpo_token_mean")), "main: gtpo - grpo accuracy"]
BEST = [f"2 kept: gtpo - {rival} accuracy" for rival in ("grpo", "grpo_token_mean")] + [
    "2 planned: grpo_token_mean lost"
]


@pytest.fixture(scope="module")
def numbers():
    return report.facts()


@pytest.mark.parametrize(
    ("page", "cited"),
    [
        (
            "docs/keys.md",
            [
                *("9: gtpo collapsed", "10-gpu: gtpo collapsed", "10: grpo_clamped lost", "11: grpo_clamped lost"),
                *(f"11: {method} gave up" for method in GUESSING_ARMS[:4]),
            ],
        ),
        (
            "patches/README.md",
            [
                *(*RESULT, *BEST, *PART_ONE),
                *("main: gtpo - grpo_token_mean accuracy", "main: gtpo - grpo pass8"),
            ],
        ),
        (
            "patches/verl-recipe/gtpo/README.md",
            [
                *RESULT,
                *(
                    f"{block}: gtpo - grpo accuracy"
                    for block in ("8 spelling backward", "8 counting letters", "1b", "9")
                ),
                *("9: corpo_gtpo collapsed", "9: corpo_gtpo lost", "9: grpo lost"),
                *("10: Q1", "10: grpo_clamped collapsed", "10: grpo_clamped lost", "block 12-cpu"),
                *("10-gpu: gtpo collapsed", "10-gpu: grpo lost", "10-gpu: grpo_clamped lost"),
            ],
        ),
    ],
)
def test_what_is_cited_of_the_study_is_what_the_logs_give(page, cited, numbers):
    text = " ".join((plan.ROOT / page).read_text().replace(">", " ").split())
    for name in cited:
        assert str(numbers[name]) in text, name


def test_the_table_of_failed_runs_in_readme_is_what_the_logs_give(numbers):
    methods = ("grpo", "grpo_clamped", "gtpo", "corpo_gtpo")
    rows = re.findall(r"^\| (.* seeds, .*?) \| (.*) \|$", (plan.ROOT / "README.md").read_text(), re.MULTILINE)
    blocks = {"six seeds, CPUs": "10", "the same seeds, GPU": "10-gpu", "eight fresh seeds, CPUs": "12-cpu"}
    assert [name for name, _ in rows] == list(blocks)
    for name, cells in rows:
        failed = [numbers.get(f"{blocks[name]}: {method} failed", "not run") for method in methods]
        assert cells.split(" | ") == [str(count) for count in failed], name


def table(method, by_seed, exact_format=1.0):
    """Runs of one task: {seed: {rate: accuracy}}."""
    return pd.DataFrame(
        [
            {
                "task": "task",
                "method": method,
                "lr": lr,
                "seed": seed,
                "accuracy": accuracy,
                "exact_format": exact_format,
            }
            for seed, by_rate in by_seed.items()
            for lr, accuracy in by_rate.items()
        ]
    )


def test_a_run_is_judged_at_the_rate_that_the_other_seeds_chose():
    grpo = {1: {1e-4: 0.9, 2e-4: 0.1}, 2: {1e-4: 0.5, 2e-4: 0.6}, 3: {1e-4: 0.5, 2e-4: 0.8}, 4: {1e-4: 1.0}}
    chosen = comparisons.at_own_best_rate(table("grpo", grpo))
    # Seed 1 alone likes the low rate, and it is the one that does not get it; seed 4 is incomplete.
    assert dict(zip(chosen["seed"], chosen["lr"], strict=True)) == {1: 2e-4, 2: 1e-4, 3: 1e-4}
    both = pd.concat([chosen, table("gtpo", {seed: {1e-4: 0.7} for seed in (1, 2, 3)})])
    assert comparisons.compare(both, "gtpo", "grpo", "accuracy").differences == pytest.approx([0.6, 0.2, 0.2])


def test_a_rate_is_chosen_among_those_that_keep_the_format_on_the_other_seeds():
    made = table("grpo", {seed: {1e-4: 0.5, 2e-4: 0.8} for seed in (1, 2, 3)})
    assert set(comparisons.at_own_best_rate(made, 0.9)["lr"]) == {2e-4}
    made.loc[(made["seed"] == 1) & (made["lr"] == 2e-4), "exact_format"] = 0.0
    chosen = comparisons.at_own_best_rate(made, 0.9)
    assert dict(zip(chosen["seed"], chosen["lr"], strict=True)) == {1: 2e-4, 2: 1e-4, 3: 1e-4}


def test_without_a_rate_that_keeps_the_format_the_most_accurate_is_chosen_in_the_plan_and_on_the_page(accuracies):
    rates = {1e-4: 0.5, 2e-4: 0.8}
    accuracies("grpo", rates, exact_format=1)
    assert plan.best_rate(COUNTING, "grpo", [*rates], (1,), least_exact_format=0.9) == 2e-4
    made = table("grpo", dict.fromkeys((1, 2, 3), rates), exact_format=0.1)
    assert set(comparisons.at_own_best_rate(made, 0.9)["lr"]) == {2e-4}


def test_a_method_bears_the_rates_at_which_it_is_as_accurate_as_at_its_best_and_keeps_the_format():
    kept = table("gtpo", {1: {1e-4: 0.76, 2e-4: 0.8, 8e-4: 0.7}})
    made = pd.concat([kept, table("gtpo", {1: {4e-4: 0.79}}, exact_format=0.85)])
    assert comparisons.rates_borne(made, "task", "gtpo") == [1e-4, 2e-4]


def test_a_run_of_part_two_is_summed_up_by_its_endpoints(no_logs):
    strict = [1.0] * 30 + [0.2] * 25 + [1.0] * 45
    columns = ("entropy", "length", "template", "change", "conflict")
    steps = {name: [0.1] * 100 for name in columns} | {"strict": strict}
    steps |= {f"conflict_{side}": [0.4] * 20 + [0.0] * 80 for side in ("first", "last")}
    held_out = {"samples": 16, "right": [16, 0, 2, 0], "strict": [16, 8, 16, 8]}
    cell = Cell(MANY[0], "gtpo", 1e-4)
    run.keep({"steps": steps, "held_out": held_out}, cell.log(1))
    (summary,) = runs.results([(cell, 1), (cell, 2)]).to_dict("records")
    assert summary["accuracy"] == 18 / 64 and summary["exact_format"] == 0.75
    assert summary["pass8"] == pytest.approx((1 + 1 - 8 * 7 / (16 * 15)) / 4, abs=1e-9)
    assert summary["worst"] == pytest.approx(0.2) and summary["first"] == pytest.approx(0.4)
    assert summary["change"] == pytest.approx(-1)


def test_the_page_fills_up_as_runs_are_complete(no_logs):
    assert not any(rows for _, rows in tables.of_many_prompts().values())
    columns = ("entropy", "length", "template", "conflict", "conflict_first", "conflict_last")
    steps = {name: [0.25] * 60 for name in columns} | {"strict": [1.0] * 60, "change": [0.1] * 60}
    right = {"gtpo": 16, "positive_only": 24}  # of 32, at 1e-4 and 1e-5; less elsewhere
    while missing := [
        (c, seed) for of_block in plan.blocks().values() for c, seed in of_block if not c.log(seed).exists()
    ]:
        for cell, seed in missing:
            answered = right.get(cell.method, 8) - (cell.lr not in (1e-4, 1e-5))
            held_out = {"samples": 32, "right": [answered] * 4, "strict": [32 if cell.lr <= 1e-4 else 16] * 4}
            run.keep({"steps": steps, "held_out": held_out}, cell.log(seed))
    assert [done for _, done in tables.progress()] == [f"{n} of {n}" for n in map(len, plan.blocks().values())]
    made = {name: rows for name, (_, rows) in tables.of_many_prompts().items()}
    methods = {row[0]: row[1:] for row in made["many"]}
    assert methods["GRPO"][:4] == ["1e-4", "0 of 15", "0.25", "1.00"]
    assert methods["GRPO"][5:7] == ["−0.25 [−0.25, −0.25]", "+0.00 [+0.00, +0.00]"]
    assert len(made["real"]) == 6 and len(made["rivals"]) == 4 + len(plan.RIVALS)
    assert ["GTPO", *["0.50, 1.00"] * 5] in made["real by seed"]
    assert len(made["by share"]) == 1 + len(plan.WORDY)
    assert {row[0]: row[2] for row in made["fresh"]} == {titles.METHODS[m]: "0 of 15" for m in plan.CONFIRMED}
    assert made["borne"][0][:2] == ["counting letters", "2.5e-5, 5e-5, 1e-4"]
    assert {row[0] for row in made["better"]} == {"1b", "2", "3", "5"}
    assert {row[2] for row in made["better"]} == {"GRPO, positive updates only"}
    assert all(row[1:4] == ["25%", "25%", "5"] and row[4] == "+0.25 [+0.25, +0.25]" for row in made["by share"])


def held_out_logs():
    """Every stored log with texts of held-out completions, from its archive or its own file."""
    for archive in sorted((plan.ROOT / "studies/results").glob("*.zip")):
        with ZipFile(archive) as logs:
            for name in logs.namelist():
                if name.endswith(".json.gz"):
                    yield name, json.loads(gzip.decompress(logs.read(name)))
    for path in sorted((plan.ROOT / "studies/results").glob("*/*.json.gz")):
        yield f"{path.parent.name}/{path.name}", json.loads(gzip.decompress(path.read_bytes()))


BLOCK = r"(?:(?!</?reasoning>|</?answer>).)*"
BLOCKS = rf"\s*<reasoning>{BLOCK}</reasoning>\s*<answer>{BLOCK}</answer>"


def three_measures(text):
    """Whether a text ends with EOS, is well formed up to the first closing tag, and is in the exact format."""
    ends = text.endswith("<|im_end|>")
    for special in ("<|im_end|>", "<|assistant|>", "<|user|>"):  # no reward sees them
        text = text.replace(special, "")
    answered = re.match(r".*?</answer>", text, re.DOTALL)
    well_formed = answered is not None and re.fullmatch(BLOCKS, answered[0], re.DOTALL) is not None
    exact = re.fullmatch(rf"{BLOCKS}\s*", text, re.DOTALL) is not None
    return ends, well_formed, ends and exact


def test_the_three_measures_of_every_run_are_those_of_its_stored_texts():
    cells = {
        cell.log(seed).relative_to(plan.HERE / "results").as_posix(): (cell, seed) for cell, seed in plan.planned()
    }
    seen = 0
    for name, record in held_out_logs():
        held_out = record.get("held_out") or {}
        texts = held_out.get("text") or held_out.get("texts")
        if name not in cells or not texts or isinstance(texts[0], int):
            continue
        of_questions = [[text] if isinstance(text, str) else text for text in texts]
        found = [[three_measures(text) for text in of_question] for of_question in of_questions]
        shares = np.mean([measures for of_question in found for measures in of_question], axis=0)
        summary = runs.load(*cells[name]).summary
        assert [summary["eos"], summary["well_formed"], summary["exact_format_of_texts"]] == pytest.approx(list(shares))
        for exact, of_question in zip(held_out["strict"], found, strict=True):
            texts_exact = sum(is_exact for *_, is_exact in of_question)
            assert texts_exact <= exact <= held_out["samples"] - len(of_question) + texts_exact, name
        seen += 1
    # SmolLM2's 159 runs of blocks 1, 6, 9, 10 and 12, the tiny model's 991, and what came later.
    assert seen >= 1150
