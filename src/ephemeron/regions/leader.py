"""The part of a region's rank 0 in its exchanges: it sends, receives and decides.

Training waits for what other regions send, and for nothing that is only stored: a contribution is stored, then sent, and the state and the decision are
stored, while the region trains on (`own_updates`). What would make them visible follows them: other ranks read the stored decision, other regions
are told that rounds are needed no more after the decision with these is there, and checkpoints wait for all (`settle`). So a replacement finds what it
rests on, or decides again what nothing has followed from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from ephemeron.errors import KeyExists, RegionSuperseded
from ephemeron.events import RegionLeft
from ephemeron.regions.communicator import Communicator, Update
from ephemeron.regions.entrance import Admissions
from ephemeron.regions.exchange_events import ExchangeEvents, LinkPace
from ephemeron.regions.follower import recall, said_to_live
from ephemeron.regions.incoming_updates import AsynchronousRounds, IncomingUpdates
from ephemeron.regions.own_updates import BackgroundWrites, OwnUpdates, Recipients, samples_of
from ephemeron.regions.policies import AdaptiveSchedule, Due, parse_sync
from ephemeron.regions.records import DecisionMeta, RegionKeys, decode_decision, encode_decision
from ephemeron.regions.region_state import RegionState, schedule_of
from ephemeron.training.worker.control import StopRequest, encode_control
from ephemeron.training.worker.group_exchange import GroupExchange
from ephemeron.training.worker.lifecycle import InvocationLifecycle
from ephemeron.training.worker.spec import GroupMembership

_UNDER_WAY = 2
"""Background writes of decisions that may be under way when an exchange begins: one decision, and what is deleted after it."""


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
    ) -> None:
        self._m, self._communicator, self._lifecycle, self._count = membership, communicator, lifecycle, count
        self._keys, self._channel = RegionKeys(lifecycle.keys.run), lifecycle.channel
        self._schedule, self._sync = (schedule_of(membership, lifecycle.spec.iterations), parse_sync(membership.sync))
        self._name = membership.names[membership.index]
        self._admissions = Admissions(self._name, communicator, lifecycle)
        self._writes = BackgroundWrites()
        # Under an asynchronous policy what is sent follows from what had arrived: nobody else could decide it again.
        self._sending = BackgroundWrites() if self._sync.synchronous else self._writes
        self._own = OwnUpdates(communicator, self._channel, self._keys, self._sending)
        self._owed: dict[Due, np.ndarray] = {}
        """Of updates that earlier attempts have stored, what they lack by rounding."""
        self._decisions = Decisions(lifecycle, self._keys)
        workers = lifecycle.spec.configuration.workers
        self._at_once = workers > 1 and (not self._sync.synchronous or lifecycle.invocation.direct is not None)
        """Whether training waits for the writes: other ranks go on from what it computes after a decision, or take over its state."""
        self._incoming = IncomingUpdates(communicator, lifecycle, lambda: self._state, self._schedule.applied_before)
        self._events = ExchangeEvents(self._name, communicator, lifecycle)
        self._recipients = Recipients(self._name, membership.names, communicator)
        self._left = False
        self._pace = LinkPace(membership, self._sync, communicator, lifecycle.now)

    def is_due(self, iteration: int) -> bool:
        return self._schedule.is_due(iteration)

    async def begin(self, iteration: int, own: np.ndarray, *, exchanged: bool) -> None:
        schedule = self._schedule
        self._state = state = RegionState(self._sync, self._m.names, self._m.compression, own, fragments=schedule.fragments)
        self._rounds = AsynchronousRounds(self._name, state, schedule, self._communicator, self._incoming)
        if isinstance(schedule, AdaptiveSchedule):
            state.plans = schedule.plans
        if self._lifecycle.attempt == 0 and not self._m.joins:
            await self._store(iteration, own)
            return
        stored = await self._channel.list(self._keys.decisions)
        self._decisions.take_over(stored)
        latest = self._decisions.latest(before=iteration + exchanged)
        if latest is not None:
            await self._restore(latest)
        elif iteration == 0:
            await self._store(iteration, own)
        await self._recipients.follow(self._state)
        for due, sent_before, owed in await self._own.send_again(stored):
            if (latest or 0) < sent_before < iteration + exchanged:
                state.owe(schedule.part(due.fragment, own.size), owed)
            self._owed[due] = owed
        if self._at_once and exchanged and self._sync.synchronous and not schedule.decides(iteration):
            # State of a live rank, which does not wait for what is only sent: an earlier attempt may have ended before.
            await self._send_due(iteration, own)

    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        trace, now, began = self._lifecycle.invocation.trace, self._lifecycle.now, self._lifecycle.now()
        self._admissions.look()
        await self._writes.settle(but=_UNDER_WAY)
        await self._sending.settle(but=self._schedule.fragments)
        self._pace.begins(iteration)
        if iteration in self._decisions:
            vector = await self._restore(iteration)
        else:
            vector, decides = own.copy(), self._schedule.decides(iteration)
            self._state.quarantined = []
            try:
                async with said_to_live(self._lifecycle, self._keys, iteration):
                    await self._decide(iteration, vector)
            finally:
                self._count()
            self._events.emit(iteration, now() - began, self._state)
            if decides:
                vector = await self._store(iteration, vector)
            elif self._at_once:
                await self._sending.settle()
        trace.record("wait", began, now())
        await self._recipients.follow(self._state)
        self._admissions.keep_snapshot(self._state, vector)
        self._forget(durable)
        self._pace.ends(iteration)
        last = self._state.members.last_round(self._name)
        if iteration == self._schedule.iterations:
            await self.settle()
            if self._lifecycle.spec.configuration.workers > 2:
                await recall(self._lifecycle, self._keys)
        if iteration == self._schedule.iterations and last is None:
            await self._communicator.leave(after=self._schedule.last)
        elif last is not None and not self._left and iteration >= self._schedule.sent_before(Due(self._schedule.fragments - 1, last)):
            await self._end_part(last)
        return vector

    async def settle(self) -> None:
        await self._sending.settle()
        await self._writes.settle()

    async def close(self) -> None:
        """Ends what goes on in the background."""
        # At once: where this function is ended itself, waiting for them fails, and none may go on.
        ended = [*self._sending.cancel(), *self._writes.cancel(), *self._incoming.cancel()]
        self._count()
        await self._admissions.close()
        await asyncio.gather(*ended, return_exceptions=True)

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
        await self._send_due(iteration, vector)
        for due in applies[len(sent_before) :]:
            await self._apply(due, vector)

    async def _send_due(self, iteration: int, vector: np.ndarray) -> None:
        """Sends what is due, and begins to read the others' parts."""
        for due in self._schedule.sends(iteration):
            if self._takes_part(due):
                self._send(due, vector)
                for name in self._others(due.round):
                    self._incoming.begin(name, due)

    async def _apply(self, due: Due, vector: np.ndarray) -> None:
        part = self._schedule.part(due.fragment, vector.size)
        if self._has_left(due):
            return
        contributions = self._state.accepted(await self._updates(due), part)
        common, late = due.round == self._schedule.last, self._schedule.late(due)
        if isinstance(self._schedule, AdaptiveSchedule):
            common |= self._schedule.applied_before(due) == self._schedule.sent_before(due)
            self._schedule.learn(self._state.plans)
        vector[part] = self._state.policy.merge(part, vector, [c for _, c in contributions], last=common, late=late)

    async def _decide_asynchronously(self, iteration: int, vector: np.ndarray) -> None:
        schedule = self._schedule
        if iteration < schedule.iterations:
            (due,) = schedule.sends(iteration)
            if self._has_left(due):
                return None
            self._send(due, vector)
            return await self._rounds.take(vector, due.round - self._sync.staleness)
        if self._has_left(Due(0, schedule.last)):
            return None
        await self._rounds.take(vector, schedule.rounds)
        due = Due(0, schedule.last)
        self._send(due, vector, parameters=True)
        self._rounds.agree(vector, await self._updates(due))

    async def _updates(self, due: Due) -> list[Update]:
        """Parts of a round of all regions that take part, in their order, once they are there."""
        found = {update.region: update for update in await self._incoming.get(self._others(due.round), due)}
        if self._takes_part(due):
            found[self._name] = self._own[due]
        return [found[name] for name in self._state.members.names if name in found]

    def _others(self, round: int) -> list[str]:
        return [name for name in self._state.members.active(round) if name != self._name]

    def _takes_part(self, due: Due) -> bool:
        return self._state.members.takes_part(self._name, due.round)

    def _has_left(self, due: Due) -> bool:
        """Whether this region takes part in earlier rounds only."""
        last = self._state.members.last_round(self._name)
        return last is not None and due.round > last

    # -- sending ------------------------------------------------------------------------------------------

    def _send(self, due: Due, vector: np.ndarray, *, parameters: bool = False) -> None:
        """Has this region's part of a round stored and sent; `parameters`: the parameters as they are."""
        part, schedule, state = self._schedule.part(due.fragment, vector.size), self._schedule, self._state
        how, plan, measured = None, None, None
        if isinstance(schedule, AdaptiveSchedule):
            how, measured = schedule.plan(due.round), self._pace.measured()
            if due.fragment == 0 and state.members.coordinator(due.round) == self._name:
                plan = self._pace.plan_after(due.round, schedule, state.measured, nbytes=4 * vector.size)
        entrance, leaves, forgets = None, False, ""
        if due.fragment == 0 and not parameters:
            forgets = self._admissions.lapsed(due.round, state)
            entrance = None if forgets else self._admissions.announcement(due.round, state, schedule, plan)
            leaves = self._admissions.leaves and due.round < schedule.last and len(self._others(due.round)) > 0
        payload = state.payload(
            part,
            vector,
            parameters=parameters,
            compression=how.how.compression if how else "",
            plan=plan,
            measured=measured,
            entrance=entrance,
            leaves=leaves,
            forgets=forgets,
        )
        if self._own.is_stored(due):  # by an earlier attempt, and sent again
            state.owe(part, self._owed.pop(due))
        else:
            update = Update(
                region=self._name,
                fence=self._communicator.fence,
                fragment=due.fragment,
                round=due.round,
                samples=samples_of(self._lifecycle.spec.split, schedule, due),
                norm=state.norm(payload, part),
                payload=payload,
            )
            self._own.send(update, state.owed(part), iteration=schedule.sent_before(due))
        if not self._sync.synchronous:
            state.applied[self._name][due.fragment] = due.round
            state.learn_own(self._name, due.round, self._own[due].payload)

    # -- decisions ----------------------------------------------------------------------------------------

    async def _store(self, iteration: int, vector: np.ndarray) -> np.ndarray:
        """Has a decision stored, and the state with it; returns the vector that the region goes on with."""
        state = self._state
        applied = {name: dict(rounds) for name, rounds in state.applied.items()}
        write = self._decisions.make(iteration, vector, state)

        async def stored() -> None:
            await write()
            state.stored = applied

        if not self._at_once:
            self._writes.add(stored)
            return vector
        await self.settle()
        try:
            await stored()
        except RegionSuperseded:  # an earlier attempt that goes on was first: other ranks may have read its decision
            return await self._restore(iteration)
        return vector

    async def _restore(self, iteration: int) -> np.ndarray:
        """The vector of a stored decision, whose state becomes this one."""
        await self._writes.settle()
        vector = await self._decisions.restore(iteration, self._state)
        if isinstance(self._schedule, AdaptiveSchedule):
            self._schedule.learn(self._state.plans)
        return vector

    def _forget(self, durable: int) -> None:
        """Has deleted what no replacement would read again, and what all other regions have applied."""
        state, needed = self._state, self._recipients.needing(self._state)
        own = state.applied[self._name]
        done = [
            due
            for due in self._own.kept
            if due.round <= own.get(due.fragment, 0) and all(state.has_applied(name, self._name, due) for name in needed)
        ]
        gone = self._own.forget(done) + self._decisions.forget(durable)
        applied = [(name, *each) for name, rounds in state.applied.items() if name != self._name for each in rounds.items()]

        async def forget() -> None:
            for name, fragment, number in applied:
                await self._communicator.acknowledge(name, fragment, number)
            if gone:
                await self._channel.delete(gone)

        self._writes.add(forget)

    async def _end_part(self, last: int) -> None:
        """This region has sent its last round: it stops at a checkpoint."""
        self._left = True
        await self.settle()
        await self._communicator.leave(after=last)
        invocation = self._lifecycle.invocation
        invocation.emit(RegionLeft(t=self._lifecycle.run_now(), rank=0, attempt=invocation.attempt, region=self._name, round=last))
        await self._channel.put(self._lifecycle.keys.control, [encode_control(StopRequest())])


# -- decisions of a region ----------------------------------------------------------------------------------------


class Decisions:
    """Decisions of one region, as its rank 0 makes them.

    Args:
        lifecycle: of the invocation.
        keys: of the region's exchange.
    """

    def __init__(self, lifecycle: InvocationLifecycle, keys: RegionKeys) -> None:
        self._lifecycle, self._keys, self._channel = lifecycle, keys, lifecycle.channel
        self._made: list[int] = []
        """Iterations of those that are stored or being stored, ascending."""
        self._states: dict[int, set[str]] = {}
        """By iteration, keys of the states that attempts of this rank have stored."""

    def __contains__(self, iteration: int) -> bool:
        return iteration in self._made

    def take_over(self, stored: Sequence[str]) -> None:
        """Learns what earlier attempts have stored, from the keys of the region's exchange."""
        self._made = self._keys.decided(stored)
        for key in stored:
            if (iteration := self._keys.iteration_of_state(key)) is not None:
                self._states.setdefault(iteration, set()).add(key)

    def latest(self, *, before: int) -> int | None:
        """Iteration of the latest decision before another one; None: there is none."""
        return max((known for known in self._made if known < before), default=None)

    def make(self, iteration: int, vector: np.ndarray, state: RegionState) -> Callable[[], Awaitable[None]]:
        """A decision with its state, both as they are now; returns what stores them.

        Storing raises `RegionSuperseded` where another attempt of this rank was first with other parameters.
        """
        attempt, key = self._lifecycle.attempt, self._keys.decision(iteration)
        state_key, encoded = self._keys.state(iteration, attempt), state.encoded(vector)
        left_out = tuple(update.region for update in state.quarantined)
        data = encode_decision(vector, DecisionMeta(attempt=attempt, quarantined=left_out, plans=state.plans))
        if iteration not in self._made:
            self._made.append(iteration)
        self._states.setdefault(iteration, set()).add(state_key)

        async def write() -> None:
            await self._channel.put(state_key, [encoded])
            try:
                await self._channel.put(key, [data], create=True)
            except KeyExists:
                await self._compare(iteration, data)

        return write

    async def _compare(self, iteration: int, data: bytes) -> None:
        """Looks whether the stored decision is this one: an earlier attempt that goes on unnoticed has made the same."""
        key = self._keys.decision(iteration)
        there, meta = decode_decision((await self._channel.get(key, deadline=self._deadline())).data, key)
        if there.tobytes() != decode_decision(data, key)[0].tobytes():
            raise RegionSuperseded(f"attempt {meta.attempt} of this region's rank 0 has decided iteration {iteration}")
        self._states[iteration].add(self._keys.state(iteration, meta.attempt))

    async def restore(self, iteration: int, state: RegionState) -> np.ndarray:
        """The vector of a stored decision; a state becomes the one beside it."""
        key = self._keys.decision(iteration)
        vector, meta = decode_decision((await self._channel.get(key, deadline=self._deadline())).data, key)
        key = self._keys.state(iteration, meta.attempt)
        state.load((await self._channel.get(key, deadline=self._deadline())).data, key, vector)
        self._states.setdefault(iteration, set()).add(key)
        return vector

    def forget(self, durable: int) -> list[str]:
        """Forgets those that no replacement would read; returns the keys to delete.

        Args:
            durable: number of iterations that no rank of this region would repeat.
        """
        gone: list[str] = []
        old = [known for known in self._made if known < durable][:-1]
        for known in old:
            gone += [self._keys.decision(known), *sorted(self._states.pop(known, ()))]
        self._made = self._made[len(old) :]
        return gone

    def _deadline(self) -> float:
        return self._lifecycle.now() + self._lifecycle.wait_timeout_s()
