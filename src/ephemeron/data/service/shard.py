"""A shard: a part of a flow's samples, the loaders that make them, and the readers that request them (DPFlow section 4.3.4).

The decisions are `ShardState`'s; here are the threads: each call waits in one of its own until its result is there. Nothing is
stored: a shard that was killed is restarted empty, readers repeat their requests, loaders register again, and equal keys mean equal
bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.communication.rpc import BufferPool, cancelled, keep_freed
from ephemeron.data.scheduler import Elastic, ElasticLimits, LoadCounters, LoaderReply, LoaderReport, QueueOptions, decide
from ephemeron.data.service.loader_fleet import LoaderFleet
from ephemeron.data.service.messages import (
    AnnounceRequest,
    ConsumerHeartbeat,
    ConsumerRequest,
    LoaderRequest,
    LoaderWelcome,
    Nothing,
    ReadReply,
    ReadRequest,
    ResultRow,
    ShardStatus,
    StatusRequest,
    SyncReply,
    SyncRequest,
    TaskRow,
)
from ephemeron.data.service.protocol import (
    ADD_LOADER,
    ANNOUNCE,
    HEARTBEAT_CONSUMER,
    HEARTBEAT_LOADER,
    READ,
    REMOVE_CONSUMER,
    REMOVE_LOADER,
    SHARD_STATUS,
    SYNC,
    Buffers,
    CallDispatcher,
)
from ephemeron.data.service.sample_codec import layout, owned, pack
from ephemeron.data.service.settings import Endpoint, ShardSettings
from ephemeron.data.service.shard_state import LoadResult, SampleKey, SerializedSample, ShardState
from ephemeron.errors import LoadersLost, SampleFailed
from ephemeron.functions.base import Outcome
from ephemeron.runs.function_set import LossBudget
from ephemeron.units import MB

TICK_S = 0.25
HOLD_S = 2.0
"""A loader without work gets a reply after this time, and repeats its request."""
ORDER_S = 1.0
"""Time that a batch waits for the request of the one before it."""
LEAST_LOADERS = 2
"""Loaders while there is work; a cold start takes as long for two as for one."""
_log = logging.getLogger(__name__)


class _StaleRoute(Exception):
    """The reader's routes are not the present ones. Its client knows it by this name (`client.STALE_ROUTE`)."""


class Shard:
    """Serves until `close`.

    Args:
        settings: from the router.
        folder: for the loaders' platform.
        token: shared secret of the whole service.
        on_end: called when it is not needed any more.
    """

    def __init__(self, settings: ShardSettings, folder: Path, token: str, on_end: Callable[[], None]) -> None:
        keep_freed(1 << 28)
        self.settings = settings
        self._payload = Path(settings.payload).read_bytes()
        # Fresh memory costs more than a copy into it: memory that samples have left is used for the next ones.
        self._pool = BufferPool(idle_limit_bytes=int((settings.buffer_mb + settings.cache_mb) * MB))
        self._options = QueueOptions(window=24, batch=8, lease_s=settings.timeouts.loader_lease_s)
        self._state = ShardState(
            random=settings.random,
            halves=settings.fixed >= 0,
            buffer_nbytes=int(settings.buffer_mb * MB),
            cache_nbytes=int(settings.cache_mb * MB),
            options=self._options,
            failed_sample=self._failed_sample,
            detach=lambda packed: owned(packed, self._pool),
        )
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when batches were requested."""
        self._reads: dict[tuple[str, int], threading.Event] = {}
        self._replies: dict[str, LoaderReply[SampleKey]] = {}
        self._replied: dict[str, threading.Event] = {}
        self._ending: set[str] = set()
        self._seconds: dict[str, float] = {}
        """Time of loaders by stage, since the last reply to a reader."""
        self._budget, self._made, self._why = LossBudget(), 0, ""
        """Of loaders that fail without having made a sample, the number of samples, and how the last one failed."""
        self._elastic = Elastic()
        self._generation = settings.generation
        self._monitored_at = time.monotonic()
        self._on_end = on_end
        self._over = threading.Event()
        calls = CallDispatcher("shard")
        calls.add(READ, self._read)
        calls.add(ANNOUNCE, self._announce)
        calls.add(HEARTBEAT_CONSUMER, self._heartbeat_consumer)
        calls.add(REMOVE_CONSUMER, self._remove_consumer)
        calls.add(ADD_LOADER, self._add_loader)
        calls.add(SYNC, self._sync)
        calls.add(HEARTBEAT_LOADER, self._heartbeat_loader)
        calls.add(REMOVE_LOADER, self._remove_loader)
        calls.add(SHARD_STATUS, self._report)
        self.endpoint = Endpoint(calls, token=token, host=settings.host, allow_remote=settings.allow_remote)
        self._fleet = LoaderFleet(
            folder,
            shard=self.endpoint.address,
            token=token,
            memory_mb=settings.loader_memory_mb,
            lifetime_s=settings.loader_lifetime_s,
            preload=settings.preload,
            origin=settings.origin,
            labels=settings.labels,
            ended=self._loader_ended,
        )
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends the loaders and stops serving."""
        self._over.set()
        self._controller.join(timeout=5)
        self._fleet.close()
        self.endpoint.close()

    # -- readers ------------------------------------------------------------------------------------------

    def _read(self, p: ReadRequest, buffers: list[Any]) -> tuple[ReadReply, Buffers]:
        """A batch, once it is complete."""
        consumer, ticket = p.consumer, p.ticket
        indices = np.frombuffer(buffers[0], np.int64).tolist()
        keys = [self._state.key(i, p.epoch, p.seed, p.once) for i in indices]
        with self._lock:
            self._check(p.generation)
            end = time.monotonic() + ORDER_S
            while p.after is not None and not self._state.is_announced(consumer, p.after):
                if not self._changed.wait(end - time.monotonic()):
                    break
            if p.received is not None:
                self._state.acknowledge(consumer, p.received)
            complete = self._state.request(consumer, p.job, ticket, keys, now=time.monotonic())
            ready = self._reads.setdefault((consumer, ticket), threading.Event())
            self._changed.notify_all()
            self._notify()
            if complete:
                ready.set()
        while True:
            if ready.wait(TICK_S):
                with self._lock:
                    found = self._state.fetch(consumer, ticket, now=time.monotonic())
                    if found is not None:
                        self._reads.pop((consumer, ticket), None)
                        break
                    ready.clear()
                    self._state.request(consumer, p.job, ticket, keys, now=time.monotonic())
                    self._notify()
            if (consumer, ticket) not in self._reads:
                raise _StaleRoute(f"reader {consumer} was silent for too long")
            if self._budget.is_spent:
                raise LoadersLost(f"{self._budget.spent} loader functions in a row ended without a sample: {self._budget.last}")
            if cancelled() or self._over.is_set():
                raise _StaleRoute("the call was cancelled, or the shard ends")
            self._check(p.generation)
        counts, parts = layout(found)
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return ReadReply(counts=counts, failed=[i for i, s in enumerate(found) if s.failed], seconds=seconds), parts

    def _announce(self, p: AnnounceRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        indices = np.frombuffer(buffers[0], np.int64).tolist()
        with self._lock:
            self._state.announce(p.job, p.epoch, p.seed, indices, ordered=p.ordered)
        return Nothing(), ()

    def _heartbeat_consumer(self, p: ConsumerHeartbeat, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        with self._lock:
            if self._state.heartbeat(p.consumer, waiting=p.waiting, now=time.monotonic()):
                self._state.acknowledge(p.consumer, p.received)
                self._notify()
        return Nothing(), ()

    def _remove_consumer(self, p: ConsumerRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        self._remove_reader(p.consumer)
        return Nothing(), ()

    def _remove_reader(self, consumer: str) -> None:
        with self._lock:
            self._state.remove_reader(consumer)
            if not self._state.readers:
                self._budget = LossBudget()  # the cause may be gone when the next reader comes
            for read in [read for read in self._reads if read[0] == consumer]:
                del self._reads[read]

    # -- loaders ------------------------------------------------------------------------------------------

    def _add_loader(self, p: LoaderRequest, buffers: list[Any]) -> tuple[LoaderWelcome, Buffers]:
        with self._lock:
            self._state.add_loader(p.loader, now=time.monotonic())
            self._replied[p.loader] = threading.Event()
        _log.info("%s of flow %s begins", p.loader, self.settings.flow)
        welcome = LoaderWelcome(
            paths=self.settings.paths, wants_half=self._state.wants_half, fixed=self.settings.fixed, batch=self._options.batch
        )
        return welcome, [self._payload]

    def _sync(self, p: SyncRequest, buffers: list[Any]) -> tuple[SyncReply, Buffers]:
        """Takes results and returns tasks; waits for tasks where there are none."""
        loader = p.loader
        results = _results(p.done, buffers)
        report = LoaderReport(request=p.request, done=tuple(results), running=p.running)
        with self._lock:
            replied = self._replied.setdefault(loader, threading.Event())
            replied.clear()
            self._replies.pop(loader, None)
            for stage, seconds in p.seconds.items():
                self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
            reply = self._state.report(loader, report, results, now=time.monotonic())
            self._made += len(results)
            self._budget.progressed(self._made)
            if reply.rejoin:
                reply = self._state.report(loader, report, results, now=time.monotonic())
            self._notify()
            if not reply.hold:
                return self._tasks(loader, reply)
            waiting: LoaderReply[SampleKey] | None = self._replies.pop(loader, None)
        end = time.monotonic() + HOLD_S
        while waiting is None and time.monotonic() < end and not self._over.is_set():
            if loader in self._ending:
                return SyncReply(over=True), ()
            replied.wait(TICK_S)
            with self._lock:
                replied.clear()
                waiting = self._replies.pop(loader, None)
        if waiting is None:
            return SyncReply(hold=True, over=self._over.is_set()), ()
        with self._lock:
            return self._tasks(loader, waiting)

    def _tasks(self, loader: str, reply: LoaderReply[SampleKey]) -> tuple[SyncReply, Buffers]:
        rows: list[TaskRow] = []
        buffers: list[Any] = []
        for key, half in self._state.tasks(loader, reply):
            parts = () if half is None else half.buffers
            rows.append(TaskRow(*key, len(parts), 0.0 if half is None else half.cost_s))
            buffers += parts
        return SyncReply(tasks=rows), buffers

    def _heartbeat_loader(self, p: LoaderRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        with self._lock:
            self._state.scheduler.heartbeat(p.loader, now=time.monotonic())
        return Nothing(), ()

    def _remove_loader(self, p: LoaderRequest, buffers: list[Any]) -> tuple[Nothing, Buffers]:
        with self._lock:
            self._state.remove_loader(p.loader)
            self._forget_loader(p.loader)
            self._notify()
        return Nothing(), ()

    def _loader_ended(self, loader: str, outcome: Outcome) -> None:
        with self._lock:
            if outcome.status == "ok":
                _log.info("%s of flow %s has ended", loader, self.settings.flow)
            else:
                # A loader that dies of a sample counts against the sample; those that never get so far could go on for ever.
                self._why = outcome.error or outcome.status
                if not self._state.is_busy(loader):
                    self._budget.ended(self._why)
                _log.warning("%s of flow %s failed: %s", loader, self.settings.flow, last_line(self._why))
            self._state.fail_loader(loader)  # changes nothing if it has deregistered
            self._forget_loader(loader)
            self._notify()

    def _forget_loader(self, loader: str) -> None:
        self._ending.discard(loader)
        self._replies.pop(loader, None)
        self._replied.pop(loader, None)

    def _failed_sample(self, key: SampleKey, reason: str) -> SerializedSample:
        _log.warning("sample %d of flow %s is given up: %s", key.sample, self.settings.flow, reason)
        text = f"{reason} ({last_line(self._why)})" if self._why else reason
        failed = SampleFailed(text, flow=self.settings.flow, dataset=self.settings.dataset, index=key.sample, step="?")
        return pack(failed, failed=True)

    # -- control ------------------------------------------------------------------------------------------

    def _report(self, p: StatusRequest, buffers: list[Any]) -> tuple[ShardStatus, Buffers]:
        """Counters for the router, whose call also shows that it is alive."""
        with self._lock:
            self._monitored_at = time.monotonic()
            self._generation = max(self._generation, p.generation)
            state = self._state
            status = ShardStatus(
                readers=state.readers,
                loaders=len(self._fleet.names),
                loaded=state.loaded,
                hits=state.hits,
                half_hits=state.half_hits,
                skipped=state.scheduler.skipped,
                buffered_bytes=state.buffer.buffered_nbytes,
                cached_bytes=0 if state.cache is None else state.cache.used_bytes,
            )
            return status, ()

    def _control(self) -> None:
        """Leases, and the number of loaders."""
        try:
            self._watch()
        except Exception:  # noqa: BLE001 - it is logged, and the process ends
            _log.exception("the control thread of shard %d of flow %s failed", self.settings.number, self.settings.flow)
        finally:
            self._on_end()  # also if its folder is gone: without control it would never end

    def _watch(self) -> None:
        timeouts = self.settings.timeouts
        limits = ElasticLimits(
            most=self.settings.loaders, least=min(LEAST_LOADERS, self.settings.loaders), settle_s=1.0, idle_s=timeouts.loaders_idle_s
        )
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                for loader in self._state.tick(now=now):
                    _log.warning("%s of flow %s is silent and is cancelled", loader, self.settings.flow)
                    self._fleet.cancel(loader)
                    self._forget_loader(loader)
                for consumer in self._state.silent_readers(timeouts.reader_lease_s, now=now):
                    _log.warning("reader %s of flow %s is silent and is removed", consumer, self.settings.flow)
                    self._remove_reader(consumer)
                self._notify()
                self._scale(limits, now)
                unused = not self._state.readers and now - self._monitored_at > timeouts.orphan_s
            if unused:
                return

    def _scale(self, limits: ElasticLimits, now: float) -> None:
        """Starts and ends loaders."""
        scheduler = self._state.scheduler
        seen = LoadCounters(
            wanted=scheduler.unsettled, waiting=self._state.waiting, idle=len(scheduler.idle_loaders()), concurrency=limits.most
        )
        before, self._elastic = self._elastic.target, decide(self._elastic, seen, limits, now=now)
        if self._elastic.target != before:
            _log.info("flow %s is to have %d loaders instead of %d", self.settings.flow, self._elastic.target, before)
        names = [name for name in self._fleet.names if name not in self._ending]
        for _ in range(self._elastic.target - len(names) if not self._budget.is_spent else 0):
            self._fleet.start()
        surplus = len(names) - self._elastic.target
        for loader in [n for n in scheduler.idle_loaders() if n in names][: max(0, surplus)]:
            self._ending.add(loader)
            if loader in self._replied:
                self._replied[loader].set()

    def _notify(self) -> None:
        """Wakes the calls whose results are there."""
        for read in self._state.ready:
            if read in self._reads:
                self._reads[read].set()
        self._state.ready.clear()
        for loader in self._state.scheduler.idle_loaders():
            if loader in self._ending:
                continue
            reply = self._state.scheduler.assign(loader, now=time.monotonic())
            if reply.hold:
                break
            self._replies[loader] = reply
            if loader in self._replied:
                self._replied[loader].set()

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise _StaleRoute(f"routes of generation {generation}; the present ones are of {self._generation}")


def last_line(text: str) -> str:
    """The last line of a text: the message of a traceback."""
    return (text.strip().splitlines() or [""])[-1]


def _results(done: Sequence[ResultRow], buffers: list[Any]) -> dict[SampleKey, LoadResult]:
    results, at = {}, 0
    for row in done:
        middle = at + row.buffers
        end = middle + row.half_buffers
        sample = _packed(buffers[at:middle], row.cost_s, failed=row.failed)
        half = _packed(buffers[middle:end], row.half_cost_s) if row.half_buffers else None
        results[row.key] = LoadResult(sample=sample, half=half)
        at = end
    return results


def _packed(buffers: list[Any], cost_s: float, *, failed: bool = False) -> SerializedSample:
    nbytes = sum(memoryview(b).nbytes for b in buffers)
    return SerializedSample(buffers=tuple(buffers), nbytes=nbytes, cost_s=cost_s, failed=failed)
