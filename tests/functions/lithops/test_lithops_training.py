"""Training on Lithops' localhost backend: the same weights when functions die and hand over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("lithops", reason="no Lithops; pip install 'ephemeron[lithops]'")

from checking import left, texts
from cloud_profiles import measured
from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.functions.lithops.settings import LithopsSettings
from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.training.driver import configure, train
from tiny_job import JOB

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingWorld]:
    folder = tmp_path_factory.mktemp("lithops")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
        patch.setenv("LITHOPS_CONFIG", "{}")  # none of the machine's own
        yield TrainingWorld(
            platform="lithops",
            job=JOB,
            memory_mb=768,
            settings=LithopsSettings(every_s=0.1, places=12),
            folder=folder,
            channels={"folder": (folder / "objects").as_uri()},
            slow_relays=True,
        )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class TestLithopsTraining(TrainingMatrix):
    """On the localhost backend, through a folder."""


@pytest.mark.cold_start  # the one whose function makes its imports itself
def test_the_check_has_a_function_called_and_leaves_nothing(world: TrainingWorld) -> None:
    where = world.configured()["channel"]
    said = texts("lithops", "--channel", where)
    assert "one of 1769 MB began" in said["function"]
    assert left(where) == []


def test_what_functions_could_not_reach_or_have_no_place_for_is_refused(world: TrainingWorld) -> None:
    with pytest.raises(JobError, match="channel 'folder' has no address"):
        train(JOB, configure(JOB, platform="lithops", workers=2), cloud=world.settings)
    with pytest.raises(PlanInfeasible, match="12 functions may run at once"):
        world.go(workers=12)
    c = configure(JOB, **world.configured())
    with pytest.raises(JobError, match="functions of aws_lambda cannot reach it"):
        train(JOB, c, cloud=LithopsSettings(backend="aws_lambda"))


def test_a_profile_is_measured_there(world: TrainingWorld) -> None:
    profile = measured(world, (768,))
    assert profile.fit.platform.warm_starts_s == (), "each call is a process"
