"""Exchange among the groups of a run: each group of functions trains by itself, and at agreed iterations takes in what others have learned.

`GroupExchange` is the port that the training loop calls. Its implementation, one group being one region, is that of the kind `regions`, a
product above training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import numpy as np

from ephemeron.runs.kinds import load_kind
from ephemeron.training.collectives import Collective
from ephemeron.training.worker.lifecycle import InvocationLifecycle


class GroupEntry(NamedTuple):
    """How a group has joined a run that had begun."""

    iteration: int
    """Its first one."""
    vector: np.ndarray
    """Parameters with which it begins, 1-D."""
    connection: Any = None
    """With other groups; None: this rank has opened none."""


class Unneeded(Exception):
    """This rank is not needed until the last exchange is over, and that may take long: it may end, and is started again."""


class GroupExchange(ABC):
    """How the groups of a run agree on parameters. Every rank of a group calls it before the iterations at which its group's parameters change.

    Ranks of a group that repeat an exchange get the same vector.
    """

    @abstractmethod
    def is_due(self, iteration: int) -> bool:
        """Whether this rank has a part in an exchange before this iteration, with all versions before it applied."""

    @abstractmethod
    async def begin(self, iteration: int, own: np.ndarray, *, exchanged: bool) -> None:
        """Called once, before the first iteration of an invocation.

        Args:
            iteration: that one.
            own: this group's parameters, 1-D, alike on all its ranks.
            exchanged: whether these have what is exchanged before that iteration, if anything is.
        """

    @abstractmethod
    async def exchange(self, iteration: int, own: np.ndarray, *, durable: int) -> np.ndarray:
        """The vector that the group goes on with.

        Args:
            iteration: a due one.
            own: this group's parameters, 1-D, alike on all its ranks.
            durable: number of iterations that no rank of this group would repeat; for rank 0.

        Raises:
            InvocationExit: this invocation ends before the exchange does.
            Unneeded: see there; at most once.
        """

    async def settle(self) -> None:
        """Waits until all that a replacement of this rank needs of former exchanges is stored; before its state is."""
        return

    async def release(self) -> bool:
        """Says that this rank ends until the last exchange is over; returns whether it need not, because it is over already."""
        return True


async def entered_at(lifecycle: InvocationLifecycle) -> int | None:
    """First iteration of a group that joins while others train; None: it has not joined yet, or is no such group."""
    if lifecycle.spec.group is None or not lifecycle.spec.group.joins:
        return None
    found: int | None = await load_kind("regions").exchange.entered_at(lifecycle)
    return found


async def enter(lifecycle: InvocationLifecycle, stack: AsyncExitStack, own: np.ndarray) -> GroupEntry:
    """Joins a run that has begun; of a group that has done so, how.

    Args:
        lifecycle: of the invocation.
        stack: closes the connection with other groups.
        own: parameters of the right size, 1-D.

    Raises:
        InvocationExit: the run was stopped, or the time of this invocation is over.
    """
    found: GroupEntry = await load_kind("regions").exchange.enter(lifecycle, stack, own)
    return found


@asynccontextmanager
async def group_exchange(
    lifecycle: InvocationLifecycle, collective: Collective, entry: GroupEntry | None = None
) -> AsyncIterator[GroupExchange | None]:
    """The exchange with other groups, as the run's specification says; None: there are none.

    Args:
        lifecycle: of the invocation.
        collective: of its group.
        entry: how this invocation has joined; None: it has not.
    """
    if lifecycle.spec.group is None:
        yield None
        return
    async with load_kind("regions").exchange.open_exchange(lifecycle, collective, entry) as exchange:
        yield exchange
