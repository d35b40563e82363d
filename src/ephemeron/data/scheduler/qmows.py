"""QMOWS: which loader loads which sample, by over-allocated queues and work stealing (DPFlow section 3.4.1).

A task is one sample; it takes 0.5 to 10 ms, so loaders pull K of them at a time and report N together. For each loader the scheduler
keeps a copy of the loader's queue, the queue mirror of the paper (`LoaderState`). Stealing happens between these copies and costs no
message: a loader learns of it in the reply to its next request. A task that it had begun by then is loaded twice; the first result is
kept, and equal keys mean equal bytes, so there is no difference.

Decisions only: no clock, no thread, no bytes. Events are method calls with the time as argument; their results say what is to be
done. No state is saved: after a restart loaders register again, trainers repeat their requests, and results for requested tasks are
accepted from every loader.

Differences to the printed algorithms:

- 3.5 hands out K *new* tasks at each request, however many the loader still has, so that queues grow without bound
  where N < K. Here K bounds the queue, and a reply is the whole queue.
- 3.5 takes uncommitted tasks from the mirror, and nothing puts them there. Here two things do: an urgent task displaces a
  prefetched one from a full window (its loader may be working on it, so it stays reserved for that loader), and a suspect waits until
  its loader has nothing else in hand.
- 3.6 does not end when nothing can be stolen, and two loaders that both want K tasks steal from each other for ever. Here tasks are
  stolen from one loader per request, only for a loader with fewer than N, and half of the difference, so each theft makes loads more
  equal. All tasks of a loader that has made no request for `unresponsive_s` can be stolen.
- Nothing bounds how often a slow task is started. Here at most `copies` loaders have it at a time.
- A task that kills its loader is put back and kills the next. Here every task that a dead loader had in hand is suspected, a suspect
  is loaded alone, and a death with a suspect alone counts as a failure of the task. A sample that kills loaders so costs retries + 2
  loaders, and those that had begun a copy before the first death was known. A loader that dies of another cause costs at most one
  sample one attempt: if it was loading a suspect alone.

Invariants, checked by `validate`: a task that is not settled is in exactly one place, the global queue or one loader's state; a
settled task never changes, so at most one result of it is accepted; no queue is longer than K; no task is held by more than `copies`
loaders. In every queue urgent tasks come before prefetched ones; a task that becomes urgent at the end of a queue moves to its front
at that loader's next request.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import Generic

from ephemeron.data.scheduler.tasks import (
    K,
    LoaderReply,
    LoaderReport,
    LoaderState,
    LoadTask,
    Losses,
    QueueOptions,
    ReadyQueue,
    TaskFailure,
    TaskRetryPolicy,
    TaskStatus,
    rank,
)


class Scheduler(Generic[K]):
    """Global queue, status table and loaders.

    Args:
        options: K, N and timeouts of loaders.
    """

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()
        self.tasks: dict[K, LoadTask[K]] = {}
        """The status table. Settled tasks stay until they are forgotten."""
        self.loaders: dict[str, LoaderState[K]] = {}
        self.ready: ReadyQueue[K] = ReadyQueue()
        self.unsettled = 0
        """Tasks that are ready or loading."""
        self.skipped = 0
        """Tasks left out since the scheduler was created."""
        self._order = 0

    def submit(self, keys: Iterable[K], *, urgent: bool = False, policy: TaskRetryPolicy | None = None) -> None:
        """Submits tasks. Those in the table stay as they are, settled or not, but may become urgent."""
        for key in keys:
            task = self.tasks.get(key)
            if task is None:
                self._order += 1
                task = LoadTask(key=key, order=self._order, urgent=urgent, policy=policy or TaskRetryPolicy())
                self.tasks[key] = task
                self.unsettled += 1
                self.ready.push(task)
            elif urgent and not task.urgent and not task.status.settled:
                task.urgent = True
                if task.status is TaskStatus.READY:  # in a reserve, it would wait for one loader's request
                    self._set_owner(task, None)
                    self.ready.push(task)

    def forget(self, keys: Iterable[K]) -> None:
        """Removes tasks that are not needed any more, loaded or not. A result that comes later is dropped.

        Failures are removed as well. The caller keeps them where keys come again, or a sample that kills loaders is retried.
        """
        for key in keys:
            task = self.tasks.pop(key, None)
            if task is not None and not task.status.settled:
                self._remove(task)

    # -- loaders ------------------------------------------------------------------------------------------

    def add_loader(self, loader: str, *, now: float) -> None:
        """Adds a loader. Each invocation needs a name of its own; adding it twice is harmless."""
        state = self.loaders.setdefault(loader, LoaderState(loader=loader, heard_at=now, asked_at=now))
        state.heard_at = now

    def heartbeat(self, loader: str, *, now: float) -> bool:
        """Records that a loader is alive. False: it had been given up and has to be added again."""
        state = self.loaders.get(loader)
        if state is not None:
            state.heard_at = now
        return state is not None

    def sync(self, loader: str, report: LoaderReport[K], *, now: float) -> LoaderReply[K]:
        """Takes a loader's report, and returns its new queue (algorithm 3.4).

        A repeated request gets the same queue again, and its failures are not counted again.
        """
        accepted = tuple(key for key in report.done if self._accept(key))
        state = self.loaders.get(loader)
        if state is None:
            return LoaderReply(request=report.request, accepted=accepted, rejoin=True)
        state.heard_at = now
        if report.request <= state.request:
            live = tuple(key for key in state.committed if self._live(key))
            return LoaderReply(request=report.request, tasks=live, accepted=accepted, hold=state.holding)
        state.request, state.asked_at = report.request, now
        failures = [self._failed(key, state, reason) for key, reason in report.failed.items()]
        left = [key for key in state.committed if key not in report.failed and key not in report.done]
        state.in_hand = {*left} if report.running is None else {*left, report.running}
        return self._fill(state, left, now, accepted=accepted, failures=tuple(v for v in failures if v))

    def idle_loaders(self) -> tuple[str, ...]:
        """Loaders whose request is held back. After any event, `assign` to them until one gets nothing."""
        return tuple(state.loader for state in self.loaders.values() if state.holding)

    def assign(self, loader: str, *, now: float) -> LoaderReply[K]:
        """The late reply to a request that is held back. It stays held back while there is no work."""
        state = self.loaders[loader]
        if state.holding:
            state.asked_at = now
        return self._fill(state, list(state.committed), now)

    def remove_loader(self, loader: str) -> None:
        """Removes a loader that has shut down: its tasks go back to the queue, and are not suspected."""
        state = self.loaders.pop(loader, None)
        if state is not None:
            self._requeue_all(state)

    def fail_loader(self, loader: str) -> tuple[TaskFailure[K], ...]:
        """Removes a loader that died. Its tasks are suspected; a single task that was suspected before has failed."""
        state = self.loaders.pop(loader, None)
        if state is None:
            return ()
        self._requeue_all(state)
        failures = []
        for task in filter(None, map(self._live, state.in_hand)):
            if task.suspect and len(state.in_hand) == 1:
                failures.append(self._count_failure(task, f"loader {loader} was lost while it loaded this and nothing else"))
            task.suspect = True
        return tuple(failure for failure in failures if failure)

    def tick(self, *, now: float) -> Losses[K]:
        """Gives up loaders whose lease has expired, or that are stuck."""
        lost = tuple(loader for loader, state in self.loaders.items() if now > self._deadline(state))
        return Losses(loaders=lost, failures=tuple(failure for loader in lost for failure in self.fail_loader(loader)))

    def deadline(self) -> float | None:
        """Time of the next `tick` with an effect if nothing else happens. None: never."""
        return min(map(self._deadline, self.loaders.values()), default=None)

    def _deadline(self, state: LoaderState[K]) -> float:
        lease = state.heard_at + self.options.lease_s
        return min(lease, state.asked_at + self.options.stuck_s) if state.in_hand else lease

    # -- a loader's queue ---------------------------------------------------------------------------------

    def _fill(
        self,
        state: LoaderState[K],
        left: Sequence[K],
        now: float,
        *,
        accepted: tuple[K, ...] = (),
        failures: tuple[TaskFailure[K], ...] = (),
    ) -> LoaderReply[K]:
        """Algorithms 3.5 and 3.6. `left`: tasks in the loader's queue that it has not reported."""
        own = [task for key in left if (task := self._live(key)) and task.owner == state.loader]
        own += state.uncommitted.values()
        suspects = sorted((task for task in own if task.suspect), key=rank)
        window = sorted((task for task in own if not task.suspect), key=rank)
        if not suspects:
            suspects = self._draw(window)
        if not suspects and len(window) < self.options.batch and not self.ready:
            for task in self._steal(state, len(window), now):
                if task.suspect:
                    suspects = [task]
                else:
                    insort(window, task, key=rank)
        if not suspects:
            size = self.options.window
            self._commit(state, window[:size], window[size:])
        elif state.in_hand <= {suspects[0].key}:
            self._commit(state, suspects[:1], suspects[1:] + window)
        else:  # it finishes its present tasks, and gets no other before the suspect
            going_on = [task for task in window if task.key in state.in_hand]
            self._commit(state, going_on, suspects + [task for task in window if task.key not in state.in_hand])
        state.holding = not state.in_hand
        return LoaderReply(request=state.request, tasks=tuple(state.committed), accepted=accepted, failures=failures, hold=state.holding)

    def _draw(self, window: list[LoadTask[K]]) -> list[LoadTask[K]]:
        """Fills `window` from the global queue, in order, as far as a suspect. Returns it if its turn has come."""
        size = self.options.window
        while (top := self.ready.peek()) is not None:
            if top.suspect:
                return [top] if not window or rank(top) < rank(window[0]) else []
            if len(window) >= size and (not top.urgent or window[size - 1].urgent):
                break
            self.ready.pop()
            insort(window, top, key=rank)
        return []

    def _steal(self, thief: LoaderState[K], have: int, now: float) -> list[LoadTask[K]]:
        """Tasks to take from one other loader: an unresponsive one first, else the one with most tasks."""
        victims = [state for state in self.loaders.values() if state is not thief and state.load]
        for victim in sorted(victims, key=lambda m: (not self._is_unresponsive(m, now), -m.load)):
            sent = [task for key in victim.committed if (task := self._live(key)) and task.owner == victim.loader]
            aside = list(victim.uncommitted.values())
            if not thief.in_hand and not have and (suspects := [task for task in aside if task.suspect]):
                return suspects[:1]
            silent = self._is_unresponsive(victim, now)
            most = self.options.window - have if silent else (victim.load - have) // 2
            tail_first = [*reversed(aside), *reversed(sent if silent else sent[1:])]
            spare = [task for task in tail_first if not task.suspect and self._may_copy(task, thief)]
            if most > 0 and spare:
                return sorted(spare, key=lambda task: not task.urgent)[:most]
        return []

    def _may_copy(self, task: LoadTask[K], thief: LoaderState[K]) -> bool:
        return len(task.holders - {thief.loader}) < self.options.copies

    def _is_unresponsive(self, state: LoaderState[K], now: float) -> bool:
        return now - state.asked_at >= self.options.unresponsive_s

    def _commit(self, state: LoaderState[K], window: Sequence[LoadTask[K]], aside: Sequence[LoadTask[K]]) -> None:
        """Makes `window` the loader's queue, and reserves `aside` for it."""
        for task in filter(None, map(self.tasks.get, state.committed)):
            task.holders.discard(state.loader)
        for task in (*window, *aside):
            self.ready.discard(task)
            self._set_owner(task, state)
        state.uncommitted = {task.key: task for task in aside}
        state.committed = [task.key for task in window]
        state.in_hand.update(state.committed)
        for task in window:
            task.status = TaskStatus.LOADING
            task.holders.add(state.loader)
        for task in aside:
            task.status = TaskStatus.READY

    # -- single tasks -------------------------------------------------------------------------------------

    def _live(self, key: K) -> LoadTask[K] | None:
        """The task, unless it is settled or forgotten."""
        task = self.tasks.get(key)
        return None if task is None or task.status.settled else task

    def _set_owner(self, task: LoadTask[K], state: LoaderState[K] | None) -> None:
        """Moves a task to a loader, or out of all of them."""
        if task.owner is not None and (old := self.loaders.get(task.owner)) is not None:
            old.load -= 1
            old.uncommitted.pop(task.key, None)
        task.owner = None if state is None else state.loader
        if state is not None:
            state.load += 1

    def _requeue(self, task: LoadTask[K]) -> None:
        self._set_owner(task, None)
        task.status = TaskStatus.READY
        self.ready.push(task)

    def _remove(self, task: LoadTask[K]) -> None:
        self.ready.discard(task)
        self._set_owner(task, None)
        self.unsettled -= 1

    def _accept(self, key: K) -> bool:
        task = self._live(key)
        if task is not None:
            self._remove(task)
            task.status = TaskStatus.DONE
        return task is not None

    def _failed(self, key: K, state: LoaderState[K], reason: str) -> TaskFailure[K] | None:
        task = self._live(key)
        if task is None or key not in state.in_hand:
            return None
        failure = self._count_failure(task, reason)
        if failure is None and task.status is TaskStatus.LOADING and task.owner == state.loader:
            self._requeue(task)
        return failure

    def _count_failure(self, task: LoadTask[K], reason: str) -> TaskFailure[K] | None:
        """Counts a failure that is certainly the task's own; returns it if it was the last attempt."""
        task.attempts += 1
        if task.attempts <= task.policy.retries:
            return None
        self._remove(task)
        task.status = TaskStatus.SKIPPED if task.policy.then == "skip" else TaskStatus.FAILED
        self.skipped += task.status is TaskStatus.SKIPPED
        return TaskFailure(key=task.key, status=task.status, reason=reason)

    def _requeue_all(self, state: LoaderState[K]) -> None:
        """Returns a loader's tasks to the global queue; the loader is removed from `loaders` already."""
        for task in [*filter(None, map(self._live, state.committed)), *state.uncommitted.values()]:
            task.holders.discard(state.loader)
            if task.owner == state.loader:
                self._requeue(task)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. O(tasks × loaders): for tests, and for suspicion."""
        places: dict[K, list[str]] = {key: [] for key in self.tasks}
        for state in self.loaders.values():
            sent = [t for key in state.committed if (t := self._live(key)) and t.owner == state.loader]
            assert len(state.committed) == len(set(state.committed)) <= self.options.window, "queue longer than K"
            assert state.load == len(sent) + len(state.uncommitted), "load counts what is owned"
            assert state.in_hand.issuperset(state.committed), "what was sent may be in hand"
            assert not (state.holding and state.in_hand), "only the idle wait"
            assert all(task.status is TaskStatus.LOADING for task in sent)
            assert all(task.status is TaskStatus.READY for task in state.uncommitted.values())
            for task in (*sent, *state.uncommitted.values()):
                places[task.key].append(state.loader)
        for key, task in self.tasks.items():
            assert places[key] == ([] if task.owner is None else [task.owner]), f"{key} is in {places[key]}"
            assert (task in self.ready) == (task.owner is None and not task.status.settled), f"{key} is misplaced"
            assert (task.attempts > task.policy.retries) == (task.status in (TaskStatus.FAILED, TaskStatus.SKIPPED))
            if not task.status.settled:
                assert task.holders <= {m.loader for m in self.loaders.values() if key in m.committed}
                assert len(task.holders) <= self.options.copies, f"{key} is held by {task.holders}"
        live = sum(not task.status.settled for task in self.tasks.values())
        assert self.unsettled == live == len(self.ready) + sum(state.load for state in self.loaders.values())
