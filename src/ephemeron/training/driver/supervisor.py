"""Supervisor of a run: events in, actions out, no I/O.

The supervisor replaces lost functions sooner than the workers would, whose waits have to time out first. Only the supervisor
can declare a run failed, because only the platform knows how a function ended.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from ephemeron.events import Continued, Ended, Evaluated, Event, GenerationStarted, Invoked, LimitReached, Loaded, Progress
from ephemeron.runs.function_set import LossBudget
from ephemeron.training.driver.failures import in_short
from ephemeron.training.worker.recovery.fencing import attempt_text, generation_of


@dataclass(frozen=True, slots=True)
class Replace:
    """Launch another attempt of a rank, unless it is claimed already."""

    rank: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The result is in the channel."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """All ranks have stopped at a checkpoint, or all functions were cancelled."""

    cause: str = ""
    """The limit that is reached; empty: none is."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The run cannot go on."""

    cause: str


Action: TypeAlias = Replace | Finish | Stopped | Fail


@dataclass(slots=True)
class RunSupervisor:
    """State of one run, derived from its events."""

    world: int
    """Functions of the current generation."""
    evaluates_at: Callable[[int], bool] = lambda iteration: False
    """Whether the model is evaluated before an iteration."""
    generation: int = 0
    """The current generation. Functions of the next one may be running already, and wait for its beginning."""
    latest: dict[int, int] = field(default_factory=dict)
    """By rank: the newest attempt invoked."""
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Invocations that have not ended: id to (rank, attempt)."""
    reached: dict[int, int] = field(default_factory=dict)
    """By rank: the latest iteration that its newest attempt has finished."""
    stopped: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    limit: str = ""
    """The limit that ends the run, in words."""
    _waiting: dict[int, int] = field(default_factory=dict)
    """By rank: an attempt that its predecessor has invoked and not handed off to."""
    _budgets: defaultdict[int, LossBudget] = field(default_factory=lambda: defaultdict(LossBudget))
    _next: dict[int, int] = field(default_factory=dict)
    """By rank: the iteration that its newest function computes."""
    _evaluated: dict[int, int] = field(default_factory=dict)
    """By rank: the iteration before which it has evaluated."""

    def feed(self, event: Event) -> list[Action]:
        """Processes one event; returns the actions that it requires."""
        match event:
            case GenerationStarted() if event.generation > self.generation:
                self.generation, self.world = event.generation, event.workers
                self.stopped = {rank for rank in self.stopped if rank < self.world}
            case Continued():
                self.running[event.invocation] = (event.rank, event.attempt)
                self.latest[event.rank] = max(event.attempt, self.latest.get(event.rank, 0))
            case Invoked():
                self.running[event.invocation] = (event.rank, event.attempt)
                if event.attempt > self.latest.get(event.rank, -1):
                    self.reached.pop(event.rank, None)
                self.latest[event.rank] = max(event.attempt, self.latest.get(event.rank, 0))
                if event.reason == "relay":
                    self._waiting[event.rank] = event.attempt
                if event.reason == "resume":
                    self.stopped.discard(event.rank)
                    self._budgets.pop(event.rank, None)
            case Progress() | Loaded():
                if event.attempt == self.latest.get(event.rank):
                    self.reached[event.rank] = event.iteration - isinstance(event, Loaded)
                if event.attempt >= self._waiting.get(event.rank, event.attempt + 1):
                    del self._waiting[event.rank]
                self._next[event.rank] = event.iteration + isinstance(event, Progress)
                self._budgets[event.rank].progressed(event.iteration + 1)
            case LimitReached():
                self.limit = self.limit or event.text
            case Evaluated():
                self._evaluated[event.rank] = event.iteration
            case Ended():
                rank, attempt = self.running.pop(event.invocation, (event.rank, event.attempt))
                return self._ended(dataclasses.replace(event, rank=rank, attempt=attempt))
        return []

    def _ended(self, event: Ended) -> list[Action]:
        rank = event.rank
        if event.status == "ok":
            if event.outcome == "finished":
                self.finished.add(rank)
                return [Finish()] if rank == 0 else []
            if event.outcome == "stopped":
                self.stopped.add(rank)
                over = {r for r in self.stopped | self.finished if r < self.world}
                return [Stopped(self.limit)] if len(over) == self.world else []
            return []  # relayed, duplicate, fenced or left: other invocations carry on
        if event.status == "cancelled":  # this client, another one, or the platform has ended the run
            return [] if self.running else [Stopped(self.limit)]
        generation = generation_of(event.attempt)
        if generation < self.generation or (generation == self.generation and rank >= self.world):
            return []  # the run needs it no more
        newest = self.latest.get(rank, 0)
        succeeded = event.attempt < newest and generation_of(newest) == generation
        if rank in self.finished or (succeeded and self._waiting.get(rank) != event.attempt + 1):
            return []
        if event.status == "error":
            return [Fail(f"rank {rank}, {self._place(event)}: {in_short(event.error)}")]
        if event.status == "out_of_memory":
            more = -(-event.memory_mb * 3 // 2 // 64) * 64
            return [
                Fail(
                    f"rank {rank}, attempt {attempt_text(event.attempt)}: out of memory: {event.error or 'the quota was exceeded'}; "
                    f"it had allocated {event.peak_memory_mb:.0f} MB and needed more, its quota is {event.memory_mb} MB: use a larger "
                    f"--memory-mb, such as {more}, or smaller batches"
                )
            ]
        actions = self._lost(event)
        # Without a hand-off the successor recovers by itself. It fails in the same way if no iteration fits its time.
        return [a for a in actions if not isinstance(a, Replace)] if succeeded else actions

    def _place(self, event: Ended) -> str:
        """The iteration that a rank had begun; its attempt if none is known."""
        return f"iteration {self._next[event.rank]}" if event.rank in self._next else f"attempt {attempt_text(event.attempt)}"

    def _lost(self, event: Ended) -> list[Action]:
        rank = event.rank
        budget = self._budgets[rank]
        exhausted = budget.ended(event.error or event.status)
        if event.status == "timed_out" and budget.spent > 2:
            at = self._next.get(rank, 0)
            evaluating = self.evaluates_at(at) and self._evaluated.get(rank) != at
            what = f"the evaluation before iteration {at} does not fit" if evaluating else "no iteration fits"
            smaller = "a smaller test_fraction, more functions" if evaluating else "smaller batches"
            return [
                Fail(f"rank {rank}: {what} the lifetime limit ({event.error}); use a longer --function-timeout-s, more memory or {smaller}")
            ]
        if exhausted:
            return [Fail(f"rank {rank}: lost {budget.spent} times without progress: {budget.last}")]
        return [Replace(rank, event.attempt + 1)]
