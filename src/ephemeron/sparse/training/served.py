"""The store of a run: shards that are started here for it, or those that it is given."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ephemeron.events import Traffic
from ephemeron.sparse.store.journal import JournalOptions
from ephemeron.sparse.store.processes import ShardProcesses
from ephemeron.sparse.store.shard import TOKEN_VARIABLE, ShardOptions

SNAPSHOT_S = 10.0
"""Seconds between snapshots, which replace the log: it has every gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Where functions reach the store."""

    addresses: tuple[str, ...]
    token: str
    pids: Callable[[], Sequence[int]] = lambda: ()
    """Processes of the shards that were started here."""
    traffic: Callable[[], Traffic] = Traffic
    """Requests to the channel by the shards that were started here, so far."""
    check: Callable[[], None] = lambda: None
    """Raises the error for which a shard cannot be kept alive."""


@asynccontextmanager
async def served(shards: int, store: Sequence[str], *, channel: str | None = "", name: str, token: str = "") -> AsyncIterator[Served]:
    """Starts shards as processes of this machine unless a store is given, and ends them.

    Args:
        shards: number of them.
        store: addresses of a given one.
        channel: where they keep a log and snapshots; empty: in a temporary folder; None: nowhere.
        name: of the store in the channel.
        token: of shards that are started here; empty: a new one.
    """
    if store:
        yield Served(addresses=tuple(store), token=os.environ[TOKEN_VARIABLE])
        return
    async with contextlib.AsyncExitStack() as stack:
        if channel == "":
            channel = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ephemeron-sparse-"))).as_uri()
        token = token or secrets.token_hex(32)
        journal = JournalOptions(log=channel is not None, snapshot_s=SNAPSHOT_S)
        options = [ShardOptions(name=name, shard=shard, shards=shards, journal=journal) for shard in range(shards)]
        processes = ShardProcesses(options, token=token, channel=channel or "")
        addresses = await processes.start()
        stack.push_async_callback(processes.close)
        kept = asyncio.ensure_future(processes.wait())
        stack.callback(kept.cancel)

        def check() -> None:
            if kept.done() and not kept.cancelled():
                kept.result()

        yield Served(addresses=tuple(addresses), token=token, pids=lambda: processes.pids, check=check, traffic=lambda: processes.traffic)


@contextmanager
def token_for_functions(token: str) -> Iterator[None]:
    """Local functions inherit the variable; those of clouds are given it when they are deployed."""
    before = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = token
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(TOKEN_VARIABLE, None)
        else:
            os.environ[TOKEN_VARIABLE] = before
