"""Reductions over a group of workers, each written once, over any channel."""

from __future__ import annotations

from ephemeron.collectives.alone import Alone
from ephemeron.collectives.group import Blame, Collective, Group, Merged, NoTrace, Status, Trace
from ephemeron.collectives.kreduce import KReduce
from ephemeron.collectives.server import ServerAccumulate, ServerReduce
from ephemeron.errors import JobError
from ephemeron.units import MB

CHUNK_BYTES = 1 * MB
"""Pipelined form: large enough that a request's latency is a small part of its transfer, small enough to overlap."""


def chunk_elements(size: int, aggregators: int, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Elements per chunk: about `chunk_bytes`, but at least two chunks per shard."""
    shard = -(-size // aggregators)
    return max(1, min(chunk_bytes // itemsize, -(-shard // 2)))


def collective_for(pattern: str, group: Group, *, asynchronous: bool = False) -> Collective:
    """The collective that a pattern names.

    Raises:
        JobError: a parameter server is asked of a channel that is none.
    """
    if pattern == "parameter-server":
        server = group.channel.reducer()
        if server is None:
            raise JobError(
                "pattern 'parameter-server' needs a channel that can add",
                remedy="use --channel parameter_server or ps://host:port",
            )
        return ServerAccumulate(group, server) if asynchronous else ServerReduce(group, server)
    if pattern == "pipelined":
        return KReduce(group, chunk=chunk_elements(group.size, group.aggregators, group.dtype.itemsize))
    return KReduce(group)


__all__ = [
    "Alone",
    "Blame",
    "Collective",
    "Group",
    "KReduce",
    "Merged",
    "NoTrace",
    "ServerAccumulate",
    "ServerReduce",
    "Status",
    "Trace",
    "collective_for",
]
