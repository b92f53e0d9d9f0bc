"""The figures: what they read, what they average, what they say on their axes."""

import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from verl.utils.tracking import FileLogger

from gtpo_verl.algorithm.config import LN2
from recipes.__main__ import main
from recipes.paper.plots import PANELS, moving_average, read_run, read_runs, training_figure

MEAN = 1.7
"""Width of the line of a mean."""


def a_run(steps=40, seed=0, drop=(), filtered=0.1) -> pd.DataFrame:
    step = np.arange(1, steps + 1)
    metrics = {
        "reward/acc/mean": 0.01 * step,
        "reward/format/mean": 9.0 + 0.01 * step,
        "reward/strict/mean": 0.9,
        "completion/eos_rate": 0.95,
        "actor/entropy": 0.1 + 0.01 * seed,
        "gtpo/conflict/token_frac": 0.4,
        "gtpo/filter/dropped_frac": filtered,
        "response_length/mean": 30.0,
    }
    return pd.DataFrame(metrics, index=step).drop(columns=list(drop))


def write_run(path, **kwargs) -> str:
    rows = a_run(**kwargs).to_dict("index")
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows.items()))
    return str(path)


def means(ax):
    return [line for line in ax.get_lines() if line.get_linewidth() == MEAN]


def texts(figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_a_run_written_by_verls_own_file_logger_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "run.jsonl"))
    logger = FileLogger("project", "experiment")
    logger.log({"reward/acc/mean": np.float64(0.25), "actor/entropy": float("nan")}, step=1)
    logger.log({"reward/acc/mean": 0.5, "actor/entropy": 0.1}, step=2)
    logger.finish()
    run = read_run(tmp_path / "run.jsonl")
    assert run["reward/acc/mean"].tolist() == [0.25, 0.5]
    assert np.isnan(run["actor/entropy"][1])


def test_a_repeated_step_of_a_flattened_log_keeps_its_last_value_and_merges_its_keys(tmp_path):
    path, entropy, loss, norm = tmp_path / "run.jsonl", "actor/entropy", "actor/pg_loss", "actor/grad_norm"
    lines = [{"step": 1, entropy: 1}, {"step": 1, entropy: 3}, {"step": 2, "data": {entropy: 2}}]
    lines.append({"step": 2, norm: 4, loss: 1, "note": "text"})
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    expected = pd.DataFrame({entropy: [3.0, 2.0], norm: [np.nan, 4.0], loss: [np.nan, 1.0]}, index=[1, 2])
    pd.testing.assert_frame_equal(read_run(path), expected)


def test_a_last_line_in_the_making_is_left_out(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text('{"step": 1, "data": {"actor/entropy": 1}}\n{"step": 2, "da')
    assert read_run(path).index.tolist() == [1]


@pytest.mark.parametrize("text", ['{"step": 1, "data": {}}\n', '{"step": 1, "da\n', '{"input": "p"}\n', "[1]\n"])
def test_a_file_that_is_no_run_is_refused(tmp_path, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"run\.jsonl contains no "):
        read_run(path)


def test_a_label_gathers_seeds_by_glob_and_by_repetition_and_says_if_they_differ_in_length(tmp_path, capsys):
    for seed in range(3):
        write_run(tmp_path / f"gtpo_{seed}.jsonl", steps=20 + 5 * seed)
    files = (f"GTPO={tmp_path}/gtpo_[01].jsonl", f"GTPO={tmp_path}/gtpo_[12].jsonl", f"{tmp_path}/gtpo_0.jsonl")
    runs = read_runs(files)  # gtpo_1 counts once
    assert {label: len(group) for label, group in runs.items()} == {"GTPO": 3, "gtpo_0": 1}
    (line,) = capsys.readouterr().err.splitlines()
    assert "GTPO: " in line and "[20, 25, 30]" in line


def test_a_pattern_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run matches"):
        read_runs([f"GTPO={tmp_path}/*.jsonl"])


def test_a_name_used_twice_is_refused(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(ValueError, match="two runs .*'run': .*LABEL=PATH"):
        read_runs([write_run(tmp_path / "run.jsonl"), write_run(tmp_path / "b" / "run.jsonl")])


@pytest.mark.parametrize("path_first", [True, False])
def test_a_path_whose_name_is_a_label_too_is_refused_in_either_order(tmp_path, path_first):
    path = write_run(tmp_path / "run.jsonl")
    labelled = f"run={write_run(tmp_path / 'other.jsonl')}"
    with pytest.raises(ValueError, match="'run': write LABEL=PATH"):
        read_runs([path, labelled] if path_first else [labelled, path])


def test_a_glob_needs_a_label(tmp_path):
    write_run(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="LABEL=GLOB"):
        read_runs([f"{tmp_path}/*.jsonl"])


def test_the_moving_average_is_over_steps_however_many_of_them_were_logged():
    seeds = pd.DataFrame({"a": [1.0, 2.0, 4.0, 8.0]}, index=[1, 2, 4, 9])
    assert moving_average(seeds, 3)["a"].tolist() == [1.5, 1.5, 4.0, 8.0]


def test_seeds_are_averaged_over_the_steps_that_all_of_them_reached():
    entropy = training_figure({"GTPO": [a_run(steps=n, seed=n) for n in (20, 30, 40)]}, window=1).axes[2]
    (mean,) = means(entropy)
    assert list(mean.get_xdata()) == list(range(1, 21))
    np.testing.assert_allclose(mean.get_ydata(), 0.1 + 0.01 * 30)
    (band,) = entropy.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.1 + 0.01 * 20, 0.1 + 0.01 * 40))


def test_the_figure_names_its_metrics_units_and_seeds():
    grpo, gtpo = a_run(drop=["gtpo/conflict/token_frac"]), [a_run(seed=seed) for seed in range(3)]
    figure = training_figure({"GRPO": [grpo], "GTPO": gtpo}, window=9)
    shown = texts(figure)
    names = ("GRPO (n = 1)", "GTPO (n = 3)", "nats per token", "ln 2", "over 9 steps")
    assert [name for name in names if name not in shown] == []
    assert "not logged" not in shown
    accuracy, form, entropy, conflicts, *_ = figure.axes
    assert (len(means(accuracy)), len(means(form)), len(means(conflicts))) == (2, 4, 1)
    assert any(np.allclose(line.get_ydata(), LN2) for line in entropy.get_lines())
    assert entropy.get_ylim()[0] <= 0 < LN2 < entropy.get_ylim()[1]


def test_rewards_and_rates_are_shares_of_their_maximum():
    accuracy, form, *_ = training_figure({"GTPO": [a_run()]}, window=1).axes
    np.testing.assert_allclose(means(accuracy)[0].get_ydata(), [step / 100 for step in range(1, 41)])
    solid, dashed = means(form)
    np.testing.assert_allclose(solid.get_ydata(), [0.9 + 0.001 * step for step in range(1, 41)])
    np.testing.assert_allclose(dashed.get_ydata(), 0.9)
    assert accuracy.get_ylim()[1] == 1.03
    assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")


def test_a_metric_that_was_not_logged_is_named_in_its_panel():
    drop = ["reward/acc/mean", "reward/strict/mean", "response_length/mean", "actor/entropy"]
    figure = training_figure({"GTPO": [a_run(drop=drop)]})
    named = [[text.get_text() for text in ax.texts] for ax in figure.axes[: len(PANELS)]]
    keys = [drop[0]], [drop[1]], [drop[3]], [], [drop[2]], []
    assert named == [[f"not logged:\n{key}" for key in missing] for missing in keys]


def test_where_no_completion_was_filtered_the_figure_says_so_and_draws_no_flat_line():
    *_, filtered = training_figure({"GTPO": [a_run(filtered=0.1)]}).axes[: len(PANELS)]
    assert filtered.axison and len(means(filtered)) == 1
    *_, filtered = training_figure({"GTPO": [a_run(filtered=0.0)], "GRPO": [a_run(filtered=0.0)]}).axes[: len(PANELS)]
    assert not filtered.axison and means(filtered) == []
    (text,) = filtered.texts
    assert "filtered" in text.get_text()


@pytest.mark.parametrize(
    ("lacks", "drawn"),
    [([], 0.5), (["actor/entropy"], 0.4), (["actor/entropy", "actor/entropy_loss"], 0.25)],
    ids=["all", "bypass mode", "GTPO's alone"],
)
def test_the_entropy_is_what_grpo_logs_too_and_a_run_of_one_step_is_a_visible_point(lacks, drawn):
    run = pd.DataFrame({"gtpo/entropy/mean": 0.25, "actor/entropy_loss": 0.4, "actor/entropy": 0.5}, index=[1])
    (line,) = means(training_figure({"GTPO": [run.drop(columns=lacks)]}).axes[2])
    assert (list(line.get_ydata()), line.get_marker()) == ([drawn], "o")


def test_more_labels_than_colours_are_refused():
    with pytest.raises(ValueError, match="7 labels: at most 6"):
        training_figure({str(i): [] for i in range(7)})


def test_the_command_writes_the_figure(tmp_path, capsys):
    for seed in range(2):
        write_run(tmp_path / f"run{seed}.jsonl", seed=seed)
    assert main(["plot", f"GTPO={tmp_path}/run*.jsonl", "--out", str(tmp_path / "figures")]) == 0
    written = sorted((tmp_path / "figures").iterdir())
    assert [path.name for path in written] == ["training.png", "training.svg"]
    assert capsys.readouterr().out.split() == [str(path) for path in written]
    assert written[0].read_bytes()[:4] == b"\x89PNG" and "<svg" in written[1].read_text(encoding="utf-8")[:1000]


@pytest.mark.parametrize(
    "arguments, message", [(["missing.jsonl"], "no run matches"), (["x.jsonl", "--window", "0"], "--window must be")]
)
def test_the_command_ends_with_status_two_and_a_reason(tmp_path, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", *arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
