"""Communication of regions through a store that all reach: where nothing may listen, or connect to another region.

RUN/groups/REGION/FRAGMENT.ROUND     create-only: an update
RUN/groups/snapshot/REGION           newest state for those that join

Members are in the same store (`members`). An update says which rounds of others its sender needs no more, so these are deleted without further requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.config.typed import build, plain
from ephemeron.errors import ChannelTimeout, CorruptMessage, DamagedObject, JobError, KeyExists
from ephemeron.regions.communicator.base import Communicator, LinkEstimate, Member, PeerTraffic, Update, Watermarks
from ephemeron.regions.communicator.members import MemberTable

_LENGTH, _ROUND = struct.Struct("<I"), struct.Struct("<q")
_WATCH_S = 60.0
"""Deadline of one wait for an update that is not needed yet."""
_LEAST_SHARE = 0.05
"""Part of a transfer's time that its bytes have taken at least, as far as such times can be told apart."""
_RECENT = 0.3
"""Weight of the latest measurement in an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """What an object says beside the payload."""

    fence: int
    samples: int
    norm: float | None
    """None: it is not finite, which JSON cannot say."""
    needs_after: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By region and fragment, rounds that the sender needs no more."""


class StoreCommunicator(Communicator):
    """Updates as objects of a store.

    Args:
        channel: the store.
        run: of all regions: prefix of the keys.
        region, identity, fence: see `Communicator`.
        names: all regions.
    """

    def __init__(self, channel: Channel, *, run: str, region: str, identity: str, fence: int, names: Sequence[str]) -> None:
        super().__init__(region, identity=identity, fence=fence)
        self._channel, self._prefix = channel, f"{run}/groups"
        self.table = MemberTable(channel, prefix=self._prefix, region=region, identity=identity, fence=fence)
        self._others = [name for name in names if name != region]
        self._sent = self._received = 0
        self._links: dict[str, LinkEstimate] = {}
        self._request_s: float | None = None
        """Shortest time of a request; None: none was measured."""
        self._here: dict[tuple[str, int, int], Update] = {}
        self._needs_after: dict[str, dict[int, int]] = {name: {} for name in self._others}
        self._acknowledged: dict[str, dict[int, int]] = {name: {} for name in self._others}
        self._published: set[tuple[int, int]] = set()
        self._watching: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._awaited: dict[tuple[str, int], int] = {}
        """By region and fragment: the round that `_watch` waits for."""
        self._news = asyncio.Event()
        """An update has come."""
        self._sending: list[asyncio.Task[None]] = []

    async def __aexit__(self, *exc: object) -> None:
        tasks = [*self._watching.values(), *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def join(self, *, since: int = 0, enters: bool = False) -> Sequence[Member]:
        if await self.table.join(since=since, enters=enters) is not None:  # earlier attempts have left rounds
            self._published.update(map(_fragment_and_round, await self._channel.list(f"{self._prefix}/{self.region}/")))
        return await self.members()

    async def leave(self, *, after: int) -> None:
        for task in self._sending:
            await task
        await self.table.leave(after=after)

    async def admit(self, region: str) -> None:
        if region not in self._others:
            self._others.append(region)
        self._needs_after.setdefault(region, {})
        self._acknowledged.setdefault(region, {})

    async def dismiss(self, region: str) -> None:
        self._acknowledged.pop(region, None)

    async def members(self) -> Sequence[Member]:
        return await self.table.members()

    async def publish(self, update: Update) -> None:
        head = _Head(
            fence=update.fence,
            samples=update.samples,
            norm=update.norm if update.norm < float("inf") else None,
            needs_after={region: {str(f): n for f, n in rounds.items()} for region, rounds in self._needs_after.items()},
        )
        text = json.dumps(plain(head), separators=(",", ":")).encode()
        buffers = [_LENGTH.pack(len(text)), text, update.payload]
        for ended in [task for task in self._sending if task.done()]:
            self._sending.remove(ended)
            ended.result()
        self._sending.append(asyncio.create_task(self._put(update, buffers)))
        self._sending.append(asyncio.create_task(self._delete_acknowledged()))  # a request that training need not wait for

    async def _put(self, update: Update, buffers: Sequence[Buffer]) -> None:
        key = self._key(self.region, update.fragment, update.round)
        try:
            await self._channel.put(key, buffers, create=True)
        except KeyExists:  # an earlier attempt has put the same values
            try:
                await self._channel.fetch(key)
            except DamagedObject:
                await self._channel.put(key, buffers)
        self._sent += sum(map(len, buffers))
        self._published.add((update.fragment, update.round))

    async def get(self, region: str, fragment: int, round: int, *, deadline: float) -> Update:
        known = self._here.get((region, fragment, round))
        if known is not None:
            return known
        if round >= self._awaited.get((region, fragment), sys.maxsize):
            return await self._watched(region, fragment, round, deadline)
        return await self._receive(region, fragment, round, deadline)

    async def _watched(self, region: str, fragment: int, round: int, deadline: float) -> Update:
        """An update that `_watch` receives: it is read once."""
        loop, watching = asyncio.get_running_loop(), self._watching[region, fragment]
        while (region, fragment, round) not in self._here:
            if watching.done():
                watching.result()
            left_s = deadline - loop.time()
            if left_s <= 0:
                raise ChannelTimeout("nothing there yet", key=self._key(region, fragment, round))
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), left_s)
        return self._here[region, fragment, round]

    async def _receive(self, region: str, fragment: int, round: int, deadline: float) -> Update:
        key, loop = self._key(region, fragment, round), asyncio.get_running_loop()
        began = loop.time()
        received = await self._channel.get(key, deadline=deadline)
        self._measure(region, len(received.data), loop.time() - began - received.waited_s)
        self._received += len(received.data)
        update = self._decode(received.data, key, region, fragment, round)
        self._here[region, fragment, round] = update
        self._news.set()
        return update

    def arrived(self, after: Watermarks) -> Sequence[Update]:
        for region in self._others:
            for fragment in {0, *after.get(region, {})}:
                if (region, fragment) not in self._watching:
                    first = after.get(region, {}).get(fragment, 0) + 1
                    self._awaited[region, fragment] = first
                    task = self._watching[region, fragment] = asyncio.create_task(self._watch(region, fragment, first))
                    task.add_done_callback(lambda _: self._news.set())
                elif (task := self._watching[region, fragment]).done():
                    task.result()  # an update that is damaged, or a store that does not answer
        found = (u for u in self._here.values() if u.round > after.get(u.region, {}).get(u.fragment, 0))
        return sorted(found, key=lambda u: (u.region, u.fragment, u.round))

    async def acknowledge(self, region: str, fragment: int, round: int) -> None:
        known = self._needs_after.setdefault(region, {})
        known[fragment] = max(known.get(fragment, 0), round)
        for key in [k for k in self._here if k[:2] == (region, fragment) and k[2] <= known[fragment]]:
            del self._here[key]

    async def put_snapshot(self, round: int, data: bytes) -> None:
        await self._channel.put(f"{self._prefix}/snapshot/{self.region}", [_ROUND.pack(round), data])

    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        found = [await self._channel.fetch(key) for key in await self._channel.list(f"{self._prefix}/snapshot/")]
        known = [(int(_ROUND.unpack_from(data)[0]), bytes(data[_ROUND.size :])) for data in found if data is not None]
        return max(known, default=None, key=lambda each: each[0])

    @property
    def meter(self) -> Mapping[str, PeerTraffic]:
        return {"": PeerTraffic(sent=self._sent, received=self._received)}

    @property
    def links(self) -> Mapping[str, LinkEstimate]:
        return self._links

    def _all_need_after(self, fragment: int) -> int:
        """Latest round of a fragment that no other region needs any more."""
        return min((rounds.get(fragment, 0) for rounds in self._acknowledged.values()), default=0)

    async def _watch(self, region: str, fragment: int, number: int) -> None:
        """Reads the updates of a fragment of another region as they come."""
        loop = asyncio.get_running_loop()
        while True:
            number = max(number, self._needs_after[region].get(fragment, 0) + 1)
            self._awaited[region, fragment] = number
            try:
                await self._receive(region, fragment, number, loop.time() + _WATCH_S)
            except ChannelTimeout:
                continue
            number += 1

    def _decode(self, data: memoryview, key: str, region: str, fragment: int, round: int) -> Update:
        try:
            size = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
            head = build(_Head, json.loads(bytes(data[_LENGTH.size : size])), where=key)
        except (struct.error, ValueError, JobError) as e:
            raise CorruptMessage(f"not an update of a region: {e}", key=key) from None
        known = self._acknowledged.get(region, {})
        for of, number in head.needs_after.get(self.region, {}).items():
            known[int(of)] = max(known.get(int(of), 0), number)
        return Update(
            region=region,
            fence=head.fence,
            fragment=fragment,
            round=round,
            samples=head.samples,
            norm=float("inf") if head.norm is None else head.norm,
            payload=bytes(data[size:]),
        )

    async def _delete_acknowledged(self) -> None:
        done = {(fragment, number) for fragment, number in self._published if number <= self._all_need_after(fragment)}
        await self._delete(self._key(self.region, fragment, number) for fragment, number in done)
        self._published -= done

    async def _delete(self, keys: Iterable[str]) -> None:
        if gone := list(keys):
            await self._channel.delete(gone)

    def _measure(self, region: str, nbytes: int, seconds: float) -> None:
        """Takes in the time of a transfer: that of a request without data, and the rest for its bytes."""
        if seconds <= 0:
            return
        self._request_s = min(self.table.request_s or seconds, seconds) if self._request_s is None else min(self._request_s, seconds)
        known = self._links.get(region)
        rate = nbytes / max(seconds - self._request_s, _LEAST_SHARE * seconds)
        if known is not None and known.bandwidth is not None:
            rate = _RECENT * rate + (1 - _RECENT) * known.bandwidth
        self._links[region] = LinkEstimate(bandwidth=rate, round_trip_s=2 * self._request_s)

    def _key(self, region: str, fragment: int, round: int) -> str:
        return f"{self._prefix}/{region}/{fragment}.{round:07d}"


def _fragment_and_round(key: str) -> tuple[int, int]:
    fragment, _, number = key.rpartition("/")[2].partition(".")
    return int(fragment), int(number)
