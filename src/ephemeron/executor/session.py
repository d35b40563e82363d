"""The client's side of an executor, in one event loop: publishes tasks, keeps functions running, collects results, counts cost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Literal

from ephemeron.communication.channels.base import Buffer
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import (
    BudgetReached,
    ChannelEmptied,
    ChannelError,
    DamagedObject,
    EphemeronError,
    PlatformError,
    RunStopped,
    TaskFailed,
)
from ephemeron.events import Ended, Event, Invoked, RunEnded, StoreRequests, Traffic
from ephemeron.executor.batching import MOST_IN_BATCH, Batching
from ephemeron.executor.fleet import Fleet
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.graphs import Graph
from ephemeron.executor.kind import TasksSummary
from ephemeron.executor.places import Place, PlaceOptions
from ephemeron.executor.programs import DurableMap, survives
from ephemeron.functions.deployed_packages import missing_module_remedy
from ephemeron.functions.tasks.batch_state import failed_first
from ephemeron.functions.tasks.model import TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.open_queue import Adapter, open_queue, queue_channel
from ephemeron.functions.tasks.queue import ResultReader, TaskQueue
from ephemeron.functions.tasks.running_task import cancel_key
from ephemeron.prices import Prices
from ephemeron.runs.cost import Bill as Billed
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.header import RunHeader, started
from ephemeron.units import human_count
from ephemeron.user_code import line_of, unpickled

_log = logging.getLogger(__name__)

FIRST_POLL_S, MOST_POLL_S, POLL_GROWTH = 0.01, 0.25, 1.5
"""Pauses between two looks at results: after each result they begin anew and grow."""
_POLL_SHARE, _NOTIFIED_SHARE = 0.02, 0.2
"""Of the time since the first task of this burst, the longest pause between two looks at results: a short computation ends soon after its
last task, and a long one costs few requests. The second where the queue tells that it is empty."""
_EMPTY_S = 10.0
"""Longest wait for that in one request."""
_END_S = 10.0
"""Seconds that functions have to end by themselves."""
_LAST_S = 5.0
"""Seconds to hear of the ends of functions."""
_AT_ONCE = 16
_STOP_LOOK_S = 0.5
"""Between two looks for a request to stop, while there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What an executor's tasks have cost so far, at list prices; local functions cost nothing, and show what a cloud's would."""

    cost_usd: float
    functions_usd: float
    storage_usd: float
    invocations: int
    gb_seconds: float
    tasks: int
    """With a result."""
    prices: str
    """Name and date of the price list."""

    def __str__(self) -> str:
        return (
            f"${self.cost_usd:.6f} for {human_count(self.tasks, 'task')}: {human_count(self.invocations, 'invocation')}, {self.gb_seconds:.2f} GB-s; "
            f"{self.prices}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """How a session serves a run that is not an executor's own: its tasks are few and long, and its driver tells how it begins and ends."""

    goes_on: bool = False
    """Whether another process may go on with the same tasks, which have the same ids there."""
    tells: bool = True
    """Whether the session writes the beginning and the end of the run among its events."""
    one_at_a_time: bool = False
    """Whether each task is a batch, and functions take none ahead."""
    more_losses: int = 0
    """Functions that may end in a row without progress, beyond what is borne of all runs."""
    before_s: float = 0.0
    """Seconds of the run before this session, where it is no other process's that this one goes on with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A task that is to be published."""

    spec: TaskSpec
    future: TaskFuture | None = None
    """None: an inner node of a tree, whose result only other tasks read."""
    objects: Mapping[str, Buffer] = field(default_factory=dict)
    """Objects that it needs: code, large arguments."""
    edges: tuple[TaskEdge, ...] = ()
    """Connected before it is published."""
    published_by_edge: bool = False
    """An edge publishes it."""
    is_watched: bool = False
    """Whether it looks for its cancellation while it runs; see `functions.tasks.running_task`."""


class Session:
    """Tasks of one executor.

    Args:
        run: of the run.
        options: admitted.
        key: signs code, tasks and results.
        prices: of functions and channel.
        budget_usd: at which nothing more is started; None: none.
        labels: of the run; see `runs.labels`.
        is_to_stop: asked while it lives.
        on_change: called after results have come, in this loop.
        durable: map whose tasks these are.
        on_event: called with every event of the run that is not this session's own, in this loop.
        terms: other than those of an executor.
    """

    def __init__(
        self,
        run: str,
        options: PlaceOptions,
        *,
        key: SigningKey,
        prices: Prices,
        budget_usd: float | None = None,
        labels: Mapping[str, str] | None = None,
        is_to_stop: Callable[[], bool] = lambda: False,
        on_change: Callable[[], None] = lambda: None,
        durable: DurableMap | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        terms: SessionTerms | None = None,
    ) -> None:
        self.run, self.options, self.key = run, options, key
        self.budget_usd, self.labels = budget_usd, labels or {}
        self.meter = CostMeter(prices)
        self.header: RunHeader | None = None
        """Of the run, from its first task on."""
        self.done = 0
        self.submitted = 0
        self.settled = self.total = 0
        """Tasks that have ended, and all of them, inner nodes of trees included."""
        self.failed = self.cancelled = 0
        self._cause = ""
        """Of the first failure."""
        self._is_to_stop = is_to_stop
        self._on_change, self._on_event = on_change, on_event
        self._durable = durable
        self._terms = terms or SessionTerms()
        self._batching = Batching(workers=options.max_workers, most=1 if self._terms.one_at_a_time else MOST_IN_BATCH)
        self._arrived: deque[Submission] = deque()
        self._waiting: deque[Submission] = deque()
        self._unresolved: dict[str, TaskFuture] = {}
        self._open: set[str] = set()
        """Published tasks without a result."""
        self._batch_of: dict[str, tuple[str, str]] = {}
        """Batch of a published task without a result, and what the task calls."""
        self._watched: set[str] = set()
        """Tasks that look for their cancellation."""
        self._cancelled: deque[str] = deque()
        self._stored: dict[str, asyncio.Future[None]] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._traffic = self._before = Traffic()
        self._source = ""
        """Of its requests, among events."""
        self._now: Callable[[], float] = lambda: self._terms.before_s
        self._running: set[str] = set()
        self._ends: dict[str, Ended] = {}
        """By name of a function that has ended without an answer."""
        self._order = 0
        self._heard_at = 0.0
        """Loop time at which the queue was asked for the functions that it hears of."""
        self._empty: tuple[float, int] | None = None
        """Loop time at which the queue was first found empty though tasks have no result, and `settled` then."""
        self._looked_at = 0.0
        self._recorded: dict[str, TaskResult] = {}
        """Final results of tasks that this process has not submitted yet: of a process before it."""
        self._published: dict[str, str] = {}
        """By such a task without a result, the batch that it is in."""
        self._graphs: dict[str, Graph] = {}
        self._new_graphs: deque[Graph] = deque()

    # -- any thread; `wake` afterwards -----------------------------------------------------------------------

    def add(self, submissions: Iterable[Submission]) -> None:
        """Tasks to run."""
        submissions = list(submissions)
        self._unresolved.update((one.spec.id, one.future) for one in submissions if one.future is not None)
        self.submitted = self.done + len(self._unresolved)
        self._arrived.extend(submissions)

    def add_graph(self, graph: Graph) -> None:
        """A graph to run."""
        self._unresolved[graph.name] = graph.future
        self.submitted = self.done + len(self._unresolved)
        self._new_graphs.append(graph)

    @property
    def has_arrived(self) -> bool:
        """Whether tasks were added that the loop has not seen."""
        return bool(self._arrived or self._new_graphs)

    def cancel(self, task: str) -> None:
        """A task whose future was cancelled."""
        self._cancelled.append(task)

    def cancel_open(self) -> None:
        """Cancels all futures that have no result."""
        for future in list(self._unresolved.values()):
            future.cancel()

    def close(self) -> None:
        """Ends `live` when all tasks have ended."""
        self._closing = True

    def fail(self, error: BaseException) -> None:
        """Gives all futures without a result this error."""
        unresolved, self._unresolved = self._unresolved, {}
        self.cancelled += len(unresolved)
        self._open.clear()
        self._waiting.clear()
        self._arrived.clear()
        self._graphs.clear()
        self._new_graphs.clear()
        for future in unresolved.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)

    def bill(self) -> Bill:
        """The cost so far."""
        t, prices = self._now(), self.meter.prices
        gb_seconds, invocations = self.meter.gb_seconds_at(t), self.meter.invocations
        functions = prices.functions_usd(gb_seconds, invocations)
        storage = self.meter.storage_usd(t) + prices.storage_usd(self._traffic)
        return Bill(
            cost_usd=functions + storage,
            functions_usd=functions,
            storage_usd=storage,
            invocations=invocations,
            gb_seconds=gb_seconds,
            tasks=self.done,
            prices=f"{prices.name}, {prices.as_of}",
        )

    def summary(self, error: BaseException | None) -> TasksSummary:
        """How it has ended.

        Args:
            error: for which it has ended early; None: it has not.
        """
        bill, status = self.bill(), self._status(error)
        cause = (str(error) if error is not None else self._cause) if status == "failed" else ""
        return TasksSummary(
            run_id=self.run,
            status=status,
            seconds=round(self._now(), 3),
            cost_usd=round(bill.cost_usd, 9),
            platform=self.options.platform,
            invocations=bill.invocations,
            billed=Billed(gb_seconds=round(bill.gb_seconds, 6), requests=bill.invocations, storage_usd=round(bill.storage_usd, 9)),
            budget_usd=self.budget_usd,
            prices=bill.prices,
            causes=(cause,) if cause else (),
            tasks=(self.done if self._durable is None else self._durable.counts()[0]) - self.failed,
            failed=self.failed,
            cancelled=self.cancelled,
            details={} if self._durable is None else self._durable.details(),
        )

    def _status(self, error: BaseException | None) -> Literal["finished", "stopped", "failed"]:
        if error is not None and not isinstance(error, RunStopped):
            return "failed"
        return "failed" if self.failed and error is None else "stopped" if error is not None or self.cancelled else "finished"

    @property
    def t(self) -> float:
        """Seconds since the start of the run."""
        return self._now()

    @property
    def functions(self) -> int:
        """Functions that run now, as far as is known."""
        return len(self._running)

    def wake(self) -> None:
        """Something was added, cancelled or closed. In the loop of `live`."""
        self._wake.set()

    # -- the loop ------------------------------------------------------------------------------------------

    async def live(self, place: Place, *, running: Iterable[Invoked] = ()) -> None:
        """Runs tasks until `close`.

        Args:
            place: where.
            running: functions that a process before this one has started.

        Raises:
            EphemeronError: functions cannot be started, the store does not answer, an object was forged, or the budget is
                reached.
        """
        self._wake, self._stored, self._before = asyncio.Event(), {}, self._traffic
        self._heard_at = asyncio.get_running_loop().time()
        assert self.header is not None  # there is a task
        origin = self.header.started_at if self._is_taken_over else place.clock() - self._now()
        self._now = lambda: place.clock() - origin
        began = self._now()
        # Of each process that goes on with the run; the rounds of one, in virtual time, have one.
        self._source = self._source or (f"client-{began:.0f}" if began >= 1 else "client")
        self.meter.memory_mb = self.options.memory_mb
        channel = queue_channel(place.store, self.run, owner="client-data", key=self.key.text)
        adapter: Adapter = "redis" if place.address.startswith("redis") else "objects"
        queue = open_queue(place.store, self.run, owner="client", key=self.key.text, adapter=adapter, lease_s=place.lease_s)
        fleet = Fleet(
            place,
            run=self.run,
            options=self.options,
            adapter=adapter,
            key=self.key,
            labels=self.labels,
            origin=origin,
            changed=self._wake.set,
            one_at_a_time=self._terms.one_at_a_time,
            more_losses=self._terms.more_losses,
        )
        fleet.adopt(each.rank for each in running)
        if self._terms.tells:
            await place.platform.emit(self.run, started(self.header, t=self._now(), wall_time=time.time() - self._now()))
        watching = [asyncio.ensure_future(self._watch(place, fleet))]
        if queue.notifies:
            watching.append(asyncio.ensure_future(self._wake_when_empty(queue)))
        error: BaseException | None = None
        try:
            reader = queue.reader()
            if self._is_taken_over:
                await self._recover(queue, reader)
            await self._work(channel, queue, fleet, reader)
            if not self._open:  # else functions are busy with tasks whose results are not wanted any more
                await queue.finish()
                await fleet.ended(_END_S)
        except BaseException as e:
            error = e
            raise
        finally:
            await fleet.cancel()
            if not (self._is_taken_over and isinstance(error, RunStopped)):  # else it can be gone on with
                with contextlib.suppress(EphemeronError):
                    await queue.clear()
            await self._last_events()
            status = self._status(error)
            self._traffic = self._before + channel.traffic + queue.traffic
            with contextlib.suppress(PlatformError):
                await place.platform.emit(self.run, StoreRequests(t=self._now(), source=self._source, traffic=self._traffic))
                causes = [line_of(error)] if error is not None and status == "failed" else []
                if self._terms.tells:
                    await place.platform.emit(self.run, RunEnded(t=self._now(), status=status, causes=causes))
            for each in watching:
                each.cancel()
            ended = self._now()
            self._now = lambda: ended
            await queue.close()

    @property
    def _is_taken_over(self) -> bool:
        """Whether another process may have begun with the same tasks, or may go on with them. Simulated ones begin again."""
        is_known = self._terms.goes_on or (self.header is not None and survives(self.header))
        return self.options.platform != "simulated" and is_known

    async def _recover(self, queue: TaskQueue, reader: ResultReader) -> None:
        """Learns what is in the queue from a process before this one: tasks first, so one that ends meanwhile is in both. Else it would be in none, and
        published again."""
        self._published = await queue.published()
        self._recorded = {result.id: result for result in await reader.read()}

    async def _work(self, channel: RunChannel, queue: TaskQueue, fleet: Fleet, reader: ResultReader) -> None:
        pause_s, loop = FIRST_POLL_S, asyncio.get_running_loop()
        began = loop.time()
        while True:
            self._wake.clear()
            await self._settle(channel, self._accept())
            await self._cancel(channel, queue)
            self._check_stop()
            if self._closing and not self._unresolved:
                return  # what is left was cancelled, or belongs to trees that were
            await self._publish_graphs(channel, queue)
            fleet.need(len(self._open) + len(self._waiting) + await self._ready_of_graphs(queue, fleet))
            await self._publish(channel, queue)
            if not self._open and not self._waiting and not self._graphs and not self.has_arrived:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _STOP_LOOK_S)
                self._check_stop()
                pause_s, began = FIRST_POLL_S, loop.time()
                continue
            results = await reader.read()
            await self._settle(channel, results)
            self._check_lost(queue, reader)
            self._traffic = self._before + channel.traffic + queue.traffic
            self._check(fleet)
            if results:
                self._on_change()
                if self._open or self._waiting or not self._graphs:  # of a graph only its end matters
                    pause_s = FIRST_POLL_S
            if results and self._waiting:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause_s)
            pause_s = min(POLL_GROWTH * pause_s, MOST_POLL_S)
            if self.options.platform == "local":  # elsewhere a look costs money, and functions take a second to start
                share = _NOTIFIED_SHARE if queue.notifies and self._graphs else _POLL_SHARE
                pause_s = min(pause_s, max(FIRST_POLL_S, share * (loop.time() - began)))

    async def _wake_when_empty(self, queue: TaskQueue) -> None:
        with contextlib.suppress(EphemeronError):  # the loop meets it, too
            while True:
                if await queue.wait_until_empty(_EMPTY_S):
                    self._wake.set()

    def _accept(self) -> list[TaskResult]:
        """Takes in tasks that were added; returns results that they have already."""
        results: list[TaskResult] = []
        while self._arrived:
            one = self._arrived.popleft()
            self.total += 1
            if one.is_watched:
                self._watched.add(one.spec.id)
            if (result := self._recorded.pop(one.spec.id, None)) is not None:
                self._open.add(one.spec.id)
                results.append(result)
            elif (batch := self._published.pop(one.spec.id, None)) is not None:
                self._open.add(one.spec.id)
                self._batch_of[one.spec.id] = (batch, one.spec.function)
                self._batching.published(one.spec.function)
            elif one.published_by_edge:
                self._open.add(one.spec.id)  # its result may come as soon as its inputs are published
            elif one.future is None or not one.future.done():
                self._waiting.append(one)
        return results

    async def _cancel(self, channel: RunChannel, queue: TaskQueue) -> None:
        by_batch: dict[str, list[str]] = {}
        while self._cancelled:
            task = self._cancelled.popleft()
            self.cancelled += self._unresolved.pop(task, None) is not None
            if task in self._open and (found := self._batch_of.get(task)):
                by_batch.setdefault(found[0], []).append(task)
        for batch, tasks in by_batch.items():
            await queue.cancel(batch, tasks)
            for task in self._watched.intersection(tasks):
                await channel.put(cancel_key(self.run, task), [b"."])

    async def _publish(self, channel: RunChannel, queue: TaskQueue) -> None:
        batches: list[list[Submission]] = []
        for size in self._batching.sizes((one.spec.function for one in self._waiting), len(self._waiting)):
            chosen = [self._waiting.popleft() for _ in range(size)]
            wanted = [one for one in chosen if one.future is None or not one.future.done()]
            self._open.update(one.spec.id for one in wanted)
            batches.append(wanted)
        for at in range(0, len(batches), _AT_ONCE):
            await asyncio.gather(*(self._put(channel, queue, batch) for batch in batches[at : at + _AT_ONCE]))

    async def _put(self, channel: RunChannel, queue: TaskQueue, batch: list[Submission]) -> None:
        """Publishes a batch, after what it needs."""
        objects = {key: data for one in batch for key, data in one.objects.items()}
        for key, data in objects.items():
            if key not in self._stored:
                self._stored[key] = asyncio.ensure_future(channel.put(key, [data]))
        await asyncio.gather(*(self._stored[key] for key in objects))
        for edge in (edge for one in batch for edge in one.edges):
            await queue.connect(edge)
        specs = [one.spec for one in batch]
        if specs:
            order, self._order = self._order, self._order + 1
            name = await queue.publish(specs, order=order)
            for spec in specs:
                self._batching.published(spec.function)
                self._batch_of[spec.id] = (name, spec.function)

    async def _publish_graphs(self, channel: RunChannel, queue: TaskQueue) -> None:
        while self._new_graphs:
            graph = self._new_graphs.popleft()
            self._graphs[graph.name] = graph
            self.total += graph.tasks
            for key, data in {**graph.objects, graph.key: graph.data}.items():
                await channel.put(key, [data])
            self._settle_graphs([r for id, r in self._recorded.items() if id.startswith(f"{graph.name}-")])
        for graph in self._graphs.values():
            for some in graph.next_starts(_AT_ONCE * 4):
                await asyncio.gather(*(queue.publish([spec], order=order) for spec, order in some))

    async def _ready_of_graphs(self, queue: TaskQueue, fleet: Fleet) -> int:
        """Functions that the graphs can use. Tells the fleet, now and then, which functions are heard of."""
        loop_s = asyncio.get_running_loop().time()
        if not self._graphs and (not self._open or loop_s < self._heard_at + queue.lease_s):
            return 0
        self._heard_at = loop_s
        depth = await queue.depth()
        fleet.heard(depth.executors)
        if depth.tasks or self._empty is None or self._empty[1] != self.settled:
            self._empty = None if depth.tasks else (loop_s, self.settled)
        self._looked_at = loop_s
        return depth.tasks if self._graphs else 0

    def _settle_graphs(self, results: list[TaskResult]) -> None:
        for result in sorted(results, key=lambda each: failed_first(each) is not each):  # first what has a traceback
            graph = self._graphs.get(result.id.partition("-")[0])
            if graph is not None:
                self.settled += 1
                graph.absorb(result)
        for graph in [graph for graph in self._graphs.values() if graph.is_over]:
            del self._graphs[graph.name]
            self._unresolved.pop(graph.name, None)
            self.done += 1
            if not graph.is_done:
                self._failed(graph.future)

    async def _settle(self, channel: RunChannel, results: list[TaskResult]) -> None:
        self._settle_graphs(results)
        known = [r for r in results if r.id in self._open]
        if self._published:  # by a process before this one, and submitted here later
            self._recorded.update((r.id, r) for r in results if self._published.pop(r.id, None) is not None)
        for at in range(0, len(known), _AT_ONCE):
            part = known[at : at + _AT_ONCE]
            values = await asyncio.gather(*(self._value(channel, r) for r in part))
            for result, value in zip(part, values, strict=True):
                self._resolve(result, value)

    async def _value(self, channel: RunChannel, result: TaskResult) -> memoryview | bytes | ChannelError | None:
        if result.status != "ok" or result.id not in self._unresolved:
            return None
        if not result.ref:
            return result.data
        try:  # it was read back before the result was recorded
            data = await channel.fetch(result.ref)
        except DamagedObject as e:
            return e
        return ChannelEmptied("the store has lost the result", key=result.ref) if data is None else data

    def _resolve(self, result: TaskResult, data: memoryview | bytes | ChannelError | None) -> None:
        self._open.remove(result.id)
        self.settled += 1
        if (batch := self._batch_of.pop(result.id, None)) is not None:
            self._batching.done(batch[1], result.compute_s if result.status == "ok" else None)
        future = self._unresolved.pop(result.id, None)
        if future is None:
            return
        self.done += 1
        future.tries, future.compute_s, future.executor = result.tries, result.compute_s, result.executor
        with contextlib.suppress(InvalidStateError):  # it was cancelled just now
            if result.status == "cancelled":
                future.cancel()
            elif result.status != "ok" or data is None or isinstance(data, ChannelError):
                text = result.error or str(data or "it has no result")
                end = self._ends.get(result.lost)
                if end is not None:
                    text = f"{text} (lastly {end.error or end.status})"
                if remedy := missing_module_remedy(text, self.options.platform):
                    text = f"{text}; {remedy}"
                lost = "" if end is None else end.status
                failed = TaskFailed(text, task=result.id, traceback=result.traceback, tries=result.tries, lost=lost)
                failed.__cause__ = _raised(result)
                future.set_exception(failed)
                self._failed(future)
            else:
                try:
                    value = unpickled(data)
                except Exception as e:  # noqa: BLE001 - a class that this process cannot import
                    future.set_exception(TaskFailed(f"its result cannot be read here: {line_of(e)}", task=result.id))
                else:
                    future.set_result(value)

    def _failed(self, future: TaskFuture) -> None:
        if future.cancelled():
            self.cancelled += 1
            return
        self.failed += 1
        self._cause = self._cause or str(future.exception(0))

    def _check_lost(self, queue: TaskQueue, reader: ResultReader) -> None:
        """Raises `ChannelEmptied` where tasks have no result, and the queue has none left: a batch, an edge or results are lost. Two looks
        at the queue, a lease time apart, have found it empty; results were read after both."""
        if self._empty is None or self._empty[1] != self.settled or self._looked_at < self._empty[0] + queue.lease_s:
            return
        of = next((self._batch_of[task][0] for task in sorted(self._open) if task in self._batch_of), "")
        text = "the store has lost tasks, or their results: some have no result, and the queue has no task left"
        raise ChannelEmptied(text, key=reader.damaged or queue.key_of(of))

    def _check_stop(self) -> None:
        if self._is_to_stop():
            raise RunStopped(self.run)

    def _check(self, fleet: Fleet) -> None:
        fleet.check(progress=self.settled)
        if self.budget_usd is not None and (self._open or self._waiting or self._graphs):
            cost = self.bill().cost_usd
            if cost >= self.budget_usd:
                done, of = (self.settled, self.total) if self._graphs else (self.done, self.submitted)
                raise BudgetReached(cost, self.budget_usd, done=done, of=of)

    async def _watch(self, place: Place, fleet: Fleet) -> None:
        async for event in place.platform.events(self.run):
            if isinstance(event, StoreRequests) and event.source == self._source:  # its own, which the bill adds
                continue
            self.meter.feed(event)
            self._on_event(event)
            if isinstance(event, Invoked):
                self._running.add(event.invocation)
            elif isinstance(event, Ended):
                self._running.discard(event.invocation)
                if event.status not in ("ok", "cancelled"):
                    self._ends[f"{event.rank}-{event.invocation}"] = event
                fleet.left(event.rank)

    async def _last_events(self) -> None:
        """Waits until all functions are known to have ended, for a while."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _LAST_S
        while self._running and loop.time() < ends_at:  # noqa: ASYNC110 - events come from another process, which has no event
            await asyncio.sleep(FIRST_POLL_S)


def _raised(result: TaskResult) -> Exception | None:
    """What a task has raised; None: it could not be pickled, or this process has no such class."""
    if not result.data:
        return None
    try:
        raised = unpickled(result.data)
    except Exception:  # noqa: BLE001 - classes of the user's
        return None
    return raised if isinstance(raised, Exception) else None
