"""A loader function: pulls tasks from its shard, runs the flow's steps, brings the results (DPFlow, algorithm 3.3).

Three threads. One works: steps, one sample after the other. One talks: brings results and fetches tasks while the first
goes on. One reads ahead: what the next tasks need is fetched from the store, several at a time, so that the latency
of a store is paid once for many samples. The loader ends when its shard is gone or sends it away, or its time is over.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from contextlib import nullcontext
from typing import Any

from ephemeron.communication.rpc import BlockingClient
from ephemeron.config.typed import build
from ephemeron.data.flow.sample_loader import SampleLoader, SampleRequest, StageTimings, open_source
from ephemeron.data.randomness import stop_keeping_states
from ephemeron.data.scheduler import LoaderQueue, LoaderReport
from ephemeron.data.service.address import TOKEN_VARIABLE, LoaderRequest, ServiceAddress
from ephemeron.data.service.flow_definition import restore
from ephemeron.data.service.sample_codec import pack, unpack
from ephemeron.data.service.shard_state import SampleKey, SerializedSample
from ephemeron.errors import CallTimedOut, ConnectionLost, SampleFailed, ServiceUnreachable
from ephemeron.functions.context import Context

AHEAD = 16
"""Samples read ahead."""
REPORT_BYTES = 4 << 20
"""Results are brought together, up to about so much: each message wakes a process."""
BEFORE_END_S = 5.0
HEARTBEAT_S = 1.0
SYNC_S = 30.0
GONE_S = 5.0
"""After so long without its shard a loader ends."""
WORTH_BYTES_PER_S = 300e6
"""A half-finished sample is worth its way to the shard and back if making it takes longer than this."""


async def run_loader(ctx: Context) -> dict[str, Any]:
    """The function's entry: loads until it is over."""
    request = build(LoaderRequest, ctx.call.request, where="request of a loader")
    left_s = ctx.deadline - asyncio.get_running_loop().time()
    work = _Work(
        request.loader, request.shard, os.environ[TOKEN_VARIABLE],
        until=time.monotonic() + left_s - min(BEFORE_END_S, left_s / 4),
    )  # fmt: skip
    try:
        await asyncio.to_thread(work.run)
    finally:
        work.stop()
    return {"outcome": "finished", "loaded": work.loaded}


class _Work:
    def __init__(self, name: str, shard: ServiceAddress, token: str, *, until: float) -> None:
        self.loaded = 0
        self._name, self._shard, self._token, self._until = name, shard, token, until
        self._client: BlockingClient = shard.connect(token)
        reply, (payload,) = self._client.call("join", {"loader": name}, timeout_s=SYNC_S)
        flow = restore(bytes(payload), tuple(reply["paths"]))
        assert flow.source is not None
        self._loading = SampleLoader(flow, open_source(flow.source))
        self._first = max(0, reply["fixed"])
        if reply["fixed"] >= 0:
            self._loading.reads_are_pure = True  # as was found: several at a time, and while steps run
        self._wants_half = bool(reply["wants_half"])
        self._most = int(reply["batch"])
        self._queue = LoaderQueue(batch=self._most)
        self._changed = threading.Condition()
        self._halves: dict[SampleKey, SerializedSample] = {}
        self._read: dict[SampleKey, Any] = {}
        self._reading: set[SampleKey] = set()
        self._results: dict[SampleKey, tuple[SerializedSample, SerializedSample | None]] = {}
        # A dataset of the store can be read by many threads; of others nobody knows.
        self._one_reads: Any = nullcontext() if flow.source.dataset is None else threading.Lock()
        self._over = False
        self._sizes: deque[int] = deque(maxlen=16)

    def run(self) -> None:
        """Until the shard is gone, sends us away, or time is over."""
        stop_keeping_states()
        threads = [threading.Thread(target=t, daemon=True) for t in (self._talk, self._beat, self._read_ahead)]
        for thread in threads:
            thread.start()
        try:
            while (name := self._next()) is not None:
                self._done(name, *self._make(name))
        finally:
            self.stop()
            threads[0].join(timeout=SYNC_S)
            self._say_goodbye()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # -- working ------------------------------------------------------------------------------------------

    def _next(self) -> SampleKey | None:
        with self._changed:
            while not self._over and time.monotonic() < self._until:
                key: Any = self._queue.take()
                if key is not None:
                    return key  # type: ignore[no-any-return]
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
            done = pack(sample, cost_s=cost_s, failed=isinstance(sample, SampleFailed))
        except Exception as e:  # noqa: BLE001 - what a user's object raises when it is pickled
            done, half = pack(self._unsendable(name, e), failed=True), None
        return done, half

    def _unsendable(self, name: SampleKey, e: Exception) -> SampleFailed:
        flow = self._loading.flow
        return SampleFailed(
            f"its result cannot be sent: {type(e).__name__}: {e}", flow=f"{flow.name}@{flow.version}",
            dataset=str(flow.source), index=name.sample, step=flow.steps[-1].name if flow.steps else "read",
        )  # fmt: skip

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
        """The sample as the dataset has it, and what that took."""
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
                    return  # it does not keep to what it says; alone, each sample can be trusted
                wanted: Any = {*self._queue.coming(10 * AHEAD), self._queue.running}
                self._read = {n: r for n, r in self._read.items() if n in wanted}
                self._read.update((n, (raw, each_s)) for n, raw in zip(coming, found, strict=True) if n in wanted)

    def _unread(self) -> list[SampleKey]:
        coming: Any = self._queue.coming(AHEAD)
        return [name for name in coming if name not in self._read and name not in self._halves]

    # -- talking ------------------------------------------------------------------------------------------

    def _talk(self) -> None:
        try:
            self._converse()
        finally:
            self.stop()  # without a word to the shard there is nothing to do

    def _converse(self) -> None:
        while True:
            with self._changed:
                while (report := self._queue.under_way or self._queue.report()) is None and not self._over:
                    self._changed.wait()
                if report is None:
                    return
                done: Any = report.done
                results = {name: self._results[name] for name in done if name in self._results}
                seconds, self._loading.seconds = self._loading.seconds, StageTimings()
            method, params, parts = _request(self._name, report, results)
            params["seconds"] = seconds.by_stage
            try:
                reply, buffers = self._client.call(method, params, parts, timeout_s=SYNC_S)
            except (ConnectionLost, CallTimedOut):
                if not self._reconnect():
                    return
                continue
            if reply.get("over"):
                return
            if reply.get("hold"):  # they have arrived, and need not be sent with each repetition
                with self._changed:
                    for name in done:
                        self._results.pop(name, None)
            else:
                self._sync(report, reply, buffers)
            if self._over:
                return

    def _sync(self, report: LoaderReport, reply: dict[str, Any], buffers: list[Any]) -> None:
        tasks, at, halves = [], 0, {}
        for *name, count, cost_s in reply["tasks"]:
            task = SampleKey(*name)
            tasks.append(task)
            if count:
                parts = tuple(buffers[at : at + count])
                halves[task] = SerializedSample(buffers=parts, nbytes=0, cost_s=cost_s)
                at += count
        with self._changed:
            if self._queue.sync(report.request, tasks):
                for name in report.done:
                    self._results.pop(name, None)  # type: ignore[call-overload]
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

    def _beat(self) -> None:
        while not self._over:
            try:
                self._client.call("heartbeat", {"loader": self._name}, timeout_s=SYNC_S)
            except (ConnectionLost, CallTimedOut):
                pass  # the one who talks connects anew, or ends us
            with self._changed:
                if not self._over:
                    self._changed.wait_for(lambda: self._over, HEARTBEAT_S)

    def _say_goodbye(self) -> None:
        try:
            self._client.call("goodbye", {"loader": self._name}, timeout_s=1.0)
            self._client.close()
        except (ConnectionLost, CallTimedOut):
            pass


def _request(
    name: str, report: LoaderReport, results: dict[Any, tuple[SerializedSample, SerializedSample | None]]
) -> tuple[str, dict[str, Any], list[Any]]:
    done, buffers = [], []
    for key, (sample, half) in results.items():
        parts = () if half is None else half.buffers
        done.append(
            [list(key), len(sample.buffers), sample.cost_s, sample.failed, len(parts), half.cost_s if half else 0.0]
        )
        buffers += [*sample.buffers, *parts]
    params = {
        "loader": name, "request": report.request, "done": done,
        "running": None if report.running is None else list(report.running),  # type: ignore[call-overload]
    }  # fmt: skip
    return "sync", params, buffers
