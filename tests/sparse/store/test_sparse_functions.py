"""Shards as functions of this machine: hand-overs at their time limit, and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from sparse_stores import on_loop

from ephemeron.communication.channels.memory import MemoryChannel
from ephemeron.communication.channels.object_store import ObjectsChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import InvocationRefused, JobError
from ephemeron.events import Ended, Event
from ephemeron.functions import simulation
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform
from ephemeron.runs.function_set import MOST_REFUSALS
from ephemeron.sparse.store import SparseStore, Sum
from ephemeron.sparse.store.functions import ShardFunctions, SparseShardRequest, token_of
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.places import Directory, framed
from ephemeron.sparse.store.shard import ShardOptions

ROWS = 3_000
ENV = {"EPHEMERON_PRELOAD": "ephemeron.sparse.store.functions"}


@asynccontextmanager
async def functions(folder: Path, journal: JournalOptions, *, lifetime_s: float, shards: int = 1) -> AsyncIterator[ShardFunctions]:
    platform = await LocalPlatform.start(folder / "run", limits=Limits(), env=ENV)
    address = (folder / "objects").as_uri()
    request = SparseShardRequest(options=ShardOptions(shards=shards, journal=journal), start_s=4.0, hand_over_s=4.0)
    try:
        started = ShardFunctions(
            platform,
            ObjectsChannel.open(address),
            run="a-store",
            key=SigningKey.new(),
            address=address,
            request=request,
            memory_mb=512,
            lifetime_s=lifetime_s,
        )
        await started.start()
        yield started
        await started.close()
    finally:
        await platform.shutdown()


async def push_for(store: SparseStore, total: np.ndarray, done: asyncio.Event) -> None:
    rng = np.random.default_rng(0)
    while not done.is_set():
        rows = rng.choice(ROWS, 30, replace=False)
        total[rows] += 1
        await store.push("w", rows, np.ones(30))
        np.testing.assert_array_equal((await store.multi_get("w", rows)).ravel(), total[rows])
        await asyncio.sleep(0.02)


@pytest.mark.slow
@on_loop
async def test_shards_hand_over_at_their_time_limit_and_lose_nothing_with_snapshots_alone(tmp_path: Path) -> None:
    async with functions(tmp_path, JournalOptions(snapshot_s=3600), lifetime_s=16, shards=2) as started:
        async with await started.connect() as store:
            await store.create("w", ROWS, optimizer=Sum())
            total, done = np.zeros(ROWS), asyncio.Event()
            pushing = asyncio.create_task(push_for(store, total, done))

            async def handed_over() -> bool:
                return started.hand_overs >= 4 or pushing.done()

            await until(handed_over)
            done.set()
            await pushing
            assert [s.attempt for s in await store.status()] >= [3, 3]
        await started.stop()
        assert started.replacements == 0


@pytest.mark.slow
@on_loop
async def test_a_shard_that_is_killed_is_replaced_and_loses_nothing_with_the_log(tmp_path: Path) -> None:
    journal = JournalOptions(snapshot_s=3600, log=True, log_interval_s=0.01)
    async with functions(tmp_path, journal, lifetime_s=120) as started:
        async with await started.connect() as store:
            await store.create("w", ROWS, optimizer=Sum())
            total, done = np.zeros(ROWS), asyncio.Event()
            pushing = asyncio.create_task(push_for(store, total, done))
            directory = Directory(framed(ObjectsChannel.open((tmp_path / "objects").as_uri()), owner="test"), "a-store/store")
            for deaths in (1, 2):

                async def replaced(deaths: int = deaths) -> bool:
                    return (await store.status())[0].attempt > deaths or pushing.done()

                await store.flush()
                os.kill(process_at((await directory.locate(0))[1]), signal.SIGKILL)
                await until(replaced)
            done.set()
            await pushing
            assert started.replacements == 2
        await started.stop()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await condition():
            return
        await asyncio.sleep(0.05)


def process_at(port: int) -> int:
    """The process that listens there."""
    return next(
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid
    )


class Crowded:
    """A platform whose only function is lost, and which refuses some of the starts that follow."""

    limits = Limits()

    def __init__(self, refused: int) -> None:
        self.attempts: list[int] = []
        self._refused = refused

    async def invoke(self, call: Call) -> None:
        self.attempts.append(call.attempt)
        if 2 <= len(self.attempts) < 2 + self._refused:
            raise InvocationRefused("all functions are taken", binding="concurrency")

    async def events(self, run: str) -> AsyncIterator[Event]:
        yield Ended(t=1.0, rank=0, attempt=0, invocation="a", status="lost")
        await asyncio.Event().wait()

    async def cancel_all(self, run: str) -> None: ...


@pytest.mark.parametrize(("refused", "attempts"), [(3, [0, 1, 1, 1, 1]), (99, [0, *[1] * (MOST_REFUSALS + 1)])])
def test_a_replacement_that_is_refused_is_tried_again_and_given_up_at_last(refused: int, attempts: list[int]) -> None:
    async def go() -> None:
        platform = Crowded(refused)
        started = ShardFunctions(platform, MemoryChannel(), run="a-store", key=SigningKey.new(), address="memory")  # type: ignore[arg-type]
        await started.start()
        await asyncio.sleep(600)
        assert platform.attempts == attempts
        assert started.replacements == 1
        assert started._set.open == (frozenset() if refused > MOST_REFUSALS else {0}), "nothing waits for a shard that was given up"
        await started.close()

    simulation.run(go())


def test_a_store_without_key_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPHEMERON_SPARSE_TOKEN", raising=False)
    with pytest.raises(JobError, match="start it with the key of a run, or set EPHEMERON_SPARSE_TOKEN"):
        token_of("")
    assert token_of("a key") != token_of("another key")
