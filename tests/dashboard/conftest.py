"""A simulated run in which a function dies, with its log, for all tests of the dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from ephemeron.training.job.faults import parse_fault
from tiny_job import JOB


@pytest.fixture(scope="session")
def run_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with one finished run."""
    import ephemeron

    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(home))
        ephemeron.train(
            JOB,
            faults=[parse_fault("kill:rank=1,iteration=8")],
            platform="simulated",
            workers=3,
            aggregators=2,
            batch_size=48,
            memory_mb=1769,
        )
    return home


@pytest.fixture(scope="session")
def run_folder(run_home: Path) -> Path:
    """The run's folder."""
    return next((run_home / "runs").iterdir())
