"""Pieces of a rank's contribution that are sent while the rest of it is computed: DDP's buckets, on direct channels.

The compute thread says which pieces are complete; they are sent on the event loop. So sending, and what other ranks do with the
pieces, goes on beside the backward pass. The bits, and the order of summation, are those of a contribution that is sent as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ephemeron.training.collectives import Collective
from ephemeron.training.worker.non_finite import all_finite

OVERLAP_VARIABLE = "EPHEMERON_DIRECT_OVERLAP"
"""0: contributions are sent as a whole, after the backward pass."""


class EarlyPieces(Protocol):
    """Receiver of the pieces of one contribution, used by the compute thread."""

    ranges: Sequence[tuple[int, int]]
    """Elements `start:stop` of the pieces that it takes."""

    def take(self, number: int, part: np.ndarray, weight: float) -> bool:
        """Takes a piece, which does not change any more; whether it will be sent.

        Args:
            number: of the piece, in `ranges`.
            part: its elements, multiplied by the weight.
            weight: of the whole contribution.
        """


@runtime_checkable
class GivesEarly(Protocol):
    """Trainer that can give pieces of a contribution before it has computed the rest."""

    def give_early(self, to: EarlyPieces | None) -> None:
        """From now on, `compute` gives pieces to this receiver; None: to none."""


class EarlyContribution:
    """Early pieces of one iteration's contribution. See `EarlyPieces`.

    Args:
        collective: that sends them.
        iteration: of the contribution.
        flags: for all ranks, asked when the first piece is sent.
        checked: whether pieces with NaN or infinite elements are held back, with all that follow.
    """

    def __init__(self, collective: Collective, iteration: int, flags: Callable[[], int], *, checked: bool) -> None:
        self.ranges = collective.early
        self.taken: list[tuple[int, int]] = []
        """Ranges of the pieces that were taken."""
        self.flags: int | None = None
        """Flags of the contribution, once a piece was sent."""
        self._collective, self._iteration, self._ask, self._checked = collective, iteration, flags, checked
        self._loop = asyncio.get_running_loop()
        self._open = True

    def take(self, number: int, part: np.ndarray, weight: float) -> bool:
        self._open = self._open and (not self._checked or all_finite(part))
        if self._open:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the invocation over
                self._loop.call_soon_threadsafe(self._send, number, part, weight)
                self.taken.append(self.ranges[number])
        return self._open

    def _send(self, number: int, part: np.ndarray, weight: float) -> None:
        if self._open:
            if self.flags is None:
                self.flags = self._ask()
            self._collective.submit_piece(self._iteration, number, part, weight, self.flags)

    def close(self) -> None:
        """Nothing is taken or sent any more."""
        self._open = False


def overlaps() -> bool:
    """Whether this function sends pieces early."""
    return os.environ.get(OVERLAP_VARIABLE, "1") != "0"
