"""Changes of a run's functions while it trains: how all ranks agree on the next generation, and its objects.

Rank 0 writes who the members of the next generation are and at which iteration it begins (`RUN/generation/N`), before its
contribution to an earlier iteration carries the flag `RESIZE`. Merged versions pass the flag on, so every rank knows of the change
before it gets there. At that iteration all ranks have applied all versions; rank 0 stores the common state (`RUN/begin/N`), and
the members begin from it: those who stay in the same invocation, the others in functions that were started ahead.

Keys of contributions, checkpoints and attempts are those of a generation, so a rank that comes late can do no harm. It finds the
state in which the next generation begins and goes on there, or ends.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build, plain
from ephemeron.errors import CorruptMessage, DamagedObject, InvocationRefused, JobError, KeyExists
from ephemeron.events import Note
from ephemeron.training.collectives import all_of
from ephemeron.training.job.generation import Generation, Resize
from ephemeron.training.tensors import RESIZE, Arrays, decode_state, encode_state
from ephemeron.training.worker.decisions import DecisionState
from ephemeron.training.worker.lifecycle import CHECK_EVERY_S, STOPPING, InvocationLifecycle
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.checkpoint import EndedEpoch
from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.timeouts import IterationTimes

_log = logging.getLogger(__name__)

_STORES = 3
"""Times that an object is stored which is not there when it is read back."""


class Begin(NamedTuple):
    """The state in which a generation begins."""

    trainer: Arrays
    meta: BeginMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginMeta:
    """Plain values of the state in which a generation begins."""

    iteration: int
    spent_usd: float = 0.0
    """Cost of the run so far, as rank 0 estimates it."""
    run_s: float = 0.0
    """Time since the launch of the run, until which that is."""
    times: IterationTimes = field(default_factory=IterationTimes)
    decisions: DecisionState = field(default_factory=DecisionState)
    ended: EndedEpoch | None = None
    """The epoch that ends where the generation begins, if code decides on the functions after it."""
    trainer: Mapping[str, object] = field(default_factory=dict)
    """See `Trainer.state`."""


def encode_begin(begin: Begin) -> bytes:
    """The state as the bytes of an object."""
    return bytes(encode_state(begin.trainer, plain(begin.meta)))


def decode_begin(data: memoryview | bytes, *, key: str) -> Begin:
    """The inverse of `encode_begin`.

    Raises:
        CorruptMessage: it is damaged, or another document.
    """
    arrays, raw = decode_state(data, key=key)
    try:
        return Begin(arrays, build(BeginMeta, raw, where=key))
    except JobError as e:
        raise CorruptMessage(f"not the begin of a generation of this release: {e}", key=key) from None


def decode_members(data: memoryview | bytes, *, key: str) -> Generation:
    """A generation from its object.

    Raises:
        CorruptMessage: it is another document.
    """
    try:
        return build(Generation, json.loads(bytes(data)), where=key)
    except (ValueError, JobError) as e:
        raise CorruptMessage(f"not a generation of this release: {e}", key=key) from None


async def members_of(channel: Channel, keys: Keys, number: int) -> Generation | None:
    """A generation as it was agreed on; None: it was not yet."""
    key = keys.members(number)
    data = await channel.fetch(key)
    return None if data is None else decode_members(data, key=key)


async def current_generation(channel: Channel, keys: Keys, spec: RunSpec) -> RunSpec:
    """The specification in the latest generation that has begun. Lists: not for every iteration.

    Args:
        channel, keys: of the run.
        spec: in the first generation.
    """
    members = await members_of(channel, keys, await fencing.latest_begun(channel, keys))
    return spec if members is None else spec.in_generation(members)


class GenerationChange:
    """The next change of the functions, as one rank knows it.

    Args:
        lifecycle: of the invocation.
        agreed: the next generation, if it is agreed on.
    """

    def __init__(self, lifecycle: InvocationLifecycle, agreed: Generation | None) -> None:
        self._lifecycle, self._spec = lifecycle, lifecycle.spec
        self._channel, self._keys, self._rank = lifecycle.channel, lifecycle.keys, lifecycle.rank
        self._scheduled = self._spec.scheduled
        self._now = self._spec.current_generation
        self._timeline, self._iterations = self._spec.timeline, self._spec.iterations
        self.agreed = agreed
        self._dropped = self._now.request
        """Name of the last request that was carried out or dropped."""
        self._started = False
        self._mentioned = False

    @property
    def next(self) -> Generation | None:
        """The next generation, as far as it is known."""
        return self.agreed or self._scheduled

    def begins_at(self, iteration: int) -> bool:
        """Whether the next generation begins with an iteration."""
        return self.next is not None and self.next.from_iteration == iteration

    def announce(self) -> None:
        """From now on this rank's contributions say that the next generation is agreed on."""
        if self.agreed is not None:
            self._lifecycle.resizes = True

    async def learn(self, flags: int) -> None:
        """Takes in the flags of a merged version."""
        if flags & RESIZE and self.agreed is None and not self._mentioned:
            self._mentioned = True
            found = await members_of(self._channel, self._keys, self._now.number + 1)
            if found is None:
                _log.warning("the next generation is announced, but not stored yet")
                self._mentioned = False
                return
            self.agreed = found
            self.announce()

    async def prepare(self, iteration: int) -> None:
        """Before an iteration: rank 0 agrees on a change that is due, and each rank starts its share of new members."""
        if self._rank == 0 and self.agreed is None:
            await self._propose(iteration)
        if self.agreed is not None and not self._started and iteration >= self.agreed.from_iteration - self._lead(self.agreed):
            await self.start_members()

    async def _propose(self, iteration: int) -> None:
        wanted = self._requested_generation(iteration)
        scheduled = self._scheduled
        if wanted is None and scheduled is not None and scheduled.from_iteration - iteration <= self._lead(scheduled) + 2:
            wanted = scheduled
        if wanted is not None and wanted.from_iteration > iteration:
            await self._agree(wanted, iteration)

    def _requested_generation(self, iteration: int) -> Generation | None:
        """The generation that a request of the user leads to; None: there is none, or it cannot be carried out now."""
        request = self._lifecycle.resize_request
        if request is None or request.name == self._dropped or self._lifecycle.timeouts.typical_s == 0:
            return None
        timeline, spec = self._timeline, self._spec
        try:
            first = iteration + self._lead(spec.resized(request.resize, iteration)) + 2
            anywhere = spec.samples_globally and not self._lifecycle.has_barriers
            if not anywhere and not timeline.starts_epoch(first):
                first = timeline.start_of(timeline.epoch_of(first) + 1)
            if first >= self._iterations:
                raise JobError("the run ends before the change could begin")
            wanted = spec.resized(request.resize, first, request=request.name)
            spec.in_generation(wanted).check_shares()
            if not self._is_affordable(wanted, iteration):
                raise JobError("the budget does not cover it")
        except JobError as e:
            self._dropped = request.name
            self._note(f"resize to {_described(request.resize)} is left out: {e}", level="warning")
            return None
        if self._scheduled is not None and first >= self._scheduled.from_iteration:
            return None  # after the change that the job schedules
        return wanted

    async def _agree(self, wanted: Generation, iteration: int) -> None:
        """Stores the next generation, before any contribution announces it. An attempt that was replaced must not."""
        await self._lifecycle.check_fence()
        key, data = self._keys.members(wanted.number), json.dumps(plain(wanted)).encode()
        for _ in range(_STORES):
            try:
                stored = await self._channel.fetch(key)
            except DamagedObject:
                await self._channel.put(key, [data])
                continue
            if stored is not None:
                known = decode_members(stored, key=key)
                if known == wanted or known.from_iteration >= iteration + self._least_lead():
                    self.agreed = known
                    self.announce()
                    return self._note(f"from iteration {known.from_iteration} on: {_described(known)}")
                await self._channel.put(key, [data])  # of an attempt that was replaced before it announced it
            else:
                try:
                    await self._channel.put(key, [data], create=True)
                except KeyExists:
                    continue
        _log.warning("the next generation could not be stored")

    def _least_lead(self) -> int:
        """Iterations after which every rank has applied a version that carries the announcement."""
        sync = self._lifecycle.staleness
        return 2 + sync

    def _lead(self, following: Generation) -> int:
        """Iterations before the change at which functions are started."""
        now = self._now
        least = self._least_lead()
        if following.workers <= now.workers and following.memory_mb == now.memory_mb:
            return least
        typical_s = self._lifecycle.timeouts.typical_s
        start_s = self._spec.cold_start_s + 2 * self._lifecycle.handoff.load_s
        return least + (math.ceil(start_s / typical_s) if typical_s else 0)

    def _new(self, following: Generation) -> int:
        """Functions that are started for a generation."""
        now = self._now
        return following.workers - (min(now.workers, following.workers) if following.memory_mb == now.memory_mb else 0)

    def _is_affordable(self, following: Generation, iteration: int) -> bool:
        """Whether the budget covers the iterations until a generation, the start of its functions, and a stop right after it."""
        lifecycle, now = self._lifecycle, self._now
        typical_s = lifecycle.timeouts.typical_s
        before = now.workers * now.memory_mb * (following.from_iteration - iteration) * typical_s
        ahead = self._new(following) * following.memory_mb * self._lead(following) * typical_s
        stopping = following.workers * following.memory_mb * (STOPPING * typical_s + CHECK_EVERY_S)
        return not lifecycle.budget.is_spent_by(lifecycle.now(), lifecycle.channel.traffic, gb_seconds=(before + ahead + stopping) / 1024)

    async def start_members(self) -> None:
        """Starts this rank's share of the functions that the next generation needs in addition."""
        following = self.next
        if following is None or self._started:
            return
        self._started = True
        now, first = self._now, fencing.first_attempt(following.number)
        new = range(now.workers, following.workers)
        mine = [rank for rank in new if rank % now.workers == self._rank]
        self._lifecycle.budget.start_ahead(self._lifecycle.now(), workers=self._new(following), memory_mb=following.memory_mb)
        if following.memory_mb != now.memory_mb and self._rank < following.workers:
            mine.append(self._rank)
        await all_of(self._start(rank, first, following.memory_mb) for rank in mine)

    async def _start(self, rank: int, attempt: int, memory_mb: int) -> None:
        lifecycle = self._lifecycle
        if not await fencing.claim(self._channel, self._keys, rank, attempt, Claim(at_s=lifecycle.run_now())):
            return
        try:
            await lifecycle.invoke(rank, attempt, "start", WorkerRequest(), memory_mb=memory_mb)
        except InvocationRefused as e:  # its peers try again
            self._note(f"rank {rank} of the next generation could not be started: {e}", level="warning")

    def _note(self, text: str, *, level: str = "info") -> None:
        _log.log(logging.WARNING if level == "warning" else logging.INFO, "%s", text)
        lifecycle = self._lifecycle
        lifecycle.invocation.emit(Note(t=lifecycle.run_now(), level="warning" if level == "warning" else "info", text=text))

    async def store_begin(self, begin: Begin) -> bytes | None:
        """Stores the state in which the next generation begins, and makes sure that it is there.

        Returns:
            What is stored: another attempt of this rank may have been first. None: it may be lost.
        """
        assert self.next is not None
        await self._lifecycle.check_fence()
        members, key = self._keys.members(self.next.number), self._keys.begin(self.next.number)
        _, stored = await all_of((self._stored(members, json.dumps(plain(self.next)).encode()), self._stored(key, encode_begin(begin))))
        return stored

    async def _stored(self, key: str, content: bytes) -> bytes | None:
        for _ in range(_STORES):
            try:
                await self._channel.put(key, [content], create=True)
            except KeyExists:
                pass
            try:
                found = await self._channel.fetch(key)
            except DamagedObject:  # all attempts of this rank put the same
                await self._channel.put(key, [content])
                continue
            if found is not None:
                return bytes(found)
        return None


def _described(change: Resize | Generation) -> str:
    names = ("workers", "memory_mb", "aggregators", "batch_size")
    said = {name: getattr(change, name) for name in names if getattr(change, name) is not None}
    return ", ".join(f"{name} = {value}" for name, value in said.items())


async def delete_generation(channel: Channel, keys: Keys, number: int, *, ranks: int) -> None:
    """Deletes the objects of a generation that all its ranks have left. Lists: once for each change.

    Args:
        channel, keys: of the run.
        number: of the generation.
        ranks: its members.
    """
    await channel.put(keys.over(number), [b""])
    old = Keys(keys.run, group=keys.group, generation=number)
    prefixes = [old.exchanged, old.all_left(number), *(old.states(rank) for rank in range(ranks))]
    found = [key for listed in await all_of(channel.list(prefix) for prefix in prefixes) for key in listed]
    claims = await all_of(channel.list(prefix) for r in range(ranks) for prefix in (keys.claims(r), keys.starts(r), keys.hands(r)))
    tokens = [key for listed in claims for key in listed if fencing.generation_of(fencing.number_in(key)) == number]
    await channel.delete([*found, *tokens, keys.begin(number)])


__all__ = [
    "Begin",
    "BeginMeta",
    "EndedEpoch",
    "GenerationChange",
    "decode_begin",
    "decode_members",
    "delete_generation",
    "encode_begin",
    "members_of",
]
