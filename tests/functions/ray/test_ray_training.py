"""Training on a Ray cluster of two nodes: the same weights whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray; pip install 'ephemeron[ray]'")

from ray_world import World

from checking import left, refusal, texts
from cloud_profiles import measured
from ephemeron.errors import ChannelUnreachable, PlanInfeasible
from ephemeron.events import Ended, Event, Invoked, Progress
from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.testing.training_world import of
from tiny_job import JOB, SHORT

pytestmark = pytest.mark.slow

MEMORY_MB = 768


@pytest.fixture(scope="module")
def shared_world(shared_cluster: World, tmp_path_factory: pytest.TempPathFactory) -> TrainingWorld:
    folder = tmp_path_factory.mktemp("ray")
    return TrainingWorld(
        platform="ray",
        job=JOB,
        memory_mb=MEMORY_MB,
        settings=shared_cluster.settings(),
        folder=folder,
        channels={"folder": (folder / "objects").as_uri()},
        slow_relays=True,
    )


@pytest.fixture
def world(shared_world: TrainingWorld, cluster: World) -> TrainingWorld:
    """On a cluster with both nodes."""
    return shared_world


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class TestRayTraining(TrainingMatrix):
    """Through a folder that both nodes have."""


def test_what_does_not_fit_the_cluster_is_refused_before_anything_runs(world: TrainingWorld) -> None:
    with pytest.raises(PlanInfeasible, match="4096 MB and 2 CPUs") as refused:
        world.go(memory_mb=8000)
    assert refused.value.binding == "memory"
    with pytest.raises(PlanInfeasible, match="has room for 8") as refused:
        world.go(workers=9)
    assert refused.value.binding == "concurrency"
    with pytest.raises(ChannelUnreachable):
        world.go(channel="redis://127.0.0.1:9")


def test_functions_reserve_whole_gpus_and_parts_of_them(cluster: World, world: TrainingWorld) -> None:
    half = dataclasses.replace(world, settings=dataclasses.replace(cluster.settings(), gpus=0.5))
    with pytest.raises(PlanInfeasible, match=r"0\.5 GPUs are wanted, the Ray cluster has room for 4"):
        half.go(workers=5)
    result, _ = half.go(job=SHORT, workers=1, aggregators=1, batch_size=720)
    assert result.summary.status == "finished", result.causes
    two = dataclasses.replace(world, settings=dataclasses.replace(cluster.settings(), gpus=2))
    with pytest.raises(PlanInfeasible, match=r"2 GPUs; .* and 1 GPUs are on one node at most"):
        two.go()


def test_the_run_s_record_says_where_and_nothing_secret(world: TrainingWorld) -> None:
    run = json.loads((world.undisturbed[0].folder.path / "run.json").read_text())
    assert run["settings"] == dataclasses.asdict(world.settings)


def test_the_check_asks_every_node_and_has_a_function_called(cluster: World, world: TrainingWorld) -> None:
    where = world.configured()["channel"]
    common = ("ray", "--ray-address", cluster.cluster.address)
    said = texts(*common, "--channel", where)
    assert said["platform"].count("this release, and sees the channel") == 2
    assert "one of 1769 MB began" in said["function"]
    assert left(where) == []
    assert "nodes do not get credentials" in refusal(*common, "--channel", "redis://:hush@127.0.0.1:9/0")
    assert "use fewer workers or less memory" in refusal(*common, "--channel", where, "--workers", "64", "--no-call")


def test_the_check_names_a_node_that_sees_another_folder(cluster: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each node has a disk of its own at the same path: what the client puts is not what the node finds."""

    async def elsewhere(channel: str, key: str, data: bytes) -> None:
        assert (channel, bool(data)) == (tmp_path.as_uri(), True)

    monkeypatch.setattr("ephemeron.functions.ray.preflight._put", elsewhere)
    said = refusal("ray", "--ray-address", cluster.cluster.address, "--channel", tmp_path.as_uri(), "--no-call")
    assert "does not see in channel" in said
    assert "use s3://bucket/prefix, redis://HOST:PORT, or a folder that all nodes share" in said


def test_a_node_dies(cluster: World, world: TrainingWorld) -> None:
    lost = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 3 and not lost:
            lost.append(cluster.workers[0])
            cluster.lose(cluster.workers[0])

    rough, events = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    assert len(lost) == 1
    world.check_same(rough)
    assert 1 <= [e.status for e in of(events, Ended)].count("lost") <= 2
    assert [e.reason for e in of(events, Invoked)].count("replacement") >= 1


def test_a_profile_is_measured_there(world: TrainingWorld) -> None:
    profile = measured(world, (MEMORY_MB,))
    assert profile.fit.platform.warm_starts_s == (), "each call is a process"
