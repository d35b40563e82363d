"""The port between regions: a region publishes its updates, and reads those of the others.

A communicator knows nothing of parameters: payloads are opaque, and which updates count in a round is for a policy to decide. Updates
of one fragment have rounds 1, 2, 3, … without gaps; fragments are independent of each other.

A region is told apart from a second one of the same name by its identity: a text that all functions of one launch of the region share
and that no other launch has. Its attempts have growing fences, so a replaced communicator that goes on is known as such. Clocks of
regions are never compared: order is by rounds and fences, and every wait is limited by the clock of who waits.

Updates that must not count: NaN, infinite, or far larger than the region's updates before.

The decision depends on the norms of the region alone, in the order of its rounds. So all regions that judge the updates of a synchronous
round decide alike, and so does a replacement that begins with the saved state. Pure.
"""

from __future__ import annotations

import math
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from ephemeron.regions.communicator.members import MemberTable

Watermarks = Mapping[str, Mapping[int, int]]
"""By region and fragment: a round, with all before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A region's contribution to one round of one fragment."""

    region: str
    fence: int
    """Attempt of the sender."""
    fragment: int
    """From 0."""
    round: int
    """From 1."""
    samples: int
    """Number of samples that it was computed from, as its weight."""
    norm: float
    """L2 norm of the decoded vector; see `NormQuarantine`."""
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A region that takes part, or has done so."""

    region: str
    identity: str
    """Launch of the region."""
    fence: int
    """Newest attempt that has joined."""
    endpoint: str
    """Where its communicator can be reached; empty where none is needed."""
    since: int
    """Round after which it takes part; 0: from the beginning."""
    left: int | None = None
    """Last round that it takes part in; None: it has not left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTraffic:
    """Bytes exchanged with one region so far, frames and repeated transfers included."""

    sent: int = 0
    received: int = 0
    kernel_sent: int = 0
    """As the kernel has counted, over TCP; 0 where it does not."""
    kernel_received: int = 0

    def __add__(self, other: PeerTraffic) -> PeerTraffic:
        return PeerTraffic(
            sent=self.sent + other.sent,
            received=self.received + other.received,
            kernel_sent=self.kernel_sent + other.kernel_sent,
            kernel_received=self.kernel_received + other.kernel_received,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """Measured link from another region to this one."""

    bandwidth: float | None = None
    """Bytes per second while large updates were transferred; None: none was yet."""
    round_trip_s: float | None = None
    """Shortest round trip of the last ones; None: none was measured."""


class Membership(ABC):
    """Which regions take part, and for whom updates are kept."""

    table: MemberTable
    """Of the regions that take part."""

    @abstractmethod
    async def join(self, *, since: int = 0, enters: bool = False) -> Sequence[Member]:
        """Takes part in the rounds after `since`, and returns all members.

        A replacement, or a communicator that is started again, joins again; `since` of the first time stays.

        Raises:
            JobError: another launch of the region takes part and has not left.
            RegionSuperseded: a newer attempt has joined, or the others train without this region, and it does not know so (`enters`).
        """

    @abstractmethod
    async def admit(self, region: str) -> None:
        """From now on updates are kept for another region, too, which joins."""

    @abstractmethod
    async def dismiss(self, region: str) -> None:
        """Nothing is kept any more for another region, which takes no part."""

    @abstractmethod
    async def leave(self, *, after: int) -> None:
        """Takes part in no round after `after`. What it has published until then is still sent, by this communicator until the others have
        acknowledged it, or for a limited time."""

    @abstractmethod
    async def members(self) -> Sequence[Member]:
        """Regions that take part or have done so, sorted by name, as the newest known table says."""


class UpdateExchange(ABC):
    """Updates of this region, and those of the others."""

    @abstractmethod
    async def publish(self, update: Update) -> None:
        """Keeps an update of this region to be sent; it is sent meanwhile, and again after interruptions.

        Raises:
            RegionSuperseded: a newer attempt of this region has joined.
        """

    @abstractmethod
    async def get(self, region: str, fragment: int, round: int, *, deadline: float) -> Update:
        """Waits for an update that this region has not acknowledged.

        Args:
            region: another one, or this one.
            fragment: from 0.
            round: from 1.
            deadline: loop time; one in the past still makes one attempt.

        Raises:
            ChannelTimeout: it has not come.
            UpdateForgotten: the sender has it no more.
        """

    @abstractmethod
    def arrived(self, after: Watermarks) -> Sequence[Update]:
        """Updates of the others that are here, with rounds beyond those, in order of region, fragment and round. Does not wait.

        The first call begins to receive; where none is made, updates may be received only as `get` asks for them.
        """

    @abstractmethod
    async def acknowledge(self, region: str, fragment: int, round: int) -> None:
        """Says that this region needs the updates of another one up to a round no more, not even after a replacement."""


class SnapshotExchange(ABC):
    """States of a run for regions that join it."""

    @abstractmethod
    async def put_snapshot(self, round: int, data: bytes) -> None:
        """Keeps the state after a round for members that join; an older one is forgotten."""

    @abstractmethod
    async def latest_snapshot(self) -> tuple[int, bytes] | None:
        """The newest state that any member keeps, with its round; None: there is none. Needs no `join`, and delays no member."""


class LinkMeter(ABC):
    """What was exchanged with other regions, and how fast."""

    @property
    @abstractmethod
    def meter(self) -> Mapping[str, PeerTraffic]:
        """Bytes exchanged so far, by region; what goes through a store that all read counts as exchanged with the region ""."""

    @property
    @abstractmethod
    def links(self) -> Mapping[str, LinkEstimate]:
        """Links by sender, measured from what was received."""


# -- updates that must not count ----------------------------------------------------------------------------------


FACTOR = 10.0
KEPT = 32
LEAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedUpdate:
    """An update that does not count."""

    region: str
    fragment: int
    round: int
    why: str

    def __str__(self) -> str:
        return f"update of region {self.region}, fragment {self.fragment}, round {self.round} does not count: {self.why}"


class NormQuarantine:
    """Judges updates by their norms. Each update is judged once, in the order of its region's rounds.

    Args:
        factor: an update counts up to so many times the median of its region's last norms.
        kept: number of norms that the median is of.
        least: number of norms before which only NaN and infinity are refused.
        state: of an earlier one; see `state`.
    """

    def __init__(
        self, *, factor: float = FACTOR, kept: int = KEPT, least: int = LEAST, state: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        self._factor, self._kept, self._least = factor, kept, least
        self._norms = {key: deque(norms, maxlen=kept) for key, norms in (state or {}).items()}

    def judge(self, update: Update, *, norm: float | None = None) -> QuarantinedUpdate | None:
        """Why an update does not count; None: it does, and its norm is part of later medians.

        Args:
            update: of any region.
            norm: of the vector as it was decoded here; None: as the sender says.
        """
        norm = update.norm if norm is None else norm
        norms = self._norms.setdefault(f"{update.region}/{update.fragment}", deque(maxlen=self._kept))
        why = ""
        if not math.isfinite(norm):
            why = f"its norm is {norm}"
        elif len(norms) >= self._least and norm > self._factor * (median := statistics.median(norms)):
            why = f"its norm {norm:.4g} is more than {self._factor:g} times {median:.4g}, the median of the last {len(norms)}"
        if not why:
            norms.append(norm)
            return None
        return QuarantinedUpdate(region=update.region, fragment=update.fragment, round=update.round, why=why)

    def state(self) -> dict[str, list[float]]:
        """Norms so far, as plain values for checkpoints and snapshots."""
        return {key: list(norms) for key, norms in sorted(self._norms.items())}


class Communicator(Membership, UpdateExchange, SnapshotExchange, LinkMeter):
    """One region's end: its four ports over one transport. An async context manager, entered in the event loop that uses it, and left
    without `leave` where the region goes on.

    Contract, held by `ephemeron.testing.communicator_contract` for every adapter:

    - `publish` is idempotent by fragment and round; the first payload of a round stays.
    - an update that was published reaches every member, whatever connections are lost meanwhile, until that member has acknowledged it.
    - after a region's communicator was replaced, the new one publishes what its region repeats, and reads again what it had not
      acknowledged.
    - memory is bounded: updates that all members have acknowledged are forgotten, and no more than `limit_bytes` wait for slow ones. What
      is forgotten for lack of room raises `UpdateForgotten` at those that ask for it; they begin anew from a snapshot.

    Args:
        region: name of this region.
        identity: of this launch of the region; see the module.
        fence: attempt of this communicator, from 1; higher than that of the one that it replaces.
    """

    region: str
    identity: str
    fence: int

    def __init__(self, region: str, *, identity: str, fence: int) -> None:
        self.region, self.identity, self.fence = region, identity, fence

    async def __aenter__(self) -> Self:
        """Connects. Nothing is published or received before `join`."""
        return self

    @abstractmethod
    async def __aexit__(self, *exc: object) -> None:
        """Ends all connections."""
