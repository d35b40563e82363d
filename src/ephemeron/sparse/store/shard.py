"""One process of a shard: it claims the shard, restores its state, serves, and hands over or ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import Count, Typed, Within
from ephemeron.errors import ChannelTimeout, JobError
from ephemeron.sparse.store.journal import Journal, JournalOptions
from ephemeron.sparse.store.messages import ShardStatus, Whole
from ephemeron.sparse.store.places import Claim, ShardPlace
from ephemeron.sparse.store.server import ShardServer, bind
from ephemeron.sparse.store.snapshot import recover
from ephemeron.sparse.store.state import ShardState

_log = logging.getLogger(__name__)

TOKEN_VARIABLE = "EPHEMERON_SPARSE_TOKEN"
"""Environment variable with a store's token."""
NAME = "sparse-store"
"""Name of a store, by default."""

End: TypeAlias = Literal["stopped", "replaced", "handed-over", "duplicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions(Typed):
    """Settings of one shard."""

    name: str = NAME
    shard: Whole = 0
    shards: Count = 1
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Within(0, 65535)] = 0
    """0: a free one."""
    allow_remote: bool = False
    """Whether other machines may reach it."""
    reached_at: str = ""
    """Host at which clients reach it; empty: `host`."""
    journal: JournalOptions = field(default_factory=JournalOptions)


class Shard:
    """One process of a shard.

    Args:
        options: of the shard.
        token: what clients must know.
        channel: framed, for snapshots, log and address; None: the state is lost with the process.
        ready: called with the address once it is served.
    """

    def __init__(
        self,
        options: ShardOptions,
        *,
        token: str,
        channel: Channel | None = None,
        ready: Callable[[str, int], None] = lambda host, port: None,
    ) -> None:
        self.options = options
        self.attempt = 1
        self.stop = asyncio.Event()
        """Set from outside: store what there is, and end."""
        self.hand_over = asyncio.Event()
        """Set from outside: end in favour of the next attempt."""
        self._token, self._channel, self._ready = token, channel, ready
        self._server: ShardServer | None = None

    @property
    def status(self) -> ShardStatus:
        """State and counts; empty before it is served."""
        return ShardStatus() if self._server is None else self._server.status()

    async def run(self, *, attempt: int | None = None, predecessor_until: float | None = None) -> End:
        """Serves until it is ended.

        Args:
            attempt: to claim; None: the next one, whether or not an earlier process lives.
            predecessor_until: loop time until which the process of the attempt before may hand over; None: do not wait.

        Returns:
            Why it ended. `duplicate`: another process has the attempt. `replaced`: a later one has taken over.

        Raises:
            JobError: the port is occupied, or the store has other settings.
            ChannelError: the channel cannot be read or written.
        """
        options = self.options
        sock = bind(options.host, options.port, allow_remote=options.allow_remote)
        try:
            if self._channel is None:
                return await self._serve(sock, ShardState(options.shard, options.shards), None)
            place = ShardPlace(self._channel, options.name, options.shard)
            if attempt is not None and attempt > 1 and predecessor_until is not None:
                await self._await_predecessor(place, attempt - 1, predecessor_until)
            if not await self._claim(place, sock, attempt):
                return "duplicate"
            state = await recover(place, options.shard, options.shards)
            return await self._serve(sock, state, place)
        finally:
            sock.close()

    async def _await_predecessor(self, place: ShardPlace, attempt: int, until: float) -> None:
        try:
            await place.channel.get(place.final(attempt), deadline=until)
        except ChannelTimeout:
            _log.warning("shard %d, attempt %d, has not handed over in time", place.shard, attempt)

    async def _claim(self, place: ShardPlace, sock: socket.socket, attempt: int | None) -> bool:
        host, port, *_ = sock.getsockname()
        claim = Claim(host=self.options.reached_at or host, port=port, shards=self.options.shards)
        last = await place.last_attempt()
        before = await place.read_claim(last) if last else None
        if before is not None and before.shards != self.options.shards:
            raise JobError(
                f"the sparse store {place.name!r} has {before.shards} shards, not {self.options.shards}",
                remedy="start it with the same number, or under another name",
            )
        self.attempt = attempt or last + 1
        while not await place.claim(self.attempt, claim):
            if attempt is not None:
                return False
            self.attempt += 1
        return True

    async def _serve(self, sock: socket.socket, state: ShardState, place: ShardPlace | None) -> End:
        replaced = asyncio.Event()
        server = self._server = ShardServer(state, token=self._token, attempt=self.attempt)
        server.on_stop = self.stop.set
        journal: Journal | None = None
        if place is not None:

            def ended() -> None:
                server.stop_answering()
                replaced.set()

            journal = Journal(place, state, self.attempt, self.options.journal, durable=server.acknowledge, ended=ended)
            server.journal = journal
            journal.start()
        try:
            await server.serve(sock)
            self._ready(*server.address)
            return await self._until_end(server, journal, replaced)
        finally:
            if journal is not None:
                await journal.close()
            await server.close()

    async def _until_end(self, server: ShardServer, journal: Journal | None, replaced: asyncio.Event) -> End:
        loop = asyncio.get_running_loop()
        ends: dict[asyncio.Task[object], End] = {
            loop.create_task(replaced.wait()): "replaced",
            loop.create_task(self.stop.wait()): "stopped",
            loop.create_task(self.hand_over.wait()): "handed-over",
        }
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            end = "replaced" if replaced.is_set() else ends[done.pop()]
            if end != "replaced" and journal is not None:
                handing = loop.create_task(journal.hand_over(server.stop_answering))
                fenced = next(task for task, name in ends.items() if name == "replaced")
                await asyncio.wait({handing, fenced}, return_when=asyncio.FIRST_COMPLETED)
                if fenced.done():
                    handing.cancel()
                    await asyncio.gather(handing, return_exceptions=True)
                    end = "replaced"
                else:
                    handing.result()
            if end == "replaced" and journal is not None and journal.failure is not None:
                raise journal.failure
            return end
        finally:
            for task in ends:
                task.cancel()
