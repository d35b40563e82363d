"""Injection of faults at given coordinates, inside the function that they concern."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

from ephemeron.communication.direct.cuts import Cuts
from ephemeron.events import Phase
from ephemeron.functions.context import Compute
from ephemeron.training.job import Fault

T = TypeVar("T")
_ITERATION = re.compile(r"/(g\d+(\.\d+)?|x)/\d+\.")
"""Keys of the objects of an iteration."""


class FaultInjector:
    """The faults that concern one attempt of one rank. Each kill, each drop and each cut happens once.

    A kill fires when the first operation of its phase has ended: one of several shards is stored, or has been read. That is
    the middle of the phase, after which recovery is hardest.
    """

    def __init__(self, *, rank: int, attempt: int, die: Callable[[], NoReturn], fired: Callable[[Fault, int], None]) -> None:
        self._rank, self.attempt = rank, attempt
        self._kills: list[Fault] = []
        self._drops: list[Fault] = []
        self._cuts: list[Fault] = []
        self.cuts = Cuts()
        """Ranks that this one cannot reach."""
        self.delay = 1.0
        """Factor by which computation is slowed down."""
        self.longer_s = 0.0
        """Seconds by which each computation over samples takes longer, besides."""
        self._die, self._fired = die, fired
        self.iteration = -1

    def arm(self, faults: Iterable[Fault]) -> None:
        """Injects these faults from now on, as far as they concern this attempt."""
        mine = [f for f in faults if f.rank == self._rank]
        now = [f for f in mine if f.attempt == self.attempt]
        self._kills = [f for f in now if f.kind == "kill"]
        self._drops = [f for f in now if f.kind == "drop-put"]
        self._cuts = [f for f in now if f.kind == "cut"]
        self.delay = max((f.factor for f in mine if f.kind == "delay"), default=1.0)
        self.longer_s = max((f.seconds for f in mine if f.kind == "delay"), default=0.0)

    @property
    def cuts_connections(self) -> bool:
        """Whether this attempt is to lose connections."""
        return bool(self._cuts)

    def ended(self, phase: Phase) -> None:
        """Takes in the end of an operation, and cuts connections or kills the function if a fault says so.

        Connections are cut when the computation of an iteration has ended.
        """
        for fault in [f for f in self._cuts if phase == "compute" and f.iteration == self.iteration]:
            self._cuts.remove(fault)
            self._fired(fault, self.iteration)
            self.cuts.cut(fault.to, silent=bool(fault.silent), seconds=fault.seconds)
        for fault in self._kills:
            first = phase == "load" and self.iteration < 0  # of a later generation, its first iteration is known
            if fault.phase == phase and (fault.iteration == self.iteration or first):
                self._kills.remove(fault)
                self._fired(fault, self.iteration)
                self._die()

    def drops(self, key: str) -> bool:
        """Whether to lose the put of this key: the first one of its iteration."""
        for fault in self._drops:
            if _ITERATION.search(key) and f"/{fault.iteration}." in key:
                self._drops.remove(fault)
                self._fired(fault, fault.iteration)
                return True
        return False


class Delayed:
    """Computation slowed down: a straggler."""

    def __init__(self, inner: Compute, factor: float, longer_s: float = 0.0) -> None:
        self._inner, self._factor, self._longer_s = inner, factor, longer_s

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        result = await self._inner(work, samples=samples, batches=batches)
        longer_s = self._longer_s if samples > 0 else 0.0
        await asyncio.sleep((self._factor - 1) * (loop.time() - began) + longer_s)
        return result
