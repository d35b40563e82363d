"""Regions that take part in a run, as objects of a store that all reach.

RUN/groups/members/REGION.FENCE      create-only: that a region takes part, by one of its attempts
RUN/groups/left/REGION               the last round that it takes part in
RUN/groups/absent/REGION             create-only: its functions could not be started when the run began
RUN/groups/entrance                  the region that asks to join; one at a time
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, KeyExists, RegionSuperseded
from ephemeron.regions.communicator.base import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """What the object of a member says."""

    identity: str = ""
    since: int = 0
    endpoint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntranceRequest:
    """A region asks to join."""

    region: str
    ready: bool = False
    """Whether it has a state of the run and the rounds after it, so that no other region would wait for it."""
    number: int = 0
    """Grows as long as it asks: it lives."""


async def note_absent(channel: Channel, run: str, region: str) -> bool:
    """Says that a region could not be started, so that the others do not wait for it; returns whether they will not.

    It takes part already where one of its functions was started all the same.

    Args:
        channel: the store of all regions.
        run: of all regions.
        region: whose launch has failed.
    """
    prefix = f"{run}/groups"
    with contextlib.suppress(KeyExists):
        await channel.put(f"{prefix}/absent/{region}", [b"1"], create=True)
    return not await channel.list(f"{prefix}/members/{region}.")


class MemberTable:
    """The table, as one region sees and changes it.

    Args:
        channel: the store.
        prefix: of all keys that regions share.
        region, identity, fence: of this region; see `Communicator`.
    """

    def __init__(self, channel: Channel, *, prefix: str, region: str, identity: str, fence: int) -> None:
        self.channel, self._prefix = channel, prefix
        self._region, self._identity, self._fence = region, identity, fence
        self.request_s: float | None = None
        """Time of a request that carries nothing, as `join` has measured it."""

    async def join(self, *, since: int = 0, endpoint: str = "", enters: bool = False) -> Member | None:
        """Adds this attempt; returns what the table has said of the region before.

        Args:
            since: round after which it takes part.
            endpoint: see `Member`.
            enters: whether it knows that it joins a run that has begun.

        Raises:
            JobError: another launch of the region takes part and has not left.
            RegionSuperseded: a newer attempt has joined.
        """
        known = {member.region: member for member in await self.members()}.get(self._region)
        self._check(known)
        joined = _Joined(identity=self._identity, since=since if known is None else known.since, endpoint=endpoint)
        key = f"{self._prefix}/members/{self._region}.{self._fence:07d}"
        try:
            await self.channel.put(key, [json.dumps(plain(joined)).encode()], create=True)
        except KeyExists:  # this attempt, that joins again, or another launch that has joined meanwhile
            self._check({member.region: member for member in await self.members()}.get(self._region))
            await self.channel.put(key, [json.dumps(plain(joined)).encode()])  # it may listen elsewhere
        now = asyncio.get_running_loop().time
        began = now()
        absent = await self.is_absent(self._region)
        self.request_s = now() - began
        if enters:
            await self.channel.delete([f"{self._prefix}/left/{self._region}"])
        elif absent:
            raise RegionSuperseded(f"region {self._region} was started too late: the others train without it")
        return known

    def _check(self, known: Member | None) -> None:
        if known is None or known.left is not None:
            return
        if known.identity != self._identity:
            raise JobError(
                f"region {self._region} takes part already, as {known.identity}",
                remedy="end that run first, or give this region another name",
            )
        if known.fence > self._fence:
            raise RegionSuperseded(f"attempt {known.fence} of region {self._region} has joined")

    async def is_absent(self, region: str) -> bool:
        """Whether a region could not be started when the run began."""
        return await self.channel.fetch(f"{self._prefix}/absent/{region}") is not None

    async def ask(self, request: EntranceRequest) -> bool:
        """Asks to join; returns whether the request is the one that the others see: another region may be joining."""
        key = f"{self._prefix}/entrance"
        known = await self.asked()
        if known is not None and known.region == request.region:
            await self.channel.put(key, [json.dumps(plain(request)).encode()])
            return True
        try:
            await self.channel.put(key, [json.dumps(plain(request)).encode()], create=True)
        except KeyExists:
            return False
        return True

    async def asked(self) -> EntranceRequest | None:
        """The region that asks to join; None: there is none."""
        data = await self.channel.fetch(f"{self._prefix}/entrance")
        return None if data is None else build(EntranceRequest, json.loads(bytes(data)), where="entrance")

    async def withdraw(self) -> None:
        """This region has joined."""
        await self.channel.delete([f"{self._prefix}/entrance"])

    async def leave(self, *, after: int) -> None:
        """Says that this region takes part in no round after `after`."""
        await self.channel.put(f"{self._prefix}/left/{self._region}", [str(after).encode()])

    async def members(self) -> Sequence[Member]:
        """All members, sorted by name, each with its newest attempt."""
        newest: dict[str, tuple[int, str]] = {}
        for key in await self.channel.list(f"{self._prefix}/members/"):
            region, _, number = key.rpartition("/")[2].rpartition(".")
            newest[region] = max((int(number), key), newest.get(region, (0, "")))
        return await asyncio.gather(*(self._member(region, fence, key) for region, (fence, key) in sorted(newest.items())))

    async def _member(self, region: str, fence: int, key: str) -> Member:
        data, left = await asyncio.gather(self.channel.fetch(key), self.channel.fetch(f"{self._prefix}/left/{region}"))
        joined = build(_Joined, json.loads(bytes(data or b"{}")), where=key)
        return Member(
            region=region,
            identity=joined.identity,
            fence=fence,
            endpoint=joined.endpoint,
            since=joined.since,
            left=None if left is None else int(bytes(left)),
        )
