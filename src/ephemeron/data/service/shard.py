"""A shard: a part of a flow's samples, the loaders that make them, and the readers that want them (DPFlow section 4.3.4).

The decisions are `ShardState`'s; here are the threads: each call waits in one of its own until what it wants is there. Nothing
is worth saving: a shard that was killed is started anew and empty, readers ask again, loaders join again, and equal names
mean equal bytes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.communication.rpc import BufferPool, cancelled, keep_freed
from ephemeron.data.scheduler import (
    Elastic,
    ElasticLimits,
    LoadCounters,
    LoaderReply,
    LoaderReport,
    QueueOptions,
    decide,
)
from ephemeron.data.service.address import Endpoint
from ephemeron.data.service.loader_fleet import LoaderFleet
from ephemeron.data.service.sample_codec import layout, owned, pack
from ephemeron.data.service.shard_state import LoadResult, SampleKey, SerializedSample, ShardState
from ephemeron.data.service.timeouts import ServiceTimeouts
from ephemeron.errors import LoadersLost, SampleFailed
from ephemeron.functions.base import Outcome
from ephemeron.units import MB

TICK_S = 0.25
HOLD_S = 2.0
"""After so long a loader without work is answered that there is none, and asks again."""
ORDER_S = 1.0
"""A batch waits so long for the one before it to be asked for."""
LEAST_LOADERS = 2
"""While anything is to do; a cold start takes as long for two as for one."""
ENDS_IN_A_ROW = 5
"""Loaders that may end badly without having made anything."""


class StaleRoute(Exception):
    """The reader's routes are not those of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """What a router tells a shard."""

    flow: str
    number: int
    generation: int
    random: bool
    """Whether samples differ between epochs."""
    fixed: int
    """Stages that do not; see `Definition.fixed`."""
    paths: tuple[str, ...]
    payload: str
    """File of the pickled flow."""
    loaders: int
    """At most."""
    loader_memory_mb: int
    loader_lifetime_s: float
    buffer_mb: float
    cache_mb: float
    host: str = "127.0.0.1"
    allow_remote: bool = False
    dataset: str = ""
    """In words, for errors."""
    preload: str = ""
    """Modules that loaders import before their first call, with commas."""
    patience: ServiceTimeouts = field(default_factory=ServiceTimeouts)


class Shard:
    """Serves until `close`.

    Args:
        settings: see there.
        folder: for the loaders' platform.
        token: shared secret of the whole service.
        ending: called when nobody needs it any more.
    """

    def __init__(self, settings: ShardSettings, folder: Path, token: str, ending: Callable[[], None]) -> None:
        keep_freed(1 << 28)
        self.settings = settings
        self._payload = Path(settings.payload).read_bytes()
        # Fresh memory costs more than a copy into it: what samples have left is used for the next ones.
        self._pool = BufferPool(idle_limit_bytes=int((settings.buffer_mb + settings.cache_mb) * MB))
        self._options = QueueOptions(window=24, batch=8, lease_s=settings.patience.loader_lease_s)
        self._state = ShardState(
            random=settings.random, halves=settings.fixed >= 0, buffer_nbytes=int(settings.buffer_mb * MB), cache_nbytes=int(settings.cache_mb * MB),
            options=self._options, failed_sample=self._failed_sample, detach=lambda packed: owned(packed, self._pool),
        )  # fmt: skip
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Rung when batches were announced."""
        self._reads: dict[tuple[str, int], threading.Event] = {}
        self._replies: dict[str, LoaderReply] = {}
        self._replied: dict[str, threading.Event] = {}
        self._leaving: set[str] = set()
        self._seconds: dict[str, float] = {}
        """Of loaders, by stage, since somebody was told."""
        self._bad_ends, self._why = 0, ""
        self._elastic = Elastic()
        self._generation = settings.generation
        self._guarded_at = time.monotonic()
        self._ending = ending
        self._over = threading.Event()
        self._calls: dict[str, Callable[[dict[str, Any], list[Any]], tuple[dict[str, Any], list[Any]]]] = {
            "read": self._read, "foresee": self._foresee, "attend": self._attend, "leave": self._leave,
            "join": self._join, "sync": self._sync, "heartbeat": self._heartbeat, "goodbye": self._remove_loader,
            "guard": self._guard,
        }  # fmt: skip
        self.endpoint = Endpoint(self._answer, token=token, host=settings.host, allow_remote=settings.allow_remote)
        self._fleet = LoaderFleet(
            folder, shard=self.endpoint.address, token=token, memory_mb=settings.loader_memory_mb,
            lifetime_s=settings.loader_lifetime_s, preload=settings.preload, ended=self._ended,
        )  # fmt: skip
        self._controller = threading.Thread(target=self._control, name="control", daemon=True)
        self._controller.start()

    def close(self) -> None:
        """Ends the loaders and stops serving."""
        self._over.set()
        self._controller.join(timeout=5)
        self._fleet.close()
        self.endpoint.close()

    def _answer(self, method: str, params: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        return self._calls[method](params, buffers)

    # -- readers ------------------------------------------------------------------------------------------

    def _read(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """A batch, once it is complete."""
        consumer, ticket = p["consumer"], p["ticket"]
        indices = np.frombuffer(buffers[0], np.int64).tolist()
        names = [self._state.key(i, p["epoch"], p["seed"], p["once"]) for i in indices]
        with self._lock:
            self._check(p["generation"])
            end = time.monotonic() + ORDER_S
            while p["after"] is not None and not self._state.is_announced(consumer, p["after"]):
                if not self._changed.wait(end - time.monotonic()):
                    break
            if p["received"] is not None:
                self._state.acknowledge(consumer, p["received"])
            complete = self._state.request(consumer, p["job"], ticket, names, now=time.monotonic())
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
                    self._state.request(consumer, p["job"], ticket, names, now=time.monotonic())
                    self._notify()
            if (consumer, ticket) not in self._reads:
                raise StaleRoute(f"reader {consumer} was silent for too long")
            if self._bad_ends >= ENDS_IN_A_ROW:
                raise LoadersLost(f"{self._bad_ends} loader functions in a row ended without a sample: {self._why}")
            if cancelled() or self._over.is_set():
                raise StaleRoute("nobody waits for this any more")
            self._check(p["generation"])
        counts, parts = layout(found)
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return {"counts": counts, "failed": [i for i, s in enumerate(found) if s.failed], "seconds": seconds}, parts

    def _foresee(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            indices = np.frombuffer(buffers[0], np.int64).tolist()
            self._state.announce(p["job"], p["epoch"], p["seed"], indices, ordered=p["ordered"])
        return {}, []

    def _attend(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            if self._state.heartbeat(p["consumer"], waiting=p["waiting"], now=time.monotonic()):
                self._state.acknowledge(p["consumer"], p["received"])
                self._notify()
        return {}, []

    def _leave(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            self._state.remove_reader(p["consumer"])
            if not self._state.readers:
                self._bad_ends = 0  # the next one may find the world mended
            for read in [read for read in self._reads if read[0] == p["consumer"]]:
                del self._reads[read]
        return {}, []

    # -- loaders ------------------------------------------------------------------------------------------

    def _join(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            self._state.add_loader(p["loader"], now=time.monotonic())
            self._replied[p["loader"]] = threading.Event()
        return {
            "paths": self.settings.paths, "wants_half": self._state.wants_half, "fixed": self.settings.fixed,
            "batch": self._options.batch,
        }, [self._payload]  # fmt: skip

    def _sync(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Results in, tasks out; waits for tasks where there are none."""
        loader = p["loader"]
        results = self._results(p["done"], buffers)
        running = None if p["running"] is None else SampleKey(*p["running"])
        report = LoaderReport(request=p["request"], done=tuple(results), running=running)
        with self._lock:
            ready = self._replied.setdefault(loader, threading.Event())
            ready.clear()
            self._replies.pop(loader, None)
            for stage, seconds in p["seconds"].items():
                self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds
            reply = self._state.report(loader, report, results, now=time.monotonic())
            if results:
                self._bad_ends = 0
            if reply.rejoin:
                reply = self._state.report(loader, report, results, now=time.monotonic())
            self._notify()
            if not reply.hold:
                return self._tasks(loader, reply)
            waiting: LoaderReply | None = self._replies.pop(loader, None)
        end = time.monotonic() + HOLD_S
        while waiting is None and time.monotonic() < end and not self._over.is_set():
            if loader in self._leaving:
                return {"over": True}, []
            ready.wait(TICK_S)
            with self._lock:
                ready.clear()
                waiting = self._replies.pop(loader, None)
        if waiting is None:
            return {"hold": True, "over": self._over.is_set()}, []
        with self._lock:
            return self._tasks(loader, waiting)

    def _tasks(self, loader: str, reply: LoaderReply) -> tuple[dict[str, Any], list[Any]]:
        rows: list[list[Any]] = []
        buffers: list[Any] = []
        for name, half in self._state.tasks(loader, reply):
            parts = () if half is None else half.buffers
            rows.append([*name, len(parts), 0.0 if half is None else half.cost_s])
            buffers += parts
        return {"tasks": rows}, buffers

    def _results(self, done: list[Any], buffers: list[Any]) -> dict[SampleKey, LoadResult]:
        results, at = {}, 0
        for name, count, cost_s, failed, halves, half_cost_s in done:
            sample = _packed(buffers[at : at + count], cost_s, failed)
            half = _packed(buffers[at + count : at + count + halves], half_cost_s, False) if halves else None
            at += count + halves
            results[SampleKey(*name)] = LoadResult(sample=sample, half=half)
        return results

    def _heartbeat(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            self._state.scheduler.heartbeat(p["loader"], now=time.monotonic())
        return {}, []

    def _remove_loader(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        with self._lock:
            self._state.remove_loader(p["loader"])
            self._forget_loader(p["loader"])
            self._notify()
        return {}, []

    def _ended(self, loader: str, outcome: Outcome) -> None:
        with self._lock:
            if outcome.status != "ok":
                # Whoever dies of a sample is that sample's affair; those who never get so far might go on for ever.
                self._bad_ends += not self._state.is_busy(loader)
                self._why = outcome.error or outcome.status
            self._state.fail_loader(loader)  # harmless after a goodbye
            self._forget_loader(loader)
            self._notify()

    def _forget_loader(self, loader: str) -> None:
        self._leaving.discard(loader)
        self._replies.pop(loader, None)
        self._replied.pop(loader, None)

    def _failed_sample(self, name: SampleKey, reason: str) -> SerializedSample:
        return pack(
            SampleFailed(f"{reason} ({last_line(self._why)})" if self._why else reason, flow=self.settings.flow, dataset=self.settings.dataset, index=name.sample, step="?"), failed=True
        )  # fmt: skip

    # -- control ------------------------------------------------------------------------------------------

    def _guard(self, p: dict[str, Any], buffers: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """The router is there."""
        with self._lock:
            self._guarded_at = time.monotonic()
            self._generation = max(self._generation, p["generation"])
            core = self._state
            return {
                "readers": core.readers, "loaders": len(self._fleet.names), "loaded": core.loaded, "hits": core.hits,
                "half_hits": core.half_hits, "skipped": core.scheduler.skipped,
                "buffered_bytes": core.buffer.buffered_nbytes,
                "cached_bytes": 0 if core.cache is None else core.cache.used_bytes,
            }, []  # fmt: skip

    def _control(self) -> None:
        """Leases, and how many loaders there should be."""
        try:
            self._watch()
        finally:
            self._ending()  # also if its folder is gone: without control it would stay for ever

    def _watch(self) -> None:
        patience = self.settings.patience
        limits = ElasticLimits(
            most=self.settings.loaders, least=min(LEAST_LOADERS, self.settings.loaders), settle_s=1.0,
            idle_s=patience.loaders_idle_s,
        )  # fmt: skip
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            with self._lock:
                for loader in self._state.tick(now=now):
                    self._fleet.cancel(loader)
                    self._forget_loader(loader)
                for consumer in self._state.silent_readers(patience.reader_lease_s, now=now):
                    self._leave({"consumer": consumer}, [])
                self._notify()
                seen = LoadCounters(
                    wanted=self._state.scheduler.unsettled, waiting=self._state.waiting,
                    idle=len(self._state.scheduler.idle_loaders()), concurrency=limits.most,
                )  # fmt: skip
                self._elastic = decide(self._elastic, seen, limits, now=now)
                names = [name for name in self._fleet.names if name not in self._leaving]
                for _ in range(self._elastic.target - len(names) if self._bad_ends < ENDS_IN_A_ROW else 0):
                    self._fleet.start()
                surplus = len(names) - self._elastic.target
                for loader in [n for n in self._state.scheduler.idle_loaders() if n in names][: max(0, surplus)]:
                    self._leaving.add(loader)
                    if loader in self._replied:
                        self._replied[loader].set()
                unused = not self._state.readers and now - self._guarded_at > patience.orphan_s
            if unused:
                return

    def _notify(self) -> None:
        """Wakes who has got what he waits for."""
        for read in self._state.ready:
            if read in self._reads:
                self._reads[read].set()
        self._state.ready.clear()
        for loader in self._state.scheduler.idle_loaders():
            if loader in self._leaving:
                continue
            reply = self._state.scheduler.assign(loader, now=time.monotonic())
            if reply.hold:
                break
            self._replies[loader] = reply
            if loader in self._replied:
                self._replied[loader].set()

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise StaleRoute(f"routes of generation {generation}; those of now are of {self._generation}")


def last_line(text: str) -> str:
    """Of a traceback, what it says."""
    return (text.strip().splitlines() or [""])[-1]


def _packed(buffers: list[Any], cost_s: float, failed: bool) -> SerializedSample:
    return SerializedSample(
        buffers=tuple(buffers), nbytes=sum(memoryview(b).nbytes for b in buffers), cost_s=cost_s, failed=failed
    )
