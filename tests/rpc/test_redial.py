"""What is repeated when a connection is lost, and what must not be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from faces import PATIENCE_S, TOKEN, Dull, Handlers, Loop, Served, in_thread
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.communication.rpc import BlockingClient, BlockingRedialing, Client, ReconnectBackoff, ReconnectingClient
from ephemeron.errors import CallTimedOut, ConnectionLost, TokenRefused

QUICK = ReconnectBackoff(first_s=0.001, most_s=0.002, attempts=5)


class Place:
    """A socket file at which servers come and go, and a client that redials."""

    def __init__(self, face: str, path: Path, loop: Loop, stack: ExitStack) -> None:
        self.path, self.loop, self._stack = path, loop, stack
        self.dials = 0
        self.waits_s: list[float] = []
        self.token = TOKEN
        rng = random.Random(1)
        self.client: Any
        if face == "blocking":
            self.client = BlockingRedialing(self.dial, rng=rng, backoff=QUICK, sleep=self.waits_s.append)
        else:
            self.client = Dull(loop, loop.run(self.redialing(rng)))
        stack.callback(self.client.close)

    async def redialing(self, rng: random.Random) -> ReconnectingClient:
        return ReconnectingClient(self.dial_later, rng=rng, backoff=QUICK)

    def dial(self) -> BlockingClient:
        self.dials += 1
        return BlockingClient.connect_unix(self.path, token=self.token)

    async def dial_later(self) -> Client:
        self.dials += 1
        return await Client.connect_unix(self.path, token=self.token)

    def serve(self) -> Served:
        served = Served("blocking", self.loop, Handlers(), self.path, None)
        self._stack.callback(served.close)
        self._stack.callback(served.handlers.release.set)
        return served


@pytest.fixture(params=["blocking", "asyncio"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        loop = Loop()
        stack.callback(loop.close)
        yield Place(request.param, tmp_path / "s", loop, stack)


def test_a_call_after_a_loss_is_made_on_a_new_connection(place: Place) -> None:
    first = place.serve()
    for n in range(3):
        assert place.client.call("echo", {"n": n})[0] == {"n": n}
    assert place.dials == 1
    first.close()
    place.serve()
    assert place.client.call("echo", {"n": 3}, idempotent=True)[0] == {"n": 3}
    assert place.client.call_object("echo", [b"x" * 10_000]) == [b"x" * 10_000]
    assert place.dials == 2


def test_a_call_under_way_is_repeated_only_if_it_may_run_twice(place: Place) -> None:
    first = place.serve()
    once = in_thread(lambda: place.client.call("wait", {"n": 1}))
    twice = in_thread(lambda: place.client.call("wait", {"n": 2}, idempotent=True))
    for _ in range(2):
        assert first.handlers.entered.acquire(timeout=PATIENCE_S)
    # The next server takes the place before the first one's clients learn that they were left.
    second = Served("blocking", place.loop, Handlers(), place.path.with_name("t"), None)
    second.handlers.release.set()
    place.path.unlink()
    second.path.rename(place.path)
    first.close()
    with pytest.raises(ConnectionLost, match="connection lost") as caught:
        once()
    assert not caught.value.may_repeat
    assert twice()[0] == {"n": 2}
    second.close()


def test_nobody_there_is_tried_a_few_times_with_longer_and_longer_waits(place: Place) -> None:
    with pytest.raises(ConnectionLost, match="gave up connecting") as caught:
        place.client.call("echo")
    assert caught.value.may_repeat
    assert place.dials == QUICK.attempts
    if place.waits_s:
        assert len(place.waits_s) == QUICK.attempts - 1


def test_a_refused_token_is_not_tried_again(place: Place) -> None:
    place.serve()
    place.token = "another"
    with pytest.raises(TokenRefused):
        place.client.call("echo", idempotent=True)
    assert place.dials == 1
    place.token = TOKEN
    assert place.client.call("echo", {"a": 1})[0] == {"a": 1}


def test_what_a_handler_raises_is_not_repeated(place: Place) -> None:
    place.serve()
    for call in (lambda: place.client.call("fail", idempotent=True), lambda: place.client.call_object("fail", 1)):
        with pytest.raises(Exception, match="KeyError"):
            call()
    assert place.dials == 1


def test_a_deadline_covers_the_attempts_to_connect(tmp_path: Path) -> None:
    slow = ReconnectBackoff(first_s=1000, most_s=1000, attempts=5)

    def nobody() -> BlockingClient:
        raise ConnectionRefusedError("nobody")

    async def nobody_later() -> Client:
        raise ConnectionRefusedError("nobody")

    blocking = BlockingRedialing(nobody, rng=random.Random(1), backoff=slow, sleep=lambda wait_s: None)
    with pytest.raises(CallTimedOut):
        blocking.call("echo", timeout_s=10)

    async def scenario() -> None:
        with pytest.raises(CallTimedOut):
            await ReconnectingClient(nobody_later, rng=random.Random(1), backoff=slow).call("echo", timeout_s=0.01)

    asyncio.run(scenario())


def test_streams_are_opened_on_what_stands_and_fail_with_it(place: Place) -> None:
    first = place.serve()
    with place.client.stream("echo") as stream:
        stream.send({"a": 1})
        assert stream.receive()[0] == {"a": 1}
        first.close()
        with pytest.raises(ConnectionLost):
            stream.receive(timeout_s=PATIENCE_S)
    place.serve()
    with place.client.stream("echo") as stream:
        stream.send({"a": 2})
        assert stream.receive()[0] == {"a": 2}


@given(st.floats(0.001, 10), st.floats(1, 4), st.floats(0.001, 100), st.integers(1, 12), st.floats(0, 1), st.integers())
def test_waits_grow_to_a_limit_and_are_spread(
    first_s: float, factor: float, most_s: float, attempts: int, spread: float, seed: int
) -> None:
    backoff = ReconnectBackoff(first_s=first_s, factor=factor, most_s=most_s, attempts=attempts, spread=spread)
    waits_s = list(backoff.waits_s(random.Random(seed)))
    bounds = [min(most_s, first_s * factor**n) for n in range(attempts - 1)]
    assert len(waits_s) == attempts - 1
    assert all((1 - spread) * most <= wait_s <= most for wait_s, most in zip(waits_s, bounds, strict=True))
    assert all(a <= b for a, b in pairwise(bounds))
    assert waits_s == list(backoff.waits_s(random.Random(seed)))
