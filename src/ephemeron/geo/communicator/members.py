"""Regions that take part in a run, as objects of a store that all reach.

RUN/groups/members/REGION.FENCE      create-only: that a region takes part, by one of its attempts
RUN/groups/left/REGION               the last round that it takes part in
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError, KeyExists, RegionSuperseded
from ephemeron.geo.communicator.base import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joined:
    """What the object of a member says."""

    identity: str = ""
    since: int = 0
    endpoint: str = ""


class MemberTable:
    """The table, as one region sees and changes it.

    Args:
        channel: the store.
        prefix: of all keys that regions share.
        region, identity, fence: of this region; see `Communicator`.
    """

    def __init__(self, channel: Channel, *, prefix: str, region: str, identity: str, fence: int) -> None:
        self._channel, self._prefix = channel, prefix
        self._region, self._identity, self._fence = region, identity, fence

    async def join(self, *, since: int = 0, endpoint: str = "") -> Member | None:
        """Adds this attempt; returns what the table has said of the region before.

        Raises:
            JobError: another launch of the region takes part and has not left.
            RegionSuperseded: a newer attempt has joined.
        """
        known = {member.region: member for member in await self.members()}.get(self._region)
        self._check(known)
        joined = _Joined(identity=self._identity, since=since if known is None else known.since, endpoint=endpoint)
        key = f"{self._prefix}/members/{self._region}.{self._fence:07d}"
        try:
            await self._channel.put(key, [json.dumps(plain(joined)).encode()], create=True)
        except KeyExists:  # this attempt, that joins again, or another launch that has joined meanwhile
            self._check({member.region: member for member in await self.members()}.get(self._region))
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

    async def leave(self, *, after: int) -> None:
        """Says that this region takes part in no round after `after`."""
        await self._channel.put(f"{self._prefix}/left/{self._region}", [str(after).encode()])

    async def members(self) -> Sequence[Member]:
        """All members, sorted by name, each with its newest attempt."""
        newest: dict[str, tuple[int, str]] = {}
        for key in await self._channel.list(f"{self._prefix}/members/"):
            region, _, number = key.rpartition("/")[2].rpartition(".")
            newest[region] = max((int(number), key), newest.get(region, (0, "")))
        found = []
        for region, (fence, key) in sorted(newest.items()):
            joined = build(_Joined, json.loads(bytes(await self._channel.fetch(key) or b"{}")), where=key)
            left = await self._channel.fetch(f"{self._prefix}/left/{region}")
            found.append(
                Member(
                    region=region, identity=joined.identity, fence=fence, endpoint=joined.endpoint, since=joined.since,
                    left=None if left is None else int(bytes(left)),
                )
            )  # fmt: skip
        return found
