"""Sums, repeats, several servers, and servers that die."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ephemeron.communication import object_frame
from ephemeron.communication.channels import SupportsReduction
from ephemeron.communication.channels.parameter_server import MemoryParameterServer, ParameterServer, ParameterServerChannel
from ephemeron.communication.channels.reduction import LocalReduction
from ephemeron.errors import ChannelError, ChannelUnreachable, JobError

if TYPE_CHECKING:
    from servers import ServerProcess

TOKEN = "token of the tests"
Both = Callable[[], Awaitable[Any]]


@pytest.fixture(params=["memory", "server"])
def opened(request: pytest.FixtureRequest) -> Both:
    """The same arithmetic with and without a process between."""

    async def memory() -> MemoryParameterServer:
        return MemoryParameterServer()

    async def server() -> ParameterServerChannel:
        return ParameterServerChannel(request.getfixturevalue("parameter_server").address, token=TOKEN)

    if request.param == "server":
        request.getfixturevalue("parameter_server")
        return server
    return memory


def vector_of(key: str, data: memoryview | None, dtype: str = "f4") -> Any:
    assert data is not None
    return np.frombuffer(object_frame.opened(data, key=key), dtype)


def later(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def parts(world: int, n: int = 1001, dtype: str = "f4") -> tuple[list[Any], list[float], Any]:
    """Contributions with weights, and their mean summed by rank in the vectors' dtype."""
    rng = np.random.default_rng(world)
    weights = [float(w) for w in rng.integers(1, 100, world)]
    vectors = [(rng.standard_normal(n) * w).astype(dtype) for w in weights]
    total = vectors[0].copy()
    for vector in vectors[1:]:
        total += vector
    return vectors, weights, total / np.dtype(dtype).type(sum(weights))


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_the_mean_does_not_depend_on_who_comes_first(opened: Both, dtype: str) -> None:
    vectors, weights, mean = parts(4, dtype=dtype)

    async def scenario() -> None:
        async with await opened() as channel:
            assert isinstance(channel, SupportsReduction)
            for i, order in enumerate(itertools.permutations(range(4))):
                key = f"mean/{dtype}/{i}"
                waiting = asyncio.create_task(channel.get(key, deadline=later(60)))
                for rank in order:
                    await channel.reduce(key, rank=rank, world=4, weight=weights[rank], vector=vectors[rank])
                received = await waiting
                assert np.array_equal(vector_of(key, received.data, dtype), mean)
                await channel.delete([key])

    asyncio.run(scenario())


def test_repeated_contributions_are_ignored_also_when_late(opened: Both) -> None:
    vectors, weights, mean = parts(3)

    async def scenario() -> None:
        async with await opened() as channel:

            async def send(rank: int, factor: float = 1.0) -> None:
                vector = vectors[rank] * np.float32(factor)
                await channel.reduce("repeat/m", rank=rank, world=3, weight=weights[rank], vector=vector)

            for rank in (2, 2, 0, 0, 2):
                await send(rank)
                await send(rank, 7.0)
            assert await channel.fetch("repeat/m") is None
            await send(1)
            await send(1, 7.0)
            assert np.array_equal(vector_of("repeat/m", await channel.fetch("repeat/m")), mean)
            await channel.delete(["repeat/m"])
            for rank in range(3):
                await send(rank)
            assert await channel.fetch("repeat/m") is None

    asyncio.run(scenario())


def test_contributions_that_do_not_fit_are_refused_and_change_nothing(opened: Both) -> None:
    vectors, weights, mean = parts(2)

    async def scenario() -> None:
        async with await opened() as channel:
            await channel.reduce("fit/m", rank=1, world=2, weight=weights[1], vector=vectors[1])
            for wrong in (
                {"vector": vectors[0][:-1]},
                {"vector": vectors[0].astype("f8")},
                {"world": 3},
                {"rank": 2},
                {"weight": float("nan")},
                {"weight": -1.0},
            ):
                good = {"rank": 0, "world": 2, "weight": weights[0], "vector": vectors[0]}
                with pytest.raises(ChannelError):
                    await channel.reduce("fit/m", **{**good, **wrong})
            await channel.reduce("fit/m", rank=0, world=2, weight=weights[0], vector=vectors[0])
            assert np.array_equal(vector_of("fit/m", await channel.fetch("fit/m")), mean)
            await channel.delete(["fit/m"])

    asyncio.run(scenario())


def test_the_callers_vector_is_left_alone(opened: Both) -> None:
    async def scenario() -> None:
        async with await opened() as channel:
            one, two = np.ones(5, "f4"), np.ones(5, "f4")
            await channel.reduce("alone/m", rank=0, world=2, weight=1, vector=one)
            one[:] = 100
            await channel.reduce("alone/m", rank=1, world=2, weight=1, vector=two)
            assert np.array_equal(vector_of("alone/m", await channel.fetch("alone/m")), np.ones(5))
            assert np.array_equal(two, np.ones(5))
            got = await channel.accumulate("alone/a", rank=0, iteration=0, delta=two)
            two[:] = 50
            got[:] = 70
            again = await channel.accumulate("alone/a", rank=1, iteration=0, delta=np.zeros(5, "f4"))
            assert np.array_equal(again, np.ones(5))
            await channel.delete(["alone/m", "alone/a"])

    asyncio.run(scenario())


def test_deltas_add_up_once_each(opened: Both) -> None:
    async def scenario() -> None:
        async with await opened() as channel:
            start = np.arange(10, dtype="f4")
            await channel.put("async/w", object_frame.sealed([start.data.cast("B")], key="async/w"))
            delta = np.ones(10, "f4")

            async def worker(rank: int) -> None:
                for iteration in range(20):
                    for _ in range(2):  # every call is repeated
                        await channel.accumulate("async/w", rank=rank, iteration=iteration, delta=delta)

            await asyncio.gather(*(worker(rank) for rank in range(3)))
            final = await channel.accumulate("async/w", rank=0, iteration=3, delta=delta)
            assert np.array_equal(final, start + 60)
            assert np.array_equal(vector_of("async/w", await channel.fetch("async/w")), final)
            with pytest.raises(ChannelError, match="11 numbers"):
                await channel.accumulate("async/w", rank=0, iteration=99, delta=np.ones(11, "f4"))
            await channel.delete(["async/w"])
            fresh = await channel.accumulate("async/w", rank=0, iteration=0, delta=delta)
            assert np.array_equal(fresh, delta)
            await channel.delete(["async/w"])

    asyncio.run(scenario())


def test_a_reduction_keeps_nothing_behind() -> None:
    core = LocalReduction()
    for iteration in range(1000):
        for rank in (1, 0):
            core.reduce(f"k/{iteration}", rank=rank, world=2, weight=1, vector=np.ones(3, "f4"))
    core.reduce("k/open", rank=0, world=2, weight=1, vector=np.ones(3, "f4"))
    assert core.open_rounds == 1
    core.forget("k/open")
    assert core.open_rounds == 0


def test_early_arrivals_are_added_as_soon_as_their_turn_comes() -> None:
    core = LocalReduction()
    for rank in (3, 1, 0):
        assert core.reduce("k", rank=rank, world=4, weight=1, vector=np.full(3, rank, "f4")) is None
    (state,) = core._rounds.values()
    assert set(state.held) == {3}


def test_vectors_whose_weights_are_zero_are_added_up(opened: Both) -> None:
    async def scenario() -> None:
        async with await opened() as channel:
            for rank in range(2):
                await channel.reduce("zero/m", rank=rank, world=2, weight=0, vector=np.ones(3, "f4"))
            got = await channel.get("zero/m", deadline=later(10))
            assert vector_of("zero/m", got.data).tolist() == [2, 2, 2]

    asyncio.run(scenario())


def test_several_servers_share_the_keys() -> None:
    async def scenario() -> None:
        servers = [ParameterServer(token=TOKEN) for _ in range(3)]
        where = [await server.listen() for server in servers]
        url = "ps://" + ",".join(f"{host}:{port}" for host, port in where)
        async with ParameterServerChannel(url, token=TOKEN) as one, ParameterServerChannel(url, token=TOKEN) as two:
            keys = sorted(f"run/{i}" for i in range(60))
            await asyncio.gather(*(one.put(key, [key.encode()]) for key in keys))
            assert [bytes(await two.fetch(key) or b"").decode() for key in keys] == keys
            assert await two.list("run/") == keys
            held = [len(server.memory.objects) for server in servers]
            assert sum(held) == 60
            assert min(held) > 5
            await two.delete(keys)
            assert await one.list("") == []
        for server in servers:
            await server.close()

    asyncio.run(scenario())


def test_a_server_that_dies_under_a_waiting_reader(own_parameter_server: Callable[..., ServerProcess]) -> None:
    server = own_parameter_server()

    async def scenario() -> None:
        async with ParameterServerChannel(server.address, token=TOKEN) as channel:
            reading = asyncio.create_task(channel.get("run/never", deadline=later(600)))
            await channel.put("run/other", [b"x"])  # answered after the wait was asked for: one connection, in order
            server.kill()
            with pytest.raises(ChannelUnreachable, match="check that it runs"):
                await reading
            for call in (channel.put("a", [b"x"]), channel.fetch("a"), channel.delete(["a"]), channel.list("a")):
                with pytest.raises(ChannelUnreachable, match=server.address.removeprefix("ps://")):
                    await call

    asyncio.run(scenario())


def test_a_server_that_falls_silent_is_given_up(
    own_parameter_server: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = own_parameter_server()

    async def scenario() -> None:
        async with ParameterServerChannel(server.address, token=TOKEN) as channel:
            await channel.put("a", [b"x"])
            monkeypatch.setattr("ephemeron.communication.channels._ps_client._ANSWER_S", 0.1)
            monkeypatch.setattr("ephemeron.communication.rpc.client._FLUSH_S", 0.1)
            server.process.send_signal(signal.SIGSTOP)
            with pytest.raises(ChannelUnreachable, match="does not answer"):
                await channel.get("b", deadline=later(0.1))
            with pytest.raises(ChannelUnreachable, match="does not answer"):
                await channel.put("a", [bytes(20_000_000)])
            server.process.send_signal(signal.SIGCONT)
            monkeypatch.undo()
            assert await channel.fetch("a") == b"x"

    asyncio.run(scenario())


def test_a_lost_connection_is_made_anew() -> None:
    async def scenario() -> None:
        first = ParameterServer(token=TOKEN)
        host, port = await first.listen()
        async with ParameterServerChannel(f"ps://{host}:{port}", token=TOKEN) as channel:
            await channel.put("a", [b"x"])
            await first.close()
            with pytest.raises(ChannelUnreachable):
                await channel.fetch("a")
            second = ParameterServer(token=TOKEN)
            await second.listen(host, port)
            assert await channel.fetch("a") is None
            await second.close()

    asyncio.run(scenario())


def test_another_token_is_refused_and_never_shown(parameter_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with ParameterServerChannel(parameter_server.address, token="an0ther") as channel:
            with pytest.raises(ChannelUnreachable, match="another token") as caught:
                await channel.fetch("a")
            assert "an0ther" not in str(caught.value) + repr(channel)

    asyncio.run(scenario())
    monkeypatch.delenv("EPHEMERON_CHANNEL_TOKEN", raising=False)
    with pytest.raises(JobError, match="EPHEMERON_CHANNEL_TOKEN"):
        ParameterServerChannel(parameter_server.address)
    for url in ("ps://", "ps://host", "ps://host:1,", "tcp://host:1"):
        with pytest.raises(JobError, match="ps://host:port"):
            ParameterServerChannel(url, token="t")


@pytest.mark.parametrize(
    ("arguments", "token", "problem"), [(["--host", "0.0.0.0"], "t", "--allow-remote"), ([], "", "EPHEMERON_CHANNEL_TOKEN")]
)
def test_the_command_refuses_what_is_unsafe(arguments: list[str], token: str, problem: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ephemeron.communication.channels.parameter_server", *arguments],
        env={**os.environ, "EPHEMERON_CHANNEL_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert problem in done.stderr
