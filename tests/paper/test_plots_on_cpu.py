"""The figures: what they read, what they average, what they say on their axes."""

import json
import math
from collections import Counter
from importlib.resources import files

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from gtpo_verl.cli import main
from gtpo_verl.paper.plots import (
    LN2,
    moving_average,
    read_run,
    read_runs,
    token_figure,
    training_figure,
)
from gtpo_verl.view.token_counts import TokenCounts


def metrics(step: int, seed: int = 0) -> dict[str, float]:
    wave = math.sin(step + seed)
    return {
        "reward/acc/mean": 0.5 + 0.01 * step / 10 + 0.05 * wave,
        "reward/format/mean": 9.0 + 0.5 * wave,
        "reward/strict/mean": 0.9 + 0.05 * wave,
        "reward/score/mean": 14.0,
        "completion/eos_rate": 0.95,
        "actor/entropy": 0.1 + 0.01 * seed,
        "gtpo/conflict/token_frac": 0.4,
        "gtpo/filter/dropped_frac": 0.0,
        "response_length/mean": 30.0,
    }


def write_run(path, steps=40, seed=0, flat=False, drop=()) -> str:
    with open(path, "w") as out:
        for step in range(1, steps + 1):
            data = {key: value for key, value in metrics(step, seed).items() if key not in drop}
            out.write(json.dumps({"step": step} | (data if flat else {"data": data})) + "\n")
    return str(path)


def lines(ax, width):
    return [line for line in ax.get_lines() if line.get_linewidth() == width]


MEAN = 1.7


def texts(figure) -> str:
    found = [figure.get_supxlabel()] + [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    found += [legend.get_title().get_text() for legend in figure.legends]
    for ax in figure.axes:
        found += [ax.get_title(), ax.get_xlabel(), ax.get_ylabel(), *(text.get_text() for text in ax.texts)]
    return "\n".join(found).replace("\n", " | ")


# --- runs ------------------------------------------------------------------------------------------------------------


def test_verls_lines_and_flattened_lines_are_the_same_run(tmp_path):
    nested, flat = (read_run(write_run(tmp_path / f"{f}.jsonl", flat=f)) for f in (False, True))
    assert nested.steps.tolist() == flat.steps.tolist() == list(range(1, 41))
    assert set(nested.values) == set(flat.values) == set(metrics(1))
    np.testing.assert_array_equal(nested.values["reward/acc/mean"], flat.values["reward/acc/mean"])


def test_a_run_written_by_verls_own_file_logger_is_read(tmp_path, monkeypatch):
    tracking = pytest.importorskip("verl.utils.tracking")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run.jsonl"))
    logger = tracking.FileLogger("project", "experiment")
    logger.log({"reward/acc/mean": np.float64(0.25), "actor/entropy": float("nan")}, step=1)
    logger.log({"reward/acc/mean": 0.5, "actor/entropy": 0.1}, step=2)
    logger.finish()
    run = read_run(tmp_path / "run.jsonl")
    assert run.values["reward/acc/mean"].tolist() == [0.25, 0.5]
    assert np.isnan(run.values["actor/entropy"][0])


def test_a_repeated_step_keeps_its_last_value_and_merges_its_keys(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        '{"step": 1, "data": {"a": 1}}\n{"step": 2, "data": {"a": 2}}\n\n{"step": 1, "data": {"a": 3, "b": null}}\n'
        '{"step": 2, "data": {"c": 4, "note": "text"}}\n'
    )
    run = read_run(path)
    assert run.steps.tolist() == [1, 2]
    assert run.values["a"].tolist() == [3, 2]
    np.testing.assert_array_equal(run.values["c"], [np.nan, 4])
    assert set(run.values) == {"a", "c"}


def test_a_last_line_in_the_making_is_left_out_and_said(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "data": {"a": 1}}\n{"step": 2, "da')
    assert read_run(path).steps.tolist() == [1]
    assert "run.jsonl:2 is unfinished and left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no steps"),
        ('{"step": 1, "data": {}}\n', "holds no steps"),
        ('{"step": 1, "da\n{"step": 2, "data": {"a": 1}}\n', ":1 is not JSON"),
        ('{"input": "p", "output": "o"}\n', ':1 has no integer "step"'),
        ("[1]\n", ':1 has no integer "step"'),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_run(path)


def test_a_label_gathers_seeds_by_glob_and_by_repetition(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"gtpo_{seed}.jsonl", seed=seed)
    runs = read_runs([f"GTPO={tmp_path}/gtpo_[01].jsonl", f"GTPO={tmp_path}/gtpo_2.jsonl", f"{tmp_path}/gtpo_0.jsonl"])
    assert {label: len(group) for label, group in runs.items()} == {"GTPO": 3, "gtpo_0": 1}


def test_seeds_of_different_length_are_told(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path / f"gtpo_{seed}.jsonl", steps=20 + 5 * seed, seed=seed)
    read_runs([f"GTPO={tmp_path}/gtpo_*.jsonl"])
    said = capsys.readouterr().err
    assert "GTPO: seeds end at different steps" in said and "gtpo_1.jsonl at 25" in said


def test_a_pattern_without_runs_and_a_name_used_twice_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no run matches"):
        read_runs([f"GTPO={tmp_path}/*.jsonl"])
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="two runs are named 'run': write LABEL=PATH"):
        read_runs([write_run(tmp_path / "run.jsonl"), write_run(tmp_path / "b" / "run.jsonl")])


# --- averages --------------------------------------------------------------------------------------------------------


def test_the_moving_average_is_the_mean_of_the_values_in_its_window():
    rng = np.random.default_rng(0)
    steps = np.sort(rng.choice(200, size=60, replace=False))
    values = rng.normal(size=60)
    values[rng.random(60) < 0.2] = np.nan
    for window in (1, 4, 15, 400):
        slow = [np.nanmean(v) if (~np.isnan(v)).any() else np.nan for v in
                (values[(steps > s - window / 2) & (steps <= s + window / 2)] for s in steps)]  # fmt: skip
        np.testing.assert_allclose(moving_average(steps, values, window), slow, atol=1e-12)


def test_seeds_are_averaged_over_the_steps_that_all_of_them_reached(tmp_path):
    runs = {"GTPO": [read_run(write_run(tmp_path / f"{n}.jsonl", steps=n, seed=n)) for n in (20, 30, 40)]}
    entropy = training_figure(runs, window=1).axes[2]
    (mean,) = lines(entropy, MEAN)
    assert list(mean.get_xdata()) == list(range(1, 21))
    np.testing.assert_allclose(mean.get_ydata(), 0.1 + 0.01 * 30)
    (band,) = entropy.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.1 + 0.01 * 20, 0.1 + 0.01 * 40))


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path):
    gtpo = [read_run(write_run(tmp_path / f"gtpo{s}.jsonl", seed=s)) for s in range(3)]
    grpo = [read_run(write_run(tmp_path / "grpo.jsonl", seed=9, drop=[k for k in metrics(1) if k.startswith("gtpo/")]))]
    return {"GRPO": grpo, "GTPO": gtpo}


def test_the_overview_names_its_metrics_units_and_seeds(runs):
    figure = training_figure(runs, title="Two methods", window=9)
    said = texts(figure)
    for words in (
        "Two methods",
        "GRPO (n = 1)",
        "GTPO (n = 3)",
        "nats per token",
        "ln 2",
        "moving average over 9 steps",
    ):
        assert words in said
    assert "not logged" not in said
    entropy = figure.axes[2]
    assert any(np.allclose(line.get_ydata(), LN2) for line in entropy.get_lines())
    assert entropy.get_ylim()[0] <= 0 < LN2 < entropy.get_ylim()[1]


def test_rewards_and_rates_are_percentages_of_their_maximum(runs):
    figure = training_figure({"GTPO": runs["GTPO"][:1]}, window=1)
    accuracy, form = figure.axes[0], figure.axes[1]
    np.testing.assert_allclose(
        lines(accuracy, MEAN)[0].get_ydata(), [100 * metrics(s)["reward/acc/mean"] for s in range(1, 41)]
    )
    solid, dashed = lines(form, MEAN)
    np.testing.assert_allclose(solid.get_ydata(), [10 * metrics(s)["reward/format/mean"] for s in range(1, 41)])
    np.testing.assert_allclose(dashed.get_ydata(), [100 * metrics(s)["reward/strict/mean"] for s in range(1, 41)])
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")


def test_a_metric_that_was_not_logged_is_named_in_its_panel(tmp_path):
    drop = ["reward/acc/mean", "reward/strict/mean", "response_length/mean", "gtpo/entropy/mean"]
    run = read_run(write_run(tmp_path / "run.jsonl", drop=[*drop, "actor/entropy"]))
    said = texts(training_figure({"GTPO": [run]}))
    for key in drop:
        assert f"not logged: | {key}" in said or f"not logged: {key}" in said
    assert "Format reward |" in said and "Ends with EOS |" in said


def test_gtpos_own_entropy_stands_in_for_a_missing_actor_entropy(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "gtpo/entropy/mean": 0.25}\n{"step": 2, "gtpo/entropy/mean": 0.5}\n')
    (line,) = lines(training_figure({"GTPO": [read_run(path)]}, window=1).axes[2], MEAN)
    assert list(line.get_ydata()) == [0.25, 0.5]


def test_a_run_of_one_step_is_a_visible_point(tmp_path):
    figure = training_figure({"GTPO": [read_run(write_run(tmp_path / "run.jsonl", steps=1))]})
    assert lines(figure.axes[0], MEAN)[0].get_marker() == "o"


def test_no_runs_and_more_labels_than_colours_are_refused(runs):
    with pytest.raises(ValueError, match="every label needs a run"):
        training_figure({"GTPO": []})
    with pytest.raises(ValueError, match="7 labels: at most 6"):
        training_figure({str(i): runs["GRPO"] for i in range(7)})


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_the_token_figure_shows_shares_and_spells_what_cannot_be_seen():
    pieces = {1: "</answer>", 2: "\n", 3: [0xE2], 4: "$x_{y}$", 5: "\u202e日"}
    counts = TokenCounts(
        3, False, Counter({i: 10 for i in pieces}), Counter({1: 6, 2: 3, 5: 1}), Counter({3: 1, 4: 3}), pieces
    )
    figure = token_figure(counts)
    left, right = figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["</answer>", "↵", "⟨U+202E⟩⟨U+65E5⟩"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["$x_{y}$", "⟨E2⟩"]
    assert [bar.get_width() for bar in left.patches] == [60, 30, 10]
    assert [text.get_text() for text in left.texts] == ["60%", "30%", "10%"]
    assert "Protected: 10 tokens" in texts(figure) and "3 steps, 50 tokens" in figure.get_supxlabel()
    assert "GTPO would have" in figure.get_suptitle()
    figure.draw_without_rendering()  # $ starts no formula


# --- command line ----------------------------------------------------------------------------------------------------


def test_the_command_writes_the_overview(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path / f"run{seed}.jsonl", seed=seed)
    assert main(["plot", f"GTPO={tmp_path}/run*.jsonl", "--out", str(tmp_path / "figures")]) == 0
    written = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in written] == ["training.png", "training.svg"]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert written[0].read_bytes()[:4] == b"\x89PNG" and "<svg" in written[1].read_text(encoding="utf-8")[:1000]


def test_the_command_draws_the_tokens_of_a_dump(tmp_path):
    demo = files("gtpo_verl.view") / "demo"
    assert main(["plot", "--tokens", str(demo), "--tokenizer", str(demo), "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"tokens.png", "tokens.svg"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "name a RUN"),
        (["missing.jsonl"], "no run matches"),
        (["--tokens", "."], "has no gtpo_dump.json"),
        (["x.jsonl", "--window", "0"], "--window must be at least 1, got 0"),
    ],
)
def test_the_command_ends_with_status_two_and_a_reason(tmp_path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
