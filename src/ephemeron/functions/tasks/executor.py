"""The executor: takes tasks until its lifetime nears, fetches the next inputs while it computes, writes results meanwhile.

Four activities share one event loop: a feeder leases batches, inputs of the next tasks are fetched, a slice of tasks runs on the
compute thread, a writer records results. Only the compute thread is ever busy for long. A batch is recorded at its end or every
`flush_s`, more often where that takes next to no time, so a task of milliseconds costs no request of its own; what an executor that dies has
not recorded runs again elsewhere.
A task that follows the latest one begins while the outputs of that one are stored; see `followers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ephemeron.communication.channels.base import Channel
from ephemeron.errors import ChannelEmptied, EphemeronError, JobError
from ephemeron.functions.context import Compute
from ephemeron.functions.tasks.compute_slice import ComputeSlice, Job, Ran, TaskInterrupted
from ephemeron.functions.tasks.executor_options import ExecutorOptions, ExecutorTotals
from ephemeron.functions.tasks.followers import Follower, Followers, Following
from ephemeron.functions.tasks.model import TaskEdge, TaskLease, TaskResult, TaskSpec
from ephemeron.functions.tasks.object_places import is_placed
from ephemeron.functions.tasks.queue import TaskQueue
from ephemeron.functions.tasks.repeated_inputs import RepeatedInputs
from ephemeron.functions.tasks.resolver import Resolver, TaskFunction
from ephemeron.functions.tasks.result_store import StoredResult, TaskOutputs, stored_result
from ephemeron.user_code import failure

_log = logging.getLogger(__name__)

_SLICE_S = 0.05
"""Tasks that take less share a turn of the compute thread."""
_SLICE_TASKS = 64
_FIRST_PAUSE_S, _GROWTH = 0.01, 2.0
"""Between two looks into an empty queue."""
_OVERDUE_TIMES, _OVERDUE_S, _OVERDUE_AT_FIRST_S = 10.0, 1.0, 10.0
"""A slice is overdue after so many times the time of others like it, and at least so many seconds; the last where there were none."""
_RECORD_TIMES, _LEAST_FLUSH_S = 10.0, 0.02
"""Results that have no request of their own wait so many times as long as recording takes, and at least so long."""
_LOOK_S = 0.25
_GRACE_S = 1.0
"""In which an interrupted task has to end."""


@dataclass(slots=True)
class _Planned:
    lease: TaskLease
    task: TaskSpec
    inputs: asyncio.Task[Sequence[memoryview]] | None = None
    nbytes: int = 0
    follower: Follower | None = None
    """Where it is one. Until it is leased, the lease is the one that is hoped for."""


@dataclass(slots=True)
class _Lease:
    """A lease that this executor works on."""

    lease: TaskLease
    open: set[str]
    """Tasks without a final result."""
    results: list[StoredResult] = field(default_factory=list)
    """Not recorded yet."""
    since: float = 0.0
    """Loop time of the first of these."""
    writing: bool = False

    @property
    def is_through(self) -> bool:
        return len(self.results) >= len(self.open)


class TaskExecutor:
    """One executor.

    Args:
        queue: to take from; its owner is this executor.
        channel: of inputs and results.
        resolver: finds code.
        compute: runs it (`Context.compute`).
        name: announced to the queue.
        deadline: loop time at which the function will be killed.
        data_prefix: of keys of results that need an object and do not name it.
        options: time constants.
    """

    def __init__(
        self,
        queue: TaskQueue,
        channel: Channel,
        resolver: Resolver,
        compute: Compute,
        *,
        name: str,
        deadline: float,
        data_prefix: str,
        options: ExecutorOptions | None = None,
    ) -> None:
        self.totals = ExecutorTotals()
        self._queue, self._channel, self._resolver, self._compute = queue, channel, resolver, compute
        self._following = Following(queue, channel, resolver)
        self._name, self._data_prefix = name, data_prefix
        self._options = options or ExecutorOptions()
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deadline, self._stop_at = deadline, deadline - self._options.margin_s
        self._planned: deque[_Planned] = deque()
        self._leases: dict[str, _Lease] = {}
        self._functions: dict[str, asyncio.Task[TaskFunction]] = {}
        self._inputs: WeakValueDictionary[str, memoryview] = WeakValueDictionary()
        """Of tasks that are planned or running: what many tasks have is fetched once, as long as one follows the other."""
        self._repeated = RepeatedInputs(self._options.keep_bytes)
        self._fetching: dict[str, asyncio.Event] = {}
        self._edges: dict[str, asyncio.Task[Sequence[TaskEdge]]] = {}
        """By task that has begun: its edges are being added."""
        self._followers = Followers(queue)
        self._mean_s = 0.0
        """Of the latest tasks of one function."""
        self._mean_of = ""
        self._computing = self._is_overdue = False
        self._alone: tuple[ComputeSlice, TaskSpec] | None = None
        """The task that is computed, where it is one."""
        self._take_s = 0.0
        self._flush_s = self._options.flush_s
        """As of `_RECORD_TIMES`."""
        self._buffered = 0
        self._changed = asyncio.Event()
        """Something was planned, finished or recorded."""
        self._fed = False
        """The feeder has ended."""
        self._stopping = False

    async def run(self) -> ExecutorTotals:
        """Works until there is nothing to do, or no time. Leases are given back, results are recorded."""
        await self._queue.announce(self._name)
        beat = asyncio.create_task(self._renew())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._feed())
                group.create_task(self._write())
                group.create_task(self._work())
        except BaseExceptionGroup as e:
            raise (e.exceptions[0] if len(e.exceptions) == 1 else e) from None
        finally:
            beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beat
            for planned in self._planned:
                if planned.inputs is not None:
                    planned.inputs.cancel()
            for edges in self._edges.values():
                edges.cancel()
            self._followers.cancel()
        for held in list(self._leases.values()):
            await self._queue.release(held.lease)
        await self._queue.announce(self._name, gone=True)
        return self.totals

    async def _wait(self, seconds: float | None = None) -> None:
        """Until something has changed, or some time has passed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # Taking

    async def _feed(self) -> None:
        options, pause_s, idle_since = self._options, _FIRST_PAUSE_S, self._loop.time()
        while not self._stopping and self._loop.time() < self._stop_at:
            if self._is_overdue:  # what it takes now would wait
                await self._wait(_LOOK_S)
                continue
            wanted_s = options.ahead_s + 2 * self._take_s
            backlog_s = len(self._planned) * self._mean_s
            if options.one_at_a_time and self._leases:
                await self._wait(self._stop_at - self._loop.time())
                idle_since = self._loop.time()
                continue
            if self._planned and (backlog_s >= wanted_s or not self._mean_s):
                await self._wait(max(0.01, min(backlog_s - wanted_s / 2, self._stop_at - self._loop.time())))
                continue
            n = int((wanted_s - backlog_s) / self._mean_s) if self._mean_s else 1
            began = self._loop.time()
            leases = await self._queue.take(max(1, n), is_busy=self._is_busy)
            leases = await self._only_known(leases)
            now = self._loop.time()
            self._take_s = max(0.5 * self._take_s, now - began)
            if leases:
                self._plan(leases)
                pause_s = max(_FIRST_PAUSE_S, self._take_s)
            if leases or self._leases:
                idle_since = now
                if not leases:
                    await self._wait(min(pause_s, options.poll_s))
                    pause_s *= _GROWTH
                continue
            if now - idle_since >= options.idle_s and not await self._may_inherit(now - idle_since):
                self.totals.ended_by = "idle"
                break
            if self._queue.is_drained:
                self.totals.ended_by = "closed"
                break
            longest_s = options.poll_s if self._queue.notifies else min(pause_s, options.poll_s)
            await self._queue.wait_for_work(min(longest_s, max(0.0, self._stop_at - now)))
            pause_s *= _GROWTH
        self._fed = True
        self._changed.set()

    @property
    def _is_busy(self) -> bool:
        """Whether there is a task to run, or a follower may be found."""
        return self._computing or bool(self._planned) or self._followers.are_open

    async def _only_known(self, leases: list[TaskLease]) -> list[TaskLease]:
        """Gives back what was taken because tasks of another function were short: these may be long, and other executors idle."""
        known = [lease for lease in leases if all(task.function == self._mean_of for task in lease.tasks)] or leases[:1]
        for lease in leases:
            if lease not in known:
                await self._queue.release(lease)
        return known

    async def _may_inherit(self, idle_s: float) -> bool:
        """Whether leases may end that this executor has seen for a while: a new one would have to observe them from the beginning."""
        return idle_s < 2 * self._queue.lease_s and (await self._queue.depth()).leased > 0

    async def _give_back(self) -> None:
        """Gives back what was taken ahead and has not begun: the task that runs takes far longer than others."""
        waiting = Counter(planned.lease.batch for planned in self._planned if planned.follower is None)
        for batch, count in waiting.items():
            held = self._leases[batch]
            if count == len(held.lease.tasks) and not held.results and not held.writing:
                for planned in [planned for planned in self._planned if planned.lease.batch == batch]:
                    self._planned.remove(planned)
                    self._buffered -= planned.nbytes
                    if planned.inputs is not None:
                        planned.inputs.cancel()
                del self._leases[batch]
                await self._queue.release(held.lease)

    def _plan(self, leases: Sequence[TaskLease]) -> None:
        for lease in leases:
            self._hold(lease)
            self._planned.extend(_Planned(lease, task) for task in lease.tasks)
        self._changed.set()

    def _hold(self, lease: TaskLease) -> None:
        self.totals.batches += 1
        self.totals.taken += len(lease.tasks)
        self._leases[lease.batch] = _Lease(lease, {task.id for task in lease.tasks})

    # Inputs

    def _prefetch(self) -> None:
        """Begins to fetch the inputs of the next tasks."""
        for n, planned in enumerate(self._planned):
            if n >= self._options.prefetch or (n and self._buffered >= self._options.buffer_bytes):
                break
            if planned.inputs is None and planned.task.inputs:
                planned.inputs = asyncio.create_task(self._fetch(planned))

    async def _fetch(self, planned: _Planned) -> Sequence[memoryview]:
        own = {} if planned.follower is None else planned.follower.own  # which may not be stored yet
        await self._resolved(planned.task.function)
        if self._resolver.is_stored(planned.task):
            return []

        async def fetch(key: str) -> memoryview | None:
            return own[key] if key in own else await self._input(key)

        found = await asyncio.gather(*(fetch(key) for key in planned.task.inputs))
        inputs = []
        for key, data in zip(planned.task.inputs, found, strict=True):
            if data is None:
                if await self._resolver.look_again(planned.task):
                    return []
                raise ChannelEmptied("an input of the task is not there", key=key)
            inputs.append(data)
        planned.nbytes = sum(data.nbytes for data in inputs)
        self._buffered += planned.nbytes
        return inputs

    async def _input(self, key: str) -> memoryview | None:
        """An input, which tasks that are planned or running may have already, or be fetching."""
        while (held := self._inputs.get(key)) is None and key in self._fetching:
            await self._fetching[key].wait()
        if held is None:
            held = self._repeated.get(key)
        if held is None:
            self._fetching[key] = asyncio.Event()
            try:
                held = await self._channel.fetch(key)
                if held is not None:
                    self._inputs[key] = held
            finally:
                self._fetching.pop(key).set()
        if held is not None and not is_placed(key):
            self._repeated.used(key, held)
        return held

    async def _resolved(self, function: str) -> TaskFunction:
        if function not in self._functions:
            self._functions[function] = asyncio.create_task(self._resolver.resolve(function))
        return await self._functions[function]

    # Computing

    async def _work(self) -> None:
        while True:
            self._prefetch()
            if self._loop.time() + self._mean_s >= self._stop_at:
                self.totals.ended_by = "deadline"
                break
            if not self._planned:
                if self._fed and not self._leases:
                    break
                began = self._loop.time()
                await self._wait(self._stop_at - began)
                self.totals.idle_s += self._loop.time() - began
                continue
            if self._buffered > self._options.buffer_bytes and any(held.results for held in self._leases.values()):
                await self._wait(self._stop_at - self._loop.time())
                continue
            if not await self._run_slice():
                break
        self._stopping = True
        self._changed.set()

    def _next(self) -> list[_Planned]:
        """The next tasks that share a turn of the compute thread."""
        first = self._planned.popleft()
        chosen = [first]
        if first.lease.is_careful or first.task.timeout_s is not None or first.task.inputs or not self._mean_s:
            return chosen
        most = min(_SLICE_TASKS, int(_SLICE_S / self._mean_s))
        while self._planned and len(chosen) < most:
            other = self._planned[0]
            if other.lease.is_careful or other.task.timeout_s is not None or other.task.inputs:
                break
            chosen.append(self._planned.popleft())
        return chosen

    async def _run_slice(self) -> bool:
        """Runs the next tasks. Returns whether the executor is fit for more."""
        chosen, jobs = [], []
        for planned in self._next():
            if not self._is_open(planned):
                continue
            try:
                inputs = await (planned.inputs or self._fetch(planned))
                jobs.append(Job(planned.task, await self._resolved(planned.task.function), inputs, self._resolver.encode_error))
                chosen.append(planned)
            except Exception as e:  # noqa: BLE001 - code and inputs are the user's
                error, trace = failure(e)
                if await self._is_leased(planned):
                    self._finished(planned, Ran(error=error, traceback=trace))
        if not jobs:
            return True
        self._prefetch()
        for planned in chosen:
            self._connect(planned)
        work, began, early = ComputeSlice(jobs), self._loop.time(), 0

        async def overdue() -> None:
            nonlocal early
            if (
                chosen[0].follower is None and work.stack()
            ):  # else it runs in virtual time, in which its results are there before their time
                early, before = len(work.ran), early
                for planned, one in zip(chosen[before:early], work.ran[before:early], strict=True):
                    self._finished(planned, one)
            await self._give_back()

        self._computing, self._alone = True, (work, chosen[0].task) if len(jobs) == 1 else None
        try:
            end = await self._compute_slice(work, chosen[0].task, overdue)
        finally:
            self._computing = self._is_overdue = False
            self._alone = None
        took_s = self._loop.time() - began
        self.totals.compute_s += took_s
        ran, left = end.ran, chosen[max(early, len(end.ran)) :]
        if end.interrupted and left:
            why = self._why_interrupted(left[0].task, took_s)
            if why:
                ran, left = [*ran, Ran(error=why, traceback=end.stack, compute_s=took_s)], left[1:]
        else:
            mean_s, function = took_s / len(jobs), chosen[0].task.function
            is_first = not self._mean_s or function != self._mean_of
            self._mean_s, self._mean_of = mean_s if is_first else 0.8 * self._mean_s + 0.2 * mean_s, function
        if not await self._is_leased(chosen[0]):
            return not end.is_stuck
        looking = self._look_for_follower(chosen[0], ran[0]) if len(chosen) == len(ran) == 1 else None
        for planned, one in zip(chosen[early:], ran[early:], strict=False):
            self._finished(planned, one)
        self._planned.extendleft(reversed(left))
        if looking is not None and (follower := await looking) is not None:
            self._follow(follower)
        if end.is_stuck:
            self.totals.ended_by = "stuck"
            return False
        if chosen[0].lease.is_careful:
            await self._until_recorded(chosen[0].lease)
        return True

    def _connect(self, planned: _Planned) -> None:
        """Begins to add the edges of a task, while it computes."""
        task = planned.task
        if task.then and task.id not in self._edges:
            self._edges[task.id] = asyncio.create_task(self._following.connect(task))

    # Followers

    def _look_for_follower(self, planned: _Planned, ran: Ran) -> asyncio.Task[Follower | None] | None:
        """Begins to look for a task that can follow one that has ended, if there is no other to run."""
        if not self._followers.are_possible or self._planned or planned.lease.is_careful or not self._is_open(planned):
            return None
        if ran.error or planned.task.id not in self._edges or not isinstance(ran.value, TaskOutputs):
            return None
        return self._followers.look(planned.task, ran.value, self._edges[planned.task.id])

    def _follow(self, follower: Follower) -> None:
        planned = _Planned(follower.lease, follower.task, follower=follower)
        planned.inputs = asyncio.create_task(self._fetch(planned))
        self._planned.appendleft(planned)

    async def _is_leased(self, planned: _Planned) -> bool:
        """Whether a task is leased; waits until that is known of a follower."""
        if planned.follower is None:
            return True
        lease = await planned.follower.leased
        if lease is not None:
            planned.lease = lease
            return True
        self._buffered -= planned.nbytes
        self.totals.dropped += 1
        if edges := self._edges.pop(planned.task.id, None):
            edges.cancel()
        return False

    async def _lease_followers(self, followers: Sequence[Follower], leases: Sequence[TaskLease], after: set[str]) -> None:
        """Tells followers whether they are leased.

        Args:
            followers: all that are concerned.
            leases: of their batches, as far as the queue has leased them.
            after: tasks whose outputs and results are this executor's.
        """
        leased = {lease.batch: lease for lease in leases if lease.batch not in self._leases}
        for follower in followers:
            lease = leased.get(follower.lease.batch)
            if lease is not None and follower.after not in after:
                await self._queue.release(lease)
                lease = None
            if lease is not None:
                self._hold(lease)
            follower.leased.set_result(lease)

    async def _compute_slice(self, work: ComputeSlice, first: TaskSpec, overdue: Callable[[], Awaitable[None]]) -> _SliceEnd:
        """Runs a slice, and interrupts it at the time limit of its task, or of this executor. Calls `overdue` once if it takes far longer
        than others."""
        running = asyncio.ensure_future(self._compute(work, samples=len(work.jobs)))
        limit_s = self._stop_at - self._loop.time()
        if first.timeout_s is not None:
            limit_s = min(limit_s, first.timeout_s)
        usual_s = self._mean_s * len(work.jobs)
        overdue_s = max(_OVERDUE_S, _OVERDUE_TIMES * usual_s) if usual_s else _OVERDUE_AT_FIRST_S
        try:
            if overdue_s < limit_s:
                await asyncio.wait({running}, timeout=overdue_s)
                if not running.done():
                    self._is_overdue = True
                    await overdue()
                    limit_s -= overdue_s
            await asyncio.wait({running}, timeout=max(limit_s, 0.0))
            if running.done():
                return _SliceEnd(await running)
            stack = work.stack()
            if stack:  # else it runs in virtual time, in which nothing is left to interrupt
                work.interrupt()
                await asyncio.wait({running}, timeout=_GRACE_S)
        finally:
            running.cancel()
        ran = [one for one in work.ran if not one.error.startswith(TaskInterrupted.__name__)] if stack else []
        return _SliceEnd(ran, interrupted=True, stack=stack, is_stuck=bool(work.stack()))

    def _why_interrupted(self, task: TaskSpec, took_s: float) -> str:
        """Error of an interrupted task; empty if this executor's end is the cause, so that another one begins it anew."""
        if task.timeout_s is not None and took_s >= task.timeout_s:
            return f"TimeoutError: not done after its timeout of {task.timeout_s:g} s"
        if 2 * took_s >= self._stop_at - self._began:
            return f"TimeoutError: not done after {took_s:.0f} s, at the end of its executor's lifetime"
        return ""

    async def _until_recorded(self, lease: TaskLease) -> None:
        while (held := self._leases.get(lease.batch)) is not None and (held.results or held.writing):
            await self._wait(1.0)

    def _is_open(self, planned: _Planned) -> bool:
        if planned.follower is not None and not planned.follower.leased.done():
            return True
        held = self._leases.get(planned.lease.batch)
        return held is not None and planned.task.id in held.open

    # Results

    def _finished(self, planned: _Planned, ran: Ran) -> None:
        """Hands the end of a try to the writer."""
        self._buffered -= planned.nbytes
        held, task = self._leases.get(planned.lease.batch), planned.task
        if held is None or task.id not in held.open:
            self.totals.dropped += 1
            return
        stored = None
        if not ran.error:
            key = f"{self._data_prefix}{task.id}.{self._queue.owner}"
            try:
                stored = stored_result(task, ran.value, key=key, executor=self._name, compute_s=ran.compute_s)
            except JobError as e:
                ran = Ran(error=f"{type(e).__name__}: {e}", compute_s=ran.compute_s)
        if stored is None:
            failed = TaskResult(
                id=task.id,
                status="failed",
                data=ran.data,
                error=ran.error,
                traceback=ran.traceback,
                executor=self._name,
                compute_s=ran.compute_s,
            )
            stored = StoredResult(failed)
        if not held.results:
            held.since = self._loop.time()
        held.results.append(stored)
        self._buffered += stored.nbytes
        self._changed.set()

    async def _write(self) -> None:
        while True:
            due, next_s = [], self._options.poll_s
            for held in self._leases.values():
                if not held.results:
                    continue
                left_s = held.since + self._flush_s - self._loop.time()
                if held.is_through or held.lease.is_careful or self._stopping or left_s <= 0:
                    due.append(held)
                else:
                    next_s = min(next_s, left_s)
            if due:
                await asyncio.gather(*(self._record(held) for held in due))
            elif self._stopping:
                return
            else:
                await self._wait(next_s)

    async def _record(self, held: _Lease) -> None:
        results, held.results, held.writing = held.results, [], True
        began = self._loop.time()
        are_own = await asyncio.gather(*(stored.put(self._channel) for stored in results))
        self._buffered -= sum(stored.nbytes for stored in results)
        of = {task.id: task for task in held.lease.tasks}
        ids = [stored.result.id for stored in results]
        await asyncio.gather(*(edges for id in ids if (edges := self._edges.pop(id, None)) is not None))
        followers = await self._followers.of(ids)
        accepted, leases = await self._queue.complete_and_follow(
            held.lease, [stored.result for stored in results], [follower.edge for follower in followers]
        )
        self._flush_s = min(self._options.flush_s, max(_LEAST_FLUSH_S, _RECORD_TIMES * (self._loop.time() - began)))
        own = {id for id, is_own in zip(ids, are_own, strict=True) if is_own} & {r.id for r in accepted}
        await self._lease_followers(followers, leases, own)
        recorded = {r.id: r for r in accepted}
        self._changed.set()  # tasks that were released by this may be taken
        unused, late = [], []
        for stored in results:
            task = of[stored.result.id]
            result = recorded.get(task.id)
            if result is None:
                self.totals.dropped += 1
                if stored.key and not task.output:
                    unused.append(stored.key)
                if stored.objects:
                    late.append(task)
            elif result.status == "ok":
                self.totals.recorded += 1
            else:
                self.totals.failed += 1
            if result is not None and not result.is_final:
                self._planned.append(_Planned(held.lease, task))
            else:
                held.open.discard(task.id)
        if unused:
            await self._channel.delete(unused)
        await self._following.drop_late_outputs(late)
        await self._following.drop_inputs([of[id] for id, result in recorded.items() if result.status == "ok"])
        held.writing = False
        if not held.open:
            self._leases.pop(held.lease.batch, None)
        self._changed.set()

    # Leases

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._queue.lease_s / 3)
            try:
                await self._queue.announce(self._name)
                for lease in await self._queue.renew([held.lease for held in self._leases.values()]):
                    self._lost(lease)
                await self._interrupt_cancelled()
            except EphemeronError as e:  # the leases end, and others take the tasks
                _log.warning("executor %s could not renew its leases: %s", self._name, e)

    async def _interrupt_cancelled(self) -> None:
        alone = self._alone
        if alone is not None and await self._resolver.is_cancelled(alone[1]) and self._alone is alone:
            _log.info("task %s is cancelled: it is interrupted", alone[1].id)
            alone[0].interrupt()

    def _lost(self, lease: TaskLease) -> None:
        held = self._leases.get(lease.batch)
        if held is None:
            return
        _log.info("executor %s has lost its lease of batch %s", self._name, lease.batch)
        held.open &= {stored.result.id for stored in held.results}
        if not held.open and not held.writing:
            del self._leases[lease.batch]
        self._changed.set()


@dataclass(frozen=True, slots=True)
class _SliceEnd:
    ran: list[Ran]
    """Of the first jobs."""
    interrupted: bool = False
    """The next job was running at the time limit."""
    stack: str = ""
    """Where it was."""
    is_stuck: bool = False
    """It cannot be interrupted."""
