"""Exchange among the groups of a run: each group of functions trains by itself, and at agreed iterations takes in what others have learned.

`GroupExchange` is the port that the training loop calls. Its implementation, one group being one region, is `ephemeron.geo.exchange`, a
product above training, which is found by name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from ephemeron.training.collectives import Collective
from ephemeron.training.worker.lifecycle import InvocationLifecycle

_IMPLEMENTATION = "ephemeron.geo.exchange"


class GroupExchange(ABC):
    """How the groups of a run agree on parameters. Every rank of every group calls it before the same iterations.

    Ranks of a group that repeat an exchange get the same vector.
    """

    @abstractmethod
    def is_due(self, iteration: int) -> bool:
        """Whether this group exchanges before this iteration, with all versions before it applied."""

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
        """


@asynccontextmanager
async def group_exchange(lifecycle: InvocationLifecycle, collective: Collective) -> AsyncIterator[GroupExchange | None]:
    """The exchange with other groups, as the run's specification says; None: there are none.

    Args:
        lifecycle: of the invocation.
        collective: of its group.
    """
    if lifecycle.spec.group is None:
        yield None
        return
    async with importlib.import_module(_IMPLEMENTATION).open_exchange(lifecycle, collective) as exchange:
        yield exchange
