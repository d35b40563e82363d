"""Whole runs whose functions are connected through a rendezvous service alone: punched, and relayed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ephemeron.communication.direct.rendezvous_service import RendezvousService, ServiceStatistics
from ephemeron.communication.direct.transport import kernel_transports
from ephemeron.errors import JobError
from ephemeron.events import FaultFired
from ephemeron.functions import direct_transports
from ephemeron.testing import TrainingWorld
from ephemeron.testing.training_world import of
from tiny_job import JOB

TOKEN = "the service's token"


class Service:
    """A service in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._service = RendezvousService(TOKEN)
        host, port = asyncio.run_coroutine_threadsafe(self._service.listen(), self._loop).result(30)
        self.address = f"{host}:{port}"

    def statistics(self) -> ServiceStatistics:
        return self._service.statistics()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._service.close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Service]:
    serving = Service()
    monkeypatch.setenv("EPHEMERON_RENDEZVOUS", serving.address)
    monkeypatch.setenv("EPHEMERON_RENDEZVOUS_TOKEN", TOKEN)
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    yield serving
    serving.close()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["punched", "relay"])
def test_weights_are_those_of_a_run_over_the_store(
    transport: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPHEMERON_DIRECT_TRANSPORTS", transport)
    world = TrainingWorld(platform="local", job=JOB, memory_mb=704, folder=tmp_path)
    result, events = world.go(channel="direct", faults=("kill:rank=1,iteration=5,phase=upload",), aggregators=0)
    world.check_same(result)
    assert len(of(events, FaultFired)) == 1
    sent, done = result.summary.traffic.direct_bytes_sent, service.statistics()
    assert sent > 0
    assert done.meetings >= 3, "three pairs, and those of the replacement"
    assert (done.relayed_bytes > sent / 2) == (transport == "relay")
    assert done.runs == 0, "no member is left"
    if transport == "punched":
        assert done.relayed_bytes == 0


def test_transports_are_chosen_by_name(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> list[str]:
        return [transport.name for transport in direct_transports.own_transports()]

    kernel = [transport.name for transport in kernel_transports()]
    assert names() == [*kernel, "punched", "relay"]
    monkeypatch.setenv("EPHEMERON_DIRECT_TRANSPORTS", "relay, tcp")
    assert names() == ["relay", "tcp"]
    monkeypatch.delenv("EPHEMERON_RENDEZVOUS")
    assert names() == ["tcp"]
    monkeypatch.setenv("EPHEMERON_DIRECT_TRANSPORTS", "relais")
    with pytest.raises(JobError, match="relay"):
        names()
