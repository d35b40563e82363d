"""Reports of a function survive faults of the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ephemeron.communication.channels.object_store import ObjectsChannel
from ephemeron.errors import ChannelRefused
from ephemeron.functions.async_invoke import reporter as module
from ephemeron.functions.async_invoke.records import (
    BegunRecord,
    HandlerOutcome,
    InvokeRequest,
    OutcomeRecord,
    RecordKeys,
    SentRecord,
    decode,
    record_of,
)
from ephemeron.functions.async_invoke.reporter import DeliverySource, InvocationReporter
from ephemeron.functions.base import Call
from ephemeron.testing.flaky import FlakyChannel

NAMES = RecordKeys("run.calls")


def reporter(folder: Path, failures: dict[str, list[Any]]) -> InvocationReporter:
    """Of a call, whose requests fail as the lists say, by operation."""
    call = Call(run="run", rank=0, attempt=0, memory_mb=128, lifetime_s=60.0, channel="folder")
    envelope = InvokeRequest(
        id="0.0.ab", run="run", rank=0, attempt=0, calls="run.calls", channel="folder", every_s=0.1, lifetime_s=60.0, call=call
    )

    def decide(operation: str, key: str) -> Any:
        left = failures.get(operation)
        return left.pop(0) if left else None

    made = InvocationReporter(
        envelope,
        lambda: FlakyChannel(ObjectsChannel.folder(folder), decide),
        DeliverySource(request="q"),
        lifetime_s=60.0,
        leave=lambda code: None,
    )
    made.start()
    return made


def records(folder: Path) -> list[Any]:
    async def main() -> list[Any]:
        channel = ObjectsChannel.folder(folder)
        found = []
        for key in await channel.list("run.calls/0.0.ab/"):
            data = await channel.fetch(key)
            assert data is not None
            found += [record_of(line) for line in decode(data)]
        return found

    return asyncio.run(main())


def test_what_is_announced_is_there_once_whatever_the_store_did_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    failures = {"create": ["throttled", "lost-answer", "unavailable"], "fetch": ["unavailable"], "put": ["unavailable", "throttled"]}
    made = reporter(tmp_path, failures)
    assert made.delivery == 0  # its own claim, not somebody else's
    asyncio.run(made.announce(SentRecord(id="next", request="q")))
    made.close(HandlerOutcome(status="ok"))
    assert not any(failures.values())
    assert [type(r) for r in records(tmp_path)] == [BegunRecord, SentRecord, OutcomeRecord]


def test_what_is_refused_is_told_to_whoever_announces(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    made = reporter(tmp_path, {"put": ["refused"]})
    with pytest.raises(ChannelRefused):
        asyncio.run(made.announce(SentRecord(id="next", request="q")))
    made.close(HandlerOutcome(status="ok"))
