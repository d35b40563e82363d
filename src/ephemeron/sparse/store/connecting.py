"""How a client finds the shards of a store and connects to all of them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.errors import JobError
from ephemeron.sparse.store.link import ShardLink
from ephemeron.sparse.store.messages import OpenRequest

Locate = Callable[[int], Awaitable[tuple[str, int]]]
"""Finds the address of a shard by its index."""


async def open_links(
    addresses: Sequence[str] | Locate, token: Token, *, shards: int | None, client: str, attempt: int, connect_s: float, answer_s: float
) -> list[ShardLink]:
    """Connections to all shards; see `SparseStore.connect`."""
    token = token_text(token)
    if callable(addresses):
        locate, count = addresses, shards or 1
    else:
        places = [parse_address(address) for address in addresses]
        locate, count = partial(_listed, places), len(places)
    if not count:
        raise JobError("a sparse store has no addresses", remedy="give HOST:PORT of each shard")
    name = client or f"anonymous-{secrets.token_hex(8)}"
    links = [
        ShardLink(
            partial(locate, shard),
            token=token,
            connect_s=connect_s,
            answer_s=answer_s,
            opening=OpenRequest(client=name, attempt=attempt, shard=shard, shards=count),
        )
        for shard in range(count)
    ]
    try:
        await asyncio.gather(*(link.open() for link in links))
    except BaseException:
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)
        raise
    return links


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        JobError: the text has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise JobError(f"address {address!r} of a sparse store", remedy="write HOST:PORT, such as 127.0.0.1:7090")
    return host.strip("[]"), int(port)


async def _listed(places: Sequence[tuple[str, int]], shard: int) -> tuple[str, int]:
    return places[shard]
