"""Where communicators find each other's endpoints, apart from the table of members: a table of the control function `geo-addressing`.

An address is that of an identity (the region) and has a lease, which its communicator renews. A communicator that listens elsewhere registers
again, as the same attempt or as a newer one; the others look an endpoint up when they cannot connect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from ephemeron.errors import JobError, RegionSuperseded
from ephemeron.regions.control.addressing import AddressRequest
from ephemeron.regions.control.client import ControlClient


class Address(NamedTuple):
    """Where a region is reached."""

    endpoint: str
    fence: int
    """Attempt that listens there."""


class AddressBook(ABC):
    """Addresses of all regions of a run, as one region sees and changes them."""

    renew_every_s: float
    """Interval at which `announce` has to be repeated."""

    @abstractmethod
    async def announce(self, endpoint: str) -> None:
        """Says where this region is reached from now on, or still.

        Raises:
            RegionSuperseded: a newer attempt has said so, or another launch of the region.
        """

    @abstractmethod
    async def withdraw(self) -> None:
        """This region cannot be reached any more."""

    @abstractmethod
    async def look_up(self) -> Mapping[str, Address]:
        """Addresses by region; those whose lease has ended are left out."""


class ControlledAddresses(AddressBook):
    """Addresses in the table of the control function.

    Args:
        client: of the control function, which it starts where none answers.
        region, identity, fence: of this region; see `Communicator`.
        renew_every_s: a third of a lease.
    """

    def __init__(self, client: ControlClient, *, region: str, identity: str, fence: int, renew_every_s: float = 5.0) -> None:
        self._client, self._region, self._identity, self._fence = client, region, identity, fence
        self.renew_every_s = renew_every_s

    async def announce(self, endpoint: str) -> None:
        try:
            answer = await self._client.address(self._request("register", endpoint))
        except JobError as e:
            raise RegionSuperseded(str(e)) from None
        self.renew_every_s = answer.lease_s / 3

    async def withdraw(self) -> None:
        try:
            await self._client.address(self._request("deregister"))
        except JobError:
            return  # a newer attempt is there

    async def look_up(self) -> Mapping[str, Address]:
        rows = (await self._client.address(AddressRequest(action="lookup"))).rows
        return {row.identity: Address(row.endpoint, row.fence) for row in rows}

    def _request(self, action: str, endpoint: str = "") -> AddressRequest:
        return AddressRequest(
            action="register" if action == "register" else "deregister",
            identity=self._region,
            holder=self._identity,
            fence=self._fence,
            endpoint=endpoint,
        )
