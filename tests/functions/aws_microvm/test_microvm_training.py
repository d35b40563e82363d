"""Training on AWS Lambda MicroVMs as the local service has them: the same weights whatever happens on the way."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", "1.44", reason="no AWS client that knows MicroVMs; pip install 'ephemeron[aws]'")

from microvm_world import KEYS, artifact, deployed

from checking import left, texts
from ephemeron.errors import UserError
from ephemeron.events import Ended, Event, Invoked, Note, Progress, Woken
from ephemeron.runs import verbs
from ephemeron.runs.verbs import resume
from ephemeron.testing import TrainingMatrix, TrainingWorld
from ephemeron.testing.microvm_service import MicrovmService
from ephemeron.testing.training_world import of
from ephemeron.training.driver.result import open_run
from running import until
from tiny_job import JOB

pytestmark = pytest.mark.slow

MEMORY_MB = 1024


@dataclass(kw_only=True)
class World(TrainingWorld):
    """One service, one image, the cache that it reaches."""

    service: MicrovmService

    def lose(self, rank: int) -> bool:
        """A host fails, and with it the MicroVM that runs this rank now. Whether there was one."""
        for microvm in self.service.microvms():
            if microvm.state == "RUNNING" and json.loads(microvm.payload)["request"]["rank"] == rank:
                self.service.lose(microvm.id)
                return True
        return False


@pytest.fixture(scope="module")
def world(valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        with MicrovmService(fetch=artifact, ahead=3) as service:
            settings = deployed(
                service,
                memory_mb=MEMORY_MB,
                preload="torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer",
            )
            yield World(
                platform="aws-microvm",
                job=JOB,
                memory_mb=MEMORY_MB,
                settings=settings,
                service=service,
                channels={"cache": valkey_server.address},
                folder=tmp_path_factory.mktemp("runs"),
            )


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))


class TestAwsMicrovmTraining(TrainingMatrix):
    """On Valkey."""


def test_what_a_run_leaves(world: World) -> None:
    result, events = world.undisturbed
    until(lambda: not world.service.microvms())  # every MicroVM ends itself
    calls = [json.loads(line) for line in (result.folder.path / "calls.jsonl").read_text().splitlines()]
    assert {r["billed_by"] for r in calls if r["record"] == "final"} == {"supervisor"}
    assert all(e.billed_s == int(e.billed_s) >= 1 for e in of(events, Ended)), "whole seconds"
    text = (result.folder.path / "run.json").read_text() + (result.folder.path / "calls.jsonl").read_text()
    assert "SECRET" not in text.upper()
    key = (result.folder.path / "signing.key").read_text().strip()
    assert key
    assert key not in text


def test_a_host_fails(world: World) -> None:
    lost: list[bool] = []

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.rank == 0 and event.iteration >= 2 and not lost:
            lost.append(world.lose(0))

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    world.check_same(result)
    assert lost == [True]
    (end,) = [e for e in of(events, Ended) if e.status == "lost"]
    assert end.rank == 0
    assert "its MicroVM ended: The application exited" in end.error
    assert end.billed_s > 0
    assert [e.reason for e in of(events, Invoked)].count("replacement") == 1


def test_a_run_is_stopped_and_resumed(world: World) -> None:
    asked = threading.Event()
    stopper = threading.Thread(target=lambda: asked.wait() and verbs.stop("last"), daemon=True)
    stopper.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    stopped, _ = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    stopper.join()
    assert stopped.summary.status == "stopped"
    with pytest.raises(UserError, match="is not running"):
        verbs.stop("last")
    events: list[Any] = []
    result = resume("last", on_event=events.append)
    world.check_same(result)
    assert [e.reason for e in of(events, Invoked)].count("resume") == 3
    assert not [e.text for e in of(events, Note) if e.level == "error"]


SUSPENDED_S = 24.0
"""Longer than the timeout after which a silent peer is replaced."""


def test_a_run_is_suspended_and_goes_on_where_it_was(world: World) -> None:
    asked, states, resumed = threading.Event(), [], []

    def suspend_and_resume() -> None:
        asked.wait()
        _, functions = verbs.suspend("last")
        states.append((functions, [microvm.state for microvm in world.service.microvms()]))
        threading.Event().wait(SUSPENDED_S)
        resumed.append(resume("last"))

    other = threading.Thread(target=suspend_and_resume, daemon=True)
    other.start()

    def watch(event: Event) -> None:
        if isinstance(event, Progress) and event.iteration >= 2:
            asked.set()

    result, events = world.go(on_event=watch, faults=("delay:rank=1,factor=1,seconds=0.2",))
    other.join()
    world.check_same(result)
    assert states == [(3, ["SUSPENDED"] * 3)]
    assert resumed[0].summary.weights_sha256 == result.summary.weights_sha256
    assert [e.reason for e in of(events, Invoked)] == ["start"] * 3, "no silent peer was replaced"
    (woken,) = of(events, Woken)
    assert (woken.functions, woken.gb) == (3, 3.0)
    assert woken.seconds >= SUSPENDED_S
    prices = open_run(result.folder.run_id)[2].prices
    assert prices.suspended_usd(3.0, woken.seconds, resumed=True) > 3 * 0.0038
    assert result.summary.cost_usd > prices.suspended_usd(3.0, woken.seconds, resumed=True)
    computed = sum(e.billed_s for e in of(events, Ended))
    assert computed < 3 * (result.summary.seconds - SUSPENDED_S) + 3 * 3, "what is suspended is not billed"


def test_the_check_finds_all_well_and_leaves_nothing(world: World) -> None:
    channel = str(world.channels["cache"])
    asked = ("aws-microvm", "--aws-microvm-endpoint", world.service.url, "--aws-microvm-region", "us-east-1", "--channel", channel)
    said = texts(*asked, "--no-call")
    assert "function" not in said
    assert "400 GB of MicroVMs, 400 of 1024 MB at once" in said["platform"]
    assert "1 function of 1024 MB can run at once, for 28740 s each" in said["platform"]
    said = texts(*asked)
    assert "one of 1024 MB began" in said["function"]
    assert "at list prices" in said["function"]
    assert not [key for key in left(channel) if key.startswith("check")]
    until(lambda: not world.service.microvms())


@pytest.mark.cold_start  # the one whose functions make their imports themselves
def test_functions_connect_through_their_endpoints(world: World) -> None:
    pytest.importorskip("websockets", "15", reason="no WebSocket; pip install 'ephemeron[aws-microvm]'")
    with MicrovmService(fetch=artifact) as service:
        opened = deployed(
            service,
            memory_mb=MEMORY_MB,
            preload="torch,ephemeron.training.worker.loop,ephemeron.training.worker.trainers.torch_trainer",
            more_variables={"EPHEMERON_ENDPOINT": "1", "EPHEMERON_DIRECT_TRANSPORTS": "websocket"},
        )
        through = dataclasses.replace(world, settings=opened, service=service)
        killed = ("kill:rank=1,iteration=5,phase=upload",)  # or, on a slow machine, replaced while it starts
        result, _ = through.go(channel=f"direct+{world.channels['cache']}", faults=killed, aggregators=0)
        reached = len(service.upgraded)
    world.check_same(result)
    assert result.summary.traffic.direct_bytes_sent > 0
    assert reached >= 5, "three pairs, and the two of the replacement"
