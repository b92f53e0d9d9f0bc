from pathlib import Path
from statistics import fmean

import matplotlib.figure
import pytest
import run_logs

from gtpo_verl.tools.diagnose.plot import plot
from gtpo_verl.tools.diagnose.report import read_run, report_on

STRICT = Path(__file__).parents[3] / "studies/results/verl/letter_counting/grpo-lr5e-05-seed1.jsonl.gz"


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure, "savefig", lambda self, *a, **k: [figures.append(self), save(self, *a, **k)]
    )
    return figures


def test_the_four_curves_are_drawn_with_the_step_marked(tmp_path, drawn):
    run = read_run(run_logs.write_console(tmp_path / "train.log", [*run_logs.collapse()]))
    report = report_on(run)
    plot(run, report, tmp_path / "run.png")
    (figure,) = drawn
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward", "completions with EOS", "entropy, nats per token", "length, tokens"]
    for axes in figure.axes:
        curve, mean, mark = axes.lines
        assert len(curve.get_xdata()) == 120 and set(mark.get_xdata()) == {report["since"]}
        assert mean.get_ydata()[-1] == pytest.approx(fmean(curve.get_ydata()[-report["means_over"] :]))


def test_what_a_fault_shows_in_is_drawn(tmp_path, drawn):
    run = read_run(STRICT)
    plot(run, report := report_on(run), tmp_path / "run.png")
    assert report["number"] == "exact_format"
    assert [axes.get_title() for axes in drawn[0].axes][:2] == ["accuracy", "exact format"]


def test_the_validation_is_drawn_where_it_decides(tmp_path, drawn):
    records = [x | ({"val-core/a/acc/mean@1": 0.5} if n % 5 == 0 else {}) for n, x in enumerate(run_logs.verl())]
    run = read_run(run_logs.write_console(tmp_path / "train.log", records))
    plot(run, report_on(run), tmp_path / "run.png")
    assert drawn[0].axes[0].get_title() == "validation"


def test_a_curve_that_is_not_logged_is_said_to_be(tmp_path, drawn):
    run = read_run(run_logs.write_csv(tmp_path / "chart.csv", [*run_logs.verl()], "critic/score/mean"))
    plot(run, report_on(run), tmp_path / "run.svg")
    assert [axes.get_title() for axes in drawn[0].axes][2:] == [
        "entropy, nats per token: not logged",
        "length, tokens: not logged",
    ]
