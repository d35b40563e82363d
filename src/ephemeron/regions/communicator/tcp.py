"""Communication of regions over TCP: each connection carries pieces of updates in both directions, whichever end has opened it.

The store that all regions reach has the table of members only, with their endpoints, and the last updates of a region that has left before others
had them. What is durable is in each region's own channel: a replacement publishes what its predecessor has stored there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.rpc.client import Client
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.options import Options
from ephemeron.communication.rpc.server import Server
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelTimeout, EphemeronError, JobError, RegionSuperseded, RemoteError, UpdateForgotten
from ephemeron.regions.communicator.base import Communicator, LinkEstimate, Member, PeerTraffic, Update, Watermarks
from ephemeron.regions.communicator.members import MemberTable
from ephemeron.regions.communicator.network import RegionNetwork
from ephemeron.regions.communicator.peer import Hello, News, Peer, Route, Snapshots, call_peer, newest_snapshot, watch
from ephemeron.regions.communicator.pieces import Cursor, Inbox, Outbox, get_update, put_update

_OPTIONS = Options(compress=False)
_RETRY_S = (0.2, 2.0)
_LOOK_S = 2.0
"""Shortest time between two looks at the table of members."""
_CROSSING_S = 2.0
"""Where both ends open a connection within this time, that of the smaller name stays."""
LEAVE_S = 10.0
LIMIT_BYTES = 1 << 30
_log = logging.getLogger(__name__)


class TcpCommunicator(Communicator):
    """Updates over connections between regions.

    Args:
        channel: a store that all regions reach, for the table of members.
        network: of this region.
        run: of all regions: prefix of the keys.
        token: of the run, which both ends of a connection prove.
        region, identity, fence: see `Communicator`.
        names: all regions that take part from the beginning.
        limit_bytes: of own updates that are kept for slow regions.
        leave_s: time for which `leave` waits for them.
    """

    def __init__(
        self,
        channel: Channel,
        network: RegionNetwork,
        *,
        run: str,
        token: str,
        region: str,
        identity: str,
        fence: int,
        names: Sequence[str],
        limit_bytes: int = LIMIT_BYTES,
        leave_s: float = LEAVE_S,
    ) -> None:
        super().__init__(region, identity=identity, fence=fence)
        self._channel, self._network, self._token, self._leave_s = channel, network, token, leave_s
        self._prefix, self._since = f"{run}/groups", 0
        self.table = MemberTable(channel, prefix=self._prefix, region=region, identity=identity, fence=fence)
        others = [name for name in names if name != region]
        self._outbox, self._inbox, self._snapshots = Outbox(others, limit_bytes=limit_bytes), Inbox(), Snapshots()
        self._peers: dict[str, Peer] = {}
        self._changed = asyncio.Event()
        self._superseded: RegionSuperseded | None = None
        self._failure: BaseException | None = None
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._looking = asyncio.Lock()
        self._looked = float("-inf")
        self._members: Sequence[Member] = ()
        for name in others:
            self._peer(name)

    async def __aenter__(self) -> Self:
        self.endpoint = await self._network.open(self._accepted)
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = list(self._keeping.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._network.close()

    # -- members --------------------------------------------------------------------------------------------

    async def join(self, *, since: int = 0, enters: bool = False) -> Sequence[Member]:
        known = await self.table.join(since=since, endpoint=self.endpoint, enters=enters)
        self._since = since if known is None else known.since
        await self._look(at_once=True)
        for name in self._peers:
            self._keep(name)
        return self._members

    async def admit(self, region: str) -> None:
        peer = self._peer(region)
        self._outbox.join(region, since=0)
        if peer.left is not None:  # it comes back, as another launch
            peer.left, peer.identity = None, ""
        self._keep(region)

    async def dismiss(self, region: str) -> None:
        self._outbox.leave(region)
        self._change_now()

    async def leave(self, *, after: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._leave_s):
                while any(self._is_owed(peer) for peer in self._peers.values()):
                    await self._change()
        late = [p.region for p in self._peers.values() if self._outbox.is_awaited(p.region)]
        for update in self._outbox.updates:
            if any(self._outbox.is_needed_by(name, (update.fragment, update.round)) for name in late):
                await put_update(self._channel, self._prefix, update)
        await self.table.leave(after=after)

    async def members(self) -> Sequence[Member]:
        await self._look(at_once=True)
        return self._members

    def _is_owed(self, peer: Peer) -> bool:
        """Whether a region lacks updates of this one, or does not know what this one needs no more."""
        if peer.left is not None:
            return False
        return self._outbox.is_awaited(peer.region) or peer.told != self._inbox.acknowledged.get(peer.region, {})

    async def _look(self, *, at_once: bool = False) -> None:
        """Reads the table of members, unless that was done a moment ago."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            if not at_once and loop.time() - self._looked < _LOOK_S:
                return
            self._members = await self.table.members()
            self._looked = loop.time()
            for member in self._members:
                if member.region == self.region:
                    if member.identity == self.identity and member.fence > self.fence:
                        self._superseded = RegionSuperseded(f"attempt {member.fence} of region {self.region} has joined")
                    continue
                await self._learn(member)

    async def _learn(self, member: Member) -> None:
        peer = self._peer(member.region)
        if peer.identity not in ("", member.identity) or member.fence > peer.fence:
            peer.disconnect()  # of a function that was replaced
        peer.identity, peer.fence, peer.endpoint = member.identity, max(member.fence, peer.fence), member.endpoint
        if member.left is None:
            self._outbox.join(member.region, since=member.since)
        if member.left is not None and peer.left is None:
            peer.left = member.left
            await self._read_left(member.region)
            self._outbox.leave(member.region)
            self._change_now()

    async def _read_left(self, region: str) -> None:
        """Reads what a region has left in the store as it went."""
        for key in await self._channel.list(f"{self._prefix}/{region}/"):
            update = await get_update(self._channel, key, region)
            if update is not None:
                self._inbox.add(update)

    def _peer(self, name: str) -> Peer:
        if name not in self._peers:
            self._peers[name] = Peer(name, self._outbox, self._inbox, self._change_now)
            if self._keeping:
                self._keep(name)
        return self._peers[name]

    # -- updates --------------------------------------------------------------------------------------------

    async def publish(self, update: Update) -> None:
        if self._superseded is not None:
            raise self._superseded
        if self._outbox.add(update):
            for peer in self._peers.values():
                peer.wake(news=bool(self._outbox.first))

    async def get(self, region: str, fragment: int, round: int, *, deadline: float) -> Update:
        while True:
            own = self._outbox.get(fragment, round) if region == self.region else None
            found = own or self._inbox.updates.get((region, fragment, round))
            if found is not None:
                return found
            if self._inbox.is_forgotten(region, fragment, round):
                raise UpdateForgotten(f"region {region} keeps round {round} of fragment {fragment} no more")
            try:
                async with asyncio.timeout_at(deadline):
                    await self._change()
            except TimeoutError:
                raise ChannelTimeout(f"region {region} has not sent round {round} of fragment {fragment}") from None

    def arrived(self, after: Watermarks) -> Sequence[Update]:
        updates = self._inbox.updates.values()
        found = (u for u in updates if u.round > after.get(u.region, {}).get(u.fragment, 0))
        return sorted(found, key=lambda u: (u.region, u.fragment, u.round))

    async def acknowledge(self, region: str, fragment: int, round: int) -> None:
        if self._inbox.acknowledge(region, fragment, round) and region in self._peers:
            self._peers[region].wake(news=True)

    async def put_snapshot(self, round: int, data: bytes) -> None:
        self._snapshots.put(round, data)

    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        await self._look(at_once=True)
        hello = self._hello(None, observer=True)
        return await newest_snapshot(self._members, hello, self._dial, own=self._snapshots.newest, region=self.region)

    @property
    def meter(self) -> Mapping[str, PeerTraffic]:
        return {name: peer.traffic for name, peer in self._peers.items()}

    @property
    def links(self) -> Mapping[str, LinkEstimate]:
        return {name: peer.link for name, peer in self._peers.items()}

    def _change_now(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        if self._failure is not None:
            raise self._failure
        await self._changed.wait()

    # -- connections that this end opens ----------------------------------------------------------------------

    def _keep(self, name: str) -> None:
        if name not in self._keeping:
            task = asyncio.get_running_loop().create_task(self._connected(self._peers[name]))
            task.add_done_callback(self._ended)
            self._keeping[name] = task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = failure
            self._change_now()

    async def _connected(self, peer: Peer) -> None:
        """Keeps a connection with a region, as long as it takes part."""
        pause_s = _RETRY_S[0]
        while peer.left is None or self._outbox.is_awaited(peer.region):
            if peer.route is not None:
                await peer.unrouted.wait()
                pause_s = _RETRY_S[0]
            if self._network.can_dial(peer.endpoint):
                try:
                    await self._exchange(peer)
                except* (OSError, EphemeronError) as e:
                    _log.debug("region %s is not connected to region %s: %s", self.region, peer.region, e.exceptions)
            if peer.route is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s * random.uniform(0.5, 1.0)):
                        await peer.routed.wait()
                        continue
                pause_s = min(2 * pause_s, _RETRY_S[1])
                with contextlib.suppress(EphemeronError):
                    await self._look()

    async def _dial(self, endpoint: str, region: str) -> Client:
        sock = await self._network.dial(endpoint, region=region)
        return await Client.connect_socket(sock, token=self._token, options=_OPTIONS)

    async def _exchange(self, peer: Peer) -> None:
        async with await self._dial(peer.endpoint, peer.region) as client:
            try:
                answer, _ = await client.call("hello", plain(self._hello(peer)), timeout_s=5.0)
            except RemoteError as e:
                if e.type == RegionSuperseded.__name__:
                    self._superseded = RegionSuperseded(str(e))
                raise
            theirs = build(Hello, answer, where="hello")
            ended = asyncio.Event()
            route = self._route(peer, theirs, ended.set, client.wire, opened_here=True)
            try:
                await _until(ended, call_peer(peer, route, client))
            finally:
                peer.disconnect(route)

    def _hello(self, peer: Peer | None, *, observer: bool = False) -> Hello:
        have = () if peer is None else tuple((f, r, n) for f, r, n in self._inbox.have(peer.region))
        return Hello(
            region=self.region,
            identity=self.identity,
            fence=self.fence,
            since=self._since,
            have=have,
            observer=observer,
            news=News() if peer is None else peer.news(),
        )

    def _route(self, peer: Peer, theirs: Hello, close: Callable[[], None], wire: FrameSocket, *, opened_here: bool) -> Route:
        """A new connection to a region, in use from now on."""
        if (theirs.region, theirs.identity) != (peer.region, peer.identity):
            raise JobError(f"region {theirs.region} of {theirs.identity} answers in place of region {peer.region}")
        peer.fence = max(theirs.fence, peer.fence)
        self._outbox.join(peer.region, since=theirs.since)
        peer.told = {}
        peer.take_news(theirs.news)
        route = Route(
            Cursor(self._outbox, peer.region, theirs.have),
            close,
            wire,
            now=asyncio.get_running_loop().time(),
            fence=theirs.fence,
            opened_here=opened_here,
        )
        peer.connect(route)
        return route

    # -- connections that other ends open ---------------------------------------------------------------------

    async def _accepted(self, sock: Any, names: frozenset[str] | None) -> None:
        served = _Served(self, names)
        ended, server = asyncio.Event(), Server(served.answer, token=self._token, options=_OPTIONS)
        served.close = ended.set
        try:
            with contextlib.suppress(OSError):
                await _until(ended, server.serve(sock, begun=served.begun))
        finally:
            served.end()

    async def checked(self, theirs: Hello) -> Peer:
        """The region that has opened a connection.

        Raises:
            JobError: it is no member, or another launch of one.
            RegionSuperseded: a newer attempt of it has joined.
        """
        peer = self._peers.get(theirs.region)
        if peer is None or peer.identity != theirs.identity or theirs.fence > peer.fence:
            await self._look(at_once=True)
            peer = self._peers.get(theirs.region)
        if peer is None or theirs.region == self.region:
            raise JobError(f"region {theirs.region} does not take part")
        if peer.identity != theirs.identity:
            raise JobError(f"region {theirs.region} takes part already, as {peer.identity}")
        if theirs.fence < peer.fence:
            raise RegionSuperseded(f"attempt {peer.fence} of region {theirs.region} has joined")
        route, now = peer.route, asyncio.get_running_loop().time()
        crossing = route is not None and route.opened_here and now - route.began < _CROSSING_S
        if crossing and self.region < theirs.region and route is not None and route.fence == theirs.fence:
            raise JobError(f"region {self.region} has just opened a connection itself")
        return peer


class _Served:
    """A connection that another end has opened.

    Args:
        communicator: of this end.
        names: in the other end's certificate.
    """

    def __init__(self, communicator: TcpCommunicator, names: frozenset[str] | None) -> None:
        self._c, self._names = communicator, names
        self.close: Callable[[], None] = lambda: None
        self._wire: FrameSocket | None = None
        self._peer: Peer | None = None
        self._route: Route | None = None
        self._watching: asyncio.Task[None] | None = None

    def begun(self, wire: FrameSocket) -> None:
        self._wire = wire

    def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._peer is not None:
            self._peer.disconnect(self._route)

    async def answer(self, method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[Mapping[str, object], Sequence[Any]]:
        if method == "hello":
            return await self._hello(build(Hello, params, where="hello")), []
        if method == "snapshot":
            return self._c._snapshots.answer(params)
        peer, route = self._peer, self._route
        if peer is None or route is None or peer.route is not route:
            raise JobError("this connection is not the region's newest one")
        now = route.heard = asyncio.get_running_loop().time()
        if method == "push":
            peer.take_piece(params["u"], buffers[0], now)
            return {}, []
        if method == "pull":
            piece = await peer.next_piece(route, or_news=True)
            if piece is not None:
                return {"u": plain(piece.head)}, [piece.data]
        if method in ("pull", "ping"):
            if method == "ping":
                peer.take_news(params)
            said = peer.news()
            peer.knows(said)
            return (plain(said) if method == "ping" else {"x": plain(said)}), []
        raise LookupError(f"no method {method!r}")

    async def _hello(self, theirs: Hello) -> dict[str, Any]:
        if self._names is not None and theirs.region not in self._names:
            raise JobError(f"the certificate is not that of region {theirs.region}")
        if theirs.observer:
            return dict(plain(self._c._hello(None)))
        peer = await self._c.checked(theirs)
        said = self._c._hello(peer)
        assert self._wire is not None
        self._peer, self._route = peer, self._c._route(peer, theirs, self.close, self._wire, opened_here=False)
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._route))
        return dict(plain(said))

    async def _watch(self, route: Route) -> None:
        try:
            await watch(route)
        except ConnectionResetError:
            self.close()


async def _until(ended: asyncio.Event, work: Any) -> None:
    """Does work until it ends or `ended` is set."""
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        for each in (task, waiting):
            each.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
