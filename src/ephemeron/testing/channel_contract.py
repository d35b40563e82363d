"""Every sentence of `Channel`'s contract, as a test.

    class TestMyChannel(ChannelContract):
        async def open(self) -> Channel:
            return MyChannel(...)

`ChannelConnectionContract` is the part of it that a variant needs (TLS, another transport) of a channel that passes the whole.

Each test opens the channel in an event loop of its own, works below a unique prefix, and removes the objects that it
put. Nothing asserts a duration: where time matters, the order of events is checked. Fixtures can be used by
overriding `open` in a class with an autouse fixture that stores what it needs on `self`.
"""

from __future__ import annotations

import asyncio
import string
import uuid
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeAlias

import pytest

from ephemeron.communication.channels.base import Channel
from ephemeron.errors import ChannelTimeout, KeyExists

_Scenario: TypeAlias = Callable[[Channel, str], Coroutine[Any, Any, None]]


class ChannelConnectionContract:
    """Connection part of the contract: that it connects, carries bytes unchanged, and reports errors of its own kind."""

    many_keys: int = 1_200
    """Keys in the listing test; more than 1,000 passes the page limit of object stores."""
    readers: int = 50
    """Concurrent readers, and concurrent writers, where a test wants many."""
    rewrites: int = 40
    """Overwrites in the test for torn objects."""
    cancel_turns: int = 40
    """Most turns of the event loop before a waiting `get` is cancelled."""
    test_timeout_s: float = 300.0
    """A test that takes longer has hung."""

    @abstractmethod
    def open(self) -> Coroutine[Any, Any, Channel] | AbstractAsyncContextManager[Channel]:
        """The channel under test: `async def open(self) -> Channel`, or an async context manager of one."""

    def run(self, scenario: _Scenario) -> None:
        """Runs a scenario against a fresh channel and a fresh prefix, and cleans up behind it."""

        async def against(channel: Channel) -> None:
            prefix = f"contract-{uuid.uuid4().hex[:12]}"
            task = asyncio.ensure_future(scenario(channel, prefix))
            await asyncio.wait({task}, timeout=self.test_timeout_s)
            if not task.done():
                task.cancel()
                pytest.fail(f"hung for {self.test_timeout_s} s")
            try:
                await task
            finally:
                await channel.delete(await channel.list(prefix))

        async def main() -> None:
            opened = self.open()
            if isinstance(opened, AbstractAsyncContextManager):
                async with opened as channel:
                    await against(channel)
            else:
                async with await opened as channel:
                    await against(channel)

        asyncio.run(main())

    def test_what_was_put_is_fetched(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            await channel.put(f"{prefix}/a", [b"one"])
            assert await _fetched(channel, f"{prefix}/a") == b"one"

        self.run(scenario)

    def test_five_megabytes_arrive_unchanged(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            data = bytes(range(251)) * 20_000
            await channel.put(f"{prefix}/a", [data[:1_000_001], data[1_000_001:]])
            assert await _fetched(channel, f"{prefix}/a") == data

        self.run(scenario)

    def test_get_waits_for_a_later_put(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            reading = asyncio.create_task(channel.get(f"{prefix}/a", deadline=_in(60)))
            await channel.put(f"{prefix}/other", [b"y"])  # the reader has begun, and this is not its key
            assert not reading.done()
            await channel.put(f"{prefix}/a", [b"x"])
            received = await reading
            assert bytes(received.data) == b"x"
            assert received.waited_s >= 0

        self.run(scenario)

    def test_get_gives_up_at_its_deadline(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            deadline = _in(0.2)
            with pytest.raises(ChannelTimeout, match=prefix) as caught:
                await channel.get(f"{prefix}/a", deadline=deadline)
            assert caught.value.key == f"{prefix}/a"
            assert asyncio.get_running_loop().time() >= deadline - 0.01

        self.run(scenario)

    def test_create_wants_the_key_free(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            await channel.put(f"{prefix}/a", [b"first"], create=True)
            with pytest.raises(KeyExists, match=prefix):
                await channel.put(f"{prefix}/a", [b"second"], create=True)
            assert await _fetched(channel, f"{prefix}/a") == b"first"
            await channel.put(f"{prefix}/a", [b"third"])
            with pytest.raises(KeyExists):
                await channel.put(f"{prefix}/a", [b"fourth"], create=True)
            await channel.delete([f"{prefix}/a"])
            await channel.put(f"{prefix}/a", [b"fifth"], create=True)
            assert await _fetched(channel, f"{prefix}/a") == b"fifth"

        self.run(scenario)

    def test_deleted_is_gone_and_deleting_nothing_is_harmless(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            for name in "abcd":
                await channel.put(f"{prefix}/{name}", [b"x"])
            await channel.delete([f"{prefix}/{name}" for name in ("nothing", "a", "nowhere/at/all", "b", "c")])
            assert await channel.list(prefix) == [f"{prefix}/d"]
            assert await channel.fetch(f"{prefix}/a") is None
            assert [await channel.exists(f"{prefix}/{name}") for name in ("d", "a", "")] == [True, False, False]
            await channel.delete([f"{prefix}/a"])
            await channel.delete([])
            await channel.delete(f"{prefix}/{name}" for name in "d")
            assert await channel.list(prefix) == []

        self.run(scenario)


class ChannelContract(ChannelConnectionContract):
    """The whole contract: base class of a pytest class; subclasses say how to open the channel."""

    def test_buffers_of_all_kinds_are_concatenated(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            floats: Any = memoryview(bytes(range(16))).cast("f")
            await channel.put(f"{prefix}/a", [b"head", bytearray(b"-body-"), b"", floats])
            assert await _fetched(channel, f"{prefix}/a") == b"head-body-" + bytes(range(16))
            await channel.put(f"{prefix}/b", [floats])
            assert await _fetched(channel, f"{prefix}/b") == bytes(range(16))

        self.run(scenario)

    @pytest.mark.parametrize("empty", [[], [b""], [b"", b""], [memoryview(b"")]])
    def test_an_empty_object_is_there(self, empty: list[bytes]) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            await channel.put(f"{prefix}/a", empty)
            assert await _fetched(channel, f"{prefix}/a") == b""
            received = await channel.get(f"{prefix}/a", deadline=_in(60))
            assert bytes(received.data) == b""
            assert await channel.list(prefix) == [f"{prefix}/a"]

        self.run(scenario)

    def test_a_different_put_replaces_and_the_same_put_is_harmless(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            for data in (b"long before", b"new", b"new"):
                await channel.put(f"{prefix}/a", [data])
                assert await _fetched(channel, f"{prefix}/a") == data

        self.run(scenario)

    def test_an_absent_key_is_none(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            assert await channel.fetch(f"{prefix}/nothing") is None
            await channel.put(f"{prefix}/nothing/below", [b"x"])
            assert await channel.fetch(f"{prefix}/nothing/belo") is None

        self.run(scenario)

    def test_every_allowed_character_works_in_a_key(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            key = f"{prefix}/{string.ascii_letters}/{string.digits}/a.b_c-d/..e/-/_/00/x.y.z"
            await channel.put(key, [b"x"])
            assert await _fetched(channel, key) == b"x"
            assert await channel.list(prefix) == [key]
            await channel.delete([key])
            assert await channel.fetch(key) is None

        self.run(scenario)

    def test_keys_that_differ_in_case_or_in_slashes_differ(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            keys = [f"{prefix}/a/b", f"{prefix}/a-b", f"{prefix}/a.b", f"{prefix}/A/b", f"{prefix}/a_b"]
            for key in keys:
                await channel.put(key, [key.encode()])
            for key in keys:
                assert await _fetched(channel, key) == key.encode()

        self.run(scenario)

    def test_get_brings_what_is_there(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            await channel.put(f"{prefix}/a", [b"x"])
            received = await channel.get(f"{prefix}/a", deadline=_in(60))
            assert bytes(received.data) == b"x"
            assert received.waited_s >= 0

        self.run(scenario)

    def test_a_deadline_in_the_past_makes_one_attempt(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            with pytest.raises(ChannelTimeout):
                await channel.get(f"{prefix}/a", deadline=_in(-5))
            await channel.put(f"{prefix}/a", [b"x"])
            assert bytes((await channel.get(f"{prefix}/a", deadline=_in(-5))).data) == b"x"

        self.run(scenario)

    def test_an_expectation_never_delays_past_the_deadline(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            with pytest.raises(ChannelTimeout):
                await channel.get(f"{prefix}/a", deadline=_in(0.1), expected_at=_in(10_000))
            await channel.put(f"{prefix}/a", [b"x"])
            received = await channel.get(f"{prefix}/a", deadline=_in(60), expected_at=_in(0.05))
            assert bytes(received.data) == b"x"

        self.run(scenario)

    def test_a_get_can_be_cancelled_at_any_moment_and_harms_nothing(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            for turns in range(self.cancel_turns):
                reading = asyncio.create_task(channel.get(f"{prefix}/a", deadline=_in(3600)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                reading.cancel()
                await asyncio.wait({reading}, timeout=self.test_timeout_s / 4)
                assert reading.cancelled(), f"not cancelled after {turns} turns of the event loop"
            await channel.put(f"{prefix}/a", [b"x"])
            assert await _fetched(channel, f"{prefix}/a") == b"x"

        self.run(scenario)

    def test_many_readers_wait_for_one_key(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            async with asyncio.TaskGroup() as readers:
                tasks = [readers.create_task(channel.get(f"{prefix}/a", deadline=_in(60))) for _ in range(self.readers)]
                await channel.put(f"{prefix}/a", [b"for all"])
            assert {bytes(task.result().data) for task in tasks} == {b"for all"}

        self.run(scenario)

    def test_one_of_many_concurrent_creates_wins(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            async def attempt(i: int) -> bool:
                try:
                    await channel.put(f"{prefix}/lease", [b"%d" % i], create=True)
                except KeyExists:
                    return False
                return True

            won = await asyncio.gather(*(attempt(i) for i in range(self.readers)))
            assert sum(won) == 1
            assert await _fetched(channel, f"{prefix}/lease") == b"%d" % won.index(True)

        self.run(scenario)

    def test_list_is_sorted_and_goes_by_prefix(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            names = ["b/2", "b/10", "a/1/x", "bc/1", "b/1/deep/er", "B/1", "c"]
            for name in names:
                await channel.put(f"{prefix}/{name}", [b"x"])

            async def listed(under: str) -> list[str]:
                return [key.removeprefix(f"{prefix}/") for key in await channel.list(f"{prefix}{under}")]

            assert await listed("") == sorted(names)
            assert await listed("/") == sorted(names)
            assert await listed("/b") == ["b/1/deep/er", "b/10", "b/2", "bc/1"]
            assert await listed("/b/") == ["b/1/deep/er", "b/10", "b/2"]
            assert await listed("/b/1") == ["b/1/deep/er", "b/10"]
            assert await listed("/nothing") == []

        self.run(scenario)

    def test_list_and_delete_do_many_keys(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            keys = [f"{prefix}/{i:05d}" for i in range(self.many_keys)]
            for at in range(0, len(keys), 20):
                await asyncio.gather(*(channel.put(key, [b"x"]) for key in keys[at : at + 20]))
            assert await channel.list(f"{prefix}/") == keys
            await channel.delete(keys)
            assert await channel.list(f"{prefix}/") == []

        self.run(scenario)

    def test_no_reader_sees_half_an_object(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            key, size, done = f"{prefix}/a", 300_000, asyncio.Event()
            await channel.put(key, [bytes(size)])

            async def write() -> None:
                for i in range(self.rewrites):
                    part = bytes([i % 250 + 1]) * (size + i)
                    await channel.put(key, [part[:1000], part[1000:]])
                done.set()

            async def read() -> None:
                while not done.is_set():
                    data = await _fetched(channel, key)
                    assert data is not None, "an overwritten key was absent for a moment"
                    assert len(data) - size == max(0, data[0] - 1)
                    assert data.count(data[0]) == len(data)

            await asyncio.gather(write(), read(), read())

        self.run(scenario)

    def test_the_callers_buffers_are_neither_changed_nor_kept(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            one, two = bytearray(b"1" * 100_000), bytearray(b"2" * 50)
            await channel.put(f"{prefix}/a", [one])
            await channel.put(f"{prefix}/b", [one, memoryview(two)])
            assert one == b"1" * 100_000
            assert two == b"2" * 50
            one[:] = b"x" * 100_000
            two[:] = b"y" * 50
            assert await _fetched(channel, f"{prefix}/a") == b"1" * 100_000
            assert await _fetched(channel, f"{prefix}/b") == b"1" * 100_000 + b"2" * 50

        self.run(scenario)

    def test_traits_say_what_the_planner_asks(self) -> None:
        async def scenario(channel: Channel, prefix: str) -> None:
            traits = channel.traits
            assert traits.service in ("memory", "objects", "cache", "server")
            assert traits.latency_s >= 0
            assert traits.bandwidth_mb_s is None or traits.bandwidth_mb_s > 0

        self.run(scenario)


async def _fetched(channel: Channel, key: str) -> bytes | None:
    data = await channel.fetch(key)
    return None if data is None else bytes(data)


def _in(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds
