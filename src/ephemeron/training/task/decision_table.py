"""Choices of a schedule as a table: by loss, share of the budget that is left, and functions of the next epoch.

A dynamic programme that knows the budget (`ephemeron.tuning.siren.budget_programme`) makes it; a function looks choices up, with NumPy only.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.typed import AtLeast, Count, Positive, Typed
from ephemeron.errors import JobError

Indices = NDArray[np.uint8]
LARGEST = 256
"""Choices that an entry can tell apart."""


@dataclass(frozen=True, kw_only=True)
class DecisionTable(Typed):
    """A choice for each state; losses are told apart on a logarithmic scale, shares of the budget on a linear one from 0 to 1."""

    lowest_loss: Positive
    highest_loss: Positive
    losses: Annotated[int, AtLeast(2)]
    """Entries between both, inclusive."""
    budgets: Annotated[int, AtLeast(2)]
    """Entries between 0 and 1, inclusive."""
    choices: tuple[tuple[Count, Count], ...]
    """Number and memory in MB of functions."""
    first: tuple[Count, Count]
    """The choice before the first epoch."""
    packed: str
    """Indices of choices by loss, budget and functions of the next epoch, in this order: bytes, deflated, in base 64."""

    @classmethod
    def of(
        cls, table: Indices, choices: list[tuple[int, int]], *, first: tuple[int, int], lowest_loss: float, highest_loss: float
    ) -> DecisionTable:
        """A table of indices.

        Args:
            table: indices [loss, budget, functions of the next epoch].
            choices: number and memory of functions, at most `LARGEST`.
            first: the choice before the first epoch.
            lowest_loss, highest_loss: of the first axis.
        """
        packed = base64.b64encode(zlib.compress(np.ascontiguousarray(table).tobytes(), 9)).decode()
        return cls(
            lowest_loss=lowest_loss,
            highest_loss=highest_loss,
            losses=table.shape[0],
            budgets=table.shape[1],
            choices=tuple(choices),
            first=first,
            packed=packed,
        )

    @cached_property
    def table(self) -> Indices:
        """Indices [loss, budget, functions of the next epoch].

        Raises:
            JobError: they are damaged.
        """
        shape = (self.losses, self.budgets, len(self.choices))
        try:
            found = np.frombuffer(zlib.decompress(base64.b64decode(self.packed, validate=True)), np.uint8)
        except (binascii.Error, zlib.error, ValueError):
            found = np.zeros(0, np.uint8)
        if found.size != math.prod(shape) or not found.size or int(found.max()) >= len(self.choices):
            raise JobError("the choices of a learned schedule are damaged", remedy="train it again: --schedule learned")
        return found.reshape(shape)

    @cached_property
    def _logs(self) -> NDArray[np.float64]:
        return np.asarray(np.log(np.asarray(self.choices, dtype=float)))

    def choose(self, loss: float, budget_left: float, workers: int, memory_mb: int) -> tuple[int, int]:
        """Number and memory of functions of the epoch after the next one.

        Args:
            loss: after the last epoch.
            budget_left: share of the budget; rounded down.
            workers, memory_mb: of the next epoch; 0: the run has not begun.
        """
        if not workers:
            return self.first
        span = math.log(self.highest_loss / self.lowest_loss)
        place = math.log(max(loss, self.lowest_loss) / self.lowest_loss) / span if math.isfinite(loss) else 1.0
        row = min(self.losses - 1, round(place * (self.losses - 1)))
        column = math.floor(min(1.0, max(0.0, budget_left)) * (self.budgets - 1))
        now = int(np.argmin(np.abs(self._logs - np.log([workers, memory_mb])).sum(axis=1)))
        return self.choices[int(self.table[row, column, now])]
