"""How long clients wait for processes that come back one after the other. In virtual time, without processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ephemeron.data.service import Service, client
from ephemeron.data.service.client import MOST_RENEWALS, FlowClient
from ephemeron.data.service.messages import AccessReply, FlowRequest, Nothing, Routes
from ephemeron.errors import CallTimedOut, ConnectionLost, ServiceUnreachable

TIMEOUT_S = 40.0


class Clock:
    """`time` of the client's module."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(client, "time", found)
    return found


class Process:
    """A part of the service, and a connection to it; `starts_s` pass before it answers, then each call takes `takes_s`."""

    def __init__(self, clock: Clock, reply: Any, *, starts_s: float = 0.0, takes_s: float = 0.0) -> None:
        self.clock, self.reply, self.starts_s, self.takes_s = clock, reply, starts_s, takes_s
        self.connected = True

    def connect(self, token: str, *, timeout_s: float = 5.0) -> Process:
        return self

    def close(self) -> None:
        pass


class Call:
    """A method: the process decides."""

    name = "call"

    def call(self, to: Process, request: Any, buffers: Any = (), *, timeout_s: float) -> tuple[Any, list[Any]]:
        to.clock.sleep(min(timeout_s, to.takes_s))
        if to.takes_s > timeout_s:
            raise CallTimedOut(f"no reply within {timeout_s:g} s")
        return to.reply() if callable(to.reply) else to.reply, []


def service_of(tmp_path: Path, coordinator: Process) -> Service:
    service = Service(folder=tmp_path, timeout_s=TIMEOUT_S)

    class Part:
        def ensure(self, settings: object) -> Process:
            coordinator.clock.sleep(coordinator.starts_s)
            coordinator.starts_s = 0.0
            return coordinator

    service._part = Part()  # type: ignore[assignment]
    return service


def test_a_coordinator_that_took_long_to_come_back_has_time_to_start_a_router(tmp_path: Path, clock: Clock) -> None:
    """Both were killed: one comes back after 30 s, and its answer takes the 15 s of the other, though 40 s is the limit of each."""
    coordinator = Process(clock, "found", starts_s=30.0, takes_s=15.0)
    assert service_of(tmp_path, coordinator).call(Call(), FlowRequest(flow="f")) == "found"  # type: ignore[arg-type]
    assert clock.now == 45.0


def test_a_reader_outlives_coordinator_router_and_shard(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ACCESS", Call())
    monkeypatch.setattr(client, "ROUTES", Call())
    shards: list[Process] = []

    def routes() -> Routes:
        clock.sleep(8.0)  # a shard is started
        shards.append(Process(clock, "samples"))
        return Routes(generation=len(shards), edges=(0, 9), shards=(shards[-1],))  # type: ignore[arg-type]

    router = Process(clock, routes)
    coordinator = Process(clock, AccessReply(router=router), starts_s=30.0, takes_s=30.0)  # type: ignore[arg-type]
    flow = FlowClient.__new__(FlowClient)
    flow.name, flow._service = "f", service_of(tmp_path, coordinator)
    flow._after_fork()
    dead = Process(clock, "never")

    def lost(*_: Any, **__: Any) -> Any:
        raise ConnectionLost("killed", may_repeat=True)

    monkeypatch.setattr(dead, "reply", lost)
    flow._routes = Routes(generation=0, edges=(0, 9), shards=(dead,))  # type: ignore[arg-type]
    reply, _ = flow.shard(0, Call(), lambda generation: Nothing())  # type: ignore[arg-type]
    assert reply == "samples"
    assert clock.now > TIMEOUT_S


@pytest.mark.parametrize("takes_s", [0.0, 1e9], ids=["refuses", "is silent"])
def test_what_never_answers_ends(tmp_path: Path, clock: Clock, takes_s: float) -> None:
    """Each connection is another process's, which dies, or says nothing: bounded all the same."""

    def lost() -> Any:
        raise ConnectionLost("killed", may_repeat=True)

    coordinator = Process(clock, lost, takes_s=takes_s)
    connect: Callable[..., Process] = lambda token, timeout_s: Process(clock, lost, takes_s=takes_s)  # noqa: E731
    coordinator.connect = connect  # type: ignore[method-assign]
    with pytest.raises(ServiceUnreachable, match="does not answer within 40 s"):
        service_of(tmp_path, coordinator).call(Call(), Nothing())  # type: ignore[arg-type]
    assert TIMEOUT_S <= clock.now <= (MOST_RENEWALS + 1) * TIMEOUT_S + 10
