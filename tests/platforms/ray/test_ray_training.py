"""Training on a Ray cluster of two nodes: the same weights whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="no Ray; pip install 'ephemeron[ray]'")

from ray_world import World, two_nodes

from ephemeron.errors import ChannelUnreachable, JobError, PlanInfeasible
from ephemeron.events import Ended, Event, Invoked, Progress
from ephemeron.job import DataSpec, Job, Simulation, Target, parse_fault
from ephemeron.training import configure, train

CODE = Path(__file__).parents[2] / "training" / "code"
MEMORY_MB = 768
JOB = Job(
    name="ray", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1, code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), simulation=Simulation(),
)  # fmt: skip
HOW = {
    "platform": "ray",
    "workers": 3,
    "aggregators": 2,
    "batch_size": 24,
    "memory_mb": MEMORY_MB,
    "checkpoint_every": 4,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    # Room for all three on either node, so that the one that is left can take what the other one had.
    with two_nodes(cpus=2, memory_mb=4096) as world:
        yield world


@pytest.fixture
def channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return (tmp_path / "objects").as_uri()


def go(
    world: World, channel: str, *, faults: tuple[str, ...] = (), on_event: Callable[[Event], None] = lambda event: None,
    **how: Any,
) -> tuple[Any, list[Any]]:  # fmt: skip
    events: list[Any] = []

    def see(event: Event) -> None:
        events.append(event)
        on_event(event)

    c = configure(JOB, **{**HOW, "channel": channel, **how})
    result = train(JOB, c, faults=[parse_fault(f) for f in faults], on_event=see, cloud=world.settings())
    return result, events


def of(events: list[Any], kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


def test_what_does_not_fit_the_cluster_is_refused_before_anything_runs(world: World, channel: str) -> None:
    with pytest.raises(PlanInfeasible, match="4096 MB and 2 CPUs") as refused:
        go(world, channel, memory_mb=8000)
    assert refused.value.binding == "memory"
    with pytest.raises(PlanInfeasible, match="has room for 8") as refused:
        go(world, channel, workers=9)
    assert refused.value.binding == "concurrency"
    with pytest.raises(JobError, match="channel 'folder' has no address"):
        go(world, "folder")
    with pytest.raises(ChannelUnreachable):
        go(world, "redis://127.0.0.1:9")


def test_a_run_and_the_same_one_of_which_a_node_dies(world: World, channel: str, tmp_path: Path) -> None:
    calm, events = go(world, channel)
    summary = calm.summary
    assert (summary["status"], summary["iterations"], summary["platform"]) == ("finished", 20, "ray")
    assert [e.outcome for e in of(events, Ended)] == ["finished"] * 3
    billed = sum(e.billed_s for e in of(events, Ended))
    assert summary["billed"]["gb_seconds"] == pytest.approx(billed * MEMORY_MB / 1024, rel=1e-6)
    run = json.loads((calm.folder.path / "run.json").read_text())
    assert run["ray"] == dataclasses.asdict(world.settings())
    lost = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 3 and not lost:
            lost.append(world.workers[0])
            world.lose(world.workers[0])

    rough, events = go(world, channel, on_event=watch, faults=("delay:rank=1,factor=100",))
    assert len(lost) == 1
    assert rough.summary["status"] == "finished", rough.causes
    assert rough.summary["weights_sha256"] == summary["weights_sha256"]
    assert 1 <= [e.status for e in of(events, Ended)].count("lost") <= 2
    assert [e.reason for e in of(events, Invoked)].count("replacement") >= 1
