"""The cache when it is dead, locked, full or impostor."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.cache import CacheChannel
from ephemeron.errors import ChannelUnreachable, JobError, MissingExtra

if TYPE_CHECKING:
    from servers import ServerProcess

Start = Callable[..., "ServerProcess"]


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    asyncio.run(main())


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def blocked_clients(channel: CacheChannel, n: int, readers: Sequence[asyncio.Task[object]] = ()) -> None:
    """Until the server itself says that so many readers wait. A reader that has failed raises its error."""
    while int((await channel._redis.info("clients"))["blocked_clients"]) < n:
        for reader in readers:
            if reader.done():
                reader.result()
        await asyncio.sleep(0.005)


def test_a_reader_waits_inside_the_server(valkey_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ephemeron.communication.channels.cache._BLOCK_S", 60.0)

    async def scenario() -> None:
        async with CacheChannel(valkey_server.address) as channel:
            assert isinstance(channel, CacheChannel)
            before = (await channel._redis.info("commandstats")).get("cmdstat_xread", {"calls": 0})["calls"]
            readers = [asyncio.create_task(channel.get("run/wait", deadline=later(60))) for _ in range(50)]
            await blocked_clients(channel, 50, readers)
            await channel.put("run/wait", [b"x" * 100_000])
            received = await asyncio.gather(*readers)
            assert {len(r.data) for r in received} == {100_000}
            assert all(r.waited_s > 0 for r in received)
            after = (await channel._redis.info("commandstats"))["cmdstat_xread"]["calls"]
            assert after - before == 100  # one attempt and one wait each, no polls
            assert (await channel.get("run/wait", deadline=later(60))).waited_s == 0
            await channel.delete(["run/wait"])

    run(scenario)


def test_a_server_that_dies_under_a_waiting_reader(own_valkey: Start) -> None:
    server = own_valkey()

    async def scenario() -> None:
        async with CacheChannel(server.address) as channel:
            assert isinstance(channel, CacheChannel)
            reading = asyncio.create_task(channel.get("run/never", deadline=later(600)))
            await blocked_clients(channel, 1)
            server.kill()
            with pytest.raises(ChannelUnreachable, match="check that the server runs"):
                await reading
            for call in (channel.put("a", [b"x"]), channel.fetch("a"), channel.delete(["a"]), channel.list("a")):
                with pytest.raises(ChannelUnreachable, match=server.address):
                    await call

    run(scenario)


def test_a_server_that_falls_silent_is_given_up(own_valkey: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_valkey()

    async def scenario() -> None:
        async with CacheChannel(server.address) as channel:
            await channel.put("a", [b"x"])
            monkeypatch.setattr("ephemeron.communication.channels.cache._ANSWER_S", 0.1)
            server.process.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelUnreachable, match="no answer in time"):
                await channel.fetch("a")
            with pytest.raises(ChannelUnreachable, match="no answer in time"):
                await channel.put("a", [bytes(20_000_000)])
            server.process.send_signal(signal.SIGCONT)
            monkeypatch.undo()
            assert len(await channel.fetch("a") or b"") in (1, 20_000_000)

    run(scenario)


def test_the_password_comes_from_url_or_environment_and_is_never_shown(own_valkey: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = own_valkey("--requirepass", "s3cr3t/word")

    async def scenario() -> None:
        async with CacheChannel(server.address) as stranger:
            with pytest.raises(ChannelUnreachable, match="set EPHEMERON_CHANNEL_PASSWORD"):
                await stranger.put("a", [b"x"])
        full = server.address.replace("redis://", "redis://:s3cr3t%2Fword@")
        async with CacheChannel(full) as friend:
            await friend.put("a", [b"x"])
            assert "s3cr3t" not in repr(friend)
        monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "s3cr3t/word")
        async with CacheChannel(server.address) as friend:
            assert await friend.fetch("a") == b"x"
        monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "wr0ng")
        async with CacheChannel(server.address) as stranger:
            with pytest.raises(ChannelUnreachable) as caught:
                await stranger.fetch("a")
            assert "wr0ng" not in str(caught.value)

    run(scenario)


@pytest.mark.parametrize("create", [False, True])
def test_a_full_server_is_named_and_keeps_what_was_there(own_valkey: Start, create: bool) -> None:
    server = own_valkey("--maxmemory", "5mb")

    async def scenario() -> None:
        async with CacheChannel(server.address) as channel:

            async def fill(megabytes: int) -> None:
                for i in range(megabytes):
                    await channel.put(f"run/{i}", [bytes([i]) * 1_000_000], create=create)

            with pytest.raises(ChannelUnreachable, match="maxmemory"):
                await fill(20)
            last = len(await channel.list("run/")) - 1
            with pytest.raises(ChannelUnreachable, match="maxmemory"):
                await channel.put(f"run/{last}", [bytes(2_000_000)])
            assert len(await channel.fetch(f"run/{last}") or b"") == 1_000_000

    run(scenario)


def test_databases_of_one_server_are_apart(valkey_server: ServerProcess) -> None:
    async def scenario() -> None:
        async with CacheChannel(valkey_server.address) as zero, CacheChannel(valkey_server.address[:-1] + "3") as three:
            await zero.put("run/db", [b"0"])
            assert await three.fetch("run/db") is None
            await zero.delete(["run/db"])

    run(scenario)


def test_a_value_of_somebody_else_is_an_error_not_a_crash(valkey_server: ServerProcess) -> None:
    async def scenario() -> None:
        async with CacheChannel(valkey_server.address) as channel:
            assert isinstance(channel, CacheChannel)
            await channel._redis.set("theirs", b"x")
            with pytest.raises(ChannelUnreachable, match="WRONGTYPE"):
                await channel.fetch("theirs")
            await channel.delete(["theirs"])

    run(scenario)


def test_wrong_urls_and_a_missing_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="redis://host:port/db"):
        CacheChannel("redis://")
    with pytest.raises(JobError, match="no database number"):
        CacheChannel("redis://localhost:1/abc")
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(MissingExtra, match="cache"):
        open_channel("redis://localhost:1/0")
