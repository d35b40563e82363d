"""QMOWS: assignment of tasks to loaders by queue states, over-allocation and stealing (DPFlow section 3.4.1).

A task is one sample; it takes 0.5 to 10 ms, so loaders pull K of them at a time and report N together. For each
loader the scheduler keeps a state of the loader's queue. Stealing happens between these states and costs no message:
the loader stolen from learns of it in the answer to its next request. A task that it had begun by then is loaded twice;
the first result is kept, and as equal keys mean equal bytes, the choice makes no difference.

Everything here is a decision: no clock, no thread, no bytes. Events are method calls with the time as argument;
their return values are the actions to take. No state needs to be saved: after a restart loaders join again,
trainers ask again, and results for wanted tasks are accepted from any loader.

Deviations from the printed algorithms, where these cannot work as printed:

- 3.5 hands out K *new* tasks at each request, on top of those the loader still has, so that queues grow without bound
  where N < K. Here K bounds the queue, and a reply is the whole queue.
- 3.5 takes uncommitted tasks from the state, but no step puts any there. Here two do: an urgent task
  displaces a prefetched one from a full window (its loader may be loading it, so it stays in that state), and a
  suspect waits until its loader has no other task in hand.
- 3.6 does not end when nothing can be stolen, and two loaders that both want K tasks steal from each other for ever.
  Here a request steals from one loader, only if fewer than N tasks are left, and half of the difference, so
  each steal makes loads more equal. All tasks of a loader that has not asked for `unresponsive_s` can be stolen.
- The number of starts of a slow task is unbounded. Here at most `copies` loaders have it at a time.
- A task that kills its loader is put back and kills the next. Here every task that a dead loader had in hand is
  suspected, a suspect is loaded alone, and a death alone with it is a failure of its own. A poisoned sample thus
  costs retries + 2 loaders, and those that had begun a copy before the first death was known. A loader that dies of
  another cause costs at most one sample one attempt: if it was loading a suspect alone.

Invariants, checked by `validate`: a task that is not settled is in exactly one place, the global queue or one
state; a settled task never changes, so at most one result of it is accepted; no queue is longer than K; no task
is held by more than `copies` loaders. In every queue urgent tasks come before prefetched ones; a task that becomes
urgent at the end of a queue moves to its front at that loader's next request.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from ephemeron.data.scheduler.loader import LoaderReport
from ephemeron.data.scheduler.loader_state import LoaderReply, LoaderState, Losses, QueueOptions
from ephemeron.data.scheduler.tasks import Key, ReadyQueue, Task, TaskFailure, TaskRetryPolicy, TaskStatus, rank


class Scheduler:
    """Global queue, status table and loaders.

    Args:
        options: K, N and the timeouts of loaders.
    """

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()
        self.tasks: dict[Key, Task] = {}
        """The status table. Settled tasks stay until they are forgotten."""
        self.loaders: dict[str, LoaderState] = {}
        self.ready = ReadyQueue()
        self.unsettled = 0
        """Tasks that are ready or loading."""
        self.skipped = 0
        """Tasks left out since the scheduler was created."""
        self._order = 0

    def submit(self, keys: Iterable[Key], *, urgent: bool = False, policy: TaskRetryPolicy | None = None) -> None:
        """Adds tasks to be loaded. Tasks in the table stay unchanged, settled or not, but may become urgent."""
        for key in keys:
            task = self.tasks.get(key)
            if task is None:
                self._order += 1
                task = Task(key=key, order=self._order, urgent=urgent, policy=policy or TaskRetryPolicy())
                self.tasks[key] = task
                self.unsettled += 1
                self.ready.push(task)
            elif urgent and not task.urgent and not task.status.settled:
                task.urgent = True
                if task.status is TaskStatus.READY:  # in a reserve, it would wait for one loader's request
                    self._set_owner(task, None)
                    self.ready.push(task)

    def forget(self, keys: Iterable[Key]) -> None:
        """Removes tasks, loaded or not. A result that comes later is dropped.

        Failures are forgotten as well. Remember them where keys come again, or a poisoned sample is tried again.
        """
        for key in keys:
            task = self.tasks.pop(key, None)
            if task is not None and not task.status.settled:
                self._remove(task)

    # -- loaders ------------------------------------------------------------------------------------------

    def add_loader(self, loader: str, *, now: float) -> None:
        """A loader joins. Each invocation needs a name of its own; joining twice is harmless."""
        state = self.loaders.setdefault(loader, LoaderState(loader=loader, heard_at=now, asked_at=now))
        state.heard_at = now

    def heartbeat(self, loader: str, *, now: float) -> bool:
        """A loader is alive. False: it was given up and has to join again."""
        state = self.loaders.get(loader)
        if state is not None:
            state.heard_at = now
        return state is not None

    def sync(self, loader: str, report: LoaderReport, *, now: float) -> LoaderReply:
        """A loader delivers results and asks for tasks (algorithm 3.4).

        A request that was seen before gets the same queue again, and its failures are not counted again.
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
        """Loaders whose request is held back. After any event, call `assign` for them until one gets no task."""
        return tuple(state.loader for state in self.loaders.values() if state.holding)

    def assign(self, loader: str, *, now: float) -> LoaderReply:
        """The late answer to a request that is held back. It stays held back while there is no task."""
        state = self.loaders[loader]
        if state.holding:
            state.asked_at = now
        return self._fill(state, list(state.committed), now)

    def remove_loader(self, loader: str) -> None:
        """A loader ended normally: its tasks return to the queue and are not suspected."""
        state = self.loaders.pop(loader, None)
        if state is not None:
            self._requeue_all(state)

    def fail_loader(self, loader: str) -> tuple[TaskFailure, ...]:
        """A loader died. Its tasks in hand become suspects; a suspect that it was loading alone counts a failure."""
        state = self.loaders.pop(loader, None)
        if state is None:
            return ()
        self._requeue_all(state)
        failures = []
        for task in filter(None, map(self._live, state.in_hand)):
            if task.suspect and len(state.in_hand) == 1:
                failures.append(
                    self._count_failure(task, f"loader {loader} was lost while it loaded this and nothing else")
                )
            task.suspect = True
        return tuple(failure for failure in failures if failure)

    def tick(self, *, now: float) -> Losses:
        """Gives up loaders whose lease has expired or that are stuck."""
        lost = tuple(loader for loader, state in self.loaders.items() if now > self._deadline(state))
        return Losses(loaders=lost, failures=tuple(failure for loader in lost for failure in self.fail_loader(loader)))

    def deadline(self) -> float | None:
        """Time from which `tick` has something to do if no other event happens. None: never."""
        return min(map(self._deadline, self.loaders.values()), default=None)

    def _deadline(self, state: LoaderState) -> float:
        lease = state.heard_at + self.options.lease_s
        return min(lease, state.asked_at + self.options.stuck_s) if state.in_hand else lease

    # -- a loader's queue ---------------------------------------------------------------------------------

    def _fill(
        self,
        state: LoaderState,
        left: Sequence[Key],
        now: float,
        *,
        accepted: tuple[Key, ...] = (),
        failures: tuple[TaskFailure, ...] = (),
    ) -> LoaderReply:
        """Algorithms 3.5 and 3.6. `left`: tasks that the loader was told of and has not reported."""
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
        else:  # it finishes its tasks, and gets no other before the suspect
            going_on = [task for task in window if task.key in state.in_hand]
            self._commit(state, going_on, suspects + [task for task in window if task.key not in state.in_hand])
        state.holding = not state.in_hand
        return LoaderReply(
            request=state.request,
            tasks=tuple(state.committed),
            accepted=accepted,
            failures=failures,
            hold=state.holding,
        )

    def _draw(self, window: list[Task]) -> list[Task]:
        """Fills `window` from the global queue in order, up to a suspect. Returns the suspect if its turn has come."""
        size = self.options.window
        while (top := self.ready.peek()) is not None:
            if top.suspect:
                return [top] if not window or rank(top) < rank(window[0]) else []
            if len(window) >= size and (not top.urgent or window[size - 1].urgent):
                break
            self.ready.pop()
            insort(window, top, key=rank)
        return []

    def _steal(self, thief: LoaderState, have: int, now: float) -> list[Task]:
        """Tasks to take from one other state: those of a silent loader first, else of the one with most to spare."""
        victims = [state for state in self.loaders.values() if state is not thief and state.load]
        for victim in sorted(victims, key=lambda m: (not self._is_unresponsive(m, now), -m.load)):
            told = [task for key in victim.committed if (task := self._live(key)) and task.owner == victim.loader]
            aside = list(victim.uncommitted.values())
            if not thief.in_hand and not have and (suspects := [task for task in aside if task.suspect]):
                return suspects[:1]
            silent = self._is_unresponsive(victim, now)
            most = self.options.window - have if silent else (victim.load - have) // 2
            tail_first = [*reversed(aside), *reversed(told if silent else told[1:])]
            spare = [task for task in tail_first if not task.suspect and self._may_copy(task, thief)]
            if most > 0 and spare:
                return sorted(spare, key=lambda task: not task.urgent)[:most]
        return []

    def _may_copy(self, task: Task, thief: LoaderState) -> bool:
        return len(task.holders - {thief.loader}) < self.options.copies

    def _is_unresponsive(self, state: LoaderState, now: float) -> bool:
        return now - state.asked_at >= self.options.unresponsive_s

    def _commit(self, state: LoaderState, window: Sequence[Task], aside: Sequence[Task]) -> None:
        """Sets the loader's queue to `window` and keeps `aside` in reserve for it."""
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

    def _live(self, key: Key) -> Task | None:
        """The task, unless it is settled or unknown."""
        task = self.tasks.get(key)
        return None if task is None or task.status.settled else task

    def _set_owner(self, task: Task, state: LoaderState | None) -> None:
        """Moves a task to a state, or removes it from its state."""
        if task.owner is not None and (old := self.loaders.get(task.owner)) is not None:
            old.load -= 1
            old.uncommitted.pop(task.key, None)
        task.owner = None if state is None else state.loader
        if state is not None:
            state.load += 1

    def _requeue(self, task: Task) -> None:
        self._set_owner(task, None)
        task.status = TaskStatus.READY
        self.ready.push(task)

    def _remove(self, task: Task) -> None:
        self.ready.discard(task)
        self._set_owner(task, None)
        self.unsettled -= 1

    def _accept(self, key: Key) -> bool:
        task = self._live(key)
        if task is not None:
            self._remove(task)
            task.status = TaskStatus.DONE
        return task is not None

    def _failed(self, key: Key, state: LoaderState, reason: str) -> TaskFailure | None:
        task = self._live(key)
        if task is None or key not in state.in_hand:
            return None
        failure = self._count_failure(task, reason)
        if failure is None and task.status is TaskStatus.LOADING and task.owner == state.loader:
            self._requeue(task)
        return failure

    def _count_failure(self, task: Task, reason: str) -> TaskFailure | None:
        """Counts a failure that is certainly the task's own. Returns a `TaskFailure` if no retry is left."""
        task.attempts += 1
        if task.attempts <= task.policy.retries:
            return None
        self._remove(task)
        task.status = TaskStatus.SKIPPED if task.policy.then == "skip" else TaskStatus.FAILED
        self.skipped += task.status is TaskStatus.SKIPPED
        return TaskFailure(key=task.key, status=task.status, reason=reason)

    def _requeue_all(self, state: LoaderState) -> None:
        """Returns all tasks of a loader to the global queue; the loader is no longer in `loaders`."""
        for task in [*filter(None, map(self._live, state.committed)), *state.uncommitted.values()]:
            task.holders.discard(state.loader)
            if task.owner == state.loader:
                self._requeue(task)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. O(tasks × loaders): for tests and debugging."""
        places: dict[Key, list[str]] = {key: [] for key in self.tasks}
        for state in self.loaders.values():
            told = [t for key in state.committed if (t := self._live(key)) and t.owner == state.loader]
            assert len(state.committed) == len(set(state.committed)) <= self.options.window, "queue longer than K"
            assert state.load == len(told) + len(state.uncommitted), "load counts what is owned"
            assert state.in_hand.issuperset(state.committed), "what was told may be in hand"
            assert not (state.holding and state.in_hand), "only the idle wait"
            assert all(task.status is TaskStatus.LOADING for task in told)
            assert all(task.status is TaskStatus.READY for task in state.uncommitted.values())
            for task in (*told, *state.uncommitted.values()):
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
