"""Sparse stores on this machine's loopback interface, for tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, ParamSpec

from ephemeron.sparse.store.server import ShardServer
from ephemeron.sparse.store.state import ShardState

P = ParamSpec("P")
TOKEN = "a token of tests"


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """A test that is a coroutine, on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def served(shards: int = 1) -> AsyncIterator[tuple[list[str], list[ShardServer]]]:
    """Shards without a journal: their addresses and servers."""
    servers = [ShardServer(ShardState(shard, shards), token=TOKEN) for shard in range(shards)]
    try:
        places = [await server.listen() for server in servers]
        yield [f"{host}:{port}" for host, port in places], servers
    finally:
        for server in servers:
            await server.close()
