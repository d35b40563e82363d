"""Training on OpenFaaS as the local gateway has it: the same weights whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openfaas_world import CALLBACK, EVERY_S, PASSWORD, deployed

from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, FaultFired, Invoked, Progress
from ephemeron.job import DataSpec, Job, Simulation, Target, parse_fault
from ephemeron.platforms.openfaas.settings import PASSWORD_ENV, OpenFaasSettings
from ephemeron.testing.openfaas_gateway import OpenFaasGateway
from ephemeron.training import configure, resume, train

CODE = Path(__file__).parents[2] / "training" / "code"
MEMORY_MB = 768
JOB = Job(
    name="faas", model=Target(target="tiny:mlp", options={"dropout": 0.2}), data=DataSpec(), epochs=1, code=(CODE,),
    optimizer=Target(target="SGD", options={"lr": 0.1, "momentum": 0.9}), simulation=Simulation(),
)  # fmt: skip
HOW = {
    "platform": "openfaas",
    "workers": 3,
    "aggregators": 2,
    "batch_size": 24,
    "memory_mb": MEMORY_MB,
    "checkpoint_every": 4,
}


class World:
    """One gateway, one function, the cache and the object store that it reaches."""

    def __init__(self, gateway: OpenFaasGateway, settings: OpenFaasSettings, channels: dict[str, str]) -> None:
        self.gateway, self.settings, self.channels = gateway, settings, channels

    def go(
        self, *, faults: tuple[str, ...] = (), on_event: Callable[[Event], None] = lambda event: None,
        channel: str = "cache", job: Job = JOB, **how: Any,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        events: list[Any] = []

        def see(event: Event) -> None:
            events.append(event)
            on_event(event)

        c = configure(job, **{**HOW, "channel": self.channels[channel], **how})
        result = train(job, c, faults=[parse_fault(f) for f in faults], on_event=see, cloud=self.settings)
        return result, events

    def kill(self, rank: int) -> bool:
        """SIGKILL for the whole replica that runs this rank now. Whether there was one."""
        for replica in self.gateway.replicas():
            if replica.body and json.loads(replica.body).get("rank") == rank:
                os.kill(replica.pid, signal.SIGKILL)
                return True
        return False


@pytest.fixture(scope="module")
def world(valkey_server: Any, s3_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PASSWORD_ENV, PASSWORD)
        for name, value in s3_server.env.items():
            patch.setenv(name, value)
        with OpenFaasGateway(password=PASSWORD, environment=s3_server.env) as gateway:
            settings = deployed(
                gateway, tmp_path_factory.mktemp("image"), entry="ephemeron.worker.loop:run_worker", memory_mb=MEMORY_MB,
                lifetime_s=120, replicas=5,
                preload="torch,torch._dynamo,ephemeron.worker.loop,ephemeron.worker.torch_trainer",
            )  # fmt: skip
            assert (settings.every_s, settings.callback) == (EVERY_S, CALLBACK)
            yield World(gateway, settings, {"cache": valkey_server.address, "objects": s3_server.address})


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


def of(events: list[Any], kind: type) -> list[Any]:
    return [e for e in events if isinstance(e, kind)]


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPHEMERON_HOME", str(tmp_path_factory.mktemp("home")))
        return world.go()


def same(result: Any, undisturbed: tuple[Any, list[Any]]) -> None:
    assert result.summary["status"] == "finished", result.causes
    assert result.summary["weights_sha256"] == undisturbed[0].summary["weights_sha256"]


def test_a_run(undisturbed: tuple[Any, list[Any]], world: World) -> None:
    result, events = undisturbed
    summary = result.summary
    assert (summary["status"], summary["iterations"], summary["platform"]) == ("finished", 20, "openfaas")
    assert len(of(events, Progress)) == 60
    assert len(of(events, Invoked)) == summary["invocations"] == 3
    assert [e.outcome for e in of(events, Ended)] == ["finished"] * 3
    billed = sum(e.billed_s for e in of(events, Ended))
    assert summary["billed"]["gb_seconds"] == pytest.approx(billed * MEMORY_MB / 1024, rel=1e-6)
    calls = [json.loads(line) for line in (result.folder.path / "calls.jsonl").read_text().splitlines()]
    assert {r["billed_by"] for r in calls if r["record"] == "final"} == {"supervisor"}
    written = "".join(path.read_text() for path in result.folder.path.glob("*.json*"))
    assert PASSWORD not in written


def test_through_an_object_store_and_with_every_call_delivered_twice(world: World, undisturbed: Any) -> None:
    world.gateway.deliver_twice(3)
    result, events = world.go(channel="objects")
    same(result, undisturbed)
    twice = {e.invocation for e in of(events, Invoked) if e.reason == "duplicate"}
    assert len(twice) <= 3, "one that comes when everything is over is not heard of"
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == len(twice)
    assert [e.outcome for e in of(events, Ended)].count("finished") == 3

    async def left() -> list[str]:
        from ephemeron.channels import open_channel

        async with open_channel(world.channels["objects"]) as channel:
            return await channel.list(result.summary["run_id"])

    run = result.summary["run_id"]
    assert asyncio.run(left()) == [f"{run}.calls/cancel", f"{run}/result", f"{run}/spec"]


@pytest.mark.parametrize(("rank", "iteration"), [(0, 2), (2, 11)])
def test_a_whole_replica_is_killed(world: World, undisturbed: Any, rank: int, iteration: int) -> None:
    killed = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == rank and event.iteration >= iteration and not killed:
            killed.append(world.kill(rank))

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=100",))
    same(result, undisturbed)
    assert killed == [True]
    lost = [e for e in of(events, Ended) if e.status == "lost"]
    assert [e.rank for e in lost] == [rank]
    assert "502" in lost[0].error, "the call-back told of it"
    assert [e.reason for e in of(events, Invoked)].count("replacement") == 1


def test_deaths_within_phases(world: World, undisturbed: Any) -> None:
    result, events = world.go(
        faults=("kill:rank=0,iteration=7,phase=aggregate", "kill:rank=2,iteration=12,phase=upload", "duplicate:rank=1")
    )
    same(result, undisturbed)
    assert len(of(events, FaultFired)) == 2
    assert [e.status for e in of(events, Ended)].count("lost") == 2
    assert [e.outcome for e in of(events, Ended)].count("duplicate") == 1


def test_past_short_lifetimes_functions_invoke_their_successors(world: World, undisturbed: Any) -> None:
    result, events = world.go(lifetime_s=8.0, faults=("delay:rank=1,factor=120",))
    same(result, undisturbed)
    assert [e.reason for e in of(events, Invoked)].count("relay") >= 2


def test_a_run_is_stopped_and_resumed(world: World, undisturbed: Any) -> None:
    import threading

    from ephemeron.training import api

    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and api.stop("last"), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped, _ = world.go(on_event=watch, faults=("delay:rank=1,factor=100",))
    stopper.join()
    assert stopped.summary["status"] == "stopped"
    with pytest.raises(UserError, match="is not running"):
        api.stop("last")
    events: list[Any] = []
    result = resume("last", on_event=events.append)
    same(result, undisturbed)
    assert [e.reason for e in of(events, Invoked)].count("resume") == 3
