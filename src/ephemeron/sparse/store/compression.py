"""Fewer bytes for gradients: entries below a threshold wait, values lose digits, and what was not sent is added to the next push.

The difference between a gradient and what was sent of it is kept at the client (error feedback), so every part of it arrives
sooner or later; `push_residual` sends what is left. It is lost with the client. With optimisers other than SGD and Sum, a
late gradient has another effect than an early one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ephemeron.config.typed import NonNegative, Typed
from ephemeron.sparse.store.codec import VALUE_CODES, ValueCode, ValueType
from ephemeron.sparse.store.optimizers import Floats, Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression(Typed):
    """Compression of the gradients of a table."""

    threshold: NonNegative = 0.0
    """Rows are sent once the largest absolute value of their gradient, earlier remainders included, is at least this."""
    values: ValueType = "float32"
    """Type of the values that are sent. int8 has one factor for each push and shard."""

    @property
    def code(self) -> ValueCode:
        """Encoding of the values."""
        return VALUE_CODES[self.values]

    @property
    def lossy(self) -> bool:
        """Whether anything may remain unsent."""
        return self.threshold > 0 or self.values != "float32"


class Residual:
    """What is still to be sent of the gradients of a table.

    Memory is that of the table (float32[rows, width]), of which the system provides the pages that are used.
    """

    def __init__(self, rows: int, width: int, compression: Compression) -> None:
        self.compression = compression
        self._values = np.zeros((rows, width), np.float32)

    def select(self, rows: Indices, gradient: Floats) -> tuple[Indices, Floats]:
        """Rows to send now, and their values with what was left of earlier ones. They count as sent.

        Args:
            rows: distinct, ascending.
            gradient: float32[rows, width].
        """
        total = self._values[rows] + gradient
        if self.compression.threshold > 0:
            large = np.abs(total).max(axis=1) >= self.compression.threshold
            if not large.all():
                self._values[rows[~large]] = total[~large]
                rows, total = rows[large], total[large]
        self._values[rows] = 0
        return rows, total

    def keep_rest(self, rows: Indices, values: Floats, sent: Floats) -> None:
        """Keeps the difference between the values of rows and what the shard reads of them."""
        self._values[rows] = values - sent.reshape(values.shape)

    def drain(self) -> tuple[Indices, Floats]:
        """All that is left, which counts as sent."""
        rows = np.flatnonzero(np.any(self._values != 0, axis=1))
        values = self._values[rows]
        self._values[rows] = 0
        return rows, values
