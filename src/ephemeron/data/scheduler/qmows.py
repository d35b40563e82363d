"""QMOWS: who loads what, decided by queue mirrors, over-allocation and stealing (DPFlow section 3.4.1).

A task is one sample; it takes 0.5 to 10 ms, so loaders pull K of them at a time and report N together. For each
loader the scheduler keeps a mirror of the loader's queue. Stealing happens between mirrors and costs no message:
the robbed loader learns of it in the answer to its next request. What it had begun by then is loaded twice; the
first result is kept, and equal keys mean equal bytes, so nobody can tell.

Everything here is a decision: no clock, no thread, no bytes. Events are method calls with the time as argument;
whatever has to be done is in what they return. Nothing is worth saving: after a restart loaders join again,
trainers ask again, and results for tasks that are wanted are accepted whoever brings them.

Where the printed algorithms cannot be meant:

- 3.5 hands out K *new* tasks at each request, whatever the loader still has, so that queues grow without bound
  where N < K. Here K bounds the queue, and a reply is the whole queue.
- 3.5 takes uncommitted tasks from the mirror, and nothing puts them there. Here two things do: an urgent task
  displaces a prefetched one from a full window (its loader may be at it, so it stays in that mirror), and a
  suspect waits until its loader has nothing else in hand.
- 3.6 does not end when nothing can be stolen, and two loaders that both want K tasks rob each other for ever.
  Here one victim is robbed per request, only for a loader left with fewer than N, and of half the difference, so
  each theft makes loads more equal. One that has not asked for `patience_s` can be robbed of everything.
- Nothing bounds how often a slow task is started. Here at most `copies` loaders have it at a time.
- A task that kills its loader is put back and kills the next. Here everything that a dead loader had in hand is
  suspected, a suspect is loaded alone, and a death alone with it is a failure of its own. A poisoned sample so
  costs retries + 2 loaders, and those that had begun a copy before the first death was known. A loader that dies of
  something else costs at most one sample one attempt: if it was loading a suspect alone.

Invariants, checked by `validate`: a task that is not settled is in exactly one place, the global queue or one
mirror; a settled task never changes, so at most one result of it is accepted; no queue is longer than K; nothing
is held by more than `copies` loaders. In every queue what a trainer waits for comes before what is prefetched; a
task that becomes urgent while it stands at the end of a queue comes to its front at that loader's next request.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from ephemeron.data.scheduler.loader import LoaderReport
from ephemeron.data.scheduler.loader_state import LoaderReply, LoaderState, Losses, QueueOptions
from ephemeron.data.scheduler.tasks import Key, ReadyQueue, Task, TaskFailure, TaskRetryPolicy, TaskStatus, rank


class Scheduler:
    """Global queue, status table and mirrors.

    Args:
        options: K, N and the patience with loaders.
    """

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()
        self.tasks: dict[Key, Task] = {}
        """The status table. Settled tasks stay until they are forgotten."""
        self.mirrors: dict[str, LoaderState] = {}
        self.ready = ReadyQueue()
        self.unsettled = 0
        """Tasks that are ready or loading."""
        self.skipped = 0
        """Tasks that were left out, ever."""
        self._order = 0

    def submit(self, keys: Iterable[Key], *, urgent: bool = False, policy: TaskRetryPolicy | None = None) -> None:
        """Wants these to be loaded. What is in the table stays as it is, settled or not, but may become urgent."""
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
                if task.status is TaskStatus.READY:  # set aside, it would wait for one loader's request
                    self._own(task, None)
                    self.ready.push(task)

    def forget(self, keys: Iterable[Key]) -> None:
        """Nobody wants these any more, loaded or not. A result that comes later is dropped.

        Verdicts are forgotten as well. Remember them where keys come again, or a poisoned sample is tried again.
        """
        for key in keys:
            task = self.tasks.pop(key, None)
            if task is not None and not task.status.settled:
                self._remove(task)

    # -- loaders ------------------------------------------------------------------------------------------

    def join(self, loader: str, *, now: float) -> None:
        """A loader is there. Each invocation needs a name of its own; joining twice is harmless."""
        mirror = self.mirrors.setdefault(loader, LoaderState(loader=loader, heard_at=now, asked_at=now))
        mirror.heard_at = now

    def heartbeat(self, loader: str, *, now: float) -> bool:
        """A loader is alive. False: it had been given up and has to join again."""
        mirror = self.mirrors.get(loader)
        if mirror is not None:
            mirror.heard_at = now
        return mirror is not None

    def ask(self, loader: str, report: LoaderReport, *, now: float) -> LoaderReply:
        """A loader brings results and asks for tasks (algorithm 3.4).

        A request that was seen before gets the queue of then once more, and its failures are not counted again.
        """
        accepted = tuple(key for key in report.done if self._accept(key))
        mirror = self.mirrors.get(loader)
        if mirror is None:
            return LoaderReply(request=report.request, accepted=accepted, rejoin=True)
        mirror.heard_at = now
        if report.request <= mirror.request:
            live = tuple(key for key in mirror.committed if self._live(key))
            return LoaderReply(request=report.request, tasks=live, accepted=accepted, hold=mirror.holding)
        mirror.request, mirror.asked_at = report.request, now
        verdicts = [self._failed(key, mirror, reason) for key, reason in report.failed.items()]
        left = [key for key in mirror.committed if key not in report.failed and key not in report.done]
        mirror.in_hand = {*left} if report.running is None else {*left, report.running}
        return self._fill(mirror, left, now, accepted=accepted, verdicts=tuple(v for v in verdicts if v))

    def hungry(self) -> tuple[str, ...]:
        """Loaders whose request is held back. After any event, `deal` to them until one gets nothing."""
        return tuple(mirror.loader for mirror in self.mirrors.values() if mirror.holding)

    def deal(self, loader: str, *, now: float) -> LoaderReply:
        """The late answer to a request that is being held. Holds on where there is still nothing to do."""
        mirror = self.mirrors[loader]
        if mirror.holding:
            mirror.asked_at = now
        return self._fill(mirror, list(mirror.committed), now)

    def leave(self, loader: str) -> None:
        """A loader ended in good order: its tasks go back, and nothing is held against them."""
        mirror = self.mirrors.pop(loader, None)
        if mirror is not None:
            self._give_back(mirror)

    def lose(self, loader: str) -> tuple[TaskFailure, ...]:
        """A loader died. What it had in hand is suspected; where that was one suspect alone, it is guilty."""
        mirror = self.mirrors.pop(loader, None)
        if mirror is None:
            return ()
        self._give_back(mirror)
        verdicts = []
        for task in filter(None, map(self._live, mirror.in_hand)):
            if task.suspect and len(mirror.in_hand) == 1:
                verdicts.append(self._blame(task, f"loader {loader} was lost while it loaded this and nothing else"))
            task.suspect = True
        return tuple(verdict for verdict in verdicts if verdict)

    def tick(self, *, now: float) -> Losses:
        """Gives up the loaders that are silent beyond their lease, or stuck."""
        lost = tuple(loader for loader, mirror in self.mirrors.items() if now > self._deadline(mirror))
        return Losses(loaders=lost, verdicts=tuple(verdict for loader in lost for verdict in self.lose(loader)))

    def deadline(self) -> float | None:
        """After when `tick` has something to do if nothing else happens. None: never."""
        return min(map(self._deadline, self.mirrors.values()), default=None)

    def _deadline(self, mirror: LoaderState) -> float:
        lease = mirror.heard_at + self.options.lease_s
        return min(lease, mirror.asked_at + self.options.stuck_s) if mirror.in_hand else lease

    # -- a loader's queue ---------------------------------------------------------------------------------

    def _fill(
        self,
        mirror: LoaderState,
        left: Sequence[Key],
        now: float,
        *,
        accepted: tuple[Key, ...] = (),
        verdicts: tuple[TaskFailure, ...] = (),
    ) -> LoaderReply:
        """Algorithms 3.5 and 3.6. `left`: what the loader was told and has not reported."""
        own = [task for key in left if (task := self._live(key)) and task.owner == mirror.loader]
        own += mirror.uncommitted.values()
        suspects = sorted((task for task in own if task.suspect), key=rank)
        window = sorted((task for task in own if not task.suspect), key=rank)
        if not suspects:
            suspects = self._draw(window)
        if not suspects and len(window) < self.options.batch and not self.ready:
            for task in self._steal(mirror, len(window), now):
                if task.suspect:
                    suspects = [task]
                else:
                    insort(window, task, key=rank)
        if not suspects:
            size = self.options.window
            self._commit(mirror, window[:size], window[size:])
        elif mirror.in_hand <= {suspects[0].key}:
            self._commit(mirror, suspects[:1], suspects[1:] + window)
        else:  # it ends what it has, and gets nothing else before the suspect
            going_on = [task for task in window if task.key in mirror.in_hand]
            self._commit(mirror, going_on, suspects + [task for task in window if task.key not in mirror.in_hand])
        mirror.holding = not mirror.in_hand
        return LoaderReply(
            request=mirror.request,
            tasks=tuple(mirror.committed),
            accepted=accepted,
            verdicts=verdicts,
            hold=mirror.holding,
        )

    def _draw(self, window: list[Task]) -> list[Task]:
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

    def _steal(self, thief: LoaderState, have: int, now: float) -> list[Task]:
        """What to take from one other mirror: a silent loader's first, else that of which most can be spared."""
        victims = [mirror for mirror in self.mirrors.values() if mirror is not thief and mirror.load]
        for victim in sorted(victims, key=lambda m: (not self._silent(m, now), -m.load)):
            told = [task for key in victim.committed if (task := self._live(key)) and task.owner == victim.loader]
            aside = list(victim.uncommitted.values())
            if not thief.in_hand and not have and (suspects := [task for task in aside if task.suspect]):
                return suspects[:1]
            silent = self._silent(victim, now)
            most = self.options.window - have if silent else (victim.load - have) // 2
            tail_first = [*reversed(aside), *reversed(told if silent else told[1:])]
            spare = [task for task in tail_first if not task.suspect and self._may_copy(task, thief)]
            if most > 0 and spare:
                return sorted(spare, key=lambda task: not task.urgent)[:most]
        return []

    def _may_copy(self, task: Task, thief: LoaderState) -> bool:
        return len(task.holders - {thief.loader}) < self.options.copies

    def _silent(self, mirror: LoaderState, now: float) -> bool:
        return now - mirror.asked_at >= self.options.patience_s

    def _commit(self, mirror: LoaderState, window: Sequence[Task], aside: Sequence[Task]) -> None:
        """The loader is to have `window`, and `aside` is kept for it."""
        for task in filter(None, map(self.tasks.get, mirror.committed)):
            task.holders.discard(mirror.loader)
        for task in (*window, *aside):
            self.ready.discard(task)
            self._own(task, mirror)
        mirror.uncommitted = {task.key: task for task in aside}
        mirror.committed = [task.key for task in window]
        mirror.in_hand.update(mirror.committed)
        for task in window:
            task.status = TaskStatus.LOADING
            task.holders.add(mirror.loader)
        for task in aside:
            task.status = TaskStatus.READY

    # -- single tasks -------------------------------------------------------------------------------------

    def _live(self, key: Key) -> Task | None:
        """The task, unless it is settled or forgotten."""
        task = self.tasks.get(key)
        return None if task is None or task.status.settled else task

    def _own(self, task: Task, mirror: LoaderState | None) -> None:
        """Moves a task to a mirror, or out of all of them."""
        if task.owner is not None and (old := self.mirrors.get(task.owner)) is not None:
            old.load -= 1
            old.uncommitted.pop(task.key, None)
        task.owner = None if mirror is None else mirror.loader
        if mirror is not None:
            mirror.load += 1

    def _requeue(self, task: Task) -> None:
        self._own(task, None)
        task.status = TaskStatus.READY
        self.ready.push(task)

    def _remove(self, task: Task) -> None:
        self.ready.discard(task)
        self._own(task, None)
        self.unsettled -= 1

    def _accept(self, key: Key) -> bool:
        task = self._live(key)
        if task is not None:
            self._remove(task)
            task.status = TaskStatus.DONE
        return task is not None

    def _failed(self, key: Key, mirror: LoaderState, reason: str) -> TaskFailure | None:
        task = self._live(key)
        if task is None or key not in mirror.in_hand:
            return None
        verdict = self._blame(task, reason)
        if verdict is None and task.status is TaskStatus.LOADING and task.owner == mirror.loader:
            self._requeue(task)
        return verdict

    def _blame(self, task: Task, reason: str) -> TaskFailure | None:
        """Counts a failure that is certainly the task's own; a verdict if it was the last."""
        task.attempts += 1
        if task.attempts <= task.policy.retries:
            return None
        self._remove(task)
        task.status = TaskStatus.SKIPPED if task.policy.then == "skip" else TaskStatus.FAILED
        self.skipped += task.status is TaskStatus.SKIPPED
        return TaskFailure(key=task.key, status=task.status, reason=reason)

    def _give_back(self, mirror: LoaderState) -> None:
        """All that a loader owned returns to the global queue; the loader is gone from `mirrors` already."""
        for task in [*filter(None, map(self._live, mirror.committed)), *mirror.uncommitted.values()]:
            task.holders.discard(mirror.loader)
            if task.owner == mirror.loader:
                self._requeue(task)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. O(tasks × loaders): for tests, and for suspicion."""
        places: dict[Key, list[str]] = {key: [] for key in self.tasks}
        for mirror in self.mirrors.values():
            told = [t for key in mirror.committed if (t := self._live(key)) and t.owner == mirror.loader]
            assert len(mirror.committed) == len(set(mirror.committed)) <= self.options.window, "queue longer than K"
            assert mirror.load == len(told) + len(mirror.uncommitted), "load counts what is owned"
            assert mirror.in_hand.issuperset(mirror.committed), "what was told may be in hand"
            assert not (mirror.holding and mirror.in_hand), "only the idle wait"
            assert all(task.status is TaskStatus.LOADING for task in told)
            assert all(task.status is TaskStatus.READY for task in mirror.uncommitted.values())
            for task in (*told, *mirror.uncommitted.values()):
                places[task.key].append(mirror.loader)
        for key, task in self.tasks.items():
            assert places[key] == ([] if task.owner is None else [task.owner]), f"{key} is in {places[key]}"
            assert (task in self.ready) == (task.owner is None and not task.status.settled), f"{key} is misplaced"
            assert (task.attempts > task.policy.retries) == (task.status in (TaskStatus.FAILED, TaskStatus.SKIPPED))
            if not task.status.settled:
                assert task.holders <= {m.loader for m in self.mirrors.values() if key in m.committed}
                assert len(task.holders) <= self.options.copies, f"{key} is held by {task.holders}"
        live = sum(not task.status.settled for task in self.tasks.values())
        assert self.unsettled == live == len(self.ready) + sum(mirror.load for mirror in self.mirrors.values())
