"""Waiting for an object of another rank, and handling the peers that are late with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from ephemeron.communication.channels.base import Channel, Received
from ephemeron.errors import ChannelTimeout, ReplacementsFailed
from ephemeron.training.collectives.group import StalledPeers

T = TypeVar("T")
_log = logging.getLogger(__name__)

RECHECK_S = 0.25
"""Seconds between two reads of an object that does not count."""


class ArrivedObject(NamedTuple, Generic[T]):
    """An object that has arrived."""

    value: T
    """Result of `accept`."""
    received: Received
    found: float
    """Loop time of the request that found it."""
    late: bool
    """Whether it took longer than the timeout, or was preceded by an object that did not count."""


async def wait_for_object(
    channel: Channel,
    key: str,
    *,
    timeout_s: Callable[[], float],
    stalled: Callable[[], Awaitable[StalledPeers]],
    on_timeout: Callable[[StalledPeers], Awaitable[None]],
    accept: Callable[[memoryview], T | None],
    expected_at: float | None = None,
) -> ArrivedObject[T]:
    """Waits for an object, and calls `on_timeout` whenever it is late.

    Stalled peers may get some more time (`StalledPeers.grace_s`). The wait continues during that time: a rank that paused
    instead would be late itself, and with it all objects that its peers wait for.

    Args:
        channel: of the run.
        key: of the object.
        timeout_s: seconds after which it is late; asked anew for every wait.
        stalled: finds the ranks that should send it, once it is late.
        on_timeout: raises to end the wait, returns to go on with it.
        accept: decodes the object; None: it does not count, and another one will replace it.
        expected_at: loop time of the first poll.

    Raises:
        ReplacementsFailed: from `on_timeout`; names the key and the problem there, too.
        ChannelUnreachable: the store does not answer.
    """
    loop = asyncio.get_running_loop()
    due, late, suspects = loop.time() + timeout_s(), False, None
    while True:
        asked = loop.time()
        try:
            received = await channel.get(key, deadline=due, expected_at=expected_at)
        except ChannelTimeout as e:
            missing = e
        else:
            value = accept(received.data)
            if value is not None:
                return ArrivedObject(value, received, asked + received.waited_s, late)
            late, missing = True, ChannelTimeout("another object is stored there than the awaited one", key=key)
            if loop.time() < due:
                await asyncio.sleep(RECHECK_S)
                continue
        late = True
        if suspects is None:
            suspects = await stalled()
            if suspects.grace_s > 0:
                due = loop.time() + suspects.grace_s
                continue
        _log.info("%s is late; ranks %s of iteration %d", key, list(suspects.ranks), suspects.iteration)
        await handle_timeout(on_timeout, suspects, missing)
        due, suspects = loop.time() + timeout_s(), None


async def handle_timeout(on_timeout: Callable[[StalledPeers], Awaitable[None]], stalled: StalledPeers, missing: ChannelTimeout) -> None:
    """Calls `on_timeout`; its error then names the missing key and what was found in its place."""
    try:
        await on_timeout(stalled)
    except ReplacementsFailed as e:
        said = f"{e.problem}; {missing.problem} (key {missing.key})"
        raise ReplacementsFailed(said, rank=e.rank, attempt=e.attempt, iteration=e.iteration) from e
