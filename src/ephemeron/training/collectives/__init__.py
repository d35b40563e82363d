"""Reductions over a group of workers, independent of the channel."""

from __future__ import annotations

from ephemeron.errors import JobError
from ephemeron.training.collectives._tasks import all_of
from ephemeron.training.collectives.arrived import ArrivedReduce
from ephemeron.training.collectives.chunking import CHUNK_BYTES, chunk_elements
from ephemeron.training.collectives.group import (
    Collective,
    CollectiveState,
    Group,
    NoTrace,
    Reduced,
    ReductionStatus,
    SingleRank,
    StalledPeers,
    Trace,
)
from ephemeron.training.collectives.kreduce import KReduce
from ephemeron.training.collectives.object_receiver import handle_timeout, wait_for_object
from ephemeron.training.collectives.server import ServerAccumulate, ServerReduce


def collective_for(pattern: str, group: Group, *, asynchronous: bool = False, chunk_bytes: int = CHUNK_BYTES) -> Collective:
    """The collective of a pattern.

    Args:
        pattern: see `Configuration`.
        group: the ranks that reduce together.
        asynchronous: the parameter server adds each contribution when it arrives.
        chunk_bytes: chunk size of the pipelined form; 0: the plain form, where requests cost more than overlapping saves.
            The same on all ranks.

    Raises:
        JobError: the channel of a pattern with a parameter server is not one.
    """
    if pattern == "parameter-server":
        server = group.channel.reducer()
        if server is None:
            raise JobError(
                "pattern 'parameter-server' needs a channel that can add", remedy="use --channel parameter_server or ps://host:port"
            )
        return ServerAccumulate(group, server) if asynchronous else ServerReduce(group, server)
    if group.mesh is not None and group.world > 1 and group.policy.deterministic:
        from ephemeron.training.collectives.direct import DirectReduce
        from ephemeron.training.collectives.direct_messages import Division

        division, block = Division.of(group.world, group.shared_cores), group.ranks_per_machine
        if 1 < block < group.world:
            from ephemeron.training.collectives.direct_two_level import TwoLevelReduce

            return TwoLevelReduce(group, group.mesh, ranks_per_machine=block, replays=group.replays, division=division)
        return DirectReduce(group, group.mesh, replays=group.replays, division=division)
    if pattern == "pipelined":
        if not chunk_bytes:
            return KReduce(group)
        return KReduce(group, chunk_size=chunk_elements(group.size, group.aggregators, group.dtype.itemsize, chunk_bytes))
    return KReduce(group) if group.policy.waits_for_all else ArrivedReduce(group)


__all__ = [
    "CHUNK_BYTES",
    "ArrivedReduce",
    "Collective",
    "CollectiveState",
    "Group",
    "KReduce",
    "NoTrace",
    "Reduced",
    "ReductionStatus",
    "ServerAccumulate",
    "ServerReduce",
    "SingleRank",
    "StalledPeers",
    "Trace",
    "all_of",
    "chunk_elements",
    "collective_for",
    "handle_timeout",
    "wait_for_object",
]
