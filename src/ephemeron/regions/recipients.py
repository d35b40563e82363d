"""Regions for which a region's updates are kept."""

from __future__ import annotations

from collections.abc import Iterable

from ephemeron.regions.communicator.base import Membership
from ephemeron.regions.region_state import RegionState


class Recipients:
    """Regions that need the updates of another one, as its communicator knows them.

    Args:
        region: that sends.
        names: regions that take part from the beginning.
        communicator: of the region.
    """

    def __init__(self, region: str, names: Iterable[str], communicator: Membership) -> None:
        self._region, self._communicator = region, communicator
        self._kept_for = {name for name in names if name != region}

    def needing(self, state: RegionState) -> list[str]:
        """Regions that need this one's updates, or may do so."""
        members = state.members
        entering = "" if members.entrance is None else members.entrance.region
        latest = max(state.applied[self._region].values(), default=0) + 1
        return [
            name
            for name in members.names
            if name not in ("", self._region)
            and (name == entering or members.takes_part(name, latest) or (members.first_round(name) or 0) > latest)
        ]

    async def follow(self, state: RegionState) -> None:
        """Has the communicator keep updates for the regions that need them, and for no other."""
        needed = set(self.needing(state))
        for name in state.members.names:
            if name != self._region and (name in needed) != (name in self._kept_for):
                await (self._communicator.admit(name) if name in needed else self._communicator.dismiss(name))
        self._kept_for = needed
