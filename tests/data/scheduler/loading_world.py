"""A whole loading service in virtual time: routers, loaders, trainers and a bad network, from one seed.

Only the decisions are real (the room under test); messages, work, deaths and clocks are events in a heap. What happens
is drawn from two generators: one for the jobs, so that the same jobs can be run with other luck, and one for the luck.
Bad luck ends at `FAULTS_END_S`; after that everything has to come to an end.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from loading_plans import DEATHS, JobPlan, draw_luck

from ephemeron.data import epoch_order
from ephemeron.data.scheduler import (
    DeliveredBatch,
    Delivery,
    DeliveryRefused,
    Elastic,
    ElasticLimits,
    EpochEnd,
    LoadCounters,
    LoaderQueue,
    LoaderReport,
    LocalBuffer,
    QueueOptions,
    RemoteBuffer,
    Scheduler,
    TaskRetryPolicy,
    decide,
)

FAULTS_END_S = 40.0
END_S = 4000.0
RETRANSMIT_S = 3.0
EPOCH_TICKETS = 1_000_000
SIZES_FROM = 10
GIANT = 1000


@dataclass(eq=False)
class Trainer:
    """One rank: algorithm 3.7, and a step that takes its time."""

    job: Job
    rank: int
    generation: int
    epoch: int
    local: LocalBuffer[Any] = field(init=False)
    stopped: bool = False
    busy: bool = False

    def __post_init__(self) -> None:
        self.begin_epoch()

    def begin_epoch(self) -> None:
        self.local = LocalBuffer(batches=3, limit_nbytes=400, in_flight=2)


@dataclass(eq=False)
class Job:
    """The job as its owner sees it: what its model was trained on."""

    name: str
    plan: JobPlan
    trainers: list[Trainer] = field(default_factory=list)
    used: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(epoch, position): how often."""
    streams: dict[tuple[int, int, int, int], tuple[int, ...]] = field(default_factory=dict)
    """(generation, epoch, rank, batch): samples."""
    skipped: set[int] = field(default_factory=set)
    resumed: int = 0
    checkpoint: tuple[dict[str, Any], Counter[tuple[int, int]]] | None = None
    orders: dict[int, list[int]] = field(default_factory=dict)

    def sample(self, epoch: int, position: int) -> int:
        if epoch not in self.orders:
            order = epoch_order(self.plan.samples, seed=self.plan.seed, rank=0, epoch=epoch)
            self.orders[epoch] = order.tolist()
        return self.orders[epoch][position]

    def key(self, epoch: int, position: int) -> tuple[Any, ...]:
        sample = self.sample(epoch, position)
        return (self.name, epoch, sample) if self.plan.random_flow else ("shared", sample)

    @property
    def finished(self) -> bool:
        return all(trainer.stopped for trainer in self.trainers)


@dataclass(eq=False)
class Loader:
    """A function that loads; what it has made is kept until the request that carried it was answered."""

    name: str
    queue: LoaderQueue
    dead: bool = False
    frozen_until: float = 0.0
    working: bool = False
    leaving: bool = False


class World:
    """Run it with `run`; then look at the jobs.

    Args:
        jobs: what is wanted.
        seed: of the luck.
        bad: whether there are faults at all.
        check: fraction of the events after which all invariants are checked.
    """

    def __init__(self, jobs: list[JobPlan], seed: int, *, bad: bool = True, check: float = 0.05) -> None:
        self.rng = random.Random(f"luck {seed}")
        self.luck = draw_luck(self.rng, bad=bad)
        self.check = check
        self.now = 0.0
        self.count = 0
        self.heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.jobs = [Job(f"job{i}", plan) for i, plan in enumerate(jobs)]
        self.options = QueueOptions(
            window=self.rng.randint(1, 8),
            batch=self.rng.randint(1, 4),
            copies=self.rng.randint(1, 3),
            lease_s=5,
            stuck_s=20,
            unresponsive_s=2,
        )
        self.ahead = self.rng.randint(1, 4)
        self.elastic = Elastic()
        self.limits = ElasticLimits(most=self.luck.most_loaders, grow_after_s=0.2, settle_s=1, calm_s=4, memory_s=60, idle_s=10)
        self.loaders: dict[str, Loader] = {}
        self.attempts: Counter[Any] = Counter()
        self.killed_by: Counter[Any] = Counter()
        self.largest = 0
        self.facts: Counter[str] = Counter()
        """What really happened while jobs were running."""
        self.deliveries: dict[str, Delivery] = {}
        self.saved: dict[str, str] = {}
        for job in self.jobs:
            size, batch = job.plan.shapes[0]
            delivery = Delivery(
                samples=job.plan.samples,
                batch=batch,
                world_size=size,
                remainder=job.plan.remainder,  # type: ignore[arg-type]
            )
            self.deliveries[job.name] = delivery
            self.save(job)
            self.start_trainers(job, 0)
        self.start_router()

    # -- events -------------------------------------------------------------------------------------------

    def at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay, self.count, call, args))

    @property
    def calamitous(self) -> bool:
        return self.now < FAULTS_END_S

    def happened(self, fact: str, holds: bool = True) -> None:
        if holds and not all(job.finished for job in self.jobs):
            self.facts[fact] += 1

    def send(self, call: Callable[..., None], *args: Any) -> None:
        """A message: late, and while times are bad perhaps never or twice."""
        copies = 1
        if self.calamitous:
            copies -= self.rng.random() < self.luck.lost
            copies += self.rng.random() < self.luck.repeated
        self.happened(("lost message", "message", "repeated message")[copies])
        for _ in range(copies):
            self.at(self.rng.expovariate(1 / self.luck.delay_s), call, *args)

    def run(self) -> World:
        """Until all jobs are finished and all loaders gone."""
        self.at(0, self.control)
        for _ in range(self.luck.restarts):
            self.at(self.rng.expovariate(1 / 8), self.restart_router)
        for _ in range(self.luck.deaths):
            self.at(self.rng.expovariate(1 / 5), self.misfortune)
        for job in self.jobs:
            for _ in job.plan.shapes[1:]:
                self.at(self.rng.expovariate(1 / 5), self.resume, job)
            self.at(self.rng.expovariate(1 / 3), self.take_checkpoint, job)
        while not (all(job.finished for job in self.jobs) and not self.loaders):
            assert self.heap, "everybody waits for somebody else"
            self.now, _, call, args = heapq.heappop(self.heap)
            assert self.now < END_S, "it does not end"
            call(*args)
            if self.rng.random() < self.check:
                self.validate()
        self.validate()
        return self

    def validate(self) -> None:
        self.scheduler.validate()
        self.buffer.validate()
        held = sum(nbytes for _, nbytes in self.pool.values())
        assert held == self.buffer.buffered_nbytes, "what it counts is what is there"
        following = {key for consumer, keys in self.announced.items() for key in self.next_batch(consumer, keys)}
        entitled = sum(self.pool[key][1] for key in following if key in self.pool)
        assert held <= max(self.luck.limit_nbytes, entitled), "the bound on memory"
        self.largest = max(self.largest, held)
        self.happened("limit passed", held > self.luck.limit_nbytes)
        self.happened("giant held", held > SIZES_FROM * GIANT)
        for job in self.jobs:
            self.happened("samples skipped", bool(job.skipped))
            for trainer in job.trainers:
                assert trainer.local.held_nbytes <= 400 + 2 * 6 * 7 * SIZES_FROM * GIANT

    def next_batch(self, consumer: str, batches: dict[int, list[Any]]) -> list[Any]:
        tickets = self.buffer.announced(consumer)
        return batches[tickets[0]] if tickets else []

    # -- router -------------------------------------------------------------------------------------------

    def start_router(self) -> None:
        self.scheduler = Scheduler(self.options)
        self.buffer = RemoteBuffer(limit_nbytes=self.luck.limit_nbytes, guess_nbytes=20)
        self.pool: dict[Any, tuple[Any, int]] = {}
        self.waiting: dict[tuple[str, int], tuple[Trainer, DeliveredBatch]] = {}
        self.given_up: set[Any] = set()
        self.announced: dict[str, dict[int, list[Any]]] = {}

    def restart_router(self) -> None:
        """Everything is lost but what was saved, which may be old."""
        self.happened("router restarted")
        self.start_router()
        for job in self.jobs:
            self.deliveries[job.name].load_state_dict(json.loads(self.saved[job.name]))

    def save(self, job: Job) -> None:
        self.saved[job.name] = json.dumps(self.deliveries[job.name].state_dict())

    def heard_trainer(self, trainer: Trainer, epoch: int, sequence: int, acked: int, received: int) -> None:
        """A request for a batch."""
        job, rank = trainer.job, trainer.rank
        delivery = self.deliveries[job.name]
        answer = delivery.request(rank=rank, epoch=epoch, sequence=sequence, acked=acked, generation=trainer.generation)
        if self.rng.random() < 0.1:
            self.save(job)
        if isinstance(answer, DeliveryRefused):
            return
        consumer = f"{job.name}/{trainer.generation}/{rank}"
        if isinstance(answer, EpochEnd):
            self.drop(self.buffer.release(consumer, epoch * EPOCH_TICKETS + sequence))
            self.send(self.heard_router, trainer, epoch, sequence, None)
            return
        ticket = epoch * EPOCH_TICKETS + sequence
        self.drop(self.buffer.release(consumer, epoch * EPOCH_TICKETS + received - 1))
        self.announce(delivery, job, consumer, rank, (epoch, sequence), (epoch, received))
        self.waiting[consumer, ticket] = (trainer, answer)
        self.pump()

    def announce(self, delivery: Delivery, job: Job, consumer: str, rank: int, wanted: tuple[int, int], first: tuple[int, int]) -> None:
        """What the rank will want: from what it has not received to some batches beyond what it asks for."""
        known = self.buffer.announced(consumer)
        ticket = wanted[0] * EPOCH_TICKETS + wanted[1]
        if known and ticket not in known and ticket < known[-1]:
            self.drop(self.buffer.remove_consumer(consumer))
            known = ()
        epoch, sequence = min(first, wanted)
        coming = self.ahead
        while coming and epoch < job.plan.epochs:
            if sequence >= delivery.batches(epoch):
                epoch, sequence = epoch + 1, 0
                continue
            ticket = epoch * EPOCH_TICKETS + sequence
            if not known or ticket > known[-1]:
                batch = delivery.batch(rank=rank, epoch=epoch, sequence=sequence)
                keys = [job.key(epoch, position) for position in batch.positions]
                self.buffer.announce(consumer, ticket, keys)
                self.announced.setdefault(consumer, {})[ticket] = keys
            coming -= (epoch, sequence) >= wanted
            sequence += 1

    def pump(self) -> None:
        """Does what the decisions say until there is nothing to do."""
        while keys := self.buffer.admit():
            for key in keys:
                if key in self.given_up:
                    self.arrived(key, 0)
            self.scheduler.submit(
                [key for key in keys if key not in self.given_up], policy=TaskRetryPolicy(retries=DEATHS + 2, then="skip")
            )
        for (consumer, ticket), (trainer, batch) in list(self.waiting.items()):
            if ticket not in self.buffer.announced(consumer):
                del self.waiting[consumer, ticket]
                continue
            missing = self.buffer.missing(consumer, ticket)
            self.scheduler.submit([key for key in missing if key in self.scheduler.tasks], urgent=True)
            if not missing:
                del self.waiting[consumer, ticket]
                job = trainer.job
                things = [self.pool[job.key(batch.epoch, position)] for position in batch.positions]
                self.send(self.heard_router, trainer, batch.epoch, batch.sequence, (batch, things))
        for name in self.scheduler.idle_loaders():
            reply = self.scheduler.assign(name, now=self.now)
            if reply.hold:
                break
            self.answer(name, reply.request, reply.tasks)

    def arrived(self, key: Any, nbytes: int) -> None:
        gone = self.buffer.arrived(key, nbytes)
        if key not in gone:
            self.pool[key] = (key, nbytes)
        self.drop(gone)

    def drop(self, keys: tuple[Any, ...]) -> None:
        for key in keys:
            self.pool.pop(key, None)
        self.scheduler.forget(keys)

    def settle(self, verdicts: Any) -> None:
        for verdict in verdicts:
            self.given_up.add(verdict.key)
            self.arrived(verdict.key, 0)

    def heard_loader(self, name: str, report: LoaderReport) -> None:
        reply = self.scheduler.sync(name, report, now=self.now)
        for key in reply.accepted:
            assert key not in self.pool, "a result is accepted once"
            self.happened("late result accepted", reply.rejoin)
            self.arrived(key, self.size(key))
        self.settle(reply.failures)
        self.happened("result dropped", len(reply.accepted) < len(report.done))
        if reply.rejoin:
            self.happened("loader given up came back")
            self.scheduler.add_loader(name, now=self.now)
        if not reply.hold:
            self.answer(name, reply.request, reply.tasks)
        self.pump()

    def answer(self, name: str, request: int, tasks: tuple[Any, ...]) -> None:
        if name in self.loaders:
            self.send(self.loader_synced, self.loaders[name], request, tasks)

    def heard_leave(self, name: str) -> None:
        self.scheduler.remove_loader(name)
        self.pump()

    def control(self) -> None:
        """Each half second: leases, and how many loaders there should be."""
        losses = self.scheduler.tick(now=self.now)
        self.happened("lease ran out", bool(losses.loaders))
        self.settle(losses.failures)
        self.pump()
        idle = len(self.scheduler.idle_loaders())
        seen = LoadCounters(wanted=self.scheduler.unsettled, waiting=len(self.waiting), idle=idle, concurrency=self.limits.most)
        self.elastic = decide(self.elastic, seen, self.limits, now=self.now)
        alive = [loader for loader in self.loaders.values() if not loader.leaving]
        for _ in range(self.elastic.target - len(alive)):
            self.start_loader()
        for loader in alive[self.elastic.target :]:
            loader.leaving = True
            self.step_loader(loader)
        self.at(0.5, self.control)

    # -- loaders ------------------------------------------------------------------------------------------

    def size(self, key: Any) -> int:
        return SIZES_FROM * (1 + key[-1] % 7) * (GIANT if key[-1] == self.luck.giant else 1)

    def start_loader(self) -> None:
        loader = Loader(f"loader{self.count}", LoaderQueue(batch=self.options.batch))
        self.loaders[loader.name] = loader
        self.at(self.rng.uniform(0.1, 1), self.joined, loader)

    def joined(self, loader: Loader) -> None:
        self.scheduler.add_loader(loader.name, now=self.now)
        self.heartbeat(loader)
        self.step_loader(loader)

    def heartbeat(self, loader: Loader) -> None:
        """Also repeats a request whose answer does not come."""
        if loader.dead or loader.name not in self.loaders:
            return
        if self.now >= loader.frozen_until:
            self.send(self.heard_heartbeat, loader.name)
            if loader.queue.under_way is not None:
                self.send(self.heard_loader, loader.name, loader.queue.under_way)
        self.at(RETRANSMIT_S / 2, self.heartbeat, loader)

    def heard_heartbeat(self, name: str) -> None:
        self.scheduler.heartbeat(name, now=self.now)

    def loader_synced(self, loader: Loader, request: int, tasks: tuple[Any, ...]) -> None:
        if self.now < loader.frozen_until:
            self.at(loader.frozen_until - self.now, self.loader_synced, loader, request, tasks)
        elif not loader.dead:
            loader.queue.sync(request, tasks)
            self.step_loader(loader)

    def step_loader(self, loader: Loader) -> None:
        if loader.dead or loader.working or loader.name not in self.loaders:
            return
        if loader.leaving:
            del self.loaders[loader.name]
            self.send(self.heard_leave, loader.name)
            return
        if (report := loader.queue.report()) is not None:
            self.send(self.heard_loader, loader.name, report)
        if (key := loader.queue.take()) is not None:
            loader.working = True
            self.at(self.rng.expovariate(20), self.loaded, loader, key)

    def loaded(self, loader: Loader, key: Any) -> None:
        if loader.dead:
            return
        if self.now < loader.frozen_until:
            self.at(loader.frozen_until - self.now, self.loaded, loader, key)
            return
        loader.working = False
        self.attempts[key] += 1
        if key[-1] in self.luck.poison:
            self.killed_by[key] += 1
            self.happened("poisoned")
            self.kill(loader)
            return
        if key[-1] in self.luck.flaky and self.attempts[key] % 3 == 1:
            self.happened("failed")
            loader.queue.fail("the store had a bad moment")
        else:
            loader.queue.finish()
        self.step_loader(loader)

    def kill(self, loader: Loader) -> None:
        """SIGKILL; the platform may tell, or the lease has to."""
        loader.dead = True
        self.loaders.pop(loader.name, None)
        if self.rng.random() < 0.5:
            self.at(self.rng.uniform(0, 1), self.lost, loader.name)

    def lost(self, name: str) -> None:
        self.settle(self.scheduler.fail_loader(name))
        self.pump()

    def misfortune(self) -> None:
        """One loader is killed, or stopped beyond its lease."""
        if not self.loaders:
            return
        loader = self.rng.choice(list(self.loaders.values()))
        if self.rng.random() < 0.5:
            self.happened("killed")
            self.kill(loader)
        else:
            self.happened("frozen")
            loader.frozen_until = self.now + self.rng.uniform(1, 12)

    # -- trainers -----------------------------------------------------------------------------------------

    def start_trainers(self, job: Job, epoch: int) -> None:
        delivery = self.deliveries[job.name]
        job.trainers = [Trainer(job, rank, delivery.generation, epoch) for rank in range(delivery.world_size)]
        for trainer in job.trainers:
            self.at(0, self.step_trainer, trainer)
            self.at(RETRANSMIT_S, self.retransmit, trainer)

    def ask_for(self, trainer: Trainer, number: int) -> None:
        local = trainer.local
        self.send(self.heard_trainer, trainer, trainer.epoch, number, local.taken, local.received)

    def retransmit(self, trainer: Trainer) -> None:
        if trainer.stopped:
            return
        for number in trainer.local.outstanding:
            self.ask_for(trainer, number)
        self.at(RETRANSMIT_S, self.retransmit, trainer)

    def heard_router(self, trainer: Trainer, epoch: int, number: int, batch: Any) -> None:
        if trainer.stopped or epoch != trainer.epoch:
            return
        nbytes = sum(nbytes for _, nbytes in batch[1]) if batch else 0
        trainer.local.put(number, batch or "end", nbytes)
        self.step_trainer(trainer)

    def step_trainer(self, trainer: Trainer) -> None:
        if trainer.stopped:
            return
        while not trainer.busy and trainer.epoch < trainer.job.plan.epochs:
            got = trainer.local.get()
            if got is None:
                break
            if got == "end":
                trainer.epoch += 1
                trainer.begin_epoch()
            else:
                self.train(trainer, *got)
        if trainer.epoch >= trainer.job.plan.epochs:
            trainer.stopped = True
            return
        while (number := trainer.local.request()) is not None:
            self.ask_for(trainer, number)

    def train(self, trainer: Trainer, batch: DeliveredBatch, things: list[tuple[Any, int]]) -> None:
        job = trainer.job
        assert len(things) == len(batch.positions)
        for place, (position, (key, nbytes)) in enumerate(zip(batch.positions, things, strict=True)):
            assert key == job.key(batch.epoch, position), "somebody else's sample"
            if nbytes == 0:
                job.skipped.add(key[-1])
            if place < len(batch.positions) - batch.padding:
                job.used[batch.epoch, position] += 1
        name = (trainer.generation, batch.epoch, trainer.rank, batch.sequence)
        assert name not in job.streams
        job.streams[name] = tuple(job.sample(batch.epoch, position) for position in batch.positions)
        trainer.busy = True
        self.at(self.rng.expovariate(5), self.trained, trainer)

    def trained(self, trainer: Trainer) -> None:
        trainer.busy = False
        self.step_trainer(trainer)

    # -- resumption ---------------------------------------------------------------------------------------

    def take_checkpoint(self, job: Job) -> None:
        """Model and data position at one moment."""
        if job.finished:
            return
        delivery = self.deliveries[job.name]
        for trainer in job.trainers:
            self.tell(delivery, trainer)
        job.checkpoint = (json.loads(json.dumps(delivery.state_dict())), job.used.copy())
        self.save(job)

    def tell(self, delivery: Delivery, trainer: Trainer) -> None:
        epochs = trainer.job.plan.epochs
        epoch, used = (trainer.epoch, trainer.local.taken) if trainer.epoch < epochs else (epochs, 0)
        delivery.acknowledge(rank=trainer.rank, epoch=epoch, acked=used, generation=trainer.generation)

    def resume(self, job: Job) -> None:
        """The job dies and goes on with another world, from now or from its checkpoint."""
        if job.finished:
            return
        if job.checkpoint is None or self.rng.random() < 0.5:
            self.take_checkpoint(job)
        assert job.checkpoint is not None
        state, used = job.checkpoint
        job.used = used.copy()
        for trainer in job.trainers:
            trainer.stopped = True
            self.drop(self.buffer.remove_consumer(f"{job.name}/{trainer.generation}/{trainer.rank}"))
        job.resumed += 1
        self.happened("resumed" if job.resumed == 1 else "resumed twice")
        size, batch = job.plan.shapes[job.resumed]
        delivery = self.deliveries[job.name]
        delivery.load_state_dict(json.loads(json.dumps(state)))
        delivery.reshape(world_size=size, batch=batch, generation=100 * job.resumed)
        self.save(job)
        first = min(epoch for epoch, _ in state["at"])
        self.start_trainers(job, first)
        self.pump()
