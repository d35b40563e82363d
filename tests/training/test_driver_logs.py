"""What the client of a run logs: state changes at info, and nothing on a terminal that the progress display shows already."""

from __future__ import annotations

import logging

import pytest
from training_runs import synthetic

DRIVER = "ephemeron.training.driver.run_driver"


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == DRIVER]


def test_a_run_and_a_replacement_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ephemeron"):
        run = synthetic(workers=3, faults=["kill:rank=1,iteration=5,phase=compute"])
    assert run.ending.status == "finished"
    told = logged(caplog)
    assert told[0] == ("INFO", "launched 3 functions on simulated")
    assert ("INFO", "replacing rank 1 with attempt 1") in told
    assert told[-1] == ("INFO", "run ended: finished")


def test_at_the_default_level_the_driver_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ephemeron"):
        synthetic(workers=2, faults=["kill:rank=1,iteration=5,phase=compute"])
    assert logged(caplog) == []
