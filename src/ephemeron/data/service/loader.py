"""A loader function: pulls tasks from its shard, runs the flow's steps, returns the results (DPFlow, algorithm 3.3).

Three threads. One runs the steps, one sample after the other. One exchanges results for tasks with the shard meanwhile. One
reads ahead: the samples of the next tasks are fetched from the store, several at a time, so that the latency of a store is paid once
for many samples. The loader ends when its shard is gone or ends it, or at its time limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ephemeron.communication.rpc import BlockingClient
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, StageTimings, open_source
from ephemeron.data.randomness import mark_loader_process
from ephemeron.data.scheduler import LoaderQueue, LoaderReport
from ephemeron.data.service.flow_definition import restore
from ephemeron.data.service.messages import LoaderRequest, LoaderResult, ResultRow, SyncReply, SyncRequest
from ephemeron.data.service.protocol import ADD_LOADER, HEARTBEAT_LOADER, REMOVE_LOADER, SYNC
from ephemeron.data.service.sample_codec import pack, unpack
from ephemeron.data.service.settings import TOKEN_VARIABLE, ServiceAddress, ServiceLoaderOptions
from ephemeron.data.service.shard_state import SampleKey, SerializedSample
from ephemeron.errors import CallTimedOut, ConnectionLost, SampleFailed, ServiceUnreachable
from ephemeron.functions.context import Context
from ephemeron.user_code import guarded, line_of

AHEAD = 16
"""Samples read ahead."""
REPORT_BYTES = 4 << 20
"""Bytes of results in a message, about: each message wakes a process."""
BEFORE_END_S = 5.0
HEARTBEAT_S = 1.0
SYNC_S = 30.0
GONE_S = 5.0
"""A loader without a connection to its shard ends after this time."""
WORTH_BYTES_PER_S = 300e6
"""A half-finished sample is kept if making it takes longer than transferring it at this rate."""
_log = logging.getLogger(__name__)


async def run_loader(ctx: Context, options: ServiceLoaderOptions) -> LoaderResult:
    """The entry `loader`: loads until its shard or its time limit ends it."""
    left_s = ctx.deadline - asyncio.get_running_loop().time()
    work = _Work(options.loader, options.shard, os.environ[TOKEN_VARIABLE], until=time.monotonic() + left_s - min(BEFORE_END_S, left_s / 4))
    try:
        await asyncio.to_thread(work.run)
    finally:
        work.stop()
    return LoaderResult(loaded=work.loaded)


class _Work:
    def __init__(self, name: str, shard: ServiceAddress, token: str, *, until: float) -> None:
        self.loaded = 0
        self._name, self._shard, self._token, self._until = name, shard, token, until
        self._client: BlockingClient = shard.connect(token)
        welcome, (payload,) = ADD_LOADER.call(self._client, LoaderRequest(loader=name), timeout_s=SYNC_S)
        flow = restore(bytes(payload), welcome.paths)
        assert flow.source is not None
        self._loading = SampleLoader(flow, open_source(flow.source))
        self._first = max(0, welcome.fixed)
        if welcome.fixed >= 0:
            self._loading.reads_are_pure = True  # the reader has found so: several at a time, and while steps run
        self._wants_half = welcome.wants_half
        self._most = welcome.batch
        self._queue: LoaderQueue[SampleKey] = LoaderQueue(batch=self._most)
        self._changed = threading.Condition()
        self._halves: dict[SampleKey, SerializedSample] = {}
        self._read: dict[SampleKey, Any] = {}
        self._reading: set[SampleKey] = set()
        self._results: dict[SampleKey, tuple[SerializedSample, SerializedSample | None]] = {}
        # A dataset of the store can be read by many threads; of others that is not known.
        self._one_reads: AbstractContextManager[object] = nullcontext() if flow.source.dataset is None else threading.Lock()
        self._over = False
        self._sizes: deque[int] = deque(maxlen=16)

    def run(self) -> None:
        """Loads until the shard is gone or ends it, or at its time limit."""
        mark_loader_process()
        threads = [threading.Thread(target=t, daemon=True) for t in (self._exchange, self._heartbeat, self._read_ahead)]
        for thread in threads:
            thread.start()
        try:
            while (name := self._next()) is not None:
                self._done(name, *self._make(name))
        finally:
            self.stop()
            threads[0].join(timeout=SYNC_S)
            self._deregister()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # -- working ------------------------------------------------------------------------------------------

    def _next(self) -> SampleKey | None:
        with self._changed:
            while not self._over and time.monotonic() < self._until:
                key = self._queue.take()
                if key is not None:
                    return key
                self._changed.wait(0.1)
        return None

    def _make(self, name: SampleKey) -> tuple[SerializedSample, SerializedSample | None]:
        began = time.perf_counter()
        item = SampleRequest(index=name.sample, epoch=name.epoch, seed=name.seed)
        half = self._halves.pop(name, None)
        try:
            if half is not None:
                sample = self._loading.steps(item, unpack(half.buffers), first=self._first)
                half_cost_s = half.cost_s
                half = None
            else:
                raw, read_s = self._raw(name, item)
                sample = raw if isinstance(raw, SampleFailed) else self._loading.steps(item, raw, end=self._first)
                half_cost_s = read_s + time.perf_counter() - began
                if not isinstance(sample, SampleFailed):
                    if self._wants_half and not name.once:
                        half = pack(sample, cost_s=half_cost_s)
                        half = half if half_cost_s * WORTH_BYTES_PER_S > half.nbytes else None
                    sample = self._loading.steps(item, sample, first=self._first)
            cost_s = half_cost_s + time.perf_counter() - began
            with guarded():
                done = pack(sample, cost_s=cost_s, failed=isinstance(sample, SampleFailed))
        except Exception as e:  # noqa: BLE001 - anything that a user's object raises when it is pickled
            done, half = pack(self._unsendable(name, e), failed=True), None
        return done, half

    def _unsendable(self, name: SampleKey, e: Exception) -> SampleFailed:
        flow = self._loading.flow
        return SampleFailed(
            f"its result cannot be sent: {line_of(e)}",
            flow=f"{flow.name}@{flow.version}",
            dataset=str(flow.source),
            index=name.sample,
            step=flow.steps[-1].name if flow.steps else "read",
        )

    def _done(self, name: SampleKey, done: SerializedSample, half: SerializedSample | None) -> None:
        with self._changed:
            self._results[name] = (done, half)
            self._queue.finish()
            self._sizes.append(done.nbytes)
            usual = sum(self._sizes) / len(self._sizes)
            self._queue.batch = max(1, min(self._most, int(REPORT_BYTES / max(1.0, usual))))
            self.loaded += 1
            self._changed.notify_all()

    # -- reading ahead ------------------------------------------------------------------------------------

    def _raw(self, name: SampleKey, item: SampleRequest) -> tuple[Any, float]:
        """The sample as the dataset has it, and the seconds that reading took."""
        began = time.perf_counter()
        with self._changed:
            while name in self._reading and not self._over:
                self._changed.wait(0.1)
            found = self._read.pop(name, None)
        if found is not None:
            raw, read_s = found
            return raw, read_s
        with self._one_reads:
            (raw,) = self._loading.fetch([item])
        return raw, time.perf_counter() - began

    def _read_ahead(self) -> None:
        many = getattr(self._loading.dataset, "__getitems__", None)
        if many is None or not self._loading.reads_are_pure:
            return
        while True:
            with self._changed:
                while len(coming := self._unread()) < 2 and not self._over:
                    self._changed.wait(0.5)
                if self._over:
                    return
                self._reading.update(coming)
            began = time.perf_counter()
            with self._one_reads:
                found = self._loading.fetch([SampleRequest(index=n.sample) for n in coming])
            each_s = (time.perf_counter() - began) / len(coming)
            with self._changed:
                self._reading.clear()
                self._changed.notify_all()
                if len(found) != len(coming):
                    return  # the dataset returns other samples than requested; one by one, they can be trusted
                wanted = {*self._queue.coming(10 * AHEAD), self._queue.running}
                self._read = {n: r for n, r in self._read.items() if n in wanted}
                self._read.update((n, (raw, each_s)) for n, raw in zip(coming, found, strict=True) if n in wanted)

    def _unread(self) -> list[SampleKey]:
        coming = self._queue.coming(AHEAD)
        return [name for name in coming if name not in self._read and name not in self._halves]

    # -- exchange -----------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        try:
            self._exchange_results()
        finally:
            self.stop()  # without a connection to the shard there is nothing to do

    def _exchange_results(self) -> None:
        while True:
            with self._changed:
                while (report := self._queue.under_way or self._queue.report()) is None and not self._over:
                    self._changed.wait()
                if report is None:
                    return
                results = {key: self._results[key] for key in report.done if key in self._results}
                seconds, self._loading.seconds = self._loading.seconds, StageTimings()
            request, parts = _request(self._name, report, results, seconds.by_stage)
            try:
                reply, buffers = SYNC.call(self._client, request, parts, timeout_s=SYNC_S)
            except (ConnectionLost, CallTimedOut) as e:
                _log.info("%s reconnects to its shard: %s", self._name, e)
                if not self._reconnect():
                    return
                continue
            if reply.over:
                return
            if reply.hold:  # the results have arrived, and need not be sent with each repetition
                with self._changed:
                    for key in report.done:
                        self._results.pop(key, None)
            else:
                self._sync(report, reply, buffers)
            if self._over:
                return

    def _sync(self, report: LoaderReport[SampleKey], reply: SyncReply, buffers: list[Any]) -> None:
        at, halves = 0, {}
        tasks = [row.key for row in reply.tasks]
        for task, row in zip(tasks, reply.tasks, strict=True):
            if row.buffers:
                parts = tuple(buffers[at : at + row.buffers])
                halves[task] = SerializedSample(buffers=parts, nbytes=0, cost_s=row.cost_s)
                at += row.buffers
        with self._changed:
            if self._queue.sync(report.request, tasks):
                for key in report.done:
                    self._results.pop(key, None)
                self._halves = {n: h for n, h in self._halves.items() if n in tasks}
                self._halves.update(halves)
            self._changed.notify_all()

    def _reconnect(self) -> bool:
        end = time.monotonic() + GONE_S
        while not self._over and time.monotonic() < end:
            try:
                self._client = self._shard.connect(self._token, timeout_s=1.0)
                return True
            except ServiceUnreachable:
                time.sleep(0.1)
        return False

    def _heartbeat(self) -> None:
        while not self._over:
            try:
                HEARTBEAT_LOADER.call(self._client, LoaderRequest(loader=self._name), timeout_s=SYNC_S)
            except (ConnectionLost, CallTimedOut):
                pass  # the exchange reconnects, or ends the loader
            with self._changed:
                if not self._over:
                    self._changed.wait_for(lambda: self._over, HEARTBEAT_S)

    def _deregister(self) -> None:
        try:
            REMOVE_LOADER.call(self._client, LoaderRequest(loader=self._name), timeout_s=1.0)
            self._client.close()
        except (ConnectionLost, CallTimedOut):
            pass


def _request(
    loader: str,
    report: LoaderReport[SampleKey],
    results: Mapping[SampleKey, tuple[SerializedSample, SerializedSample | None]],
    seconds: Mapping[str, float],
) -> tuple[SyncRequest, Sequence[Any]]:
    rows: list[ResultRow] = []
    buffers: list[Any] = []
    for key, (sample, half) in results.items():
        parts = () if half is None else half.buffers
        half_cost_s = 0.0 if half is None else half.cost_s
        rows.append(ResultRow(*key, len(sample.buffers), sample.cost_s, sample.failed, len(parts), half_cost_s))
        buffers += [*sample.buffers, *parts]
    request = SyncRequest(loader=loader, request=report.request, done=rows, running=report.running, seconds=seconds)
    return request, buffers
