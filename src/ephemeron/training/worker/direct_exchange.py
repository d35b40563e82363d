"""Membership of one invocation in a direct channel: its mesh, and the channel of its exchange on top of it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ephemeron.communication.direct.mesh import Mesh
from ephemeron.communication.direct.peer_channel import Exchange, PeerChannel, PushedChannel
from ephemeron.communication.direct.transport import Transport
from ephemeron.communication.keys import Keys
from ephemeron.events import Traffic
from ephemeron.functions.direct_transports import own_transports
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.worker.spec import RunSpec

if TYPE_CHECKING:
    from ephemeron.training.worker.invocation import InvocationContext

DRAIN_S = 5.0
"""Seconds for what was sent last to leave this function."""


@dataclass(frozen=True, slots=True)
class DirectExchange:
    """Connections of one invocation to the other ranks."""

    mesh: Mesh
    channel: PeerChannel | PushedChannel

    @property
    def in_memory(self) -> bool:
        """See `keeps_in_memory`."""
        return isinstance(self.channel, PeerChannel)

    @property
    def traffic(self) -> Traffic:
        """Bytes so far."""
        return Traffic(direct_bytes_sent=self.mesh.sent_bytes, direct_bytes_received=self.mesh.received_bytes)

    async def close(self) -> None:
        """Leaves the other members."""
        await self.channel.leave()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self.mesh.drained()
        except TimeoutError:
            pass  # a member that takes nothing any more: its replacement asks the others
        finally:
            await self.mesh.close()


async def join_members(invocation: InvocationContext, spec: RunSpec, *, waits: bool = False) -> None:
    """Connects an invocation to the other ranks of its generation, where the run's channel is direct.

    Args:
        invocation: joins.
        spec: of the run.
        waits: it is a successor, and takes its predecessor's place in `become_member`.

    Raises:
        ChannelUnreachable: the store does not answer.
    """
    ctx = invocation.ctx
    if not exchanges_directly(spec):
        return
    mesh = await Mesh.join(
        store=invocation.channel,
        rank=invocation.rank,
        attempt=invocation.attempt,
        ranks=spec.configuration.workers,
        keys=invocation.keys,
        token=token_of(ctx.call.key, ctx.call.run),
        transports=transports_of(invocation),
        waits=waits,
    )
    exchange, store = exchange_of(spec, invocation.keys), invocation.channel
    channel: PeerChannel | PushedChannel
    if keeps_in_memory(spec):
        channel = PeerChannel(store, mesh, exchange, drops=invocation.faults.drops)
    else:
        channel = PushedChannel(store, mesh, exchange)
    invocation.direct = DirectExchange(mesh, channel)


def become_member(invocation: InvocationContext) -> None:
    """The others send to this successor from now on, and no more to its predecessor."""
    if invocation.direct is not None:
        invocation.direct.mesh.become_member(invocation.channel)


def exchanges_directly(spec: RunSpec) -> bool:
    """Whether the ranks of a run connect to each other."""
    return spec.configuration.direct and spec.configuration.workers > 1


def keeps_in_memory(spec: RunSpec) -> bool:
    """Whether what the ranks of a run exchange is in their memory alone.

    Not where ranks run ahead of each other: a function that hands off then has contributions that others have not used yet, and
    all may hand off at once.
    """
    return exchanges_directly(spec) and policy_for(spec.configuration.sync).deterministic


def transports_of(invocation: InvocationContext) -> list[Transport]:
    """Ways in which an invocation can connect."""
    ctx, faults = invocation.ctx, invocation.faults
    transports = own_transports() if ctx.transports is None else ctx.transports()
    return faults.cuts.around(transports) if faults.cuts_connections else transports


def token_of(key: str, run: str) -> str:
    """Token with which the functions of a run prove themselves to each other.

    Args:
        key: of the run, in hexadecimal digits: see `communication.signing`.
        run: its name.
    """
    return hmac.digest(bytes.fromhex(key), f"direct/{run}".encode(), hashlib.sha256).hex()


def exchange_of(spec: RunSpec, keys: Keys) -> Callable[[str], Exchange | None]:
    """Who exchanges which objects of a run: see `communication.keys`."""
    prefix, stages = f"{keys.run}/", spec.stages
    members = range(spec.configuration.workers if stages is None else stages.replicas)

    def rank(stage: int, member: int) -> int:
        return member if stages is None else stages.rank(stage, member)

    def exchange(key: str) -> Exchange | None:
        kind, _, name = key.removeprefix(prefix).partition("/")
        if kind == "x":
            return Exchange(None, None)
        group = kind[1:].partition(".")[0]
        if kind[:1] != "g" or not group.isdigit():
            return None
        _, what, first, *rest = name.split(".")
        stage = int(group)
        if what == "c":
            return Exchange(rank(stage, int(first)), [rank(stage, int(rest[0]))])
        return Exchange(rank(stage, int(first)), [rank(stage, m) for m in members])

    return exchange
