"""The loop of a process can be ended by whoever has the process to himself, and comes back when it is needed."""

from __future__ import annotations

import threading

from ephemeron.data.catalog import loop


async def answer() -> int:
    return 42


def threads() -> int:
    return sum(t.name.startswith(("ephemeron-datasets", "ephemeron-unpack")) for t in threading.enumerate())


def test_it_ends_and_starts_again():
    assert loop.run(answer()) == 42
    loop.unpackers().submit(int).result()
    assert threads() >= 2
    loop.end()
    loop.end()
    assert threads() == 0
    assert loop.run(answer()) == 42
