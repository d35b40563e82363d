"""How a region joins a run that has begun: the part of the region itself, and the coordinator's.

The region asks in the store that all regions reach. The coordinator announces it, and when all keep their updates for it, keeps a state of the run
after each of its exchanges (`Communicator.put_snapshot`). From such a state on the region applies the rounds of the others, without a part of
its own, until it lacks none; then it says that it is ready, and the coordinator announces its first round (`membership`). So the others
never wait for its functions to start, for the state to arrive, or for it to catch up. Meanwhile it renews its request; where it did not for some time, the others have
forgotten it, and it begins again from a newer state.

How the regions of a run take in one that joins: the coordinator's part.

The coordinator announces a region that asks, and when all keep their updates for it, keeps a state of the run after each of its exchanges. A region that was
not heard for `ABSENT_S` while it asks is forgotten, so that what is kept for it stays bounded.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ephemeron.errors import ChannelTimeout, CorruptMessage, JobError, UpdateForgotten
from ephemeron.events import Note
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.communicator.members import EntranceRequest
from ephemeron.regions.membership import LEAD, Entrance
from ephemeron.regions.policies import AdaptiveSchedule, Due, ExchangeSchedule, RoundPlan, parse_sync, weighted_mean
from ephemeron.regions.records import DecisionMeta, RegionKeys, decode_decision, encode_decision
from ephemeron.regions.region_state import RegionState, schedule_of
from ephemeron.training.worker.control import StopRequest, decode_control
from ephemeron.training.worker.invocation import InvocationExit
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership

FORGOTTEN_S = 10.0
"""Wait for an update after which it is looked whether the others still keep it."""
_SLICE_S = 0.5
"""Longest wait for one object; then it is seen whether the run goes on."""


class _RequestLapsed(Exception):
    """The others have forgotten this region: what it needs may be deleted."""


class JoiningRegion:
    """The part of the region that joins: of its rank 0.

    Args:
        membership: of the region.
        lifecycle: of the invocation.
        communicator: that has joined.
        own: parameters of the right size, 1-D.
    """

    def __init__(self, membership: GroupMembership, lifecycle: InvocationLifecycle, communicator: Communicator, own: np.ndarray) -> None:
        self._lifecycle, self._communicator = lifecycle, communicator
        self._name, self._sync = membership.names[membership.index], parse_sync(membership.sync)
        self._keys, self._channel = RegionKeys(lifecycle.keys.run), lifecycle.channel
        self._schedule = schedule_of(membership, lifecycle.spec.iterations)
        self._state = RegionState(self._sync, membership.names, membership.compression, own, fragments=self._schedule.fragments)
        self._vector = own
        self._ready = False
        self._asked, self._number, self._taken = lifecycle.now(), 0, -1
        """Time and number of the latest request, and round of the state that this region has begun from; -1: none yet."""
        self._checked = lifecycle.now()

    async def enter(self) -> int:
        """Joins, and stores the decision with which the region begins; returns the iteration."""
        while True:
            while not await self._ask():
                await self._pause()  # another region is joining
            try:
                await self._take_snapshot()
                begins = await (self._follow() if self._sync.synchronous else self._follow_asynchronously())
                break
            except (_RequestLapsed, UpdateForgotten):
                self._ready = False
        first = self._state.members.first_round(self._name)
        meta = DecisionMeta(attempt=self._lifecycle.attempt, plans=self._state.plans)
        await self._channel.put(self._keys.state(begins, self._lifecycle.attempt), [self._state.encoded(self._vector)])
        await self._channel.put(self._keys.decision(begins), [encode_decision(self._vector, meta)])
        await self._channel.put(self._keys.entry, [str(begins).encode()])
        await self._communicator.table.withdraw()
        text = "joins too late to take part" if first is None else f"joins with round {first}, at iteration {begins}"
        invocation = self._lifecycle.invocation
        invocation.emit(Note(t=self._lifecycle.run_now(), text=f"region {self._name} {text}"))
        if begins == self._schedule.iterations:
            await self._communicator.leave(after=self._schedule.last)
        return begins

    async def _ask(self) -> bool:
        """Asks, or says that this region still does; returns whether the others see its request."""
        self._asked, self._number = self._lifecycle.now(), self._number + 1
        request = EntranceRequest(region=self._name, ready=self._ready, number=self._number)
        return await self._communicator.table.ask(request)

    async def _renew(self) -> None:
        """Says from time to time that this region still asks.

        Raises:
            _RequestLapsed: it does no more.
        """
        if self._lifecycle.now() - self._asked >= RENEW_S and not await self._ask():
            raise _RequestLapsed
        members = self._state.members
        announced = members.entrance is not None and members.entrance.region == self._name
        if self._taken >= 0 and not announced and members.first_round(self._name) is None:
            raise _RequestLapsed

    async def _take_snapshot(self) -> None:
        """Waits for a state from which on the others keep their updates for this region; a newer one than before."""
        while True:
            found = await self._communicator.latest_snapshot()
            if found is not None and found[0] > self._taken:
                vector, state = decode_snapshot(found[1])
                self._state.load(state, "snapshot", vector)
                entrance = self._state.members.entrance
                if entrance is not None and entrance.region == self._name:
                    self._taken = found[0]
                    break
            await self._pause()
        self._state.begin_anew()
        if vector.size != self._vector.size:
            raise JobError(
                f"region {self._name} has {self._vector.size} parameters, the others have {vector.size}",
                remedy="train the same model in all regions",
            )
        self._vector = vector.copy()
        self._learn()

    def _learn(self) -> None:
        if isinstance(self._schedule, AdaptiveSchedule):
            self._schedule.learn(self._state.plans)

    def _begins(self) -> int | None:
        """Iteration with which this region begins; None: not known yet."""
        first = self._state.members.first_round(self._name)
        return None if first is None else self._schedule.sent_before(Due(self._schedule.fragments - 1, first - 1))

    # -- rounds of the others -----------------------------------------------------------------------------

    async def _follow(self) -> int:
        schedule, last = self._schedule, True
        while True:
            due = self._next()
            if due.round > schedule.last:
                return schedule.iterations
            begins = self._begins()
            if begins is not None and schedule.applied_before(due) > begins:
                return begins
            part = schedule.part(due.fragment, self._vector.size)
            found = self._state.accepted(await self._updates(due), part)
            self._vector[part] = self._state.policy.merge(part, self._vector, [c for _, c in found], last=last)
            self._learn()

    def _next(self) -> Due:
        """The round that is to be applied next."""
        members = self._state.members
        reached = [
            max(
                (
                    rounds.get(f, 0)
                    for name, rounds in self._state.applied.items()
                    if members.first_round(name) is not None and name != self._name
                ),
                default=0,
            )
            for f in range(self._schedule.fragments)
        ]
        return min((Due(f, n + 1) for f, n in enumerate(reached)), key=lambda due: (due.round, due.fragment))

    async def _follow_asynchronously(self) -> int:
        state, schedule = self._state, self._schedule
        whole = slice(0, self._vector.size)
        while True:
            first, begins = state.members.first_round(self._name), self._begins()
            least = schedule.rounds if first is None else min(first - 1 - self._sync.staleness, schedule.rounds)
            reached = {name: state.applied[name].get(0, 0) for name in self._others(least)}
            if min(reached.values(), default=least) >= least:
                break
            late = min(reached, key=lambda name: (reached[name], name))
            update = await self._update(late, Due(0, reached[late] + 1))
            given = [c for _, c in state.accepted([update], whole)]
            self._vector[:] = state.policy.merge(whole, self._vector, given, last=False)
        if begins is not None:
            return begins
        updates = await self._updates(Due(0, schedule.last))
        found = [c._replace(samples=1) for _, c in state.accepted(updates, whole, parameters=True)]
        if found:
            self._vector[:] = weighted_mean(found)
        return schedule.iterations

    def _others(self, round: int) -> list[str]:
        return [name for name in self._state.members.active(max(round, 1)) if name != self._name]

    async def _updates(self, due: Due) -> Sequence[Update]:
        return [await self._update(name, due) for name in self._others(due.round)]

    async def _update(self, region: str, due: Due) -> Update:
        """A region's part of a round. Where it is not there yet, this region lacks nothing, and is ready."""
        began = deadline = self._lifecycle.now()
        while True:
            await self._renew()
            try:
                return await self._communicator.get(region, due.fragment, due.round, deadline=deadline)
            except ChannelTimeout:
                if not self._ready and await self._is_loaded():
                    self._ready = True
                    await self._ask()
            if self._lifecycle.now() - began >= FORGOTTEN_S:
                began, newer = self._lifecycle.now(), await self._communicator.latest_snapshot()
                if newer is not None and newer[0] > max(due.round, self._taken):
                    raise _RequestLapsed  # the others are past this round
            await self._pause(0.0)
            deadline = self._lifecycle.now() + _SLICE_S

    async def _is_loaded(self) -> bool:
        """Whether all other functions of this region wait for the first iteration."""
        others = self._lifecycle.spec.configuration.workers - 1
        return not others or len(await self._channel.list(self._keys.loaded)) >= others

    async def _pause(self, seconds: float = _SLICE_S / 2) -> None:
        await asyncio.sleep(seconds)
        if self._taken < 0 and self._lifecycle.now() - self._asked >= RENEW_S:
            await self._ask()
        if self._lifecycle.now() - self._checked >= LOOK_S:
            self._checked = self._lifecycle.now()
            await may_wait(self._lifecycle)


async def wait_for_entry(lifecycle: InvocationLifecycle) -> int:
    """The part of the ranks other than 0: waits for the iteration with which the region begins."""
    keys, channel = RegionKeys(lifecycle.keys.run), lifecycle.channel
    await channel.put(f"{keys.loaded}{lifecycle.rank}", [b"1"])
    while True:
        try:
            return int(bytes((await channel.get(keys.entry, deadline=lifecycle.now() + LOOK_S)).data))
        except ChannelTimeout:
            await may_wait(lifecycle)


async def may_wait(lifecycle: InvocationLifecycle) -> None:
    """Ends the invocation where the run has been stopped, or its time is nearly over.

    Raises:
        InvocationExit: so it is.
    """
    invocation = lifecycle.invocation
    asked = await invocation.channel.fetch(invocation.keys.control)
    if asked is not None and isinstance(decode_control(asked, key=invocation.keys.control), StopRequest):
        raise InvocationExit("stopped")
    if invocation.now() >= invocation.ctx.deadline - 0.1 * invocation.call.lifetime_s:
        await lifecycle.wait_in_successor()
        raise InvocationExit("relayed")


async def entry_of(lifecycle: InvocationLifecycle) -> int | None:
    """The iteration with which this region has begun; None: it has not yet."""
    data = await lifecycle.channel.fetch(RegionKeys(lifecycle.keys.run).entry)
    return None if data is None else int(bytes(data))


async def entry_vector(lifecycle: InvocationLifecycle, iteration: int) -> np.ndarray:
    """The parameters with which this region begins."""
    key = RegionKeys(lifecycle.keys.run).decision(iteration)
    deadline = lifecycle.now() + lifecycle.wait_timeout_s()
    return decode_decision((await lifecycle.channel.get(key, deadline=deadline)).data, key)[0]


# -- how the regions of a run take in one that joins --------------------------------------------------------------


LOOK_S = 1.0
"""Shortest time between two looks whether a region asks to join, or this one is to leave."""
RENEW_S = 10.0
"""Interval at which a region that joins says that it still does."""
ABSENT_S = 120.0
"""Time after which one that does not say so is forgotten, by the coordinator's clock."""
_LENGTH = struct.Struct("<Q")


class Snapshot(NamedTuple):
    """State of a run for a region that joins."""

    vector: np.ndarray
    """Parameters of the region that has kept it, after one of its exchanges."""
    state: bytes
    """Its `RegionState`."""


def encode_snapshot(vector: np.ndarray, state: bytes) -> bytes:
    """Bytes of a snapshot."""
    return b"".join((_LENGTH.pack(len(state)), state, encode_decision(vector, DecisionMeta(attempt=0))))


def decode_snapshot(data: bytes) -> Snapshot:
    """The inverse.

    Raises:
        CorruptMessage: it is none.
    """
    if len(data) < _LENGTH.size:
        raise CorruptMessage("not a snapshot of a run", key="snapshot")
    end = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
    return Snapshot(decode_decision(data[end:], "snapshot")[0], data[_LENGTH.size : end])


class Admissions:
    """The coordinator's part. Every leader has one, as any may become the coordinator.

    Args:
        name: of the region.
        communicator: with the others.
        lifecycle: of the invocation.
    """

    def __init__(self, name: str, communicator: Communicator, lifecycle: InvocationLifecycle) -> None:
        self._name, self._communicator, self._lifecycle = name, communicator, lifecycle
        self._asked: EntranceRequest | None = None
        self._changed: float | None = None
        """When the request was first seen as it is; None: it was not looked at yet."""
        self._looked = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._withdrawing: asyncio.Task[None] | None = None
        self._leave = RegionKeys(lifecycle.keys.run).leave
        self.leaves = False
        """Whether this region was asked to leave."""

    def look(self) -> None:
        """Looks beside the training whether a region asks to join, or this one is to leave."""
        now = self._lifecycle.now()
        if now - self._looked >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked = now
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        asked = await self._communicator.table.asked()
        if self._changed is None or asked != self._asked:
            self._asked, self._changed = asked, self._lifecycle.now()
        self.leaves = self.leaves or await self._lifecycle.channel.fetch(self._leave) is not None

    def announcement(
        self, round: int, state: RegionState, schedule: ExchangeSchedule | AdaptiveSchedule, plan: RoundPlan | None
    ) -> Entrance | None:
        """What this region says with its part of a round; None: nothing.

        Args:
            round: that is sent.
            state, schedule: of the region.
            plan: of the round two after it, where rounds are planned.
        """
        asked, members = self._asked, state.members
        if asked is None or members.coordinator(round) != self._name or asked.region == self._name:
            return None
        known = members.entrance
        if known is None or known.region != asked.region:
            takes_part = members.takes_part(asked.region, round + LEAD)
            return None if takes_part or known is not None else Entrance(region=asked.region)
        if isinstance(schedule, AdaptiveSchedule):
            begins = plan is not None and not plan.last
        else:
            begins = round + LEAD <= schedule.rounds
        if known.first is None and asked.ready and begins:
            return Entrance(region=asked.region, first=round + LEAD)
        return None

    def lapsed(self, round: int, state: RegionState) -> str:
        """The region that asks to join and is not heard any more, as this region says with its part of a round; "": none.

        Its request is withdrawn. If it comes back, it asks anew, and begins from a newer state.

        Args:
            round: that is sent.
            state: of the region.
        """
        known = state.members.entrance
        if known is None or known.first is not None or state.members.coordinator(round) != self._name:
            return ""
        if self._changed is None:
            return ""
        asks = self._asked is not None and self._asked.region == known.region
        if asks and self._lifecycle.now() - self._changed < ABSENT_S:
            return ""
        if asks:
            self._asked, self._changed = None, self._lifecycle.now()
            self._withdrawing = asyncio.create_task(self._withdraw(known.region))
        return known.region

    async def _withdraw(self, region: str) -> None:
        asked = await self._communicator.table.asked()
        if asked is not None and asked.region == region:
            await self._communicator.table.withdraw()

    def keep_snapshot(self, state: RegionState, vector: np.ndarray) -> None:
        """Keeps the state after an exchange for a region that joins, beside the training."""
        round = max(state.applied[self._name].values(), default=0)
        if state.members.coordinator(round) != self._name or not state.is_kept_by_all(self._name):
            return
        if self._keeping is None or self._keeping.done():
            data = encode_snapshot(vector, bytes(state.encoded(vector)))
            self._keeping = asyncio.create_task(self._communicator.put_snapshot(round, data))

    async def close(self) -> None:
        """Ends what goes on in the background."""
        tasks = [task for task in (self._looking, self._keeping, self._withdrawing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
