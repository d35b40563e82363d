"""Real servers behind a proxy that resets, cuts short, throttles and pauses: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ephemeron.communication.channels import cache, open_channel
from ephemeron.communication.channels.retrying import RetryBackoff, RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.errors import ChannelRefused, ChannelUnreachable, KeyExists
from ephemeron.testing.faulty_proxy import HTTP_TROUBLES, TCP_TROUBLES, FaultyProxy, Trouble, scripted, seeded
from servers import ServerProcess, start_valkey, stop

QUICK = RetryPolicy(throttled=RetryBackoff(first_s=0.05, most_s=1.0))


def port_of(server: ServerProcess) -> int:
    url = server.env.get("AWS_ENDPOINT_URL", server.address)
    port = urlsplit(url).port
    assert port is not None
    return port


@pytest.fixture
def s3_proxy(s3: str, s3_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(port_of(s3_server), http=True) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        yield proxy


@pytest.fixture
def valkey_proxy(valkey_server: ServerProcess) -> Iterator[FaultyProxy]:
    with FaultyProxy(port_of(valkey_server), http=False) as proxy:
        yield proxy


@pytest.fixture(params=["s3", "valkey"])
def store(request: pytest.FixtureRequest) -> tuple[FaultyProxy, Callable[..., RunChannel], tuple[Trouble, ...]]:
    proxy = request.getfixturevalue(f"{request.param}_proxy")
    address = "s3://ephemeron-tests/faulty" if request.param == "s3" else f"redis://127.0.0.1:{proxy.port}/0"

    def opened(owner: str = "me", **how: object) -> RunChannel:
        return RunChannel(open_channel(address), owner=owner, retry=QUICK, **how)  # type: ignore[arg-type]

    return proxy, opened, HTTP_TROUBLES if request.param == "s3" else TCP_TROUBLES


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_every_trouble_of_every_operation_is_outlived(store):
    proxy, opened, troubles = store

    async def main() -> None:
        async with opened() as channel:
            big = os.urandom(300_000)
            for trouble in troubles:
                for n, work in enumerate(
                    (
                        lambda key: channel.put(key, [big]),
                        lambda key: channel.put(key + "c", [b"mine"], create=True),
                        channel.fetch,
                        lambda key: channel.get(key, deadline=later(30)),
                        lambda key: channel.list(key),
                        lambda key: channel.delete([key, key + "c"]),
                    )
                ):
                    proxy.decide = scripted([trouble])
                    done = await work(f"run/x/{trouble}")
                    if n in (2, 3):
                        assert bytes(done if n == 2 else done.data) == big
                    assert n != 4 or len(done) == 2
            assert await channel.list("run/x/") == []
        assert proxy.injected.keys() == set(troubles)
        assert channel.retrying.repeated > len(troubles)

    asyncio.run(main())


def test_one_of_many_creates_whatever_the_network_does(store):
    proxy, opened, troubles = store
    proxy.decide = seeded(3, rate=0.2, troubles=tuple(t for t in troubles if t != "delay"))

    async def creates(rank: int, key: str) -> bool:
        async with opened(f"rank {rank}") as channel:
            try:
                await channel.put(key, [b"the same words"], create=True)
            except KeyExists:
                return False
            return True

    async def main() -> None:
        for n in range(2):
            assert sum(await asyncio.gather(*(creates(rank, f"run/claim/{n}") for rank in range(4)))) == 1
        proxy.decide = lambda: None
        async with opened() as channel:
            await channel.delete([f"run/claim/{n}" for n in range(2)])

    asyncio.run(main())


def test_no_request_is_hidden(s3_proxy):
    """What the store was asked is what was counted."""
    asked = 0

    def decide() -> Trouble | None:
        nonlocal asked
        asked += 1
        return "reset" if asked <= 4 else None

    s3_proxy.decide = decide

    async def main() -> None:
        async with RunChannel(open_channel("s3://ephemeron-tests/faulty"), owner="me") as channel:
            await channel.put("run/hidden", [b"x"])
            assert channel.traffic.puts == asked == 5
            await channel.delete(["run/hidden"])

    asyncio.run(main())


def test_a_paused_server_costs_time(store, monkeypatch):
    proxy, opened, _ = store
    monkeypatch.setattr(cache, "_ANSWER_S", 0.5)

    async def main() -> None:
        async with opened() as channel:
            await channel.put("run/before", [b"x"])
            proxy.pause()
            waiting = asyncio.create_task(channel.get("run/before", deadline=later(0.1)))
            putting = asyncio.create_task(channel.put("run/meanwhile", [b"y"]))
            await asyncio.sleep(1.5)
            assert not waiting.done()
            assert not putting.done()
            proxy.resume()
            assert bytes((await waiting).data) == b"x"
            await putting
            assert bytes((await channel.fetch("run/meanwhile")) or b"") == b"y"
            await channel.delete(["run/before", "run/meanwhile"])

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP on this system")
def test_a_valkey_that_is_stopped_killed_and_started_again(tmp_path: Path, monkeypatch):
    """With an append-only file its objects are there again."""
    monkeypatch.setattr(cache, "_ANSWER_S", 0.5)
    durable = ("--appendonly", "yes", "--appendfsync", "always")
    server = start_valkey(tmp_path, *durable)
    port = port_of(server)

    async def main() -> None:
        nonlocal server
        async with RunChannel(open_channel(server.address), owner="me") as channel:
            await channel.put("run/a", [b"x"])
            waiting = asyncio.create_task(channel.get("run/b", deadline=later(60)))
            server.process.send_signal(signal.SIGSTOP)
            putting = asyncio.create_task(channel.put("run/c", [b"y"], create=True))
            await asyncio.sleep(1.0)
            server.process.send_signal(signal.SIGCONT)
            await putting
            server.kill()
            putting = asyncio.create_task(channel.put("run/d", [b"z"]))
            await asyncio.sleep(0.3)
            server = start_valkey(tmp_path, *durable, port=port)
            await putting
            assert await channel.list("run/") == ["run/a", "run/c", "run/d"]
            await channel.put("run/b", [b"late"])
            assert bytes((await waiting).data) == b"late"

    try:
        asyncio.run(main())
    finally:
        stop(server.process)


def test_what_will_not_pass_is_not_repeated(s3_proxy, locked_valkey, monkeypatch):
    async def main() -> None:
        async with RunChannel(open_channel("s3://no-such-bucket-here"), owner="me") as missing:
            with pytest.raises(ChannelRefused, match="bucket does not exist"):
                await missing.put("run/a", [b"x"])
            assert missing.traffic.puts == 1
        monkeypatch.setenv("EPHEMERON_CHANNEL_PASSWORD", "wrong")
        async with RunChannel(open_channel(locked_valkey.address), owner="me") as locked:
            with pytest.raises(ChannelRefused, match="EPHEMERON_CHANNEL_PASSWORD"):
                await locked.put("run/a", [b"x"])
            assert locked.traffic.puts == 1
        async with RunChannel(open_channel("redis://127.0.0.1:1/0"), owner="me", retry=RetryPolicy(total_s=0.3)) as nowhere:
            with pytest.raises(ChannelUnreachable, match="given up after"):
                await nowhere.put("run/a", [b"x"])
            assert nowhere.traffic.puts > 2

    asyncio.run(main())
