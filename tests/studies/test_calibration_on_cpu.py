"""The tables of what diagnose says, against the study's logs."""

from studies import calibration


def test_the_tables_are_what_the_logs_give():
    page = calibration.PAGE.read_text()
    assert calibration.STORED_TABLE.findall(page) == [calibration.stored_table()], "python -m studies.calibration"
    assert calibration.FORMS_TABLE.findall(page) == [calibration.forms_table()], "python -m studies.calibration"


def test_a_run_lost_half_where_a_mean_over_640_completions_says_so():
    def run(*accuracies):
        steps = {step: {"accuracy": x} for step, x in enumerate((x for x in accuracies for _ in range(10)), start=1)}
        return calibration.Stored("a", calibration.MODEL, 64, steps)

    assert calibration.lost_half(run(0.2, 0.8, 0.3)) and not calibration.lost_half(run(0.2, 0.8, 0.5))


def test_a_withdrawal_is_a_verdict_that_becomes_none():
    steps = {step: {"reward": 0.0 if step <= 20 else 0.5} for step in range(1, 41)}
    run = calibration.Stored("a", calibration.MODEL, 64, steps)
    assert [before.word for _, before, _ in calibration.withdrawals(run)] == []
    steps = {step: {"reward": 0.5, "loss": float("nan") if step == 10 else 0.1} for step in range(1, 31)}
    (found,) = calibration.withdrawals(run._replace(steps=steps))
    assert found[0] == 10 and found[1].word == "failed" and found[2] == 20
