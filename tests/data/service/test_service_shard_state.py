"""What a shard decides, with readers, loaders and their luck drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.data.scheduler import LoaderQueue, LoaderReport, QueueOptions, TaskRetryPolicy
from ephemeron.data.service.shard_state import LoadResult, SampleKey, SerializedSample, ShardState, _AlreadyDelivered

GIANT = 1000
LIMIT = 300
DEATHS = 6
"""Of loaders by bad luck: fewer than it takes to blame a sample for them."""


def content(name: SampleKey, nbytes: int) -> bytes:
    return (repr(tuple(name)).encode() * (nbytes // 4 + 1))[:nbytes]


class Reader:
    """Asks for batches ahead, in order or not, and takes each once."""

    def __init__(self, name: str, job: str, batches: list[tuple[SampleKey, ...]]) -> None:
        self.name, self.job, self.batches = name, job, batches
        self.asked: set[int] = set()
        self.got: dict[int, list[SerializedSample]] = {}

    @property
    def over(self) -> bool:
        return len(self.got) == len(self.batches)

    @property
    def received(self) -> int:
        return next((t for t in range(len(self.batches)) if t not in self.got), len(self.batches)) - 1


class Loader:
    def __init__(self, name: str, batch: int) -> None:
        self.name, self.queue = name, LoaderQueue(batch=batch)
        self.results: dict[Any, LoadResult] = {}


class World:
    """A shard with everybody around it; `step` lets anything happen, `calm` only what should."""

    def __init__(self, seed: int, *, random_flow: bool, cache: bool) -> None:
        self.rng = random.Random(seed)
        self.random = random_flow
        self.core = ShardState(
            random=random_flow,
            buffer_nbytes=LIMIT,
            cache_nbytes=400 if cache else 0,
            failed_sample=self.gave_up,
            options=QueueOptions(window=5, batch=2, lease_s=4, stuck_s=20, unresponsive_s=1),
            policy=TaskRetryPolicy(retries=DEATHS),
        )
        self.deaths = DEATHS
        self.core.buffer.size.nbytes = 10
        self.sizes = {i: self.rng.choice([3, 5, 8, 20]) for i in range(12)}
        self.sizes[self.rng.randrange(12)] = 5 * GIANT
        self.poison = {self.rng.randrange(12)} if self.rng.random() < 0.4 else set()
        self.now, self.number = 0.0, 0
        self.loaders: list[Loader] = []
        self.readers = [self.reader(n) for n in range(self.rng.randint(1, 4))]
        self.largest = 0

    def reader(self, number: int) -> Reader:
        job = f"job{number // 2}"
        count = self.rng.randint(1, 6)
        batches = [
            tuple(self.core.key(self.rng.randrange(12), t // 3, number // 2) for _ in range(self.rng.randint(1, 4))) for t in range(count)
        ]
        self.core.announce(job, 0, number // 2, list(range(12)))
        return Reader(f"{job}/{number}", job, batches)

    def gave_up(self, name: SampleKey, reason: str) -> SerializedSample:
        return SerializedSample(buffers=(b"gave up",), nbytes=7, failed=True)

    def made(self, name: SampleKey) -> LoadResult:
        nbytes = self.sizes[name.sample]
        half = SerializedSample(buffers=(content(SampleKey(name.sample), 6),), nbytes=6, cost_s=0.5)
        return LoadResult(
            sample=SerializedSample(buffers=(content(name, nbytes),), nbytes=nbytes, cost_s=1.0),
            half=half if self.random and not name.once else None,
        )

    # -- readers ------------------------------------------------------------------------------------------

    def ask(self, reader: Reader, ticket: int) -> None:
        reader.asked.add(ticket)
        try:
            self.core.request(reader.name, reader.job, ticket, reader.batches[ticket], now=self.now)
        except _AlreadyDelivered:
            assert ticket in reader.got

    def take(self, reader: Reader, ticket: int, *, lost: bool) -> None:
        found = self.core.fetch(reader.name, ticket, now=self.now)
        if found is None or lost:
            return
        if ticket not in reader.got:
            for name, one in zip(reader.batches[ticket], found, strict=True):
                if one.failed:
                    assert name.sample in self.poison, "only those are given up"
                else:
                    assert name.sample not in self.poison
                    assert one.buffers == (content(name, self.sizes[name.sample]),), "exactly the asked sample"
            reader.got[ticket] = found

    def read(self, reader: Reader, *, calm: bool) -> None:
        if reader.over:
            return self.core.remove_reader(reader.name)
        if reader.received >= 0 and (calm or self.rng.random() < 0.5):
            self.core.acknowledge(reader.name, reader.received)
        window = range(reader.received + 1, min(len(reader.batches), reader.received + 4))
        if calm:
            for ticket in window:
                self.ask(reader, ticket)
        else:
            self.ask(reader, self.rng.choice([*window, *reader.got]))
        for ticket in window:
            self.take(reader, ticket, lost=not calm and self.rng.random() < 0.3)
        return None

    # -- loaders ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.number += 1
        loader = Loader(f"loader-{self.number}", batch=2)
        self.core.add_loader(loader.name, now=self.now)
        self.loaders.append(loader)

    def die(self, loader: Loader) -> None:
        self.loaders.remove(loader)
        self.core.fail_loader(loader.name)

    def work(self, loader: Loader, *, calm: bool) -> None:
        key: Any = loader.queue.take()
        if key is not None:
            if key.sample in self.poison:
                return self.die(loader)
            loader.results[key] = self.made(key)
            loader.queue.finish()
        report = loader.queue.under_way or loader.queue.report()
        if report is None:
            return None
        replies = [self.sync(loader, report) for _ in range(1 if calm else self.rng.choice([0, 1, 1, 2]))]
        if not replies or (not calm and self.rng.random() < 0.3):
            return None  # the request is lost, or all answers to it
        reply = replies[-1]
        if not reply.hold:
            self.answered(loader, reply)
        return None

    def sync(self, loader: Loader, report: LoaderReport) -> Any:
        results = {name: loader.results[name] for name in report.done}
        reply = self.core.report(loader.name, report, results, now=self.now)  # type: ignore[arg-type]
        return self.core.report(loader.name, report, results, now=self.now) if reply.rejoin else reply  # type: ignore[arg-type]

    def answered(self, loader: Loader, reply: Any) -> None:
        tasks = self.core.tasks(loader.name, reply)
        for name, half in tasks:
            if half is not None:
                assert half.buffers == (content(SampleKey(name.sample), 6),), "the half of that very sample"
        loader.queue.sync(reply.request, [name for name, _ in tasks])

    def ring(self) -> None:
        for name in self.core.scheduler.idle_loaders():
            reply = self.core.scheduler.assign(name, now=self.now)
            if reply.hold:
                break
            for loader in self.loaders:
                if loader.name == name:
                    self.answered(loader, reply)

    # -- everybody ----------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now += self.rng.choice([0, 0.1, 0.5])
        event = self.rng.random()
        if event < 0.45:
            self.read(self.rng.choice(self.readers), calm=False)
        elif event < 0.85 and self.loaders:
            self.work(self.rng.choice(self.loaders), calm=False)
        elif event < 0.88 and self.loaders and self.deaths:
            self.deaths -= 1
            self.die(self.rng.choice(self.loaders))
        elif event < 0.90 and self.deaths >= len(self.loaders):
            self.deaths -= len(self.loaders)
            self.now += 5
            self.core.tick(now=self.now)  # all are silent; they do not know, and come back
        elif event < 0.92:
            reader = self.rng.choice(self.readers)
            self.core.remove_reader(reader.name)  # taken for gone; it asks again
        elif len(self.loaders) < 3:
            self.start()
        self.ring()
        self.check()

    def calm(self) -> None:
        self.now += 0.01
        while len(self.loaders) < 2:
            self.start()
        for reader in self.readers:
            self.read(reader, calm=True)
        for loader in list(self.loaders):
            self.core.scheduler.heartbeat(loader.name, now=self.now)
            self.work(loader, calm=True)
            self.ring()
        self.check()

    def check(self) -> None:
        core = self.core
        core.buffer.validate()
        core.scheduler.validate()
        held = sum(max(1, one.nbytes) for one in core._held.values())
        assert held == core.buffer.buffered_nbytes, "what it counts is what it has"
        following: set[SampleKey] = set()
        for consumer, reader in core._readers.items():
            assert set(reader.names) == set(core.buffer.announced(consumer)) == set(reader.lacking)
            for ticket, names in reader.names.items():
                assert reader.lacking[ticket] == set(core.buffer.missing(consumer, ticket)), "lacking"
                assert reader.lacking[ticket] == {name for name in names if name not in core._held}
            following |= set(reader.names.get(core.next_batch(consumer) or 0, ()))
        entitled = sum(max(1, core._held[name].nbytes) for name in following if name in core._held)
        assert held <= max(LIMIT, entitled), "the bound on memory"
        self.largest = max(self.largest, held)
        for consumer, ticket in core.ready:
            assert not core._readers[consumer].lacking[ticket]
        if core.cache is not None:
            assert sum(max(1, one.nbytes) for one in core._kept.values()) == core.cache.used_bytes <= 400
        wanted = {name for reader in core._readers.values() for names in reader.names.values() for name in names}
        assert set(core._held) <= wanted, "nothing is held that nobody wants"
        assert set(core.scheduler.tasks) <= wanted
        assert set(core._awaited) == wanted


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 120), st.booleans(), st.booleans())
def test_every_batch_is_given_in_the_end(seed: int, bad_steps: int, random_flow: bool, cache: bool) -> None:
    world = World(seed, random_flow=random_flow, cache=cache)
    for _ in range(bad_steps):
        world.step()
    for _ in range(3000):
        if all(reader.over for reader in world.readers):
            break
        world.calm()
    assert all(reader.over for reader in world.readers), "somebody waits for ever"
    world.calm()
    assert world.core.readers == 0
    assert world.core._held == {}
    assert world.core._awaited == {}
    assert world.core.scheduler.tasks == {}
    assert world.core._futures == {}


def core(**options: Any) -> ShardState:
    it = ShardState(
        random=options.pop("random", True),
        buffer_nbytes=1000,
        cache_nbytes=options.pop("cache", 0),
        failed_sample=lambda name, reason: SerializedSample(buffers=(reason.encode(),), nbytes=1, failed=True),
        **options,
    )
    it.buffer.size.nbytes = 10
    return it


def load(core: ShardState, loader: str, samples: Sequence[int] | None = None) -> list[SampleKey]:
    """Loads what the loader is given, or only some of it; returns what it was given."""
    request = core.scheduler.loaders[loader].request + 1 if loader in core.scheduler.loaders else 1
    if loader not in core.scheduler.loaders:
        core.add_loader(loader, now=0)
    reply = core.report(loader, LoaderReport(request=request), {}, now=0)
    names: Any = reply.tasks
    done = {
        n: LoadResult(sample=SerializedSample(buffers=(b"%d" % n.sample,), nbytes=10, cost_s=1))
        for n in names
        if samples is None or n.sample in samples
    }
    core.report(loader, LoaderReport(request=request + 1, done=tuple(done)), done, now=0)
    return list(names)


def test_a_late_batch_does_not_lose_the_others() -> None:
    it = core()
    first, second = (SampleKey(0),), (SampleKey(1), SampleKey(0))
    assert not it.request("r", "j", 2, second, now=0)
    assert not it.request("r", "j", 1, first, now=0)
    load(it, "l")
    assert it.ready == {("r", 1), ("r", 2)}
    assert [one.buffers for one in it.fetch("r", 2, now=0) or []] == [(b"1",), (b"0",)]
    assert it.request("r", "j", 1, first, now=0), "asking again changes nothing"


def test_a_call_from_the_past_changes_nothing() -> None:
    it = core()
    for ticket in range(3):
        it.request("r", "j", ticket, (SampleKey(ticket),), now=0)
    load(it, "l")
    it.acknowledge("r", 0)
    assert it.is_announced("r", 0)
    assert not it.is_announced("r", 3)
    with pytest.raises(_AlreadyDelivered, match="batch 0 of r"):
        it.request("r", "j", 0, (SampleKey(0),), now=0)
    assert it.fetch("r", 0, now=0) is None
    assert it.fetch("r", 1, now=0) is not None
    it.acknowledge("r", 0)
    assert it.fetch("r", 1, now=0) is not None
    it.acknowledge("r", 2)
    assert it.is_announced("r", 2), "or whoever comes after it would wait for it"


def test_a_lost_answer_is_given_again_and_counted_once() -> None:
    it = core(random=False, cache=1000)
    it.announce("j", 0, 7, [0, 1])
    names = tuple(it.key(i, 0, 7) for i in (0, 1))
    it.request("r", "j", 0, names, now=0)
    load(it, "l")
    assert it.fetch("r", 0, now=0) == it.fetch("r", 0, now=1)
    assert it.cache is not None
    assert it.cache._policy.jobs["j"].accessed == 2  # type: ignore[attr-defined]


def test_what_is_not_random_is_the_same_for_all() -> None:
    it = core(random=False, cache=1000)
    assert it.key(3, 0, 1) == it.key(3, 9, 2) != it.key(3, 0, 1, "alone")
    assert it.key(3, 0, 1).seed is not None, "steps that may be cached draw as they do anywhere"
    it.request("a", "a", 0, (it.key(3, 0, 1),), now=0)
    load(it, "l")
    it.remove_reader("a")
    assert it.request("b", "b", 0, (it.key(3, 5, 2),), now=0), "from the cache"
    assert (it.hits, it.loaded) == (1, 1)
    assert core().key(3, 0, 1) != core().key(3, 1, 1)


def test_a_sample_that_kills_is_given_up_and_the_others_are_not() -> None:
    it = core(policy=TaskRetryPolicy(retries=1))
    it.request("r", "j", 0, (SampleKey(0), SampleKey(1), SampleKey(2)), now=0)
    for number in range(20):
        loader = f"l{number}"
        given = load(it, loader, samples=[])
        if SampleKey(1) in given:
            it.fail_loader(loader)  # whatever else it had in hand is only suspected
            continue
        load(it, loader)
        it.remove_loader(loader)
        if it.request("r", "j", 0, (SampleKey(0), SampleKey(1), SampleKey(2)), now=0):
            break
    found = it.fetch("r", 0, now=0)
    assert found is not None
    assert [one.failed for one in found] == [False, True, False]
    it.remove_reader("r")
    assert it.request("s", "j", 0, (SampleKey(1),), now=0), "nobody else dies of it"


def test_somebody_elses_giant_stops_nobody() -> None:
    it = core()
    giant, small = (SampleKey(99),), tuple((SampleKey(i),) for i in range(5))
    it.request("greedy", "g", 0, giant, now=0)
    it.request("greedy", "g", 1, (SampleKey(98),), now=0)
    it.request("modest", "m", 0, small[0], now=0)
    it.add_loader("l", now=0)
    reply = it.report("l", LoaderReport(request=1), {}, now=0)
    big = LoadResult(sample=SerializedSample(buffers=(b"",), nbytes=100_000))
    done = {SampleKey(99): big, SampleKey(98): big}
    it.report("l", LoaderReport(request=2, done=tuple(n for n in reply.tasks if n in done)), done, now=0)
    assert it.buffer.buffered_nbytes == 100_000, "its next batch it may have, and no more"
    it.remove_loader("l")
    for ticket in range(5):
        it.request("modest", "m", ticket, small[ticket], now=0)
        load(it, "other", samples=range(5))
        it.remove_loader("other")
        assert it.fetch("modest", ticket, now=0) is not None
        it.acknowledge("modest", ticket)


def test_who_is_at_work() -> None:
    it = core()
    assert not it.is_busy("l")
    it.add_loader("l", now=0)
    assert not it.is_busy("l")
    it.request("r", "j", 0, (SampleKey(0),), now=0)
    load(it, "l", samples=[])
    assert it.is_busy("l")
    it.fail_loader("l")
    assert not it.is_busy("l")
