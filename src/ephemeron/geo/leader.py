"""The part of a region's rank 0 in its exchanges: it sends, receives and decides."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from ephemeron.errors import ChannelTimeout, KeyExists
from ephemeron.events import RegionExchanged, RegionLeft, UpdateQuarantined
from ephemeron.geo.communicator import Communicator, Update
from ephemeron.geo.entrance import Admissions
from ephemeron.geo.follower import recall
from ephemeron.geo.link_pace import LinkPace, described
from ephemeron.geo.policies import (
    AdaptiveSchedule,
    Contribution,
    Due,
    parse_sync,
    weighted_mean,
)
from ephemeron.geo.records import DecisionMeta, RegionKeys, decode_decision, encode_decision
from ephemeron.geo.region_state import RegionState
from ephemeron.geo.schedules import schedule_of
from ephemeron.training.collectives import StalledPeers, all_of
from ephemeron.training.collectives.object_wait import handle_timeout
from ephemeron.training.worker.control import StopRequest, encode_control
from ephemeron.training.worker.group_exchange import GroupExchange
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership

_WAITING_EVERY_S = 1.0
"""Longest interval at which rank 0 says that it lives while it waits for other regions."""
_ABSENT_EVERY_S = 1.0
"""Interval at which it looks whether a region that was never heard could not be started."""


class RegionLeader(GroupExchange):
    """The part of rank 0: it sends, receives and decides.

    Args:
        membership: of the region.
        communicator: with the other regions.
        lifecycle: of the invocation.
        count: adds what the communicator has requested since the last call to the bill.
    """

    def __init__(
        self, membership: GroupMembership, communicator: Communicator, lifecycle: InvocationLifecycle, count: Callable[[], None]
    ) -> None:  # fmt: skip
        self._m, self._communicator, self._lifecycle, self._count = membership, communicator, lifecycle, count
        self._keys, self._channel = RegionKeys(lifecycle.keys.run), lifecycle.channel
        self._schedule, self._sync = (
            schedule_of(membership, lifecycle.spec.iterations),
            parse_sync(membership.sync),
        )
        self._name = membership.names[membership.index]
        self._admissions = Admissions(self._name, communicator, lifecycle)
        self._own: dict[Due, Update] = {}
        """Sent by this region, and not known to be applied everywhere."""
        self._decided: list[int] = []
        """Iterations whose decisions are stored, ascending."""
        self._states: dict[int, set[str]] = {}
        """By iteration, keys of the states that attempts of this rank have stored."""
        self._reads: dict[tuple[str, Due], asyncio.Task[Update]] = {}
        """Of rounds of other regions, begun when this one has sent its part."""
        self._counted = (0, 0)
        self._kept_for = {name for name in membership.names if name != self._name}
        """Other regions for which the communicator keeps updates."""
        self._left = False
        self._pace = LinkPace(membership, self._sync, communicator, lifecycle.now)

    def is_due(self, iteration: int) -> bool:
        return self._schedule.is_due(iteration)

    async def begin(self, iteration: int, own: np.ndarray, *, exchanged: bool) -> None:
        self._state = RegionState(
            self._sync, self._m.names, self._m.compression, own, fragments=self._schedule.fragments
        )
        if isinstance(self._schedule, AdaptiveSchedule):
            self._state.plans = self._schedule.plans
        if self._lifecycle.attempt == 0 and not self._m.joins:
            await self._store(iteration, own)
            return
        stored = await self._channel.list(self._keys.decisions)
        self._decided = self._keys.decided(stored)
        for key in stored:
            if (iteration_of := self._keys.iteration_of_state(key)) is not None:
                self._states.setdefault(iteration_of, set()).add(key)
        usable = [known for known in self._decided if known < iteration + exchanged]
        if usable:
            await self._restore(usable[-1])
        elif iteration == 0:
            await self._store(iteration, own)
        await self._follow_members()
        for key in stored:
            if key.startswith(self._keys.outgoing):
                await self._send_again(self._keys.due_of(key))

    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        trace, now, began = self._lifecycle.invocation.trace, self._lifecycle.now, self._lifecycle.now()
        self._admissions.look()
        vector = await self._restore(iteration) if iteration in self._decided else None
        self._pace.begins(iteration)
        if vector is None:
            self._state.quarantined = []
            vector = own.copy()
            try:
                async with self._says_that_it_lives(iteration):
                    await self._decide(iteration, vector)
            finally:
                self._count()
            self._emit(iteration, now() - began)
            if not await self._store(iteration, vector):
                vector = await self._restore(iteration)  # another attempt of this rank was first
        trace.record("wait", began, now())
        await self._follow_members()
        self._admissions.keep_snapshot(self._state, vector)
        await self._forget(durable)
        self._pace.ends(iteration)
        last = self._state.members.last_round(self._name)
        if iteration == self._schedule.iterations and self._lifecycle.spec.configuration.workers > 2:
            await recall(self._lifecycle, self._keys)
        if iteration == self._schedule.iterations and last is None:
            await self._communicator.leave(after=self._schedule.last)
        elif (
            last is not None
            and not self._left
            and iteration >= self._schedule.sent_before(Due(self._schedule.fragments - 1, last))
        ):
            await self._end_part(last)
        return vector

    async def close(self) -> None:
        """Ends what goes on in the background."""
        await self._admissions.close()
        reads = self._reads.values()
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)

    # -- rounds -------------------------------------------------------------------------------------------

    async def _decide(self, iteration: int, vector: np.ndarray) -> None:
        """Sends what is due, and applies what is due or has arrived to a vector."""
        schedule = self._schedule
        if not self._sync.synchronous:
            return await self._decide_asynchronously(iteration, vector)
        applies = schedule.applies(iteration)
        sent_before = [due for due in applies if schedule.sent_before(due) < iteration]
        for due in sent_before:
            await self._apply(due, vector)
        for due in schedule.sends(iteration):
            if self._takes_part(due):
                await self._send(due, vector)
                for name in self._others(due.round):
                    self._read(name, due)
        for due in applies[len(sent_before) :]:
            await self._apply(due, vector)

    async def _apply(self, due: Due, vector: np.ndarray) -> None:
        part = self._schedule.part(due.fragment, vector.size)
        if self._has_left(due):
            return
        contributions = self._state.accepted(await self._updates(due), part)
        common = due.round == self._schedule.last
        if isinstance(self._schedule, AdaptiveSchedule):
            common |= self._schedule.applied_before(due) == self._schedule.sent_before(due)
            self._schedule.learn(self._state.plans)
        vector[part] = self._state.policy.merge(part, vector, [c for _, c in contributions], last=common)

    async def _decide_asynchronously(self, iteration: int, vector: np.ndarray) -> None:
        schedule = self._schedule
        if iteration < schedule.iterations:
            (due,) = schedule.sends(iteration)
            if self._has_left(due):
                return None
            await self._send(due, vector)
            return await self._take(vector, due.round - self._sync.staleness)
        if self._has_left(Due(0, schedule.last)):
            return None
        await self._take(vector, schedule.rounds)
        due = Due(0, schedule.last)
        await self._send(due, vector, parameters=True)
        updates = await self._updates(due)
        found = [
            c._replace(samples=1) for _, c in self._state.accepted(updates, slice(0, vector.size), parameters=True)
        ]
        if found:  # averages of averages: parameters still differ among regions
            vector[:] = weighted_mean(found)

    async def _take(self, vector: np.ndarray, least: int) -> None:
        """Applies what has arrived of other regions; waits for their rounds up to `least`."""
        state = self._state
        for number in range(1, least + 1):
            late = [name for name in self._others(number) if state.applied[name].get(0, 0) < number]
            self._merge(vector, state.accepted(await self._updates(Due(0, number), late), slice(0, vector.size)))
        names = state.members.names
        arrived = [
            u
            for u in self._communicator.arrived(state.applied)
            if 0 < u.round <= self._schedule.rounds and u.region in names
        ]
        ordered = sorted(arrived, key=lambda update: (names.index(update.region), update.round))
        self._merge(vector, state.accepted(_without_gaps(ordered, state.applied), slice(0, vector.size)))

    def _merge(self, vector: np.ndarray, found: Sequence[tuple[str, Contribution]]) -> None:
        given = [c for _, c in found]
        if self._state.policy.averages:
            given = list(dict(found).values())  # the newest of each region
        vector[:] = self._state.policy.merge(slice(0, vector.size), vector, given, last=False)

    def _others(self, round: int) -> list[str]:
        return [name for name in self._state.members.active(round) if name != self._name]

    def _takes_part(self, due: Due) -> bool:
        return self._state.members.takes_part(self._name, due.round)

    def _has_left(self, due: Due) -> bool:
        """Whether this region takes part in earlier rounds only."""
        last = self._state.members.last_round(self._name)
        return last is not None and due.round > last

    async def _updates(self, due: Due, names: Sequence[str] | None = None) -> list[Update]:
        """Parts of a round of some regions, in their order, once they are there; None: of all that take part."""
        wanted = self._state.members.active(due.round) if names is None else names
        found = await all_of(self._update(name, due) for name in wanted)
        return [update for update in found if update is not None]

    async def _update(self, region: str, due: Due) -> Update | None:
        """A region's part of a round; None: it could not be started when the run began."""
        if region == self._name:
            return self._own[due]
        read = self._read(region, due)
        unheard = not self._state.applied[region] and self._state.members.first_round(region) == 1
        if unheard and await self._is_absent(region, read):
            del self._reads[region, due]
            return None
        while not read.done():  # its own functions and clients see to it that another region goes on
            await asyncio.wait({read}, timeout=self._lifecycle.wait_timeout_s())
            if not read.done():
                late = StalledPeers(self._schedule.applied_before(due), ())
                missing = ChannelTimeout(f"region {region} has not sent round {due.round}")
                await handle_timeout(self._lifecycle.on_timeout, late, missing)
        del self._reads[region, due]
        return read.result()

    async def _is_absent(self, region: str, read: asyncio.Task[Update]) -> bool:
        """Whether a region that was never heard could not be started when the run began. Waits for its first part, or its time."""
        latest = self._lifecycle.now() + self._lifecycle.wait_timeout_s()
        while not read.done() and self._lifecycle.now() < latest:
            await asyncio.wait({read}, timeout=_ABSENT_EVERY_S)
            if not read.done() and await self._communicator.table.is_absent(region):
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)
                self._state.members.is_absent(region)
                return True
        return False

    def _read(self, region: str, due: Due) -> asyncio.Task[Update]:
        """Begins to read another region's part of a round, if it has not begun."""
        read = self._reads.get((region, due))
        if read is None:
            deadline = self._lifecycle.invocation.ctx.deadline
            read = asyncio.create_task(
                self._communicator.get(region, due.fragment, due.round, deadline=deadline)
            )  # fmt: skip
            self._reads[region, due] = read
        return read

    # -- sending ------------------------------------------------------------------------------------------

    async def _send(self, due: Due, vector: np.ndarray, *, parameters: bool = False) -> None:
        """Stores and sends this region's part of a round; `parameters`: the parameters as they are."""
        part, schedule = self._schedule.part(due.fragment, vector.size), self._schedule
        how, plan, measured = None, None, None
        if isinstance(schedule, AdaptiveSchedule):
            how, measured = schedule.plan(due.round), self._pace.measured()
            if due.fragment == 0 and self._state.members.coordinator(due.round) == self._name:
                plan = self._pace.plan_after(due.round, schedule, self._state.measured, nbytes=4 * vector.size)
        entrance, leaves = None, False
        if due.fragment == 0 and not parameters:
            entrance = self._admissions.announcement(due.round, self._state, schedule, plan)
            leaves = self._admissions.leaves and due.round < schedule.last and len(self._others(due.round)) > 0
        payload = self._state.payload(
            part, vector, parameters=parameters, compression=how.how.compression if how else "", plan=plan,
            measured=measured, entrance=entrance, leaves=leaves,
        )  # fmt: skip
        with contextlib.suppress(KeyExists):  # an earlier attempt has stored the same values
            await self._channel.put(self._keys.sent(due), [payload], create=True)
        await self._send_again(due)
        if not self._sync.synchronous:
            self._state.applied[self._name][due.fragment] = due.round
            self._state.learn_own(self._name, due.round, self._own[due].payload)

    async def _send_again(self, due: Due) -> None:
        """Sends what is stored, of this attempt or an earlier one; other regions may lack it."""
        payload = bytes(await self._channel.fetch(self._keys.sent(due)) or b"")
        if not payload:
            return  # deleted meanwhile: all have it
        part = self._schedule.part(due.fragment, self._state.elements)
        self._own[due] = Update(
            region=self._name, fence=self._communicator.fence, fragment=due.fragment, round=due.round, samples=self._samples(due),
            norm=self._state.norm(payload, part), payload=payload,
        )  # fmt: skip
        await self._communicator.publish(self._own[due])

    def _samples(self, due: Due) -> int:
        """Samples of all ranks since the round before."""
        split, schedule = self._lifecycle.spec.split, self._schedule
        first = schedule.sent_before(Due(due.fragment, due.round - 1)) if due.round > 1 else 0
        return sum(
            split.batch_at(rank, i % split.iterations)
            for i in range(first, schedule.sent_before(due))
            for rank in range(len(split.counts))
        )

    @asynccontextmanager
    async def _says_that_it_lives(self, iteration: int) -> AsyncIterator[None]:
        """Context in which the other ranks do not take this one for dead."""

        async def repeat() -> None:
            number = 0
            while True:
                await asyncio.sleep(min(_WAITING_EVERY_S, self._lifecycle.wait_timeout_s() / 3))
                number += 1
                said = f"{iteration} {self._lifecycle.attempt} {number}"
                await self._channel.put(self._keys.waiting, [said.encode()])

        if self._lifecycle.spec.configuration.workers == 1:
            yield
            return
        task = asyncio.create_task(repeat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- decisions ----------------------------------------------------------------------------------------

    async def _store(self, iteration: int, vector: np.ndarray) -> bool:
        """Stores a decision, and the state with it; returns whether no other attempt was first."""
        attempt, state = self._lifecycle.attempt, self._state
        self._states.setdefault(iteration, set()).add(self._keys.state(iteration, attempt))
        await self._channel.put(self._keys.state(iteration, attempt), [state.encoded(vector)])
        left_out = tuple(update.region for update in state.quarantined)
        meta = DecisionMeta(attempt=attempt, quarantined=left_out, plans=state.plans)
        try:
            await self._channel.put(self._keys.decision(iteration), [encode_decision(vector, meta)], create=True)
        except KeyExists:
            return False
        self._decided.append(iteration)
        return True

    async def _restore(self, iteration: int) -> np.ndarray:
        """The vector of a stored decision, whose state becomes this one."""
        key, deadline = self._keys.decision(iteration), self._lifecycle.now() + self._lifecycle.wait_timeout_s()
        vector, meta = decode_decision((await self._channel.get(key, deadline=deadline)).data, key)
        key = self._keys.state(iteration, meta.attempt)
        self._state.load((await self._channel.get(key, deadline=deadline)).data, key, vector)
        self._states.setdefault(iteration, set()).add(key)
        if iteration not in self._decided:
            self._decided = sorted([*self._decided, iteration])
        if isinstance(self._schedule, AdaptiveSchedule):
            self._schedule.learn(self._state.plans)
        return vector

    async def _forget(self, durable: int) -> None:
        """Deletes what no replacement would read again, and what all other regions have applied."""
        state, applied = self._state, self._state.applied
        needed = self._needed_by()
        done = [
            due for due in self._own
            if due.round <= applied[self._name].get(due.fragment, 0)
            and all(state.has_applied(name, self._name, due) for name in needed)
        ]  # fmt: skip
        gone = [self._keys.sent(due) for due in done]
        for due in done:
            del self._own[due]
        old = [known for known in self._decided if known < durable][:-1]
        for known in old:
            gone += [self._keys.decision(known)]
            gone += sorted(self._states.pop(known, ()))
        self._decided = self._decided[len(old) :]
        if gone:
            await self._channel.delete(gone)
        for name, rounds in applied.items():
            if name != self._name:
                for fragment, number in rounds.items():
                    await self._communicator.acknowledge(name, fragment, number)

    def _needed_by(self) -> list[str]:
        """Regions that need this one's updates, or may do so."""
        members = self._state.members
        entering = "" if members.entrance is None else members.entrance.region
        latest = max(self._state.applied[self._name].values(), default=0) + 1
        return [
            name for name in members.names
            if name not in ("", self._name) and (name == entering or members.takes_part(name, latest) or (members.first_round(name) or 0) > latest)
        ]  # fmt: skip

    async def _follow_members(self) -> None:
        """Has the communicator keep updates for the regions that need them."""
        needed = set(self._needed_by())
        for name in self._state.members.names:
            if name != self._name and (name in needed) != (name in self._kept_for):
                await (self._communicator.admit(name) if name in needed else self._communicator.dismiss(name))
        self._kept_for = needed

    async def _end_part(self, last: int) -> None:
        """This region has sent its last round: it stops at a checkpoint."""
        self._left = True
        await self._communicator.leave(after=last)
        invocation = self._lifecycle.invocation
        invocation.emit(
            RegionLeft(t=self._lifecycle.run_now(), rank=0, attempt=invocation.attempt, region=self._name, round=last)
        )
        await self._channel.put(self._lifecycle.keys.control, [encode_control(StopRequest())])

    def _emit(self, iteration: int, seconds: float) -> None:
        invocation, state, t = self._lifecycle.invocation, self._state, self._lifecycle.run_now()
        meter = self._communicator.meter.values()
        total = (sum(each.sent for each in meter), sum(each.received for each in meter))
        before, self._counted = self._counted, total
        invocation.emit(
            RegionExchanged(
                t=t, rank=0, attempt=invocation.attempt, iteration=iteration, bytes_sent=total[0] - before[0],
                bytes_received=total[1] - before[1], seconds=round(seconds, 6), staleness=state.staleness(self._name),
                plan=described(state.plans[-1] if state.plans else None),
            )
        )  # fmt: skip
        for left_out in state.quarantined:
            invocation.emit(
                UpdateQuarantined(
                    t=t, rank=0, attempt=invocation.attempt, iteration=iteration, region=left_out.region, why=left_out.why
                )
            )  # fmt: skip
            invocation.warn(str(left_out))


def _without_gaps(updates: Sequence[Update], applied: dict[str, dict[int, int]]) -> list[Update]:
    """Those that follow what is applied round by round: what a region has sent later waits for the ones before."""
    reached = {name: rounds.get(0, 0) for name, rounds in applied.items()}
    found = []
    for update in updates:
        if update.round == reached[update.region] + 1:
            reached[update.region] += 1
            found.append(update)
    return found
