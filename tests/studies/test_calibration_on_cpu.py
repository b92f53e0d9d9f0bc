"""The table of how early signs speak, against the study's logs."""

from studies import calibration


def test_the_table_of_alarms_is_what_the_logs_give():
    (table,) = calibration.TABLE_OF_PAGE.findall(calibration.PAGE.read_text())
    assert table == calibration.table(calibration.stored_runs()), "python -m studies.calibration"
    (table,) = calibration.LATER_TABLE_OF_PAGE.findall(calibration.PAGE.read_text())
    assert table == calibration.later_table(), "python -m studies.calibration"


def test_a_task_is_held_out_whole():
    runs = calibration.stored_runs()
    for own, others in calibration.held_out(runs):
        assert len({run.task for run in own}) == 1 and own[0].task not in {run.task for run in others}
        assert len(own) + len(others) == len(runs)
    # Another temperature or more required text is no other task.
    assert {run.task for run in runs if "letter_counting" in run.name} == {"letter_counting"}
