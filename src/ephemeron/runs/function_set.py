"""Which functions of a run are started, again or not at all: ends in, actions out, no I/O. One rule for everything that keeps functions running.

A function fills a slot. Slots are fixed (`keep`): a rank, a shard, a share, each of which needs a function until it is done; or they are
opened for as many functions as there is work for (`want`), and closed when their function ends. An end without progress counts, whatever
it was: killed, failed, idle, or handed over with nothing done. `MOST_LOSSES` of them are borne in a row, so the number of functions that
are paid for is bounded by what they achieve, also where nobody knows why they achieve nothing. A refusal for lack of concurrency costs
nothing: the slot is filled again after `AGAIN_S`, and given up after `MOST_REFUSALS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ephemeron.errors import InvocationRefused

MOST_LOSSES = 8
"""Functions that may end in a row without progress."""
LOSS_SHARE = 0.1
"""The same where many share a budget, as a share of those that are wanted: of a thousand, nine may die before the first one has achieved something."""
AGAIN_S = 1.0
"""Pause after a refusal for lack of concurrency."""
MOST_REFUSALS = 60
"""Such refusals in a row after which a fixed slot is given up; work that fewer functions can do waits for ever."""

How: TypeAlias = Literal["done", "handed over", "unfinished", "lost", "failed", "refused", "cancelled"]
"""How a function has ended: `done`: its slot needs none any more; `handed over`: it has started the next one; `unfinished`: its time is
up, another one has to go on; `lost`: killed, or it has found nothing to do; `failed`: another one would fail likewise; `refused`: it did
not start, for lack of concurrency; `cancelled`: by us."""


@dataclass(frozen=True, slots=True)
class Start:
    """A function is to be started."""

    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Fail:
    """A slot cannot be filled."""

    slot: int
    cause: str
    losses: int
    """In a row; 0: it failed at once."""

    def __str__(self) -> str:
        return f"lost {self.losses} times in a row without progress: {self.cause}" if self.losses else self.cause


Action: TypeAlias = Start | Fail


@dataclass(slots=True)
class LossBudget:
    """Ends without progress, in a row."""

    most: int = MOST_LOSSES
    """So many are borne."""
    spent: int = 0
    last: str = ""
    """What the last one ended with."""
    _progress: float = 0.0

    def progressed(self, progress: float) -> None:
        """Takes note of what is done so far, a number that grows: the row ends where it has grown."""
        if progress > self._progress:
            self._progress, self.spent, self.last = progress, 0, ""

    @property
    def is_spent(self) -> bool:
        """Whether there was one too many."""
        return self.spent > self.most

    def ended(self, how: str) -> bool:
        """Counts a function that has ended without progress; whether there was one too many."""
        self.spent, self.last = self.spent + 1, how
        return self.is_spent


@dataclass(slots=True)
class _Slot:
    budget: LossBudget
    attempt: int = 0
    """Of the function that runs, or is to be started next."""
    is_fixed: bool = True
    is_running: bool = False
    refusals: int = 0
    """In a row."""
    due: float = 0.0
    """Time from which on a function may be started."""


@dataclass(slots=True)
class FunctionSet:
    """The functions of a run.

    Args:
        is_shared: one budget of losses for all slots, and one pause after a refusal; else each slot has its own.
        most_losses: in a row, of each budget; of one that is shared by many, at least `LOSS_SHARE` of the most that were wanted.
    """

    is_shared: bool = False
    most_losses: int = MOST_LOSSES
    _slots: dict[int, _Slot] = field(default_factory=dict)
    _shared: LossBudget = field(default_factory=LossBudget)
    _wanted: int = 0
    _opened: int = 0
    _not_before: float = 0.0
    _failed: list[Fail] = field(default_factory=list)
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        self._shared.most = self.most_losses

    def _budget(self) -> LossBudget:
        """Of a new slot."""
        return self._shared if self.is_shared else LossBudget(most=self.most_losses)

    def keep(self, slot: int, attempt: int = 0, *, is_running: bool = False) -> None:
        """A function is needed in a slot until it is done.

        Args:
            slot: its number.
            attempt: of its first function.
            is_running: it was started already.
        """
        self._slots[slot] = _Slot(self._budget(), attempt=attempt, is_running=is_running)

    def adopt(self, slot: int) -> None:
        """A function runs that another driver has started, in a slot that was opened for work."""
        self._slots[slot] = _Slot(self._budget(), is_fixed=False, is_running=True)
        self._opened = max(self._opened, slot + 1)

    def want(self, count: int) -> None:
        """So many functions are needed, in any slots."""
        self._wanted = count
        self._shared.most = max(self._shared.most, int(LOSS_SHARE * count))

    def stop(self) -> None:
        """Nothing is started any more."""
        self._is_stopped = True

    def progressed(self, progress: float, slot: int | None = None) -> None:
        """Takes note of what is done so far, a number that grows, in a slot or in all together."""
        if slot is None:
            self._shared.progressed(progress)
        elif slot in self._slots:
            self._slots[slot].budget.progressed(progress)

    def ended(self, slot: int, how: How, said: str = "", *, now: float = 0.0, attempt: int | None = None) -> None:
        """A function has ended, or was not started.

        Args:
            slot: that it filled.
            how: see `How`.
            said: why, in words.
            now: time of the caller's clock, which `decide` is called with.
            attempt: of the function; None: the one that was started last.
        """
        if (it := self._slots.get(slot)) is None:
            return  # of a slot that is done
        if attempt is not None and attempt < it.attempt and it.is_running:
            return  # a later one has taken its place
        it.is_running, it.refusals = how == "handed over", it.refusals + 1 if how == "refused" else 0
        following = max(it.attempt, (it.attempt if attempt is None else attempt) + 1)
        match how:
            case "done" | "cancelled":
                del self._slots[slot]
                return
            case "handed over":
                it.attempt = following
                return
            case "failed":
                self._fail(slot, said, 0)
            case "refused":
                if it.is_fixed and it.refusals > MOST_REFUSALS:
                    self._fail(slot, said, 0)
                it.due = now + AGAIN_S
                if self.is_shared:
                    self._not_before = it.due
            case "lost" | "unfinished":
                it.attempt = following
                if it.budget.ended(said):
                    self._fail(slot, said, it.budget.spent)
        if not it.is_fixed:  # another one is opened, if there is work
            self._slots.pop(slot, None)

    def decide(self, now: float) -> list[Action]:
        """What is to be done now. Each action is given once, and is taken to be carried out."""
        actions: list[Action] = [*self._failed]
        self._failed.clear()
        if self._is_stopped or now < self._not_before:
            return actions
        for _ in range(self._wanted - sum(not it.is_fixed for it in self._slots.values())):
            self._slots[self._opened] = _Slot(self._budget(), is_fixed=False)
            self._opened += 1
        for number, it in self._slots.items():
            if not it.is_running and it.due <= now:
                it.is_running = True
                actions.append(Start(number, it.attempt))
        return actions

    @property
    def due(self) -> float | None:
        """Time at which `decide` may have something to do though nothing has ended; None: there is none."""
        waiting = [max(it.due, self._not_before) for it in self._slots.values() if not it.is_running]
        return None if self._is_stopped else min(waiting, default=None)

    @property
    def running(self) -> frozenset[int]:
        """Slots whose function runs, or is being started."""
        return frozenset(number for number, it in self._slots.items() if it.is_running)

    @property
    def open(self) -> frozenset[int]:
        """Slots that need a function."""
        return frozenset(self._slots)

    def losses(self, slot: int) -> int:
        """Functions of a slot that have ended in a row without progress."""
        return self._slots[slot].budget.spent if slot in self._slots else 0

    def validate(self) -> None:
        """Checks what always holds.

        Raises:
            AssertionError: it does not.
        """
        assert all(it.budget.spent <= it.budget.most for it in self._slots.values() if it.is_fixed), "a slot beyond its budget is closed"
        assert not self.is_shared or all(it.budget is self._shared for it in self._slots.values())
        assert self._opened > max((n for n, it in self._slots.items() if not it.is_fixed), default=-1), "a slot is opened once"

    def _fail(self, slot: int, cause: str, losses: int) -> None:
        if not self._is_stopped:
            self._failed.append(Fail(slot, cause, losses))
        self._slots.pop(slot, None)
        self._is_stopped = self._is_stopped or self.is_shared


def end_of(error: BaseException) -> How:
    """What a refused or failed start is: `refused` for lack of concurrency, else `failed`."""
    is_full = isinstance(error, InvocationRefused) and (error.binding == "concurrency" or "concurrency" in str(error))
    return "refused" if is_full else "failed"
