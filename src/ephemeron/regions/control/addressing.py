"""Table of the communicators' addresses: identity and replica to endpoint, with ids, fences and leases. Pure.

An identity is the name of a region; its replicas are the functions of that region that listen. A replica registers with a *holder*, a token of the
run that started the region, and a *fence*, the number of its attempt. An endpoint may change at any time: with the same fence when a function
listens elsewhere, with a higher one when it was replaced. Leases are renewed by a counter and timed by the clock of the function that keeps the table,
so clocks are never compared. A function that takes the table over gives every lease its full time again.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ephemeron.config.typed import Positive, build, plain
from ephemeron.errors import JobError


class ControlMachine(ABC):
    """Decisions of one control function. Requests, answers and the state are JSON objects.

    A request is applied once: `ControlFunction` stores the state after it together with its answer.
    """

    @abstractmethod
    def apply(self, request: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        """Answer to a request, which may change the state.

        Args:
            request: of a client.
            now: time of this function's own clock, seconds. It is compared with other times of the same function alone.

        Raises:
            JobError: the request is not one of this function's, or is refused; the state is as before.
        """

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Everything that a successor needs."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any], now: float) -> None:
        """Takes over the state of a predecessor, whose clock is not known.

        Raises:
            JobError: it is not a state of this function.
        """


# -- addressing ---------------------------------------------------------------------------------------------------


LEASE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressRequest:
    """A request to the addressing function."""

    action: Literal["register", "renew", "deregister", "lookup"]
    identity: str = ""
    """Region; of a lookup, "" for all."""
    replica: int = 0
    """Number of its function."""
    holder: str = ""
    """Token of the run that started the region."""
    fence: int = 0
    """Attempt of the function: an older one is refused."""
    endpoint: str = ""
    """Address at which others reach it, such as `10.0.0.1:4000`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A row of the table."""

    id: int
    """Unlike that of every other row, and never given again."""
    identity: str
    replica: int
    holder: str
    fence: int
    endpoint: str
    changes: int
    """Endpoints that it has had before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressAnswer:
    """Answer of the addressing function."""

    rows: tuple[Registration, ...]
    """Of the request's replica, or those that were looked up; rows whose lease has ended are left out."""
    lease_s: float
    """Time within which a row has to be renewed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableState:
    rows: tuple[Registration, ...] = ()
    next_id: int = 1
    lease_s: Positive = LEASE_S


class AddressTable(ControlMachine):
    """The table.

    Args:
        lease_s: time of a lease.
    """

    def __init__(self, *, lease_s: float = LEASE_S) -> None:
        self._lease_s, self._next_id = lease_s, 1
        self._rows: dict[tuple[str, int], Registration] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def apply(self, request: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        asked = build(AddressRequest, request, where="request of addressing")
        if asked.action == "lookup":
            rows = [row for row in self._live(now) if asked.identity in ("", row.identity)]
            return self._answer(*rows)
        if not asked.identity or not asked.holder:
            raise JobError(f"{asked.action}: a row has an identity and a holder", remedy="give both")
        key = (asked.identity, asked.replica)
        row = self._checked(asked, key, now)
        if asked.action == "deregister":
            self._rows.pop(key, None)
            return self._answer()
        if asked.action == "register":
            if not asked.endpoint:
                raise JobError("register: an endpoint is missing", remedy="give host:port")
            row = self._registered(asked, row)
        elif row is None:
            raise JobError(f"region {asked.identity} has no replica {asked.replica} to renew", remedy="register it")
        self._rows[key], self._seen[key] = row, now
        return self._answer(row)

    def _checked(self, asked: AddressRequest, key: tuple[str, int], now: float) -> Registration | None:
        """The row that a request changes; None: there is none, or its lease has ended.

        Raises:
            JobError: another run holds the identity, or a newer function of the region is registered.
        """
        row = self._rows.get(key)
        for other in self._rows.values():
            if other.identity == asked.identity and other.holder != asked.holder and self._is_live(other, now):
                raise JobError(
                    f"region {asked.identity} is registered by another run, at {other.endpoint}",
                    remedy="end that run, or give this region another name",
                )
        if row is None or (row.holder != asked.holder):
            return None
        if asked.fence < row.fence:
            raise JobError(
                f"attempt {asked.fence} of region {asked.identity}, replica {asked.replica}, was replaced by attempt {row.fence}"
            )
        return row

    def _registered(self, asked: AddressRequest, row: Registration | None) -> Registration:
        if row is None:
            self._next_id += 1
            return Registration(
                id=self._next_id - 1,
                identity=asked.identity,
                replica=asked.replica,
                holder=asked.holder,
                fence=asked.fence,
                endpoint=asked.endpoint,
                changes=0,
            )
        changes = row.changes + (asked.endpoint != row.endpoint)
        return dataclasses.replace(row, fence=asked.fence, endpoint=asked.endpoint, changes=changes)

    def _is_live(self, row: Registration, now: float) -> bool:
        return now - self._seen[row.identity, row.replica] <= self._lease_s

    def _live(self, now: float) -> list[Registration]:
        return [row for _, row in sorted(self._rows.items()) if self._is_live(row, now)]

    def _answer(self, *rows: Registration) -> Mapping[str, Any]:
        found: Mapping[str, Any] = plain(AddressAnswer(rows=tuple(rows), lease_s=self._lease_s))
        return found

    def state(self) -> Mapping[str, Any]:
        rows = tuple(row for _, row in sorted(self._rows.items()))
        found: Mapping[str, Any] = plain(_TableState(rows=rows, next_id=self._next_id, lease_s=self._lease_s))
        return found

    def restore(self, state: Mapping[str, Any], now: float) -> None:
        read = build(_TableState, state, where="state of addressing")
        self._next_id, self._lease_s = read.next_id, read.lease_s
        self._rows = {(row.identity, row.replica): row for row in read.rows}
        self._seen = dict.fromkeys(self._rows, now)
