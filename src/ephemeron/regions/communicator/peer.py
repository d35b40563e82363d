"""One other region, as the TCP communicator knows it, and the connection with it.

There is one connection at a time, opened by either end. The end that has opened it calls: `hello` first, then `push` with pieces of its
own updates, `pull` for those of the other end (as many at once as keep a long link busy; each is answered when there is a piece), and `ping`
each two seconds, or as soon as there are news: rounds that are needed no more. So both ends send what they have at once, and notice within `SILENCE_S` that
the other one is not heard, whichever of them may open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.communication.rpc.client import Client
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelTimeout, EphemeronError, JobError, ProtocolError
from ephemeron.regions.communicator.base import LinkEstimate, Member, PeerTraffic
from ephemeron.regions.communicator.pieces import PIECE_BYTES, Cursor, Inbox, Outbox, Piece

PING_S = 2.0
SILENCE_S = 6.0
"""Without a message of the other end: the connection is given up."""
WINDOW = 32
"""Pieces on their way in each direction at most."""
_RECENT = 0.3
"""Weight of the latest measurement in an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What either end says beside updates."""

    needs_after: Mapping[str, int] = field(default_factory=dict)
    """By fragment, rounds of the other end that this one needs no more."""
    first: Mapping[str, int] = field(default_factory=dict)
    """By fragment, first round that this end has not forgotten for lack of room."""
    round_trip_s: float | None = None
    """As the end that calls has measured it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First message of either end."""

    region: str
    identity: str
    fence: int
    since: int = 0
    have: tuple[tuple[int, int, int], ...] = ()
    """What has arrived of the other end; see `pieces.Have`."""
    news: News = field(default_factory=News)
    observer: bool = False
    """Whether this end wants snapshots only, and takes part in nothing."""


class Route:
    """A connection with the other region, opened by either end.

    Args:
        cursor: what is sent over it.
        close: ends it.
        wire: whose bytes are counted.
        now: loop time.
        fence: attempt of the other end.
        opened_here: whether this end has opened it.
    """

    def __init__(self, cursor: Cursor, close: Callable[[], None], wire: FrameSocket, *, now: float, fence: int, opened_here: bool) -> None:
        self.cursor, self.close, self._wire = cursor, close, wire
        self.began, self.fence, self.opened_here = now, fence, opened_here
        self.heard = now
        self.wake = asyncio.Event()
        """Set when there may be a piece to send."""
        self.news = asyncio.Event()
        """Set when there are news to send."""
        self.news.set()

    @property
    def traffic(self) -> PeerTraffic:
        """Bytes over it so far."""
        wire, (sent, received) = self._wire, self._wire.kernel_bytes
        return PeerTraffic(sent=wire.bytes_sent, received=wire.bytes_received, kernel_sent=sent, kernel_received=received)


class Peer:
    """One other region.

    Args:
        region: its name.
        outbox, inbox: of this region.
        arrived: called when an update, or news, have come.
    """

    def __init__(self, region: str, outbox: Outbox, inbox: Inbox, arrived: Callable[[], None]) -> None:
        self.region, self._outbox, self._inbox, self._arrived = region, outbox, inbox, arrived
        self.identity = ""
        self.fence = 0
        self.endpoint = ""
        self.left: int | None = None
        self.route: Route | None = None
        self.routed, self.unrouted = asyncio.Event(), asyncio.Event()
        self.unrouted.set()
        self.told: dict[int, int] = {}
        """By fragment, rounds of this region's `acknowledged` that have reached the other end."""
        self.link = LinkEstimate()
        self._before = PeerTraffic()
        self._begun: dict[tuple[int, int], float] = {}

    # -- connections ----------------------------------------------------------------------------------------

    def connect(self, route: Route) -> None:
        """Takes a new connection into use; an older one is closed."""
        self.disconnect()
        self.route = route
        self.routed.set()
        self.unrouted.clear()

    def disconnect(self, route: Route | None = None) -> None:
        """Gives up a connection, if it is the one in use; None: whichever is."""
        known = self.route
        if known is None or (route is not None and route is not known):
            return
        self.route = None
        self._before += known.traffic
        self.routed.clear()
        self.unrouted.set()
        known.close()

    @property
    def traffic(self) -> PeerTraffic:
        """Bytes so far over all connections."""
        return self._before if self.route is None else self._before + self.route.traffic

    def wake(self, *, news: bool = False) -> None:
        """There is something to send."""
        if self.route is not None:
            self.route.wake.set()
            if news:
                self.route.news.set()

    # -- messages -------------------------------------------------------------------------------------------

    def news(self) -> News:
        """News to send."""
        rounds = self._inbox.acknowledged.get(self.region, {})
        return News(
            needs_after={str(f): n for f, n in rounds.items()},
            first={str(f): n for f, n in self._outbox.first.items()},
            round_trip_s=self.link.round_trip_s,
        )

    def knows(self, news: News) -> None:
        """The other end has got news."""
        self.told |= {int(f): n for f, n in news.needs_after.items()}
        self._arrived()

    def take_news(self, raw: object) -> None:
        """Takes in news of the other end.

        Raises:
            ProtocolError: they are none.
        """
        try:
            said = raw if isinstance(raw, News) else build(News, raw, where="news")
            self._outbox.acknowledge(self.region, {int(f): n for f, n in said.needs_after.items()})
            self._inbox.forgotten(self.region, {int(f): n for f, n in said.first.items()})
        except (JobError, ValueError) as e:
            raise ProtocolError(f"region {self.region}: {e}") from None
        if self.link.round_trip_s is None and said.round_trip_s is not None:
            self.link = LinkEstimate(bandwidth=self.link.bandwidth, round_trip_s=said.round_trip_s)
        self._arrived()

    def take_piece(self, head: Mapping[str, Any], data: memoryview | bytes, now: float) -> None:
        """Takes in a piece.

        Raises:
            CorruptMessage: as `Inbox.take`.
        """
        update = self._inbox.take(self.region, head, data)
        key = int(head["f"]), int(head["r"])
        if update is None:
            self._begun.setdefault(key, now)
            return
        began = self._begun.pop(key, now)
        first = min(len(update.payload), len(data))
        if now > began and len(update.payload) > 4 * first:  # the first piece began the measurement
            self._measure_bandwidth((len(update.payload) - first) / (now - began))
        self._arrived()

    def measure_round_trip(self, seconds: float) -> None:
        """A short message was answered."""
        known = self.link.round_trip_s
        recent = seconds if known is None else min(seconds, known + _RECENT * (seconds - known))
        self.link = LinkEstimate(bandwidth=self.link.bandwidth, round_trip_s=recent)

    def _measure_bandwidth(self, rate: float) -> None:
        known = self.link.bandwidth
        recent = rate if known is None else _RECENT * rate + (1 - _RECENT) * known
        self.link = LinkEstimate(bandwidth=recent, round_trip_s=self.link.round_trip_s)

    async def next_piece(self, route: Route, *, or_news: bool = False) -> Piece | None:
        """The next piece to send over a connection, once there is one; None: there are news before, if they are wanted."""
        while (piece := route.cursor.next()) is None:
            if or_news and route.news.is_set():
                route.news.clear()
                return None
            route.wake.clear()
            await route.wake.wait()
        return piece


async def call_peer(peer: Peer, route: Route, client: Client) -> None:
    """Exchanges updates over a connection that this end has opened, after `hello`. Ends with an error.

    Raises:
        OSError, EphemeronError: the connection is lost.
    """
    loop, window = asyncio.get_running_loop(), asyncio.Semaphore(WINDOW)

    async def called(method: str, params: Mapping[str, Any], buffers: Any = ()) -> tuple[dict[str, Any], list[Any]]:
        answer = await client.call(method, params, buffers)
        route.heard = loop.time()
        return answer

    async def push_one(piece: Piece) -> None:
        try:
            await called("push", {"u": plain(piece.head)}, [piece.data])
        finally:
            window.release()

    async def push(group: asyncio.TaskGroup) -> None:
        while True:
            await window.acquire()
            piece = await peer.next_piece(route)
            assert piece is not None
            group.create_task(push_one(piece))

    async def pull() -> None:
        while True:
            reply, buffers = await called("pull", {})
            if "u" in reply:
                peer.take_piece(reply["u"], buffers[0], loop.time())
            else:
                peer.take_news(reply["x"])

    async def ping() -> None:
        while True:
            route.news.clear()
            said = peer.news()
            began = loop.time()
            reply, _ = await called("ping", plain(said))
            peer.measure_round_trip(loop.time() - began)
            peer.take_news(reply)
            peer.knows(said)
            try:
                async with asyncio.timeout(PING_S):
                    await route.news.wait()
            except TimeoutError:
                continue

    async with asyncio.TaskGroup() as group:
        group.create_task(push(group))
        group.create_task(ping())
        group.create_task(watch(route))
        for _ in range(WINDOW):
            group.create_task(pull())


async def watch(route: Route) -> None:
    """Waits until the other end is not heard any more.

    Raises:
        ConnectionResetError: now.
    """
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        await asyncio.sleep(PING_S / 4)
        if loop.time() - began > PING_S:  # this process has not run: what has come meanwhile was not read yet
            route.heard += loop.time() - began
        if loop.time() - route.heard > SILENCE_S:
            raise ConnectionResetError("the other region is not heard")


# -- the state of a run for regions that join ---------------------------------------------------------------------


_WINDOW = 4
"""Pieces on their way at once."""

Dial = Callable[[str, str], Awaitable[Client]]
"""Connects to the endpoint of a region."""


class Snapshots:
    """The newest state of this region, and the one before, which others may be reading."""

    def __init__(self) -> None:
        self._kept: dict[int, bytes] = {}

    @property
    def newest(self) -> tuple[int, bytes] | None:
        """With its round; None: there is none."""
        return max(self._kept.items(), default=None)

    def put(self, round: int, data: bytes) -> None:
        """Keeps the state after a round."""
        self._kept[round] = data
        for old in sorted(self._kept)[:-2]:
            del self._kept[old]

    def answer(self, params: Mapping[str, Any]) -> tuple[Mapping[str, object], Sequence[Any]]:
        """Answer to a request for a piece, or for round and size of the newest state if none is named."""
        if "r" not in params:
            newest = self.newest
            if newest is None:
                return {}, []
            return {"r": newest[0], "t": len(newest[1]), "c": zlib.crc32(newest[1])}, []
        data = self._kept.get(int(params["r"]))
        if data is None:
            raise LookupError("a newer state has replaced this one")
        at = int(params["o"])
        return {}, [memoryview(data)[at : at + PIECE_BYTES]]


async def newest_snapshot(
    members: Sequence[Member], hello: Hello, dial: Dial, *, own: tuple[int, bytes] | None, region: str
) -> tuple[int, bytes] | None:
    """The newest state that any member keeps.

    Args:
        members: of the run.
        hello: of this region, as an observer.
        dial: connects to a member.
        own: state of this region.
        region: this one.

    Raises:
        ChannelTimeout: members have states, and none could be read.
    """
    found: list[tuple[int, str]] = []
    async with contextlib.AsyncExitStack() as stack:
        clients: dict[str, tuple[Client, Mapping[str, Any]]] = {}
        for member in members:
            if member.region == region or member.left is not None or not member.endpoint:
                continue
            with contextlib.suppress(OSError, EphemeronError):
                client = await stack.enter_async_context(await dial(member.endpoint, member.region))
                await client.call("hello", plain(hello), timeout_s=SILENCE_S)
                said, _ = await client.call("snapshot", timeout_s=SILENCE_S)
                if said:
                    clients[member.region] = client, said
                    found.append((int(said["r"]), member.region))
        for number, name in sorted(found, reverse=True):
            if own is not None and own[0] >= number:
                break
            with contextlib.suppress(OSError, EphemeronError):
                data = await _read(*clients[name])
                if data is not None:
                    return number, data
    if own is None and found:
        raise ChannelTimeout("no member's state could be read")
    return own


async def _read(client: Client, said: Mapping[str, Any]) -> bytes | None:
    """A state in pieces, some of them on their way at once: enough for a long link, few enough to leave most of it to updates."""
    total, window = int(said["t"]), asyncio.Semaphore(_WINDOW)

    async def piece(at: int) -> bytes:
        async with window:
            _, (data,) = await client.call("snapshot", {"r": said["r"], "o": at}, timeout_s=SILENCE_S)
            return bytes(data)

    data = b"".join(await asyncio.gather(*(piece(at) for at in range(0, total, PIECE_BYTES))))
    return data if zlib.crc32(data) == said["c"] else None
